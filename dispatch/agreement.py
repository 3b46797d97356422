"""
How ranks that see different batches run the same passes.

Theory of operation
-------------------
The ranks of a data or expert parallel engine exchange tokens within a forward pass. A rank that runs other passes
than the rest, or passes of another size, waits for messages that never come. So every step each rank says what it
would do alone (a `Vote`), every rank gets all votes, and each merges them into the same answer:

    field                merged by      because
    mode                 minimum        a graph is replayed by all ranks or by none
    num_tokens           maximum        a PIECEWISE graph must hold the largest batch
    num_full_tokens      maximum        the same for a FULL graph, where padded drafts take room
    num_active_loras     maximum        the case for n adapters also serves fewer
    num_passes           maximum        one rank that wants to split is enough,
    max_passes           minimum        and one that cannot is enough to prevent it

That a minimum can be run by all takes for granted that whoever can run FULL can run PIECEWISE where the plan has
it, and anybody can run eagerly: a rank restricts a step to eager or not at all.

Each of these is commutative, associative and idempotent, so the merge is: neither the order of the ranks nor a
vote that arrives twice changes it. `Vote.idle` is its neutral element: a rank without requests goes along with
whatever the others do, in as many passes; it only wants room for its placeholders, where it computes some. There
is no abstention: a rank that does not vote is a rank that will hang, so the exchange raises for a missing one
(`agree` wants exactly as many votes as there are ranks).

What the merged vote means for the graphs is each dispatcher's to say (`Dispatcher.settle`), and depends on
nothing but that vote and the captured sizes, which are the same everywhere. Pipeline stages get the same batch
from the one scheduler, so they decide alike without a vote; a merge of equal votes is that vote.
"""

from collections.abc import Sequence
from typing import Self

import attrs

from .errors import AgreementError
from .step_plan import RuntimeMode

ANY_PASSES = 255
"""The `max_passes` of a rank that does not mind."""


@attrs.frozen
class Vote:
    """
    What a rank would do in a step, or what all ranks agreed on.

    Args:
        mode: The best mode for its batch.
        num_tokens: Tokens before padding.
        num_full_tokens: Tokens its batch takes in a FULL graph: more where drafts are padded.
        num_active_loras: Distinct LoRA adapters in use.
        num_passes: Forward passes it wants: 1, or 2 to run decodes and prefills apart (no policy does yet).
        max_passes: The most it can run.
    """

    mode: RuntimeMode
    num_tokens: int
    num_full_tokens: int
    num_active_loras: int = 0
    num_passes: int = 1
    max_passes: int = 1

    @classmethod
    def idle(cls, num_tokens: int = 0) -> Self:
        """
        The vote of a rank without requests; *num_tokens* is what it computes as a placeholder.
        """
        return cls(RuntimeMode.FULL, num_tokens, num_tokens, max_passes=ANY_PASSES)

    @property
    def agreed_passes(self) -> int:
        """
        Of a merged vote: the forward passes that every rank runs, some of them empty.
        """
        return min(self.num_passes, self.max_passes)

    def merge(self, other: "Vote") -> "Vote":
        """
        What both ranks can do.
        """
        return Vote(
            min(self.mode, other.mode, key=lambda mode: mode.value),
            max(self.num_tokens, other.num_tokens),
            max(self.num_full_tokens, other.num_full_tokens),
            max(self.num_active_loras, other.num_active_loras),
            max(self.num_passes, other.num_passes),
            min(self.max_passes, other.max_passes),
        )

    def to_row(self) -> tuple[int, ...]:
        """
        As integers, for an exchange of arrays.
        """
        mode, *numbers = attrs.astuple(self)
        return (mode.value, *numbers)

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Self:
        """
        The vote that `to_row` gave.
        """
        mode, *numbers = row
        return cls(RuntimeMode(mode), *numbers)


ROW_LENGTH = len(attrs.fields(Vote))


def agree(votes: Sequence[Vote], num_ranks: int) -> Vote:
    """
    Merge the votes of all ranks.

    Raises:
        AgreementError: There are not as many votes as ranks.
    """
    if len(votes) != num_ranks:
        msg = f"every rank must vote once a step: {len(votes)} votes of {num_ranks} ranks"
        raise AgreementError(msg)
    agreed = Vote.idle()
    for vote in votes:
        agreed = agreed.merge(vote)
    return agreed
