"""A row is on the disk when it is written, and a run's file holds that run."""

from __future__ import annotations

import json
import re
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from example_trainer.command_line import parse_config
from example_trainer.errors import ConfigError
from example_trainer.observe import metrics
from example_trainer.observe.metrics import MetricsLog, step_line


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
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 0.5),
        (2, 0.25),
    ]
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


def test_a_damaged_line_and_a_rewriting_that_fails_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\nnot a row\n{"step": 2}\n')
    before = file.read_bytes()

    def fails(*_: object) -> None:
        raise OSError(5, "disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fails)
        with pytest.raises(
            ConfigError, match=r"cannot write metrics to --log-dir .*: disk is gone"
        ):
            MetricsLog(tmp_path, {}, first_step=1)
    assert file.read_bytes() == before
    caplog.clear()
    MetricsLog(tmp_path, {}, first_step=1).close()
    assert file.read_text() == '{"step": 1}\nnot a row\n'
    assert f"1 lines of {file} are not rows of figures" in caplog.text


def test_wandb_gets_neither_keys_nor_the_command_line_that_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B keeps sys.argv with each run, as it is when the run begins."""
    seen: dict[str, Any] = {}
    wandb = types.SimpleNamespace(
        init=lambda **given: seen.update(given, argv=list(sys.argv)), Error=RuntimeError
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    words = ["--model-name", "m", "--vllm-api-key", "hush", "--atropos-api-key=hush"]
    monkeypatch.setattr(sys, "argv", ["grpo.py", *words])
    MetricsLog(tmp_path, parse_config(words).shareable, wandb=("project", "group"))
    assert seen["argv"] == [
        "grpo.py",
        "--model-name",
        "m",
        "--vllm-api-key",
        "…",
        "--atropos-api-key=…",
    ]
    assert "hush" not in str(seen)


def test_wandb_that_is_not_installed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    log = MetricsLog(tmp_path, {}, wandb=("project", "group"))
    log.write(1, {"loss": 0.5})
    log.close()
    assert (
        "No W&B log, metrics.jsonl and TensorBoard only: wandb is not installed (pip install wandb)"
        in caplog.messages
    )
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5}


@pytest.mark.parametrize(
    ("variables", "offline"),
    [({}, True), ({"WANDB_API_KEY": "0123"}, False), ({"WANDB_MODE": "online"}, False)],
)
def test_wandb_without_a_login_is_kept_offline_with_one_line(
    variables: dict[str, str],
    offline: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    for name in (
        "WANDB_API_KEY",
        "WANDB_MODE",
        "WANDB_BASE_URL",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_DISABLED",
        "NETRC",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables | {"HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    seen: dict[str, object] = {}
    run = types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    wandb = types.SimpleNamespace(
        init=lambda **given: seen.update(given) or run, Error=RuntimeError
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    MetricsLog(tmp_path / "logs", {}, wandb=("project", "group")).close()
    assert seen.get("mode") == ("offline" if offline else None)
    notice = (
        f"kept offline in {tmp_path / 'logs' / 'wandb'}; after a login, upload it with `wandb sync"
    )
    assert [notice in message for message in caplog.messages if "W&B" in message] == [
        True
    ] * offline


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError,
        match=r"cannot write metrics to --log-dir .*file/logs: Not a directory; give another",
    ):
        MetricsLog(tmp_path / "file" / "logs", {})


def row_of_a_step(**changes: object) -> dict[str, Any]:
    row: dict[str, Any] = {
        "reward_mean": 0.5, "loss": -0.5, "kl": 0.01, "entropy": 0.1, "clip_fraction": 0.0, "grad_norm": 2.0,
        "response_length_mean": 2.5, "tokens_per_second": 2.0, "queue_size": 9, "age_mean": 1.0, "age_max": 2,
        "seconds_wait": 1.0, "seconds_train": 0.5, "seconds_sync": 1.0, "forwarded_tokens_per_second": 20.0,
        "packing_ratio": 0.83, "mfu": 0.4123, "waiting_share": 0.4, "peak_memory_bytes": 3 << 29,
        "ratio_p99": 1.25, "ess": 0.98, "mismatch_kl": 1.5e-5, "perplexity_rollout": 1.2345678, "perplexity_trainer": 1.25,
    }  # fmt: skip
    return row | changes


DRIFT = ("ratio_p99", "ess", "mismatch_kl", "perplexity_rollout", "perplexity_trainer")


def test_the_line_of_a_step() -> None:
    assert step_line(7, 100, row_of_a_step()) == (
        "Step 7/100  reward 0.500  loss -0.5000  kl 0.01000  entropy 0.100  clipped 0.000  grad norm 2.000  length 2.5  "
        "2 tok/s  queue 9  age 1.0 (max 2)  wait 1.00 s  train 0.50 s  sync 1.00 s  forwarded 20 tok/s  packed 0.83  "
        "mfu 0.412  waiting 40 %  peak 1.50 GiB  ratio p99 1.250  ess 0.980  mismatch kl 1.5e-05  ppl 1.235/1.25"
    )
    assert step_line(7, 100, row_of_a_step(success_rate=0.25)).startswith(
        "Step 7/100  reward 0.500  success 0.250  loss -0.5000"
    )
    unknown = step_line(
        7, 100, row_of_a_step() | dict.fromkeys(("age_mean", "age_max", "mfu", "kl", *DRIFT))
    )
    for part in (
        "  age ?  wait",
        "  mfu ?  waiting",
        "  kl ?  entropy",
        " GiB  ratio p99 ?  ess ?  mismatch kl ?  ppl ?/?",
    ):
        assert part in unknown
    parity = {
        "mismatched_tokens": 0,
        "compared_tokens": 12,
        "older_tokens": 3,
        "parity_kl": 0.0,
        "older_kl": 0.25,
    }
    exact = step_line(7, 100, row_of_a_step(**parity, weights_sha="ab"))
    assert "  sync 1.00 s  mismatched 0/12  weights ab  forwarded" in exact
    assert (
        "GiB  kl of present weights 0.00000  older 3  kl of older 0.25000  ratio p99 1.250" in exact
    )


class SlowWandb:
    """Takes a row when it is let, or breaks."""

    def __init__(self, error: Exception | None = None) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.let = threading.Event()
        self.error, self.finished = error, False

    def init(self, **options: object) -> SlowWandb:
        return self

    def log(self, row: dict[str, float], step: int) -> None:
        assert self.let.wait(120)
        if self.error is not None:
            raise self.error
        self.rows.append((step, row))

    def finish(self) -> None:
        self.finished = True


def test_a_step_does_not_wait_for_wandb_and_closing_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = SlowWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = MetricsLog(tmp_path, {}, wandb=("project", "group"))
    for step in range(1, 4):
        log.write(step, {"loss": 0.5 * step, "checksum": "ab", "age_mean": None})
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
    assert wandb.rows == []
    wandb.let.set()
    log.close()
    assert wandb.rows == [(step, {"train/loss": 0.5 * step}) for step in range(1, 4)]
    assert wandb.finished


def test_wandb_that_breaks_is_told_once_and_the_rows_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = SlowWandb(ValueError("no room"))
    wandb.let.set()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = MetricsLog(tmp_path, {}, wandb=("project", "group"))
    for step in range(1, 4):
        log.write(step, {"loss": 0.5})
    log.close()
    assert len(rows(tmp_path)) == 3
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == ["No more rows for TensorBoard and W&B, metrics.jsonl only: ValueError: no room"]


def test_wandb_that_falls_too_far_behind_loses_rows_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = SlowWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(metrics, "_WAITING_ROWS", 2)
    log = MetricsLog(tmp_path, {}, wandb=("project", "group"))
    for step in range(1, 9):
        log.write(step, {"loss": 0.5})
    assert len(rows(tmp_path)) == 8
    wandb.let.set()
    log.close()
    left = re.findall(
        r"TensorBoard or W&B is 2 rows behind: step (\d) is in metrics.jsonl alone", caplog.text
    )
    assert 2 <= len(wandb.rows) <= 3, (
        "two wait, and one may have been taken before they were too many"
    )
    assert len(left) + len(wandb.rows) == 8, "whichever those are"


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
