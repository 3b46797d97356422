"""
The compact scheduler beside vLLM's own, on the same requests: every decision, delivery and free block is compared.

Also the prefix cache is: which blocks would be given away in which order, by the number each was cached under. A
difference there would show in a later batch only, if at all.
"""

import os
import random
from collections import Counter, deque
from pathlib import Path

import pytest

from aclgraph_dispatch.bench.compact_scheduler import CompactScheduler
from aclgraph_dispatch.bench.requests import simulated_requests
from aclgraph_dispatch.bench.scheduling import SchedulerSettings, SimulatedRequest
from aclgraph_dispatch.bench.traces import read_trace
from aclgraph_dispatch.bench.vllm_scheduler import VllmScheduler
from aclgraph_dispatch.errors import ConfigError

SHARED = Path(os.environ.get("ACLGRAPH_DISPATCH_SHARED", "../shared"), "traces")
TRACES = [
    "azure_code_2023_5min",
    "azure_conv_2023_5min",
    "mooncake_conversation_5min",
    "servegen_deepseek_r1_5min",
    "sharegpt_300_llama-3.1-8b",
]

COLUMNS = ("num_scheduled", "num_computed", "num_known", "num_drafts", "num_prompt")
COUNTS = ("num_running", "num_waiting", "num_preemptions", "num_free_blocks")

MAX_STEPS = 1_000_000
"""More than any run takes: a request that cannot be served would be waited for for ever."""


class Both:
    """
    Two schedulers that are asked the same; both must answer the same.

    Args:
        settings: Of both.
        sees_cache: Whether the order of free blocks is compared too, which takes long with many of them.
    """

    def __init__(self, settings, *, sees_cache):
        self.vllm, self.compact = VllmScheduler(settings), CompactScheduler(settings)
        self.num_spec_tokens = settings.num_spec_tokens
        self.sees_cache = sees_cache
        self.under_way = deque()
        self.admitted = set()
        self.seen = Counter()

    def add(self, request):
        self.vllm.add(request)
        self.compact.add(request)

    def has_requests(self):
        assert self.vllm.has_requests() == self.compact.has_requests()
        return self.compact.has_requests()

    def schedule(self):
        running = {int(request.request_id) for request in self.vllm._scheduler.running}
        num_cached = num_cached_keys(self.vllm)
        expected, actual = self.vllm.schedule(), self.compact.schedule()

        assert rows(expected) == rows(actual)
        self.compare_state()
        self.count(actual, running)
        self.seen["steps with evictions"] += num_cached_keys(self.vllm) < num_cached
        if self.sees_cache:
            self.seen["steps with doubles"] += any(
                len(blocks) > 1 for blocks in self.compact._pool._cached.values()
            )
        self.under_way.append((expected, actual))
        return actual

    def update(self, rng):
        expected, actual = self.under_way.popleft()
        num_sampled = actual.num_sampled()
        for i, num_drafts in enumerate(actual.num_drafts.tolist()):
            if num_drafts:
                num_accepted = rng.randint(0, num_drafts)
                num_sampled[i] += num_accepted
                self.seen["rejected drafts"] += num_drafts - num_accepted
        requests = self.vllm._scheduler.requests
        stale = {i for i in actual.requests if str(i) in requests and requests[str(i)].num_stale_output_tokens}
        theirs, ours = self.vllm.update(expected, list(num_sampled)), self.compact.update(actual, num_sampled)

        assert theirs == ours
        self.compare_state()
        self.seen["deliveries"] += len(ours)
        self.seen["stale deliveries"] += sum(delivery.request in stale for delivery in ours)
        self.seen["ends while waiting"] += sum(d.request in stale and d.is_finished for d in ours)
        return ours

    def compare_state(self):
        for name in COUNTS:
            assert (name, getattr(self.vllm, name)) == (name, getattr(self.compact, name))
        if self.sees_cache:
            self.compare_cache()

    def compare_cache(self):
        assert their_free_blocks(self.vllm) == our_free_blocks(self.compact)

    def count(self, step, running):
        """
        What was special in *step*, before which the requests *running* ran.
        """
        seen = self.seen
        seen["steps"] += 1
        seen["preemptions"] = self.compact.num_preemptions
        for request, num_scheduled, num_computed, num_known, num_drafts, num_prompt in rows(step):
            seen["chunks"] += num_computed + num_scheduled < num_known
            seen["cut drafts"] += request in running and 0 < num_drafts < self.num_spec_tokens
            if request not in running:
                seen["prefix hits"] += num_computed > 0
                seen["padded decodes"] += num_drafts > 0
                seen["resumptions"] += request in self.admitted
                seen["hits of own tokens"] += num_computed > num_prompt
                self.admitted.add(request)


def rows(step):
    """
    Of each request its index and the numbers of its columns.
    """
    return list(zip(step.requests, *(getattr(step, name).tolist() for name in COLUMNS), strict=True))


def their_free_blocks(scheduler):
    """
    The keys of vLLM's free blocks, in the order in which they are given away; None for those that have none.
    """
    pool = scheduler._scheduler.kv_cache_manager.block_pool
    keys = []
    for block in pool.free_block_queue.get_all_free_blocks():
        if block.block_hash is None:
            keys.append(None)
            continue
        # The hash is the kind and the number, and the number of the group follows.
        is_shared, number = block.block_hash[0], int.from_bytes(block.block_hash[1:17], "big", signed=True)
        keys.append(number if is_shared else (number >> 32, number & 0xFFFFFFFF))
    return keys


def our_free_blocks(scheduler):
    """
    The same of the compact scheduler.
    """
    pool = scheduler._pool
    return [None] * pool._num_blank + [block.key for block in pool._unused]


def num_cached_keys(scheduler):
    """
    The number of keys under which vLLM's scheduler finds a block.
    """
    return len(scheduler._scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)


def run_both(settings, requests, rng, *, step_seconds, sees_cache=False):
    """
    What was seen while both schedulers served *requests*, as an engine core steps them.

    Args:
        settings: Of both.
        requests: In order of arrival.
        rng: Says how many drafts are accepted.
        step_seconds: The time of a step by its number of tokens.
        sees_cache: See `Both`.
    """
    both = Both(settings, sees_cache=sees_cache)
    depth = 2 if settings.async_scheduling else 1
    arrivals = deque(requests)
    ends = deque()
    now = last_end = 0.0
    delivered = Counter()
    for _ in range(MAX_STEPS):
        while arrivals and arrivals[0].arrival_seconds <= now:
            both.add(arrivals.popleft())
        if both.has_requests():
            step = both.schedule()
            if step.requests:
                last_end = max(now, last_end) + step_seconds(step.num_tokens)
            ends.append(last_end if step.requests else now)
            if len(ends) < depth:
                continue
        elif not ends:
            if not arrivals:
                break
            now = arrivals[0].arrival_seconds
            continue
        now = max(now, ends.popleft())
        for delivery in both.update(rng):
            delivered[delivery.request] += delivery.num_tokens
    else:
        pytest.fail("the requests are never done")

    both.compare_cache()
    expected = {r.index: min(r.output_tokens, settings.max_model_len - r.prompt_tokens) for r in requests}
    assert expected == delivered
    both.seen["stops at the longest sequence"] += sum(expected[r.index] < r.output_tokens for r in requests)
    both.seen["cases"] += 1
    return both.seen


def random_case(rng, settings):
    """
    Settings and requests in which memory is short, prefixes are shared, and lengths are at their limits.

    Args:
        rng: Decides.
        settings: Those that are set.
    """
    block_size = rng.choice([1, 2, 4, 8, 16])
    num_drafts = settings["num_spec_tokens"]
    max_model_len = rng.randint(12, 90)
    settings = SchedulerSettings(
        max_num_seqs=rng.randint(1, 10),
        max_num_batched_tokens=rng.randint(1 + num_drafts, 60),
        max_model_len=max_model_len,
        # The longest sequence fits, after the block that vLLM keeps, and little more.
        num_blocks=1 + -(-max_model_len // block_size) + rng.randint(0, 100 // block_size),
        block_size=block_size,
        long_prefill_token_threshold=rng.choice([0, 0, min(1 + num_drafts + rng.randint(0, 12), max_model_len)]),
        **settings,
    )
    burst = rng.choice([0.0, 1.0, 5.0])
    arrival_seconds = 0.0
    requests = []
    for index in range(rng.randint(1, 24)):
        arrival_seconds += burst * rng.expovariate(1.0)
        longest = rng.choice([8, max_model_len - 1])
        prompt_tokens = rng.choice([rng.randint(1, longest), max(1, longest - rng.randint(0, 6))])
        # The longer prompts of a family have the shorter ones' blocks first.
        family, num_shared = rng.randint(0, 3), rng.randint(0, prompt_tokens // block_size)
        blocks = tuple(family * 1000 + i for i in range(num_shared))
        requests.append(
            SimulatedRequest(index, arrival_seconds, prompt_tokens, rng.randint(1, rng.choice([3, 60])), blocks)
        )
    return settings, requests


def run_random_cases(seeds, **settings):
    """
    What was seen in the cases of *seeds*.
    """
    seen = Counter()
    for seed in seeds:
        rng = random.Random(f"{seed} {settings}")
        case_settings, requests = random_case(rng, settings)
        try:
            seen += run_both(
                case_settings, requests, rng, step_seconds=lambda tokens: 1.0 + 0.02 * tokens, sees_cache=True
            )
        except AssertionError as error:
            error.add_note(f"seed {seed}: {case_settings}, {requests}")
            raise
    return seen


def run_trace(name, *, limit, is_short_of_blocks, **settings):
    """
    What was seen in a run over a shared trace.

    Args:
        name: Of the trace.
        limit: The number of requests; None for all.
        is_short_of_blocks: Whether there are hardly more blocks than the longest request takes.
        settings: Those that are not the usual ones.
    """
    path = SHARED / f"{name}.csv.gz"
    if not path.exists():
        pytest.skip("the shared traces are not there")
    max_model_len = 131072
    requests = simulated_requests(read_trace(path, limit=limit), max_model_len=max_model_len)
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    settings = SchedulerSettings(
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=max_model_len,
        num_blocks=1 + -(-longest // 16) + 256 if is_short_of_blocks else 100_000,
        **settings,
    )
    # About what a model of 8 billion parameters takes.
    return run_both(settings, requests, random.Random(0), step_seconds=lambda tokens: 0.015 + 6e-5 * tokens)


def expected_to_be_seen(settings):
    """
    What random cases must contain, so that they can tell a wrong scheduler from a right one.
    """
    names = {"preemptions", "resumptions", "chunks", "stops at the longest sequence"}
    if settings["enable_prefix_caching"]:
        names |= {"prefix hits", "hits of own tokens", "steps with evictions", "steps with doubles"}
    if settings["async_scheduling"]:
        names |= {"stale deliveries", "ends while waiting"}
    if settings["num_spec_tokens"]:
        names |= {"rejected drafts", "padded decodes"}
    if settings["num_spec_tokens"] > 1:
        names |= {"cut drafts"}
    return names


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 700), marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("num_spec_tokens", [0, 1, 4])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_random_cases(async_scheduling, enable_prefix_caching, num_spec_tokens, seeds):
    """
    Whatever comes, short of memory and at all limits, both decide the same; and what is difficult did come.
    """
    settings = {
        "async_scheduling": async_scheduling,
        "enable_prefix_caching": enable_prefix_caching,
        "num_spec_tokens": num_spec_tokens,
    }
    seen = run_random_cases(seeds, **settings)
    seldom = {name for name in expected_to_be_seen(settings) if seen[name] < 3}

    assert set() == seldom, dict(seen)
    assert len(seeds) == seen["cases"]


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("is_short_of_blocks", [False, True])
def test_start_of_traces(name, is_short_of_blocks):
    """
    The first requests of every shared trace are scheduled the same, with blocks for all and with hardly enough.
    """
    seen = run_trace(name, limit=200, is_short_of_blocks=is_short_of_blocks)

    assert is_short_of_blocks == (seen["preemptions"] > 0)
    assert seen["chunks"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("is_short_of_blocks", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": False},
        {"enable_prefix_caching": False},
        {"num_spec_tokens": 3},
        {"num_spec_tokens": 1, "async_scheduling": False},
        {"long_prefill_token_threshold": 512},
    ],
    ids=str,
)
def test_traces(name, is_short_of_blocks, settings):
    """
    Every shared trace as a whole is scheduled the same.
    """
    seen = run_trace(name, limit=None, is_short_of_blocks=is_short_of_blocks, **settings)

    assert is_short_of_blocks == (seen["preemptions"] > 0)


def test_threshold_within_drafts():
    """
    A threshold that cuts the drafts of a resumed request is refused; vLLM's scheduler fails with it.
    """
    settings = SchedulerSettings(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        num_blocks=64,
        num_spec_tokens=3,
        long_prefill_token_threshold=3,
    )
    vllm = VllmScheduler(settings)
    vllm.add(SimulatedRequest(0, 0.0, 17, 4, blocks=(7,)))
    vllm.schedule()
    # Of the second's prompt all but one token is cached then.
    vllm.add(SimulatedRequest(1, 0.0, 17, 4, blocks=(7,)))
    with pytest.raises(AssertionError):
        vllm.schedule()

    with pytest.raises(ConfigError, match=r"must be 0 or > num_spec_tokens \(3\): 3"):
        CompactScheduler(settings)


def test_prompt_of_the_longest_sequence():
    """
    A prompt that leaves no room for a token never comes from an engine's front end, and is refused.
    """
    scheduler = CompactScheduler(
        SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=64)
    )
    with pytest.raises(ConfigError, match=r"request 5: prompt_tokens must be < max_model_len \(64\): 64"):
        scheduler.add(SimulatedRequest(5, 0.0, 64, 1))

    assert not scheduler.has_requests()


def test_order_of_updates():
    """
    Steps are updated in their order, each once, before a third is scheduled.
    """
    scheduler = CompactScheduler(
        SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=64)
    )
    scheduler.add(SimulatedRequest(0, 0.0, 8, 8))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(ValueError, match="must be updated before"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="in the order"):
        scheduler.update(second, [1])
    scheduler.update(first, [1])
    with pytest.raises(ValueError, match="in the order"):
        scheduler.update(first, [1])

    assert [(0, 1, False)] == [(d.request, d.num_tokens, d.is_finished) for d in scheduler.update(second, [1])]
