"""The model that proposes drafts: its own graphs and its own dispatcher."""

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .dispatcher import DispatchCudagraphDispatcher

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ROLE = "draft"

METHODS: Mapping[str, str | None] = MappingProxyType({"ngram": None, "draft_model": "draft_model"})
"""
The methods of speculation that graphs are dispatched for. Of one that runs a model, the tag under which vLLM
compiles that model (`vllm.compilation.backends.set_model_tag`).
"""


def role_of(runnable: Callable[..., Any]) -> str:
    """
    Whose graphs *runnable* gets: a piece of a drafter's model its own, all else the target's.
    """
    # The tag is a global that has its value while a model is built; the compiler of that model remembers it.
    tag = getattr(getattr(runnable, "vllm_backend", None), "prefix", None)
    return ROLE if tag is not None and tag in METHODS.values() else "target"


def is_drafters(vllm_config: "VllmConfig") -> bool:
    """
    Whether *vllm_config* is the one that vLLM makes for a draft model, not the engine's.
    """
    speculative = vllm_config.speculative_config
    return (
        speculative is not None
        # A drafter without a model has the target's.
        and speculative.draft_model_config is not speculative.target_model_config
        and vllm_config.model_config is speculative.draft_model_config
    )


class DraftDispatcher(DispatchCudagraphDispatcher):
    """
    In the place of the one that a vLLM drafter owns. It uses PIECEWISE graphs, by numbers of tokens, if the target
    does; vLLM decides that.
    """

    def __init__(self, vllm_config: "VllmConfig") -> None:
        super().__init__(vllm_config, ROLE)
        self.passes: Counter[str] = Counter()
        """Decisions by mode: for the first two forward passes of a step; those that follow are like the second."""

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        mode, descriptor = super().dispatch(*args, **kwargs)
        self.passes[mode.name] += 1
        return mode, descriptor
