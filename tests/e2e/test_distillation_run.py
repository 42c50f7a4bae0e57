"""A student trains on a teacher's logprobs of its samples, all processes real; the teacher is
killed and started again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from example_trainer.launcher import roles
from example_trainer.models.hf_checkpoint import load_model
from tests.conftest import ROOT, Processes
from tests.e2e.bridge_helpers import trainer_logprobs
from tests.e2e.conftest import SERVER_SECONDS, trainer_command, vllm_command
from tests.still_running import json_rows

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(480)]

STARTER = ROOT / "assets" / "starter_model"
STEPS, STEPS_BEFORE = 8, 2
NOT_TRAINED = -100


def make_teacher(folder: Path) -> Path:
    """The starter model with other weights, and so another opinion of what it samples."""
    shutil.copytree(STARTER, folder)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    noise = {
        n: torch.randn(w.shape, generator=generator) * 0.3 * w.float().std()
        for n, w in weights.items()
        if w.dim() == 2
    }
    moved = {
        name: (weight + noise[name].to(weight.dtype) if name in noise else weight)
        for name, weight in weights.items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_student_trains_on_what_its_teacher_says_which_dies_on_the_way(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    teacher_model = make_teacher(tmp_path / "teacher")
    ports = {"student": free_port(), "teacher": free_port(), "service": free_port()}
    urls = {name: f"http://localhost:{port}" for name, port in ports.items()}

    def start_teacher() -> Any:
        command = vllm_command(teacher_model, ports["teacher"], "--max-model-len", "256")
        return processes.start(
            "teacher", command, {"VLLM_ENABLE_SHARED_WEIGHTS": None, "OMP_NUM_THREADS": "1"}
        )

    teacher = start_teacher()
    command = vllm_command(STARTER, ports["student"], "--max-model-len", "256")
    environment = {
        "VLLM_ENABLE_SHARED_WEIGHTS": "1",
        "LOGDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    processes.start("student", command, environment)
    processes.start_service(ports["service"])
    words = roles.environment(
        "arithmetic",
        urls["service"],
        [urls["student"]],
        settings={
            "teacher_url": urls["teacher"],
            "group_size": 4,
            "max_token_length": 24,
            "seed_rollouts": True,
            "data_path_to_save_groups": tmp_path / "groups.jsonl",
            "eval_size": 2,
        },
    )
    sender = processes.start("environment", words, may_finish=True)
    processes.wait_for_http(f"{urls['student']}/health_generate", SERVER_SECONDS)
    command = trainer_command(
        STARTER,
        urls["service"],
        tmp_path,
        vllm_port=ports["student"],
        advantages="zero",
        distill_coef=1,
        lr=1e-4,
        training_steps=STEPS,
        batch_size=16,
        gradient_accumulation_steps=1,
        seq_len=256,
        num_threads=1,
    )
    trainer = processes.start("trainer", command)

    def rows() -> list[dict[str, Any]]:
        return json_rows(tmp_path / "trainer" / "metrics.jsonl")

    processes.wait_until(
        "two steps", lambda: None if len(rows()) >= STEPS_BEFORE else f"{len(rows())} steps", 240
    )
    processes.kill(teacher)
    processes.wait_for_text(sender, f"Waiting for teacher at {urls['teacher']}", 180)
    start_teacher()
    processes.finish(trainer, 240)
    text = processes.finish(sender, 180)

    assert "(none dropped)" in text, "a group that waited is a group that was sent"
    assert f"teacher at {urls['teacher']}: there after" in text
    found = rows()
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert all(row["grad_norm"] > 0 and row["teacher_kl"] > 0 for row in found)

    its_model = load_model(str(teacher_model), torch.float32)
    groups = json_rows(tmp_path / "groups.jsonl")
    sequences = []
    for group in groups:
        for tokens, mask, ids, logprobs in zip(
            *(group[name] for name in ("tokens", "masks", "distill_token_ids", "distill_logprobs")),
            strict=True,
        ):
            sampled = [at for at, token in enumerate(mask) if token != NOT_TRAINED]
            assert [at for at, entry in enumerate(ids) if entry] == sampled
            assert [ids[at] for at in sampled] == [[tokens[at]] for at in sampled]
            sequences.append(
                (tokens, sampled[0], torch.tensor([logprobs[at][0] for at in sampled]))
            )
    for tokens, prompt, said in sequences[:4] + sequences[-4:]:  # before the teacher died and after
        torch.testing.assert_close(
            said, trainer_logprobs(its_model, tokens[:prompt], tokens[prompt:]), rtol=0, atol=1e-4
        )
