"""The configuration a user writes."""

import re

import pytest

from aclgraph_dispatch import CapturePlan, DispatchConfig
from aclgraph_dispatch.errors import ConfigError, DispatchError

PATH = "additional_config.aclgraph_dispatch"


def load(value):
    """
    The configuration a user wrote as *value*.
    """
    return DispatchConfig.load({"aclgraph_dispatch": value})


@pytest.mark.parametrize(
    "additional_config", [None, {}, {"ascend_scheduler_config": {}}, {"aclgraph_dispatch": {}}]
)
def test_defaults(additional_config):
    """
    Who asks for nothing, or for nothing of ours, leaves every choice to us.
    """
    config = DispatchConfig(policy=None, full_sizes=None, piecewise_sizes=None, threshold=None)

    assert config == DispatchConfig.load(additional_config)


def test_all_keys():
    """
    What the user asks for is what we get, with lists made unchangeable.
    """
    config = load({"policy": "eager", "full_sizes": [1, 2], "piecewise_sizes": [4, 8], "threshold": 8})

    assert DispatchConfig(policy="eager", full_sizes=(1, 2), piecewise_sizes=(4, 8), threshold=8) == config
    assert hash(config) == hash(
        load({"policy": "eager", "full_sizes": (1, 2), "piecewise_sizes": [4, 8], "threshold": 8})
    )


def test_null_is_left_out():
    """
    JSON's null asks for nothing.
    """
    assert DispatchConfig() == load(dict.fromkeys(("policy", "full_sizes", "piecewise_sizes", "threshold")))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"threshold": "12"}, f"expected int, got '12' @ {PATH}.threshold"),
        ({"threshold": True}, f"expected int, got True @ {PATH}.threshold"),
        ({"threshold": 1.0}, f"expected int, got 1.0 @ {PATH}.threshold"),
        ({"threshold": "false"}, f"expected int, got 'false' @ {PATH}.threshold"),
        ({"threshold": [8]}, f"expected int, got [8] @ {PATH}.threshold"),
        ({"threshold": 0}, f"'threshold' must be >= 1: 0 @ {PATH}.threshold"),
        ({"policy": 1}, f"expected str, got 1 @ {PATH}.policy"),
        ({"policy": {"name": "eager"}}, f"expected str, got {{'name': 'eager'}} @ {PATH}.policy"),
        (
            {"policy": "fastest"},
            "'policy' must be one of eager, piecewise, full_decode_only, full_and_piecewise: 'fastest' "
            f"@ {PATH}.policy",
        ),
        ({"full_sizes": 8}, f"expected a list of integers, got 8 @ {PATH}.full_sizes"),
        ({"full_sizes": "12"}, f"expected a list of integers, got '12' @ {PATH}.full_sizes"),
        ({"full_sizes": [1, "2"]}, f"expected a list of integers, got [1, '2'] @ {PATH}.full_sizes"),
        ({"full_sizes": [True, 2]}, f"expected a list of integers, got [True, 2] @ {PATH}.full_sizes"),
        ({"full_sizes": [[1, 2]]}, f"expected a list of integers, got [[1, 2]] @ {PATH}.full_sizes"),
        ({"full_sizes": {"1": 2}}, f"expected a list of integers, got {{'1': 2}} @ {PATH}.full_sizes"),
        (
            {"piecewise_sizes": []},
            f"'piecewise_sizes' must not be empty; leave it out to capture vLLM's sizes @ {PATH}.piecewise_sizes",
        ),
        (
            {"piecewise_sizes": [0, 1]},
            f"'piecewise_sizes' must be positive and ascend without repetition: [0, 1] @ {PATH}.piecewise_sizes",
        ),
        (
            {"full_sizes": [2, 1]},
            f"'full_sizes' must be positive and ascend without repetition: [2, 1] @ {PATH}.full_sizes",
        ),
        (
            {"full_sizes": [1, 1]},
            f"'full_sizes' must be positive and ascend without repetition: [1, 1] @ {PATH}.full_sizes",
        ),
        (
            {"full_sizes": [1, 16], "threshold": 8},
            f"'full_sizes' must be <= 'threshold' = 8: 16; change either @ {PATH}",
        ),
        (
            {"piecewise_sizes": [9], "threshold": 8},
            f"'piecewise_sizes' must be <= 'threshold' = 8: 9; change either @ {PATH}",
        ),
        (
            {"polcy": "eager"},
            f"unknown key 'polcy'; known keys: policy, full_sizes, piecewise_sizes, threshold @ {PATH}",
        ),
        ("eager", f"{PATH} must be an object: 'eager'"),
        (["eager"], f"{PATH} must be an object: ['eager']"),
        (None, f"{PATH} must be an object: None"),
    ],
)
def test_wrong_values(value, message):
    """
    Nothing is guessed or converted: the key, the rule and the value are named.
    """
    with pytest.raises(ConfigError) as excinfo:
        load(value)

    assert message == str(excinfo.value)
    assert isinstance(excinfo.value, DispatchError)


def test_all_errors_at_once():
    """
    A wrong value hides no other, not even a contradiction between those that are right by themselves.
    """
    with pytest.raises(ConfigError) as excinfo:
        load(
            {
                "polcy": "eager",
                "policy": "fastest",
                "full_sizes": [1, 16],
                "piecewise_sizes": [64],
                "threshold": 8,
            }
        )

    known = "policy, full_sizes, piecewise_sizes, threshold"
    policies = "eager, piecewise, full_decode_only, full_and_piecewise"
    assert [
        f"unknown key 'polcy'; known keys: {known} @ {PATH}",
        f"'policy' must be one of {policies}: 'fastest' @ {PATH}.policy",
        "'full_sizes' must be <= 'threshold' = 8: 16; change either",
        f"'piecewise_sizes' must be <= 'threshold' = 8: 64; change either @ {PATH}",
    ] == re.split("; (?=unknown|'\\w+' must)", str(excinfo.value))


def test_sizes_up_to_the_threshold():
    """
    The threshold itself may be captured.
    """
    config = load({"full_sizes": [8], "piecewise_sizes": [8], "threshold": 8})

    assert (config.full_sizes, config.piecewise_sizes, config.threshold) == ((8,), (8,), 8)


def test_smallest_values():
    """
    One token is a size, and a threshold.
    """
    config = load({"full_sizes": [1], "threshold": 1})

    assert (config.full_sizes, config.threshold) == ((1,), 1)


def capture_plan(value, *, policy="full_and_piecewise", ladder=(1, 2, 4, 8, 16), **limits):
    """
    The graphs of an engine of 8 requests and 64 tokens a step, unless *limits* say otherwise.
    """
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **limits}
    return load(value).capture_plan(policy, ladder, **limits)


@pytest.mark.parametrize(
    ("value", "engine", "full_sizes", "piecewise_sizes"),
    [
        # What is not configured is the engine's, as far as a step fills it.
        ({}, {}, (1, 2, 4, 8), (1, 2, 4, 8, 16)),
        ({}, {"ladder": ()}, (), ()),
        ({}, {"ladder": [8, 4, 4, 1]}, (1, 4, 8), (1, 4, 8)),
        ({}, {"max_num_batched_tokens": 4}, (1, 2, 4), (1, 2, 4)),
        # FULL sizes are whole requests, and no fewer than the engine's own size holds.
        ({}, {"query_len": 4, "max_num_seqs": 2}, (4, 8), (1, 2, 4, 8, 16)),
        ({}, {"query_len": 3}, (3, 6, 9, 18), (1, 2, 4, 8, 16)),
        ({}, {"query_len": 3, "ladder": [1, 2, 4, 8, 16, 24]}, (3, 6, 9, 18, 24), (1, 2, 4, 8, 16, 24)),
        ({}, {"query_len": 3, "max_num_batched_tokens": 17}, (3, 6, 9, 15), (1, 2, 4, 8, 16)),
        # Sizes that nobody chose are numbers of requests, and all there can be are among them.
        ({}, {"query_len": 3, "max_num_batched_tokens": 17, "is_chosen": False}, (3, 6, 12, 15), (1, 2, 4, 8, 16)),
        ({}, {"max_num_batched_tokens": 5, "is_chosen": False}, (1, 2, 4, 5), (1, 2, 4)),
        ({"threshold": 10}, {"query_len": 4}, (4, 8), (1, 2, 4, 8)),
        ({"threshold": 4}, {}, (1, 2, 4), (1, 2, 4)),
        ({"threshold": 12}, {}, (1, 2, 4, 8), (1, 2, 4, 8)),
        # What is configured is taken as it is.
        ({"full_sizes": [3, 8]}, {}, (3, 8), (1, 2, 4, 8, 16)),
        ({"piecewise_sizes": [5, 64]}, {}, (1, 2, 4, 8), (5, 64)),
        ({"full_sizes": [4, 12]}, {"query_len": 4}, (4, 12), (1, 2, 4, 8, 16)),
        # No graph is captured that the policy never uses.
        ({"piecewise_sizes": [8]}, {"policy": "full_decode_only"}, (1, 2, 4, 8), ()),
        ({"full_sizes": [8]}, {"policy": "piecewise"}, (), (1, 2, 4, 8, 16)),
        ({"full_sizes": [8], "piecewise_sizes": [8]}, {"policy": "eager"}, (), ()),
    ],
)
def test_capture_plan(value, engine, full_sizes, piecewise_sizes):
    """
    The plan has the user's sizes, else the engine's, for the modes of the policy.
    """
    assert CapturePlan(full_sizes, piecewise_sizes) == capture_plan(value, **engine)


def test_lora_cases():
    """
    Every size is captured for the adapters that the engine captures, by default for none.
    """
    assert (0,) == capture_plan({}).lora_cases
    assert (0, 1, 3) == capture_plan({}, lora_cases=[0, 1, 3]).lora_cases


@pytest.mark.parametrize("additional_config", [None, {"ascend": {}, "aclgraph_dispatch": {"policy": "piecewise"}}])
@pytest.mark.parametrize("plan", [CapturePlan((1, 2), (8,)), CapturePlan((), (8,)), CapturePlan()])
def test_pinned(additional_config, plan):
    """
    Sizes once planned can be written down, beside what was written, and give the same plan again.
    """
    pinned = DispatchConfig.pinned(additional_config, plan)

    sizes = {"full_sizes": [1, 2]} if plan.full_sizes else {}
    sizes |= {"piecewise_sizes": [8]} if plan.piecewise_sizes else {}
    ours = (additional_config or {}).get("aclgraph_dispatch", {})
    assert {**(additional_config or {}), "aclgraph_dispatch": {**ours, **sizes}} == pinned
    assert additional_config is None or additional_config["aclgraph_dispatch"] == {"policy": "piecewise"}
    assert tuple(sizes.get("full_sizes", ())) == (DispatchConfig.load(pinned).full_sizes or ())


@pytest.mark.parametrize(
    ("value", "engine", "messages"),
    [
        (
            {"full_sizes": [8, 9]},
            {},
            ["'full_sizes' must be <= max_num_seqs * query length = 8, no step fills more: 9"],
        ),
        (
            {"full_sizes": [4, 8]},
            {"max_num_batched_tokens": 4},
            ["'full_sizes' must be <= max_num_batched_tokens = 4, no step fills more: 8"],
        ),
        (
            {"full_sizes": [8, 9]},
            {"max_num_batched_tokens": 8},
            ["'full_sizes' must be <= max_num_batched_tokens = 8, no step fills more: 9"],
        ),
        (
            {"full_sizes": [6, 36], "piecewise_sizes": [64, 65, 66]},
            {"query_len": 4},
            [
                "'full_sizes' must be multiples of the query length 4: 6",
                "'full_sizes' must be <= max_num_seqs * query length = 32, no step fills more: 36",
                "'piecewise_sizes' must be <= max_num_batched_tokens = 64, no step fills more: 65",
                "'piecewise_sizes' must be <= max_num_batched_tokens = 64, no step fills more: 66",
            ],
        ),
    ],
)
def test_sizes_no_step_fills(value, engine, messages):
    """
    Sizes that this engine can never fill are refused, all at once, with the limit that forbids them.
    """
    with pytest.raises(ConfigError) as excinfo:
        capture_plan(value, **engine)

    assert f"{'; '.join(messages)} @ {PATH}" == str(excinfo.value)
