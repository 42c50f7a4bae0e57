"""The one loop on real parts: a step's line, and the choice of traced steps."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from example_trainer.batch.groups import SamplerLogprobs
from example_trainer.batch.prefetch import Batches
from example_trainer.errors import ConfigError
from example_trainer.models import router
from example_trainer.observe.metrics import step_line
from example_trainer.process import StopRequested
from example_trainer.training import assembly
from example_trainer.training.trainer import Trainer
from example_trainer.weight_bridge.base import NoBridge, SyncReport
from studies.starter_model import mixture
from tests.example_trainer.in_process import STEPS, Trainers
from tests.example_trainer.test_grpo import made_up_group
from vllm_patching.protocol.timeline import VARIABLE

pytestmark = pytest.mark.timeout(240)


def test_the_row_of_a_step_is_of_its_batch(
    trainers: Trainers,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    trainers.post(*range(STEPS))
    assert trainers.train("--clip-eps", "0.3")
    assert caplog.text.count("--clip-eps 0.3 does nothing: ") == 1
    head, *spans = map(
        json.loads, (tmp_path / "timeline-trainer-rank0.jsonl").read_text().splitlines()
    )
    assert (head["role"], len(spans)) == ("trainer", 3 * STEPS)
    for number, row in enumerate(trainers.rows()):
        for name, span in zip(("wait", "train", "sync"), spans[3 * number :], strict=False):
            assert (span["what"], span["version"]) == (name, number + 1)
            assert math.isclose(
                (span["end"] - span["begin"]) / 1e9, row[f"seconds_{name}"], abs_tol=1e-6
            )
        group = made_up_group(number)
        trained = sum(token != -100 for mask in group["masks"] for token in mask)
        tokens = sum(len(row) for row in group["tokens"])
        assert (row["step"], row["weight_version"], row["sequences"], row["bins"]) == (
            number + 1,
            number + 1,
            4,
            1,
        )
        assert (row["tokens"], row["sequence_tokens"], row["forwarded_tokens"]) == (
            trained,
            tokens,
            tokens,
        )
        assert (row["age_mean"], row["age_max"], row["batches_skipped"]) == (number, number, 0)
        assert (row["reward_mean"], row["response_length_mean"]) == (0.5, trained / 4)
        assert row["packing_ratio"] == 1.0
        assert row["mfu"] is None, "nobody knows the rate of a CPU"
        assert row["flops"] > 0
        assert row["peak_memory_bytes"] > 0
        seconds = row["seconds_wait"] + row["seconds_train"] + row["seconds_sync"]
        assert math.isclose(row["waiting_share"], row["seconds_wait"] / seconds)
        assert math.isclose(row["tokens_per_second"], trained / seconds)
        assert step_line(number + 1, STEPS, row) in caplog.messages
        assert 0 < row["ratio_p01"] <= row["ratio_p50"] <= row["ratio_max"]
        assert 0 < row["ess"] < 1
        assert row["perplexity_trainer"] > 1
        by_age = {
            name: value
            for name, value in row.items()
            if name.startswith("kl_age_") and value is not None
        }
        assert by_age == {f"kl_age_{number}": pytest.approx(row["kl"], rel=1e-5)}, (
            "one update, of the batch's first weights"
        )


def test_the_speed_counts_what_went_through_the_model(trainers: Trainers) -> None:
    """A group whose scores are all alike teaches nothing, and one of its four rollouts, the
    shortest, stands for it.
    """
    for number in range(STEPS):
        group = made_up_group(number) | {"scores": [0.5] * 4}
        httpx.post(f"{trainers.url}/scored_data", json=group, timeout=120).raise_for_status()
    assert trainers.train()
    for row in trainers.rows():
        seconds = row["seconds_wait"] + row["seconds_train"] + row["seconds_sync"]
        assert 0 < row["forwarded_targets"] < row["tokens"]
        assert math.isclose(row["tokens_per_second"], row["forwarded_targets"] / seconds)


def test_evaluations_are_written_down_once_by_a_run_that_is_resumed(
    trainers: Trainers, caplog: pytest.LogCaptureFixture
) -> None:
    def evaluated(version: int, percent: float) -> None:
        result = {
            "name": "sums",
            "weight_version": version,
            "metrics": {"eval/percent_correct": percent},
        }
        httpx.post(f"{trainers.url}/evaluations", json=result, timeout=120).raise_for_status()

    def written() -> list[tuple[int, dict[str, float]]]:
        lines = (trainers.folder / "logs" / "evaluations.jsonl").read_text().splitlines()
        return [(row["weight_version"], row["metrics"]) for row in map(json.loads, lines)]

    caplog.set_level("INFO")
    trainers.post(*range(STEPS + 1))
    evaluated(9, 0.125)  # before the run: another one's
    assert not trainers.train("--checkpoint-interval", "1", point="acknowledging", passes=2)
    evaluated(1, 0.25)
    assert trainers.train("--checkpoint-interval", "1", "--resume", "auto")
    first = (1, {"eval/percent_correct": 0.25})
    assert written() == [first]
    evaluated(4, 0.5)
    assert trainers.train(
        "--checkpoint-interval", "1", "--resume", "auto", "--training-steps", str(STEPS + 1)
    )
    assert written() == [first, (4, {"eval/percent_correct": 0.5})]
    told = [message for message in caplog.messages if message.startswith("Evaluation ")]
    assert told == [
        f"Evaluation sums at version {v}: eval/percent_correct {p}"
        for v, p in ((1, 0.25), (4, 0.5))
    ]


def test_a_server_that_was_restarted_is_asked_again_for_its_logprobs(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back, in the second step's update, with the other mode."""
    asked = [
        SamplerLogprobs(raw=("http://one:9001",)),
        SamplerLogprobs(processed=("http://one:9001",)),
    ]
    real, heeded = NoBridge.sync, []

    def sync(bridge: NoBridge, version: int, *rest: Any) -> SyncReport:
        bridge.joins += version == 2
        return real(bridge, version, *rest)

    def use_server_modes(batches: Batches, servers: SamplerLogprobs) -> None:
        heeded.append((len(trainers.line), servers.raw))

    monkeypatch.setattr(NoBridge, "sync", sync)
    monkeypatch.setattr(Batches, "use_server_modes", use_server_modes)
    monkeypatch.setattr(assembly, "check_logprobs", lambda config, ranks, urls: asked.pop())
    trainers.post(*range(STEPS))
    assert trainers.train()
    assert heeded == [(0, ()), (2, ("http://one:9001",))]


def test_a_step_whose_weights_reach_nobody_before_the_end_has_its_row(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint holds it, so that the run goes on behind it."""
    real = NoBridge.sync

    def sync(bridge: NoBridge, version: int, *rest: Any) -> SyncReport:
        if version == 2:
            raise StopRequested(15)
        return real(bridge, version, *rest)

    trainers.post(*range(STEPS))
    monkeypatch.setattr(NoBridge, "sync", sync)
    with pytest.raises(StopRequested):
        trainers.train()
    monkeypatch.setattr(NoBridge, "sync", real)
    assert [(row["step"], row["weight_version"], row["checksum"]) for row in trainers.rows()] == [
        (1, 1, ""),
        (2, 2, ""),
    ]
    assert trainers.train("--resume", "auto")
    assert [row["step"] for row in trainers.rows()] == list(range(1, STEPS + 1))


def test_restarted_servers_are_asked_while_a_batch_is_waited_for() -> None:
    bridge, asked = NoBridge(), []
    trainer = Trainer.__new__(Trainer)
    trainer.__dict__ |= {
        "bridge": bridge,
        "_joins": 0,
        "ask_servers": lambda: asked.append(bridge.joins),
        "optimizer": SimpleNamespace(write_weights=None),
        "checkpoints": SimpleNamespace(written=lambda: True),
        "batches": SimpleNamespace(release=lambda: None),
    }
    work = trainer.upkeep().work
    work()
    bridge.joins += 1
    work()
    work()
    assert asked == [1]


def test_the_steps_that_are_named_are_traced(trainers: Trainers) -> None:
    trainers.post(*range(STEPS))
    assert trainers.train("--profile", "2-3")
    (trace,) = (trainers.folder / "logs" / "profile").iterdir()
    assert trace.name == "steps_2-3.rank0.json.gz"
    with gzip.open(trace, "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert (
        sum(name.startswith("Optimizer.step") or name == "aten::_fused_adamw_" for name in names)
        >= 2
    )
    assert any("Backward" in name for name in names)


def test_a_memory_snapshot_on_a_cpu_is_refused_before_anything_is_loaded(
    trainers: Trainers,
) -> None:
    with pytest.raises(
        ConfigError, match="--memory-snapshot records the memory of a GPU, and --device is cpu"
    ):
        trainers.train("--memory-snapshot")


def test_experts_without_tokens_are_named(
    trainers: Trainers,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Routers of zeros find all experts equally likely, and take the first two of four."""
    mixture.main(["--model", str(trainers.model), "--output", str(tmp_path / "mixture")])
    weights = tmp_path / "mixture" / "model.safetensors"
    tensors = load_file(weights)
    routers = {name: 0 * one for name, one in tensors.items() if ".mlp.gate." in name}
    save_file(tensors | routers, weights, metadata={"format": "pt"})
    trainers.model = tmp_path / "mixture"
    monkeypatch.setattr(router, "IDLE_STEPS", 1)
    trainers.post(*range(STEPS))
    assert trainers.train("--vllm-restart-interval", "0")
    first = trainers.rows()[0]
    assert (first["unused_experts"], first["expert_load_max"]) == (4, 2)
    assert (
        "Step 1: experts without a token in the last 1 steps: 2 of layer 0, 3 of layer 0, "
        "2 of layer 1, 3 of layer 1; they learn nothing; "
    ) in caplog.text
