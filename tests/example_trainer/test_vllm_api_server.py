"""What the server refuses before it loads anything: one line that says what and what to do, and a status that is not 0."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def refuse(*flags: str, **environment: str) -> str:
    """Run the server by path, from another folder, with flags that it must refuse; returns the one line it says."""
    command = [sys.executable, str(ROOT / "example_trainer/vllm_api_server.py"), *flags]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd="/", env={**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    )
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR vllm_api_server: ")]
    assert len(errors) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return errors[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return str(folder)


def test_a_folder_that_is_not_there() -> None:
    assert "--model /no/such/model: no such folder" in refuse("--model", "/no/such/model")


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    assert f"--model {tmp_path}: the folder has no config.json" in refuse("--model", str(tmp_path))


def test_a_model_id_that_nobody_has() -> None:
    assert "--model nobody/nothing: no such folder here, and the Hugging Face Hub" in refuse("--model", "nobody/nothing")


def test_an_unknown_flag_names_the_nearest(model: str) -> None:
    assert "unknown flag --tensor-parallel-sise; did you mean --tensor-parallel-size?" in refuse(
        "--model", model, "--tensor-parallel-sise", "2"
    )


def test_a_port_in_use(model: str, free_port: Callable[[], int]) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("", port))
        taken.listen()
        assert f"cannot listen on port {port}" in refuse("--model", model, "--port", str(port))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--pipeline-parallel-size", "2"), "only tensor parallelism"),
        (("--enable-sleep-mode",), "moves the weights"),
        (("--quantization", "fp8"), "differ from the trainer's"),
    ],
)
def test_what_would_move_shared_weights(model: str, free_port: Callable[[], int], flags: tuple[str, ...], reason: str) -> None:
    port = str(free_port())
    assert reason in refuse("--model", model, "--port", port, *flags, VLLM_ENABLE_SHARED_WEIGHTS="1")


def test_a_deadline_that_is_none(model: str) -> None:
    assert "--bridge-timeout 0 must be larger than 0" in refuse("--model", model, "--bridge-timeout", "0")
