"""Our dispatcher in the place of vLLM's: the same questions, the same answers."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from aclgraph_dispatch.batch import Batch, BatchKind
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.integrations.dispatcher import DispatchCudagraphDispatcher
from aclgraph_dispatch.step_plan import Reason

MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
SIZES = [1, 2, 4, 8, 16, 24, 32]
MAX_NUM_SEQS = 16
NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


def build(cls: type[CudagraphDispatcher], mode: str, **ours: Any) -> CudagraphDispatcher:
    """
    A dispatcher of *cls* for an engine of *mode*, with its keys; *ours* is our configuration.
    """
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode[mode], cudagraph_capture_sizes=SIZES
    )
    compilation.max_cudagraph_capture_size = SIZES[-1]
    compilation.set_splitting_ops_for_v1(all2all_backend="", data_parallel_size=1)
    vllm_config: Any = SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=64),
        num_speculative_tokens=0,
        lora_config=None,
        additional_config={"aclgraph_dispatch": ours},
    )
    dispatcher = cls(vllm_config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode[mode], 1)
    return dispatcher


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


@pytest.mark.parametrize(
    ("kind", "num_decodes", "expected"),
    [
        (BatchKind.UNIFORM_DECODE, 4, (FULL, Reason.EXACT)),
        # Four prompts of one token look like four decodes.
        (BatchKind.PREFILL, 0, (PIECEWISE, Reason.PREFILL)),
        (BatchKind.MIXED, 3, (PIECEWISE, Reason.MIXED)),
    ],
)
def test_batch_decides_not_shape(
    kind: BatchKind, num_decodes: int, expected: tuple[CUDAGraphMode, Reason]
) -> None:
    """
    Of a real step the classified batch counts, whatever the caller says of uniformity; the plan says why.
    """
    ours = build(DispatchCudagraphDispatcher, "FULL_AND_PIECEWISE")
    assert isinstance(ours, DispatchCudagraphDispatcher)
    ours.batch = Batch(kind, 4, 4, num_decodes)
    answers = {ours.dispatch(4, uniform)[0] for uniform in (True, False)}
    assert ours.step_plan is not None
    (part,) = ours.step_plan.parts

    assert {expected[0]} == answers
    assert expected[1] is part.reason


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
