"""Comparisons on real servers: first with servers and a client made up by hand, then one with vLLM's."""

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
from click.testing import CliRunner

from aclgraph_dispatch.bench import live
from aclgraph_dispatch.bench.commands import bench
from aclgraph_dispatch.bench.engine import EngineFailedError
from aclgraph_dispatch.bench.live import NUM_WARM_UP_REQUESTS, run_live
from aclgraph_dispatch.bench.live_case import LiveCase
from aclgraph_dispatch.bench.paired import METRICS, PairedRun
from aclgraph_dispatch.bench.server import ServerOptions
from aclgraph_dispatch.errors import ConfigError

from .results import result

CASE = LiveCase(trace="azure-conv", model="gqa", limit=12, rate=3, is_scaled=True, rounds=3, seed=5)
ROUTE = {"mode": "FULL", "reason": "EXACT"}


@attrs.define
class World:
    """
    A machine without vLLM: what happens on it, in order, and what it is like.
    """

    directory: Path
    events: list[tuple[Any, ...]] = attrs.field(factory=list)
    environment: Mapping[str, str] = attrs.field(factory=dict)
    options: Sequence[ServerOptions] = ()
    device: str = "cpu"
    changes: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    is_reset: bool = True
    num_reports: dict[str, int] = attrs.field(factory=dict)
    reports: dict[str, dict[str, Any]] = attrs.field(factory=dict)


@attrs.define
class FakeServer:
    """
    In place of vLLM's; its worker takes more steps from report to report.
    """

    world: World
    name: str
    url: str

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """
        Answer.
        """
        if path == "/version":
            return {"version": "0.32.0"}
        if path == "/v1/completions":
            self.world.events.append(("make ready", self.name, body))
            return {}
        if path == "/reset_prefix_cache":
            self.world.events.append(("reset", self.name))
            return {"success": self.world.is_reset}
        assert ("/collective_rpc", {"method": "dispatch_report"}) == (path, body)
        if self.name in self.world.reports:
            return {"results": [self.world.reports[self.name]]}
        count = self.world.num_reports[self.name] = self.world.num_reports.get(self.name, 0) + 1
        routes = [{**ROUTE, "steps": 10 * count, "tokens": 100 * count, "paddings": count}]
        routes += [{"mode": "NONE", "reason": "OVER_MAX", "steps": 1, "tokens": 1, "paddings": 0}]
        if more := count - 1:
            routes.append(
                {
                    "mode": "PIECEWISE",
                    "reason": "MIXED",
                    "steps": 2 * more,
                    "tokens": 9 * more,
                    "paddings": 3 * more,
                }
            )
        return {"results": [{"policy": self.name, "routes": routes, "decisions": [1, 2]}, {"policy": "rank 1"}]}

    def check(self) -> None:
        """
        It runs.
        """


@attrs.define
class FakeClient:
    """
    In place of vLLM's: the figures of a run are its number.
    """

    world: World
    num_runs: int = 0

    def device_type(self) -> str:
        """
        What the machine has.
        """
        return self.world.device

    def run(self, arguments: Sequence[str], check: Callable[[], None]) -> None:
        """
        Write a result file.
        """
        check()
        parser = argparse.ArgumentParser()
        for name in ("base-url", "dataset-path", "result-dir", "result-filename", "num-prompts", "temperature"):
            parser.add_argument(f"--{name}", required=True)
        for name in ("timed-trace-chunk-hash-size", "dataset-name", "metric-percentiles", "percentile-metrics"):
            parser.add_argument(f"--{name}", required=True)
        parser.add_argument("--goodput", nargs="+", required=True)
        for flag in ("save-result", "save-detailed"):
            parser.add_argument(f"--{flag}", action="store_const", const=True, required=True)
        args, _ = parser.parse_known_args(arguments)
        lines = [json.loads(line) for line in Path(args.dataset_path).read_text().splitlines()]
        assert ("timed_trace", "16", "0") == (
            args.dataset_name,
            args.timed_trace_chunk_hash_size,
            args.temperature,
        )
        assert ("90,99", "ttft,tpot,itl,e2el") == (args.metric_percentiles, args.percentile_metrics)
        assert ["ttft:2000.0", "tpot:100.0"] == args.goodput
        assert str(len(lines)) == args.num_prompts
        name = args.base_url.removeprefix("http://")
        self.world.events.append(("run", name, lines))
        self.num_runs += 1
        raw = result(
            self.num_runs,
            completed=len(lines),
            errors=[""] * len(lines),
            input_lens=[line["input_length"] for line in lines],
            output_lens=[line["output_length"] for line in lines],
            start_times=[line["timestamp"] for line in lines],
            generated_texts=[f"text {number}" for number in range(len(lines))],
        )
        raw |= self.world.changes.get(name, {})
        Path(args.result_dir, args.result_filename).write_text(json.dumps(raw))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """
    A machine where `run_live` finds these.
    """
    world = World(tmp_path)

    @contextlib.contextmanager
    def client(directory: Path, environment: Mapping[str, str]) -> Iterator[FakeClient]:
        world.environment = environment
        yield FakeClient(world)
        world.events.append(("client ends", directory))

    @contextlib.contextmanager
    def serving(
        options: Sequence[ServerOptions], directory: Path, *, port: int | None
    ) -> Iterator[list[FakeServer]]:
        world.options = options
        world.events.append(("start", directory, port))
        yield [FakeServer(world, o.name, f"http://{o.name}") for o in options]
        world.events.append(("servers end",))

    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    monkeypatch.setattr(live, "client", client)
    monkeypatch.setattr(live, "serving", serving)
    monkeypatch.setattr(live, "checkpoint", lambda _model: tmp_path)
    return world


def test_order(world: World) -> None:
    """
    Each server is warmed up; then come the rounds, every other one backwards, each run with an empty cache and
    after one request that is not measured.
    """
    done: list[str] = []
    document = run_live(CASE, ["stock", "eager"], on_done=done.append)
    runs = [event[1] for event in world.events if event[0] == "run"]

    assert ["stock", "eager", *["stock", "eager", "eager", "stock", "stock", "eager"]] == runs
    assert runs[2:] == done
    assert [("stock", "eager"), ("eager", "stock"), ("stock", "eager")] == document["orders"]
    assert [
        *[("run", "stock"), ("run", "eager")],
        *((what, name) for name in runs[2:] for what in ("reset", "make ready", "run")),
    ] == [event[:2] for event in world.events[1:-2]]
    assert [("servers end",), "client ends"] == [world.events[-2], world.events[-1][0]]
    assert ["stock", "eager"] == [options.name for options in world.options]


def test_request_before_a_run(world: World) -> None:
    """
    The request that is not measured is as long as the first one, has a prefill and a decode, and hits no cache.
    """
    run_live(CASE, ["stock"])
    (body, *others) = [event[2] for event in world.events if event[0] == "make ready"]
    first = next(event[2] for event in world.events if event[0] == "run")[0]

    assert [body] * 2 == others
    assert ([1] * first["input_length"], 2, True) == (body["prompt"], body["max_tokens"], body["ignore_eos"])
    assert str(world.directory) == body["model"]


def test_request_before_a_run_fits(world: World) -> None:
    """
    A first request whose prompt leaves room for one token only is not followed by a decode.
    """
    trace = world.directory / "trace.csv"
    trace.write_text("arrival_ms,prompt_tokens,output_tokens\n0,511,9\n")
    run_live(LiveCase(trace=str(trace), model="m", rounds=1), ["stock"])
    (body,) = [event[2] for event in world.events if event[0] == "make ready"]

    assert (511, 1) == (len(body["prompt"]), body["max_tokens"])


def test_all_get_the_same_requests(world: World) -> None:
    """
    All measured runs have the same requests at the same times; a warm-up has the first few at once.
    """
    run_live(CASE, ["stock", "eager"])
    lines = [event[2] for event in world.events if event[0] == "run"]
    warm_up, measured = lines[:2], lines[2:]

    assert all(measured[0] == run for run in measured)
    assert 12 == len(measured[0])
    assert [{**line, "timestamp": 0} for line in measured[0][:NUM_WARM_UP_REQUESTS]] == warm_up[0] == warm_up[1]
    # From this seed vLLM makes the same words in every run.
    assert "5" == world.environment["PYTHONHASHSEED"]
    assert "0" == world.environment["ACLGRAPH_DISPATCH_EMULATE"]


def test_figures_belong_to_their_runs(world: World) -> None:
    """
    Runs are numbered from the third on: each round's figures and ratios are those of its own two runs.
    """
    document = run_live(CASE, ["stock", "eager"])
    stock, eager = document["contenders"]

    assert [3, 6, 7] == [run["mean_ttft_ms"] for run in stock["runs"]]
    assert [4, 5, 8] == [run["mean_ttft_ms"] for run in eager["runs"]]
    assert (6, 5) == (stock["metrics"]["mean_ttft_ms"], eager["metrics"]["mean_ttft_ms"])
    assert {"median": 8 / 7, "lowest": 5 / 6, "highest": 4 / 3} == eager["ratios"]["mean_ttft_ms"]
    assert {"median": 1, "lowest": 1, "highest": 1} == stock["ratios"]["request_goodput"]
    assert document == json.loads(json.dumps(document)) | {
        "orders": document["orders"],
        "settings": document["settings"],
        "contenders": document["contenders"],
    }


def test_routes_are_those_of_the_rounds(world: World) -> None:
    """
    What the worker did between the runs is taken away; stock has no report, and other ranks are not counted.
    """
    stock, eager = run_live(CASE, ["stock", "eager"])["contenders"]

    assert {} == stock["report"]
    assert {
        "policy": "eager",
        "routes": [
            {**ROUTE, "steps": 30, "tokens": 300, "paddings": 3},
            {"mode": "PIECEWISE", "reason": "MIXED", "steps": 6, "tokens": 27, "paddings": 9},
        ],
    } == eager["report"]
    # At first, and before and after each of three runs; the first run is between the second and the third.
    assert {"eager": 7} == world.num_reports


@pytest.mark.parametrize(
    ("name", "report", "message"),
    [
        ("piecewise", {"policy": "eager"}, "'piecewise' must run policy piecewise, and reports eager"),
        ("piecewise", {}, "'piecewise' must run policy piecewise, and reports None"),
        (
            "powers_of_two",
            {"policy": "full_and_piecewise", "full_sizes": [1, 3]},
            r"'powers_of_two' must run full_sizes \[1, 2, 4, 8, 16\], and reports \[1, 3\]",
        ),
    ],
)
def test_another_policy(name: str, report: dict[str, Any], message: str, world: World) -> None:
    """
    A server whose worker reports another policy or other sizes than it was told, or nothing, is not measured.
    """
    world.reports[name] = report
    with pytest.raises(EngineFailedError, match=message):
        run_live(CASE, ["stock", name])

    assert ["stock"] == [event[1] for event in world.events if event[0] == "run"]


def test_compiled_stock(world: World) -> None:
    """
    Texts of vLLM's compiled program are not compared, nor are others with them; its figures are.
    """
    world.changes["stock_compiled"] = {"generated_texts": ["other"] * 12}
    document = run_live(CASE, ["stock_compiled", "stock", "eager"])
    compiled, stock, eager = document["contenders"]

    assert "stock" == document["text_reference"]
    assert (None, [], []) == (compiled["differing"], stock["differing"], eager["differing"])
    assert {"median": 1, "lowest": 1, "highest": 1} == compiled["ratios"]["mean_ttft_ms"]
    assert ((), ("--enforce-eager",)) == (compiled["arguments"], stock["arguments"])
    assert "compiled" in compiled["description"]
    assert run_live(CASE, ["stock_compiled"])["text_reference"] is None


def test_texts_are_compared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Texts are compared with the first contender's of the same round, and its own with those of its first round.
    """
    texts = {("stock", 0): "ab", ("stock", 1): "ax", ("eager", 0): "ab", ("eager", 1): "yx"}

    def read_run(path: Path, _requests: object) -> PairedRun:
        name, number = path.name.split(".")[1:3]
        given = texts.get((name, int(number) if number.isdigit() else 0), "ab")
        return PairedRun(dict.fromkeys(METRICS, 1.0), tuple(given), 0.0)

    monkeypatch.setattr(live, "read_run", read_run)
    document = run_live(attrs.evolve(CASE, rounds=2), ["stock", "eager"])

    assert [1] == document["unstable"]
    assert [[], [0]] == [contender["differing"] for contender in document["contenders"]]


def test_the_load_is_described(world: World) -> None:
    """
    The document says what was served: how many requests, how long, scaled by what.
    """
    scaled = run_live(CASE, ["eager"])
    whole = run_live(attrs.evolve(CASE, is_scaled=False, max_model_len=1024, limit=30), ["eager"])
    lines = next(event[2] for event in reversed(world.events) if event[0] == "run")

    assert (12, 0) == (scaled["trace"]["num_requests"], scaled["trace"]["num_too_long"])
    assert {"prompt_scale": 16, "longest_prompt": 150, "output_scale": 8, "longest_output": 40} == scaled[
        "lengths"
    ]
    assert {} == whole["lengths"]
    assert whole["trace"]["num_too_long"] > 0
    assert 30 == whole["trace"]["num_requests"] + whole["trace"]["num_too_long"]
    assert len(lines) == whole["trace"]["num_requests"]
    assert sum(line["input_length"] for line in lines) / len(lines) == whole["trace"]["mean_prompt_tokens"]
    assert sum(line["output_length"] for line in lines) / len(lines) == whole["trace"]["mean_output_tokens"]
    assert lines[-1]["timestamp"] == whole["trace"]["seconds"]
    assert ({"type": "cpu", "is_emulated": True}, "0.32.0") == (scaled["device"], scaled["versions"]["vllm"])


def test_another_device(world: World) -> None:
    """
    Where there is a device that we have no worker for, no server is started.
    """
    world.device = "npu"
    with pytest.raises(ConfigError, match="there is none for 'npu' yet"):
        run_live(CASE, ["stock", "eager"])

    assert not any(event[0] == "start" for event in world.events)


@pytest.mark.parametrize("names", [[], ["by_cost"], ["oracle"], ["stock", "stock"], ["stock", "Eager"]])
def test_wrong_contenders(names: list[str], world: World) -> None:
    """
    There are contenders, each can be served, and none comes twice; before anything starts.
    """
    with pytest.raises(ConfigError, match="'policies' must be among stock, stock_compiled, eager, "):
        run_live(CASE, names)

    assert [] == world.events


def test_failed_run(world: World) -> None:
    """
    A run that failed names its contender.
    """
    world.changes["eager"] = {"failed": 8, "errors": ["out of memory"] * 8}
    with pytest.raises(
        EngineFailedError, match="the run of 'eager' failed: 8 of 8 requests failed; the first: out of memory"
    ):
        run_live(CASE, ["stock", "eager"])


def test_cache_that_cannot_be_emptied(world: World) -> None:
    """
    A server that holds blocks of former requests is not measured.
    """
    world.is_reset = False
    with pytest.raises(EngineFailedError, match="the server 'stock' still holds blocks"):
        run_live(CASE, ["stock"])


def test_what_is_kept(world: World) -> None:
    """
    The folder to keep has vLLM's files by contender and round, whole ones only; a used folder is refused.
    """
    folder = world.directory / "a" / "b"
    run_live(attrs.evolve(CASE, rounds=1), ["stock"], keep=folder)
    world.changes["stock"] = {"failed": 1}
    with pytest.raises(EngineFailedError):
        run_live(CASE, ["stock"], keep=world.directory / "c")

    assert {"stock.0.json", "stock.0.jsonl", "stock.warm-up.json", "stock.warm-up.jsonl"} == {
        path.name for path in folder.iterdir()
    }
    assert {"stock.warm-up.jsonl", ".stock.warm-up.json"} == {
        path.name for path in (world.directory / "c").iterdir()
    }
    for wrong, why in ((folder, "has files; name another"), (folder / "stock.0.json", "File exists")):
        with pytest.raises(ConfigError, match=f"'keep' must be an empty folder or a new one: .*{why}"):
            run_live(CASE, ["stock"], keep=wrong)


ARGUMENTS = ["live", "--trace", "azure-conv", "--model", "gqa", "--limit", "12", "--rounds", "2"]


def test_command(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The command's last line is the document, as is the file; what comes after -- goes to all servers.
    """
    monkeypatch.setattr(sys, "argv", ["aclgraph-dispatch", "bench", "live", "--here"])
    file = world.directory / "out.json"
    arguments = [*ARGUMENTS, "--policies", "eager,stock", "--json", str(file), "--", "--dtype", "float32"]
    done = CliRunner().invoke(bench, arguments)
    document = json.loads(done.stdout.splitlines()[-1])

    assert 0 == done.exit_code
    assert document == json.loads(file.read_text())
    assert ["eager", "stock"] == [contender["name"] for contender in document["contenders"]]
    assert "aclgraph-dispatch bench live --here" == document["command"]
    assert done.stdout.startswith("12 requests of azure-conv at rate 1, gqa on the emulated NPU, 2 rounds\n")
    assert all(("--dtype", "float32") == options.arguments[-2:] for options in world.options)
    assert document["lengths"]


def test_command_tells_wrong_texts(world: World) -> None:
    """
    Other texts than the first contender's are exit code 1.
    """
    world.changes["full_and_piecewise"] = {"generated_texts": ["other"] * 12}
    done = CliRunner().invoke(bench, ARGUMENTS)

    assert 1 == done.exit_code
    assert "texts      DIFFERENT from stock: full_and_piecewise" in done.stdout.splitlines()


def test_command_tells_when_nothing_was_compared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Where the first contender never gives the same text twice the check is void, which is exit code 1.
    """
    numbers = itertools.count()

    def read_run(_path: Path, requests: Sequence[object]) -> PairedRun:
        return PairedRun(dict.fromkeys(METRICS, 1.0), tuple(f"{next(numbers)}" for _ in requests), 0.0)

    monkeypatch.setattr(live, "read_run", read_run)
    monkeypatch.setattr(
        FakeClient,
        "run",
        lambda _self, arguments, _check: Path(
            arguments[arguments.index("--result-dir") + 1], arguments[arguments.index("--result-filename") + 1]
        ).touch(),
    )
    done = CliRunner().invoke(bench, ARGUMENTS)

    assert 1 == done.exit_code
    assert "texts      NOTHING COMPARED: stock itself differs from round to round in every request" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo-ttft-ms", "nan"], "'slo_ttft_ms' must be a finite number, 0 or more: nan"),
        (["--slo-tpot-ms", "inf"], "'slo_tpot_ms' must be a finite number, 0 or more: inf"),
        (["--rate", "nan"], "rate must be finite and > 0: nan"),
        (["--rate", "inf"], "rate must be finite and > 0: inf"),
        (["--rate", "0"], "rate must be finite and > 0: 0"),
        (["--", "--enforce-eager"], "'arguments' of all servers must be options that .*: --enforce-eager; "),
        (["--json", "no/such/folder/x.json"], "no/such/folder/x.json"),
    ],
)
def test_command_refuses(arguments: list[str], message: str, world: World) -> None:
    """
    Numbers that are none, arguments that replace a contender, and a file that cannot be: before anything starts.
    """
    done = CliRunner().invoke(bench, [*ARGUMENTS, *arguments])

    assert isinstance(done.exception, ConfigError)
    assert re.search(message, str(done.exception))
    assert [] == world.events


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_before_there_are_servers(number: int, tmp_path: Path) -> None:
    """
    Told to end in the first seconds, while the client is still imported, it leaves no process and no folder.
    """
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    platforms = (
        f"import os, pathlib, time\npathlib.Path({str(tmp_path / 'client')!r}).write_text(f'{{os.getpid()}}.')\n"
    )
    (tmp_path / "vllm" / "platforms.py").write_text(platforms + "time.sleep(600)\n")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    (tmp_path / "temporary").mkdir()
    code = (
        "import sys\nfrom aclgraph_dispatch.bench.live import run_live\n"
        "from aclgraph_dispatch.bench.live_case import LiveCase\n"
        "run_live(LiveCase(trace='azure-conv', model=sys.argv[1], limit=3, is_scaled=True), ['stock'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment)
    client = tmp_path / "client"
    deadline = time.monotonic() + 60
    while not (client.exists() and client.read_text().endswith(".")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = psutil.Process(int(client.read_text()[:-1]))
    assert child.is_running()
    process.send_signal(number)

    assert 128 + number == process.wait(20)
    assert [] == list((tmp_path / "temporary").iterdir())
    _, alive = psutil.wait_procs([child], timeout=10)
    assert all(each.status() == psutil.STATUS_ZOMBIE for each in alive)


def test_failed_command_writes_nothing(world: World) -> None:
    """
    After a failure there is no file.
    """
    world.changes["stock"] = {"failed": 1}
    done = CliRunner().invoke(bench, [*ARGUMENTS, "--json", str(world.directory / "out.json")])

    assert isinstance(done.exception, EngineFailedError)
    assert [] == list(world.directory.glob("*out*"))


@pytest.mark.engine
def test_vllm(tmp_path: Path) -> None:
    """
    Stock and dispatched vLLM serve the same requests: the figures are those of vLLM's files, the texts the same.
    """
    trace = tmp_path / "trace.csv"
    rows = ["0,400,80", "20,1600,160", "40,40,240", "60,800,80", "300,1600,160", "320,3200,80"]
    trace.write_text("arrival_ms,prompt_tokens,output_tokens\n" + "\n".join(rows))
    command = [sys.executable, "-c", "from aclgraph_dispatch.cli import main; main()", "bench", "live"]
    command += ["--trace", str(trace), "--model", "gqa"]
    command += ["--rounds", "2", "--keep", str(tmp_path / "kept"), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (0, "") == (done.returncode, done.stderr)
    document = json.loads(done.stdout.splitlines()[-1])
    stock, dispatched = document["contenders"]
    texts = set()
    for contender in (stock, dispatched):
        for number, run in enumerate(contender["runs"]):
            raw = json.loads((tmp_path / "kept" / f"{contender['name']}.{number}.json").read_text())
            texts.add(tuple(raw["generated_texts"]))
            starts = [start - raw["start_times"][0] for start in raw["start_times"]]

            assert {name: raw[name] for name in METRICS} == {name: run[name] for name in METRICS}
            assert [10, 20, 30, 10, 20, 10] == raw["output_lens"]
            assert [25, 100, 2, 50, 100, 150] == raw["input_lens"]
            assert all(s >= due - 0.01 for s, due in zip(starts, [0, 0.02, 0.04, 0.06, 0.3, 0.32], strict=True))
    assert 1 == len(texts)
    assert 6 == len(set(*texts))
    assert ([], [], []) == (document["unstable"], stock["differing"], dispatched["differing"])
    assert {} == stock["report"]
    assert "full_and_piecewise" == dispatched["report"]["policy"]
    # Of each token but the first of a request, and of each prompt, in both rounds.
    assert 2 * (25 + 100 + 2 + 50 + 100 + 150 + 100 - 6) == sum(
        r["tokens"] for r in dispatched["report"]["routes"]
    )
    assert {"FULL", "PIECEWISE", "NONE"} == {route["mode"] for route in dispatched["report"]["routes"]}
