"""Legacy mode with every process real: the trainer owns vLLM, restarts it on checkpoints, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.child_processes.guard import descendants, parents
from example_trainer.child_processes.ports import is_free
from example_trainer.training.runs import marked_run
from tests.conftest import ROOT, Processes
from tests.e2e.bridge_helpers import made_up_group
from tests.e2e.conftest import CACHE
from tests.forked_commands import FORK_CHILDREN
from tests.still_running import json_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(540)]

STARTER = ROOT / "assets" / "starter_model"


def family_of_server(log: Path) -> set[int]:
    """API server and engine, by what a log says of the last start, and the guard above them; those of them that live."""
    _, _, last = log.read_text(errors="replace").rpartition("==== weight version")
    alive = parents()
    named = {int(pid) for pid in re.findall(r"\((?:APIServer|EngineCore) pid=(\d+)\)", last)} & alive.keys()
    return named | {alive[pid] for pid in named}


def test_vllm_follows_the_checkpoints_and_ends_with_the_trainer(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port, vllm_port, metrics_port = free_port(), free_port(), free_port()
    url, vllm = f"http://localhost:{port}", f"http://localhost:{vllm_port}"
    folder, log = tmp_path / "trainer", tmp_path / "trainer" / "vllm.log"
    processes.start_service(port)
    command = [
        *(sys.executable, "-u", ROOT / "example_trainer/grpo.py", "--model-name", STARTER, "--lr", "1e-4"),
        *("--weight-bridge-mode", "none", "--vllm-restart-interval", "2", "--vllm-port", str(vllm_port)),
        *("--vllm-args", " ".join(["--max-model-len 256 --max-num-seqs 32", *CACHE]), "--metrics-port", str(metrics_port)),
        *("--atropos-url", url, "--batch-size", "16", "--gradient-accumulation-steps", "1", "--training-steps", "50"),
        *("--checkpoint-interval", "2", "--num-threads", "1", "--seq-len", "256"),
        *("--save-path", tmp_path / "checkpoints", "--log-dir", folder),
    ]
    trainer = processes.start("trainer", command, FORK_CHILDREN | {"VLLM_ENABLE_SHARED_WEIGHTS": "1"}, grace=60)

    def rows() -> list[dict[str, Any]]:
        return json_rows(folder / "metrics.jsonl")

    def wait_for_step(step: int) -> None:
        processes.wait_until(f"step {step}", lambda: None if len(rows()) >= step else f"{len(rows())} steps", 400)

    def weights_of_an_answer() -> tuple[list[int], list[int]]:
        body = {"prompt": {"prompt_token_ids": [5, 6, 7]}, "max_tokens": 2}
        answer = httpx.post(f"{vllm}/generate", json=body, timeout=60).json()
        return answer["weight_versions"], answer["weight_epochs"]

    # Rollouts for two steps and no more: the trainer stands still after them, and whatever is looked at stays as it is.
    for number in range(2 * 4):
        httpx.post(f"{url}/scored_data", json=made_up_group(number), timeout=60).raise_for_status()
    wait_for_step(2)
    assert [row["weight_version"] for row in rows()] == [0, 2]
    assert re.findall(r"==== weight version (\d+): ", log.read_text()) == ["0", "2"]
    run = marked_run(tmp_path / "checkpoints")
    assert run is not None
    assert weights_of_an_answer() == ([2], [run.epoch])
    assert "lockstep_weight_version 2.0" in httpx.get(f"{vllm}/metrics", timeout=30).text

    def not_shown() -> str | None:  # it is a moment after the row was written
        shown = httpx.get(f"http://localhost:{metrics_port}/metrics", timeout=60).text
        return None if "lockstep_trainer_served_weight_version 2.0" in shown else shown

    processes.wait_until("the version to be shown", not_shown, 180)

    # An environment comes, and stays while the server that it samples from is started again.
    flags = ["--env.rollout_server_url", url, "--openai.base_url", vllm, "--env.max_token_length", "24"]
    environment = processes.start(
        "environment",
        [sys.executable, ROOT / "environments/arithmetic_server.py", "serve", *flags, "--env.group_size", "8"],
        may_finish=True,
    )
    wait_for_step(5)
    assert [row["weight_version"] for row in rows()[2:5]] == [2, 4, 4]

    # A person's SIGTERM: what was learned is kept, and no process of the server's is left.
    def family() -> set[int]:
        return {*descendants(trainer.command_pid()), *family_of_server(log)}

    # The trainer takes what there is and then stands still, and with it the server on its last checkpoint.
    os.kill(environment.command_pid(), signal.SIGSTOP)
    processes.wait_until("guard, API server and engine", lambda: None if len(family()) >= 3 else str(family()), 120)
    left = family()
    assert processes.stop(trainer) == 128 + signal.SIGTERM
    text = trainer.log_path.read_text()
    assert "Stopped by SIGTERM" in text
    assert "ERROR" not in text
    # What the server was started on is a checkpoint like any other, and was written once.
    saved = re.findall(r"Saved checkpoint (\S+)", text)
    assert len(saved) == len(set(saved)) >= 2
    assert not left & parents().keys()
    assert is_free(vllm_port)
    os.kill(environment.command_pid(), signal.SIGCONT)
    assert environment.poll() is None  # it waits, while vLLM is restarted and when the trainer is gone
    kept = max(int(file.parent.name.removeprefix("step_")) for file in tmp_path.glob("checkpoints/step_*/model.safetensors"))
    # A step whose weights vLLM was being restarted on is kept, and has no row yet.
    assert kept - rows()[-1]["step"] in (0, 1)
