"""Errors a user can meet. Each message names the thing, the rule, the value and the remedy."""


class DispatchError(Exception):
    """
    Base of all errors raised by this package.
    """


class ConfigError(DispatchError):
    """
    The configuration breaks a rule.
    """


class PlanError(DispatchError):
    """
    A capture plan cannot serve the engine it is meant for.
    """


class TraceError(DispatchError):
    """
    A request trace cannot be read: file, line, column and rule are in the message.
    """


class CaptureError(DispatchError):
    """
    A graph could not be captured; what it had taken has been released.
    """


class ReplayError(DispatchError):
    """
    A graph may not be replayed: its inputs lie elsewhere than at capture, or it was released.
    """


class AgreementError(DispatchError):
    """
    The ranks of an engine did not all vote.
    """
