"""Decides, every step, how a batch meets the captured graphs of an LLM server."""

from .batch import Batch, BatchKind, ScheduledRequest
from .capture_plan import CapturePlan
from .config import DispatchConfig
from .dispatcher import Dispatcher
from .policy import POLICIES
from .step_plan import BatchDescriptor, Part, Reason, RuntimeMode, StepPlan

__all__ = [
    "POLICIES",
    "Batch",
    "BatchDescriptor",
    "BatchKind",
    "CapturePlan",
    "DispatchConfig",
    "Dispatcher",
    "Part",
    "Reason",
    "RuntimeMode",
    "ScheduledRequest",
    "StepPlan",
]
