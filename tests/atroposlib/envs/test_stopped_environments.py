"""Environments that are stopped (SIGSTOP): the service names them, others go on, and after SIGCONT
so do they.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx
import pytest

from example_trainer.child_processes.processes import wait_until
from tests.atroposlib.envs.env_stack import Stack
from tests.atroposlib.envs.test_env_serving import ARITHMETIC, finished

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

SILENT_AFTER = 2.0
GROUPS = 4


def stats(stack: Stack) -> dict[str, Any]:
    answer: dict[str, Any] = (
        httpx.get(f"{stack.service_url}/stats", timeout=60).raise_for_status().json()
    )
    return answer


def row_of(stack: Stack, name: str) -> dict[str, Any]:
    (row,) = [row for row in stats(stack)["environments"] if row["wandb_name"] == name]
    return dict(row)


def until_silent(stack: Stack, name: str) -> None:
    """Wait until an environment has called nothing for longer than the service's limit."""

    def probe() -> str | None:
        row = row_of(stack, name)
        return None if row["seconds_silent"] > SILENT_AFTER else f"{row}"

    wait_until(f"the silence of {name}", probe, 120)


def take_until_accepted(stack: Stack, name: str, groups: int) -> None:
    """Be a trainer until so many more groups of an environment were accepted."""
    target = row_of(stack, name)["groups_accepted"] + groups

    def probe() -> str | None:
        while stack.next_batch():
            pass
        accepted = row_of(stack, name)["groups_accepted"]
        return None if accepted >= target else f"{accepted} of {target} groups"

    wait_until(f"groups of {name}", probe, 120)


def test_one_of_two_is_stopped_then_both_and_both_go_on(
    stack: Stack, shared_inference: str
) -> None:
    stack.use_inference(shared_inference)
    stack.start_service("memory", "--silent-after", str(SILENT_AFTER))
    stack.register_trainer(num_steps=10**6)
    assert stack.next_batch() is None
    environments = []
    for name in ("first", "second"):
        environments.append(stack.start_environment(ARITHMETIC, name=name))
        stack.processes.wait_for_text(environments[-1], "registered as arithmetic", 120)
    pids = [one.command_pid() for one in environments]
    for number in (0, 1):
        take_until_accepted(stack, f"arithmetic_{number}", GROUPS)
    os.kill(pids[0], signal.SIGSTOP)
    until_silent(stack, "arithmetic_0")
    take_until_accepted(stack, "arithmetic_1", GROUPS)
    os.kill(pids[1], signal.SIGSTOP)
    until_silent(stack, "arithmetic_1")
    while stack.next_batch():  # what was queued when they were stopped
        pass
    because = stats(stack)["waiting_because"]
    for number, pid in enumerate(pids):
        assert f"arithmetic_{number} has sent nothing for " in because
        assert f" s (process {pid} on " in because
    assert "see its log, and start it again if its process is gone or stands still" in because
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    for number in (0, 1):
        take_until_accepted(stack, f"arithmetic_{number}", GROUPS)
    assert len(stats(stack)["environments"]) == 2, "none registered again"
    stack.end_run()
    assert [finished(one) for one in environments] == [0, 0]
