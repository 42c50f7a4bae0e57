"""Pictures of the page for README and docs, of a real run: the quick start, looked at with a headless Chromium.

    python bench/page_screenshots.py                 runs the quick start, four minutes on two cores
    python bench/page_screenshots.py --run FOLDER …  pictures of a run that is there already, from its files; others beside it

They go to docs/images/ui_*.png. No picture is taken of what does not work: a run whose reward does not rise is an error,
and so is a page that writes one into the console.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import httpx

from example_trainer.child_processes.ports import PortReservations
from example_trainer.child_processes.processes import ManagedProcess, Supervisor
from example_trainer.child_processes.readiness import wait_until
from tests.headless_browser import Visit, find_browser, missing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGES = ROOT / "docs" / "images"
RUN_SECONDS = 900.0
DESK = {"viewport": {"width": 1280, "height": 860}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "overview_light": ("/ui", DESK | {"color_scheme": "light"}),
    "overview_dark": ("/ui", DESK | {"color_scheme": "dark"}),
    "overview_phone": ("/ui", PHONE | {"color_scheme": "dark"}),
    "rollouts_light": ("/ui/rollouts", DESK | {"color_scheme": "light"}),
    "weights_light": ("/ui/weights", DESK | {"color_scheme": "light"}),
    "history_dark": ("/ui/history", DESK | {"color_scheme": "dark"}),
}
"""Name -> the address, and the window that it is seen in."""
ALL_IN_SIGHT = """[...document.querySelectorAll("[data-response]")]
  .every((one) => one.getBoundingClientRect().top > innerHeight || one.querySelector("[data-token]"))"""
"""Rollouts are asked for as they come into sight."""
EARLY_GROUP = 20
"""Of a model that still answers now in one way and now in another."""


class PictureError(RuntimeError):
    """The page does not show what the picture is to show."""


@contextmanager
def quickstart(folder: Path) -> Iterator[str]:
    """The address of the page of a quick start whose training is over, and whose service still runs."""
    command = [sys.executable, "-m", "scripts.quickstart", "--cpu", "--keep-running", "--output", str(folder)]
    with Supervisor() as supervisor:
        process = supervisor.start("quick start", command, folder.with_suffix(".log"), {}, ROOT, 30.0)
        found = wait_for(supervisor, process, r"still running: .*rollout service (http://\S+?);", RUN_SECONDS)
        yield found


@contextmanager
def files(folders: list[Path]) -> Iterator[str]:
    """The address of the page of the files of runs."""
    with Supervisor() as supervisor, PortReservations() as ports:
        flags = ["--port", str(ports.pick()), "--tokenizer", str(ROOT / "assets" / "starter_model")]
        command = [sys.executable, "-m", "atroposlib.cli.view_run", *map(str, folders), *flags]
        process = supervisor.start("view-run", command, ROOT / "runs" / "view-run.log", {}, ROOT)
        yield wait_for(supervisor, process, r"(http://127\.0\.0\.1:\d+)", 60)


def wait_for(supervisor: Supervisor, process: ManagedProcess, pattern: str, seconds: float) -> str:
    """What a process writes: the first group of the pattern."""

    def written() -> re.Match[str] | None:
        return re.search(pattern, process.log_path.read_text(errors="replace"))

    missing = f"{process.name} has not written {pattern!r}"
    wait_until(process.name, lambda: None if written() else missing, seconds, supervisor.check)
    found = written()
    assert found is not None
    return found[1]


def take(browser: Browser, origin: str, run: str) -> None:
    """All pictures of one run, by its id."""
    for name, (path, window) in PICTURES.items():
        with look(browser, origin, f"{path}?run={run}", window) as visit:
            if name == "overview_light":
                rises(visit)
            picture(visit, name)
    with look(browser, origin, f"/ui/rollouts/{EARLY_GROUP}?run={run}", DESK | {"color_scheme": "dark"}) as visit:
        visit.until(ALL_IN_SIGHT)
        picture(visit, "rollout_dark")


@contextmanager
def look(browser: Browser, origin: str, path: str, window: dict[str, Any]) -> Iterator[Visit]:
    """One visit.

    Raises:
        PictureError: the page wrote errors, or asked another host for something.
    """
    visit = Visit.begin(browser.new_context(**window), origin)
    visit.open(path)
    yield visit
    if complaints := visit.end():
        raise PictureError(f"{path}: {complaints}")


def rises(visit: Visit) -> None:
    """The reward's curve ends higher than it begins.

    Raises:
        PictureError: it does not.
    """
    run = visit.page.locator("body").get_attribute("data-run")
    rows = visit.page.request.get(f"{visit.origin}/ui/api/series?run={run}&names=reward_mean&points=2000").json()
    values = [value for value in rows["series"]["reward_mean"]["mean"] if value is not None]
    third = len(values) // 3
    if third < 3 or sum(values[-third:]) <= sum(values[:third]):
        raise PictureError(f"the reward does not rise over the {len(values)} steps of this run: {values}")


def picture(visit: Visit, name: str) -> None:
    """Write what the window shows, without a pointer over it."""
    path = IMAGES / f"ui_{name}.png"
    visit.page.screenshot(path=path, animations="disabled")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB", flush=True)


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description="Pictures of the page for README and docs.")
    parser.add_argument("--run", type=Path, nargs="+", help="folders of runs that have ended (default: run the quick start)")
    arguments = parser.parse_args()
    if (reason := missing()) is not None:
        raise SystemExit(f"error: {reason}")
    from playwright.sync_api import sync_playwright

    source = files(arguments.run) if arguments.run else quickstart(ROOT / "runs" / "page")
    with source as origin, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser())
        runs = httpx.get(f"{origin}/ui/api/runs", timeout=30, trust_env=False).json()
        named = {Path(run["folder"]): run["id"] for run in runs["runs"]}
        take(browser, origin, named[arguments.run[0].resolve()] if arguments.run else runs["current"])
        browser.close()


if __name__ == "__main__":
    main()
