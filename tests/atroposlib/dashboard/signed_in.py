"""A made-up run behind a key, and visits of its page that begin signed in."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.atroposlib.dashboard.made_up_run import MadeUpRun
from tests.atroposlib.service.conftest import Service
from tests.headless_browser import READY, Visit

KEY = "a-key-that-nobody-guesses-0123456789"


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Iterator[MadeUpRun]:
    """A run of a service with a key, after thirty steps."""
    folder = tmp_path_factory.mktemp("run")
    flags = ("--store", str(folder / "rollouts.db"), "--run-folder", str(folder))
    service = Service(folder, *flags, environ={"ROLLOUT_API_KEY": KEY}).start()
    run = MadeUpRun(folder, service, tokenizer_dir, {"Authorization": f"Bearer {KEY}"})
    run.begin()
    run.step(30)
    run.sample(
        "What is 2 + 3?",
        [b"2 + 3 = 5. \\boxed{5}", b"\\boxed{6}"],
        [1.0, -1.0],
        weight_versions=[3, 3],
    )
    yield run
    assert service.signal(signal.SIGTERM) == 0, service.log.read_text()[-2000:]


def sign_in(visit: Visit, path: str = "/ui", key: str = KEY) -> None:
    """Open a page, be asked for the key, and give it."""
    visit.page.goto(visit.origin + path)
    visit.page.get_by_role("textbox", name="Key").fill(key)
    visit.page.get_by_role("button", name="Sign in").click()


@pytest.fixture
def signed_in(made_up: MadeUpRun, visit: Callable[..., Visit]) -> Callable[..., Visit]:
    """A function that begins a visit at which the key was given."""

    def begin(path: str = "/ui", **options: Any) -> Visit:
        begun = visit(made_up.origin, **options)
        sign_in(begun, path)
        begun.until(READY)
        return begun

    return begin
