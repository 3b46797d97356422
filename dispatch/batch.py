"""
What one step schedules, and what kind of batch that is.

Theory of operation
-------------------
A request *decodes* in a step when everything known of it but its newest token lies in the KV cache, and the
step computes that one token (and its drafts, if any). That is a statement about its state, not about its
shape: the last tokens of a prompt, the remainder after a prefix-cache hit, and a request resumed after a
preemption can all have the length of a decode. So classification reads, per request:

    num_scheduled   tokens computed this step, drafts included
    num_computed    tokens in the KV cache before the step
    num_known       prompt and generated tokens known so far (placeholders of async scheduling counted)
    num_drafts      draft tokens to be verified this step
    num_prompt      tokens of the prompt

    decode  <=>  num_scheduled - num_drafts == 1  and  num_computed + 1 >= num_known  and  num_known > num_prompt

More has been computed than is known only under async scheduling: accepted drafts that the host has not heard of.
The last condition keeps the last token of a prompt from being a decode. To attention without a state besides the
KV cache the two are the same (`BackendTraits.extend_equals_decode`): there, and where the prompt's length is not
given, one computed token is all that is asked for, so that only a prompt of one token is a prefill by its state.
Classification comes before padding.

The step path (`Classifier`) asks for what a model runner has at hand anyway, among it the length of a sequence
after the step, num_computed + num_scheduled: the first two conditions are then one comparison for all requests of
a batch of decodes. No request has fewer than one token that is no draft, so if the totals say one each, all have
one. Nearly every batch passes these tests; only one that does not is looked at request by request.
"""

import enum
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
from attrs import validators

IntArray = npt.NDArray[np.int32]

_ONE = np.array(1, dtype=np.int32)
"""To numpy an array is cheaper than a number."""


class BatchKind(enum.Enum):
    """
    What the requests of a batch have in common.
    """

    # As members are compared; Python's own computes it anew from the name.
    __hash__ = object.__hash__

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
        resumed: Whether the request comes back from a preemption in this step. Told for the reader's sake: the
            other numbers say what is left to compute, and they decide.

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
        can_pad_drafts: Whether every request of a ragged decode may be padded to `query_len` tokens: none has
            more, and none would grow beyond the model's maximum length.
    """

    kind: BatchKind
    num_reqs: int
    num_tokens: int
    num_decodes: int
    query_len: int = 1
    num_active_loras: int = 0
    can_pad_drafts: bool = False

    def __attrs_post_init__(self) -> None:
        # One comparison, for this is built every step.
        if not 0 <= self.num_decodes <= self.num_reqs <= self.num_tokens:
            msg = f"0 <= decodes <= requests <= tokens must hold: {self}"
            raise ValueError(msg)

    @classmethod
    def of(
        cls,
        requests: Sequence[ScheduledRequest],
        *,
        query_len: int = 1,
        max_model_len: int | None = None,
        extend_equals_decode: bool = False,
    ) -> "Batch":
        """
        Classify *requests*; for tests and tools, the step path uses a `Classifier`.

        Args:
            requests: The requests of the step, in order.
            query_len: Tokens of one uniform decode.
            max_model_len: The most tokens a sequence can have, where that is known.
            extend_equals_decode: A trait of the attention backend (`BackendTraits`).
        """
        columns = np.array(
            [(r.num_scheduled, r.num_computed, r.num_known, r.num_drafts, r.num_prompt or 1) for r in requests],
            dtype=np.int32,
        ).reshape(-1, 5)
        return cls.from_arrays(
            *columns.T[:4],
            num_prompt=columns[:, 4],
            query_len=query_len,
            max_model_len=max_model_len,
            extend_equals_decode=extend_equals_decode,
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
        max_model_len: int | None = None,
        extend_equals_decode: bool = False,
        num_active_loras: int = 0,
    ) -> "Batch":
        """
        Classify requests given as int32 arrays of shape (num_reqs,), one element a request.
        """
        classifier = Classifier(
            max_num_seqs=len(num_scheduled),
            query_len=query_len,
            max_model_len=max_model_len,
            extend_equals_decode=extend_equals_decode,
        )
        return classifier.classify(
            num_scheduled,
            num_computed + num_scheduled,
            num_known,
            num_drafts,
            num_prompt,
            num_active_loras=num_active_loras,
        )


@attrs.frozen
class _Scratch:
    """
    Where the numbers of a batch are computed: an element a request.

    Each test is a row, and the rows lie one behind the other, so that one count tells whether all hold for all.
    """

    ends: IntArray
    is_known: npt.NDArray[np.bool_]
    is_past: npt.NDArray[np.bool_]
    is_short: npt.NDArray[np.bool_]
    two_tests: npt.NDArray[np.bool_]
    three_tests: npt.NDArray[np.bool_]
    query_lens: IntArray
    """The length of a uniform decode: to numpy an array is cheaper than a number."""

    @classmethod
    def all_sizes(cls, max_num_seqs: int, query_len: int) -> "list[_Scratch]":
        """
        Index: number of requests. All use the same memory.
        """
        ends = np.empty(max_num_seqs, dtype=np.int32)
        tests = np.empty(3 * max_num_seqs, dtype=np.bool_)
        query_lens = np.full(max_num_seqs, query_len, dtype=np.int32)
        return [
            cls(
                ends[:n],
                tests[:n],
                tests[n : 2 * n],
                tests[2 * n : 3 * n],
                tests[: 2 * n],
                tests[: 3 * n],
                query_lens[:n],
            )
            for n in range(max_num_seqs + 1)
        ]


class Classifier:
    """
    Classifies batches on the step path: scratch arrays and the batches of uniform decodes are made once.

    Args:
        max_num_seqs: The most requests a batch can have.
        query_len: Tokens of one uniform decode.
        max_model_len: The most tokens a sequence can have; None where nothing limits it.
        extend_equals_decode: A trait of the attention backend (`BackendTraits`).
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        query_len: int = 1,
        max_model_len: int | None = None,
        extend_equals_decode: bool = False,
    ) -> None:
        self.query_len = query_len
        self.max_model_len = max_model_len
        self.extend_equals_decode = extend_equals_decode
        self._scratch = _Scratch.all_sizes(max_num_seqs, query_len)
        self._uniform = [
            Batch(BatchKind.UNIFORM_DECODE if n else BatchKind.EMPTY, n, n * query_len, n, query_len)
            for n in range(max_num_seqs + 1)
        ]

    def classify(
        self,
        num_scheduled: IntArray,
        seq_lens: IntArray,
        num_known: IntArray,
        num_drafts: IntArray | None = None,
        num_prompt: IntArray | None = None,
        *,
        num_tokens: int | None = None,
        total_drafts: int | None = None,
        num_active_loras: int = 0,
    ) -> Batch:
        """
        Classify requests given as int32 arrays of shape (num_reqs,), num_reqs <= max_num_seqs.

        Args:
            num_scheduled: Tokens computed this step, drafts included.
            seq_lens: Tokens in the KV cache after the step: those before it plus the scheduled ones.
            num_known: Prompt and generated tokens known so far, placeholders counted, drafts not.
            num_drafts: Draft tokens among the scheduled ones; None for none.
            num_prompt: Lengths of the prompts; None where they are not known.
            num_tokens: The sum of `num_scheduled`, where the caller has it.
            total_drafts: The sum of `num_drafts`, where the caller has it.
            num_active_loras: Distinct adapters in use.
        """
        num_reqs = len(num_scheduled)
        if num_reqs == 0:
            return self._uniform[0]
        if num_tokens is None:
            # In a wider type, numpy's default, it would be the sum of a copy.
            num_tokens = int(num_scheduled.sum(dtype=np.int32))
        if num_drafts is None:
            total_drafts = 0
        elif total_drafts is None:
            total_drafts = int(num_drafts.sum(dtype=np.int32))

        scratch = self._scratch[num_reqs]
        ends = seq_lens if num_drafts is None else np.subtract(seq_lens, num_drafts, scratch.ends)
        # It may be beyond what is known: by the drafts of the step before, as long as the host has not heard which
        # of them were accepted.
        is_known = np.greater_equal(ends, num_known, scratch.is_known)
        floor = _ONE if num_prompt is None or self.extend_equals_decode else num_prompt
        is_past = np.greater(num_known, floor, scratch.is_past)
        if num_tokens - total_drafts == num_reqs:
            tests = scratch.two_tests
            if total_drafts:
                np.less_equal(num_scheduled, scratch.query_lens, scratch.is_short)
                tests = scratch.three_tests
            if np.count_nonzero(tests) == tests.size:
                if num_tokens == num_reqs * self.query_len:
                    if not num_active_loras:
                        return self._uniform[num_reqs]
                    kind, can_pad = BatchKind.UNIFORM_DECODE, False
                else:
                    kind, can_pad = BatchKind.RAGGED_DECODE, self._has_room(ends)
                return Batch(kind, num_reqs, num_tokens, num_reqs, self.query_len, num_active_loras, can_pad)

        is_decode = np.logical_and(is_known, is_past, is_known)
        lengths = num_scheduled if num_drafts is None else np.subtract(num_scheduled, num_drafts, scratch.ends)
        is_decode = np.logical_and(is_decode, np.equal(lengths, _ONE, scratch.is_past), is_decode)
        num_decodes = int(np.count_nonzero(is_decode))
        if num_decodes == num_reqs:
            kind = BatchKind.RAGGED_DECODE
        else:
            kind = BatchKind.MIXED if num_decodes else BatchKind.PREFILL
        return Batch(kind, num_reqs, num_tokens, num_decodes, self.query_len, num_active_loras)

    def _has_room(self, ends: IntArray) -> bool:
        # `ends` are the lengths after the one token that is no draft; the pads come with its drafts.
        return self.max_model_len is None or int(ends[ends.argmax()]) - 1 + self.query_len <= self.max_model_len
