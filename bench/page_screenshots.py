"""Pictures of the page for README and docs, of a real run: the quick start, looked at with a
headless Chromium.

    python bench/page_screenshots.py                 runs the quick start, four minutes on two cores, and looks while it trains
    python bench/page_screenshots.py --run FOLDER …  pictures of a run that is there already, from its files; others beside it
    python bench/page_screenshots.py --only NAME …   some of them

From files there are none of a run that goes on (LIVE), and of the quick start none of several runs
(SEVERAL). They go to docs/images/ui_*.png. No picture is taken of a faulty run or page. A run whose
reward does not rise is an error, and so is a page that writes one into the console.
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
from example_trainer.child_processes.processes import ManagedProcess, Supervisor, wait_until
from tests.headless_browser import LIVE as LIVE_STREAM
from tests.headless_browser import Visit, find_browser, missing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGES = ROOT / "docs" / "images"
RUN_SECONDS = 900.0
WATCHED_STEPS = 24
"""After which the run that goes on is looked at: by then its reward has risen."""
DESK = {"viewport": {"width": 1280, "height": 860}}
TALL = {"viewport": {"width": 1280, "height": 1000}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
EARLY_GROUP = 20
"""A model that still answers now in one way and now in another."""
LIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "overview_light": ("/ui", TALL | {"color_scheme": "light"}),
    "overview_dark": ("/ui", TALL | {"color_scheme": "dark"}),
    "overview_phone": ("/ui", PHONE | {"color_scheme": "dark"}),
}
"""Pictures of a run that goes on: name -> the address, and the window that it is seen in."""
SEVERAL = {"history_dark": ("/ui/history", DESK | {"color_scheme": "dark"})}
"""Pictures of several runs."""
PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "rollouts_light": ("/ui/rollouts?sort=drifted", DESK | {"color_scheme": "light"}),
    "rollout_dark": (f"/ui/rollouts/{EARLY_GROUP}", DESK | {"color_scheme": "dark"}),
    "rollout_difference": (
        "/ui/rollouts/{drifted}?shade=difference",
        DESK | {"color_scheme": "light"},
    ),
    "weights_light": ("/ui/weights", DESK | {"color_scheme": "light"}),
}
"""Pictures of any run."""
ALL_IN_SIGHT = """[...document.querySelectorAll("[data-response]")]
  .every((one) => one.getBoundingClientRect().top > innerHeight || one.querySelector("[data-token]"))"""
"""Rollouts are asked for as they come into sight."""


class PictureError(RuntimeError):
    """The page does not show what the picture is to show."""


@contextmanager
def quickstart(folder: Path) -> Iterator[str]:
    """The address of the page of a quick start that has taken WATCHED_STEPS, and goes on."""
    command = [
        sys.executable,
        "-m",
        "example_trainer.launcher.quickstart",
        "--cpu",
        "--keep-running",
        "--output",
        str(folder),
    ]
    folder.parent.mkdir(exist_ok=True)
    with Supervisor() as supervisor:
        process = supervisor.start(
            "quick start", command, folder.with_suffix(".log"), {}, ROOT, 30.0
        )
        origin = wait_for(
            supervisor, process, r"rollout service +ready after .*(http://\S+)", RUN_SECONDS
        )

        def missing_steps() -> str | None:
            taken = len(rewards(origin, "live"))
            return None if taken >= WATCHED_STEPS else f"{taken} of {WATCHED_STEPS} steps are taken"

        wait_until("the quick start", missing_steps, RUN_SECONDS, supervisor.check)
        yield origin


@contextmanager
def files(folders: list[Path]) -> Iterator[str]:
    """The address of the page of the files of runs."""
    with Supervisor() as supervisor, PortReservations() as ports:
        flags = ["--port", str(ports.pick()), "--tokenizer", str(ROOT / "assets" / "starter_model")]
        (ROOT / "runs").mkdir(exist_ok=True)
        command = [sys.executable, "-m", "atroposlib.cli.view_run", *map(str, folders), *flags]
        process = supervisor.start("view-run", command, ROOT / "runs" / "view-run.log", {}, ROOT)
        yield wait_for(supervisor, process, r"(http://127\.0\.0\.1:\d+)", 60)


def wait_for(supervisor: Supervisor, process: ManagedProcess, pattern: str, seconds: float) -> str:
    """Wait for a line of a process: the first group of the pattern."""

    def written() -> re.Match[str] | None:
        return re.search(pattern, process.log_path.read_text(errors="replace"))

    missing = f"{process.name} has not written {pattern!r}"
    wait_until(process.name, lambda: None if written() else missing, seconds, supervisor.check)
    found = written()
    assert found is not None
    return found[1]


def take(
    browser: Browser, origin: str, run: str, pictures: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    """Pictures of one run, by its id."""
    for name, (address, window) in pictures.items():
        path = (
            address.format(drifted=most_drifted(origin, run)) if "{drifted}" in address else address
        )
        with look(
            browser, origin, f"{path}{'&' if '?' in path else '?'}run={run}", window
        ) as visit:
            if name in LIVE:
                visit.until(LIVE_STREAM)
            visit.until(ALL_IN_SIGHT)
            picture(visit, name)


def asked(origin: str, path: str, **query: str | int) -> Any:
    """Return the page's answer to its scripts."""
    answer = httpx.get(f"{origin}/ui/api/{path}", params=query, timeout=30, trust_env=False)
    answer.raise_for_status()
    return answer.json()


def most_drifted(origin: str, run: str) -> int:
    """The group with the rollout in which sampler and trainer differ most.

    Raises:
        PictureError: the trainer has reported none.
    """
    found = asked(origin, "rollouts", run=run, sort="drifted", limit=1)["rollouts"]
    if not found:
        raise PictureError(
            "the trainer has reported no rollout of this run: nothing can be shaded by a difference"
        )
    return int(found[0]["group"])


def rewards(origin: str, run: str) -> list[float]:
    """The mean reward of each step."""
    told = asked(origin, "series", run=run, names="reward_mean", points=2000)["series"][
        "reward_mean"
    ]["mean"]
    return [value for value in told if value is not None]


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


def require_rise(values: list[float]) -> None:
    """The reward's curve ends higher than it begins.

    Raises:
        PictureError: it does not.
    """
    third = len(values) // 3
    if third < 3 or sum(values[-third:]) <= sum(values[:third]):
        raise PictureError(
            f"the reward does not rise over the {len(values)} steps of this run: {values}"
        )


def picture(visit: Visit, name: str) -> None:
    """Write what the window shows, without a pointer over it."""
    path = IMAGES / f"ui_{name}.png"
    visit.page.screenshot(path=path, animations="disabled")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB", flush=True)


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description="Pictures of the page for README and docs.")
    parser.add_argument(
        "--run",
        type=Path,
        nargs="+",
        help="folders of runs that have ended (default: run the quick start)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*LIVE, *SEVERAL, *PICTURES],
        metavar="NAME",
        help="these pictures",
    )
    arguments = parser.parse_args()
    if (reason := missing()) is not None:
        raise SystemExit(f"error: {reason}")
    from playwright.sync_api import sync_playwright

    wanted = (SEVERAL if arguments.run else LIVE) | PICTURES
    if arguments.only:
        if not_to_be_had := sorted({*arguments.only} - wanted.keys()):
            parser.error(
                f"no picture of {', '.join(not_to_be_had)} {'with' if arguments.run else 'without'} --run"
            )
        wanted = {name: wanted[name] for name in arguments.only}
    source = files(arguments.run) if arguments.run else quickstart(ROOT / "runs" / "page")
    with source as origin, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser())
        runs = asked(origin, "runs")
        named = {Path(run["folder"]): run["id"] for run in runs["runs"]}
        run = named[arguments.run[0].resolve()] if arguments.run else runs["current"]
        require_rise(rewards(origin, run))
        take(browser, origin, run, wanted)
        browser.close()


if __name__ == "__main__":
    main()
