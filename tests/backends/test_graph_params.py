"""The seed systems' update functions: which graph, which parameters, which lengths."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from aclgraph_dispatch import BatchDescriptor, RuntimeMode
from aclgraph_dispatch.backends.attention import LatentLengths
from aclgraph_dispatch.backends.graph_params import (
    clear_attention_params,
    get_attention_params,
    set_attention_params,
    update_attn_params,
    update_mla_attn_params,
)
from aclgraph_dispatch.errors import ReplayError
from aclgraph_dispatch.params import AttentionParams

FOUR = BatchDescriptor(RuntimeMode.FULL, 4, num_reqs=4, query_len=1)
WITH_LORA = BatchDescriptor(RuntimeMode.FULL, 4, num_reqs=4, query_len=1, num_active_loras=1)
TWO_BY_TWO = BatchDescriptor(RuntimeMode.FULL, 4, num_reqs=2, query_len=2)
DRAFTER = BatchDescriptor(RuntimeMode.FULL, 4, num_reqs=4, query_len=1, role="drafter")
MIXED = BatchDescriptor(RuntimeMode.FULL, 8, num_reqs=3)
LAYERS = ["layer.0", "layer.1"]


class FakeBackend:
    """
    Notes updates and releases, by the graph and the layer that they are for.
    """

    update_stream = "update stream"

    def __init__(self):
        self.log = []

    def record_task(self, run):
        return run()

    def update_task(self, handle, run):
        run(note=self.log.append)

    def release_task(self, handle):
        self.log.append((*handle, "released"))


@pytest.fixture(autouse=True)
def params():
    """
    Parameters of the target, with two layers recorded for each of several graphs.
    """
    params = AttentionParams(FakeBackend())
    for descriptor in (FOUR, WITH_LORA, TWO_BY_TWO, DRAFTER, MIXED):
        for layer in LAYERS:

            def issue(lengths, note=lambda entry: None, handle=(descriptor, layer)):
                note((*handle, lengths))
                return handle

            params.record(descriptor, layer, issue, None)
    set_attention_params(params)
    yield params
    clear_attention_params()


def context(described, *lengths, **others):
    """
    A forward context whose layers have *lengths* each, or all the same.
    """
    own = [
        SimpleNamespace(
            seq_lens=torch.tensor(each, dtype=torch.int32), decode=SimpleNamespace(seq_lens_list=list(each))
        )
        for each in lengths
    ]
    metadata = dict(zip(LAYERS, own * (3 - len(own)), strict=True))
    return SimpleNamespace(batch_descriptor=described, attn_metadata=metadata, **others)


def mtp(num_drafts, method="deepseek_mtp"):
    """
    A speculative configuration.
    """
    return SimpleNamespace(method=method, num_speculative_tokens=num_drafts)


def issued(params):
    """
    What was noted, tensors as lists, and which graphs may not be replayed any more.
    """
    log = [
        (*handle, lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths)
        for *handle, lengths in params.backend.log
    ]
    params.backend.order_updates = lambda: None
    broken = []
    for descriptor in params.descriptors:
        try:
            params.order_updates(descriptor)
        except ReplayError:
            broken.append(descriptor)
    return log, broken


def released(*descriptors):
    """
    What is noted if nothing of *descriptors* could be updated.
    """
    return [(descriptor, layer, "released") for descriptor in descriptors for layer in LAYERS], [*descriptors]


@pytest.mark.parametrize("kv_transfer_config", [None, object()])
def test_paged_lengths(params, kv_transfer_config):
    """
    Each layer, in the order of capture, gets its own lengths, padded to the rows; the caller's stay as they are.
    """
    step = context(FOUR, [5, 6, 7], [1, 2, 3, 4])
    step.attn_metadata = dict(reversed(step.attn_metadata.items())) | {"layer.of.another.model": None}
    update_attn_params("update stream", step, 4, kv_transfer_config)

    assert issued(params) == ([(FOUR, "layer.0", [5, 6, 7, 0]), (FOUR, "layer.1", [1, 2, 3, 4])], [])
    assert step.attn_metadata["layer.0"].seq_lens.tolist() == [5, 6, 7]
    assert [entry[2].dtype for entry in params.backend.log] == [torch.int32] * 2


@pytest.mark.parametrize(
    ("descriptor", "speculative_config", "lengths", "expected"),
    [
        (FOUR, None, [5, 6], LatentLengths([5, 6, 0, 0])),
        (FOUR, None, [], LatentLengths([0, 0, 0, 0])),
        (FOUR, mtp(1, "ngram"), [5, 6], LatentLengths([5, 6, 0, 0])),
        (TWO_BY_TWO, mtp(1), [5], LatentLengths([5, 0], [2, 4])),
        (TWO_BY_TWO, mtp(1, "mtp"), [5, 6], LatentLengths([5, 6], [2, 4])),
        (MIXED, mtp(3), [5], LatentLengths([5, 0], [4, 8])),
    ],
)
def test_latent_lengths(params, descriptor, speculative_config, lengths, expected):
    """
    Without MTP a row is a token; with k drafts it is k + 1 query tokens, and the last ends with the graph.
    """
    step = context(descriptor, lengths)
    update_mla_attn_params("update stream", step, descriptor.num_tokens, speculative_config)

    assert issued(params) == ([(descriptor, layer, expected) for layer in LAYERS], [])
    assert step.attn_metadata["layer.0"].decode.seq_lens_list == lengths


def vllm(num_tokens, **others):
    """
    A descriptor as some version of vLLM has it.
    """
    return SimpleNamespace(num_tokens=num_tokens, **others)


V32 = {"num_reqs": 4, "uniform": True, "has_lora": False, "num_active_loras": 0}


@pytest.mark.parametrize(
    ("described", "others", "descriptor"),
    [
        (FOUR, {}, FOUR),
        (WITH_LORA, {}, WITH_LORA),
        (vllm(4, **V32), {}, FOUR),
        (vllm(4, **V32 | {"has_lora": True, "num_active_loras": 1}), {}, WITH_LORA),
        (vllm(4, **V32 | {"num_reqs": 2}), {}, TWO_BY_TWO),
        (vllm(4, **V32), {"is_draft_model": False}, FOUR),
        (vllm(8, num_reqs=3, uniform=False, has_lora=False, num_active_loras=0), {}, MIXED),
        (vllm(8, num_reqs=None, uniform=False), {}, MIXED),
        (vllm(8, uniform_decode=False), {}, MIXED),
    ],
)
def test_the_graph_that_is_meant(params, described, others, descriptor):
    """
    Whatever a descriptor says decides, not its number of tokens alone.
    """
    update_mla_attn_params("update stream", context(described, [3], **others), descriptor.num_tokens, None)

    assert [entry[0] for entry in issued(params)[0]] == [descriptor] * 2


@pytest.mark.parametrize(("described", "others"), [(DRAFTER, {}), (vllm(4, **V32), {"is_draft_model": True})])
@pytest.mark.parametrize("is_shared", [False, True])
def test_roles(params, described, others, is_shared):
    """
    A drafter has parameters of its own, or the target's, and never the target's graphs.
    """
    step = context(described, [3], **others)
    with pytest.raises(ReplayError, match="'drafter' has no attention parameters: call set_attention_params"):
        update_attn_params("update stream", step, 4)
    drafter = params
    if not is_shared:
        drafter = AttentionParams(FakeBackend())
        drafter.record(
            DRAFTER, "layer.0", lambda lengths, note=lambda entry: None: note((DRAFTER, 0, lengths)), None
        )
    set_attention_params(drafter, "drafter")

    update_attn_params("update stream", step, 4)

    assert (params.backend.log == []) is not is_shared
    assert {entry[0] for entry in issued(drafter)[0]} == {DRAFTER}


FAULTS = {
    "not captured": (BatchDescriptor(RuntimeMode.FULL, 16), [1], 16, "one captured graph, not 0: ", []),
    "no descriptor": (None, [1], 4, "None must describe one captured graph, not 0", []),
    "ambiguous": (
        vllm(4, uniform_decode=True),
        [1],
        4,
        "one captured graph, not 3: ",
        [FOUR, WITH_LORA, TWO_BY_TWO],
    ),
    "runtime_shape": (FOUR, [1], 8, "number of tokens: 8 for BatchDescriptor", [FOUR]),
    "too many": (FOUR, [1, 2, 3, 4, 5], 4, "one length a row: 5 for 4 rows", [FOUR]),
    "negative": (FOUR, [1, -1], 4, "must be >= 0", [FOUR]),
}


@pytest.mark.parametrize(("described", "lengths", "runtime_shape", "match", "broken"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("update", [update_attn_params, partial(update_mla_attn_params, speculative_config=None)])
def test_faults(params, update, described, lengths, runtime_shape, match, broken):
    """
    Nothing is guessed or cut off: the replay under way gets all events that it may wait for, and no graph that may
    be meant is replayed again.
    """
    with pytest.raises(ReplayError, match=match):
        update("update stream", context(described, lengths), runtime_shape)

    assert issued(params) == released(*broken)


def test_other_faults(params):
    """
    So with another stream, a size that drafts do not fill, and a layer without metadata.
    """
    with pytest.raises(ReplayError, match="waited before the replay: other is not the backend's update stream"):
        update_attn_params("other", context(FOUR, [1]), 4)
    with pytest.raises(ReplayError, match="3 query tokens each must have a multiple of that: 4"):
        update_mla_attn_params("update stream", context(TWO_BY_TWO, [1]), 4, mtp(2))
    assert issued(params) == released(FOUR, TWO_BY_TWO)

    del params.backend.log[:]
    step = context(MIXED, [1])
    del step.attn_metadata["layer.1"]
    with pytest.raises(ReplayError, match=r"no attention metadata for layer\.1 in a replay of .*num_tokens=8"):
        update_attn_params("update stream", step, 8)

    log, _ = issued(params)
    assert log == [(MIXED, "layer.0", [1, *[0] * 7]), (MIXED, "layer.1", "released")]


def test_set_once():
    """
    A role has one engine's parameters at a time.
    """
    others = AttentionParams(FakeBackend())
    with pytest.raises(ValueError, match="parameters of 'target' are set once: call clear_attention_params"):
        set_attention_params(others)
    set_attention_params(others, "drafter")
    assert get_attention_params("drafter") is others
    assert get_attention_params() is not others

    clear_attention_params("target", "never set")
    set_attention_params(others)
    assert get_attention_params() is others

    clear_attention_params()
    for role in ("target", "drafter"):
        with pytest.raises(ReplayError, match="has no attention parameters"):
            get_attention_params(role)
