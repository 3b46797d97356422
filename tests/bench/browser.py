"""A browser that looks at our pages: Debian's Chromium, driven by playwright."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

QUIET = (
    "--no-sandbox",  # as root in CI
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def started() -> Iterator[Browser]:
    """
    A browser; without one the tests are skipped, but fail in CI, which must have it.
    """
    chromium = shutil.which("chromium")
    if not chromium and os.environ.get("CI"):
        pytest.fail("CI needs chromium to look at the pages: .ci/run installs it")
    if not chromium:
        pytest.skip("there is no chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=QUIET)
        yield browser
        browser.close()
