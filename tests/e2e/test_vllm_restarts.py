"""Legacy mode with every process real: the trainer owns vLLM, restarts it on checkpoints, and
leaves nothing behind.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.child_processes.guard import descendants, parents
from example_trainer.child_processes.ports import is_free
from example_trainer.child_processes.processes import ManagedProcess, wait_until
from example_trainer.launcher import roles
from example_trainer.training.runs import marked_run, steps_in
from tests.conftest import ROOT, Processes
from tests.e2e.bridge_helpers import made_up_group
from tests.e2e.conftest import CACHE, VllmServer, trainer_command
from tests.forked_commands import FORK_CHILDREN
from tests.still_running import json_rows

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(540)]

STARTER = ROOT / "assets" / "starter_model"


def family_of_server(log: Path) -> set[int]:
    """Process ids of API server and engine, from a log's lines about the last start, and of the
    guard above them, if they live.
    """
    _, _, last = log.read_text(errors="replace").rpartition("==== weight version")
    alive = parents()
    named = {
        int(pid) for pid in re.findall(r"\((?:APIServer|EngineCore) pid=(\d+)\)", last)
    } & alive.keys()
    return named | {alive[pid] for pid in named}


def starts(log: Path) -> list[int]:
    """The weight versions on which a server was started."""
    return [
        int(version)
        for version in re.findall(r"==== weight version (\d+): ", log.read_text(errors="replace"))
    ]


def with_state(checkpoints: Path) -> list[int]:
    """The steps whose checkpoints keep their optimizer state."""
    return [
        step
        for step, path in steps_in(checkpoints).items()
        if (path / "trainer_state" / "trainer.json").is_file()
    ]


def wait_for_step(processes: Processes, folder: Path, step: int) -> None:
    def missing() -> str | None:
        steps = len(json_rows(folder / "metrics.jsonl"))
        return None if steps >= step else f"{steps} steps"

    processes.wait_until(f"step {step}", missing, 400)


def kill_command(process: ManagedProcess) -> None:
    """`kill -9` the command alone, and wait until its ports are free."""
    pid = process.command_pid()
    os.kill(pid, signal.SIGKILL)
    wait_until("its end", lambda: "it still lives" if pid in parents() else None, 60)


def post_groups(url: str, *numbers: int) -> None:
    for number in numbers:
        httpx.post(f"{url}/scored_data", json=made_up_group(number), timeout=60).raise_for_status()


def test_vllm_follows_the_checkpoints_and_ends_with_the_trainer(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port, vllm_port, metrics_port = free_port(), free_port(), free_port()
    url, vllm = f"http://localhost:{port}", f"http://localhost:{vllm_port}"
    folder, checkpoints = tmp_path / "trainer", tmp_path / "checkpoints"
    log = folder / "vllm.log"
    processes.start_service(port)
    command = small_trainer(url, tmp_path, vllm_port, metrics_port)

    def start_trainer(*flags: str) -> ManagedProcess:
        variables = FORK_CHILDREN | {"VLLM_ENABLE_SHARED_WEIGHTS": "1"}
        return processes.start("trainer", [*command, *flags], variables, grace=60)

    def rows() -> list[dict[str, Any]]:
        return json_rows(folder / "metrics.jsonl")

    # Rollouts for four steps and no more: the trainer stands still after them, between two
    # restarts.
    trainer = start_trainer()
    post_groups(url, *range(4 * 4))
    wait_for_step(processes, folder, 4)
    assert [row["weight_version"] for row in rows()] == [0, 0, 3, 3], (
        "mode none restarts vLLM every three steps"
    )
    assert starts(log) == [0, 3]
    expect_version_3_to_be_served(processes, vllm, metrics_port, checkpoints)
    assert "Saved the weights of" in trainer.log_path.read_text()

    # kill -9. The next trainer begins once the ports are free. It takes the server of the one
    # before for what it is.
    kill_command(trainer)
    before, trainer = trainer, start_trainer("--resume", "auto", "--keep-optimizer-states", "all")
    processes.stop(before)

    # An environment comes, and stays while the server that it samples from is started again.
    words = roles.environment(
        "arithmetic", url, [vllm], settings={"max_token_length": 24, "group_size": 8}
    )
    environment = processes.start("environment", words, may_finish=True)
    post_groups(url, *range(4 * 4, 4 * 5))
    wait_for_step(processes, folder, 7)
    # The first trainer's row of step 4, which is in no checkpoint, has given way to the second
    # one's.
    served = {row["step"]: row["weight_version"] for row in rows()[3:7]}
    assert list(served.items()) == [(4, 3), (5, 3), (6, 6), (7, 6)]
    assert starts(log)[:4] == [0, 3, 3, 6]
    assert "did not start" not in trainer.log_path.read_text()

    # The trainer takes what there is and then stands still, and with it the server on its last
    # checkpoint.
    os.kill(environment.command_pid(), signal.SIGSTOP)
    expect_sigterm_to_keep_what_was_learned(processes, trainer, log, checkpoints)
    assert is_free(vllm_port)
    os.kill(environment.command_pid(), signal.SIGCONT)
    # It waits, while vLLM is restarted and when the trainer is gone.
    assert environment.poll() is None
    kept = max(steps_in(checkpoints))
    # A step whose weights vLLM was being restarted on is kept, and has no row yet.
    assert kept - rows()[-1]["step"] in (0, 1)


def expect_version_3_to_be_served(
    processes: Processes, vllm: str, metrics_port: int, checkpoints: Path
) -> None:
    """Answers, metrics and checkpoints agree on it."""

    def weights_of_an_answer() -> tuple[list[int], list[int]]:
        body = {"prompt": {"prompt_token_ids": [5, 6, 7]}, "max_tokens": 2}
        answer = httpx.post(f"{vllm}/generate", json=body, timeout=60).json()
        return answer["weight_versions"], answer["weight_epochs"]

    run = marked_run(checkpoints)
    assert run is not None
    assert weights_of_an_answer() == ([3], [run.epoch])
    assert "lockstep_weight_version 3.0" in httpx.get(f"{vllm}/metrics", timeout=120).text

    def not_shown() -> str | None:  # it is a moment after the row was written
        shown = httpx.get(f"http://localhost:{metrics_port}/metrics", timeout=60).text
        return None if "lockstep_trainer_served_weight_version 3.0" in shown else shown

    processes.wait_until("the version to be shown", not_shown, 180)
    processes.wait_until(
        "a state of step 3", lambda: None if with_state(checkpoints) == [3] else "not there", 120
    )


def small_trainer(url: str, folder: Path, vllm_port: int, metrics_port: int) -> list[str]:
    """The command of a trainer that restarts vLLM every three steps."""
    return trainer_command(
        STARTER,
        url,
        folder,
        bridge=None,
        lr=1e-4,
        vllm_port=vllm_port,
        metrics_port=metrics_port,
        vllm_args=" ".join(["--max-model-len 256 --max-num-seqs 32", *CACHE]),
        batch_size=16,
        gradient_accumulation_steps=1,
        training_steps=50,
        checkpoint_interval=3,
        num_threads=1,
        seq_len=256,
    )


def expect_sigterm_to_keep_what_was_learned(
    processes: Processes, trainer: ManagedProcess, log: Path, checkpoints: Path
) -> None:
    """A person's SIGTERM: what was learned is kept, and no process of the server's is left."""

    def family() -> set[int]:
        return {*descendants(trainer.command_pid()), *family_of_server(log)}

    processes.wait_until(
        "guard, API server and engine", lambda: None if len(family()) >= 3 else str(family()), 120
    )
    left = family()
    assert processes.stop(trainer) == 128 + signal.SIGTERM
    text = trainer.log_path.read_text()
    assert "Stopped by SIGTERM" in text
    assert "ERROR" not in text
    # The server's first weights are a checkpoint like any other, and were written once.
    saved = re.findall(r"Saved checkpoint (\S+)", text)
    assert len(saved) == len(set(saved)) >= 2
    assert with_state(checkpoints) == list(steps_in(checkpoints)), (
        "with all, every checkpoint keeps its state"
    )
    assert not left & parents().keys()


def test_a_server_of_somebody_else_s_is_left_alone_and_no_state_is_kept(
    server: VllmServer, processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port = free_port()
    url, checkpoints = f"http://localhost:{port}", tmp_path / "checkpoints"
    processes.start_service(port)
    command = trainer_command(
        server.model,
        url,
        tmp_path,
        bridge=None,
        lr=1e-4,
        vllm_port=server.port,
        vllm_restart_interval=2,
        keep_optimizer_states=0,
        batch_size=4,
        gradient_accumulation_steps=1,
        seq_len=64,
        checkpoint_interval=1,
        num_threads=1,
    )
    instance = httpx.get(f"{server.url}/weights", timeout=120).json()["instance"]
    post_groups(url, *range(5))
    trainer = processes.start("trainer", [*command, "--training-steps", "3"], may_finish=True)
    text = processes.finish(trainer, 200)
    assert (
        f"This trainer did not start the vLLM server at {server.url}, and will not restart it"
        in text
    )
    assert (
        f"The weights of the vLLM server at {server.url} are 2 steps behind the trainer's" in text
    )
    assert "Saved the weights of" not in text, "no checkpoint is saved for a server that loads none"
    assert list(steps_in(checkpoints)) == [1, 2, 3]
    assert with_state(checkpoints) == []

    again = processes.start(
        "trainer", [*command, "--training-steps", "5", "--resume", "auto"], may_finish=True
    )
    text = processes.finish(again, 200)
    assert "step_3 keeps no optimizer state: training goes on from its weights" in text
    assert "are 4 steps behind the trainer's" in text
    assert "Training complete: 5 steps" in text
    assert httpx.get(f"{server.url}/weights", timeout=120).json()["instance"] == instance
