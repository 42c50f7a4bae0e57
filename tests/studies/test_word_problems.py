"""The generated word problems, their split and their tokenizer; and a tiny model made from them on
the CPU.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from example_trainer.models import load_model
from studies.word_problems import make_model
from studies.word_problems.make_model import IGNORED, PLANS, PROMPT_WEIGHT, batch_of, make_tokenizer
from studies.word_problems.problems import (
    DISTRACTORS,
    LARGEST,
    OPERAND,
    REWARDED_STEPS,
    held_out,
    tell,
    training,
)

pytestmark = pytest.mark.nightly

SUM = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)\.")
seeds, lengths = st.integers(0, 10**9), st.integers(1, 12)


@given(seeds, lengths)
def test_every_step_of_a_solution_is_right_and_goes_on_from_the_one_before(
    seed: int, steps: int
) -> None:
    story = tell(random.Random(seed), steps)
    sums = SUM.findall(story.solution)
    assert len(sums) == steps == story.steps
    value = int(re.findall(r"\d+", story.question)[0])
    for left, symbol, right, result in sums:
        assert int(left) == value
        value = {"+": value + int(right), "-": value - int(right), "*": value * int(right)}[symbol]
        assert int(result) == value
        assert 1 <= value <= LARGEST
        assert 2 <= int(right) <= OPERAND
        assert int(right) in map(int, re.findall(r"\d+", story.question))
    assert story.answer == value
    assert story.problem.score(story.solution) == 1.0
    assert story.problem.score(story.solution.replace(f"{{{value}}}", f"{{{value + 1}}}")) == -1.0


@given(seeds, lengths)
def test_the_story_can_be_followed_without_its_distractors(seed: int, steps: int) -> None:
    """Whose quantity it is stands in each line of the solution; the last one's is asked for."""
    story = tell(random.Random(seed), steps)
    *sentences, question = re.split(r"(?<=[.?]) ", story.question)
    assert steps + 1 <= len(sentences) <= steps + 1 + DISTRACTORS
    owners = re.findall(r"(\w+): ", story.solution)
    assert sentences[0].startswith(f"{owners[0]} has ")
    assert question.endswith(f" does {owners[-1]} have now?")


@given(seeds, st.sets(st.integers(1, 9), min_size=1, max_size=4))
def test_training_and_held_out_problems_are_told_apart_by_the_question_alone(
    seed: int, steps: set[int]
) -> None:
    stories = list(islice(training(seed, sorted(steps)), 20))
    assert not any(story.held_out for story in stories)
    assert {story.steps for story in stories} <= steps
    assert stories == list(islice(training(seed, sorted(steps)), 20))


def test_held_out_problems_are_the_same_ones_whatever_their_number() -> None:
    many = held_out(60)
    assert held_out(7) == many[:7]
    assert all(story.held_out for story in many)
    assert len({story.question for story in many}) == 60
    assert [story.steps for story in many[:10]] == [*REWARDED_STEPS, *REWARDED_STEPS]
    assert not {story.question for story in many} & {
        story.question for story in islice(training(0, REWARDED_STEPS), 500)
    }


def test_the_tokenizer_gives_back_what_it_got_and_answers_are_short_enough() -> None:
    tokenizer = make_tokenizer()
    texts = [text for story in held_out(100) for text in (story.question, story.solution)]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in [*texts, "Zoë's café ✓"]] == [
        *texts,
        "Zoë's café ✓",
    ]
    answers = [len(tokenizer.encode(story.solution)) for story in held_out(100)]
    assert 40 < sum(answers) / len(answers) < 150
    assert max(answers) < PLANS["medium"].longest
    digits = {
        token for token in tokenizer.get_vocab() if any(letter.isdecimal() for letter in token)
    }
    assert digits == set("0123456789"), "digits are never merged"


def test_targets_are_the_next_tokens_and_the_solution_counts_fully() -> None:
    tokenizer = make_tokenizer()
    stories = held_out(3)
    tokens, targets, weights = batch_of(stories, tokenizer)
    assert tokens.shape == targets.shape == weights.shape
    assert tokens.shape[1] % 32 == 0
    for row, target, weight, story in zip(tokens, targets, weights, stories, strict=True):
        shown = target[weight == 1.0].tolist()
        assert shown[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(shown[:-1]) == story.solution
        known = target != IGNORED
        assert torch.equal(target[known], row[1 : int(known.sum()) + 1])
        assert sorted(set(weight[known].tolist())) == pytest.approx([PROMPT_WEIGHT, 1.0])
        assert not weight[~known].any()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A second one costs such a small model more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shape", ["tiny", "tiny-mixture"])
def test_a_tiny_model_is_made_and_can_be_loaded(tmp_path: Path, shape: str) -> None:
    arguments = [
        "--output",
        str(tmp_path),
        "--shape",
        shape,
        "--device",
        "cpu",
        "--most-steps",
        "12",
        "--workers",
        "0",
    ]
    make_model.main(arguments)
    rows = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    assert rows[0]["measured"]["date"]
    assert (rows[1]["step"], rows[1]["solved"]) == (10, 0.0)
    assert rows[2]["steps"] == 12
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.vocab_size == len(tokenizer)
    tokens, targets, _ = batch_of(held_out(4, (1,)), tokenizer)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            model(tokens).logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED
        )
    assert loss < 0.8 * torch.log(torch.tensor(float(len(tokenizer)))), (
        "it has learned which tokens there are"
    )
    ours = load_model(str(tmp_path), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens), model(tokens).logits, atol=1e-4, rtol=1e-4)
