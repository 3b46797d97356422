"""The HTML page of a comparison, read and looked at."""

import html
import math
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from aclgraph_dispatch.bench.report import COLUMNS, FIGURES, render, table, write_report
from aclgraph_dispatch.errors import ConfigError

from .browser import started
from .documents import document, empty_document

EVIL = "<img src='x' onerror='alert(1)'>\"'&"

# What is too faint: elements whose colour has a lower contrast (WCAG 2) with what is behind them than it should.
FAINT = r"""
() => {
  const parse = text => text.match(/[\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const back = element => {
    const colour = parse(getComputedStyle(element).backgroundColor);
    return colour[3] === 0 && element.parentElement ? back(element.parentElement) : colour;
  };
  const contrast = (element, property) => {
    const colour = getComputedStyle(element)[property];
    if (!colour.startsWith("rgb")) return 0;
    const [a, b] = [light(parse(colour)), light(back(element))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const all = selector => [...document.querySelectorAll(selector)].filter(e => e.getClientRects().length);
  const texts = all("h1, h2, h3, p, li, td, th, dt, dd, pre, summary, button, span, small");
  const letters = all("svg text"), marks = all(".plot .marks path");
  const faint = [
    ...texts.filter(e => contrast(e, "color") < 4.5),
    ...letters.filter(e => contrast(e, "fill") < 4.5),
    ...marks.filter(e => Math.max(contrast(e, "fill"), contrast(e, "stroke")) < 3
      && !getComputedStyle(e).fill.startsWith("url")),
  ];
  return [texts.length, letters.length, marks.length, faint.map(e => e.outerHTML.slice(0, 200))];
}
"""


def measured() -> dict[str, Any]:
    """
    A comparison in which some contenders lack a TPOT, and one is named like an attack.
    """
    compared = document()
    for i in (0, 2, 5):
        compared["contenders"][i]["metrics"]["tpot_ms"] = dict.fromkeys(
            ("mean", "mean_low", "mean_high", "p50", "p90", "p95", "p99")
        )
    compared["contenders"][4]["name"] = EVIL
    return compared


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """
    One browser for all tests.
    """
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """
    The page, as a file.
    """
    path = tmp_path_factory.mktemp("report") / "page.html"
    write_report(measured(), path)
    return path.as_uri()


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """
    The page, open; at the end it must have neither failed nor fetched anything.
    """
    page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
    troubles: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(url)
    yield page
    page.close()

    assert [] == troubles
    assert [url] == [request for request in requests if not request.startswith("data:")]


def column(page: Page, i: int) -> list[str]:
    """
    The texts of the table's column *i*, without notes.
    """
    cells = page.locator(f".table tbody tr > :nth-child({i + 1})")
    return [text.split("\n")[0] for text in cells.evaluate_all("cells => cells.map(cell => cell.innerText)")]


def head(page: Page, i: int) -> tuple[Any, Any]:
    """
    The head of column *i*, and its button.
    """
    cell = page.locator(".table thead th").nth(i)
    return cell, cell.locator("button")


def test_loads(page: Page) -> None:
    """
    The page opens without errors and without fetching anything, with all contenders and columns in its table.
    """
    assert len(document()["contenders"]) == page.locator(".table tbody tr").count()
    assert 3 + len(COLUMNS) == page.locator(".table thead th").count()
    assert 3 == page.locator(".finding").count()


@pytest.mark.parametrize("i", [3, 8, 3 + len(COLUMNS) - 1])
def test_sorts_numbers(page: Page, i: int) -> None:
    """
    A click on a head sorts by its number, a second one turns the order; what has no number is last both times.
    """
    cells = [row[i - 3] for row in table(measured()["contenders"])]
    expected = sorted(cell.value for cell in cells if cell.value is not None)
    shown = {cell.value: cell.text for cell in cells}
    missing = ["—"] * (len(cells) - len(expected))
    cell, button = head(page, i)

    assert cell.get_attribute("aria-sort") is None
    button.click()
    assert "ascending" == cell.get_attribute("aria-sort")
    assert [shown[value] for value in expected] + missing == column(page, i)
    button.click()
    assert "descending" == cell.get_attribute("aria-sort")
    assert [shown[value] for value in reversed(expected)] + missing == column(page, i)


def test_sorts_names(page: Page) -> None:
    """
    The keyboard sorts too, names by letter, and only one column says that it is sorted.
    """
    head(page, 3)[1].click()
    _, button = head(page, 1)
    button.focus()
    page.keyboard.press("Enter")
    ascending = column(page, 1)
    page.keyboard.press("Space")

    assert sorted(ascending) == ascending
    assert len(set(ascending)) > 3
    assert ascending[::-1] == column(page, 1)
    assert 1 == page.locator("[aria-sort]").count()


def test_rows_stay_whole(page: Page) -> None:
    """
    Sorting moves whole rows.
    """
    rows = "rows => rows.map(row => row.innerText)"
    before = page.locator(".table tbody tr").evaluate_all(rows)
    head(page, 5)[1].click()
    after = page.locator(".table tbody tr").evaluate_all(rows)

    assert before != after
    assert sorted(before) == sorted(after)


def test_plots_have_marks(page: Page) -> None:
    """
    Every picture shows marks, inside of it.
    """
    figures = page.locator("figure")
    assert len(FIGURES) == figures.count()
    for i in range(figures.count()):
        marks = figures.nth(i).locator(".marks").locator("path, use")
        inside = marks.evaluate_all(
            """marks => marks.filter(mark => {
                if (mark.closest("defs")) return false;
                const [a, b] = [mark, mark.closest("svg")].map(element => element.getBoundingClientRect());
                return a.width + a.height > 0 && a.right > b.left && a.left < b.right
                    && a.bottom > b.top && a.top < b.bottom;
            }).length"""
        )

        assert inside >= 8


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(page: Page, scheme: Any) -> None:
    """
    Text has a contrast of 4.5 to 1 with what is behind it, and marks of 3 to 1, on the light and on the dark page.
    """
    page.emulate_media(color_scheme=scheme)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    *counts, faint = page.evaluate(FAINT)

    assert (scheme == "light") == (int(re.findall(r"\d+", background)[0]) > 128)
    assert min(counts) > 100
    assert [] == faint


def test_theme(page: Page) -> None:
    """
    The button turns the light page dark and back.
    """
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    button = page.locator("#theme")
    assert "Dark" == button.inner_text()
    button.click()
    dark = page.evaluate(background)
    assert "Light" == button.inner_text()
    button.click()

    assert light != dark
    assert light == page.evaluate(background)


@pytest.mark.parametrize("width", [320, 400, 800, 1400])
def test_no_overflow(page: Page, width: int) -> None:
    """
    The page is as wide as its window; what is wider scrolls by itself.
    """
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")

    assert width == page.evaluate("document.documentElement.scrollWidth")


def test_names_are_text(page: Page) -> None:
    """
    A name with HTML in it is shown as it is, everywhere, and makes no element.
    """
    assert EVIL in column(page, 0)
    assert EVIL in page.locator("summary").all_inner_texts()
    assert 0 == page.locator("img").count()
    assert any(
        "onerror" in text for text in page.locator("svg text").evaluate_all("a => a.map(e => e.textContent)")
    )


def test_empty_page(browser: Browser, tmp_path: Path) -> None:
    """
    A comparison without numbers is still a page.
    """
    write_report(empty_document(), tmp_path / "empty.html")
    page = browser.new_page()
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto((tmp_path / "empty.html").as_uri())
    figures = page.locator("figure").all_inner_texts()
    page.close()

    assert [] == troubles
    assert [True] * len(FIGURES) == ["no data" in text for text in figures]


def test_settings() -> None:
    """
    The page says how it was made: command, settings, versions, seed.
    """
    text = html.unescape(re.sub(r"<[^>]*>", " ", render(document(seed=7))))

    for fact in (
        document()["command"],
        "max num batched tokens 8192",
        "enable prefix caching yes",
        "vllm none",
        "seed 7",
    ):
        assert fact in " ".join(text.split())


def test_requests_served() -> None:
    """
    The page's head counts the requests that were simulated.
    """
    compared = document() | {"contenders": []}
    compared["trace"] |= {"num_requests": 60, "num_too_long": 30}
    text = " ".join(render(compared).split())

    assert "30 requests of azure_conv_2023_5min (30 left out, their prompts are too long) in 299.6 s." in text


def test_what_is_not_in_idle() -> None:
    """
    The page says that the idle share is of the time of steps.
    """
    text = " ".join(render(document() | {"contenders": []}).split())

    assert "Share of the time of steps in which the device computes nothing." in text


@pytest.mark.parametrize(
    ("scheduler", "sentence"), [("vllm", "vLLM's own scheduler;"), ("fast", "a compact model of vLLM's scheduler")]
)
def test_scheduler(scheduler: str, sentence: str) -> None:
    """
    The page says whose scheduler it was.
    """
    compared = document() | {"contenders": []}
    compared["settings"]["scheduler"] = scheduler

    assert sentence in html.unescape(render(compared))


def test_same_every_time() -> None:
    """
    The same document gives the same page.
    """
    few = document()
    few["contenders"] = few["contenders"][-2:]

    assert render(few) == render(few)


def test_table() -> None:
    """
    Shares are per cent; a mean has its interval; the best is marked, which the oracle cannot be.
    """
    few = document()
    few["contenders"] = [few["contenders"][i] for i in (0, 3, -1)]
    few["contenders"][1]["metrics"] |= {"padding_share": 0.0125, "num_steps": 12345}
    few["contenders"][1]["metrics"]["tpot_ms"] |= {"mean": 20.0, "mean_low": 19.5, "mean_high": 20.5}
    rows = [
        {(column.group, column.label): cell for column, cell in zip(COLUMNS, row, strict=True)}
        for row in table(few["contenders"])
    ]

    assert "1.250" == rows[1]["tokens", "padding"].text
    assert "12,345" == rows[1]["run", "steps"].text
    assert ("20.00", "19.50 to 20.50") == (rows[1]["TPOT", "mean"].text, rows[1]["TPOT", "mean"].note)
    assert [False, True, False] == [row["TPOT", "mean"].is_best for row in rows]
    assert [False, False, False] == [row["run", "steps"].is_best for row in rows]


def test_null() -> None:
    """
    A null, and what is no finite number, is an empty cell that is sorted last.
    """
    few = document()
    few["contenders"] = few["contenders"][:1]
    few["contenders"][0]["metrics"] |= {"capture_seconds": None, "device_idle_share": math.nan}
    (row,) = table(few["contenders"])
    cells = {(column.group, column.label): cell for column, cell in zip(COLUMNS, row, strict=True)}

    assert ("", None) == (cells["capture", "time"].text, cells["capture", "time"].value)
    assert ("", None) == (cells["device", "idle"].text, cells["device", "idle"].value)


def test_template_is_shipped() -> None:
    """
    The template lies in the package.
    """
    assert resources.files("aclgraph_dispatch.bench").joinpath("report.html.j2").is_file()


def test_no_folder(tmp_path: Path) -> None:
    """
    A folder that is not there gives one clear error.
    """
    with pytest.raises(ConfigError, match=r"page\.html cannot be written"):
        write_report(document() | {"contenders": []}, tmp_path / "nowhere" / "page.html")
