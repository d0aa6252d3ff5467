"""The page in a real browser: it loads from disk alone, and does what it shows."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.browser import pages
from tests.browser.conftest import ARTIFACTS

GANTT = "return window.loadmasterGantt"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    placement = pages.two_devices()
    return pages.write(placement, tmp_path_factory.mktemp("page"), measured=pages.measured_of(placement))


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    placement = pages.hostile()
    measured = pages.measured_of(placement)
    others = {pages.HOSTILE[0]: placement, pages.HOSTILE[2]: placement}
    return pages.write(placement, tmp_path_factory.mktemp("nasty"), measured=measured, compare=others)


def span_of(browser: Any, name: str) -> int:
    """The first span whose description begins with a name."""
    script = (
        "const g=loadmasterGantt;for(let"
        " i=0;i<g.numSpans;i++)if(g.describe(i)[0]===arguments[0])return i;return -1"
    )
    found = browser.execute_script(script, name)
    assert found >= 0, name
    return int(found)


def hover(browser: Any, name: str) -> str:
    """Move the real pointer to where the span of an op is drawn, and read what is shown there."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    canvas = browser.find_element(By.ID, "gantt-canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    x, y = browser.execute_script("return loadmasterGantt.centre(arguments[0])", span_of(browser, name))
    size = canvas.size
    at = int(x - size["width"] / 2), int(y - size["height"] / 2)
    ActionChains(browser, duration=0).move_to_element_with_offset(canvas, *at).perform()
    return str(browser.find_element(By.ID, "tip-box").text)


def press(browser: Any, *keys: str) -> None:
    from selenium.webdriver.common.by import By

    browser.find_element(By.ID, "gantt-canvas").send_keys(*keys)


def view(browser: Any) -> tuple[float, float]:
    begin, end = browser.execute_script("return loadmasterGantt.view()")
    return float(begin), float(end)


def test_it_loads_from_disk_without_an_error_and_asks_for_nothing(browser: Any, small: Path) -> None:
    pages.open_page(browser, small)
    assert browser.execute_script("return document.readyState") == "complete"
    assert pages.console(browser) == []
    assert pages.requests(browser) == [small.as_uri()]
    assert "six ops" in browser.title


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_as_wide_as_the_window(browser: Any, small: Path, width: int, dark: bool) -> None:
    pages.open_page(browser, small, width=width, dark=dark)
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(ARTIFACTS / f"page-{width}-{'dark' if dark else 'light'}.png"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    level = sum(int(part) for part in background.removeprefix("rgb(").rstrip(")").split(",")[:3])
    assert (level < 200) == dark


def test_hover_shows_the_op_under_the_pointer(browser: Any, small: Path) -> None:
    pages.open_page(browser, small)
    for op in ("op0", "op2", "op5"):
        text = hover(browser, op)
        assert text.splitlines()[0] == op
        assert f"net.part{int(op[2:]) // 3}" in text


def test_the_predicted_lane_of_a_device_stands_above_the_measured_one(browser: Any, small: Path) -> None:
    pages.open_page(browser, small)
    spans = browser.execute_script(
        "const g=loadmasterGantt,out=[];for(let i=0;i<g.numSpans;i++){const d=g.describe(i);"
        "if(d[0]==='op1')out.push([d[1],...g.centre(i)])}return out"
    )
    (first, x, y), (second, x_later, y_below) = spans
    assert "(predicted)" in first
    assert "(measured)" in second
    assert y < y_below
    assert x < x_later  # measured half as long again


def test_zoom_and_pan_by_button_wheel_and_key(browser: Any, small: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    pages.open_page(browser, small)
    assert view(browser) == (0, 1)
    browser.find_element(By.ID, "zoom-in").click()
    assert view(browser) == pytest.approx((0.25, 0.75))
    press(browser, "+")
    begin, end = view(browser)
    assert end - begin == pytest.approx(0.3)
    press(browser, Keys.ARROW_RIGHT)
    assert view(browser)[0] == pytest.approx(begin + 0.045)
    browser.execute_script(
        "const c=document.getElementById('gantt-canvas'),r=c.getBoundingClientRect(),at={deltaY:-80,"
        "ctrlKey:true,cancelable:true,clientX:r.left+r.width/2,clientY:r.top+40};"
        "c.dispatchEvent(new WheelEvent('wheel',at))"
    )
    zoomed = view(browser)
    assert zoomed[1] - zoomed[0] < 0.25
    press(browser, "0")
    assert view(browser) == (0, 1)


def test_the_keyboard_goes_from_op_to_op_and_says_it(browser: Any, small: Path) -> None:
    from selenium.webdriver.common.by import By

    pages.open_page(browser, small)
    press(browser, ".")
    said = browser.find_element(By.ID, "gantt-said")
    assert said.text.startswith("op0:")
    press(browser, ".")
    assert said.text.startswith("op1:")
    assert said.get_attribute("aria-live") == "polite"


def test_a_search_dims_what_it_does_not_find(browser: Any, small: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    pages.open_page(browser, small)
    field = browser.find_element(By.ID, "find-op")
    field.send_keys("part1")
    assert browser.find_element(By.ID, "gantt-said").text.startswith("3 of 6 ops match")
    field.send_keys(Keys.ENTER)
    assert browser.find_element(By.ID, "gantt-said").text.startswith("op3:")


def test_modules_fold_without_a_script(browser: Any, small: Path) -> None:
    from selenium.webdriver.common.by import By

    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        pages.open_page(browser, small)
        tree = browser.find_elements(By.CSS_SELECTOR, "details.tree")
        assert tree[0].get_attribute("open")
        shown = [row for row in browser.find_elements(By.CSS_SELECTOR, ".row .name") if row.text == "part0"]
        assert shown[0].is_displayed()
        tree[0].find_element(By.TAG_NAME, "summary").click()
        assert not shown[0].is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_tables_and_a_still_picture_work_without_a_script(browser: Any, small: Path) -> None:
    from selenium.webdriver.common.by import By

    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        pages.open_page(browser, small)
        assert browser.find_element(By.CSS_SELECTOR, "#gantt-still svg").is_displayed()
        assert not browser.find_element(By.ID, "gantt-box").is_displayed()
        assert len(browser.find_elements(By.TAG_NAME, "table")) >= 4
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_names_that_are_markup_are_text_everywhere(browser: Any, nasty: Path) -> None:
    from selenium.webdriver.common.by import By

    pages.open_page(browser, nasty)
    text = hover(browser, pages.HOSTILE[0])
    assert text.splitlines()[0] == pages.HOSTILE[0]
    press(browser, ".")
    assert browser.execute_script("return window.hit") is None
    assert browser.find_elements(By.CSS_SELECTOR, "img, b[onclick], svg[onload]") == []
    assert len(browser.find_elements(By.TAG_NAME, "script")) == 2
    assert pages.HOSTILE[0] in browser.find_element(By.TAG_NAME, "h1").text
    assert pages.DEVICE in browser.find_element(By.TAG_NAME, "main").text
    assert pages.console(browser) == []
    assert pages.requests(browser) == [nasty.as_uri()]
    browser.save_screenshot(str(ARTIFACTS / "hostile.png"))


@pytest.mark.parametrize("width", [1400, 400])
def test_lanes_with_long_names_say_both_ends_and_whether_they_were_measured(
    browser: Any, nasty: Path, width: int
) -> None:
    pages.open_page(browser, nasty, width=width)
    shown = browser.execute_script("return loadmasterGantt.lanes()")
    assert len(shown) == 6  # two devices and a link, twice
    for text in shown:
        name, _, series = text.rpartition(" · ")
        assert series in (("predicted", "measured") if width > 560 else ("pred.", "meas."))
        assert name.strip("… →")
    for text in shown[4:]:
        source, _, target = text.partition(" → ")
        assert len(source) > 1
        assert len(target.rpartition(" · ")[0]) > 1


def test_a_script_that_was_smuggled_in_would_not_run(browser: Any, small: Path, tmp_path: Path) -> None:
    page = tmp_path / "tampered.html"
    page.write_text(small.read_text().replace("</main>", "<script>window.hit=1</script></main>"))
    pages.open_page(browser, page)
    assert browser.execute_script("return window.hit") is None
    assert any("Content Security Policy" in line for line in pages.console(browser))


def test_print_shows_the_still_picture(browser: Any, small: Path) -> None:
    from selenium.webdriver.common.by import By

    pages.open_page(browser, small)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert browser.find_element(By.CSS_SELECTOR, "#gantt-still svg").is_displayed()
        assert not browser.find_element(By.ID, "gantt-box").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.slow
def test_a_hundred_thousand_spans_are_drawn_and_found(browser: Any, tmp_path: Path) -> None:
    path = pages.write(pages.many_spans(100_000), tmp_path)
    assert path.stat().st_size < 12 * 2**20
    pages.open_page(browser, path)
    assert pages.console(browser) == []
    assert browser.execute_script("return loadmasterGantt.numSpans") > 95_000
    middle = "layer400.block5.op40050"
    span = span_of(browser, middle)
    browser.execute_script("loadmasterGantt.choose(arguments[0]); loadmasterGantt.look(0.4999, 0.5001)", span)
    browser.execute_script("loadmasterGantt.choose(arguments[0])", span)
    assert hover(browser, middle).splitlines()[0] == middle


@pytest.mark.parametrize("width", [1400, 400])
def test_columns_of_the_tree_stand_below_each_other_and_apart(browser: Any, small: Path, width: int) -> None:
    pages.open_page(browser, small, width=width)
    rows = browser.execute_script(
        "return [...document.querySelectorAll('.row')].map(row => [...row.children].map(cell => {"
        "const range = document.createRange(); range.selectNodeContents(cell);"
        "const box = range.getBoundingClientRect();"
        "return [cell.getBoundingClientRect().left, box.left, box.right]"
        "})).map(cells => cells.filter(cell => cell[2] > cell[1]))"
    )
    assert len(rows) >= 4  # the head, the whole model, two parts
    for cells in rows:
        assert all(before[2] <= after[1] + 1 for before, after in pairwise(cells))
    bars = {round(cells[1][0]) for cells in rows}
    assert len(bars) == 1


def test_a_module_without_parts_stands_as_far_in_as_one_that_folds(browser: Any, small: Path) -> None:
    pages.open_page(browser, small)
    left = browser.execute_script(
        "return [...document.querySelectorAll('.row .name')].map(cell => {"
        "const range = document.createRange(); range.selectNodeContents(cell);"
        "return [cell.textContent, Math.round(range.getBoundingClientRect().left)]})"
    )
    place = dict(left)
    assert place["part0"] == place["part1"] > place["net"] > place["the whole model"]


def test_how_to_zoom_is_not_printed(browser: Any, small: Path) -> None:
    from selenium.webdriver.common.by import By

    pages.open_page(browser, small)
    assert browser.find_element(By.CSS_SELECTOR, ".how").is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert not browser.find_element(By.CSS_SELECTOR, ".how").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
