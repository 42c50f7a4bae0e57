"""The page of a run that has ended, or whose processes were killed: from the service, and from the
run's files.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.child_processes.processes import wait_until
from tests import inference_standin
from tests.atroposlib.service.conftest import Service, environment, trainer
from tests.conftest import Processes
from tests.headless_browser import LIVE, Visit

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]

HOURS = 7300.0


class ShortRun:
    """A service with an inference server, a trainer and an environment that the test speaks for."""

    def __init__(self, folder: Path, processes: Processes, port: int) -> None:
        self.folder, self.processes, self.url = folder, processes, f"http://localhost:{port}"
        command = inference_standin.command(port, serving=True, version=3, epoch=7)
        self.server = processes.start("inference server", command, may_finish=True)
        processes.wait_for_http(f"{self.url}/weights", 120)
        self.service = Service(
            folder, "--store", str(folder / "rollouts.db"), "--run-folder", str(folder)
        ).start()
        self.uuid = self.service.post(
            "/register", trainer(model="m", inference_servers=[self.url])
        )["uuid"]
        self.service.get("/batch")
        self.service.post("/register-env", environment())
        self.wait(
            "the server's health",
            lambda stack: [one["health"] for one in stack["servers"]] == ["good"],
        )

    def stack(self) -> dict[str, Any]:
        found: dict[str, Any] = self.service.get("/ui/api/stack")
        return found

    def wait(self, what: str, true: Callable[[dict[str, Any]], bool]) -> None:
        def probe() -> str | None:
            stack = self.stack()
            return None if stack["time"] and true(stack) else f"the stack is {stack}"

        wait_until(what, probe, 120)

    def states(self, signs: dict[str, Any]) -> dict[str, str]:
        return {name: sign["state"] for name, sign in signs.items()}

    def end(self) -> None:
        self.service.post("/run/end", {"uuid": self.uuid})
        self.service.post("/disconnect-env", {"env_id": 0})
        self.processes.kill(self.server)

    def view(self, port: int) -> str:
        """Show the folder by `view-run`, and return the page's address."""
        command = [
            sys.executable,
            "-m",
            "atroposlib.cli.view_run",
            str(self.folder),
            "--port",
            str(port),
        ]
        self.processes.start("view-run", command, may_finish=True)
        origin = f"http://127.0.0.1:{port}"
        self.processes.wait_for_http(f"{origin}/ui", 180)
        return origin

    def let_pass(self, seconds: float) -> None:
        """Make what the service wrote this much older, as if the time had passed."""
        path = self.folder / "observed" / "stack.json"
        stack = json.loads(path.read_text())
        for one in (stack, *stack["servers"]):
            for name in ("time", "answered", "since", "stopped"):
                if one.get(name) is not None:
                    one[name] -= seconds
        path.write_text(json.dumps(stack))
        for file in path.parent.iterdir():
            os.utime(file, (stack["time"], stack["time"]))


@pytest.fixture
def run(tmp_path: Path, processes: Processes, free_port: Callable[[], int]) -> ShortRun:
    return ShortRun(tmp_path, processes, free_port())


def states_in(seen: Visit) -> dict[str, str | None]:
    boxes = {
        name: seen.page.get_by_role("listitem", name=name, exact=True)
        for name in ("service", "trainer", "environment", "vllm")
    }
    return {name: box.get_attribute("data-state") for name, box in boxes.items()}


def test_an_ended_run_is_shown_as_ended(
    run: ShortRun, free_port: Callable[[], int], visit: Callable[..., Visit]
) -> None:
    assert run.stack()["signs"] == {}
    run.end()
    server = f"server-{run.url}"
    ended = {"trainer": "ended", "environment-0": "ended", server: "ended"}
    run.wait("the end of all", lambda stack: run.states(stack["signs"]) == ended)
    assert run.stack()["faults"] == [], "what stops after the end is no fault"
    seen = visit(f"http://127.0.0.1:{run.service.port}")
    seen.open("/ui")
    seen.until(LIVE)
    assert states_in(seen) == {
        "service": "good",
        "trainer": "ended",
        "environment": "ended",
        "vllm": "ended",
    }
    row = seen.page.get_by_role("row").filter(
        has_text=f"{run.url} has stopped after the end of the run"
    )
    row.first.wait_for()
    seen.page.context.close()

    run.service.signal(signal.SIGTERM)
    run.let_pass(HOURS)
    origin = run.view(free_port())
    (found,) = httpx.get(f"{origin}/ui/api/runs", timeout=60).json()["runs"]
    assert found["state"] == "ended"
    late = visit(origin)
    late.open("/ui")
    late.page.locator("#headline").filter(has_text="ended, last written").wait_for()
    assert states_in(late) == dict.fromkeys(("service", "trainer", "environment", "vllm"), "ended")
    assert (
        "stopped, at" in late.page.get_by_role("listitem", name="service", exact=True).inner_text()
    )


def test_a_run_whose_processes_were_killed_is_not_shown_as_well(
    run: ShortRun, free_port: Callable[[], int], visit: Callable[..., Visit]
) -> None:
    run.wait("a written stack", lambda stack: (run.folder / "observed" / "stack.json").exists())
    origin = run.view(free_port())
    open_all_along = visit(origin)
    open_all_along.open("/ui")
    # The service writes the file again after each event, and the page follows.
    open_all_along.page.locator("#stack [data-state='good']").nth(3).wait_for()
    assert set(states_in(open_all_along).values()) == {"good"}, (
        "another process writes the files of a run that goes on"
    )

    run.service.signal(signal.SIGKILL)
    run.processes.kill(run.server)
    run.let_pass(HOURS)
    late = visit(origin)
    late.open("/ui")
    for seen in (open_all_along, late):
        seen.page.locator("#stack [data-state='no sign']").nth(3).wait_for()
        assert set(states_in(seen).values()) == {"no sign"}
        server = seen.page.get_by_role("listitem", name="vllm", exact=True).inner_text()
        assert re.search(r"no sign for 2(\.\d+)? h", server)
        assert "\ngood\n" not in server
        heard = seen.page.get_by_role("listitem", name="environment", exact=True).inner_text()
        assert re.search(r"2(\.\d+)? h ago", heard)
    # To a viewer that was open, the change of the stamps is a sign that the run goes on. A new one
    # has seen no change.
    afterwards = run.view(free_port())
    assert (
        httpx.get(f"{afterwards}/ui/api/runs", timeout=60).json()["runs"][0]["state"] == "unknown"
    )
