"""The page in a real browser. `make test` sees to one; HEADGATE_BROWSER=none leaves these tests out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from headgate.analysis.report import page as page_of

CHOSEN = os.environ.get("HEADGATE_BROWSER")
pytestmark = pytest.mark.skipif(CHOSEN == "none", reason="HEADGATE_BROWSER=none")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
IDS = "rows => rows.map(row => row.id)"
SIZES = {"desk": (1280, 900), "phone": (390, 844)}

OVERLAPS = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
  return texts.flatMap(([name, a], i) => texts.slice(i + 1).filter(([_, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1
  ).map(([other]) => svg.getAttribute('aria-label').slice(0, 40) + ': ' + name + ' / ' + other));
})"""
OUTSIDE = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const own = text.getBoundingClientRect();
    return own.left < box.left - 3 || own.right > box.right + 3 || own.top < box.top - 3 || own.bottom > box.bottom + 3;
  }).map(text => svg.getAttribute('aria-label').slice(0, 40) + ': ' + text.textContent);
})"""
CONTRAST = """() => {
  const light = color => {
    const [r, g, b] = color.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    while (element && ['rgba(0, 0, 0, 0)', 'transparent'].includes(getComputedStyle(element).backgroundColor))
      element = element.parentElement;
    return light(getComputedStyle(element ?? document.body).backgroundColor);
  };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const words = [...document.querySelectorAll('p, h1, h2, h3, td, th button, summary, figcaption, li')]
    .filter(element => element.textContent.trim())
    .map(element => ratio(light(getComputedStyle(element).color), behind(element)));
  const drawn = [...document.querySelectorAll('svg text')]
    .map(text => ratio(light(getComputedStyle(text).fill), behind(text.closest('.card'))));
  return [Math.min(...words), Math.min(...drawn)];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = CHOSEN or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found, "no browser: install Chromium, or set HEADGATE_BROWSER to one (or to none, to leave these tests out)"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield launched
        launched.close()


def opened(browser: Browser, file: Path, size: str = "desk", scheme: Any = "light") -> tuple[Page, list[str]]:
    width, height = SIZES[size]
    view = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
    page = view.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request", lambda request: said.append(request.url) if not request.url.startswith(("file:", "data:")) else None
    )
    page.goto(file.as_uri())
    return page, said


def moved(page: Page, number: int) -> list[float]:
    cells = page.locator(f"#moved-{number} td[data-what]").all_text_contents()
    return [float(cell.removesuffix(" %")) for cell in cells]


def test_the_slider_moves_accuracy_macs_and_milliseconds_of_all_runs(
    browser: Browser, report_file: Path, studies: dict[str, dict[str, Any]]
) -> None:
    page, said = opened(browser, report_file)
    for place in (0, 5, 10):
        page.locator("#slider").fill(str(place))
        for number, found in enumerate(studies.values()):
            point = found["sweep"][place]
            shown = [100 * point["accuracy"], 100 * point["macs_fraction"], point["milliseconds"]["median_ms"]]
            assert moved(page, number) == pytest.approx(shown, abs=0.051)
        assert page.locator("#tau").text_content() == f"{point['tau']:.2f}"
        assert page.locator("#slider").get_attribute("aria-valuetext") == f"tau {point['tau']:.2f}"
        assert page.locator("svg .now").count() == len(studies)
    assert said == []


def test_the_slider_can_be_moved_from_the_keyboard(browser: Browser, report_file: Path) -> None:
    page, _ = opened(browser, report_file)
    before = moved(page, 1)
    page.locator("#slider").focus()
    page.keyboard.press("End")
    assert moved(page, 1) != before


def test_tables_sort_by_number_and_by_name_and_back(browser: Browser, report_file: Path) -> None:
    page, said = opened(browser, report_file)
    table = page.locator("table").first
    heads = table.locator("th button")
    column = heads.all_text_contents().index("MACs left")
    heads.nth(column).click()
    falling = [float(text[:-2]) for text in table.locator(f"tbody td:nth-child({column + 1})").all_text_contents()]
    heads.nth(column).click()
    rising = [float(text[:-2]) for text in table.locator(f"tbody td:nth-child({column + 1})").all_text_contents()]
    assert falling == sorted(falling, reverse=True) and rising == sorted(falling) and len(set(falling)) > 1
    column = heads.all_text_contents().index("parameters")
    heads.nth(column).click()
    sizes = [
        int(text.replace(",", "")) for text in table.locator(f"tbody td:nth-child({column + 1})").all_text_contents()
    ]
    assert sizes == sorted(sizes, reverse=True)
    heads.nth(0).click()
    names = table.locator("tbody td:first-child").all_text_contents()
    assert names == sorted(names, reverse=True) and said == []


def test_the_table_of_tau_sorts_and_stays_sorted_when_tau_moves(
    browser: Browser, report_file: Path, studies: dict[str, dict[str, Any]]
) -> None:
    page, said = opened(browser, report_file)
    table = page.locator("table", has=page.locator("#moved-0"))
    orders = set()
    for what, key in (("MACs left", "macs_fraction"), ("accuracy", "accuracy")):
        table.get_by_role("button", name=what).click()
        for place in (0, 5, 10):
            page.locator("#slider").fill(str(place))
            order = [int(row.removeprefix("moved-")) for row in table.locator("tbody tr").evaluate_all(IDS)]
            values = [list(studies.values())[number]["sweep"][place][key] for number in order]
            assert values == sorted(values, reverse=True)
            orders.add(tuple(order))
    assert len(orders) > 1 and said == []


def test_every_figure_opens_its_record(browser: Browser, report_file: Path) -> None:
    page, said = opened(browser, report_file)
    records = page.locator("details[data-shows]")
    assert records.count() >= page.locator("svg").count()
    for number in range(records.count()):
        records.nth(number).locator("summary").click()
        records.nth(number).locator("pre:not(:empty)").wait_for()
        text = records.nth(number).locator("pre").text_content() or ""
        assert '"command": "headgate train' in text and "undefined" not in text and '"versions"' in text
    assert said == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_logged_cut_off_or_hard_to_read(
    browser: Browser, report_file: Path, size: str, scheme: str, tmp_path: Path
) -> None:
    page, said = opened(browser, report_file, size, scheme)
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"
    words, drawn = page.evaluate(CONTRAST)
    assert words >= 4.5 and drawn >= 4.5  # WCAG AA


def test_labels_in_figures_do_not_overlap_or_leave_them(browser: Browser, report_file: Path) -> None:
    page, _ = opened(browser, report_file)
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate(OUTSIDE) == []


@pytest.mark.parametrize(
    "model, data, dense", [("torchvision:resnet50", "folder:imagenet", 0.7613), ("cifar_resnet20", "cifar10", 0.9173)]
)
def test_nor_do_they_beside_many_published_points(
    browser: Browser, studies: dict[str, dict[str, Any]], tmp_path: Path, model: str, data: str, dense: float
) -> None:
    found = studies["pruned"]
    accuracy = {"accuracy": {"dense": dense, "shrunk": dense - 0.01}}
    sweep = [point | {"accuracy": dense - 0.02 - 0.002 * n} for n, point in enumerate(found["sweep"])]
    file = tmp_path / "many.html"
    changed = found | {"model": model, "data": data, "sweep": sweep, "result": found["result"] | accuracy}
    file.write_text(page_of([changed]), encoding="utf-8")
    page, said = opened(browser, file)
    assert page.evaluate(OVERLAPS) == [] and page.evaluate(OUTSIDE) == [] and said == []
    page.locator("section", has=page.locator("#slider")).screenshot(path=tmp_path / "many.png")


def test_nor_do_they_in_large_networks_beside_published_points(
    browser: Browser, studies: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    names = ["conv1", *(f"layer{n // 18 + 1}.{n % 18}.conv{k}" for n in range(54) for k in (1, 2)), "fc", "gates"]
    layers = [{"name": name, "dense": 1000, "after": 500} for name in names]
    deep = studies["conditional"] | {"model": "cifar_resnet56", "data": "cifar10", "layers": layers}
    result = deep["result"] | {"accuracy": {"dense": 0.934, "conditional": 0.938}}
    sweep = [point | {"accuracy": 0.92 + 0.002 * n} for n, point in enumerate(deep["sweep"])]
    other = studies["early"] | {"name": "a-run-with-quite-a-long-name-2026-11-16-seed-0"}
    names = ["features.denseblock1", "features.denseblock2", "features.denseblock3", "features.denseblock4", "last"]
    shares = [[0.2] * 10] * 5
    other |= {"exits_by_class": other["exits_by_class"] | {"exits": names, "shares": shares}}
    leaving = [other["exits"]["rows"][0] | {"name": name} for name in names]
    other |= {"exits": other["exits"] | {"rows": leaving}}
    file = tmp_path / "deep.html"
    file.write_text(page_of([deep | {"result": result, "sweep": sweep}, other]), encoding="utf-8")
    page, said = opened(browser, file)
    assert page.evaluate(OVERLAPS) == [] and page.evaluate(OUTSIDE) == [] and said == []
