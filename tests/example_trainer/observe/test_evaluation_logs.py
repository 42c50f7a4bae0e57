"""An evaluation is on the disk when it is written, once in a run, and on dashboards at the weights
that were measured.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from example_trainer.batch.evaluations import Evaluation
from example_trainer.observe.metrics import EvaluationFile, MetricsLog, evaluation_line

FIRST = Evaluation(
    4, 1000.5, 3, "gsm8k 0", 12, {"eval/percent_correct": 0.4123456, "eval/length": 80}, 99
)
SECOND = Evaluation(5, 1001.5, None, "gsm8k 0", None, {"eval/percent_correct": 0.5})


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_line() -> None:
    assert (
        evaluation_line(FIRST)
        == "Evaluation gsm8k 0 at version 12: eval/length 80  eval/percent_correct 0.4123"
    )
    assert evaluation_line(SECOND) == "Evaluation gsm8k 0 at version ?: eval/percent_correct 0.5"
    assert (
        evaluation_line(Evaluation(1, 0.0, 0, "a\nb", 1, {}))
        == "Evaluation a b at version 1: no numbers"
    )


def test_an_evaluation_goes_to_a_file_and_to_its_weights_on_dashboards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[dict[str, Any], int]] = []
    axes: list[tuple[str, str]] = []
    run = types.SimpleNamespace(
        log=lambda numbers, step: logged.append((numbers, step)),
        define_metric=lambda name, step_metric: axes.append((name, step_metric)),
        finish=lambda: None,
    )
    wandb = types.SimpleNamespace(init=lambda **options: run, Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = MetricsLog(tmp_path, {}, wandb=("project", "group"))
    log.write(14, {"loss": 0.5})
    log.write_evaluation(14, FIRST)
    log.write_evaluation(15, SECOND)
    log.close()
    path = tmp_path / "evaluations.jsonl"
    assert rows(path) == [{**vars(FIRST), "step": 14}, {**vars(SECOND), "step": 15}]
    assert [row["weight_epoch"] for row in rows(path)] == [99, None], (
        "versions come again after a resume, epochs do not"
    )
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    percent = "eval/gsm8k_0/percent_correct"
    assert [(e.step, e.value) for e in events.Scalars(percent)] == [
        (12, pytest.approx(0.4123456)),
        (15, 0.5),
    ]
    assert axes == [("eval/gsm8k_0/*", "eval/gsm8k_0/weight_version")]
    assert logged[1:] == [
        ({percent: 0.4123456, "eval/gsm8k_0/length": 80, "eval/gsm8k_0/weight_version": 12}, 14),
        ({percent: 0.5, "eval/gsm8k_0/weight_version": 15}, 15),
    ]


def test_a_resumed_run_knows_what_it_has_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, {})
    assert log.evaluations.seen == []
    log.write_evaluation(14, FIRST)
    log.write_evaluation(14, SECOND)
    log.close()
    path = tmp_path / "evaluations.jsonl"
    with path.open("a") as file:
        file.write('{"id": 6, "ti')  # killed while it wrote
    log = MetricsLog(tmp_path, {}, first_step=10)
    assert log.evaluations.seen == [FIRST.key, SECOND.key]
    log.close()
    assert [row["id"] for row in rows(path)] == [4, 5]
    MetricsLog(tmp_path, {}).close()
    assert rows(path) == []
    assert [row["id"] for row in rows(tmp_path / "evaluations.1.jsonl")] == [4, 5]


def test_lines_that_are_no_evaluations_do_not_end_a_resumed_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk may do that; no row of the file is lost, and its whole lines are never written again."""
    path = tmp_path / "evaluations.jsonl"
    file = EvaluationFile(path, continued=False)
    file.write(14, FIRST)
    file.close()
    torn = [
        b"\x00\x00\x00",
        b'{"id": 5}',
        b"[4, 1000.5]",
        b'{"id": Infinity, "time": 1}',
        b"\xff",
        b"",
    ]
    with path.open("ab") as raw:
        raw.write(b"".join(line + b"\n" for line in torn))
    file = EvaluationFile(path, continued=True)
    file.write(15, SECOND)
    file.close()
    with path.open("ab") as raw:
        raw.write(b'{"id": 6, "ti')
    inode = path.stat().st_ino
    file = EvaluationFile(path, continued=True)
    assert file.seen == [FIRST.key, SECOND.key]
    file.close()
    whole = path.read_bytes().splitlines()
    assert [json.loads(whole[0])["id"], json.loads(whole[-1])["id"]] == [4, 5]
    assert whole[1:-1] == torn
    assert path.stat().st_ino == inode
    assert caplog.text.count("6 lines of ") == 2
    assert "the first is line 2; they stay" in caplog.text
