"""The trainer as a process, with the real rollout service and no inference server, fed with groups
made up beforehand.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from example_trainer.child_processes.processes import ManagedProcess
from example_trainer.launcher import roles
from tests.conftest import ROOT, Processes
from tests.example_trainer.models.transformers_cases import checkpoint

pytestmark = [pytest.mark.nightly, pytest.mark.e2e]

STEPS = 5
TIMED = (
    "tokens_per_second", "forwarded_tokens_per_second", "seconds_wait", "seconds_train", "seconds_sync", "waiting_share", "mfu",
    "peak_memory_bytes",
)  # fmt: skip
"""Figures that differ from run to run."""
SEQUENCES = 4


def made_up_group(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    prompt = [rng.randrange(61) for _ in range(3)]
    responses = [[rng.randrange(61) for _ in range(rng.randint(2, 10))] for _ in range(SEQUENCES)]
    return {
        "tokens": [prompt + response for response in responses],
        "masks": [[-100] * 3 + response for response in responses],
        "scores": [float(i % 2) for i in range(SEQUENCES)],
        "inference_logprobs": [
            [1.0] * 3 + [-4.0 + rng.random() for _ in response] for response in responses
        ],
        "weight_versions": [0] * SEQUENCES,
    }


def small_flags(model: Path, service: str, folder: Path, **others: roles.Value) -> list[str]:
    """Return the flags of a trainer of a small model, without an inference server."""
    values: dict[str, roles.Value] = {
        "model_name": model,
        "atropos_url": service,
        "lr": 1e-2,
        "seq_len": 64,
        "num_threads": 1,
        "save_path": folder / "checkpoints",
        "log_dir": folder / "logs",
        "vllm_restart_interval": 0,
    }
    return roles.flags(**values | others)


class Run:
    """One rollout service and one trainer."""

    def __init__(self, processes: Processes, port: int, model: Path, folder: Path) -> None:
        self.processes, self.model, self.folder = processes, model, folder
        self.url = f"http://127.0.0.1:{port}"
        self.service = processes.start_service(port)

    def post(self, *numbers: int) -> None:
        for number in numbers:
            httpx.post(
                f"{self.url}/scored_data", json=made_up_group(number), timeout=60
            ).raise_for_status()

    def trainer(self, *options: str) -> ManagedProcess:
        command = [sys.executable, "-u", str(ROOT / "example_trainer" / "grpo.py")]
        command += small_flags(self.model, self.url, self.folder, training_steps=STEPS)
        command += roles.flags(lr_schedule="linear", batch_size=3, gradient_accumulation_steps=1)
        return self.processes.start("trainer", [*command, *options], directory=self.folder)

    def train(self, *options: str) -> str:
        """Train to the end; returns what the trainer wrote."""
        return self.processes.finish(self.trainer(*options), seconds=120)

    def kill_after_two_steps(self, *options: str) -> None:
        """Kill a trainer that has saved its second step, and post what the later steps take."""
        self.post(0, 1)
        trainer = self.trainer(*options, "--checkpoint-interval", "1")
        saved = f"Saved checkpoint {self.folder / 'checkpoints' / 'step_2'}"
        self.processes.wait_for_text(trainer, saved, seconds=120)
        self.processes.kill(trainer)
        self.post(2, 3, 4)

    def final(self, file: str) -> dict[str, torch.Tensor]:
        """The tensors of a file of the last checkpoint."""
        return load_file(self.folder / "checkpoints" / f"step_{STEPS}" / file)

    def failed(self, trainer: ManagedProcess) -> list[str]:
        """Wait for the trainer to end with status 1; returns the lines that it wrote."""
        trainer.guard.wait(timeout=120)
        assert trainer.poll() == 1
        return trainer.log_path.read_text().splitlines()

    def unacknowledged_at(self, step: int) -> Callable[[], str | None]:
        """Return a probe: None once the service knows that the trainer has learned this step."""

        def probe() -> str | None:
            version = httpx.get(f"{self.url}/stats", timeout=60).json()["sampling_version"]
            return None if version == step else f"the service is at version {version}"

        return probe

    def saved(self) -> list[str]:
        """The names of what is in the folder of the checkpoints, but for the file that names the
        run.
        """
        names = {path.name for path in (self.folder / "checkpoints").iterdir()}
        assert "run.json" in names
        return sorted(names - {"run.json"})

    def rows(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self.folder / "logs" / "metrics.jsonl").read_text().splitlines()
        ]


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(
    processes: Processes, free_port: Callable[[], int], model: Path, tmp_path: Path
) -> MakeRun:
    def make(name: str, start: Path = model) -> Run:
        (tmp_path / name).mkdir()
        return Run(processes, free_port(), start, tmp_path / name)

    return make


def assert_alike(one: Run, other: Run) -> None:
    """Compare the weights and the optimizer's state of the last checkpoints, bit for bit."""
    for file in ("model.safetensors", "trainer_state/optimizer.safetensors"):
        mine, theirs = one.final(file), other.final(file)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine), file


BATCH = ["--batch-size", "4"]


def test_stopping_and_resuming_gives_the_weights_of_one_run(make_run: MakeRun) -> None:
    whole = make_run("whole")
    whole.post(*range(STEPS))
    text = whole.train(*BATCH)
    assert f"Step 1/{STEPS}  reward 0.500" in text
    assert f"Step {STEPS}/{STEPS} " in text
    assert "ERROR" not in text

    parts = make_run("parts")
    parts.kill_after_two_steps(*BATCH)
    text = parts.train(*BATCH, "--resume", "auto")
    assert "Resuming from" in text
    assert f"Step 3/{STEPS} " in text
    assert f"Step 2/{STEPS} " not in text

    assert_alike(whole, parts)
    start = load_file(whole.model / "model.safetensors")
    norm = "model.norm.weight"
    assert not torch.equal(start[norm], whole.final("model.safetensors")[norm])

    for row, other in zip(whole.rows(), parts.rows(), strict=True):
        same = set(row) - {*TIMED, "queue_size"}
        assert {name: row[name] for name in same} == {name: other[name] for name in same}
    assert [row["weight_version"] for row in whole.rows()] == list(range(1, STEPS + 1))
    assert [row["age_max"] for row in whole.rows()] == list(range(STEPS))
    final = whole.folder / "checkpoints" / f"step_{STEPS}"
    assert (final / "tokenizer.json").read_text() == "{}"
    assert (final / "config.json").read_bytes() == (whole.model / "config.json").read_bytes()
    Qwen3ForCausalLM.from_pretrained(final)


def test_a_model_of_transformers_is_trained_and_resumed_alike(make_run: MakeRun) -> None:
    whole, parts = (make_run(name, checkpoint("Qwen3Next")) for name in ("whole", "parts"))
    options = [*BATCH, "--kl-coef", "0.1"]
    whole.post(*range(STEPS))
    text = whole.train(*options)
    assert "model: tier 2, transformers' Qwen3NextForCausalLM, not exact" in text
    assert "model: sequences are forwarded one per row" in text
    assert f"Step {STEPS}/{STEPS} " in text
    parts.kill_after_two_steps(*options)
    parts.train(*options, "--resume", "auto")
    assert_alike(whole, parts)


def test_8_bit_moments_resume_bit_for_bit_offloaded_or_not(
    make_run: MakeRun, wide_model: Path
) -> None:
    """A run that was killed and went on with its state in host memory has the weights and the state
    of a whole one.
    """
    whole, parts = (make_run(name, wide_model) for name in ("whole", "parts"))
    small = [*BATCH, "--optimizer", "adamw-8bit"]
    whole.post(*range(STEPS))
    text = whole.train(*small)
    assert "Memory plan: adamw-8bit, masters and moments on cpu, layers kept; " in text
    parts.kill_after_two_steps(*small)
    text = parts.train(*small, "--optimizer-offload", "--resume", "auto")
    assert "Memory plan: adamw-8bit, masters and moments in host memory, layers kept; " in text
    assert "converted" not in text
    assert_alike(whole, parts)
    codes = whole.final("trainer_state/optimizer.safetensors")[
        "exp_avg_codes.model.embed_tokens.weight"
    ]
    assert codes.dtype == torch.uint8
    assert codes.unique().numel() > 50


def test_sigterm_saves_what_was_learned_and_ends(make_run: MakeRun) -> None:
    run = make_run("run")
    run.post(0, 1)
    trainer = run.trainer(*BATCH, "--checkpoint-interval", "0")
    run.processes.wait_for_text(trainer, f"Step 2/{STEPS}", seconds=120)
    assert run.processes.stop(trainer) == 128 + signal.SIGTERM
    text = trainer.log_path.read_text()
    assert "Stopped by SIGTERM" in text
    assert "Traceback" not in text
    assert run.saved() == ["step_2"]


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again_unasked(
    make_run: Callable[[str], Run],
) -> None:
    run = make_run("run")
    run.post(0, 1)
    trainer = run.trainer(*BATCH, "--checkpoint-interval", "1")
    saved = run.folder / "checkpoints"
    run.processes.wait_for_text(trainer, f"Saved checkpoint {saved}/step_2", seconds=120)
    run.processes.wait_until("two acknowledged steps", run.unacknowledged_at(2), 60)
    run.processes.kill(trainer)
    saved.rename(run.folder / "elsewhere")
    trainer = run.trainer(*BATCH, "--resume", "auto")
    refused = run.failed(trainer)[-1]
    run.processes.stop(trainer)  # its end is not a fault from here on
    assert f"--resume auto: {saved} has no checkpoint to go on from, but run 20" in refused
    assert "saved step 2 there. Bring its step folders back, or leave --resume out" in refused
    assert not saved.exists()
    elsewhere = run.trainer(*BATCH, "--resume", "auto", "--save-path", str(run.folder / "third"))
    warning = f"saved step 2 into {saved} (give that --save-path to continue it)"
    run.processes.wait_for_text(elsewhere, warning, seconds=120)
    run.processes.kill(elsewhere)
    again = run.trainer(*BATCH)
    run.processes.wait_for_text(again, "Registered with the rollout service", seconds=120)


def test_a_service_that_stays_away_ends_the_trainer_with_one_line(
    make_run: MakeRun,
) -> None:
    run = make_run("run")
    run.post(0)
    trainer = run.trainer(*BATCH, "--checkpoint-interval", "0", "--service-timeout", "2")
    run.processes.wait_for_text(trainer, f"Step 1/{STEPS}", seconds=120)
    run.processes.kill(run.service)
    lines = run.failed(trainer)
    assert lines[-1].startswith("ERROR ")
    # On a slow machine the trainer may still be reporting its step when the service ends.
    silence = r"(GET|POST) /[a-z/-]+: .* for \d+ s, giving up; .*--service-timeout"
    assert re.search(silence, lines[-1])
    assert run.saved() == ["step_1"]


def test_groups_that_cannot_be_trained_on_end_the_trainer_with_one_line(
    make_run: MakeRun,
) -> None:
    run = make_run("run")
    group = made_up_group(0)
    group["tokens"][0][-1] = group["masks"][0][-1] = (
        61  # as if another model's tokenizer had been used
    )
    httpx.post(f"{run.url}/scored_data", json=group, timeout=60).raise_for_status()
    trainer = run.trainer(*BATCH, "--max-skipped-batches", "0")
    last = run.failed(trainer)[-1]
    assert last.startswith("ERROR ")
    assert (
        "holds nothing to train on: group 0: tokens[0] holds 61, and the model's ids go from 0 to 60"
        in last
    )


def test_a_model_that_is_not_there_ends_the_trainer_with_one_line(
    make_run: MakeRun,
) -> None:
    run = make_run("run")
    trainer = run.trainer("--model-name", "/nowhere/model")
    (line,) = [line for line in run.failed(trainer) if line.startswith("ERROR")]
    assert "model folder /nowhere/model does not exist" in line
