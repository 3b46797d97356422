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
from aclgraph_dispatch.cost_model import Cost, step_cost
from aclgraph_dispatch.dispatcher import Dispatcher

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
        sizes = {1, limits.max_num_batched_tokens, *plan.full_sizes, *plan.piecewise_sizes}
        return Dispatcher(
            plan,
            policy=self.policy,
            query_len=limits.query_len,
            max_num_seqs=limits.max_num_seqs,
            cost=step_cost(cost, sizes) if self.by_cost else None,
        )


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
