"""What a scheduler can hand over, and what a user can configure, as hypothesis strategies."""

from hypothesis import settings
from hypothesis import strategies as st

from aclgraph_dispatch import POLICIES, Batch, CapturePlan, Dispatcher, RuntimeMode, ScheduledRequest

# A garbage collection with torch in memory takes longer than hypothesis grants an example.
settings.register_profile("aclgraph_dispatch", settings(), deadline=None)
settings.load_profile("aclgraph_dispatch")

MAX_QUERY_LEN = 4
MAX_NUM_SEQS = 12

prompt_lens = st.integers(1, 16)
query_lens = st.integers(1, MAX_QUERY_LEN)
policies = st.sampled_from(list(POLICIES))
no_lora = st.just(0)
allowed_modes = st.none() | st.frozensets(st.sampled_from(RuntimeMode)) | st.just(frozenset(RuntimeMode))


@st.composite
def decodes(draw, *, min_drafts=0, max_drafts=MAX_QUERY_LEN, lora_ids=no_lora):
    """
    A request whose newest token alone is missing from the KV cache, with or without drafts to verify.
    """
    num_prompt = draw(prompt_lens)
    num_known = num_prompt + draw(st.integers(1, 16))
    num_drafts = draw(st.integers(min_drafts, max_drafts))
    return ScheduledRequest(
        1 + num_drafts, num_known - 1, num_known, num_drafts, num_prompt, lora_id=draw(lora_ids)
    )


@st.composite
def prefills(draw, *, lora_ids=no_lora):
    """
    A request that computes prompt tokens, whole or in chunks, or recomputes after a preemption.
    """
    num_prompt = draw(prompt_lens)
    num_generated = draw(st.integers(0, 16))
    num_known = num_prompt + num_generated
    # Past the prompt, with one token missing, it would be a decode.
    num_computed = draw(st.integers(0, max(num_prompt - 1, num_known - 2)))
    num_scheduled = draw(st.integers(1, num_known - num_computed))
    return ScheduledRequest(
        num_scheduled,
        num_computed,
        num_known,
        num_prompt=num_prompt,
        lora_id=draw(lora_ids),
        resumed=num_generated > 0,
    )


@st.composite
def scheduled_requests(draw, *, query_len=1, max_size=MAX_NUM_SEQS):
    """
    The requests of one step; steps of decodes only come up often enough to matter.
    """
    lora_ids = draw(st.sampled_from([no_lora, no_lora, no_lora, st.integers(0, 3)]))
    uniform = decodes(min_drafts=query_len - 1, max_drafts=query_len - 1, lora_ids=lora_ids)
    ragged = decodes(max_drafts=query_len - 1, lora_ids=lora_ids)
    prefill = prefills(lora_ids=lora_ids)
    return draw(st.lists(draw(st.sampled_from([uniform, ragged, prefill, ragged | prefill])), max_size=max_size))


@st.composite
def batches(draw, *, query_len=1, max_num_seqs=MAX_NUM_SEQS):
    """
    A classified batch.
    """
    return Batch.of(draw(scheduled_requests(query_len=query_len, max_size=max_num_seqs)), query_len=query_len)


@st.composite
def capture_plans(draw, *, query_len=1, max_num_seqs=MAX_NUM_SEQS):
    """
    A plan that a server of this query length and number of requests can use; either mode may be empty.
    """
    reqs = draw(st.sets(st.integers(1, max_num_seqs), min_size=draw(st.integers(0, min(3, max_num_seqs)))))
    piecewise_sizes = draw(st.sets(st.integers(1, 64), min_size=draw(st.integers(0, 3)), max_size=8))
    return CapturePlan([query_len * r for r in sorted(reqs)], sorted(piecewise_sizes))


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
    )


@st.composite
def steps(draw):
    """
    A dispatcher, a batch it may meet, and the modes allowed in that step.
    """
    dispatcher = draw(dispatchers())
    batch = draw(batches(query_len=dispatcher.query_len, max_num_seqs=dispatcher.max_num_seqs))
    return dispatcher, batch, draw(allowed_modes)
