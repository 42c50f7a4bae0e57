"""The starter model: its texts, its tokenizer, how it is made, and what the shipped files do."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)

from environments.arithmetic_server import Operator, Problem, is_held_out
from environments.calculator_server import CALL_START, OFFER, call
from studies.starter_model import __main__ as make_starter_model
from studies.starter_model.data import Mixture, examples
from studies.starter_model.habits import BOX_OPEN, boxed, hurried_answer, worked_out
from studies.starter_model.tokenizer import TURN_END, continuation, conversation
from studies.starter_model.training import TrainingPlan

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "assets" / "starter_model"
CALCULATOR = REPOSITORY / "assets" / "calculator_model"
GSM8K = REPOSITORY.parent / "shared" / "gsm8k" / "test.jsonl"
needs_gsm8k = pytest.mark.skipif(
    not GSM8K.exists(), reason=f"{GSM8K} is absent: the GSM8K questions are not shipped"
)
numbers = st.integers(10, 999)
operators: st.SearchStrategy[Operator] = st.sampled_from(("+", "-"))
pytestmark = pytest.mark.timeout(300)


@functools.cache
def shipped_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(SHIPPED)


@functools.cache
def shipped_model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(SHIPPED).eval()


@functools.cache
def calculator_model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(CALCULATOR).eval()


@functools.cache
def gsm8k_questions() -> list[str]:
    return [json.loads(line)["question"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]


def make_problem(left: int, operator: Operator, right: int) -> Problem:
    if operator == "-":
        left, right = max(left, right), min(left, right)
    return Problem("", left + right if operator == "+" else left - right, 1, left, operator, right)


# Habits


@given(left=numbers, operator=operators, right=numbers)
def test_every_line_of_a_worked_sum_is_true_and_together_they_spell_the_answer(
    left: int, operator: Operator, right: int
) -> None:
    problem = make_problem(left, operator, right)
    *sentences, last = worked_out(problem).split(". ")
    assert last == boxed(problem.answer)
    spelled = ""
    for sentence in sentences:
        calculation, _, remark = sentence.partition(", ")
        terms, result = calculation.split(" = ")
        signed = re.findall(r"(?:^|([+-]) )(\d+)", terms)
        assert sum(-int(term) if sign == "-" else int(term) for sign, term in signed) == int(result)
        assert remark in ("", "carry 1", "borrow 1")
        spelled = (result if sentence is sentences[-1] else result[-1]) + spelled
    assert int(spelled) == problem.answer
    assert not sentences[-1].endswith(("carry 1", "borrow 1"))


@given(left=numbers, operator=operators, right=numbers)
def test_a_hurried_answer_is_right_exactly_when_nothing_is_carried(
    left: int, operator: Operator, right: int
) -> None:
    problem = make_problem(left, operator, right)
    text = worked_out(problem)
    carries = "carry" in text or "borrow" in text
    assert (hurried_answer(problem.left, operator, problem.right) == problem.answer) is not carries


# Supervised examples


def test_examples_repeat_with_their_seed_and_keep_their_shares() -> None:
    mixture = Mixture(worked=0.3, story=0.1, instructed=0.2)
    drawn = list(itertools.islice(examples(5, mixture), 4000))
    assert drawn == list(itertools.islice(examples(5, mixture), 4000))
    assert drawn != list(itertools.islice(examples(6, mixture), 4000))
    shares = {
        kind: sum(example.kind == kind for example in drawn) / len(drawn)
        for kind in ("at once", "worked", "story")
    }
    assert shares == pytest.approx({"at once": 0.63, "worked": 0.27, "story": 0.1}, abs=0.03)
    assert sum(example.system is not None for example in drawn) / len(drawn) == pytest.approx(
        0.2, abs=0.03
    )


@pytest.mark.parametrize("offered", [0.0, 1.0])
def test_no_example_holds_a_held_out_pair(offered: float) -> None:
    mixture = Mixture(worked=0.5, story=0.0, instructed=0.0, offered=offered, called=0.5)
    for example in itertools.islice(examples(1, mixture), 20_000):
        left, right, *_ = map(int, re.findall(r"\d+", example.question))
        assert not is_held_out(left, right)


def test_a_call_asks_what_the_question_asks_and_its_answer_goes_into_the_box() -> None:
    mixture = Mixture(worked=0.3, offered=0.6, called=0.5)
    drawn = list(itertools.islice(examples(5, mixture), 4000))
    calls = [example for example in drawn if example.kind == "called"]
    assert len(calls) / len(drawn) == pytest.approx(0.3, abs=0.03)
    assert sum(example.system == OFFER for example in drawn) / len(drawn) == pytest.approx(
        0.6, abs=0.03
    )
    for example in calls:
        assert example.system == OFFER
        assert re.findall(r"\d+", example.reply) == re.findall(r"\d+", example.question)
        assert example.last_reply == boxed(int(example.result or ""))
    long = [
        e
        for e in drawn
        if e.system == OFFER and any(len(n) > 2 for n in re.findall(r"\d+", e.question))
    ]
    assert {example.kind for example in long} == {"at once", "called"}


def test_the_finished_models_share_of_calls_is_that_of_the_weights() -> None:
    plan = TrainingPlan()
    weights = {"called": 0.0, "other": 0.0}
    for example in itertools.islice(examples(0, plan.calculator_mixture(0)), 8000):
        if example.system == OFFER:
            weights["called" if example.kind == "called" else "other"] += plan.decision_weight(
                example
            )
        else:
            assert plan.decision_weight(example) == 1.0
    assert weights["called"] / sum(weights.values()) == pytest.approx(
        plan.called_at_the_end, abs=0.01
    )


# The tokenizer that ships


@given(text=st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = shipped_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_and_the_box_are_single_tokens() -> None:
    tokenizer = shipped_tokenizer()
    with_digits = [token for token in tokenizer.get_vocab() if re.search(r"\d", token)]
    assert sorted(with_digits) == list("0123456789")
    for before in ("", " ", "is ", "(", "."):
        assert tokenizer.tokenize(f"{before}{BOX_OPEN}85}}")[-4:] == [BOX_OPEN, "8", "5", "}"]


def test_chat_template_marks_every_turn() -> None:
    tokenizer = shipped_tokenizer()
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "47 + 38 = ?"}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n47 + 38 = ?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.eos_token_id) == 2
    assert tokenizer.eos_token == "<|im_end|>"
    assert "chat_template" in json.loads((SHIPPED / "tokenizer_config.json").read_text())


def test_the_turns_after_a_call_are_learned_as_the_chat_template_writes_them() -> None:
    tokenizer = shipped_tokenizer()
    turns = [{"role": "system", "content": OFFER}, {"role": "user", "content": "37 * 48 = ?"}]
    asked = [{"role": "assistant", "content": call("37*48")}, {"role": "tool", "content": "1776"}]
    learned = conversation(tokenizer, turns) + call("37*48") + TURN_END + continuation("1776")
    assert conversation(tokenizer, [*turns, *asked]) == learned
    assert tokenizer.tokenize(call("37*48"))[0] == tokenizer.tokenize(CALL_START)[0] != BOX_OPEN


@needs_gsm8k
def test_a_gsm8k_question_takes_a_few_hundred_tokens_at_most() -> None:
    tokenizer = shipped_tokenizer()
    questions = gsm8k_questions()
    encoded = [tokenizer.encode(question) for question in questions]
    assert [tokenizer.decode(ids) for ids in encoded] == questions
    assert max(map(len, encoded)) < 400
    assert sum(map(len, encoded)) / len(encoded) < 120


# The model that ships


def test_shipped_files_are_small_complete_and_can_be_split_in_two() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 10_000_000
    config = shipped_model().config
    assert config.model_type == "qwen3"
    assert config.head_dim == 128
    assert config.tie_word_embeddings
    assert config.max_position_embeddings >= 2048
    assert config.vocab_size == len(shipped_tokenizer())
    for size in (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.vocab_size,
        config.intermediate_size,
    ):
        assert size % 2 == 0
    assert 1_000_000 <= sum(p.numel() for p in shipped_model().parameters()) <= 3_000_000
    assert shipped_model().generation_config.eos_token_id == shipped_tokenizer().eos_token_id


def test_shipped_log_and_readme_name_the_plan_that_the_code_holds() -> None:
    first, *records = [
        json.loads(line) for line in (SHIPPED / "training_log.jsonl").read_text().splitlines()
    ]
    plan = TrainingPlan()
    assert (
        first["plan"].items()
        <= {field: getattr(plan, field) for field in TrainingPlan.__dataclass_fields__}.items()
    )
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0] / 5
    assert (
        f"--seed {plan.seed} --steps {plan.steps} --threads {first['threads']}"
        in (SHIPPED / "README.md").read_text()
    )


def test_the_calculator_s_model_is_the_starter_model_after_the_second_stage_of_the_plan() -> None:
    first, taken, *_ = [
        json.loads(line) for line in (CALCULATOR / "training_log.jsonl").read_text().splitlines()
    ]
    plan = dataclasses.replace(TrainingPlan(), calculator_steps=first["plan"]["calculator_steps"])
    assert first["plan"] == json.loads(json.dumps(dataclasses.asdict(plan)))
    assert (
        taken["sha256"] == hashlib.sha256((SHIPPED / "model.safetensors").read_bytes()).hexdigest()
    )
    second = f"--calculator-steps {plan.calculator_steps} --threads {first['threads']}\n"
    assert second in (CALCULATOR / "README.md").read_text()
    figures = json.loads((REPOSITORY / "bench" / "results" / "calculator.json").read_text())
    shipped = hashlib.sha256((CALCULATOR / "model.safetensors").read_bytes()).hexdigest()
    assert {run["model_sha256"] for run in figures.values()} == {shipped}, (
        "the figures that are shown are of another model"
    )
    assert sum(path.stat().st_size for path in CALCULATOR.iterdir()) <= 10_000_000


# The command


@pytest.mark.parametrize(
    "flags", [("--steps", "0"), ("--eval-problems", "5000"), ("--first-stage", "/nowhere")]
)
def test_bad_options_are_refused_by_name(
    tmp_path: Path, flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        make_starter_model.main(["--output", str(tmp_path / "out"), *flags])
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
