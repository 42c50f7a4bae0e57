"""A row is on the disk when it is written, and a run's file holds that run."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from example_trainer.batch.groups import parse_batch
from example_trainer.command_line import parse_config
from example_trainer.errors import ConfigError
from example_trainer.observe.metrics import MetricsLog, step_line, step_row
from example_trainer.training.optimizer import StepReport
from example_trainer.training.step import StepSums
from example_trainer.weight_bridge.base import NoBridge, SyncReport


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rows_are_on_the_disk_and_in_tensorboard(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, {})
    log.write(1, {"loss": 0.5, "age_mean": None, "checksum": "ab"})
    assert rows(tmp_path) == [{"step": 1, "loss": 0.5, "age_mean": None, "checksum": "ab"}]
    log.write(2, {"loss": 0.25, "age_mean": 1.0, "checksum": "cd"})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]
    assert [(event.step, event.value) for event in events.Scalars("train/age_mean")] == [(2, 1.0)]


def test_a_new_run_moves_the_old_file_aside(tmp_path: Path) -> None:
    for run in range(3):
        log = MetricsLog(tmp_path, {})
        log.write(1, {"run": run})
        log.close()
    assert rows(tmp_path) == [{"step": 1, "run": 2}]
    assert json.loads((tmp_path / "metrics.1.jsonl").read_text())["run"] == 0
    assert json.loads((tmp_path / "metrics.2.jsonl").read_text())["run"] == 1


def test_a_resumed_run_continues_the_file_after_its_checkpoint(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, {})
    for step in range(1, 6):
        log.write(step, {"run": 0})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "ru')  # killed while it wrote
    log = MetricsLog(tmp_path, {}, first_step=3)
    log.write(4, {"run": 1})
    log.close()
    assert [(row["step"], row["run"]) for row in rows(tmp_path)] == [(1, 0), (2, 0), (3, 0), (4, 1)]


def test_wandb_gets_neither_keys_nor_the_command_line_that_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B keeps sys.argv with each run, as it is when the run begins."""
    seen: dict[str, Any] = {}
    wandb = types.SimpleNamespace(init=lambda **given: seen.update(given, argv=list(sys.argv)), Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    words = ["--model-name", "m", "--vllm-api-key", "hush", "--atropos-api-key=hush"]
    monkeypatch.setattr(sys, "argv", ["grpo.py", *words])
    MetricsLog(tmp_path, parse_config(words).shareable, wandb=("project", "group"))
    assert seen["argv"] == ["grpo.py", "--model-name", "m", "--vllm-api-key", "…", "--atropos-api-key=…"]
    assert "hush" not in str(seen)


def test_wandb_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="--use-wandb needs the package wandb, which is not installed: pip install wandb"):
        MetricsLog(tmp_path, {}, wandb=("project", "group"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write metrics to --log-dir .*file/logs: Not a directory"):
        MetricsLog(tmp_path / "file" / "logs", {})


def test_the_row_and_the_line_of_a_step() -> None:
    group = {
        "tokens": [[1, 2, 3], [1, 2, 3, 4]],
        "masks": [[-100, 2, 3], [-100, 2, 3, 4]],
        "scores": [0.0, 1.0],
        "inference_logprobs": [[1.0, -1.0, -1.0], [1.0, -1.0, -1.0, -1.0]],
        "weight_versions": [4, 6],
    }
    batch = parse_batch([group], 10, 10)
    sync = SyncReport(version=7, checksum="abc", bytes_moved=12, seconds={"pause": 0.5})
    bridge = NoBridge()
    bridge.params_mapped = bridge.params_total = 3
    row = step_row(batch, StepSums(loss=-0.5, kl=0.01), StepReport(2.0, 1e-4), sync, bridge, 9, (1.0, 0.5, 1.0), 7)
    expected = {
        "reward_mean": 0.5, "reward_std": 0.5, "loss": -0.5, "kl": 0.01, "entropy": 0.0, "clip_fraction": 0.0, "grad_norm": 2.0,
        "lr": 1e-4, "tokens": 5, "tokens_per_second": 2.0, "response_length_mean": 2.5, "queue_size": 9, "age_mean": 1.0,
        "age_max": 2, "weight_version": 7, "params_mapped": 3, "params_total": 3, "bytes_moved": 12, "checksum": "abc",
        "seconds_wait": 1.0, "seconds_train": 0.5, "seconds_sync": 1.0, "sync/pause": 0.5,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    json.dumps(row, allow_nan=False)
    line = step_line(7, 100, row)
    assert line.startswith("Step 7/100 ")
    assert "reward 0.500" in line
    assert "age 1.0 (max 2)" in line
    unknown = step_row(parse_batch([group | {"weight_versions": None}], 10, 10), StepSums(), StepReport(2.0, 1e-4), sync, bridge, 9, (1.0, 0.5, 1.0), 7)  # fmt: skip # noqa: E501
    assert (unknown["age_mean"], unknown["age_max"]) == (None, None)
    assert "age ?" in step_line(7, 100, unknown)


def test_without_tensorboard_the_rows_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = MetricsLog(tmp_path, {})
    log.write(1, {"loss": 0.5})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5}
    assert not (tmp_path / "tensorboard").exists()
    assert "No TensorBoard log, metrics.jsonl only" in caplog.text
