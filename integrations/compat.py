"""What the integrations refuse, in one table: better at start-up than wrong tokens later."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from aclgraph_dispatch.errors import ConfigError

from .drafter import METHODS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@attrs.frozen
class Unsupported:
    """
    A feature that graphs are not dispatched for.
    """

    name: str
    is_used: Callable[["VllmConfig"], bool]
    remedy: str
    value: Callable[["VllmConfig"], object] | None = None
    """What was asked for, where the name does not say it."""

    def refusal(self, vllm_config: "VllmConfig") -> str:
        """
        The message to who uses it.
        """
        value = "" if self.value is None else f" {self.value(vllm_config)!r}"
        return f"not supported with graphs: {self.name}{value}; {self.remedy}"


_OFF = "or set enforce_eager, which turns the dispatcher off"

UNSUPPORTED = (
    Unsupported(
        "vLLM's own CPU worker",
        lambda c: c.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker",
        f"set --worker-cls aclgraph_dispatch.integrations.cpu.DispatchWorker, {_OFF}",
    ),
    Unsupported(
        "speculative decoding by the method",
        lambda c: c.speculative_config is not None and c.speculative_config.method not in METHODS,
        f"use one of {', '.join(METHODS)}, {_OFF}",
        lambda c: c.speculative_config.method,
    ),
    Unsupported(
        # Its drafter fails in vLLM's CPU attention, with graphs or without.
        "a draft model with or for multi-head latent attention",
        lambda c: (
            c.speculative_config is not None
            and c.speculative_config.method == "draft_model"
            and (c.model_config.use_mla or c.speculative_config.draft_model_config.use_mla)
        ),
        "use method ngram, or drop it",
    ),
    Unsupported(
        "parallel drafting",
        lambda c: c.speculative_config is not None and c.speculative_config.parallel_drafting,
        f"drop it, {_OFF}",
    ),
    Unsupported(
        # Drafts are padded for FULL graphs, and such a layer would take the pads for tokens.
        "speculative decoding of recurrent and hybrid models",
        lambda c: c.speculative_config is not None and c.model_config.has_inner_state,
        f"drop it, {_OFF}",
    ),
    Unsupported(
        "pipeline parallelism", lambda c: c.parallel_config.pipeline_parallel_size > 1, f"use size 1, {_OFF}"
    ),
    Unsupported(
        # vLLM's kernel for CPUs takes the numbers of all experts for those of its own, and reads beyond these.
        "expert parallelism",
        lambda c: c.parallel_config.enable_expert_parallel and c.parallel_config.world_size_across_dp > 1,
        "drop enable_expert_parallel: each expert is then split over the ranks",
    ),
    Unsupported(
        # Its ranks leave out votes while they join or leave.
        "elastic expert parallelism",
        lambda c: c.parallel_config.enable_elastic_ep,
        f"drop it, {_OFF}",
    ),
    Unsupported(
        "micro-batches within a forward pass",
        lambda c: c.parallel_config.use_ubatching,
        f"drop --enable-dbo and --ubatch-size, {_OFF}",
    ),
    Unsupported(
        "encoder-decoder models",
        lambda c: c.model_config is not None and c.model_config.is_encoder_decoder,
        "set enforce_eager",
    ),
    Unsupported(
        "pooling models",
        lambda c: c.model_config is not None and c.model_config.runner_type == "pooling",
        "set enforce_eager",
    ),
    Unsupported(
        "Model Runner V2", lambda c: c.use_v2_model_runner, "set VLLM_USE_V2_MODEL_RUNNER=0 for runner V1"
    ),
)


def refuse_unsupported(vllm_config: "VllmConfig") -> None:
    """
    Raise for all unsupported features in use.

    Raises:
        ConfigError: There are some; the message names each with its remedy.
    """
    found = [u.refusal(vllm_config) for u in UNSUPPORTED if u.is_used(vllm_config)]
    if found:
        raise ConfigError("aclgraph-dispatch: " + "; ".join(found))
