"""Decides, every step, how a batch meets the captured graphs of an LLM server."""

from .batch import Batch, BatchKind, ScheduledRequest
from .capture_plan import CapturePlan
from .config import DispatchConfig
from .cost import StepCost
from .dispatcher import Dispatcher
from .policy import POLICIES
from .step_plan import BatchDescriptor, Part, Reason, RuntimeMode, StepPlan
from .traits import BackendTraits, FullGraphs

__all__ = [
    "POLICIES",
    "BackendTraits",
    "Batch",
    "BatchDescriptor",
    "BatchKind",
    "CapturePlan",
    "DispatchConfig",
    "Dispatcher",
    "FullGraphs",
    "Part",
    "Reason",
    "RuntimeMode",
    "ScheduledRequest",
    "StepCost",
    "StepPlan",
]
