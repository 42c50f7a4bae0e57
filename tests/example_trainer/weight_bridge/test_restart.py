"""The bridge that restarts a server of its own, over a small server that is not ours: real
processes, real HTTP.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from example_trainer.child_processes.guard import descendants, parents
from example_trainer.child_processes.ports import is_free
from example_trainer.config import TrainerConfig
from example_trainer.errors import BridgeError, ConfigError
from example_trainer.process import StopRequested, StopSignal
from example_trainer.weight_bridge import owned_server, restart
from example_trainer.weight_bridge.base import NoBridge
from example_trainer.weight_bridge.factory import make_bridge
from example_trainer.weight_bridge.foreign_server import ForeignServerBridge
from example_trainer.weight_bridge.owned_server import Served
from example_trainer.weight_bridge.restart import REVIVALS, RestartBridge
from example_trainer.weight_bridge.server_record import (
    end_left_over_server,
    read_record,
    record_file,
)
from tests import inference_standin
from tests.example_trainer.weight_bridge.test_server_gpus import geometry

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[3]


def standin_command(model: str, port: object, fault: str = "") -> list[str]:
    """The command of a server that is not ours, see tests/inference_standin.py."""
    words = [sys.executable, inference_standin.__file__, "--name", model, "--port", str(port)]
    return [*words, "--fault", fault] if fault else words


class Stack:
    """A bridge over a stand-in server, and what a test wants to know about it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.stop = folder, port, StopSignal()
        self.starts_file = folder / "starts"
        self.bridges: list[RestartBridge] = []

    def config(self, fault: str = "", **options: object) -> TrainerConfig:
        command = " ".join(standin_command("{model}", "{port}", fault))
        values = {
            "model_name": "first",
            "vllm_restart_interval": 2,
            "training_steps": 9,
            "vllm_port": self.port,
        }
        values |= {
            "vllm_command": command,
            "save_path": self.folder / "checkpoints",
            "log_dir": self.folder / "logs",
        }
        return TrainerConfig.model_validate(values | options)

    def bridge(self, fault: str = "", **options: object) -> RestartBridge:
        bridge = make_bridge(self.config(fault, **options), self.stop)
        assert isinstance(bridge, RestartBridge)
        self.bridges.append(bridge)
        bridge.serving_dtype()
        bridge.connect(torch.nn.Linear(2, 2))
        return bridge

    def starts(self) -> list[str]:
        return self.starts_file.read_text().split() if self.starts_file.exists() else []

    def server(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(
            f"http://localhost:{self.port}/v1/models", timeout=60, trust_env=False
        ).json()
        return answer


@pytest.fixture
def stack(
    tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stack]:
    made = Stack(tmp_path, free_port())
    monkeypatch.setenv("STANDIN_STARTS", str(made.starts_file))
    yield made
    for bridge in made.bridges:
        bridge.close()
        assert is_free(made.port)
    eventually(lambda: is_free(made.port), "a killed trainer's server is still there")


def eventually(done: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_the_server_is_started_on_every_nth_version_and_on_no_other(stack: Stack) -> None:
    bridge = stack.bridge()
    written: list[int] = []
    served = [
        bridge.sync(version, lambda v=version: written.append(v)).version for version in range(8)
    ]  # type: ignore[misc]
    assert served == [0, 0, 2, 2, 4, 4, 6, 6]
    assert written == list(range(8))
    checkpoints = (stack.folder / "checkpoints").resolve()
    assert stack.starts() == ["first", *(str(checkpoints / f"step_{step}") for step in (2, 4, 6))]
    assert [row["id"] for row in stack.server()["data"]] == [str(checkpoints / "step_6")]
    assert (bridge.params_mapped, bridge.params_total) == (2, 2)


def test_no_server_is_started_for_the_last_step_only_to_be_stopped(stack: Stack) -> None:
    bridge = stack.bridge(training_steps=4)
    assert [bridge.sync(version, lambda: None).version for version in range(5)] == [0, 0, 2, 2, 2]


def test_a_resumed_run_begins_with_the_version_of_its_checkpoint(stack: Stack) -> None:
    bridge = stack.bridge()
    assert bridge.sync(5, lambda: None).version == 5
    assert bridge.sync(6, lambda: None).version == 6


def test_a_server_that_was_killed_is_started_again_with_the_same_weights(stack: Stack) -> None:
    bridge = stack.bridge()
    for version in range(3):
        bridge.sync(version, lambda: None)
    pid = stack.server()["pid"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: len(stack.starts()) == 3, "the server was not started again")
    assert stack.starts()[1] == stack.starts()[2]
    assert bridge.sync(3, lambda: None).version == 2
    assert bridge.sync(4, lambda: None).version == 4
    stack.stop.check()


def test_a_server_that_keeps_dying_ends_the_training_with_its_last_words(stack: Stack) -> None:
    bridge = stack.bridge("crashes-later")
    bridge.sync(0, lambda: None)
    with pytest.raises(
        BridgeError,
        match=rf"starting the vLLM server again {REVIVALS} times: .*an illegal memory access",
    ):
        stack.stop.wait(120)
    assert len(stack.starts()) == 1 + REVIVALS
    with pytest.raises(BridgeError, match="gave up"):
        bridge.sync(1, lambda: None)


def test_a_server_that_cannot_load_is_told_with_its_log(stack: Stack) -> None:
    bridge = stack.bridge("crashes")
    with pytest.raises(
        BridgeError, match=r"exited with code 1 .*vllm\.log.*not enough memory for the model"
    ) as caught:
        bridge.sync(0, lambda: None)
    assert "\n" not in str(caught.value)


def test_loading_has_a_deadline(stack: Stack) -> None:
    bridge = stack.bridge("never-ready", vllm_start_timeout=2.0)
    with pytest.raises(
        BridgeError, match=r"within 2 s \((/v1/models answers 503|.+)\); .*--vllm-start-timeout"
    ):
        bridge.sync(0, lambda: None)


def test_a_signal_ends_the_waiting(stack: Stack) -> None:
    bridge = stack.bridge("never-ready")
    stack.stop.request(signal.SIGTERM)
    with pytest.raises(StopRequested):
        bridge.sync(0, lambda: None)


@contextmanager
def another_server(port: int, fault: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A server that no trainer has started."""
    with subprocess.Popen(standin_command("theirs", port, fault)) as other:
        try:
            eventually(lambda: not is_free(port), "the other server does not listen")
            yield other
        finally:
            other.kill()


def test_a_server_that_the_trainer_did_not_start_is_left_alone_and_warned_about(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    with another_server(stack.port) as other:
        bridge = make_bridge(stack.config(max_staleness=2), stack.stop)
        assert isinstance(bridge, ForeignServerBridge)
        assert bridge.serving_dtype() is None
        bridge.connect(torch.nn.Linear(2, 2))
        assert (
            f"did not start the vLLM server at http://localhost:{stack.port}, and will not restart it"
            in caplog.text
        )
        assert "With --max-staleness 2 its rollouts are dropped" in caplog.text
        caplog.clear()
        assert not any(bridge.restarts_at(version) for version in range(10)), (
            "no checkpoint is saved for it"
        )
        assert [bridge.sync(version, lambda: None).version for version in range(4, 9)] == [4] * 5
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [re.search(r"at least (\d+) steps behind", line)[1] for line in warned] == ["2", "4"]  # type: ignore[index]
        assert all("does not answer" not in line for line in warned)
        other.kill()
        other.wait(120)
        bridge.sync(10, lambda: None)
        assert (
            "are at least 6 steps behind the trainer's, and it does not answer now" in caplog.text
        )
        bridge.close()
    assert stack.starts() == ["theirs"]


def test_a_server_that_reports_its_version_is_believed(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    with another_server(stack.port, "version-3"):
        bridge = make_bridge(stack.config(), stack.stop)
        bridge.sync(5, lambda: None)
        assert bridge.sync(6, lambda: None).version == 3
        bridge.close()
    assert "are 3 steps behind the trainer's" in caplog.text


def test_a_foreign_server_that_still_loads_is_waited_for(stack: Stack) -> None:
    with another_server(stack.port, "loads-2"):
        bridge = make_bridge(stack.config(), stack.stop)
        assert isinstance(bridge, ForeignServerBridge)
        bridge.close()


@pytest.mark.parametrize(
    ("fault", "seconds", "message"),
    [
        ("other-program", 120.0, "answers /v1/models with 404"),
        ("never-ready", 1.0, r"was not ready within 1 s \(--vllm-start-timeout\)"),
    ],
)
def test_a_port_of_another_program_is_refused_before_anything_is_loaded(
    stack: Stack, fault: str, seconds: float, message: str
) -> None:
    with (
        another_server(stack.port, fault),
        pytest.raises(
            BridgeError,
            match=f"--vllm-port {stack.port} is taken by a process .* that {message}: stop it",
        ),
    ):
        make_bridge(stack.config(vllm_start_timeout=seconds), stack.stop)


@pytest.mark.parametrize("command", ["serve {modell} {port}", "serve '{model}"])
def test_a_command_that_cannot_be_filled_in_is_told_before_anything_is_loaded(
    stack: Stack, command: str
) -> None:
    with pytest.raises(BridgeError, match="the placeholders are"):
        stack.bridge(vllm_command=command)


def test_a_server_on_another_machine_is_left_alone(stack: Stack) -> None:
    bridge = make_bridge(stack.config(vllm_host="192.0.2.1"), stack.stop)
    assert isinstance(bridge, ForeignServerBridge)
    bridge.close()


@pytest.mark.parametrize(
    ("command", "gets"),
    [
        (None, True),
        ("/opt/venv/bin/vllm serve {model} --port {port}", True),
        ("python -m vllm.entrypoints.openai.api_server --model {model}", True),
        ("/envs/vllm/bin/python -m sglang.launch_server --model-path {model}", False),
    ],
)
def test_computed_flags_come_before_the_users_which_win(
    stack: Stack,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: str | None,
    gets: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    bridge = make_bridge(
        stack.config(vllm_command=command, vllm_args="--max-num-seqs 4"), stack.stop
    )
    assert isinstance(bridge, RestartBridge)
    assert bridge.place_server(torch.device("cpu"), geometry()) is None
    place = bridge.place_server(torch.device("cuda"), geometry())
    assert place is not None
    assert (place.gpus, place.trainer, place.tensor_parallel) == (("5", "6"), "4", 2)
    bridge.add_server_flags(("--tensor-parallel-size", "2"))
    words = bridge._server.command(Served("m", 0))
    assert words[-2:] == ["--max-num-seqs", "4"]
    assert (words[-4:-2] == ["--tensor-parallel-size", "2"]) == gets
    assert (
        "does not start vLLM, so its server gets no --tensor-parallel-size 2" in caplog.text
    ) != gets


def test_gpus_for_the_server_of_a_trainer_on_a_cpu_are_refused(stack: Stack) -> None:
    bridge = make_bridge(stack.config(vllm_gpus="2,3"), stack.stop)
    with pytest.raises(
        ConfigError,
        match="--vllm-gpus 2,3 needs a trainer on a GPU, and this one computes on cpu: leave",
    ):
        bridge.place_server(torch.device("cpu"), geometry())


def test_with_interval_0_no_server_is_started_or_looked_for(stack: Stack) -> None:
    bridge = make_bridge(stack.config(vllm_restart_interval=0, vllm_command=None), stack.stop)
    assert type(bridge) is NoBridge


def test_closing_waits_for_a_watch_that_hangs_up_to_a_deadline_and_says_so(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restart, "CLOSE_SECONDS", 0.1)
    bridge, freed = stack.bridge(), threading.Event()
    bridge._watch = threading.Thread(target=freed.wait, args=(60,), daemon=True)
    bridge._watch.start()
    bridge.close()
    assert (
        f"the watch over the vLLM server at {bridge._server.url} has not ended within 0.1 s: look at its log"
        in caplog.text
    )
    freed.set()


TRAINER = """
import sys, time
sys.path[0] = {root!r}
import torch
from example_trainer.command_line import parse_config
from example_trainer.process import StopSignal
from example_trainer.weight_bridge.factory import make_bridge
bridge = make_bridge(parse_config(sys.argv[1:]), StopSignal())
bridge.connect(torch.nn.Linear(2, 2))
bridge.sync(0, lambda: None)
print("served", flush=True)
time.sleep(600)
"""


@contextmanager
def trainer_process(stack: Stack, fault: str = "") -> Iterator[subprocess.Popen[str]]:
    """Another trainer whose server at the stack's port serves."""
    command = " ".join(standin_command("{model}", "{port}", fault))
    flags = [
        "--model-name",
        "first",
        "--vllm-restart-interval",
        "2",
        "--vllm-port",
        str(stack.port),
    ]
    flags += ["--vllm-command", command, "--log-dir", str(stack.folder / "logs")]
    trainer = [sys.executable, "-c", TRAINER.format(root=str(ROOT)), *flags]
    with subprocess.Popen(trainer, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "served\n"
            yield process
        finally:
            process.kill()


def test_kill_minus_9_of_the_trainer_takes_the_server_along(stack: Stack) -> None:
    with trainer_process(stack) as process:
        family = descendants(process.pid)
        assert len(family) == 2  # guard and server
        process.kill()
        eventually(lambda: not set(family) & parents().keys(), "the server outlived its trainer")


def test_the_server_of_a_killed_trainer_is_recognised_and_its_end_waited_for(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with trainer_process(stack, "ends-slowly") as process:
        family = set(descendants(process.pid))
        process.kill()
        bridge = stack.bridge()
        assert not family & parents().keys()
    assert "Waiting for the vLLM server of an earlier trainer to end" in caplog.text
    assert bridge.sync(3, lambda: None).version == 3
    assert [row["id"] for row in stack.server()["data"]] == ["first"]


def test_what_outlives_its_guard_is_killed(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """A command of the user's may start a server that the guard's death leaves alive."""
    with trainer_process(stack, "in-a-child") as process:
        guard, *rest = descendants(process.pid)
        os.kill(guard, signal.SIGKILL)
        process.kill()
        process.wait(120)
        left = rest[-1]
        assert left in parents()
        end_left_over_server(stack.port, 0.2, time.sleep)
        assert left not in parents()
    assert "Killing the vLLM server of an earlier trainer" in caplog.text
    assert is_free(stack.port)


def test_the_server_of_a_trainer_that_lives_is_not_taken_for_a_foreign_one(stack: Stack) -> None:
    with (
        trainer_process(stack) as process,
        pytest.raises(
            BridgeError,
            match=rf"--vllm-port {stack.port} belongs to another trainer that is alive \(process ",
        ),
    ):
        make_bridge(stack.config(), stack.stop)
    assert process.returncode == -signal.SIGKILL


def test_a_server_that_cannot_be_recorded_is_started_with_a_warning(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(owned_server, "write_record", full)
    assert stack.bridge().sync(0, lambda: None).version == 0
    assert "This server is not recorded (No space left on device)" in caplog.text


def test_a_record_that_is_damaged_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record_file(1, tmp_path).write_text("{}")
    assert read_record(1, tmp_path) is None
    assert "cannot be read and is ignored (KeyError" in caplog.text
    end_left_over_server(1, 1.0, time.sleep, tmp_path)
