"""
Twelve batches that are easily misrouted, and some more, with what must become of them.

Every row is a batch, the engine it meets, and the answer: mode and size of the graph, then the reason; "pads
drafts" where ragged drafts are laid out as uniform ones. Sizes are in tokens, `k` is the number of drafts, so that
a uniform decode has 1 + k tokens. The numbers are those of the collection that the scenarios come from.

What dispatcher and agreement do not decide is tested where it is decided: that padded drafts change no token, and
need no room in the KV cache (7), in integrations/test_draft_padding.py; parameters of replays and their order (12)
in test_params.py and backends/; the votes of real ranks (9) in integrations/test_ranks.py; adapters in graphs (10)
in integrations/test_lora.py.
"""

from itertools import permutations

import pytest

from aclgraph_dispatch import (
    BackendTraits,
    Batch,
    BatchDescriptor,
    CapturePlan,
    DispatchConfig,
    Dispatcher,
    FullGraphs,
    RuntimeMode,
    ScheduledRequest,
)
from aclgraph_dispatch.agreement import Vote, agree
from aclgraph_dispatch.errors import ConfigError

NONE, PIECEWISE, FULL = RuntimeMode

# What a request can be.


def decode(drafts=0, *, known=103, lora=0):
    """
    All but the newest token is computed, and the prompt of 100 is done.
    """
    return ScheduledRequest(1 + drafts, known - 1, known, drafts, num_prompt=100, lora_id=lora)


def prompt(length, *, computed=0, chunk=None):
    """
    *chunk* tokens of a prompt, by default all that are left.
    """
    return ScheduledRequest(chunk or length - computed, computed, length, num_prompt=length)


def resumed(computed, scheduled, drafts=0):
    """
    A prompt of 100 with 20 generated tokens, back from a preemption.
    """
    return ScheduledRequest(scheduled, computed, 120, drafts, num_prompt=100, resumed=True)


# What an engine can be.


class Engine:
    """
    A dispatcher and what its batches are classified with; by default of vLLM's sizes up to 512.
    """

    def __init__(
        self,
        *,
        k=0,
        full=None,
        piecewise=None,
        policy="full_and_piecewise",
        max_num_seqs=512,
        max_model_len=None,
        lora_cases=(0,),
        full_graphs=FullGraphs.UNIFORM,
        extend_equals_decode=False,
        role="target",
    ):
        sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
        fillable = [size for size in sizes if size % (1 + k) == 0 and size <= (1 + k) * max_num_seqs]
        self.classified_with = {
            "query_len": 1 + k,
            "max_model_len": max_model_len,
            "extend_equals_decode": extend_equals_decode,
        }
        self.dispatcher = Dispatcher(
            CapturePlan(fillable if full is None else full, sizes if piecewise is None else piecewise, lora_cases),
            policy=policy,
            query_len=1 + k,
            max_num_seqs=max_num_seqs,
            traits=BackendTraits(full_graphs, extend_equals_decode),
            role=role,
        )

    def classify(self, requests):
        """
        The batch of *requests*.
        """
        return Batch.of(requests, **self.classified_with)

    def answer(self, requests, allowed=None):
        """
        What becomes of *requests*, in words.
        """
        return in_words(self.dispatcher.dispatch(self.classify(requests), allowed))


def in_words(step_plan):
    """
    A plan as it is written in the tables.
    """
    if not step_plan.parts:
        return "nothing"
    [part] = step_plan.parts
    pads = ", pads drafts" if part.pads_drafts else ""
    return f"{part.mode.name}-{part.num_padded_tokens} {part.reason.value}{pads}"


def planned(*, k=0, policy="full_decode_only", config=None, ladder, max_num_seqs, budget=8192, is_chosen=True):
    """
    The sizes that are captured: the engine's, or those of the user's *config*.
    """
    plan = DispatchConfig(**config or {}).capture_plan(
        policy,
        ladder,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        query_len=1 + k,
        is_chosen=is_chosen,
    )
    return {"full": plan.full_sizes, "piecewise": plan.piecewise_sizes}


DECODE_ONLY = {"policy": "full_decode_only"}
STATELESS = {"extend_equals_decode": True}
VARIABLE = {"full_graphs": FullGraphs.RAGGED}

# 1: vLLM's own sizes for 12 requests, and a user's list that ends before them.
TO_12 = DECODE_ONLY | {"max_num_seqs": 12} | planned(ladder=(1, 2, 4, 8, 12, 16, 24), max_num_seqs=12)
TO_8 = DECODE_ONLY | {"max_num_seqs": 12, "full": (1, 2, 4, 8)}

# 2: sizes of the user that are no multiples of 4, and sizes that are.
OFF_4 = DECODE_ONLY | {"k": 3, "max_num_seqs": 5} | planned(k=3, ladder=(1, 2, 4, 8), max_num_seqs=5)
ON_4 = DECODE_ONLY | {"k": 3, "max_num_seqs": 5, "full": (4, 8, 16, 20)}

# 3: sizes of decodes between those of everything else.
INTERLEAVED = {"k": 2, "max_num_seqs": 8} | planned(
    k=2, policy="full_and_piecewise", ladder=(1, 2, 4, 8, 16, 24), max_num_seqs=8
)

# 4, 5: graphs of four requests with 3 drafts.
VERIFYING = {"k": 3, "full": (4, 8, 12, 16), "piecewise": (1, 2, 4, 8, 16), "max_num_seqs": 4}
PLAIN = {"full": (1, 2, 4, 8), "piecewise": (1, 2, 4, 8), "max_num_seqs": 8}

# 7: a decode node, of eight requests with 3 drafts.
NODE = {"k": 3, "full": (4, 8, 16, 24, 32), "piecewise": (8, 16, 32), "max_num_seqs": 8, "max_model_len": 4096}
NODE_OF_30 = NODE | planned(
    k=3, policy="full_and_piecewise", ladder=(4, 8, 16, 24, 30, 32), max_num_seqs=8, budget=30
)
TRANSFERRED = [*[decode(3)] * 7, decode()]

# 11: most graphs of PIECEWISE are too many pieces to be had.
FEW_PIECEWISE = {"full": (1, 2, 4, 8), "piecewise": (160, 512)}

SCENARIOS = [
    # 1. Off-grid ceiling.
    ("1: 5 decodes", TO_12, [decode()] * 5, "FULL-8 padded"),
    ("1: 9 decodes", TO_12, [decode()] * 9, "FULL-12 padded"),
    ("1: 12 decodes", TO_12, [decode()] * 12, "FULL-12 exact"),
    ("1: 8 decodes, sizes to 8", TO_8, [decode()] * 8, "FULL-8 exact"),
    ("1: 9 decodes, sizes to 8", TO_8, [decode()] * 9, "NONE-9 over_max"),
    ("1: 12 decodes, sizes to 8", TO_8, [decode()] * 12, "NONE-12 over_max"),
    # 2. Sizes not multiples of the query length.
    ("2: 2 decodes, rounded", OFF_4, [decode(3)] * 2, "FULL-8 exact"),
    ("2: 3 decodes, rounded", OFF_4, [decode(3)] * 3, "NONE-12 over_max"),
    ("2: 5 decodes, rounded", OFF_4, [decode(3)] * 5, "NONE-20 over_max"),
    ("2: 3 decodes, a dummy request", ON_4, [decode(3)] * 3, "FULL-16 padded"),
    ("2: 5 decodes", ON_4, [decode(3)] * 5, "FULL-20 exact"),
    # 3. Interleaved ladders: not PIECEWISE-16.
    ("3: 4 decodes", INTERLEAVED, [decode(2)] * 4, "FULL-18 padded"),
    ("3: 5 decodes", INTERLEAVED, [decode(2)] * 5, "FULL-18 padded"),
    ("3: 7 decodes", INTERLEAVED, [decode(2)] * 7, "FULL-24 padded"),
    # 4. Prompts that look like decodes.
    ("4a: new prompt", VERIFYING, [prompt(4)], "PIECEWISE-4 prefill"),
    ("4b: last chunk", VERIFYING, [prompt(68, computed=64)], "PIECEWISE-4 prefill"),
    ("4c: cached prefix", VERIFYING, [prompt(132, computed=128)], "PIECEWISE-4 prefill"),
    ("4a: stateless", VERIFYING | STATELESS, [prompt(4)], "PIECEWISE-4 prefill"),
    ("4b: stateless", VERIFYING | STATELESS, [prompt(68, computed=64)], "PIECEWISE-4 prefill"),
    ("4c: stateless", VERIFYING | STATELESS, [prompt(132, computed=128)], "PIECEWISE-4 prefill"),
    ("4d: one-token prompt", PLAIN, [prompt(1)], "PIECEWISE-1 prefill"),
    ("4d: stateless", PLAIN | STATELESS, [prompt(1)], "PIECEWISE-1 prefill"),
    ("4d: no PIECEWISE", PLAIN | DECODE_ONLY, [prompt(1)], "NONE-1 prefill"),
    ("4e: last token of a prompt", PLAIN, [prompt(65, computed=64)], "PIECEWISE-1 prefill"),
    ("4e: stateless", PLAIN | STATELESS, [prompt(65, computed=64)], "FULL-1 exact"),
    ("4e: last token of a prompt, drafts", VERIFYING, [prompt(65, computed=64)], "PIECEWISE-1 prefill"),
    ("4e: stateless, drafts", VERIFYING | STATELESS, [prompt(65, computed=64)], "FULL-4 padded, pads drafts"),
    ("4: chunk of one token", PLAIN | STATELESS, [prompt(65, computed=9, chunk=1)], "PIECEWISE-1 prefill"),
    ("4: one of four", VERIFYING, [*[decode(3)] * 3, prompt(68, computed=64)], "PIECEWISE-16 mixed"),
    ("4: one of four, stateless", VERIFYING | STATELESS, [*[decode(3)] * 3, prompt(4)], "PIECEWISE-16 mixed"),
    # 5. Resumed after a preemption.
    ("5: recomputes 4", VERIFYING, [resumed(116, 4)], "PIECEWISE-4 prefill"),
    ("5: recomputes 4, stateless", VERIFYING | STATELESS, [resumed(116, 4)], "PIECEWISE-4 prefill"),
    ("5: verifies 3", VERIFYING, [resumed(119, 4, 3)], "FULL-4 exact"),
    ("5: 1 left, others verify", VERIFYING, [decode(3), resumed(119, 1)], "FULL-8 padded, pads drafts"),
    (
        "5: 1 left, others verify, no room",
        VERIFYING | {"max_model_len": 122},
        [decode(3), resumed(119, 1)],
        "PIECEWISE-8 ragged",
    ),
    ("5: recomputes, others verify", VERIFYING, [decode(3), resumed(116, 4)], "PIECEWISE-8 mixed"),
    # 6. As many tokens as requests.
    ("6: stateful", PLAIN, [*[decode()] * 7, prompt(65, computed=64)], "PIECEWISE-8 mixed"),
    ("6: stateless", PLAIN | STATELESS, [*[decode()] * 7, prompt(65, computed=64)], "FULL-8 exact"),
    ("6: first token", PLAIN | STATELESS, [*[decode()] * 7, prompt(1)], "PIECEWISE-8 mixed"),
    ("6: 7 decodes", PLAIN, [decode()] * 7, "FULL-8 padded"),
    # 7. Ragged drafts.
    ("7: padded", NODE, TRANSFERRED, "FULL-32 padded, pads drafts"),
    ("7: variable lengths", NODE | VARIABLE, TRANSFERRED, "FULL-32 padded"),
    ("7: too long to pad", NODE | {"max_model_len": 105}, TRANSFERRED, "PIECEWISE-32 ragged"),
    (
        "7: too long to pad, no PIECEWISE",
        NODE | DECODE_ONLY | {"max_model_len": 105},
        TRANSFERRED,
        "NONE-29 ragged",
    ),
    ("7: too long, but lengths vary", NODE | VARIABLE | {"max_model_len": 105}, TRANSFERRED, "FULL-32 padded"),
    # No graph has more tokens than a step: what cannot be padded within the budget has no graph to be padded to.
    ("7: budget of 30", NODE_OF_30, TRANSFERRED, "PIECEWISE-30 ragged"),
    ("7: budget of 30, no PIECEWISE", NODE_OF_30 | DECODE_ONLY, TRANSFERRED, "NONE-29 ragged"),
    ("7: prompt left", NODE, [*[decode(3)] * 7, prompt(65, computed=64)], "PIECEWISE-32 mixed"),
    (
        "7: more than a token of it left",
        NODE | STATELESS,
        [*[decode(3)] * 7, prompt(65, computed=9, chunk=1)],
        "PIECEWISE-32 mixed",
    ),
    # What a decode node gets: to a stateless backend the last token of a prompt is a decode without drafts.
    (
        "7: last token of a prompt, stateless",
        NODE | STATELESS,
        [*[decode(3)] * 7, prompt(65, computed=64)],
        "FULL-32 padded, pads drafts",
    ),
    (
        "7: prompt left, variable lengths",
        NODE | VARIABLE,
        [*[decode(3)] * 7, prompt(65, computed=63)],
        "PIECEWISE-32 mixed",
    ),
    # 8. Mixed, over the ceiling; not split.
    ("8: 36 + 1000", {}, [*[decode()] * 36, prompt(1000)], "NONE-1036 over_max"),
    ("8: 36 + 100", {}, [*[decode()] * 36, prompt(100)], "PIECEWISE-136 mixed"),
    ("8: 36 decodes", {}, [decode()] * 36, "FULL-40 padded"),
    # 11. Few sizes of PIECEWISE.
    ("11: 4 decodes", FEW_PIECEWISE, [decode()] * 4, "FULL-4 exact"),
    ("11: 9 decodes", FEW_PIECEWISE, [decode()] * 9, "PIECEWISE-160 over_max"),
    ("11: 36 + 100", FEW_PIECEWISE, [*[decode()] * 36, prompt(100)], "PIECEWISE-160 mixed"),
    # Fewer drafts: for all requests, near the end of one, or none.
    ("dynamic k", NODE, [decode(1)] * 3, "FULL-16 padded, pads drafts"),
    ("dynamic k, two", NODE, [decode(1)] * 2, "FULL-8 padded, pads drafts"),
    ("dynamic k, no drafts", NODE, [decode()] * 4, "FULL-16 padded, pads drafts"),
    (
        "last drafts of a request",
        NODE | {"max_model_len": 104},
        [decode(1), decode(3, known=101)],
        "PIECEWISE-8 ragged",
    ),
    ("more drafts than k", NODE, [decode(4), decode(2)], "PIECEWISE-8 ragged"),
    # A backend with graphs of one token a request: the target has drafts to verify, the drafter has not.
    (
        "one-token graphs, target",
        {"k": 2, "full": (3, 6), "piecewise": (8,), "full_graphs": FullGraphs.SINGLE_TOKEN},
        [decode(2)] * 2,
        "PIECEWISE-8 backend_limit",
    ),
    (
        "one-token graphs, target, no PIECEWISE",
        DECODE_ONLY | {"k": 2, "full": (3, 6), "full_graphs": FullGraphs.SINGLE_TOKEN},
        [decode(2)] * 2,
        "NONE-6 backend_limit",
    ),
    (
        "one-token graphs, drafter",
        {"full": (2, 4), "full_graphs": FullGraphs.SINGLE_TOKEN, "role": "draft"},
        [decode()] * 2,
        "FULL-2 exact",
    ),
    ("no FULL graphs", {"full_graphs": FullGraphs.NEVER}, [decode()] * 8, "PIECEWISE-8 backend_limit"),
    ("empty batch", {}, [], "nothing"),
    ("no sizes", {"full": (), "piecewise": ()}, [decode()] * 8, "NONE-8 not_captured"),
    ("no sizes of FULL", {"full": (), "piecewise": (8,)}, [decode()] * 8, "PIECEWISE-8 not_captured"),
    ("no graphs wanted", {"policy": "eager"}, [decode()] * 8, "NONE-8 disabled"),
    ("adapters without graphs", {}, [decode(lora=7)] * 8, "NONE-8 not_captured"),
    (
        "adapters and drafts",
        NODE | {"lora_cases": (0, 1)},
        [decode(3, lora=7), decode()],
        "FULL-8 padded, pads drafts",
    ),
]


@pytest.mark.parametrize(
    ("engine", "requests", "answer"), [row[1:] for row in SCENARIOS], ids=[row[0] for row in SCENARIOS]
)
def test_scenario(engine, requests, answer):
    """
    The batch meets what it should, for the reason it should.
    """
    assert answer == Engine(**engine).answer(requests)


def test_planned_sizes():
    """
    1 to 3: without the user's doing there is a graph for every decode batch, and none that no batch fills; what
    the user asks for stays as it is, in whole requests.
    """
    assert (1, 2, 4, 8, 12) == TO_12["full"]
    assert (4, 8) == OFF_4["full"]
    assert (3, 6, 9, 18, 24) == INTERLEAVED["full"]
    assert (4, 8, 16, 24, 28) == NODE_OF_30["full"]
    # Nobody chose vLLM's ladder: it is read in requests, so that no batch of decodes is left over, whatever k.
    for k in range(5):
        of_any_k = planned(k=k, ladder=(1, 2, 4, 8, 16, 512), max_num_seqs=300, is_chosen=False)
        assert tuple((1 + k) * n for n in (1, 2, 4, 8, 16, 300)) == of_any_k["full"]
    assert (4, 8, 16, 28) == planned(k=3, ladder=(1, 2, 4, 8), max_num_seqs=8, budget=30, is_chosen=False)["full"]
    assert (3, 6) == planned(k=2, config={"threshold": 8}, ladder=(1, 2, 4), max_num_seqs=8, is_chosen=False)[
        "full"
    ]
    assert {"full": (1, 2, 4, 8), "piecewise": ()} == planned(
        config={"full_sizes": (1, 2, 4, 8)}, ladder=(1, 2, 4, 8, 12), max_num_seqs=12
    )


def test_sizes_beyond_the_budget():
    """
    Of vLLM's sizes those that no step fills are left out; the user who asks for one is told.
    """
    assert (1, 2, 4) == planned(ladder=(1, 2, 4, 8), max_num_seqs=8, budget=6)["full"]
    with pytest.raises(
        ConfigError, match="'full_sizes' must be <= max_num_batched_tokens = 6, no step fills more: 8"
    ):
        planned(config={"full_sizes": (4, 8)}, ladder=(), max_num_seqs=8, budget=6)


# Ranks: 9, and what cascade attention on one of them does to the others.


def together(engine, ranks):
    """
    What each rank runs once all have voted; *ranks* are requests, and the allowed modes if not all are.
    """
    dispatcher, plans = engine.dispatcher, []
    for requests, allowed in ranks:
        batch = engine.classify(requests)
        plans.append((batch, dispatcher.dispatch(batch, allowed)))
    agreed = agree([dispatcher.vote(batch, plan) for batch, plan in plans], len(ranks))
    return [in_words(dispatcher.settle(batch, plan, agreed)) for batch, plan in plans]


IDLE = []
NO_FULL = frozenset({PIECEWISE})

RANKS = [
    (
        "9: a prefill of 300",
        {},
        {
            "12 decodes": ([decode()] * 12, None, "PIECEWISE-304 rank_vote"),
            "idle": (IDLE, None, "PIECEWISE-304 rank_vote"),
            "prefill": ([prompt(300)], None, "PIECEWISE-304 prefill"),
        },
    ),
    (
        "9: a prefill of 700",
        {},
        {
            "12 decodes": ([decode()] * 12, None, "NONE-12 rank_vote"),
            "idle": (IDLE, None, "NONE-1 rank_vote"),
            "prefill": ([prompt(700)], None, "NONE-700 over_max"),
        },
    ),
    (
        "9: decodes only",
        {},
        {
            "12 decodes": ([decode()] * 12, None, "FULL-24 rank_vote"),
            "idle": (IDLE, None, "FULL-24 rank_vote"),
            "24 decodes": ([decode()] * 24, None, "FULL-24 exact"),
        },
    ),
    (
        "9: nothing at all",
        {},
        {
            "idle": (IDLE, None, "nothing"),
            "idle too": (IDLE, None, "nothing"),
            "and idle": (IDLE, None, "nothing"),
        },
    ),
    (
        "9: padded drafts need the most room",
        NODE,
        {
            "7 x 4 + 1": (TRANSFERRED, None, "FULL-32 padded, pads drafts"),
            "idle": (IDLE, None, "FULL-32 rank_vote"),
            "2 x 4": ([decode(3)] * 2, None, "FULL-32 rank_vote"),
        },
    ),
    (
        "9: no drafts at all on one rank",
        NODE,
        {
            "8 x 1": ([decode()] * 8, None, "FULL-32 padded, pads drafts"),
            "idle": (IDLE, None, "FULL-32 rank_vote"),
            "3 x 4": ([decode(3)] * 3, None, "FULL-32 rank_vote"),
        },
    ),
    (
        "9: one rank cannot pad",
        NODE | {"max_model_len": 120},
        {
            "2 x 4": ([decode(3)] * 2, None, "PIECEWISE-8 rank_vote"),
            "idle": (IDLE, None, "PIECEWISE-8 rank_vote"),
            "near the end": ([decode(1, known=119), decode(3)], None, "PIECEWISE-8 ragged"),
        },
    ),
    (
        "10: one rank has an adapter",
        {"lora_cases": (0, 1)},
        {
            "8 decodes": ([decode()] * 8, None, "FULL-8 rank_vote"),
            "idle": (IDLE, None, "FULL-8 rank_vote"),
            "8 decodes, adapter": ([decode(lora=7)] * 8, None, "FULL-8 exact"),
        },
    ),
    (
        "cascade attention on one rank",
        {},
        {
            "12 decodes": ([decode()] * 12, None, "PIECEWISE-16 rank_vote"),
            "cascade": ([decode()] * 8, NO_FULL, "PIECEWISE-16 rank_vote"),
            "16 decodes": ([decode()] * 16, None, "PIECEWISE-16 rank_vote"),
        },
    ),
]


@pytest.mark.parametrize(("engine", "ranks"), [row[1:] for row in RANKS], ids=[row[0] for row in RANKS])
def test_ranks(engine, ranks):
    """
    Whatever the order of the ranks, all run the same mode, in the size of the largest if there is a graph.
    """
    for order in permutations(ranks.values()):
        answers = together(Engine(**engine), [(requests, allowed) for requests, allowed, _ in order])

        assert [answer for *_, answer in order] == answers


def test_ranks_say_the_same_of_all():
    """
    9: with a prefill of 700 each rank knows how many tokens every other computes.
    """
    engine = Engine()
    batches = [engine.classify(requests) for requests in ([decode()] * 12, [prompt(700)])]
    # An engine's idle rank has a placeholder, of one decode.
    votes = [
        Vote.idle(1),
        *(engine.dispatcher.vote(batch, engine.dispatcher.dispatch(batch)) for batch in batches),
    ]

    assert [1, 12, 700] == [vote.num_tokens for vote in votes]
    assert NONE is agree(votes, 3).mode


# 10, 12: what keys a graph.


def key(engine, requests):
    """
    The descriptor that *requests* meet.
    """
    [part] = engine.dispatcher.dispatch(engine.classify(requests)).parts
    return part.descriptor


def test_lora_twins():
    """
    10: the base model, an adapter, and the base model again are two graphs in three lookups.
    """
    engine = Engine(lora_cases=(0, 1, 2, 4))
    base, adapted = [decode()] * 8, [decode(lora=7)] * 8

    assert [key(engine, requests).num_active_loras for requests in (base, adapted, base)] == [0, 1, 0]
    assert BatchDescriptor(FULL, 8, 8, 1, num_active_loras=1) == key(engine, adapted)
    assert len({key(engine, requests) for requests in (base, adapted, base)}) == 2
    assert len({key(engine, [*adapted, *base[:n]]).num_active_loras for n in range(8)}) == 1


@pytest.mark.parametrize(("num_adapters", "case"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_lora_buckets(num_adapters, case):
    """
    10: three active adapters with graphs for 0, 1, 2 and 4 meet those for 4.
    """
    engine = Engine(lora_cases=(0, 1, 2, 4))
    requests = [decode(lora=1 + n % num_adapters) for n in range(8)]

    assert case == key(engine, requests).num_active_loras


def test_unspecialised_lora():
    """
    10: without graphs of its own the base model runs in those of the adapters, with no adapter for its rows.
    """
    engine = Engine(lora_cases=(5,))

    assert key(engine, [decode()] * 8) == key(engine, [decode(lora=7)] * 8)
    assert key(engine, [decode()] * 8).num_active_loras == 5


def test_same_descriptor_same_graph():
    """
    12: two steps of three decodes meet the same graph of four rows, though their lengths differ.
    """
    engine = Engine(full=(4,))
    steps = [[decode(known=known) for known in lengths] for lengths in ((110, 120, 130), (111, 121, 131))]
    graphs = {BatchDescriptor(FULL, 4, num_reqs=4, query_len=1): "graph"}

    assert ["graph", "graph"] == [graphs[key(engine, requests)] for requests in steps]
    assert key(engine, steps[0]) is key(engine, steps[1])
