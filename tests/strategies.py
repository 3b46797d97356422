"""What a scheduler can hand over, and what a user can configure, as hypothesis strategies."""

import functools

from hypothesis import settings
from hypothesis import strategies as st

from aclgraph_dispatch import (
    POLICIES,
    BackendTraits,
    Batch,
    CapturePlan,
    Dispatcher,
    FullGraphs,
    RuntimeMode,
    ScheduledRequest,
    StepCost,
)
from aclgraph_dispatch.agreement import Vote

# A garbage collection with torch in memory takes longer than hypothesis grants an example.
settings.register_profile("aclgraph_dispatch", settings(), deadline=None)
settings.load_profile("aclgraph_dispatch")

MAX_QUERY_LEN = 4
MAX_NUM_SEQS = 12
MAX_SIZE = 48


def mostly(usual, other):
    """
    *usual*, and now and then *other*; hypothesis would take what is listed twice in a `one_of` for one.
    """
    return st.sampled_from([usual] * 5 + [other]).flatmap(lambda strategy: strategy)


prompt_lens = st.integers(1, 16)
query_lens = st.integers(1, MAX_QUERY_LEN)
policies = st.sampled_from(["eager", *[policy for policy in POLICIES if policy != "eager"] * 4])
no_lora = st.just(0)
some_lora = st.integers(0, 5)
# Most steps allow all modes.
allowed_modes = mostly(st.none(), st.frozensets(st.sampled_from(RuntimeMode)) | st.just(frozenset(RuntimeMode)))
traits = st.builds(
    BackendTraits, st.sampled_from([*FullGraphs, *[FullGraphs.UNIFORM, FullGraphs.RAGGED] * 3]), st.booleans()
)
lora_cases = st.sampled_from([(0,), (0,), (0,), (0, 1, 2, 4), (0, 3), (3,)])
"""None, every other number of adapters, one number for all but the base model, and for that too."""
some_sizes = mostly(st.sets(st.integers(1, MAX_SIZE), min_size=1, max_size=8), st.just(()))


# Strategies are built once, for hypothesis takes longer to build one than to draw from it.


@functools.cache
def decodes(*, min_drafts=0, max_drafts=MAX_QUERY_LEN, lora_ids=no_lora):
    """
    A request whose newest token alone is missing from the KV cache, with or without drafts to verify.
    """

    def build(num_prompt, num_generated, num_drafts, lora_id):
        num_known = num_prompt + num_generated
        return ScheduledRequest(1 + num_drafts, num_known - 1, num_known, num_drafts, num_prompt, lora_id)

    return st.builds(build, prompt_lens, st.integers(1, 16), st.integers(min_drafts, max_drafts), lora_ids)


@functools.cache
def prefills(*, lora_ids=no_lora):
    """
    A request that computes prompt tokens, whole or in chunks, or recomputes after a preemption.
    """

    def build(num_prompt, num_generated, computed, scheduled, lora_id):
        num_known = num_prompt + num_generated
        # Past the prompt, with one token missing, it would be a decode.
        num_computed = computed % (1 + max(num_prompt - 1, num_known - 2))
        num_scheduled = 1 + scheduled % (num_known - num_computed)
        resumed = num_generated > 0
        return ScheduledRequest(num_scheduled, num_computed, num_known, 0, num_prompt, lora_id, resumed)

    return st.builds(build, prompt_lens, st.integers(0, 16), st.integers(0, 31), st.integers(0, 31), lora_ids)


@functools.cache
def scheduled_requests(*, query_len=1, max_size=MAX_NUM_SEQS):
    """
    The requests of one step; steps of decodes only come up often enough to matter.
    """
    # Two of three without adapters: one that occurs in a step is seldom alone in it.
    kinds = []
    for lora_ids in (no_lora, no_lora, some_lora):
        uniform = decodes(min_drafts=query_len - 1, max_drafts=query_len - 1, lora_ids=lora_ids)
        ragged = decodes(max_drafts=query_len - 1, lora_ids=lora_ids)
        prefill = prefills(lora_ids=lora_ids)
        kinds += [
            st.lists(one, min_size=1, max_size=max_size) for one in (uniform, ragged, prefill, ragged | prefill)
        ]
    return mostly(st.sampled_from(kinds).flatmap(lambda kind: kind), st.just([]))


@st.composite
def max_model_lens(draw, requests, *, query_len=1):
    """
    A length that the sequences of *requests* have not outgrown: none, or one that some are close to.
    """
    longest = max((r.num_computed + r.num_scheduled for r in requests), default=1)
    return draw(st.none() | st.integers(longest, longest + query_len))


@st.composite
def batches(draw, *, query_len=1, max_num_seqs=MAX_NUM_SEQS, extend_equals_decode=False):
    """
    A classified batch.
    """
    requests = draw(scheduled_requests(query_len=query_len, max_size=max_num_seqs))
    return Batch.of(
        requests,
        query_len=query_len,
        max_model_len=draw(max_model_lens(requests, query_len=query_len)),
        extend_equals_decode=extend_equals_decode,
    )


@st.composite
def capture_plans(draw, *, query_len=1, max_num_seqs=MAX_NUM_SEQS):
    """
    A plan that a server of this query length and number of requests can use; either mode may be empty.
    """
    some_reqs = st.sets(st.integers(1, max_num_seqs), min_size=min(2, max_num_seqs))
    reqs = draw(mostly(some_reqs, st.just(())))
    piecewise_sizes = draw(some_sizes)
    return CapturePlan([query_len * r for r in sorted(reqs)], sorted(piecewise_sizes), draw(lora_cases))


costs = st.builds(
    lambda *points: StepCost(dict(zip(RuntimeMode, points, strict=True))),
    *[
        st.dictionaries(
            st.integers(1, MAX_SIZE), st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]), min_size=1, max_size=6
        )
    ]
    * len(RuntimeMode),
)
"""Any times, of few values so that some are equal; most do not grow with the tokens."""


@st.composite
def dispatchers(draw):
    """
    A dispatcher of any policy.
    """
    query_len = draw(query_lens)
    max_num_seqs = draw(st.integers(1, MAX_NUM_SEQS))
    return Dispatcher(
        draw(capture_plans(query_len=query_len, max_num_seqs=max_num_seqs)),
        policy=draw(policies),
        query_len=query_len,
        max_num_seqs=max_num_seqs,
        traits=draw(traits),
        cost=draw(st.none() | costs),
        role=draw(st.sampled_from(["target", "draft"])),
    )


def twin_of(dispatcher):
    """
    Another dispatcher of the same arguments: the one of another rank.
    """
    return Dispatcher(
        dispatcher.plan,
        policy=dispatcher.policy,
        query_len=dispatcher.query_len,
        max_num_seqs=dispatcher.max_num_seqs,
        traits=dispatcher.traits,
        cost=dispatcher.cost,
        role=dispatcher.role,
    )


@st.composite
def batches_for(draw, dispatcher):
    """
    A batch that *dispatcher* may meet, now and then one whose decodes have another length than its graphs.
    """
    return draw(
        batches(
            query_len=draw(mostly(st.just(dispatcher.query_len), query_lens)),
            max_num_seqs=dispatcher.max_num_seqs,
            extend_equals_decode=dispatcher.traits.extend_equals_decode,
        )
    )


@st.composite
def steps(draw):
    """
    A dispatcher, a batch it may meet, and the modes allowed in that step.
    """
    dispatcher = draw(dispatchers())
    return dispatcher, draw(batches_for(dispatcher)), draw(allowed_modes)


votes = st.builds(
    Vote,
    st.sampled_from(RuntimeMode),
    st.integers(0, 1024),
    st.integers(0, 1024),
    st.integers(0, 8),
    st.integers(1, 3),
    st.integers(1, 255),
)
