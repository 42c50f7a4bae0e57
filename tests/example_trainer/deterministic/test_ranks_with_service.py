"""A deterministic trainer of two FSDP2 ranks, with the real rollout service and a server that names
the reference kernels.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.deterministic.pairing import deterministic_decoder, model_provenance
from example_trainer.models import Decoder, load_model
from example_trainer.models.packing import Packing
from tests.conftest import ROOT, Processes
from tests.example_trainer.parallel.test_torchrun_trainer import TORCHRUN, worker
from tests.example_trainer.test_grpo import Run, made_up_group
from tests.light_servers import LightServer, Starter

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

STEPS = 3


@pytest.fixture(scope="module")
def sampler(model: Path) -> Decoder:
    """The first weights, with the operations of a server that stands in for vLLM."""
    return load_model(str(model), torch.float32, "cpu", deterministic_decoder)


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    one = Starter(tmp_path_factory.mktemp("servers"))
    yield one
    one.process.terminate()
    one.process.wait()


@pytest.fixture
def server(
    starter: Starter, sampler: Decoder, model: Path, free_port: Callable[[], int]
) -> Iterator[LightServer]:
    kernels = model_provenance(sampler)
    report = {"provenance": kernels, "rotary_table": kernels["rotary_table"]}
    one = LightServer(starter, free_port(), model=model, deterministic=report)
    one.start()
    yield one
    one.kill()


def exact_group(sampler: Decoder, number: int) -> dict[str, Any]:
    """A group with the logprobs that the first weights give its tokens."""
    group = made_up_group(number)
    for row, (tokens, mask) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
        prompt, ids = mask.count(-100), torch.tensor(tokens)
        with torch.no_grad():
            hidden = sampler(ids[:-1], Packing([len(ids) - 1]))[prompt - 1 :]
            counts = Packing([len(ids) - prompt])
            logprobs, _ = sampler.chosen_logprobs(hidden, ids[prompt:], counts)
        group["inference_logprobs"][row][prompt:] = logprobs.tolist()
    return group


class Ranks(Run):
    """One rollout service, and trainers of two ranks."""

    def start(self, server: LightServer, *options: str) -> ManagedProcess:
        chosen = {
            "model-name": self.model,
            "atropos-url": self.url,
            "save-path": self.folder / "checkpoints",
            "log-dir": self.folder / "logs",
            "weight-bridge-mode": "shared_vllm",
            "vllm-port": server.port,
            "max-staleness": 5,
            "training-steps": STEPS,
            "batch-size": 1,
            "gradient-accumulation-steps": 4,
            "checkpoint-interval": 1,
            "seq-len": 64,
            "lr": 1e-2,
            "kl-coef": 0.05,
            "num-threads": 1,
            "rank-timeout": 60,
        }
        words = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
        script = str(ROOT / "example_trainer" / "grpo.py")
        command = [sys.executable, "-m", *TORCHRUN, script, *words, *options]
        command += ["--use-shared-memory", "--deterministic"]
        environment = {"PYTHONPATH": str(ROOT)}
        return self.processes.start(
            "trainer", command, environment, directory=self.folder, grace=30, may_finish=True
        )

    def post_exact(self, sampler: Decoder, *numbers: int) -> None:
        for number in numbers:
            group = exact_group(sampler, number)
            httpx.post(f"{self.url}/scored_data", json=group, timeout=60).raise_for_status()

    def hashes(self) -> dict[int, str]:
        return {row["step"]: row["weights_sha"] for row in self.rows()}


@pytest.fixture
def make_run(
    processes: Processes, free_port: Callable[[], int], model: Path, tmp_path: Path
) -> Callable[[str], Ranks]:
    def make(name: str) -> Ranks:
        (tmp_path / name).mkdir()
        return Ranks(processes, free_port(), model, tmp_path / name)

    return make


def test_a_run_whose_rank_was_killed_has_the_weights_of_another(
    make_run: Callable[[str], Ranks], server: LightServer, sampler: Decoder
) -> None:
    """Tokens of the first weights are compared; later steps train on them as older ones."""
    whole, killed = make_run("whole"), make_run("killed")
    whole.post_exact(sampler, 0, 1, 2)
    trainer = whole.start(server)
    assert trainer.guard.wait(timeout=240) == 0, trainer.log_path.read_text()
    first = whole.rows()[0]
    assert (first["compared_tokens"] > 0, first["mismatched_tokens"]) == (True, 0)
    expected = whole.hashes()
    assert len(set(expected.values())) == STEPS

    killed.post_exact(sampler, 0)
    trainer = killed.start(server)
    saved = killed.folder / "checkpoints" / "step_1"
    killed.processes.wait_for_text(trainer, f"Saved checkpoint {saved}", seconds=120)
    os.kill(worker(trainer, 1).pid, signal.SIGKILL)
    assert trainer.guard.wait(timeout=60) != 0
    killed.post_exact(sampler, 1, 2)
    trainer = killed.start(server, "--resume", "auto")
    assert trainer.guard.wait(timeout=240) == 0, trainer.log_path.read_text()
    assert killed.hashes() == expected


def test_one_wrong_bit_ends_both_ranks_with_one_line(
    make_run: Callable[[str], Ranks], server: LightServer, sampler: Decoder
) -> None:
    run, group = make_run("wrong"), exact_group(sampler, 0)
    logprobs = group["inference_logprobs"][2]
    logprobs[-1] = float(torch.tensor(logprobs[-1]).nextafter(torch.tensor(0.0)))
    httpx.post(f"{run.url}/scored_data", json=group, timeout=60).raise_for_status()
    trainer = run.start(server)
    assert trainer.guard.wait(timeout=240) != 0
    text = trainer.log_path.read_text()
    errors = re.findall(r"^ERROR .*(1 of \d+ tokens of a microbatch differ .*)$", text, re.M)
    assert len(errors) == 2, text
    assert errors[0] == errors[1]
    assert "first group 0, sequence 2, position" in errors[0]
