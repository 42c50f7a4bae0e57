"""reasoning-gym's tasks by name: which questions come, what is refused, and how answers are scored."""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.runner.command_line import merge, parse_flags
from atroposlib.envs.single_turn import Grade, Response
from atroposlib.errors import EnvironmentFailure, UsageError
from environments import reasoning_gym_server
from environments.reasoning_gym_server import ReasoningGymConfig, ReasoningGymEnv, last_tagged
from environments.reasoning_gym_tasks import (
    INSTALL,
    Question,
    Questions,
    TaskSettings,
    score_in_this_process,
)

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module", autouse=True)
def _needs_the_package() -> None:
    pytest.importorskip("reasoning_gym", reason=INSTALL)


def made(seed: int = 1, held_out: int = 10, **tasks: dict[str, Any]) -> Questions:
    return Questions(
        {name: TaskSettings(**settings) for name, settings in tasks.items()}, seed, held_out
    )


def test_a_number_is_always_the_same_question_and_seeds_have_their_own() -> None:
    tasks: dict[str, dict[str, Any]] = {
        "chain_sum": {},
        "gcd": {"weight": 3.0},
        "number_sequence": {},
    }
    first, again, other = made(1, **tasks), made(1, **tasks), made(2, **tasks)
    numbers = [0, 1, 2, 499, 500, 501, 1200]
    assert [first.training(n) for n in numbers] == [again.training(n) for n in reversed(numbers)][
        ::-1
    ]
    assert not {first.training(n).text for n in range(60)} & {
        other.training(n).text for n in range(60)
    }
    assert first.held_out == other.held_out, "the benchmark is the same for every run"
    assert [question.task for question in first.held_out[:4]] == [
        "chain_sum",
        "gcd",
        "number_sequence",
        "chain_sum",
    ]
    drawn = Counter(first.training(n).task for n in range(400))
    assert 200 < drawn["gcd"] < 280, "three fifths of 400"


def test_no_held_out_question_is_trained_on_even_where_there_are_few() -> None:
    few = made(3, held_out=60, chain_sum={"settings": SMALL})
    held_out = {question.text for question in few.held_out}
    assert len(held_out) == 60
    assert not held_out & {few.training(n).text for n in range(300)}
    with pytest.raises(
        EnvironmentFailure,
        match=r"of 600 different questions to hold out were found: lower --env\.eval_size",
    ):
        made(held_out=600, chain_sum={"settings": SMALL})


def test_a_level_is_the_curriculum_s_and_settings_go_over_it() -> None:
    def terms(**task: Any) -> set[int]:
        questions = made(chain_sum=task)
        return {
            question.entry["metadata"]["num_terms"]
            for question in (questions.training(n) for n in range(40))
        }

    assert terms(level=0) == {2}
    assert max(terms(level=3)) > max(terms(level=1)) > 2
    assert terms(level=3, settings={"min_terms": 2, "max_terms": 2}) == {2}
    assert max(terms(level={"num_terms": 1})) == max(terms(level=1))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"chain_sums": {}}, "no task 'chain_sums' (did you mean chain_sum?)"),
        ({"composite": {}}, "no task 'composite'"),
        (
            {"chain_sum": {"settings": {"max_term": 3}}},
            "chain_sum has no setting 'max_term' (did you mean max_terms?)",
        ),
        ({"chain_sum": {"settings": {"seed": 3}}}, "chain_sum has no setting 'seed'"),
        (
            {"chain_sum": {"settings": {"min_terms": 0}}},
            "chain_sum refuses its settings: min_terms must be positive",
        ),
        ({"chain_sum": {"level": 99}}, "chain_sum has no level 99; it has 0 to"),
        (
            {"chain_sum": {"level": {"terms": 1}}},
            "the curriculum of chain_sum has no 'terms' (did you mean num_terms?)",
        ),
        ({"chain_sum": {"level": {"num_terms": 99}}}, "num_terms of chain_sum has no level 99"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(
    task: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        made(**task)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def config(*flags: str) -> ReasoningGymConfig:
    default, servers = ReasoningGymEnv.config_init()
    merged = merge(default, servers, parse_flags([*flags], ReasoningGymConfig), {}).env
    assert isinstance(merged, ReasoningGymConfig)
    return merged


def test_tasks_are_named_on_the_command_line_or_in_a_table() -> None:
    assert config("--env.tasks", "gcd, chain_sum").tasks == {
        "gcd": TaskSettings(),
        "chain_sum": TaskSettings(),
    }
    table = config(
        "--env.tasks", "{gcd: {weight: 2, settings: {max_numbers: 3}}, chain_sum: {level: 1}}"
    ).tasks
    assert table == {
        "gcd": TaskSettings(weight=2, settings={"max_numbers": 3}),
        "chain_sum": TaskSettings(level=1),
    }
    for wrong, message in (
        ("{gcd: {wight: 2}}", "wight"),
        ("{gcd: {weight: 0}}", "greater than 0"),
        (",", "at least one task"),
    ):
        with pytest.raises(UsageError, match=message):
            config("--env.tasks", wrong)


def test_the_last_tags_hold_the_answer() -> None:
    assert last_tagged("<answer>1</answer> no, <answer> 2 </answer> so") == "2"
    assert last_tagged("<answer>1</answer> no, <answer> 2") == "1"
    assert last_tagged("<answer>5</answer></answer>") == "5"
    assert last_tagged("1</answer>") is last_tagged("<answer>1") is last_tagged("") is None


@pytest.fixture(scope="module")
def env(tokenizer_dir: Path) -> Iterator[ReasoningGymEnv]:
    settings, servers = ReasoningGymEnv.config_init()
    settings.tokenizer_name = str(tokenizer_dir)
    settings.tasks = {
        "chain_sum": TaskSettings(),
        "prime_factorization": TaskSettings(),
        "complex_arithmetic": TaskSettings(),
    }
    settings.eval_size = 3
    made = ReasoningGymEnv(settings, servers)
    asyncio.run(made.setup())
    yield made
    made.children.close()


def graded(env: ReasoningGymEnv, question: Question, text: str) -> Grade:
    return asyncio.run(env.grade(question, Response(text, 5, True)))


def test_a_score_from_0_to_1_is_laid_over_minus_1_to_1(env: ReasoningGymEnv) -> None:
    question = env.questions.held_out[0]
    answer = question.entry["answer"]
    assert graded(env, question, f"so <answer> {answer} </answer>") == Grade(1.0, True, answer)
    assert graded(env, question, f"<think><answer>{answer}</answer></think> I forgot") == Grade(
        -1.0, False, None
    )
    unended = Response(f"<answer>{answer}</answer>", 5, False, "<think>\n")
    assert asyncio.run(env.grade(question, unended)) == Grade(-1.0, False, None)
    padded = graded(env, question, f"<answer>{'x' * len(answer)}{answer}</answer>")
    assert padded.score == pytest.approx(0.0), (
        "the package gives half for an answer twice as long that holds the right one"
    )
    assert not padded.correct
    env.config.partial_credit = False
    assert graded(env, question, f"<answer>{'x' * len(answer)}{answer}</answer>").score == -1.0
    env.config.partial_credit = True


def test_an_answer_that_cannot_be_scored_is_wrong_and_counted(
    env: ReasoningGymEnv, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = env.questions.held_out[1]
    for _ in range(3):
        assert graded(env, question, "<answer>two times three</answer>") == Grade(
            -1.0, False, "two times three"
        )
    assert env.problems["unreadable_answers"] == 3
    assert (
        len(
            [
                record
                for record in caplog.records
                if "prime_factorization cannot read an answer" in record.message
            ]
        )
        == 1
    )
    monkeypatch.setattr(reasoning_gym_server, "SCORE_SECONDS", 1.0)
    monkeypatch.setattr(reasoning_gym_server, "score_in_this_process", hangs)
    assert graded(env, question, "<answer>9**9**9**9</answer>").score == -1.0
    assert env.problems["endless_answers"] == 1


def test_a_scorer_that_fails_over_its_own_answer_gives_no_score() -> None:
    entry = made(prime_factorization={}).held_out[0].entry
    del entry["answer"], entry["metadata"]
    with pytest.raises(KeyError):
        score_in_this_process("prime_factorization", json.dumps([None, {}]), entry, "2 × 3")


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(
        EnvironmentFailure, match=r"^the reasoning-gym package is not installed: pip install"
    ):
        made(chain_sum={})


def hangs(*_: object) -> float:
    time.sleep(60)
    return 0.0
