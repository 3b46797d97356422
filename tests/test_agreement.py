"""How ranks that see different batches run the same passes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from aclgraph_dispatch import (
    Batch,
    BatchKind,
    CapturePlan,
    Dispatcher,
    Reason,
    RuntimeMode,
    StepPlan,
)
from aclgraph_dispatch.agreement import ROW_LENGTH, Vote, agree
from aclgraph_dispatch.errors import AgreementError, DispatchError

from .strategies import batches_for, capture_plans, costs, policies, query_lens, traits, twin_of, votes

NONE, PIECEWISE, FULL = RuntimeMode

# The merge


@given(st.lists(votes, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_order_and_repetition(ranks, rng):
    """
    Whoever is heard first, and however often, the answer is the same.
    """
    agreed = agree(ranks, len(ranks))
    heard = [*ranks, *rng.choices(ranks, k=rng.randrange(4))]
    rng.shuffle(heard)

    assert agreed == agree(heard, len(heard))


@given(votes, votes, votes)
def test_merge_in_a_tree(one, two, three):
    """
    Ranks may merge in pairs, and merge what was merged.
    """
    assert one.merge(two).merge(three) == one.merge(two.merge(three)) == agree([one, two, three], 3)


@given(votes)
def test_neutral(vote):
    """
    A rank without requests changes nothing, before or after the others.
    """
    assert vote == vote.merge(vote)
    assert vote == Vote.idle().merge(vote) == vote.merge(Vote.idle()) == agree([vote, Vote.idle()], 2)


@given(st.lists(votes, min_size=1, max_size=8))
def test_what_all_can_do(ranks):
    """
    The mode and passes that everyone can, the tokens and adapters that everyone fits in.
    """
    agreed = agree(ranks, len(ranks))

    for vote in ranks:
        assert agreed.mode.value <= vote.mode.value
        assert agreed.num_tokens >= vote.num_tokens
        assert agreed.num_full_tokens >= vote.num_full_tokens
        assert agreed.num_active_loras >= vote.num_active_loras
        assert agreed.agreed_passes <= vote.max_passes
    # And nothing that nobody said.
    for name in ("mode", "num_tokens", "num_full_tokens", "num_active_loras", "num_passes", "max_passes"):
        assert getattr(agreed, name) in {getattr(vote, name) for vote in ranks}


@pytest.mark.parametrize(
    ("ranks", "passes"),
    [
        (((1, 1), (1, 1)), 1),
        (((2, 2), (1, 2)), 2),
        # One that cannot run twice is enough.
        (((2, 2), (1, 1)), 1),
        (((2, 2), None), 2),
        ((None, None), 1),
    ],
)
def test_passes(ranks, passes):
    """
    All split their batch if one wants to and all can; None is an idle rank.
    """
    cast = [
        Vote.idle() if rank is None else Vote(NONE, 9, 9, num_passes=rank[0], max_passes=rank[1]) for rank in ranks
    ]

    assert passes == agree(cast, len(cast)).agreed_passes


@given(votes | st.builds(Vote.idle, st.integers(0, 4)))
def test_row(vote):
    """
    A vote travels as a row of small integers.
    """
    row = vote.to_row()

    assert ROW_LENGTH == len(row)
    assert all(type(number) is int and 0 <= number < 2**31 for number in row)
    assert vote == Vote.from_row(list(row))


def test_every_field_is_in_the_row():
    """
    Votes that differ at all differ on their way.
    """
    vote = Vote(PIECEWISE, 2, 3, 4, 5, 6)
    changed = [attrs.evolve(vote, mode=NONE)] + [
        attrs.evolve(vote, **{field.name: 9}) for field in attrs.fields(Vote) if field.name != "mode"
    ]

    assert len({vote.to_row(), *(other.to_row() for other in changed)}) == 1 + ROW_LENGTH


@pytest.mark.parametrize(("num_votes", "num_ranks"), [(0, 1), (1, 2), (3, 2), (63, 64)])
def test_missing_vote(num_votes, num_ranks):
    """
    A rank that was not heard will hang, and so will the others: better to stop. One heard twice is a bug too.
    """
    with pytest.raises(AgreementError) as excinfo:
        agree([Vote.idle()] * num_votes, num_ranks)

    assert f"every rank must vote once a step: {num_votes} votes of {num_ranks} ranks" == str(excinfo.value)
    assert isinstance(excinfo.value, DispatchError)


# Ranks that run together


NUM_RANKS = 64

# From most to least, for a rank that can run a mode can run the lesser ones: in a vote the least wins.
ALLOWED = (None, None, frozenset({PIECEWISE}), frozenset())


@attrs.frozen
class RankStep:
    """
    What one rank has to do in one step; nothing if it is idle, and then *batch* is its placeholder.
    """

    batch: Batch
    allowed: frozenset | None = None
    is_idle: bool = False


@attrs.frozen
class Done:
    """
    What a rank would have run alone, and what it ran.
    """

    own: StepPlan
    settled: StepPlan


class Ranks:
    """
    Ranks in threads, each with a dispatcher of its own; they meet to exchange votes and in every forward pass.

    A rank that waits for longer than the others can take is in a deadlock: the barrier breaks, and all of them
    raise.
    """

    def __init__(self, dispatcher, num_ranks=NUM_RANKS, timeout=20):
        self.num_ranks = num_ranks
        self._dispatchers = [twin_of(dispatcher) for _ in range(num_ranks)]
        self._barrier = threading.Barrier(num_ranks, timeout=timeout)
        self._board = [None] * num_ranks

    def meet(self, rank, value):
        """
        Hand over *value* and return those of all ranks.
        """
        self._board[rank] = value
        self._barrier.wait()
        everyone = tuple(self._board)
        self._barrier.wait()
        return everyone

    def run(self, steps):
        """
        Run *steps*, each a sequence of one `RankStep` a rank; return the same of `Done`.
        """
        with ThreadPoolExecutor(self.num_ranks) as threads:
            by_rank = list(threads.map(self._run_rank, range(self.num_ranks), zip(*steps, strict=True)))
        return list(zip(*by_rank, strict=True))

    def _run_rank(self, rank, steps):
        dispatcher = self._dispatchers[rank]
        done = []
        try:
            for step in steps:
                own = dispatcher.dispatch(step.batch, step.allowed)
                vote = Vote.idle(step.batch.num_tokens) if step.is_idle else dispatcher.vote(step.batch, own)
                rows = self.meet(rank, vote.to_row())
                settled = dispatcher.settle(
                    step.batch, own, agree([Vote.from_row(row) for row in rows], self.num_ranks)
                )
                for part in settled.parts:
                    # A device would hang here if one rank ran another pass, or none.
                    assert {part.mode} == set(self.meet(rank, part.mode))
                done.append(Done(own, settled))
        except BaseException:
            self._barrier.abort()
            raise
        return done


@st.composite
def ranks_and_steps(draw):
    """
    A dispatcher, and what each of many ranks has to do in some steps: few kinds of batches, dealt at random.
    """
    query_len, max_num_seqs = draw(query_lens), draw(st.integers(1, 4))
    dispatcher = Dispatcher(
        draw(capture_plans(query_len=query_len, max_num_seqs=max_num_seqs)),
        policy=draw(policies),
        query_len=query_len,
        max_num_seqs=max_num_seqs,
        traits=draw(traits),
        cost=draw(st.none() | costs),
    )
    idle = [
        RankStep(Batch.of([]), is_idle=True),
        RankStep(Batch(BatchKind.UNIFORM_DECODE, 1, query_len, 0, query_len), is_idle=True),
    ]
    busy = st.builds(RankStep, batches_for(dispatcher), st.sampled_from(ALLOWED))
    rng = draw(st.randoms(use_true_random=False))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        # One of the two idle kinds: an engine either has placeholders or it has none.
        work = [idle[rng.randrange(2)], *draw(st.lists(busy, max_size=3))]
        steps.append([rng.choice(work) for _ in range(NUM_RANKS)])
    return dispatcher, steps


@settings(max_examples=30)
@given(ranks_and_steps())
def test_many_ranks(dispatcher_and_steps):
    """
    Ranks with any batches run the same passes, as good as all can, large enough for each, and idle ones run along.
    """
    dispatcher, steps = dispatcher_and_steps
    for step, done in zip(steps, Ranks(dispatcher).run(steps), strict=True):
        busy = [(work.batch, ran) for work, ran in zip(step, done, strict=True) if work.batch.num_tokens]
        parts = [part for ran in done for part in ran.settled.parts]
        if not busy:
            assert not parts
            continue
        # Every rank one pass, in one mode.
        assert len(parts) == NUM_RANKS
        [mode] = {part.mode for part in parts}
        event(mode.name)

        wanted = [
            ran.own.parts[0].mode
            for work, ran in zip(step, done, strict=True)
            if not work.is_idle and work.batch.num_tokens
        ]
        if wanted:
            worst = min(wanted, key=lambda wanted_mode: wanted_mode.value)
            assert mode.value <= worst.value
            # All that want a FULL graph get one; of PIECEWISE the others may have more tokens than any has.
            assert (mode is FULL) == (worst is FULL)
        if mode is not NONE:
            [descriptor] = {part.descriptor for part in parts}
            assert descriptor in dispatcher.plan.descriptors(query_len=dispatcher.query_len)
        for batch, ran in busy:
            [part] = ran.settled.parts
            assert ((0, batch.num_reqs), (0, batch.num_tokens)) == (part.requests, part.tokens)
            assert batch.num_tokens <= part.num_padded_tokens
            if mode is FULL:
                assert batch.num_reqs <= part.descriptor.num_reqs
                assert batch.num_active_loras <= part.descriptor.num_active_loras
            if mode is NONE:
                assert batch.num_tokens == part.num_padded_tokens
            assert (part.reason is Reason.RANK_VOTE) == (part.descriptor != ran.own.parts[0].descriptor)


@settings(max_examples=30)
@given(ranks_and_steps())
def test_answer_is_the_votes(dispatcher_and_steps):
    """
    Mode and size depend on the merged vote alone: to know them, a rank need not know its own batch.
    """
    dispatcher, steps = dispatcher_and_steps
    for step in steps:
        own = [dispatcher.dispatch(work.batch, work.allowed) for work in step]
        agreed = agree(
            [dispatcher.vote(work.batch, plan) for work, plan in zip(step, own, strict=True)], NUM_RANKS
        )
        stranger = twin_of(dispatcher).settle(Batch.of([]), StepPlan(()), agreed)
        for work, plan in zip(step, own, strict=True):
            settled = dispatcher.settle(work.batch, plan, agreed)

            assert [part.mode for part in stranger.parts] == [part.mode for part in settled.parts]
            if settled.parts and settled.parts[0].mode is not NONE:
                assert stranger.parts[0].descriptor == settled.parts[0].descriptor


@settings(max_examples=30)
@given(ranks_and_steps())
def test_alone(dispatcher_and_steps):
    """
    A rank among idle ones runs what it would have run alone; so does one among equals.
    """
    dispatcher, steps = dispatcher_and_steps
    for step in steps:
        for work in step[:4]:
            own = dispatcher.dispatch(work.batch, work.allowed)
            vote = dispatcher.vote(work.batch, own)
            for votes_of_all in ([vote, Vote.idle(), Vote.idle()], [vote] * 3):
                settled = dispatcher.settle(work.batch, own, agree(votes_of_all, 3))

                assert own == settled


@settings(max_examples=30)
@given(ranks_and_steps())
def test_pipeline_stages(dispatcher_and_steps):
    """
    Stages that get the same batch decide alike without a vote.
    """
    dispatcher, steps = dispatcher_and_steps
    stages = [dispatcher, *(twin_of(dispatcher) for _ in range(3))]
    for step in steps:
        for work in step[:4]:
            plans = [stage.dispatch(work.batch, work.allowed) for stage in stages]

            assert all(plans[0] == plan for plan in plans)


def test_missing_rank_breaks():
    """
    A rank that skips a step leaves the others waiting: what the simulation of ranks takes for a deadlock.
    """
    ranks = Ranks(Dispatcher(CapturePlan((1,)), max_num_seqs=1), num_ranks=2, timeout=2)
    work = RankStep(Batch(BatchKind.UNIFORM_DECODE, 1, 1, 1))

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(ranks._run_rank, rank, [work] * (1 + rank)) for rank in range(2)]
        assert len(futures[0].result()) == 1
        with pytest.raises(threading.BrokenBarrierError):
            futures[1].result()
