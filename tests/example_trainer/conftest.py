"""Shared parts of the trainer's tests: a small model, and trainers in the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from example_trainer.launcher import roles
from tests.conftest import Processes
from tests.example_trainer.in_process import Trainers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with random weights."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `model`, with matrices that are large enough for 8-bit moments."""
    return make_checkpoint(
        tmp_path_factory.mktemp("wide_model"), vocab_size=64, hidden_size=64, intermediate_size=128
    )


def make_checkpoint(folder: Path, **sizes: int) -> Path:
    """Write a checkpoint with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64} | sizes,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def rollout_service(session_processes: Processes, free_port: Callable[[], int]) -> str:
    """A rollout service's address."""
    port = free_port()
    session_processes.start("service", roles.service("127.0.0.1", port, store="memory"))
    session_processes.wait_for_http(f"http://127.0.0.1:{port}", seconds=180)
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def trainers(
    rollout_service: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Trainers]:
    """Trainers of one run, which has a folder of its own; see in_process."""
    threads = torch.get_num_threads()
    yield Trainers(rollout_service, model, tmp_path, monkeypatch)
    torch.set_num_threads(threads)  # which a trainer sets for the whole process
