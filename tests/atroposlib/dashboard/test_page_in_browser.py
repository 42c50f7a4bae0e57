"""The page as a person sees it: curves that grow, dark and narrow, by keyboard alone, after the run
has ended.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable

import pytest

from tests.atroposlib.dashboard.made_up_run import MadeUpRun
from tests.conftest import Processes
from tests.headless_browser import LIVE, READY, Visit

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]

PAGES = {
    "Overview": "/ui",
    "Rollouts": "/ui/rollouts",
    "Weights": "/ui/weights",
    "History": "/ui/history",
}
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
LOW_CONTRAST = """() => {
  const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  canvas.canvas.width = canvas.canvas.height = 1;
  const paint = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) continue;
    const behind = [];
    for (let at = element; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
    const ground = paint(["Canvas", ...behind]);
    const text = paint([`rgb(${ground.slice(0, 3)})`, getComputedStyle(element).color]);
    const [a, b] = [light(ground), light(text)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`${walker.currentNode.data.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return [...new Set(found)];
}"""
"""Text that is hard to read: its contrast with what is behind it is below 4.5, the least that WCAG
2.2 (1.4.3) allows."""
REACHABLE = """() => [...document.querySelectorAll("a[href], button, select, input, textarea, summary, [tabindex]")]
  .filter((e) => e.tabIndex >= 0 && !e.disabled && e.type !== "hidden" && e.checkVisibility({ checkVisibilityCSS: true })
    && !e.closest("dialog:not([open])"))"""


FOCUSED = """() => {
  const element = document.activeElement;
  window.wanted.delete(element);
  const style = getComputedStyle(element);
  return element === document.body || style.outlineStyle !== "none" || style.boxShadow !== "none" ? "" : element.outerHTML;
}"""
"""Takes what has the focus off the list; what has it and does not show it."""


def test_curves_grow_while_one_looks(made_up: MadeUpRun, signed_in: Callable[..., Visit]) -> None:
    seen = signed_in()
    reward = seen.page.get_by_role("figure", name="Reward", exact=True)
    seen.until(LIVE)
    drawn = int(reward.get_attribute("data-points") or 0)
    before = float(reward.get_attribute("data-value") or "nan")
    assert drawn == made_up.steps
    made_up.step(5)
    reward.and_(seen.page.locator(f'[data-points="{drawn + 5}"]')).wait_for()
    assert float(reward.get_attribute("data-value") or "nan") > before


def test_a_chart_is_taken_along_as_numbers_and_as_a_picture(
    made_up: MadeUpRun, signed_in: Callable[..., Visit]
) -> None:
    page = signed_in().page
    reward = page.get_by_role("figure", name="Reward", exact=True)
    with page.expect_download() as numbers:
        reward.get_by_role("button", name="Save as CSV").click()
    rows = list(csv.DictReader(io.StringIO(numbers.value.path().read_text())))
    written = [json.loads(line) for line in made_up.metrics.read_text().splitlines()]
    assert [float(row["reward_mean"]) for row in rows] == pytest.approx(
        [row["reward_mean"] for row in written]
    )
    with page.expect_download() as picture:
        reward.get_by_role("button", name="Save as PNG").click()
    data = picture.value.path().read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert len(data) > 2000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(signed_in: Callable[..., Visit], scheme: str) -> None:
    seen = signed_in(color_scheme=scheme)
    for path in PAGES.values():
        seen.open(path)
        ground = seen.page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).slice(0, 3).map(Number)"
        )
        assert (sum(ground) < 200) == (scheme == "dark"), (path, ground)
        assert seen.page.evaluate(LOW_CONTRAST) == [], path
    # A person may want the other one, and still wants it on the next page.
    other = "dark" if scheme == "light" else "light"
    seen.page.get_by_label("Theme").select_option(other)
    seen.open("/ui")
    ground = seen.page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).slice(0, 3).map(Number)"
    )
    assert (sum(ground) < 200) == (other == "dark")


def test_a_phone_shows_everything_and_scrolls_one_way(signed_in: Callable[..., Visit]) -> None:
    seen = signed_in(**PHONE)
    for name, path in PAGES.items():
        seen.open(path)
        wide = seen.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert wide[0] <= wide[1], f"{path} is {wide[0]} pixels wide"
        for other in PAGES:
            box = (
                seen.page.get_by_role("navigation", name="Pages")
                .get_by_role("link", name=other)
                .bounding_box()
            )
            assert box is not None, (name, other)
            assert box["height"] >= 24, "a finger has to hit it: WCAG 2.2, 2.5.8"


def test_everything_can_be_done_by_keyboard(signed_in: Callable[..., Visit]) -> None:
    seen = signed_in()
    page = seen.page
    for path in PAGES.values():
        seen.open(path)
        page.evaluate("document.activeElement.blur()")
        page.evaluate(f"window.wanted = new Set(({REACHABLE})())")
        for _ in range(page.evaluate("window.wanted.size + 5")):
            page.keyboard.press("Tab")
            hidden = page.evaluate(FOCUSED)
            assert hidden == "", f"{path}: nobody sees that this has the focus: {hidden}"
        missed = page.evaluate(
            "[...window.wanted].map((element) => element.outerHTML.slice(0, 120))"
        )
        assert missed == [], path
    seen.open("/ui")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#main"
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="History").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="History", level=1).wait_for()
    seen.until(READY)  # the heading is there before the scripts are
    page.keyboard.press("?")
    page.get_by_role("dialog").get_by_role("heading", name="Keyboard shortcuts").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")


def test_a_run_that_ended_is_read_from_its_files(
    made_up: MadeUpRun,
    visit: Callable[..., Visit],
    processes: Processes,
    free_port: Callable[[], int],
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "atroposlib.cli.view_run", made_up.folder, "--port", str(port)]
    offline = processes.start("view-run", command)
    processes.wait_for_text(offline, f"127.0.0.1:{port}", 180)
    reader = visit(f"http://127.0.0.1:{port}")
    for name, path in PAGES.items():
        reader.open(path)
        reader.page.get_by_role("heading", name=name, level=1).wait_for()
        assert reader.page.locator("body").get_attribute("data-connection") == "offline"
    reader.open("/ui/history")
    best = max(
        (json.loads(line) for line in made_up.metrics.read_text().splitlines()),
        key=lambda row: row["reward_mean"],
    )
    told = f"best reward{best['reward_mean']:.3g} at step {best['step']}"
    reader.page.get_by_role("listitem").filter(has_text=told).wait_for()
    reader.open("/ui")
    drawn = reader.page.get_by_role("figure", name="Reward", exact=True).get_attribute(
        "data-points"
    )
    assert drawn == str(made_up.steps)


def test_a_long_run_grows_point_by_point(
    made_up: MadeUpRun, signed_in: Callable[..., Visit]
) -> None:
    """Where a point stands for several rows, new rows are drawn behind them: no open page asks for
    all again.
    """
    made_up.step(3000)
    seen = signed_in()
    seen.until(LIVE)
    reward = seen.page.get_by_role("figure", name="Reward", exact=True)
    drawn = int(reward.get_attribute("data-points") or 0)
    assert drawn < made_up.steps
    made_up.step(3)
    reward.and_(seen.page.locator(f'[data-points="{drawn + 3}"]')).wait_for()
