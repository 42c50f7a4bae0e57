"""The bridge that restarts a server of its own, over a small server that is not ours: real processes, real HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

from example_trainer.child_processes.guard import descendants, parents
from example_trainer.child_processes.ports import is_free
from example_trainer.config import TrainerConfig
from example_trainer.errors import BridgeError, ConfigError
from example_trainer.process import StopRequested, StopSignal
from example_trainer.weight_bridge import restart
from example_trainer.weight_bridge.factory import make_bridge
from example_trainer.weight_bridge.restart import REVIVALS, RestartBridge

ROOT = Path(__file__).resolve().parents[3]
STANDIN = Path(__file__).with_name("standin_vllm.py")


class Stack:
    """A bridge over a stand-in server, and what a test wants to know about it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.stop = folder, port, StopSignal()
        self.starts_file = folder / "starts"
        self.bridges: list[RestartBridge] = []

    def config(self, fault: str = "", **options: object) -> TrainerConfig:
        command = f"{sys.executable} {STANDIN} {{model}} {{port}} {fault}"
        values = {"model_name": "first", "vllm_restart_interval": 2, "training_steps": 9, "vllm_port": self.port}
        values |= {"vllm_command": command, "save_path": self.folder / "checkpoints", "log_dir": self.folder / "logs"}
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

    def server(self) -> dict[str, object]:
        answer: dict[str, object] = httpx.get(f"http://localhost:{self.port}/v1/models", timeout=60, trust_env=False).json()
        return answer


@pytest.fixture
def stack(tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    made = Stack(tmp_path, free_port())
    monkeypatch.setenv("STANDIN_STARTS", str(made.starts_file))
    yield made
    for bridge in made.bridges:
        bridge.close()
    assert is_free(made.port)


def eventually(done: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_the_server_is_started_on_every_nth_version_and_on_no_other(stack: Stack) -> None:
    bridge = stack.bridge()
    written: list[int] = []
    served = [bridge.sync(version, lambda v=version: written.append(v)).version for version in range(8)]  # type: ignore[misc]
    assert served == [0, 0, 2, 2, 4, 4, 6, 6]
    assert written == list(range(8))
    checkpoints = (stack.folder / "checkpoints").resolve()
    assert stack.starts() == ["first", *(str(checkpoints / f"step_{step}") for step in (2, 4, 6))]
    assert stack.server()["data"] == [{"id": str(checkpoints / "step_6")}]
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
    with pytest.raises(BridgeError, match=rf"starting the vLLM server again {REVIVALS} times: .*an illegal memory access"):
        stack.stop.wait(120)
    assert len(stack.starts()) == 1 + REVIVALS
    with pytest.raises(BridgeError, match="gave up"):
        bridge.sync(1, lambda: None)


def test_a_server_that_cannot_load_is_told_with_its_log(stack: Stack) -> None:
    bridge = stack.bridge("crashes")
    with pytest.raises(BridgeError, match=r"exited with code 1 .*vllm\.log.*not enough memory for the model") as caught:
        bridge.sync(0, lambda: None)
    assert "\n" not in str(caught.value)


def test_loading_has_a_deadline(stack: Stack) -> None:
    bridge = stack.bridge("never-ready", vllm_start_timeout=2.0)
    with pytest.raises(BridgeError, match=r"within 2 s \((/v1/models answers 503|.+)\); .*--vllm-start-timeout"):
        bridge.sync(0, lambda: None)


def test_a_signal_ends_the_waiting(stack: Stack) -> None:
    bridge = stack.bridge("never-ready")
    stack.stop.request(signal.SIGTERM)
    with pytest.raises(StopRequested):
        bridge.sync(0, lambda: None)


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(stack: Stack) -> None:
    with subprocess.Popen([sys.executable, STANDIN, "someone", str(stack.port)]) as other:
        eventually(lambda: not is_free(stack.port), "the other server does not listen")
        with pytest.raises(
            BridgeError, match=f"--vllm-port {stack.port} is taken by a process that this trainer did not start"
        ):
            stack.bridge()
        other.kill()


@pytest.mark.parametrize("command", ["serve {modell} {port}", "serve '{model}"])
def test_a_command_that_cannot_be_filled_in_is_told_before_anything_is_loaded(stack: Stack, command: str) -> None:
    with pytest.raises(BridgeError, match="the placeholders are"):
        stack.bridge(vllm_command=command)


def test_a_server_on_another_machine_cannot_be_owned(stack: Stack) -> None:
    with pytest.raises(ConfigError, match=r"--vllm-host 192\.0\.2\.1 is another machine"):
        stack.bridge(vllm_host="192.0.2.1")


def test_closing_waits_for_a_watch_that_hangs_up_to_a_deadline_and_says_so(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restart, "CLOSE_SECONDS", 0.1)
    bridge, freed = stack.bridge(), threading.Event()
    bridge._watch = threading.Thread(target=freed.wait, args=(60,), daemon=True)
    bridge._watch.start()
    bridge.close()
    assert f"the watch over the vLLM server at {bridge._server.url} has not ended within 0.1 s: look at its log" in caplog.text
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


def test_kill_minus_9_of_the_trainer_takes_the_server_along(stack: Stack) -> None:
    command = f"{sys.executable} {STANDIN} {{model}} {{port}}"
    flags = ["--model-name", "first", "--vllm-restart-interval", "2", "--vllm-port", str(stack.port)]
    flags += ["--vllm-command", command, "--log-dir", str(stack.folder / "logs")]
    trainer = [sys.executable, "-c", TRAINER.format(root=str(ROOT)), *flags]
    with subprocess.Popen(trainer, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "served\n"
        family = descendants(process.pid)
        assert len(family) == 2  # guard and server
        process.kill()
        eventually(lambda: not set(family) & parents().keys(), "the server outlived its trainer")
