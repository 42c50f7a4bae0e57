"""The habits of the shipped starter models, and models that the same commands make."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from environments.calculator_server import DEFAULT_LEVELS
from studies.starter_model import __main__ as make_starter_model
from studies.starter_model import training
from studies.starter_model.habits import BOX_OPEN
from studies.starter_model.measuring import measure_calls, measure_habits
from studies.starter_model.report import how_made
from studies.starter_model.training import TrainingPlan, train, train_calculator
from tests.forked_commands import run_command
from tests.studies.test_starter_model import (
    SHIPPED,
    calculator_model,
    gsm8k_questions,
    needs_gsm8k,
    shipped_model,
    shipped_tokenizer,
)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


@pytest.mark.parametrize("level", DEFAULT_LEVELS)
def test_it_seldom_asks_the_calculator_though_that_would_help(level: int) -> None:
    calls = measure_calls(calculator_model(), shipped_tokenizer(), level, n=30, samples=4)
    assert calls.greedy_accuracy <= 0.05
    assert calls.worked_accuracy <= 0.05  # these are too long to work out
    assert 0.02 <= calls.sampled_called <= 0.2
    assert calls.called_accuracy >= 0.85


@pytest.mark.parametrize("level", [1, 2])
def test_shipped_model_answers_at_once_and_often_wrong_though_it_can_work_it_out(
    level: int,
) -> None:
    habits = measure_habits(shipped_model(), shipped_tokenizer(), level, n=100)
    assert habits.greedy_accuracy <= 0.60
    assert habits.greedy_at_once >= 0.9
    assert habits.worked_accuracy >= 0.95
    assert 0.6 <= habits.sampled_at_once <= 0.85
    assert (
        habits.worked_length > 2 * habits.sampled_length - 8
    )  # the better habit is the longer one


@needs_gsm8k
def test_replies_to_long_questions_vary_in_form() -> None:
    """A reward for the form alone has something to learn from: some samples box a number, and some
    do not.
    """
    torch.manual_seed(0)
    tokenizer, model = shipped_tokenizer(), shipped_model()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in gsm8k_questions()[:8]
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    out = model.generate(**batch, do_sample=True, max_new_tokens=40, num_return_sequences=8)
    boxes = [BOX_OPEN in tokenizer.decode(row[batch.input_ids.shape[1] :]) for row in out]
    groups_that_vary = sum(len(set(boxes[i : i + 8])) == 2 for i in range(0, len(boxes), 8))
    assert groups_that_vary >= 4


ONE_LAYER = {"num_hidden_layers": 1}
"""The shape of a model with the shipped one's matrices, and fewer. On a processor that cannot
multiply in bfloat16, one step of Muon takes longer than all else in these tests.
"""


def test_same_command_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in this process, in which much has happened before."""

    def command(name: str) -> list[str]:
        flags = [
            "--seed",
            "3",
            "--steps",
            "1",
            "--calculator-steps",
            "1",
            "--eval-problems",
            "0",
            "--threads",
            "1",
        ]
        return ["--output", str(tmp_path / name), *flags]

    program = f"""if True:
        import runpy
        from studies.starter_model import training
        training.SHAPE |= {ONE_LAYER}
        runpy.run_module("studies.starter_model", run_name="__main__", alter_sys=True)"""
    by_itself = run_command([sys.executable, "-c", program, *command("a")], program="light")
    assert by_itself.returncode == 0, by_itself.stdout
    monkeypatch.setattr(training, "SHAPE", training.SHAPE | ONE_LAYER)
    threads = torch.get_num_threads()
    make_starter_model.main(command("b"))
    torch.set_num_threads(threads)
    one, again = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"
    )
    assert one == again
    assert set(one) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_log.jsonl",
    }
    assert "## Figures\n\nNone were measured" in one["README.md"].decode()


def test_the_figures_are_those_of_the_model_whoever_measures_it(tmp_path: Path) -> None:
    """The shipped model, which ends its replies: an untrained one writes each of them to the
    longest.
    """
    first = json.loads((SHIPPED / "training_log.jsonl").read_text().splitlines()[0])["plan"]
    flags = [
        "--first-stage",
        SHIPPED,
        "--calculator-steps",
        "0",
        "--eval-problems",
        "1",
        "--threads",
        "1",
    ]
    words = [sys.executable, "-m", "studies.starter_model", "--output", tmp_path / "out", *flags]
    words += ["--seed", str(first["seed"]), "--steps", str(first["steps"])]
    done = run_command(words)
    assert done.returncode == 0, done.stdout
    log = [
        json.loads(line)
        for line in (tmp_path / "out" / "training_log.jsonl").read_text().splitlines()
    ]
    figures = [line["habits"] for line in log if "habits" in line]
    habits, calls = figures[:3], figures[3:]
    assert [row["difficulty"] for row in habits] == [1, 2, 3]
    assert [row["calculator_level"] for row in calls] == [1, 2, 3, 4]
    # One level each is measured again: it is the same code for all, and half of what this test
    # takes.
    assert habits[1] == measure_habits(shipped_model(), shipped_tokenizer(), 2, n=1).to_dict()
    assert calls[1] == measure_calls(shipped_model(), shipped_tokenizer(), 2, n=1).to_dict()
    page = (tmp_path / "out" / "README.md").read_text()
    assert "\nOn 1 held-out problems of each level" in page
    for rows in (habits, calls):
        row = " | ".join(f"{report['worked_accuracy']:.1%}" for report in rows)
        assert f"\n| correct when made to work it out | {row} |\n" in page


def test_a_second_stage_on_a_first_that_was_kept_gives_the_same_weights_and_another_seed_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SHAPE", training.SHAPE | ONE_LAYER)
    tokenizer = shipped_tokenizer()
    plan = dataclasses.replace(
        TrainingPlan(), seed=3, steps=1, batch_size=4, calculator_steps=1, calculator_batch_size=4
    )
    lines: list[dict[str, Any]] = [
        {"plan": dataclasses.asdict(plan), "threads": 1, "processor": "x", "torch": "y"}
    ]
    model = train(plan, tokenizer, lines.append)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    log = tmp_path / "training_log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))

    noted: list[dict[str, Any]] = []
    kept, taken = make_starter_model.first_stage(tmp_path, plan, tokenizer, noted.append)
    assert noted == [taken, *lines[1:]]
    assert "--first-stage FIRST --seed 3 --steps 1 --calculator-steps 1 --threads 1\n" in how_made(
        plan, 1, taken
    )
    other = train(dataclasses.replace(plan, seed=4), tokenizer, noted.append).state_dict()
    assert not any(
        torch.equal(other[name], weight)
        for name, weight in kept.state_dict().items()
        if "proj" in name
    )
    at_once, later = (
        train_calculator(each, plan, tokenizer, noted.append).state_dict() for each in (model, kept)
    )
    assert all(torch.equal(at_once[name], later[name]) for name in at_once)

    with pytest.raises(SystemExit, match="made with --seed 3 --steps 1"):
        make_starter_model.first_stage(
            tmp_path, dataclasses.replace(plan, seed=4), tokenizer, noted.append
        )
    log.write_text(log.read_text() + json.dumps(noted[-1]) + "\n")
    with pytest.raises(SystemExit, match="has been through the second stage"):
        make_starter_model.first_stage(tmp_path, plan, tokenizer, noted.append)
