"""`aclgraph-dispatch calibrate`: times steps on this machine and saves what was learnt."""

import json
from importlib.util import find_spec
from pathlib import Path

import click

from aclgraph_dispatch.calibration import Calibration
from aclgraph_dispatch.errors import ConfigError

from .engine import exit_on_signals
from .files import whole_file


@click.command()
@click.option("--model", default="gqa", show_default=True, help="gqa, mla, or a checkpoint's directory.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where to save it.")
@click.option(
    "--rounds", type=click.IntRange(min=2), default=3, show_default=True, help="Steps of a shape, in each sweep."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def calibrate(model: str, out: Path | None, rounds: int, seed: int) -> None:
    """
    Time steps by shape and mode on a real engine, fit them, and say how far the fit is off on held-out shapes.

    It runs on this CPU, as the emulated NPU in float32; other workers come with the device workers. The last line
    is a JSON object; the saved file holds the fit and all that was measured.
    """
    for package in ("vllm", "scipy"):
        if find_spec(package) is None:
            raise ConfigError(
                f"calibrate needs {package}, which is not installed; in a checkout, `make demo` installs it"
            )
    from .calibration import calibrate as measure_and_fit

    if out is None:
        calibration = measure_and_fit(model, num_rounds=rounds, seed=seed)
    else:
        # Opened first: a place that cannot be written to is better known before than after the measurement.
        with exit_on_signals(), whole_file(out) as file:
            calibration = measure_and_fit(model, num_rounds=rounds, seed=seed)
            file.write(calibration.dumps())
    click.echo(describe(calibration))
    click.echo(
        json.dumps(
            {
                "model": calibration.model,
                "device": calibration.device,
                "errors": calibration.errors,
                "num_shapes": calibration.num_shapes,
                "left_out": calibration.left_out,
            }
        )
    )


def describe(calibration: Calibration) -> str:
    """
    What was measured, and the errors, for people.
    """
    lines = [
        f"{calibration.model} on {calibration.device}, {calibration.backend}: {len(calibration.points)} points"
        + (", host and device are one" if calibration.host_is_device else ""),
        *(
            f"{count} of {calibration.num_shapes} shapes did not fit: {why}"
            for why, count in calibration.left_out.items()
        ),
        f"{'relative error':<26}{'points':>8}{'mean':>8}{'p95':>8}{'max':>8}",
    ]
    for name, errors in calibration.errors.items():
        shares = "".join(f"{100 * errors[key]:>7.1f}%" for key in ("mean", "p95", "max"))
        lines.append(f"{name:<26}{errors['points']:>8.0f}{shares}")
    return "\n".join(lines)


if __name__ == "__main__":
    calibrate()
