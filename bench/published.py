"""
The anchors: published numbers, and how the cost model or the simulator is asked for the same; see `anchors`.

Measured values and conditions are those of the threads named as sources: va#N is an issue or pull request of
vllm-ascend, v#N of vLLM, others by their repository. Constants come from the catalogue as they are, and nothing is
chosen here to meet a number. What a source leaves open is assumed, and said. A card that the catalogue does not
know is not replaced by another, but for a ratio. Requests are sampled by temperature and top-p, as the catalogue's
`sample_seconds`; the context of a run is that at the middle of its output.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from aclgraph_dispatch.constants import catalogue
from aclgraph_dispatch.cost_model import CostModel, StepLoad, StepTime
from aclgraph_dispatch.device import Device
from aclgraph_dispatch.model_shape import ModelShape, kv_blocks
from aclgraph_dispatch.step_plan import Part, RuntimeMode

from .anchors import Anchor, Standing
from .compact_scheduler import CompactScheduler
from .contenders import CONTENDERS
from .ladders import Limits
from .scheduling import ScheduledStep, SchedulerSettings, SimulatedRequest
from .simulate import Simulation, StepTimer, simulate
from .timers import CostTimer

_EAGER, _PIECEWISE, _FULL = RuntimeMode.NONE, RuntimeMode.PIECEWISE, RuntimeMode.FULL
_K = 1024


def shape(name: str, changes: Mapping[str, Any] | None = None, **layout: Any) -> ModelShape:
    """
    A model of the catalogue, with changes to its configuration, cut among ranks as an anchor has it.
    """
    return ModelShape.from_config({**catalogue("models")[name]["config"], **(changes or {})}, name=name, **layout)


# As published in its config.json; counted in tests/bench/test_anchors.py.
CODER_480B = {
    "hidden_size": 6144,
    "moe_intermediate_size": 2560,
    "num_experts": 160,
    "num_hidden_layers": 62,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
}
QWEN3_1_7B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}


def _decode(
    model: ModelShape,
    device: str,
    mode: RuntimeMode,
    num_reqs: int,
    context: float,
    *,
    size: int | None = None,
    is_async: bool = True,
) -> StepTime:
    cost = CostModel(model, Device.named(device), async_scheduling=is_async)
    return cost.times(mode, size or num_reqs, StepLoad.decodes(num_reqs, context))


def _tpot(*args: Any, **options: Any) -> float:
    return 1e3 * _decode(*args, **options).seconds


def _gain(before: float, after: float) -> float:
    return 100 * (after / before - 1)


def closed_loop(
    cost: CostModel,
    policy: str,
    *,
    concurrency: int,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    budget: int = 2048,
    is_async: bool = True,
    timer: StepTimer | None = None,
) -> Simulation:
    """
    Serve equal requests of which *concurrency* are always under way: all wait from the start, and so many may run.
    """
    longest = prompt_tokens + output_tokens + 1
    num_blocks = kv_blocks(cost.model, cost.device.memory_bytes)
    settings = SchedulerSettings(
        concurrency, budget, longest, num_blocks, enable_prefix_caching=False, async_scheduling=is_async
    )
    limits = Limits(concurrency, budget, num_layers=cost.model.num_layers)
    requests = [SimulatedRequest(i, 0.0, prompt_tokens, output_tokens) for i in range(num_requests)]
    dispatcher = CONTENDERS[policy].dispatcher(limits, cost)
    return simulate(requests, [CompactScheduler(settings)], [dispatcher], timer or CostTimer(cost))


def requests_per_second(simulation: Simulation) -> float:
    """
    Of the whole run.
    """
    return len(simulation.token_seconds) / max(float(tokens[-1]) for tokens in simulation.token_seconds)


def loop_ttft(simulation: Simulation, concurrency: int) -> float:
    """
    Mean time to the first token of a closed loop: each request is sent when the one that makes room has ended.
    """
    sent = np.sort([0.0] * concurrency + [tokens[-1] for tokens in simulation.token_seconds])
    first = np.sort([tokens[0] for tokens in simulation.token_seconds])
    return float((first - sent[: len(first)]).mean())


@attrs.frozen
class _Exposed:
    # The device waits for the updates of attention, instead of running beside them.
    cost: CostModel

    def __call__(self, step: ScheduledStep, part: Part) -> StepTime:
        time = CostTimer(self.cost)(step, part)
        return attrs.evolve(time, sync_seconds=time.sync_seconds + time.update_seconds)


def _update_gain(concurrency: int, *, is_hidden: bool = True) -> float:
    def rate(update_seconds: float) -> float:
        device = Device.named("ascend-910b")
        layer = attrs.evolve(device.layer("dense"), update_seconds=update_seconds)
        cost = CostModel(shape("qwen2.5-7b"), attrs.evolve(device, layers={"dense": layer}))
        run = closed_loop(
            cost,
            "full_decode_only",
            concurrency=concurrency,
            num_requests=4 * concurrency,
            prompt_tokens=1024,
            output_tokens=128,
            timer=None if is_hidden else _Exposed(cost),
        )
        return requests_per_second(run)

    return _gain(rate(2.675e-3 / 28), rate(1.66e-3 / 28))


def _coder() -> ModelShape:
    return shape("qwen3-30b-a3b", CODER_480B, weight_bytes=1, tensor_parallel=16, expert_parallel=16)


def _coder_crossing() -> float:
    at_0, at_1m = (_decode(_coder(), "ascend-910b", _FULL, 1, context) for context in (0, _K * _K))
    slope = (at_1m.device_seconds - at_0.device_seconds) / _K
    host = _decode(_coder(), "ascend-910b", _EAGER, 1, 0).host_seconds
    return (host - at_0.device_seconds) / slope


def _busy_layer() -> float:
    model = shape("qwen3-30b-a3b", tensor_parallel=2)
    step = CostModel(model, Device.named("ascend-910b")).times(_PIECEWISE, 1, StepLoad(1, 1024))
    return 1e6 * step.device_seconds / model.num_layers


def _hybrid_ratio() -> float:
    model = shape("qwen3-32b", weight_bytes=1, tensor_parallel=2)
    eager, full = (_tpot(model, "ascend-910b", mode, 8, 2048, size=32) for mode in (_EAGER, _FULL))
    return eager / full


def _r1(size: int) -> float:
    model = shape("deepseek-v3", weight_bytes=1, tensor_parallel=8)
    return _tpot(model, "h200", _FULL, 9, 1024, size=size, is_async=False)


def _piecewise_to_full() -> float:
    model = shape("qwen3-30b-a3b", weight_bytes=1)
    cost = CostModel(model, Device.named("h200"), async_scheduling=False)
    before, after = (
        requests_per_second(
            closed_loop(
                cost,
                policy,
                concurrency=10,
                num_requests=10,
                prompt_tokens=1024,
                output_tokens=128,
                budget=8192,
                is_async=False,
            )
        )
        for policy in ("piecewise", "full_and_piecewise")
    )
    return _gain(before, after)


def _ttft_growth() -> float:
    cost = CostModel(shape("qwen3-30b-a3b", tensor_parallel=4), Device.named("h200"))
    eager, graph = (
        loop_ttft(
            closed_loop(cost, policy, concurrency=8, num_requests=32, prompt_tokens=3500, output_tokens=1500), 8
        )
        for policy in ("eager", "full_and_piecewise")
    )
    return _gain(eager, graph)


def _host_ms(device: str, kind: str, layers: int) -> float:
    layer = Device.named(device).layer(kind)
    return 1e3 * layers * layer.kernels * layer.launch_seconds


def _async_saving() -> float:
    device = Device.named("ascend-910b")
    return 1e3 * (device.sync_prepare_seconds - device.async_prepare_seconds)


def _mtp_growth(num_reqs: int) -> float:
    model = shape("deepseek-v3", weight_bytes=1, tensor_parallel=16, expert_parallel=16)
    one, more = (_tpot(model, "ascend-910c", _FULL, n, 2560, size=2 * n) for n in (1, num_reqs))
    return _gain(one, more)


def _attention_us() -> float:
    model = shape("qwen3-32b", tensor_parallel=4)
    full, none = (_decode(model, "ascend-910b", _FULL, 16, context) for context in (16 * _K, 0))
    return 1e6 * (full.device_seconds - none.device_seconds) / model.num_layers


def _stack_ms(num_tokens: int) -> float:
    model, device = shape("qwen3-8b"), Device.named("h200")
    step = CostModel(model, device).times(_FULL, num_tokens, StepLoad())
    return 1e3 * (step.device_seconds - model.num_layers * device.layer("dense").device_seconds)


def _experts_us(num_tokens: int) -> float:
    # What more experts of one layer take than those of one token.
    model = shape("qwen3-30b-a3b")
    cost = CostModel(model, Device.named("h200"))
    more, one = (cost.times(_FULL, n, StepLoad()).device_seconds for n in (num_tokens, 1))
    return 1e6 * (more - one) / model.num_layers


def _moe_30b(num_reqs: int, context: int) -> float:
    return _tpot(shape("qwen3-30b-a3b", tensor_parallel=2), "ascend-910b", _FULL, num_reqs, context)


def _qwen3_8b(tensor_parallel: int, context: int, *, is_async: bool = True) -> float:
    model = shape("qwen3-8b", tensor_parallel=tensor_parallel)
    return _tpot(model, "ascend-910b", _FULL, 1, context, is_async=is_async)


_CODER = "Qwen3-Coder-480B W8A8, one request"
_CODER_CUT = "910B-like, 16 ranks with one KV head each (the weights do not fit into fewer)"
_UPDATE = "910B, TP1, 28 layers; an update takes 2.4 to 2.95 ms a step before, 1.65 to 1.67 after"
_30B_4090D = "Qwen3-30B-A3B, TP4, 4090D, 8 at a time, 3500 in, 1500 out"
_30B_H100 = "Qwen3-Coder-30B-A3B FP8, H100, 10 requests at once, 1024 in, 128 out, synchronous"
_R1_OPEN = "TP8, FP8", "contexts of 1024 tokens", "synchronous scheduling, as of February 2025"
_UPDATE_OPEN = "Qwen2.5-7B, which has 28 layers", "1024 tokens in, 128 out"
_MOE_4K = "Qwen3-30B-A3B, FULL, 4k in, 1k out"
_MOE_CUT = "910B-like", "TP2, the least that holds the weights"
_V32 = "DeepSeek-V3.2 W8A8, TP16, one draft, 2k in, 1k out"
_V32_OPEN = "910C", "DeepSeek-V3 stands in: no sparse attention, no drafter", "equal acceptance"
_H200_STACK = "kernels alone, no graph; matrix products of a model like Qwen3-8B"
_H200_MOE = "one layer of 128 experts, 8 a token, hidden 2048, width 768, BF16"

ANCHORS: Sequence[Anchor] = (
    Anchor(
        "va#16637",
        "TPOT eager / FULL",
        112.1 / 24.7,
        "x",
        _hybrid_ratio,
        "112.1 / 24.7 ms: hybrid model of 27B, W8A8, 910B4, DP2 x TP2, 3 drafts, 16 requests",
        assumes=("Qwen3-32B W8A8 stands in", "contexts of 2048 tokens", "equal acceptance, no drafter"),
        note="Linear attention launches more kernels than a dense layer, and no published count of "
        "them was found. The TPOT itself needs the acceptance.",
    ),
    Anchor(
        "va#7723",
        "TPOT eager, 256K tokens of context",
        165,
        "ms",
        lambda: _tpot(_coder(), "ascend-910b", _EAGER, 1, 256 * _K),
        _CODER,
        standing=Standing.CIRCULAR,
        assumes=(_CODER_CUT,),
        note="Set kernels and launch_seconds of moe_int8.",
    ),
    Anchor(
        "va#7723",
        "TPOT eager, 768K / 256K tokens",
        171 / 165,
        "x",
        lambda: (
            _tpot(_coder(), "ascend-910b", _EAGER, 1, 768 * _K)
            / _tpot(_coder(), "ascend-910b", _EAGER, 1, 256 * _K)
        ),
        _CODER,
        standing=Standing.CIRCULAR,
        assumes=(_CODER_CUT,),
        note="Met by the launches that the row before set: they cover a device term that the next two rows show "
        "to be far too small. It says nothing of that term.",
    ),
    Anchor(
        "va#7723",
        "TPOT FULL, 768K tokens",
        191,
        "ms",
        lambda: _tpot(_coder(), "ascend-910b", _FULL, 1, 768 * _K),
        _CODER,
        assumes=(_CODER_CUT,),
        note="FULL grows by 65 ms for 256K tokens. Reading them at bytes_per_second takes a tenth: attention of "
        "one request with one KV head a rank does not reach that rate. full_attention_factor is from this thread.",
    ),
    Anchor(
        "va#7723",
        "context where FULL takes as long as eager",
        768 - 256 * (191 - 165) / (256 - 191),
        "Ktok",
        _coder_crossing,
        f"{_CODER}; between 191 ms at 768K and 256 ms at 1M tokens",
        assumes=(_CODER_CUT,),
        note="For the same reason.",
    ),
    Anchor(
        "va#9404",
        "a layer, PIECEWISE, host",
        832,
        "us",
        lambda: 1e6 * Device.named("ascend-910b").layer("moe").piecewise_seconds,
        "Qwen3-VL-30B-A3B, TP2, 910B3, vllm-ascend 0.18",
        standing=Standing.CIRCULAR,
        note="Bounds piecewise_seconds from above: that version synchronised for every piece, later ones do not.",
    ),
    Anchor(
        "va#9404",
        "a layer, PIECEWISE, device busy",
        241,
        "us",
        _busy_layer,
        "Qwen3-VL-30B-A3B, TP2, 910B3, vllm-ascend 0.18; 591 of the 832 us are free",
        assumes=("one request with 1024 tokens",),
    ),
    *(
        Anchor(
            "va#15579",
            f"requests/s by faster updates, {concurrency} at a time",
            gain,
            "%",
            partial(_update_gain, concurrency),
            _UPDATE,
            "simulator",
            assumes=_UPDATE_OPEN,
            note="Its own times of an update replace update_seconds. The model hides them behind the replay; "
            "there they were not hidden.",
        )
        for concurrency, gain in ((1, 5.9), (32, 2.4), (64, 1.9))
    ),
    *(
        Anchor(
            "va#15579",
            f"the same, updates added, {concurrency} at a time",
            gain,
            "%",
            partial(_update_gain, concurrency, is_hidden=False),
            _UPDATE,
            "simulator",
            Standing.WHAT_IF,
            _UPDATE_OPEN,
            "The device waits for the updates. One request at a time hardly depends on the lengths assumed; 32 "
            "and 64 do: twice or thrice the gain where outputs are as long as prompts.",
        )
        for concurrency, gain in ((1, 5.9), (32, 2.4), (64, 1.9))
    ),
    Anchor(
        "v#12920",
        "tokens/s, size 9 instead of 16",
        25,
        "%",
        lambda: _gain(_r1(9), _r1(16)),
        "TPOT 55 to 44 ms: DeepSeek-R1, 8 H200, 9 requests at a time",
        assumes=_R1_OPEN,
        note="Evenly routed, 16 tokens meet 102 experts of 256 and 9 meet 64; at bytes_per_second, the difference "
        "is a third of what was measured.",
    ),
    Anchor(
        "v#12920",
        "TPOT, size 9",
        44,
        "ms",
        lambda: _r1(9),
        "DeepSeek-R1, 8 H200, 9 requests at a time",
        assumes=_R1_OPEN,
        note="vLLM 0.7, months before its kernels for MLA and FP8; the constants are those of 0.24.",
    ),
    Anchor(
        "v#12920",
        "TPOT, size 16 less size 9",
        55 - 44,
        "ms",
        lambda: _r1(16) - _r1(9),
        "DeepSeek-R1, 8 H200, 9 requests at a time",
        assumes=_R1_OPEN,
        note="See the two before.",
    ),
    Anchor(
        "v#25444",
        "requests/s, PIECEWISE to FULL_AND_PIECEWISE",
        100 * (5.98 / 4.07 - 1),
        "%",
        _piecewise_to_full,
        _30B_H100,
        "simulator",
        Standing.CIRCULAR,
        ("H200 stands in for H100", "8192 tokens a step, vLLM's default on such cards"),
        "Its PIECEWISE rate set piecewise_seconds of moe on H200.",
    ),
    Anchor(
        "v#25444",
        "requests/s, FULL_AND_PIECEWISE",
        5.98,
        "1/s",
        None,
        _30B_H100,
        note="Not checkable: no constants for H100.",
    ),
    Anchor(
        "v#45709",
        "TPOT eager, host",
        33.92,
        "ms",
        lambda: _host_ms("h200", "moe", 48),
        _30B_4090D,
        standing=Standing.CIRCULAR,
        note="Set launch_seconds of moe on H200, though from another card.",
    ),
    Anchor(
        "v#45709",
        "TPOT FULL_AND_PIECEWISE",
        10.03,
        "ms",
        None,
        _30B_4090D,
        note="Not checkable: no constants for 4090D.",
    ),
    Anchor(
        "v#45709",
        "TTFT, eager to FULL_AND_PIECEWISE",
        100 * (617.61 / 492.94 - 1),
        "%",
        _ttft_growth,
        f"493 to 618 ms: {_30B_4090D}",
        "simulator",
        assumes=("H200 stands in for 4090D", "2048 tokens a step, vLLM's default on such cards"),
        note="Chunks of more than 512 tokens run eagerly either way, so that ours are about equal. There the wait "
        "in the queue and the prefill both grew, for which the model has no term.",
    ),
    Anchor(
        "xLLM#2053",
        "TPOT Qwen3-8B",
        14.75,
        "ms",
        lambda: _qwen3_8b(1, 2560),
        "TP1, NPU graph, one request, 2k in, 1k out",
        standing=Standing.CIRCULAR,
        assumes=("910B",),
        note="Set bytes_per_second and device_seconds of dense, with the next one.",
    ),
    Anchor(
        "xLLM#2053",
        "TPOT Qwen3-1.7B",
        5.35,
        "ms",
        lambda: _tpot(shape("qwen3-8b", QWEN3_1_7B), "ascend-910b", _FULL, 1, 2560),
        "5.1 to 5.6 ms: TP1, NPU graph, one request, 2k in, 1k out",
        standing=Standing.CIRCULAR,
        assumes=("910B",),
        note="See the one before.",
    ),
    *(
        Anchor(
            "va#6966",
            f"TPOT Qwen3-8B TP8, {'a' if is_async else ''}synchronous",
            9.90,
            "ms",
            partial(_qwen3_8b, 8, 128, is_async=is_async),
            "FULL_DECODE_ONLY, Atlas 800I A2, one request, 64 in, 128 out, CPUs bound (also va#7829)",
            assumes=(f"{'a' if is_async else ''}synchronous scheduling: it is not said",),
            note="Eight ranks: launches, collectives and what lies between steps outweigh the weights. One "
            "measurement under two assumptions: it counts once, and as met only if it is under both.",
            is_repeated=is_async,
        )
        for is_async in (False, True)
    ),
    Anchor(
        "va#11266",
        "TPOT Qwen3-32B",
        34.1,
        "ms",
        lambda: _tpot(shape("qwen3-32b", tensor_parallel=4), "ascend-910b", _FULL, 16, 16 * _K),
        "TP4, 16k tokens of context, 16 requests",
        assumes=("910B", "FULL", "asynchronous scheduling"),
    ),
    Anchor(
        "va#11266",
        "decode attention of a layer",
        172,
        "us",
        _attention_us,
        "TP4, 16k tokens of context, 16 requests",
        assumes=("910B", "FULL"),
    ),
    Anchor(
        "va#5951",
        "TPOT Qwen3-30B-A3B, 1 at a time",
        12.34,
        "ms",
        lambda: _moe_30b(1, 1024),
        "aclgraph, 910B3; 16 to 200 at a time need the lengths of prompts, which were not found",
        assumes=("FULL", _MOE_CUT[1], "a context of 1024 tokens"),
    ),
    *(
        Anchor(
            "va#7100",
            f"TPOT Qwen3-30B-A3B, {num_reqs} at a time",
            measured,
            "ms",
            partial(_moe_30b, num_reqs, 4608),
            _MOE_4K,
            assumes=_MOE_CUT,
            note="A later version than va#5951, and device_seconds of moe, a guess, is too long for it. More "
            "ranks would bring 16 at a time near, not 1 and 2.",
        )
        for num_reqs, measured in ((1, 7.45), (2, 9.1), (16, 13.5))
    ),
    *(
        Anchor(
            "xLLM#2199",
            f"TPOT DeepSeek-V3.2, {num_reqs} requests over 1",
            100 * (measured / 26.2 - 1),
            "%",
            partial(_mtp_growth, num_reqs),
            _V32,
            assumes=_V32_OPEN,
            note="What grows is the number of experts that are read; drafts of one request may meet the "
            "same ones.",
        )
        for num_reqs, measured in ((2, 27.3), (4, 29.2))
    ),
    Anchor(
        "va#4110",
        "what asynchronous scheduling saves a step",
        18.55 - 17.275,
        "ms",
        _async_saving,
        "TPOT 18.4 to 18.7 before, 17.2 to 17.35 after; vllm-ascend 0.11",
        note="The 2.8 ms without it are of another model (va#3677), the 0.5 ms with it a guess.",
    ),
    Anchor(
        "va#776",
        "TPOT eager Qwen2.5-VL-7B",
        22.9,
        "ms",
        lambda: _tpot(shape("qwen2.5-7b"), "ascend-910b", _EAGER, 1, 1024, is_async=False),
        "TP1, A2, one request a second",
        standing=Standing.CIRCULAR,
        assumes=("one request with 1024 tokens", "synchronous scheduling, as of 2025"),
        note="Bounds launch_seconds of dense from above; which section of the thread it belongs to is unclear.",
    ),
    Anchor(
        "ai6s.net",
        "TPOT eager DeepSeek-R1-Distill-Qwen-7B",
        26.6,
        "ms",
        lambda: _tpot(shape("qwen2.5-7b"), "ascend-910c", _EAGER, 1, 1024, is_async=False),
        "one request, A3; a blog, a weak source",
        assumes=("a context of 1024 tokens", "synchronous scheduling"),
        note="As va#776: a dense layer takes longer to launch than kernels times launch_seconds.",
    ),
    Anchor(
        "plugin-FL#435",
        "a layer, eager, host",
        161.35 / 40,
        "ms",
        lambda: _host_ms("ascend-910b", "moe", 1),
        "flagos-ai/vllm-plugin-FL, Qwen3.6-35B-A3B, 40 layers, 64 at a time, 1k in",
        assumes=("all 161 ms are launches", "kernels of an ordinary MoE layer"),
        note="Three of four layers have linear attention: as va#16637.",
    ),
    Anchor(
        "v#9715",
        "PIECEWISE over FULL, 2 layers",
        91.3 - 71.8,
        "us",
        lambda: 1e6 * 2 * Device.named("h200").layer("dense").piecewise_seconds,
        "a toy model without vLLM's attention, one token",
        assumes=("H200",),
        note="vLLM's attention prepares and launches several kernels a layer, the toy's does not; still, "
        "piecewise_seconds of dense on H200 is a guess.",
    ),
    *(
        Anchor(
            "aiconfigurator",
            f"matrix products, {num_tokens} tokens",
            measured,
            "ms",
            partial(_stack_ms, num_tokens),
            f"H200, vLLM 0.24, {_H200_STACK}",
            standing=Standing.CIRCULAR,
            note="Set bytes_per_second, flops_per_second and roofline_exponent of H200."
            if num_tokens == 1
            else "See the one before; the steps of tiles are not modelled.",
        )
        for num_tokens, measured in ((1, 4.17), (256, 5.60), (512, 9.03), (1024, 17.6))
    ),
    *(
        Anchor(
            "aiconfigurator",
            f"experts, {num_tokens} tokens over 1, {routing}",
            measured,
            "us",
            partial(_experts_us, num_tokens),
            f"H200, vLLM 0.24, {_H200_MOE}",
            note=note,
        )
        for num_tokens, measured, routing, note in (
            (4, 94 - 40, "balanced", ""),
            (
                16,
                305 - 40,
                "balanced",
                "These meet all experts, evenly random ones 82 of 128; two errors cancel in part.",
            ),
            (16, 168.5 - 40, "skewed", "Evenly routed tokens meet the most experts; power-law ones meet fewer."),
        )
    ),
)
