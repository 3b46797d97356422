"""What the emulated device reports instead of hanging or computing nonsense, as a real one would."""


class FaultError(RuntimeError):
    """
    Base: the program uses the device wrongly.
    """


class DeadlockError(FaultError):
    """
    Streams wait for something that nobody will do.
    """


class StaleParameterError(FaultError):
    """
    A replay used the parameters of another step.
    """


class LostRecordError(FaultError):
    """
    A record of an event had no effect: the event was recorded already, or a reset erased it.
    """


class ClobberedError(FaultError):
    """
    The output of a graph was read after another graph of the memory pool had been replayed over it.
    """


class FreedInputError(FaultError):
    """
    A graph reads memory that its owner has given up since the capture.
    """
