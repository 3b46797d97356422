"""
Imported by a worker, by the name of its extension: tensor-parallel ranks then communicate through torch, as they
do where vLLM's kernels for shared memory are not built.
"""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


class NoSharedMemory:
    """
    Adds nothing to the worker.
    """
