"""A decode is a state, not a shape."""

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch import Batch, BatchKind, ScheduledRequest
from aclgraph_dispatch.batch import Classifier

from .strategies import MAX_NUM_SEQS, decodes, max_model_lens, prefills, query_lens, scheduled_requests

EMPTY, UNIFORM, RAGGED, MIXED, PREFILL = BatchKind


def read_only(numbers):
    """
    An array that nobody may write to.
    """
    array = np.array(numbers, dtype=np.int32)
    array.flags.writeable = False
    return array


def columns(requests, *names):
    """
    The fields *names* of *requests* as arrays.
    """
    return [read_only([getattr(r, name) for r in requests]) for name in names]


def seq_lens(requests):
    """
    What a model runner has at hand: the tokens in the KV cache after the step, drafts among them.
    """
    return read_only([r.num_computed + r.num_scheduled for r in requests])


def decode(num_drafts=0, **changes):
    """
    A request that decodes, 3 tokens behind its prompt.
    """
    return ScheduledRequest(1 + num_drafts, 102, 103, num_drafts, num_prompt=100, **changes)


@pytest.mark.parametrize(
    # Scheduled, computed and known tokens, drafts among the scheduled ones, length of the prompt if given.
    ("query_len", "numbers", "kind"),
    [
        # The last token of 120 and 3 drafts: a decode, whether or not the prompt's length is given.
        (4, (4, 119, 120, 3, 100), UNIFORM),
        (4, (4, 119, 120, 3, None), UNIFORM),
        # The first decode after a prompt, of one token or many.
        (1, (1, 1, 2, 0, 1), UNIFORM),
        (1, (1, 64, 65, 0, 64), UNIFORM),
        # A new prompt of 4 tokens; the last 4 of 68 after a chunk of 64, of 132 after 128 cached ones.
        (4, (4, 0, 4, 0, 4), PREFILL),
        (4, (4, 64, 68, 0, 68), PREFILL),
        (4, (4, 128, 132, 0, 132), PREFILL),
        (4, (4, 0, 4, 0, None), PREFILL),
        (4, (4, 64, 68, 0, None), PREFILL),
        (4, (4, 128, 132, 0, None), PREFILL),
        # A prompt of one token has no state yet: one computed token is the least a decode has.
        (1, (1, 0, 1, 0, 1), PREFILL),
        (1, (1, 0, 1, 0, None), PREFILL),
        # The last token of a prompt of 65. Only its length tells it from a decode: give it, and it is none.
        (1, (1, 64, 65, 0, 65), PREFILL),
        (1, (1, 64, 65, 0, None), UNIFORM),
        # Resumed after a preemption, 4 of 120 tokens left: recomputation, although the prompt is done.
        (4, (4, 116, 120, 0, 100), PREFILL),
        (4, (4, 116, 120, 0, None), PREFILL),
        # The same with one token left decodes, but is shorter than its neighbours will be.
        (4, (1, 119, 120, 0, 100), RAGGED),
        # A recomputation in chunks of one token, more to come.
        (1, (1, 116, 120, 0, 100), PREFILL),
        # As long as two decodes, or with more drafts than the graphs have.
        (2, (1, 102, 103, 0, 100), RAGGED),
        (2, (3, 102, 103, 2, 100), RAGGED),
    ],
)
def test_decode_by_state(query_len, numbers, kind):
    """
    A request decodes if all but its newest token are computed and the prompt is done, whatever its length.
    """
    batch = Batch.of([ScheduledRequest(*numbers)], query_len=query_len)

    can_pad = kind is RAGGED and numbers[0] <= query_len
    assert Batch(kind, 1, numbers[0], int(kind is not PREFILL), query_len, can_pad_drafts=can_pad) == batch


TAIL = ScheduledRequest(1, 99, 100, num_prompt=100)
CHUNK = ScheduledRequest(64, 0, 100, num_prompt=100)


@pytest.mark.parametrize(
    ("query_len", "requests", "expected"),
    [
        (1, [], Batch(EMPTY, 0, 0, 0, 1)),
        (4, [], Batch(EMPTY, 0, 0, 0, 4)),
        (1, [decode()] * 8, Batch(UNIFORM, 8, 8, 8, 1)),
        (4, [decode(3)] * 8, Batch(UNIFORM, 8, 32, 8, 4)),
        # One arrival whose last prompt chunk is one token: 8 tokens, 8 requests, and yet not uniform.
        (1, [*[decode()] * 7, TAIL], Batch(MIXED, 8, 8, 7, 1)),
        (1, [TAIL, decode()], Batch(MIXED, 2, 2, 1, 1)),
        (1, [CHUNK, decode()], Batch(MIXED, 2, 65, 1, 1)),
        (1, [TAIL, CHUNK], Batch(PREFILL, 2, 65, 0, 1)),
        # One transferred request without drafts among seven that verify.
        (4, [*[decode(3)] * 7, decode()], Batch(RAGGED, 8, 29, 8, 4, can_pad_drafts=True)),
        # Drafts of one length that is not the graphs': vLLM's dynamic k.
        (4, [decode(1)] * 2, Batch(RAGGED, 2, 4, 2, 4, can_pad_drafts=True)),
        # Right on average is not uniform, and more than the graphs have is not to be padded.
        (2, [decode(), decode(2)], Batch(RAGGED, 2, 4, 2, 2)),
        (2, [decode(), decode()], Batch(RAGGED, 2, 2, 2, 2, can_pad_drafts=True)),
        # Drafts and adapters.
        (4, [decode(3, lora_id=7)] * 2, Batch(UNIFORM, 2, 8, 2, 4, 1)),
        (4, [decode(3, lora_id=7), decode()], Batch(RAGGED, 2, 5, 2, 4, 1, can_pad_drafts=True)),
        (4, [decode(3, lora_id=7), TAIL], Batch(MIXED, 2, 5, 1, 4, 1)),
        (4, [CHUNK, decode(3)], Batch(MIXED, 2, 68, 1, 4)),
    ],
)
def test_kinds(query_len, requests, expected):
    """
    One request that does not decode, or has another length, makes a batch not uniform.
    """
    assert expected == Batch.of(requests, query_len=query_len)


@pytest.mark.parametrize(
    ("query_len", "num_drafts", "num_known", "max_model_len", "can_pad"),
    [
        # 119 computed tokens and the 4 of a uniform decode are 123.
        (4, 0, 120, 123, True),
        (4, 0, 120, 122, False),
        (4, 2, 120, 123, True),
        (4, 2, 120, 122, False),
        (4, 0, 120, None, True),
        # Nothing is padded, so nothing is asked.
        (4, 3, 120, 122, False),
        (1, 0, 120, 120, False),
    ],
)
def test_padding_needs_room(query_len, num_drafts, num_known, max_model_len, can_pad):
    """
    Drafts are padded only up to the longest sequence that the model can have.
    """
    short = ScheduledRequest(1 + num_drafts, num_known - 1, num_known, num_drafts, 100)
    for requests in ([short, decode(query_len - 1)], [decode(query_len - 1), short]):
        batch = Batch.of(requests, query_len=query_len, max_model_len=max_model_len)

        assert (RAGGED if num_drafts < query_len - 1 else UNIFORM) is batch.kind
        assert can_pad is batch.can_pad_drafts


@pytest.mark.parametrize("tail", [TAIL, ScheduledRequest(1, 64, 65, num_prompt=65)])
def test_extend_equals_decode(tail):
    """
    Where attention has no state but the KV cache, the last token of a prompt is a decode, but never its first.
    """
    first = ScheduledRequest(1, 0, 1, num_prompt=1)

    assert Batch(UNIFORM, 2, 2, 2) == Batch.of([tail, decode()], extend_equals_decode=True)
    assert Batch(MIXED, 2, 2, 1) == Batch.of([tail, decode()], extend_equals_decode=False)
    assert Batch(MIXED, 2, 2, 1) == Batch.of([tail, first], extend_equals_decode=True)


@pytest.mark.parametrize(
    ("lora_ids", "num_active_loras"), [((), 0), ((0, 0), 0), ((0, 7), 1), ((7, 7), 1), ((3, 0, 7), 2)]
)
def test_active_loras(lora_ids, num_active_loras):
    """
    Adapters are counted once each, and 0 is none.
    """
    requests = [decode(lora_id=lora_id) for lora_id in lora_ids]

    assert num_active_loras == Batch.of(requests).num_active_loras


@given(st.lists(st.tuples(st.booleans(), decodes(), prefills()), max_size=MAX_NUM_SEQS))
def test_counts_decodes(draws):
    """
    In whatever order they come, exactly the decodes are counted.
    """
    requests = [one if is_decode else other for is_decode, one, other in draws]

    batch = Batch.of(requests)

    num_tokens = sum(r.num_scheduled for r in requests)
    num_decodes = sum(is_decode for is_decode, _, _ in draws)
    assert (len(requests), num_tokens, num_decodes) == (batch.num_reqs, batch.num_tokens, batch.num_decodes)


@given(prefills() | decodes())
def test_unknown_prompt_hides_no_decode(request):
    """
    Without the prompt's length only its very last token may pass for a decode.
    """
    blind = Batch.of([attrs.evolve(request, num_prompt=None)], query_len=request.num_scheduled)

    is_last_of_prompt = request.num_known == request.num_prompt == request.num_computed + 1 > 1
    is_decode = Batch.of([request], query_len=request.num_scheduled).kind is UNIFORM
    assert (UNIFORM if is_decode or is_last_of_prompt else PREFILL) is blind.kind


@st.composite
def classified(draw):
    """
    What a classifier knows, the same for every step, and the requests of some steps.
    """
    query_len = draw(query_lens)
    steps = draw(st.lists(scheduled_requests(query_len=query_len), max_size=5))
    max_model_len = draw(max_model_lens([r for requests in steps for r in requests], query_len=query_len))
    return (
        {
            "query_len": query_len,
            "max_model_len": max_model_len,
            "extend_equals_decode": draw(st.booleans()),
        },
        steps,
    )


@given(classified())
def test_one_answer(knowledge_and_steps):
    """
    Requests, arrays, and a classifier used for step after step give the same batches, with sums or without.
    """
    knowledge, steps = knowledge_and_steps
    classifier = Classifier(max_num_seqs=MAX_NUM_SEQS, **knowledge)

    for requests in steps:
        arrays = columns(requests, "num_scheduled", "num_computed", "num_known", "num_drafts", "num_prompt")
        num_scheduled, _, num_known, num_drafts, num_prompt = arrays
        loras = len({r.lora_id for r in requests if r.lora_id})
        expected = Batch.of(requests, **knowledge)

        assert expected == Batch.from_arrays(
            *arrays[:4], num_prompt=num_prompt, num_active_loras=loras, **knowledge
        )
        given_arrays = num_scheduled, seq_lens(requests), num_known, num_drafts, num_prompt
        sums = {"num_tokens": int(num_scheduled.sum()), "total_drafts": int(num_drafts.sum())}
        for given_sums in ({}, sums):
            assert expected == classifier.classify(*given_arrays, num_active_loras=loras, **given_sums)
        if not num_drafts.any():
            assert expected == classifier.classify(
                *given_arrays[:3], None, num_prompt, num_tokens=sums["num_tokens"], num_active_loras=loras
            )


def is_decode(request, extend_equals_decode):
    """
    The definition of a decode, request by request.
    """
    return (
        request.num_scheduled - request.num_drafts == 1
        and request.num_computed + 1 == request.num_known
        and request.num_known > (1 if extend_equals_decode else request.num_prompt)
    )


@given(classified())
def test_definition(knowledge_and_steps):
    """
    The kind of a batch, and whether it may be padded, are what the definitions say, request by request.
    """
    knowledge, steps = knowledge_and_steps
    query_len, limit = knowledge["query_len"], knowledge["max_model_len"]
    for requests in steps:
        found = [is_decode(r, knowledge["extend_equals_decode"]) for r in requests]
        if not requests:
            kind = EMPTY
        elif not all(found):
            kind = MIXED if any(found) else PREFILL
        else:
            kind = UNIFORM if all(r.num_scheduled == query_len for r in requests) else RAGGED
        can_pad = kind is RAGGED and all(
            r.num_scheduled <= query_len and (limit is None or r.num_computed + query_len <= limit)
            for r in requests
        )

        batch = Batch.of(requests, **knowledge)

        assert (kind, sum(found), can_pad) == (batch.kind, batch.num_decodes, batch.can_pad_drafts)


@given(scheduled_requests())
def test_left_out_arrays(requests):
    """
    Left out, drafts are none, and prompts are done once a token is computed.
    """
    arrays = columns(requests, "num_scheduled", "num_computed", "num_known")
    blind = [attrs.evolve(r, num_prompt=None, lora_id=0) for r in requests]

    assert Batch.of(blind) == Batch.from_arrays(*arrays)


@pytest.mark.parametrize("num_drafts", [None, np.zeros(1, dtype=np.int32)])
def test_more_than_known(num_drafts):
    """
    Arrays are not checked; who computes beyond what is known is no decode, whatever was classified before.
    """
    classifier = Classifier(max_num_seqs=2)
    one, known, two = read_only([1]), read_only([103]), read_only([2])

    for _ in range(2):
        assert classifier.classify(one, known, known, num_drafts) == Batch(UNIFORM, 1, 1, 1)
        assert classifier.classify(two, known + 1, known, num_drafts) == Batch(PREFILL, 1, 2, 0)
        assert classifier.classify(two, known, known, num_drafts) == Batch(PREFILL, 1, 2, 0)


def test_results_not_heard_of():
    """
    Under async scheduling the host counts the drafts of the step before as computed, until it hears which were
    accepted; that request decodes, and its length after the step is what must fit.
    """
    scheduled, known, drafts, prompts = (
        read_only([2, 4]),
        read_only([103, 103]),
        read_only([1, 3]),
        read_only([9, 9]),
    )
    # Without the 3 drafts of the step before, both would have 102 computed tokens.
    lens = read_only([105 + 2, 105 + 4])

    for max_model_len, can_pad in ((109, True), (108, False)):
        classifier = Classifier(max_num_seqs=2, query_len=4, max_model_len=max_model_len)
        batch = classifier.classify(scheduled, lens, known, drafts, prompts)

        assert Batch(RAGGED, 2, 6, 2, 4, can_pad_drafts=can_pad) == batch


def test_defaults():
    """
    Unless told otherwise, requests have one token, no adapter, and were never preempted.
    """
    arrays = columns([decode()] * 2, "num_scheduled", "num_computed", "num_known")
    expected = Batch(UNIFORM, 2, 2, 2, query_len=1, num_active_loras=0)

    assert expected == Batch(UNIFORM, 2, 2, 2)
    assert expected == Batch.of([decode()] * 2)
    assert expected == Batch.from_arrays(*arrays)
    assert expected == Classifier(max_num_seqs=2).classify(arrays[0], arrays[0] + arrays[1], arrays[2])
    assert ScheduledRequest(1, 0, 1) == ScheduledRequest(1, 0, 1, 0, None, lora_id=0, resumed=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 2), r"'num_scheduled' must be >= 1: 0"),
        ((1, -1, 2), r"'num_computed' must be >= 0: -1"),
        ((1, 0, 0), r"'num_known' must be >= 1: 0"),
        ((1, 0, 1, -1), r"'num_drafts' must be >= 0: -1"),
        ((1, 0, 1, 0, 0), r"'num_prompt' must be >= 1: 0"),
        ((1, 0, 1, 0, 1, -1), r"'lora_id' must be >= 0: -1"),
        ((2, 9, 10), r"must be <= 'num_known': 9 \+ 2 - 0 > 10"),
        ((3, 9, 10, 1), r"must be <= 'num_known': 9 \+ 3 - 1 > 10"),
        ((2, 7, 10, 2), r"'num_drafts' must be < 'num_scheduled': 2 >= 2"),
        ((1, 9, 10, 0, 11), r"'num_prompt' must be <= 'num_known': 11 > 10"),
    ],
)
def test_impossible_requests(arguments, message):
    """
    Numbers that contradict each other make no request.
    """
    with pytest.raises(ValueError, match=message):
        ScheduledRequest(*arguments)


@pytest.mark.parametrize(("num_reqs", "num_tokens", "num_decodes"), [(2, 1, 0), (1, 1, 2), (1, 1, -1)])
def test_impossible_batches(num_reqs, num_tokens, num_decodes):
    """
    A batch has a token for every request, and no more decodes than requests.
    """
    with pytest.raises(ValueError, match="0 <= decodes <= requests <= tokens must hold: Batch"):
        Batch(MIXED, num_reqs, num_tokens, num_decodes)
