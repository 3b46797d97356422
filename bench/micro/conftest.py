"""The table of ratios, after pytest-benchmark's own."""

import pytest
from _pytest.terminal import TerminalReporter

RATIOS = pytest.StashKey[list[tuple[str, int, float, float, float]]]()
"""What is compared, number of requests, microseconds of vLLM's, of ours, and the median of their ratios."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RATIOS] = []


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[RATIOS]
    if not rows:
        return
    terminalreporter.section("per step: ours / vLLM's, median of paired rounds")
    terminalreporter.write_line(f"{'step':<22}{'requests':>9}{'vLLM us':>9}{'ours us':>9}{'ratio':>7}")
    for kind, num_reqs, theirs, ours, ratio in rows:
        terminalreporter.write_line(f"{kind:<22}{num_reqs:>9}{theirs:>9.2f}{ours:>9.2f}{ratio:>7.2f}")
