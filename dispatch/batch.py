"""
What one step schedules, and what kind of batch that is.

Theory of operation
-------------------
A request *decodes* in a step when everything known of it but its newest token lies in the KV cache, and the
step computes that one token (and its drafts, if any). That is a statement about its state, not about its
shape: the last tokens of a prompt, the remainder after a prefix-cache hit, and a request resumed after a
preemption can all have the length of a decode. So classification reads four numbers per request:

    num_scheduled   tokens computed this step, drafts included
    num_computed    tokens in the KV cache before the step
    num_known       prompt and generated tokens known so far (placeholders of async scheduling counted)
    num_drafts      draft tokens to be verified this step

    decode  <=>  num_scheduled - num_drafts == 1  and  num_computed + 1 == num_known  and the prompt is done

"The prompt is done" needs `num_prompt`: where the caller does not give it, one computed token is asked for,
so that a one-token prompt is a prefill. Classification comes before padding.
"""

import enum
from collections.abc import Sequence
from typing import Self

import attrs
import numpy as np
import numpy.typing as npt
from attrs import validators

IntArray = npt.NDArray[np.int32]


class BatchKind(enum.Enum):
    """
    What the requests of a batch have in common.
    """

    EMPTY = "empty"
    UNIFORM_DECODE = "uniform_decode"
    """Every request decodes and has exactly `query_len` tokens."""
    RAGGED_DECODE = "ragged_decode"
    """Every request decodes, their numbers of tokens differ from `query_len`."""
    MIXED = "mixed"
    """Some requests decode, others do not."""
    PREFILL = "prefill"
    """No request decodes."""


@attrs.frozen
class ScheduledRequest:
    """
    One request as the scheduler sees it in one step; all lengths in tokens.

    Args:
        num_scheduled: Tokens computed this step, drafts included.
        num_computed: Tokens in the KV cache before this step.
        num_known: Prompt and generated tokens known so far, placeholders counted, drafts not.
        num_drafts: Draft tokens among the scheduled ones.
        num_prompt: Length of the prompt; without it a request with any computed token counts as past it.
        lora_id: The adapter in use, 0 for none.
        resumed: Whether the request comes back from a preemption in this step.

    Raises:
        ValueError: The numbers contradict each other.
    """

    num_scheduled: int = attrs.field(validator=[validators.instance_of(int), validators.ge(1)])
    num_computed: int = attrs.field(validator=[validators.instance_of(int), validators.ge(0)])
    num_known: int = attrs.field(validator=[validators.instance_of(int), validators.ge(1)])
    num_drafts: int = attrs.field(default=0, validator=[validators.instance_of(int), validators.ge(0)])
    num_prompt: int | None = attrs.field(
        default=None, validator=validators.optional([validators.instance_of(int), validators.ge(1)])
    )
    lora_id: int = attrs.field(default=0, validator=[validators.instance_of(int), validators.ge(0)])
    resumed: bool = False

    def __attrs_post_init__(self) -> None:
        if self.num_computed + self.num_scheduled - self.num_drafts > self.num_known:
            msg = (
                "'num_computed' + 'num_scheduled' - 'num_drafts' must be <= 'num_known': "
                f"{self.num_computed} + {self.num_scheduled} - {self.num_drafts} > {self.num_known}"
            )
            raise ValueError(msg)
        if self.num_drafts >= self.num_scheduled:
            msg = f"'num_drafts' must be < 'num_scheduled': {self.num_drafts} >= {self.num_scheduled}"
            raise ValueError(msg)
        if self.num_prompt is not None and self.num_prompt > self.num_known:
            msg = f"'num_prompt' must be <= 'num_known': {self.num_prompt} > {self.num_known}"
            raise ValueError(msg)


@attrs.frozen
class Batch:
    """
    The requests of one step, reduced to what decides its route.

    Args:
        kind: What the requests have in common.
        num_reqs: Requests in the batch.
        num_tokens: Tokens in the batch, drafts included, before padding.
        num_decodes: Requests that decode.
        query_len: Tokens of one uniform decode: 1 + number of draft tokens.
        num_active_loras: Distinct adapters in use.
    """

    kind: BatchKind
    num_reqs: int
    num_tokens: int
    num_decodes: int
    query_len: int = 1
    num_active_loras: int = 0

    def __attrs_post_init__(self) -> None:
        # One comparison, for this is built every step.
        if not 0 <= self.num_decodes <= self.num_reqs <= self.num_tokens:
            msg = f"0 <= decodes <= requests <= tokens must hold: {self}"
            raise ValueError(msg)

    @classmethod
    def of(cls, requests: Sequence[ScheduledRequest], *, query_len: int = 1) -> Self:
        """
        Classify *requests*; for tests and tools, the step path uses a `Classifier`.
        """
        columns = np.array(
            [
                # Without `num_prompt`, "past the prompt" means that something was computed before.
                (r.num_scheduled, r.num_computed, r.num_known, r.num_drafts, r.num_prompt or 1)
                for r in requests
            ],
            dtype=np.int32,
        ).reshape(-1, 5)
        return cls.from_arrays(
            *columns.T[:4],
            num_prompt=columns[:, 4],
            query_len=query_len,
            num_active_loras=len({r.lora_id for r in requests} - {0}),
        )

    @classmethod
    def from_arrays(
        cls,
        num_scheduled: IntArray,
        num_computed: IntArray,
        num_known: IntArray,
        num_drafts: IntArray | None = None,
        *,
        num_prompt: IntArray | None = None,
        query_len: int = 1,
        num_active_loras: int = 0,
    ) -> Self:
        """
        Classify requests given as int32 arrays of shape (num_reqs,), one element a request.
        """
        classifier = Classifier(max_num_seqs=len(num_scheduled), query_len=query_len)
        fields = classifier.measure(num_scheduled, num_computed, num_known, num_drafts, num_prompt)
        return cls(*fields, query_len=query_len, num_active_loras=num_active_loras)


class Classifier:
    """
    Classifies batches on the step path: its scratch arrays are allocated once.

    Args:
        max_num_seqs: The most requests a batch can have.
        query_len: Tokens of one uniform decode.
    """

    def __init__(self, *, max_num_seqs: int, query_len: int = 1) -> None:
        self.query_len = query_len
        self._tokens = np.empty(max_num_seqs, dtype=np.int32)
        self._decodes = np.empty(max_num_seqs, dtype=np.bool_)
        self._test = np.empty(max_num_seqs, dtype=np.bool_)

    def classify(
        self,
        num_scheduled: IntArray,
        num_computed: IntArray,
        num_known: IntArray,
        num_drafts: IntArray | None = None,
        num_prompt: IntArray | None = None,
        *,
        num_active_loras: int = 0,
    ) -> Batch:
        """
        Classify requests given as int32 arrays of shape (num_reqs,), num_reqs <= max_num_seqs.
        """
        fields = self.measure(num_scheduled, num_computed, num_known, num_drafts, num_prompt)
        return Batch(*fields, query_len=self.query_len, num_active_loras=num_active_loras)

    def measure(
        self,
        num_scheduled: IntArray,
        num_computed: IntArray,
        num_known: IntArray,
        num_drafts: IntArray | None,
        num_prompt: IntArray | None,
    ) -> tuple[BatchKind, int, int, int]:
        """
        Return kind, number of requests, of tokens, and of decodes.
        """
        num_reqs = len(num_scheduled)
        if num_reqs == 0:
            return BatchKind.EMPTY, 0, 0, 0
        num_tokens = int(num_scheduled.sum())

        tokens, decodes, test = self._tokens[:num_reqs], self._decodes[:num_reqs], self._test[:num_reqs]
        if num_drafts is None:
            np.equal(num_scheduled, 1, out=decodes)
        else:
            np.subtract(num_scheduled, num_drafts, out=tokens)
            np.equal(tokens, 1, out=decodes)
        np.add(num_computed, 1, out=tokens)
        np.logical_and(decodes, np.equal(tokens, num_known, out=test), out=decodes)
        np.greater_equal(num_computed, 1 if num_prompt is None else num_prompt, out=test)
        np.logical_and(decodes, test, out=decodes)
        num_decodes = int(np.count_nonzero(decodes))

        if num_decodes == 0:
            kind = BatchKind.PREFILL
        elif num_decodes < num_reqs:
            kind = BatchKind.MIXED
        elif num_tokens == num_reqs * self.query_len and int(num_scheduled.max()) == self.query_len:
            kind = BatchKind.UNIFORM_DECODE
        else:
            kind = BatchKind.RAGGED_DECODE
        return kind, num_reqs, num_tokens, num_decodes
