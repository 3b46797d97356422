"""
What is compared: routing policies, each with a ladder of sizes.

A new contender is a line in `CONTENDERS`; a policy or a ladder of its own is a line in `POLICIES` or a function in
`ladders`.
"""

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from aclgraph_dispatch.capture_plan import CapturePlan
from aclgraph_dispatch.config import DispatchConfig
from aclgraph_dispatch.cost import StepCost
from aclgraph_dispatch.cost_model import Cost, StepLoad
from aclgraph_dispatch.dispatcher import Dispatcher
from aclgraph_dispatch.step_plan import RuntimeMode

from .ladders import LADDERS, Limits

ORACLE = "oracle"
VLLM_DEFAULT = "full_and_piecewise"
"""What vLLM does by itself, with the sizes that it captures."""


@attrs.frozen
class Contender:
    """
    A way to meet the graphs.

    Args:
        policy: A name in `POLICIES`.
        ladder: A name in `LADDERS`.
        by_cost: Whether the cost model picks among the graphs that fit, and eager.
        is_oracle: Whether steps are neither padded nor wait for the host: no step of a policy can be faster.
    """

    policy: str
    ladder: str = "vllm"
    by_cost: bool = False
    is_oracle: bool = False

    def plan(self, limits: Limits) -> CapturePlan:
        """
        The graphs it captures.
        """
        return DispatchConfig().capture_plan(
            self.policy,
            LADDERS[self.ladder](limits),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            query_len=limits.query_len,
            is_chosen=False,
        )

    def dispatcher(self, limits: Limits, cost: Cost) -> Dispatcher:
        """
        A dispatcher that does so.
        """
        plan = self.plan(limits)
        return Dispatcher(
            plan,
            policy=self.policy,
            query_len=limits.query_len,
            max_num_seqs=limits.max_num_seqs,
            cost=_cost_of_tokens(cost, plan, limits) if self.by_cost else None,
        )


def _cost_of_tokens(cost: Cost, plan: CapturePlan, limits: Limits) -> StepCost:
    """
    Seconds by mode and size of the tokens alone, without requests and contexts.

    A dispatcher knows neither, and they take their time in every mode; a guess about them for the padded size
    would have padding pay for contexts that nobody reads.
    """
    sizes = {1, limits.max_num_batched_tokens, *plan.full_sizes, *plan.piecewise_sizes}
    load = StepLoad()
    return StepCost({mode: {n: cost.times(mode, n, load).seconds for n in sizes} for mode in RuntimeMode})


CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        "eager": Contender("eager"),
        "piecewise": Contender("piecewise"),
        "full_decode_only": Contender("full_decode_only"),
        VLLM_DEFAULT: Contender("full_and_piecewise"),
        "legacy": Contender("full_and_piecewise", "legacy"),
        "exponential": Contender("full_and_piecewise", "exponential"),
        "powers_of_two": Contender("full_and_piecewise", "powers_of_two"),
        "to_budget": Contender("full_and_piecewise", "to_budget"),
        "by_cost": Contender("full_and_piecewise", "to_budget", by_cost=True),
        ORACLE: Contender("eager", is_oracle=True),
    }
)
