"""Mixtures of experts with the real vLLM: every update arrives, on one rank and on two."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from example_trainer.models.hf_checkpoint import load_model
from studies.starter_model import mixture
from tests.conftest import Processes
from tests.e2e.bridge_helpers import (
    TOLERANCE,
    checksums,
    joined,
    largest_difference,
    new_weights,
    served_logprobs,
    trainer_logprobs,
)
from tests.e2e.conftest import BRIDGE_TIMEOUT, VllmServer, save_byte_tokenizer, start_vllm
from tests.e2e.test_learned_layouts import SERVED, train
from tests.tiny_models import make_model
from vllm_patching.weights.families import Geometry, parameters

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

STORED = "Experts of 1 layers of Qwen3MoeForCausalLM are stored as they are loaded"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of one dense layer and one of experts."""
    folder = tmp_path_factory.mktemp("mixture")
    experts = {"num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [0]}
    make_model("Qwen3Moe", folder, **SERVED, head_dim=32, **experts)
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def server(
    model: Path,
    module_processes: Processes,
    free_port: Callable[[], int],
    tmp_path_factory: pytest.TempPathFactory,
) -> VllmServer:
    flags = ("--bridge-timeout", str(BRIDGE_TIMEOUT))
    folder = tmp_path_factory.mktemp("vllm")
    return start_vllm(module_processes, free_port, model, folder, flags=flags)


@pytest.mark.parametrize("kind", ["direct", "overlapped", "single_copy"])
def test_every_update_arrives_whole(
    server: VllmServer, kind: str, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = load_model(str(server.model), torch.float32)
    assert STORED in server.log
    with joined(server, kind, free_port, monkeypatch) as (bridge, trained):
        assert bridge.params_mapped == bridge.params_total == len(list(trained.parameters()))
        assert largest_difference(server, trained) < TOLERANCE
        report = bridge.sync(1, new_weights(trained, 1))
        assert server.state()["checksums"] == checksums(server, trained) == [report.checksum]
        assert largest_difference(server, trained) < TOLERANCE
        assert largest_difference(server, stale) > 0.01, "old weights would be seen"


def test_a_trainer_broadcasts_and_saves_what_vllm_serves(
    server: VllmServer, processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    train(server, processes, free_port(), tmp_path, tier=1)
    trained = load_model(str(tmp_path / "checkpoints" / "step_2"), torch.float32)
    assert largest_difference(server, trained) < TOLERANCE


def test_two_ranks_get_their_parts_of_every_expert(
    model: Path,
    processes: Processes,
    free_port: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One prompt is sampled from: two ranks on two busy cores take seconds for a token."""
    flags = ("--tensor-parallel-size", "2", "--bridge-timeout", "60")
    server = start_vllm(processes, free_port, model, tmp_path, flags=flags)
    assert server.log.count(STORED) == 2
    with joined(server, "overlapped", free_port, monkeypatch) as (bridge, trained):
        report = bridge.sync(1, new_weights(trained, 1))
        expected = checksums(server, trained)
        assert server.state()["checksums"] == expected
        assert expected[0] == report.checksum != expected[1]
        prompt = [72, 101, 108, 108, 111]
        answer = server.generate(prompt, max_tokens=4, seed=7, ignore_eos=True)
        ours = trainer_logprobs(trained, prompt, answer["token_ids"][0])
        torch.testing.assert_close(served_logprobs(answer, 0), ours, atol=TOLERANCE, rtol=0)


def test_the_quick_start_trains_a_mixture(processes: Processes, tmp_path: Path) -> None:
    """The starter model as a mixture, which answers like it and so gets rewards."""
    mixture.main(["--output", str(tmp_path / "model")])
    options = ["--environment", "arithmetic", "--model", tmp_path / "model", "--cpu"]
    options += ["--steps", "2", "--eval-size", "8", "--output", tmp_path / "run"]
    command = [sys.executable, "-m", "example_trainer.launcher.quickstart", *map(str, options)]
    processes.finish(processes.start("quickstart", command, may_finish=True), seconds=300)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["weight_updates"]) == (2, 2)
    geometry = Geometry.from_config(json.loads((tmp_path / "model" / "config.json").read_text()))
    assert summary["params_mapped"] == summary["params_total"] == len(parameters(geometry))
