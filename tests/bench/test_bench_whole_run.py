"""The measurement of a whole run: its arithmetic, its random checkpoint, and one run of real
processes on the CPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import whole_run
from bench.gpu import random_checkpoint
from bench.gpu.processes import BenchError
from bench.gpu.shapes import SHAPES
from bench.gpu.training_stack import RowsAsTheyCome
from bench.whole_run import longest_gap, summarise

pytestmark = pytest.mark.nightly


def row(tokens: int, wait: float, train: float) -> dict[str, float | int]:
    return {
        "tokens": tokens,
        "sequences": 2,
        "seconds_wait": wait,
        "seconds_train": train,
        "forwarded_tokens": 3 * tokens,
    }


def test_the_first_steps_are_left_out_and_the_rest_is_over_the_wall_clock() -> None:
    rows = [(100.0, row(999, 50.0, 9.0)), (110.0, row(400, 2.0, 6.0)), (120.0, row(600, 3.0, 4.0))]
    found = summarise(rows, 1)
    assert found["steps"] == 2
    assert found["seconds"] == 20.0
    assert found["trained_tokens_per_second"] == 50.0
    assert found["waiting_share"] == 0.25
    assert found["seconds_by_phase"] == {"wait": 5.0, "train": 10.0}
    assert found["forwarded_tokens_per_second_of_training"] == 300.0
    assert found["mean_length"] == 250.0
    rows[1][1]["forwarded_targets"] = 100
    assert summarise(rows, 1) == found | {
        "trained_tokens": 700,
        "trained_tokens_per_second": 35.0,
    }, "only what is computed"
    with pytest.raises(BenchError, match="3 steps are too few, of which 3 are left out"):
        summarise(rows, 3)


def test_the_longest_gap_is_that_of_a_stream_and_not_between_streams() -> None:
    streams = [[0.0, 5.0, 5.1], [9.0, 9.3], [20.0]]
    assert longest_gap(streams, 1.0) == 0.3
    assert longest_gap(streams, 0.0) == 5.0
    assert longest_gap(streams, 10.0) is None


def test_rows_are_taken_when_their_line_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = RowsAsTheyCome(file)
    rows.look()
    file.write_text('{"step": 1}\n{"st')
    rows.look()
    assert list(rows) == [{"step": 1}]
    with file.open("a") as more:
        more.write('ep": 2}\n')
    rows.look()
    assert [one["step"] for one in rows] == [1, 2]
    assert rows.rows[0][0] <= rows.rows[1][0]


def test_a_random_checkpoint_ends_answers_by_chance_and_names_every_token(tmp_path: Path) -> None:
    vocab = SHAPES["tiny"]["vocab_size"]
    answer = random_checkpoint.write({"shape": "tiny", "folder": str(tmp_path), "cap": 64})
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert answer["end_tokens"] == len(ends) == len(set(ends)) == 2 * vocab // 64
    assert max(ends) < vocab
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == ends
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.num_parameters() == answer["parameters"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == vocab
    assert all(tokenizer.convert_ids_to_tokens(number) for number in range(vocab))


def test_what_cannot_run_here_is_left_out_with_the_reason(tmp_path: Path) -> None:
    assert (
        whole_run.main(["--output", str(tmp_path), "--questions", "nowhere.jsonl", "--dry-run"])
        == 0
    )
    parts = json.loads((tmp_path / "whole_run.json").read_text())["parts"]
    assert parts == {
        part: {"skipped": "there is no nowhere.jsonl; give GSM8K's train.jsonl with --questions"}
        for part in parts
    }
    assert list(parts) == ["ours", "trl"]


@pytest.mark.e2e
@pytest.mark.usefixtures("forked_children")
def test_our_part_runs_with_real_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions.jsonl"
    lines = [{"question": f"What is {n} plus {n}?", "answer": f"#### {2 * n}"} for n in range(20)]
    questions.write_text("\n".join(map(json.dumps, lines)))
    arguments = [
        "--output",
        str(tmp_path / "out"),
        "--questions",
        str(questions),
        "--dry-run",
        "--parts",
        "ours",
    ]
    status = whole_run.main(arguments)
    assert status == 0, capsys.readouterr().out
    data = json.loads((tmp_path / "out" / "whole_run.json").read_text())
    found = data["parts"]["ours"]
    assert found["steps"] == data["settings"]["steps"] - data["settings"]["leave_out"] == 2
    assert found["sequences"] == 2 * data["settings"]["sequences"]
    assert found["trained_tokens"] > 0
    assert found["longest_gap_seconds"] > 0
    assert found["client_failures"] == []
    assert {"wait", "train", "sync"} <= found["seconds_by_phase"].keys()
