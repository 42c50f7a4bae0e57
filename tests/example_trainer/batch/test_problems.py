"""Problems of simple_rl.py, and its scores of the answers."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from example_trainer.batch.problems import (
    GSM8K,
    INSTRUCTION,
    Problem,
    find_task,
    held_out_sums,
    read_problems,
    sums,
)
from example_trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (r"so \boxed{1,200}", 1.0),
        (r"\boxed{7} no, \boxed{1200.0}", 1.0),
        (r"\boxed{1200} no, \boxed{7}", -1.0),
        ("1200", -1.0),
        (r"\boxed{twelve hundred}", -1.0),
        (r"\boxed{1200", -1.0),
        ("", -1.0),
        (r"\boxed{7}</think>\boxed{1200}", 1.0),
        (r"<think>\boxed{1200}", -1.0),
    ],
)
def test_the_last_box_counts(text: str, score: float) -> None:
    assert Problem("q", "1200").score(text) == score


def test_sums_repeat_with_their_seed_and_are_right() -> None:
    problems = list(islice(sums(3, 2), 200))
    assert problems == list(islice(sums(3, 2), 200))
    assert problems != list(islice(sums(4, 2), 200))
    words = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b}
    seen = set()
    for problem in problems:
        _, _, left, operation, right = problem.question.removesuffix("?").split()
        seen.add(operation)
        assert int(problem.answer) == words[operation](int(left), int(right)) >= 0
    assert seen == words.keys()


def test_held_out_sums_are_the_same_each_time_and_never_trained_on() -> None:
    held_out = held_out_sums(200, 2)
    assert len(set(held_out)) == 200
    assert held_out[:50] == held_out_sums(50, 2)
    assert not set(held_out) & set(islice(sums(0, 2), 20_000))
    assert 0 < len(held_out_sums(200, 1)) < 30, "operands of one digit have few sums"
    task = find_task(None, digits=3)
    assert task.held_out is not None
    assert list(task.held_out(5)) == held_out_sums(5, 3)


def test_a_file_in_gsm8ks_form_is_shuffled_anew_each_time_round(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    rows = [{"question": f"q{i}", "answer": f"since {i} it is\n#### 1,{i:03d}"} for i in range(20)]
    path.write_text(
        "\n".join(json.dumps(row) for row in rows)
        + "\n\n"
        + json.dumps({"question": "q20", "answer": 5})
        + "\n"
    )
    task = find_task(str(path))
    assert task.held_out is None
    drawn = list(islice(task.training(0), 42))
    expected = {f"q{i}{INSTRUCTION}": f"1,{i:03d}" for i in range(20)} | {f"q20{INSTRUCTION}": "5"}
    assert {problem.question: problem.answer for problem in drawn[:21]} == expected
    assert {problem.question for problem in drawn[21:]} == expected.keys()
    assert drawn[:21] != drawn[21:]
    assert drawn == list(islice(task.training(0), 42))
    assert drawn[0].score(rf"\boxed{{{drawn[0].answer}}}") == 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no problem"),
        ('{"question": "q"}', "line 1: not a JSON object with the text `question` and an `answer`"),
        ('{"question": "q", "answer": "#### many"}', "line 1: the answer 'many' is not a number"),
        ("nonsense", "line 1: not JSON"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "problems.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        find_task(str(path))


def test_a_row_that_is_not_a_problem_is_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "q", "answer": "1"}\n{"question": "q"}\n')
    assert len(read_problems(path)) == 1
    assert "1 of 2 rows are skipped; the first" in caplog.text
    assert "line 2" in caplog.text


def test_a_task_is_found_by_module_and_name() -> None:
    task = find_task("studies.word_problems.problems:REWARDED")
    assert task.held_out is not None
    questions = {problem.question for problem in islice(task.training(0), 100)}
    assert not questions & {problem.question for problem in task.held_out(100)}
    assert next(find_task(None, digits=1).training(5)) == next(sums(5, 1))
    for name, message in (
        (
            "studies.word_problems.problems:HARD",
            "has no attribute 'HARD'; give a file, or module:name of a Task",
        ),
        ("bench.nowhere:REWARDED", "No module named 'bench.nowhere'"),
        ("studies.word_problems.problems:tell", "is of type function; give a Task"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_task(name)


def test_gsm8k_is_trained_on_its_train_split_and_measured_on_its_test_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def load(name: str, config: str, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [{"question": f"{split} {i}", "answer": f"because\n#### {i}"} for i in range(5)]

    monkeypatch.setattr("datasets.load_dataset", load)
    task = find_task(GSM8K)
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert {problem.question for problem in islice(task.training(0), 5)} == {
        f"train {i}{INSTRUCTION}" for i in range(5)
    }
    assert task.held_out is not None
    assert [(problem.question, problem.answer) for problem in task.held_out(2)] == [
        (f"test {i}{INSTRUCTION}", str(i)) for i in range(2)
    ]

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nand more")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(
        ConfigError,
        match=r"cannot load openai/gsm8k from the Hugging Face hub \(Couldn't reach .*give --problems",
    ):
        find_task(GSM8K)
