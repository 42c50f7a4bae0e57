"""Charts in a real browser, over runs that ended: zoomed to single rows, read by keyboard, and
compared.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn

from atroposlib.dashboard.app import make_offline_app
from atroposlib.dashboard.live.hub import Hub
from atroposlib.dashboard.app import RunPage
from atroposlib.dashboard.auth import PageAuth
from tests.headless_browser import Visit

STEPS = 4000
"""More than the points of a chart, so that a point stands for several rows until one looks
closer."""
START_SECONDS = 60.0


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Pages of two runs, a long one and a short one, served from their files."""
    folder = tmp_path_factory.mktemp("runs")
    for name, steps in (("short", 20), ("long", STEPS)):
        write_run(folder / name / "trainer", steps)
    page = RunPage([folder], PageAuth(), Hub())
    server = uvicorn.Server(uvicorn.Config(make_offline_app(page), log_level="warning"))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.started, f"the page is not served after {START_SECONDS} s"
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(START_SECONDS)
    assert not thread.is_alive()


def write_run(folder: Path, steps: int) -> None:
    """A trainer's metrics.jsonl: the reward is the step, by a thousand."""
    folder.mkdir(parents=True)
    rows = (
        {
            "step": step,
            "reward_mean": step / 1000,
            "age_max": int(step == steps),
            "seconds_wait": 1.0,
            "seconds_train": 2.0,
            "updates_skipped": int(step == 10 < steps < 100),
            "mfu": 0.4 + 0.1 * step / steps if steps > 100 else None,
        }
        for step in range(1, steps + 1)
    )
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def choose(seen: Visit, *names: str) -> None:
    """Tick runs in the history."""
    seen.open("/ui/history")
    for name in names:
        seen.page.get_by_role("checkbox", name=f"Compare {name}").check()


def follow(seen: Visit, name: str) -> None:
    """Go where a link leads, the first of that name within the page."""
    link = seen.page.get_by_role("main").get_by_role("link", name=name, exact=True).first
    seen.open(link.get_attribute("href") or "the link leads nowhere")


def test_a_chart_is_zoomed_until_every_point_is_a_row(origin: str, visit: Callable[..., Visit]) -> None:
    seen = visit(origin, viewport={"width": 1300, "height": 900})
    seen.open("/ui/history")
    follow(seen, "long")
    reward = seen.page.get_by_role("figure", name="Reward")
    assert int(reward.get_attribute("data-points") or 0) < STEPS
    vitals = seen.page.locator("#vitals").inner_text()
    assert "at most 1\n" in vitals, f"of the last row, and not of those that the last point stands for: {vitals}"
    seen.page.get_by_role("button", name="last 100", exact=True).click()
    seen.until("document.querySelector('figure[aria-label=Reward]').dataset.points === '101'")

    surface = reward.get_by_role("img")
    surface.focus()
    seen.page.keyboard.press("Home")
    assert f"step {STEPS - 100:,}" in reward.inner_text()
    seen.page.keyboard.press("ArrowRight")
    assert f"step {STEPS - 99:,}" in reward.inner_text()

    # On a GPU whose rate is known, MFU is a number, and no CPU has one.
    assert seen.page.locator("#vitals > div").filter(has_text="MFU").locator("dd").inner_text().strip() == "50 %"
    utilisation = seen.page.get_by_role("figure", name="Model FLOPs utilisation")
    assert utilisation.get_attribute("data-points") == "101"
    surface = utilisation.get_by_role("img")
    surface.focus()
    seen.page.keyboard.press("End")
    assert "50 %" in utilisation.inner_text(), utilisation.inner_text()
    assert f"{(STEPS - 99) / 1000}" in reward.inner_text()
    assert reward.locator("[aria-live]").inner_text() == f"step {STEPS - 99:,}: mean {(STEPS - 99) / 1000}", "as it is read out"
    seen.page.keyboard.press("a")
    seen.until(f"Number(document.querySelector('figure[aria-label=Reward]').dataset.points) > {STEPS // 4}")


def test_an_event_stands_on_the_axis_of_every_chart_until_its_kind_is_switched_off(
    origin: str, visit: Callable[..., Visit]
) -> None:
    seen = visit(origin)
    seen.open("/ui/history")
    follow(seen, "short")
    told = "1 update of step 10 could not be taken"
    seen.page.get_by_role("row").filter(has_text=told).filter(has_text="log has the reason").wait_for()
    for chart in ("Reward", "Where time goes"):
        assert told in read_out(seen, chart), chart
    seen.page.get_by_role("checkbox", name="dropped groups").uncheck()
    assert told not in read_out(seen, "Reward")
    assert seen.page.get_by_role("row").filter(has_text=told).count() == 0


def read_out(seen: Visit, chart: str) -> str:
    """The text of a chart about events while the pointer goes over all of it."""
    surface = seen.page.get_by_role("figure", name=chart, exact=True).get_by_role("img")
    surface.scroll_into_view_if_needed()
    box = surface.bounding_box()
    assert box is not None
    tip = seen.page.get_by_role("figure", name=chart, exact=True).locator(".tip")
    for x in range(int(box["x"]), int(box["x"] + box["width"]), 8):
        seen.page.mouse.move(x, box["y"] + box["height"] / 2)
        if tip.is_visible():
            return tip.inner_text()
    return ""


def test_runs_are_drawn_over_one_another_by_a_link(origin: str, visit: Callable[..., Visit]) -> None:
    seen = visit(origin)
    choose(seen, "short", "long")
    follow(seen, "Compare 2 runs")
    assert seen.page.get_by_role("list", name="Runs that are drawn").inner_text().split() == ["short", "long"]
    assert seen.page.get_by_role("figure", name="Reward").get_attribute("data-value") == "0.02"
