"""Our dispatcher in the place of vLLM's: the same questions, the same answers."""

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from aclgraph_dispatch import BackendTraits, CapturePlan, DispatchConfig, FullGraphs, RuntimeMode
from aclgraph_dispatch.batch import BatchKind
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.integrations.dispatcher import (
    DispatchCudagraphDispatcher,
    backend_traits,
    descriptor_of,
    stateless_batch,
    vllm_descriptor,
)

MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
SIZES = [1, 2, 4, 8, 16, 24, 32]
MAX_NUM_SEQS = 16
NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


@attrs.frozen
class Lora:
    """
    What vLLM is told of adapters: how many can be active, whether the base model has graphs of its own, and
    whether numbers of adapters between one and all have.
    """

    max_loras: int
    specialise: bool = True
    specialise_active: bool = False


@attrs.frozen
class Engine:
    """
    What an engine's dispatcher is made from; *k* drafts a request.
    """

    mode: str = "FULL_AND_PIECEWISE"
    sizes: tuple[int, ...] = tuple(SIZES)
    max_num_seqs: int = MAX_NUM_SEQS
    k: int = 0
    lora: Lora | None = None

    def build(self, cls: type[CudagraphDispatcher], **ours: Any) -> CudagraphDispatcher:
        """
        A dispatcher of *cls* with its keys; *ours* is our configuration.
        """
        mode = CUDAGraphMode[self.mode]
        compilation = CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE,
            cudagraph_mode=mode,
            cudagraph_capture_sizes=list(self.sizes),
            cudagraph_specialize_lora=self.lora is None or self.lora.specialise,
        )
        compilation.max_cudagraph_capture_size = self.sizes[-1]
        compilation.set_splitting_ops_for_v1(all2all_backend="", data_parallel_size=1)
        if mode.decode_mode() is FULL:
            # The model runner does, before it initialises the keys.
            compilation.adjust_cudagraph_sizes_for_spec_decode(1 + self.k)
        lora_config = None
        if self.lora is not None:
            lora_config = SimpleNamespace(
                max_loras=self.lora.max_loras, specialize_active_lora=self.lora.specialise_active
            )
        vllm_config: Any = SimpleNamespace(
            compilation_config=compilation,
            scheduler_config=SimpleNamespace(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=64),
            num_speculative_tokens=self.k,
            speculative_config=None,
            lora_config=lora_config,
            additional_config={"aclgraph_dispatch": ours},
        )
        dispatcher = cls(vllm_config)
        dispatcher.initialize_cudagraph_keys(mode, 1 + self.k)
        return dispatcher


def build(cls: type[CudagraphDispatcher], mode: str, **ours: Any) -> CudagraphDispatcher:
    """
    A dispatcher of *cls* for an engine of *mode*; *ours* is our configuration.
    """
    return Engine(mode).build(cls, **ours)


def both(mode: str) -> tuple[CudagraphDispatcher, CudagraphDispatcher]:
    """
    vLLM's own dispatcher and ours.
    """
    return build(CudagraphDispatcher, mode), build(DispatchCudagraphDispatcher, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize(
    "modes",
    [
        {},
        {"invalid_modes": {FULL}},
        {"invalid_modes": {PIECEWISE}},
        {"invalid_modes": {FULL, PIECEWISE}},
        {"valid_modes": {NONE}},
        {"valid_modes": {NONE, PIECEWISE}},
        {"valid_modes": {NONE, FULL}},
        {"valid_modes": frozenset({NONE, PIECEWISE, FULL}), "invalid_modes": {FULL}},
    ],
)
def test_answers_are_vllms(mode: str, uniform: bool, modes: dict[str, Any]) -> None:
    """
    For every number of tokens up to beyond the largest size, mode and descriptor are what vLLM says.
    """
    theirs, ours = both(mode)
    counts = range(1, SIZES[-1] + 3)

    assert [theirs.dispatch(n, uniform, **modes) for n in counts] == [
        ours.dispatch(n, uniform, **modes) for n in counts
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("uniform", [True, False])
def test_agreed_mode_is_kept(mode: str, uniform: bool) -> None:
    """
    Asked again with the padded number of tokens and only the mode of the first answer, it answers the same.
    """
    _, ours = both(mode)
    for num_tokens in range(1, SIZES[-1] + 3):
        first = ours.dispatch(num_tokens, uniform)

        assert first == ours.dispatch(first[1].num_tokens, uniform, valid_modes={first[0]})


@pytest.mark.parametrize("mode", MODES)
def test_keys_are_vllms(mode: str) -> None:
    """
    The graphs to capture are vLLM's: PIECEWISE first, then FULL, the largest first.
    """
    theirs, ours = both(mode)

    assert theirs.get_capture_descs() == ours.get_capture_descs()
    assert theirs.cudagraph_keys == ours.cudagraph_keys
    assert ours.keys_initialized


def test_order_of_capture() -> None:
    """
    That order, spelled out, for sizes of our own.
    """
    ours = build(DispatchCudagraphDispatcher, "FULL_AND_PIECEWISE", full_sizes=[1, 3, 16], piecewise_sizes=[5, 40])

    assert [
        (PIECEWISE, [BatchDescriptor(40), BatchDescriptor(5)]),
        (FULL, [BatchDescriptor(n, num_reqs=n, uniform=True) for n in (16, 3, 1)]),
    ] == ours.get_capture_descs()


@pytest.mark.parametrize("set_", [set, frozenset])
def test_callers_sets_stay(set_: Any) -> None:
    """
    The sets of modes are the caller's: vLLM passes module-wide ones. They are read, never changed.
    """
    _, ours = both("FULL_AND_PIECEWISE")
    valid, invalid = set_({NONE, PIECEWISE, FULL}), set_({FULL})
    answer = ours.dispatch(3, uniform_decode=True, valid_modes=valid, invalid_modes=invalid)

    assert (PIECEWISE, BatchDescriptor(4)) == answer
    assert {NONE, PIECEWISE, FULL} == valid
    assert {FULL} == invalid


def test_everything_is_allowed_but() -> None:
    """
    Without valid modes the invalid ones are taken from all there are, call after call.
    """
    _, ours = both("FULL_AND_PIECEWISE")
    ours.dispatch(4, True, invalid_modes={FULL, PIECEWISE})

    assert FULL is ours.dispatch(4, True)[0]


@pytest.mark.parametrize("mode", MODES)
def test_before_keys_are_known(mode: str) -> None:
    """
    Before initialisation, and for the policy that uses no graphs, every step is eager and nothing is captured.
    """
    ours = build(DispatchCudagraphDispatcher, mode)
    if mode != "NONE":
        ours = type(ours)(ours.vllm_config)

    assert [(NONE, BatchDescriptor(n)) for n in (1, 4, 99)] == [ours.dispatch(n, True) for n in (1, 4, 99)]
    assert ours.get_capture_descs() == []


def test_threshold() -> None:
    """
    Above the threshold vLLM gets the eager answer, without a graph to pad to.
    """
    ours = build(DispatchCudagraphDispatcher, "FULL_AND_PIECEWISE", threshold=8)

    assert (PIECEWISE, BatchDescriptor(8)) == ours.dispatch(8)
    assert (NONE, BatchDescriptor(9)) == ours.dispatch(9)
    assert {8} == {descriptors[0].num_tokens for _, descriptors in ours.get_capture_descs()}


@pytest.mark.parametrize(
    ("mode", "policy", "message"),
    [
        (
            "FULL",
            None,
            "cudagraph_mode must be one of NONE, PIECEWISE, FULL_DECODE_ONLY, FULL_AND_PIECEWISE: FULL",
        ),
        (
            "PIECEWISE",
            "full_and_piecewise",
            "'policy' 'full_and_piecewise' cannot be run here: vLLM lowered cudagraph_mode to PIECEWISE "
            "(its log says why); use 'piecewise', or a backend or compilation mode that supports more",
        ),
    ],
)
def test_lowered_mode(mode: str, policy: str | None, message: str) -> None:
    """
    A mode that is left after vLLM looked at the attention backend, and that the policy does not stand for.
    """
    with pytest.raises(ConfigError) as caught:
        build(DispatchCudagraphDispatcher, mode, policy=policy)

    assert message == str(caught.value)


# Any engine and any question


@attrs.frozen
class Question:
    """
    What vLLM asks: the arguments of `dispatch`.
    """

    num_tokens: int
    uniform_decode: bool = False
    num_active_loras: int = 0
    valid_modes: frozenset[CUDAGraphMode] | None = None
    invalid_modes: frozenset[CUDAGraphMode] | None = None

    def ask(self, dispatcher: CudagraphDispatcher) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """
        The answer of *dispatcher*.
        """
        return dispatcher.dispatch(
            num_tokens=self.num_tokens,
            uniform_decode=self.uniform_decode,
            has_lora=self.num_active_loras > 0,
            num_active_loras=self.num_active_loras,
            valid_modes=self.valid_modes,
            invalid_modes=self.invalid_modes,
        )


ALL_MODES = frozenset({NONE, PIECEWISE, FULL})
some_modes = st.frozensets(st.sampled_from([NONE, PIECEWISE, FULL]))

engines = st.builds(
    Engine,
    mode=st.sampled_from(MODES),
    sizes=st.sets(st.integers(1, 40), min_size=1, max_size=8).map(lambda sizes: tuple(sorted(sizes))),
    max_num_seqs=st.integers(1, 16),
    k=st.integers(0, 4),
    lora=st.none() | st.builds(Lora, st.integers(1, 5), st.booleans(), st.booleans()),
)


@st.composite
def questions(draw: Any, engine: Engine) -> Question:
    """
    What vLLM may ask of *engine*'s dispatcher.
    """
    max_loras = engine.lora.max_loras if engine.lora else 0
    return Question(
        num_tokens=draw(st.integers(1, 45)),
        uniform_decode=draw(st.booleans()),
        num_active_loras=draw(st.integers(0, max_loras)),
        valid_modes=draw(st.none() | some_modes),
        invalid_modes=draw(st.none() | some_modes),
    )


def as_stock_has_it(engine: Engine, question: Question) -> Question:
    """
    The question to which vLLM gives the answer that we give to *question*: the same, but for these.

    - Eager is always possible: vLLM asserts that it was allowed.
    - Without graphs for the base model, its batches run in those for adapters: vLLM runs them eagerly.
    """
    allowed = (question.valid_modes or ALL_MODES) - (question.invalid_modes or frozenset())
    if NONE not in allowed:
        event("eager is not allowed")
        question = attrs.evolve(question, valid_modes=allowed | {NONE}, invalid_modes=None)
    if engine.lora is not None and not engine.lora.specialise and not question.num_active_loras:
        event("base model in an adapter's graph")
        question = attrs.evolve(question, num_active_loras=1)
    return question


@given(
    engines.flatmap(
        lambda engine: st.tuples(st.just(engine), st.lists(questions(engine), min_size=1, max_size=20))
    )
)
def test_any_question(engine_and_questions: tuple[Engine, list[Question]]) -> None:
    """
    The graphs are vLLM's, and so is every answer.
    """
    engine, asked = engine_and_questions
    try:
        theirs = engine.build(CudagraphDispatcher)
    except ValueError:
        # No size is a whole number of decodes.
        assume(False)
    ours = engine.build(DispatchCudagraphDispatcher)

    assert theirs.cudagraph_keys == ours.cudagraph_keys
    assert theirs.get_capture_descs() == ours.get_capture_descs()
    for question in asked:
        answer = question.ask(ours)
        event(answer[0].name)

        assert as_stock_has_it(engine, question).ask(theirs) == answer


# What is answered otherwise: the list in docs/architecture.md

ALLOWED_NONE = "No allowed cudagraph modes"
NO_MATCH = "No matching cudagraph found"
NO_LORA = "LoRA config must be set"
ONLY_FULL = frozenset({FULL})
UNSPECIALISED = Engine(lora=Lora(2, specialise=False))
SPECIALISED = Engine(lora=Lora(2))


@pytest.mark.parametrize(
    ("engine", "arguments", "stock", "ours"),
    [
        # Nothing fits, and eager is not allowed; or nothing is.
        (Engine(), {"num_tokens": 99, "valid_modes": ONLY_FULL}, (NONE, 99), (NONE, 99)),
        (Engine(), {"num_tokens": 8, "valid_modes": ONLY_FULL}, NO_MATCH, (NONE, 8)),
        (
            Engine(),
            {"num_tokens": 8, "valid_modes": ONLY_FULL, "invalid_modes": ONLY_FULL},
            ALLOWED_NONE,
            (NONE, 8),
        ),
        # The base model, where only adapters have graphs.
        (UNSPECIALISED, {"num_tokens": 8}, (NONE, 8), (PIECEWISE, 8)),
        (UNSPECIALISED, {"num_tokens": 8, "uniform_decode": True}, (NONE, 8), (FULL, 8)),
        # Questions that contradict themselves: the number of adapters is believed.
        (SPECIALISED, {"num_tokens": 8, "has_lora": True}, (NONE, 8), (PIECEWISE, 8)),
        (SPECIALISED, {"num_tokens": 8, "has_lora": False, "num_active_loras": 1}, (NONE, 8), (PIECEWISE, 8)),
        # More adapters than there can be, or any in an engine without.
        (SPECIALISED, {"num_tokens": 8, "has_lora": True, "num_active_loras": 9}, (PIECEWISE, 8), (NONE, 8)),
        (Engine(), {"num_tokens": 8, "has_lora": True, "num_active_loras": 1}, NO_LORA, (NONE, 8)),
    ],
)
def test_differences(engine: Engine, arguments: dict[str, Any], stock: Any, ours: Any) -> None:
    """
    Where we do not answer as vLLM does; a text is that of its failed assertion.
    """
    dispatcher = engine.build(CudagraphDispatcher)
    if isinstance(stock, str):
        with pytest.raises(AssertionError, match=stock):
            dispatcher.dispatch(**arguments)
    else:
        mode, descriptor = dispatcher.dispatch(**arguments)
        assert stock == (mode, descriptor.num_tokens)
    mode, descriptor = engine.build(DispatchCudagraphDispatcher).dispatch(**arguments)

    assert ours == (mode, descriptor.num_tokens)


def test_difference_in_sets() -> None:
    """
    Invalid modes are taken from a copy: vLLM takes them from the caller's own set.
    """
    for dispatcher, left in zip(both("FULL_AND_PIECEWISE"), ({PIECEWISE}, {FULL, PIECEWISE}), strict=True):
        modes = {FULL, PIECEWISE}
        dispatcher.dispatch(8, valid_modes=modes, invalid_modes={FULL})

        assert left == modes


def test_difference_in_sizes() -> None:
    """
    With drafts, only FULL sizes are rounded to whole requests, and the largest is rounded up like the others: vLLM
    rounds PIECEWISE sizes too, and drops what then exceeds the largest.
    """
    engine = Engine(sizes=(1, 2, 4, 8, 16), k=2)
    theirs = engine.build(CudagraphDispatcher)
    planned = DispatchConfig().capture_plan(
        "full_and_piecewise", engine.sizes, max_num_seqs=16, max_num_batched_tokens=64, query_len=3
    )

    for mode in (PIECEWISE, FULL):
        assert {3, 6, 9} == {descriptor.num_tokens for descriptor in theirs.cudagraph_keys[mode]}
    assert CapturePlan((3, 6, 9, 18), (1, 2, 4, 8, 16)) == planned


def test_difference_in_compile_sizes() -> None:
    """
    vLLM refuses sizes to compile for that no graph has; who captures what it is given has no use for that.
    """
    for cls in (CudagraphDispatcher, DispatchCudagraphDispatcher):
        dispatcher = Engine().build(cls)
        dispatcher.compilation_config.compile_sizes = [3]
        if cls is CudagraphDispatcher:
            with pytest.raises(ValueError, match="compile_sizes contains 3"):
                dispatcher.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE)
        else:
            dispatcher.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE)


# Between vLLM's types and ours


@pytest.mark.parametrize(
    ("support", "full_graphs"),
    [
        ([AttentionCGSupport.NEVER], FullGraphs.NEVER),
        ([AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE], FullGraphs.SINGLE_TOKEN),
        ([AttentionCGSupport.UNIFORM_BATCH], FullGraphs.UNIFORM),
        ([AttentionCGSupport.ALWAYS], FullGraphs.RAGGED),
        # One that can less decides; without attention nothing does.
        ([AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH], FullGraphs.UNIFORM),
        ([AttentionCGSupport.NEVER, AttentionCGSupport.ALWAYS], FullGraphs.NEVER),
        ([], FullGraphs.RAGGED),
    ],
)
@pytest.mark.parametrize("has_inner_state", [True, False])
def test_backend_traits(support: Any, full_graphs: FullGraphs, has_inner_state: bool) -> None:
    """
    What all backends can do together; the end of a prompt is a decode to models without a state of their own.
    """
    vllm_config: Any = SimpleNamespace(model_config=SimpleNamespace(has_inner_state=has_inner_state))

    assert BackendTraits(full_graphs, not has_inner_state) == backend_traits(vllm_config, iter(support))


@pytest.mark.parametrize("support", AttentionCGSupport)
def test_every_support_is_known(support: AttentionCGSupport) -> None:
    """
    vLLM's list of what backends can do has no entry that we lack.
    """
    vllm_config: Any = SimpleNamespace(model_config=SimpleNamespace(has_inner_state=False))

    assert backend_traits(vllm_config, [support]).full_graphs in FullGraphs


@pytest.mark.parametrize("k", [0, 3])
def test_descriptors_there_and_back(k: int) -> None:
    """
    vLLM's descriptor says all that ours does, but for mode and role.
    """
    plan = CapturePlan((4, 8), (3, 8), (0, 1, 3))
    for descriptor in plan.descriptors(query_len=1 + k, role="draft"):
        theirs = vllm_descriptor(descriptor)

        assert descriptor == descriptor_of(descriptor.mode, theirs, "draft")
        assert theirs.has_lora == (theirs.num_active_loras > 0)
    eager = vllm_descriptor(attrs.evolve(plan.descriptors()[0], mode=RuntimeMode.NONE, num_tokens=5))
    assert BatchDescriptor(5, has_lora=True, num_active_loras=3) == eager


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8])
@pytest.mark.parametrize("uniform", [True, False])
def test_stateless_batch(num_tokens: int, uniform: bool) -> None:
    """
    A dummy run is what its caller says, of as many requests as the tokens need.
    """
    batch = stateless_batch(num_tokens, 4, uniform, 2)

    assert (BatchKind.UNIFORM_DECODE if uniform else BatchKind.PREFILL) is batch.kind
    assert (-(-num_tokens // 4), num_tokens, 4, 2) == (
        batch.num_reqs,
        batch.num_tokens,
        batch.query_len,
        batch.num_active_loras,
    )


def test_drafter() -> None:
    """
    A drafter runs in the mode that vLLM chose for it, whatever the policy of the target, with graphs of its own.
    """
    target = Engine(k=3).build(DispatchCudagraphDispatcher, policy="full_and_piecewise", threshold=16)
    drafter = DispatchCudagraphDispatcher(target.vllm_config, role="draft")
    drafter.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE)
    assert drafter.core is not None
    assert isinstance(target, DispatchCudagraphDispatcher)
    assert target.core is not None

    assert ("piecewise", 1, "draft") == (drafter.core.policy, drafter.core.query_len, drafter.core.role)
    assert ("full_and_piecewise", 4, "target") == (target.core.policy, target.core.query_len, target.core.role)
    assert (PIECEWISE, BatchDescriptor(16)) == drafter.dispatch(13)
    assert (NONE, BatchDescriptor(17)) == drafter.dispatch(17)


def test_traits_are_asked() -> None:
    """
    What was learnt about the attention backend before the keys were initialised counts.
    """
    dispatcher = Engine().build(DispatchCudagraphDispatcher)
    assert isinstance(dispatcher, DispatchCudagraphDispatcher)
    assert FULL is dispatcher.dispatch(8, True)[0]
    dispatcher.traits = BackendTraits(FullGraphs.NEVER)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE)

    assert PIECEWISE is dispatcher.dispatch(8, True)[0]
