import pytest

from aclgraph_dispatch.bench.profile_table import read_table
from aclgraph_dispatch.errors import ConfigError

HEADER = "layer,tokens,time_us\n"


def read(tmp_path, text, *, encoding="utf-8", **options):
    (tmp_path / "dense.csv").write_text(text, encoding=encoding)
    return read_table(tmp_path, "dense", ("layer", "tokens"), **options)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (f"{HEADER}x,16,2\n", "utf-8"),
        (f"{HEADER}x,16.0,2.0\n", "utf-8-sig"),
        ("more,time_us,tokens,layer\n?,2,16,x\n\n", "utf-8"),
        ("layer,tokens,time_us,decode_q_len\nx,16,2,1\nx,16,3,2\nx,32,3,4.0\n", "utf-8"),
    ],
)
def test_table(tmp_path, text, encoding):
    """
    Whole numbers may be written with a point, a file may begin with a mark, columns may be more and in any order;
    decodes of several tokens are left out.
    """
    assert {("x", 16): 2.0} == read(tmp_path, text, encoding=encoding)


def test_missing_column_has_its_default(tmp_path):
    """
    A column that may be missing, or empty, has the default.
    """
    columns = {"keys": ("tokens", "ep"), "defaults": {"ep": "1"}}
    for text in ("tokens,time_us\n4,5\n", "tokens,ep,time_us\n4,,5\n"):
        (tmp_path / "moe.csv").write_text(text)

        assert {(4, 1): 5.0} == read_table(tmp_path, "moe", **columns)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("x,16,2\ny,16,2\nx,16.0,3\n", "line 4: duplicate row: layer x, tokens 16 is on line 2 too"),
        ("x,16,0\n", "line 2, column time_us: must be > 0: '0'"),
        ("x,16,-2\n", "line 2, column time_us: must be > 0: '-2'"),
        ("x,16,2\nx,16\n", "line 3: must have 3 values"),
        ("x,16,2,3\n", "line 2: must have 3 values"),
        ("x,16.5,2\n", "line 2, column tokens: must be a whole number >= 0: '16.5'"),
        ("x,-16,2\n", "line 2, column tokens: must be a whole number >= 0: '-16'"),
        ("x,,2\n", "line 2, column tokens: must be a number: ''"),
    ],
)
def test_broken_rows(tmp_path, rows, message):
    """
    Each broken row is one error that names line, column and rule.
    """
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, HEADER + rows)


def test_kinds_of_layers(tmp_path):
    """
    A table that may only be of one kind of layer is refused with two.
    """
    text = HEADER + "full,16,2\nsliding,16,3\n"

    assert 2 == len(read(tmp_path, text))
    with pytest.raises(
        ConfigError, match="line 3, column layer: the table must be of one kind of layer: 'full' and"
    ):
        read(tmp_path, text, only_layer=True)
