"""The command line. Bad input ends with one error and exit code 2."""

import json
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import click

from .errors import DispatchError
from .policy import POLICIES


class _UserError(click.ClickException):
    exit_code = 2


_ELSEWHERE = {
    "bench": "aclgraph_dispatch.bench.commands",
    "calibrate": "aclgraph_dispatch.bench.calibrate_command",
}
"""Commands that are imported when they are asked for, by module."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(_ELSEWHERE[cmd_name]), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DispatchError as exc:
            raise _UserError(str(exc)) from exc


@click.group(cls=_Commands)
@click.version_option(package_name="aclgraph-dispatch")
def main() -> None:
    """
    Decides, every step, how a batch meets the captured graphs of an LLM server.
    """


@main.command()
@click.option("--model", default="mla", show_default=True, help="mla, gqa, or a checkpoint's directory.")
@click.option("--policy", type=click.Choice(list(POLICIES)), default="full_and_piecewise", show_default=True)
@click.option("--requests", "num_requests", type=click.IntRange(min=1), default=48, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the last line.")
def demo(model: str, policy: str, num_requests: int, as_json: bool) -> None:
    """
    Run real vLLM over a slice of a trace, stock and dispatched, and compare every token.

    The last line is a JSON object. The exit code is 1 if a token differs.
    """
    if find_spec("vllm") is None:
        raise _UserError("the demo needs vLLM, which is not installed; in a checkout, `make demo` installs it")
    from aclgraph_dispatch.bench.demo import describe, run_demo

    result = run_demo(model, policy, num_requests, lambda line: click.echo(line, err=as_json))
    if not as_json:
        click.echo(describe(result))
    click.echo(json.dumps(result.figures()))
    if result.differing:
        raise SystemExit(1)
