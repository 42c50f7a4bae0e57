"""The problems of simple_rl.py, and batches that are sampled on request."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.batch.evaluations import Evaluation
from example_trainer.batch.groups import parse_batch
from example_trainer.batch.local_sampler import HeldOut, SampledBatches, Sampler
from example_trainer.batch.problems import (
    GSM8K,
    INSTRUCTION,
    Problem,
    find_task,
    held_out_sums,
    read_problems,
    sums,
)
from example_trainer.batch.reader import BatchReader
from example_trainer.config import TrainerConfig
from example_trainer.errors import BatchError, ConfigError, TrainerError
from example_trainer.vllm_client import VLLMClient
from tests.conftest import ROOT


class MadeUpSampler:
    """Answers each question twice with as many tokens as it has digits, under the weight version
    that is set.
    """

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[str] = []

    def groups(self, problems: Sequence[Problem]) -> list[dict[str, Any]]:
        self.asked += [problem.question for problem in problems]
        return [self._group(problem) for problem in problems]

    def _group(self, problem: Problem) -> dict[str, Any]:
        digits = [int(letter) for letter in problem.question if letter.isdigit()]
        return {
            "tokens": [[40, *digits]] * 2,
            "masks": [[-100, *digits]] * 2,
            "inference_logprobs": [[1.0] + [-1.0] * len(digits)] * 2,
            "scores": [0.0, 1.0],
            "weight_versions": [self.version] * 2,
        }


def batches(
    sampler: MadeUpSampler,
    vocab_size: int = 50,
    staleness: int = 0,
    last_version: int | None = None,
) -> SampledBatches:
    reader = BatchReader(TrainerConfig(model_name="m"), vocab_size, tokens_per_bin=16)
    device = torch.device("cpu")
    return SampledBatches(sampler, sums(3), 2, reader, device, staleness, last_version)  # type: ignore[arg-type]


def test_each_batch_has_the_next_problems_and_the_present_version() -> None:
    sampler = MadeUpSampler()
    made = batches(sampler)
    for version in range(3):
        sampler.version = version
        batch = made.next(version)
        assert batch.lease is None
        assert (batch.figures.sequences, batch.figures.age_max, batch.queue_size) == (4, 0, 0)
        versions = torch.cat([one["versions"] for bins in batch.minibatches for one in bins])
        assert versions.tolist() == [version] * batch.figures.tokens
        made.acknowledge(version + 1)
    assert sampler.asked == [problem.question for problem in itertools.islice(sums(3), 6)]


@pytest.mark.parametrize(("staleness", "steps"), [(0, 3), (1, 4), (4, 12), (16, 5)])
def test_every_batch_is_exactly_as_old_as_asked_for_and_nothing_is_sampled_in_vain(
    staleness: int, steps: int
) -> None:
    """The problems are the same as in a run without staleness, in the same order."""
    sampler = MadeUpSampler()
    made = batches(sampler, staleness=staleness, last_version=steps)
    for version in range(steps):
        sampler.version = version
        batch = made.next(version)
        seen = torch.cat([one["versions"] for bins in batch.minibatches for one in bins])
        assert seen.tolist() == [max(0, version - staleness)] * batch.figures.tokens
        assert batch.figures.age_max == min(version, staleness)
        made.acknowledge(version + 1)
    assert sampler.asked == [problem.question for problem in itertools.islice(sums(3), 2 * steps)]


@pytest.mark.parametrize(("staleness", "at"), [(0, 2), (2, 0), (1, 1), (2, 3)])
def test_behind_a_batch_that_is_left_out_all_are_as_old_as_asked_for_or_the_run_ends(
    staleness: int, at: int
) -> None:
    sampler, steps = MadeUpSampler(), 7
    made = batches(sampler, staleness=staleness, last_version=steps)
    ages: list[int] = []
    for version in range(at):
        sampler.version = version
        made.next(version)
        made.acknowledge(version + 1)
    sampler.version = at
    made.next(at)
    if staleness and at:
        with pytest.raises(
            TrainerError,
            match=f"at step {at}, and .* not --staleness {staleness} .*: its gradient is NaN",
        ) as told:
            made.acknowledge(at, skipped="its gradient is NaN")
        assert not isinstance(told.value, BatchError), "which would be left out as well"
        return
    made.acknowledge(at, skipped="its gradient is NaN")
    for version in range(at, steps):
        sampler.version = version
        ages.append(made.next(version).figures.age_max or 0)
        made.acknowledge(version + 1)
    assert ages == [min(version, staleness) for version in range(at, steps)]


def test_held_out_problems_are_answered_greedily_when_their_turn_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = Sampler(
        "http://127.0.0.1:1",
        str(ROOT / "assets" / "starter_model"),
        group_size=8,
        max_tokens=9,
        seed=0,
    )
    two = sampler._tokenizer.encode(r"\boxed{2}", add_special_tokens=False)
    asked: list[dict[str, Any]] = []

    def answer(client: VLLMClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body)
        return {"token_ids": [two]}

    monkeypatch.setattr(VLLMClient, "call", answer)
    found: list[Evaluation] = []
    problems = [
        Problem("1 + 1", "2"),
        Problem("1 + 2", "3"),
        Problem("5 - 3", "2"),
        Problem("2", "2"),
    ]
    held_out = HeldOut(sampler, problems, every=10, record=found.append)
    for version in (0, 0, 1, 9, 10, 10):  # a version comes again where a batch was left out
        held_out.look(version)
    held_out.look(13, last=True)
    held_out.look(13, last=True)
    sampler.close()
    assert [(one.weight_version, one.metrics) for one in found] == [
        (version, {"solved": 0.75, "response_length_mean": len(two)}) for version in (0, 10, 13)
    ]
    assert len({one.key for one in found}) == 3
    assert len(asked) == 3 * len(problems)
    assert all(
        (body["n"], body["temperature"], body["max_tokens"]) == (1, 0.0, 9) for body in asked
    )


def test_a_batch_of_another_tokenizer_can_be_skipped() -> None:
    made = batches(MadeUpSampler(), vocab_size=8)
    with pytest.raises(BatchError, match="holds nothing to train on: group 0: tokens"):
        made.next(0)


def test_the_sampler_asks_for_ids_and_numbers_and_reads_the_text_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second answer was sampled across an update of the weights: its last tokens count as
    sampled under the new ones.
    """
    folder, asked = str(ROOT / "assets" / "starter_model"), []
    sampler = Sampler("http://127.0.0.1:1", folder, group_size=2, max_tokens=9, seed=0)
    tokenizer = sampler._tokenizer
    right, wrong = (
        [*tokenizer.encode(rf"\boxed{{{n}}}", add_special_tokens=False), tokenizer.eos_token_id]
        for n in (2, 3)
    )
    numbers = [[-0.5] * len(right), [-0.25] * len(wrong)]

    def answer(client: VLLMClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked.append((path, body))
        spans = [[[4, len(right)]], [[4, 1], [5, len(wrong) - 1]]]
        return {
            "token_ids": [right, wrong], "token_logprobs": numbers, "weight_versions": [4, 4], "weight_version_spans": spans,
            "finish_reasons": ["stop", "length"],
        }  # fmt: skip

    monkeypatch.setattr(VLLMClient, "call", answer)
    groups = sampler.groups([Problem("What is 1 plus 1?", "2")])
    sampler.close()
    ((path, body),) = asked
    assert (path, body["return_text"], body["token_logprobs"], "logprobs" in body) == (
        "/generate",
        False,
        True,
        False,
    )
    prompt = body["prompt"]["prompt_token_ids"]
    assert groups[0]["tokens"] == [prompt + right, prompt + wrong]
    assert groups[0]["scores"] == [1.0, -1.0]
    one, two = parse_batch(groups, max_tokens=1000, vocab_size=len(tokenizer), version=5).sequences
    assert [s["rollout_logprobs"].tolist() for s in (one, two)] == numbers
    assert [s.finish_reason for s in (one, two)] == ["stop", "length"]
    assert (
        groups[0]["sampling_params"]
        == [{"temperature": body["temperature"], "max_tokens": body["max_tokens"]}] * 2
    )
    assert one["versions"] is not None
    assert one["versions"].tolist() == [4] * len(right)
    assert two["versions"] is not None
    assert two["versions"].tolist() == [4, *[5] * (len(wrong) - 1)]


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
