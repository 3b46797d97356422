import json
import re
from pathlib import Path

import attrs
import numpy as np
import pytest
from click.testing import CliRunner

from aclgraph_dispatch.bench.anchors import Anchor, Result, Standing, describe, figures, results
from aclgraph_dispatch.bench.published import ANCHORS, CODER_480B, QWEN3_1_7B, closed_loop, loop_ttft, shape
from aclgraph_dispatch.bench.simulate import Simulation
from aclgraph_dispatch.cli import main
from aclgraph_dispatch.constants import catalogue
from aclgraph_dispatch.cost_model import CostModel
from aclgraph_dispatch.device import Device

DOC = Path(__file__).parents[2] / "docs" / "anchors.md"


def ours(source: str, what: str) -> float:
    """
    Our value of the one anchor of *source* about *what*.
    """
    [anchor] = [a for a in ANCHORS if a.source == source and what in a.what]
    [result] = results([anchor])
    assert result.ours is not None
    return result.ours


def test_eager_floor_by_hand():
    """
    One request of Qwen3-Coder-480B waits for the host: launches of 62 layers, and what lies between steps.
    """
    of = catalogue("devices")["ascend-910b"]
    layer = of["layers"]["moe_int8"]
    between = ("async_prepare_seconds", "sync_seconds", "sample_seconds")
    seconds = 62 * layer["kernels"]["value"] * layer["launch_seconds"]["value"]
    seconds += sum(of[name]["value"] for name in between)

    assert 1e3 * seconds == pytest.approx(ours("va#7723", "256K tokens of"))


def test_attention_by_hand():
    """
    On four ranks, a layer of Qwen3-32B reads two KV heads of 128 numbers, keys and values, of 16 times 16k tokens.
    """
    of = catalogue("devices")["ascend-910b"]
    num_bytes = 16 * 16 * 1024 * 2 * 2 * 128 * 2
    microseconds = 1e6 * num_bytes / of["bytes_per_second"]["value"] * of["full_attention_factor"]["value"]

    assert microseconds == pytest.approx(ours("va#11266", "attention"))


def test_experts_by_hand():
    """
    Four tokens meet 1 - (1 - 1/16)^4 of the experts, one meets 1/16; each expert has three matrices.
    """
    num_bytes = 128 * 3 * 2048 * 768 * 2 * ((1 - (15 / 16) ** 4) - 1 / 16)
    microseconds = 1e6 * num_bytes / catalogue("devices")["h200"]["bytes_per_second"]["value"]

    assert microseconds == pytest.approx(ours("aiconfigurator", "experts, 4 tokens"), rel=0.01)


def test_hidden_updates_gain_nothing():
    """
    Updates that run beside a longer replay cost nothing in the model, so that faster ones gain nothing; added to
    it, they gain what they save in a step of one request.
    """
    cost = CostModel(shape("qwen2.5-7b"), Device.named("ascend-910b"))
    run = closed_loop(
        cost, "full_decode_only", concurrency=1, num_requests=1, prompt_tokens=1024, output_tokens=128
    )
    step = float(np.diff(run.token_seconds[0]).mean())
    gain = 100 * ((step + 2.675e-3) / (step + 1.66e-3) - 1)

    assert 0 == ours("va#15579", "updates, 1 at a time")
    assert gain == pytest.approx(ours("va#15579", "added, 1 at a time"), rel=0.05)


def test_closed_loop_keeps_the_number():
    """
    The loop never has more under way than asked for; the next request is sent when one ends, and the wait for its
    first token counts from then.
    """
    cost = CostModel(shape("qwen2.5-7b"), Device.named("ascend-910b"))
    run = closed_loop(cost, "eager", concurrency=2, num_requests=6, prompt_tokens=100, output_tokens=10)
    by_hand = Simulation(
        [], np.zeros(3), np.zeros(3), [np.array([1.0, 4.0]), np.array([2.0, 6.0]), np.array([5.0, 7.0])], 0
    )

    assert 2 == max(step.num_reqs for step in run.steps)
    assert (1 + 2 + (5 - 4)) / 3 == pytest.approx(loop_ttft(by_hand, 2))


def test_every_listed_anchor_is_there():
    """
    The anchors of the project's collection of published numbers are all in the table.
    """
    listed = {"va#16637", "va#7723", "va#9404", "va#15579", "v#12920", "v#25444", "v#45709"}

    assert listed <= {anchor.source for anchor in ANCHORS}


def test_circular_anchors_are_marked():
    """
    Those that chose the constant which predicts them, or are met only by it, are circular; the note says which,
    and the catalogue names them as a source.
    """
    chose = {("va#7723", "256K tokens of"), ("va#9404", "host"), ("xLLM#2053", "8B"), ("xLLM#2053", "1.7B")}
    # Met by what the first of them chose.
    chose |= {("va#7723", "768K / 256K")}
    chose |= {
        ("v#25444", "PIECEWISE to"),
        ("v#45709", "TPOT eager"),
        ("va#776", "TPOT"),
        ("aiconfigurator", "matrix"),
    }
    marked = [
        anchor
        for anchor in ANCHORS
        if any(source == anchor.source and what in anchor.what for source, what in chose)
    ]

    assert {Standing.CIRCULAR} == {anchor.standing for anchor in marked}
    assert len(marked) == sum(anchor.standing is Standing.CIRCULAR for anchor in ANCHORS)
    assert all(anchor.note for anchor in marked)
    named = str(catalogue("devices"))
    # Kernels measured by aiconfigurator are named by the collection they are in.
    assert all(anchor.source in named for anchor in marked if anchor.source != "aiconfigurator")


def test_models_are_as_large_as_published():
    """
    The two models that are not in the catalogue have the parameters of their cards: 480B and 1.7B.
    """
    assert 480e9 == pytest.approx(shape("qwen3-30b-a3b", CODER_480B).num_parameters, rel=0.01)
    assert 1.72e9 == pytest.approx(shape("qwen3-8b", QWEN3_1_7B).num_parameters, rel=0.01)


def test_a_gain_is_judged_as_a_gain():
    """
    Within the tolerance means 20 % of the measured value; what cannot be asked is neither in nor out.
    """
    anchor = Anchor("x#1", "gain", 25.0, "%", lambda: 20.0, "nowhere")

    assert [True, False, None] == [Result(anchor, value).is_within for value in (20.0, 19.9, None)]
    assert "not checkable" in describe([Result(anchor, None)])


def test_a_measurement_counts_once():
    """
    Under several assumptions a measurement counts once, and as met only if it is under all of them.
    """
    anchor = Anchor("x#1", "time", 10.0, "ms", lambda: 10.0, "nowhere")
    again = attrs.evolve(anchor, is_repeated=True)
    found = [
        Result(anchor, 10.0),
        Result(again, 20.0),
        Result(anchor, 10.0),
        Result(again, 9.0),
        Result(anchor, 1.0),
    ]

    assert {"within": 1, "outside": 2} == figures(found)["counts"]["independent"]
    assert ["va#6966"] == [a.source for a in ANCHORS if a.is_repeated]


def test_host_covers_the_device_term():
    """
    That eager steps of long contexts are met says nothing of the device, for ours do not depend on the context.
    """
    assert 1 == pytest.approx(ours("va#7723", "768K / 256K"))


def test_command():
    """
    The command prints the table and JSON as its last line, and succeeds though anchors fail.
    """
    printed = CliRunner().invoke(main, ["bench", "anchors"])
    only_json = CliRunner().invoke(main, ["bench", "anchors", "--json"])
    document = json.loads(printed.output.splitlines()[-1])

    assert 0 == printed.exit_code == only_json.exit_code
    assert document == json.loads(only_json.output)
    assert len(ANCHORS) == len(document["anchors"])
    assert document["counts"]["independent"]["outside"] > 0


def test_document_is_what_the_command_prints():
    """
    The table in the document is the one that is printed now; whoever replaces it reads the text again.
    """
    [table] = re.findall(r"```text\n(.*?)\n```", DOC.read_text(encoding="utf-8"), re.DOTALL)

    assert describe(results(ANCHORS)) == table
