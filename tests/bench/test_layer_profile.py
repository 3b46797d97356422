import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aclgraph_dispatch import CapturePlan, Dispatcher, RuntimeMode
from aclgraph_dispatch.batch import Batch, BatchKind
from aclgraph_dispatch.bench.layer_profile import ProfileTimer, on_line, read_profile
from aclgraph_dispatch.bench.scheduling import ScheduledStep
from aclgraph_dispatch.errors import ConfigError
from aclgraph_dispatch.model_shape import ModelShape
from tests.bench.profiles import attention_us, dense_us, write_profile

MODEL = ModelShape.named("llama-3.1-8b")


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    return read_profile(write_profile(tmp_path_factory.mktemp("profile"), compressed=True))


def step(*rows: tuple[int, int, int]) -> ScheduledStep:
    """
    A step of requests with tokens scheduled, computed before, and in the prompt.
    """
    scheduled, computed, prompt = np.array(rows, dtype=np.int32).T
    zeros = np.zeros(len(rows), dtype=np.int32)
    return ScheduledStep(tuple(range(len(rows))), scheduled, computed, computed + scheduled, zeros, prompt)


def part(num_reqs: int, num_tokens: int, padded: int):
    dispatcher = Dispatcher(CapturePlan((), (padded,)), max_num_seqs=16)
    [only] = dispatcher.dispatch(Batch(BatchKind.MIXED, num_reqs, num_tokens, 0, 1)).parts
    return only


@pytest.mark.parametrize(
    ("x", "extend", "expected"),
    [(0, False, 10), (1, False, 10), (2, False, 15), (3, True, 20), (5, False, 20), (5, True, 30)],
)
def test_line(x, extend, expected):
    """
    Between points a line is straight; before the first it is level, after the last level or straight on.
    """
    assert expected == on_line([(1, 10), (3, 20)], x, extend=extend)


@given(
    st.sampled_from([0, *range(16, 65)]),
    st.integers(0, 512),
    st.integers(0, 20),
    st.integers(16, 4000),
)
def test_attention_between_points(profile, chunk, history, decodes, context):
    """
    What is linear in the table is met exactly between its points, and beyond the last of them.
    """
    if not chunk:
        history = 0
    if not chunk and not decodes:
        return
    expected = attention_us(chunk, history, decodes, context)

    assert expected == pytest.approx(profile.attention.microseconds(chunk, history, decodes, context))


def test_unequal_decodes_take_longer(profile):
    """
    The time of unequal decodes lies between that of the mean and that of the maximum, by the alpha of their bin,
    or by the default where the bin is empty.
    """
    mean, longest = attention_us(0, 0, 2, 600), attention_us(0, 0, 2, 1000)
    assert mean + 0.25 * (longest - mean) == pytest.approx(profile.attention_microseconds(0, 0, [200, 1000]))

    mean, longest = attention_us(0, 0, 5, 840), attention_us(0, 0, 5, 1000)
    assert mean + 0.1 * (longest - mean) == pytest.approx(
        profile.attention_microseconds(0, 0, [200, 1000, 1000, 1000, 1000])
    )


def test_no_skew_table_no_correction(tmp_path):
    """
    Without a table for unequal decodes their mean decides.
    """
    profile = read_profile(write_profile(tmp_path, skew=False))

    assert attention_us(0, 0, 2, 600) == pytest.approx(profile.attention_microseconds(0, 0, [200, 1000]))


def test_step_is_the_sum_of_its_layers(profile):
    """
    A step of a decode and a chunk takes the padded dense layers, layer norms twice, attention of both together,
    and one head.
    """
    timer = ProfileTimer(profile, MODEL)
    layer = sum(dense_us(name, 48) for name in ("qkv_proj", "o_proj")) + 2 * dense_us("layernorm", 48)
    layer += attention_us(32, 64, 1, 300)
    expected = dense_us("embedding", 48) + dense_us("final_layernorm", 48) + 12 + 32 * layer
    time = timer(step((1, 300, 200), (32, 64, 128)), part(2, 33, 48))

    assert 1e-6 * expected == pytest.approx(time.device_seconds)
    assert time.device_seconds == time.seconds


def test_chunks_keep_their_pairs(profile):
    """
    Two chunks count as one with as many tokens and pairs.
    """
    timer = ProfileTimer(profile, MODEL)
    two = timer(step((16, 100, 500), (16, 100, 500)), part(2, 32, 32))
    one = timer(step((32, 92, 500)), part(1, 32, 32))

    # One head more; pairs 2 * 16 * 108 = 32 * (92 + 16).
    assert two.seconds == pytest.approx(one.seconds + 1e-6)


def test_negative_controls_differ(profile):
    """
    Each negative control changes the time of a mixed step with unequal decodes.
    """
    mixed, of_mixed = step((1, 300, 200), (1, 900, 200), (32, 64, 128)), part(3, 34, 48)
    times = {
        ProfileTimer(profile, MODEL, **control)(mixed, of_mixed).seconds
        for control in ({}, {"additive": True}, {"max_context": True})
    }

    assert 3 == len(times)


def test_experts(tmp_path):
    """
    Experts are looked up by the tokens and by how many of them these meet, on as many ranks as share them.
    """
    model = ModelShape.named("qwen3-30b-a3b")
    profile = read_profile(write_profile(tmp_path, moe=True))
    timer = ProfileTimer(profile, model, expert_ranks=16)
    without = ProfileTimer(read_profile(write_profile(tmp_path / "dense")), model)
    decode, of_decode = step((1, 300, 200)), part(1, 1, 1)
    experts = 20 + 1 / 4 + 8  # 128 / 16 experts, of which a token on 8 of 128 meets half; at least the measured 2

    difference = timer(decode, of_decode).seconds - without(decode, of_decode).seconds
    met = max(8 * model.activated_share(1), 2)
    assert 1e-6 * model.num_layers * (experts - 8 + met) == pytest.approx(difference)


def test_idle_rank_has_no_attention(profile):
    """
    A rank that only goes along computes its paddings, and no attention.
    """
    idle = ScheduledStep((), *(np.zeros(0, dtype=np.int32),) * 5)
    dispatcher = Dispatcher(CapturePlan((), (16,)), max_num_seqs=16)
    [only] = dispatcher.dispatch(Batch(BatchKind.MIXED, 1, 16, 0, 1)).parts
    busy = ProfileTimer(profile, MODEL)(step((16, 0, 16)), only)

    assert RuntimeMode.PIECEWISE is only.mode
    assert 1e-6 * 32 * attention_us(16, 0, 0, 0) == pytest.approx(
        busy.seconds - ProfileTimer(profile, MODEL)(idle, only).seconds
    )


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("meta.yaml", ":\n  - {", "meta.yaml cannot be read as a profile's description"),
        ("meta.yaml", "[1, 2]", "meta.yaml must hold keys and values"),
        ("dense.csv", "layer,tokens\nx,1\n", "line 1: columns time_us are missing"),
        ("dense.csv", "layer,tokens,time_us\n", "must hold at least one row"),
        ("dense.csv", "layer,tokens,time_us\nx,1,nan\n", "line 2, column time_us: must be finite: 'nan'"),
        ("dense.csv", "layer,tokens,time_us\nx,one,2\n", "line 2, column tokens: must be a number: 'one'"),
        ("dense.csv", None, "must hold dense.csv, or dense.csv.gz"),
        ("skew_fit.csv", "pc,n_label\n", "columns alpha, kp_label, kv_big_label, skew_rate_label are missing"),
    ],
)
def test_broken_profile(tmp_path, file, content, message):
    """
    Each broken or missing table is one error that names file, line, column and rule.
    """
    path = write_profile(tmp_path) / file
    path.unlink()
    if content is not None:
        path.write_text(content)

    with pytest.raises(ConfigError, match=message):
        read_profile(tmp_path)


def test_truncated_table(tmp_path):
    """
    A compressed table that was cut off is an error.
    """
    path = write_profile(tmp_path, compressed=True) / "attention.csv.gz"
    path.write_bytes(gzip.compress(b"x" * 1000)[:-12])

    with pytest.raises(ConfigError, match=r"attention.csv.gz cannot be read"):
        read_profile(tmp_path)


def test_skew_without_its_bins(tmp_path):
    """
    A table for unequal decodes whose bins nobody describes is an error.
    """
    write_profile(tmp_path)
    (tmp_path / "meta.yaml").write_text("model: x\n")

    with pytest.raises(ConfigError, match=r"must describe the bins of skew_fit.csv"):
        read_profile(tmp_path)


def test_tables_by_tensor_parallelism(tmp_path):
    """
    Tables may lie in a folder for each degree of tensor parallelism.
    """
    write_profile(tmp_path, skew=False)
    write_profile(tmp_path / "tp2", moe=True, skew=False)

    assert not read_profile(tmp_path, tensor_parallel=1).moe
    assert read_profile(tmp_path, tensor_parallel=2).moe


def test_experts_that_were_not_measured(tmp_path):
    """
    A degree of expert parallelism that was not measured is an error.
    """
    with pytest.raises(ConfigError, match="must hold experts measured for ep 4"):
        read_profile(write_profile(tmp_path, moe=True), expert_parallel=4)


def test_attention_of_a_newer_profiler(tmp_path):
    """
    Attention rows may name their layer and the tokens of a decode; a second kind of layer is an error.
    """
    path = write_profile(tmp_path, skew=False) / "attention.csv"
    header, *rows = path.read_text().splitlines()
    newer = [f"{header},layer,decode_q_len", *(f"{row},attention,1" for row in rows)]
    path.write_text("\n".join([*newer, *(f"{row}9,attention,4" for row in rows)]))
    contexts = [200, 1000]

    assert attention_us(0, 0, 2, 600) == pytest.approx(
        read_profile(tmp_path).attention_microseconds(0, 0, contexts)
    )

    path.write_text("\n".join([*newer, *(f"{row},sliding,1" for row in rows)]))
    with pytest.raises(ConfigError, match="the table must be of one kind of layer: 'attention' and 'sliding'"):
        read_profile(tmp_path)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda chunk, decodes: chunk > 0, "must hold rows of decodes alone in attention.csv: there is none"),
        (lambda chunk, decodes: chunk == 0, "must hold rows with a prefill chunk in attention.csv: there is none"),
    ],
)
def test_attention_that_lacks_a_kind_of_step(tmp_path, keep, message):
    """
    Attention without rows of pure decodes, or without any prefill, is one error.
    """
    path = write_profile(tmp_path) / "attention.csv"
    header, *rows = path.read_text().splitlines()
    numbers = [[int(n) for n in row.split(",")[:4]] for row in rows]
    path.write_text("\n".join([header, *(r for r, n in zip(rows, numbers, strict=True) if keep(n[0], n[2]))]))

    with pytest.raises(ConfigError, match=message):
        read_profile(tmp_path)


@pytest.mark.parametrize(
    ("degrees", "tensor_parallel", "num_assumptions"),
    [(None, 1, 0), ([1, 2], 1, 0), ([2], 1, 1), (None, 2, 1), ([1, 2], 2, 1), ([2], 2, 0)],
)
def test_tables_of_unknown_tensor_parallelism(tmp_path, degrees, tensor_parallel, num_assumptions):
    """
    That tables outside `tp1`, `tp2` are for the run's tensor parallelism is told, unless meta.yaml says so.
    """
    write_profile(tmp_path, skew=False, more_meta={"tp_degrees": degrees})

    assert num_assumptions == len(read_profile(tmp_path, tensor_parallel=tensor_parallel).assumptions)


def test_broken_bins(tmp_path):
    """
    Bins without a label each, and tensor parallelism that is no list, are errors.
    """
    write_profile(tmp_path)
    text = (tmp_path / "meta.yaml").read_text()
    (tmp_path / "meta.yaml").write_text(text.replace("    - n>4\n", ""))
    with pytest.raises(ConfigError, match="n: 1 labels for 2 bins"):
        read_profile(tmp_path)

    (tmp_path / "meta.yaml").write_text("tp_degrees: two")
    with pytest.raises(ConfigError, match="tp_degrees: must be a list of integers: 'two'"):
        read_profile(tmp_path)
