"""The judge environment with a judge over HTTP: its number is the reward, and anything else never
is.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.envs.single_turn import Response
from atroposlib.errors import EnvironmentFailure, InferenceUnavailable, RolloutFailure, UsageError
from atroposlib.inference.chat_template import harmless
from atroposlib.utils.jsonl import BadRow, train_and_test
from environments.judge_server import (
    HELD_OUT_TOPICS,
    JudgeEnv,
    Prompt,
    judge_messages,
    made_prompts,
    read_prompt,
    read_score,
)
from tests.atroposlib.envs.env_stack import Stack
from tests.environments.standin_judge import Judge, judging

ROOT = Path(__file__).resolve().parents[2]
JUDGE = ROOT / "environments" / "judge_server.py"
QUESTION = Prompt("a question")


@pytest.fixture
def judge() -> Iterator[Judge]:
    with judging() as server:
        yield server


@pytest.fixture
def env(tokenizer_dir: Path, judge: Judge) -> JudgeEnv:
    config, servers = JudgeEnv.config_init()
    config.tokenizer_name, config.judge_url = str(tokenizer_dir), judge.url
    return JudgeEnv(config, servers)


def graded(env: JudgeEnv, text: str = "an answer", prompt: Prompt = QUESTION) -> tuple[float, bool]:
    async def run() -> tuple[float, bool]:
        await env.setup()
        try:
            grade = await env.grade(prompt, Response(text, 3, True))
        finally:
            assert env.judge is not None
            await env.judge.close()
            env.judge = None
        return grade.score, grade.correct

    return asyncio.run(run())


def test_the_judge_sees_the_answer_without_its_reasoning(env: JudgeEnv, judge: Judge) -> None:
    judge.says = ["Score: 2 would be too low.</think>\nScore: 7"]
    assert graded(env, "<think>a secret thought</think>an answer") == (0.7, True)
    (asked,) = judge.asked
    assert "an answer" in asked["messages"][0]["content"]
    assert "secret" not in asked["messages"][0]["content"]
    assert graded(env, "<think>a thought without an end") == (0.0, False)
    assert len(judge.asked) == 1, "there is nothing to judge"


def test_the_judges_number_is_the_score(
    env: JudgeEnv, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sesame")
    judge.says = ["It is fine.\nScore: 7"]
    assert graded(env) == (0.7, True)
    (asked,) = judge.asked
    assert (asked["model"], asked["temperature"], asked["authorization"]) == (
        "the-judge",
        0.0,
        "Bearer sesame",
    )
    env.config.judge_samples = 2
    judge.says = ["Score: 2", "**Score: 4/10**"]
    assert graded(env, prompt=Prompt("q", "Is it short?")) == (pytest.approx(0.3), False)
    assert "Is it short?" in judge.asked[-1]["messages"][0]["content"]


def test_nonsense_is_asked_again_counted_and_never_a_score(
    env: JudgeEnv, judge: Judge, caplog: pytest.LogCaptureFixture
) -> None:
    judge.says = ["I like it", "Score: eleven", "Score: 10"]
    assert graded(env) == (1.0, True)
    assert [asked["temperature"] for asked in judge.asked] == [0.0, 0.7, 0.7]
    judge.says = ["Score: 11"]
    for _ in range(2):
        with pytest.raises(RolloutFailure, match="no number in 3 attempts: 'Score: 11'"):
            graded(env)
    assert env.drops.metrics()["train/dropped_judge_nonsense"] == 8
    assert caplog.text.count("ask another model (--env.judge_url) (logged once)") == 1


def test_a_judgement_that_was_cut_off_has_no_score(
    env: JudgeEnv, judge: Judge, caplog: pytest.LogCaptureFixture
) -> None:
    judge.reason, judge.says = "length", ["Is it worth a high number?\nScore: 9\nNo, because"]
    with pytest.raises(RolloutFailure, match="no number in 3 attempts"):
        graded(env)
    assert caplog.text.count("raise --env.judge_max_tokens") == 1


@pytest.mark.parametrize(
    ("status", "failure", "message"),
    [
        (401, UsageError, "set JUDGE_API_KEY"),
        (404, UsageError, "address right, and is --env.judge_model_name"),
        (400, RolloutFailure, "refuses: .*refused with 400"),
        (429, RolloutFailure, "refuses: .*refused with 429"),
    ],
)
def test_a_refusal_is_named(
    env: JudgeEnv, judge: Judge, status: int, failure: type[Exception], message: str
) -> None:
    judge.says = [status]
    with pytest.raises(failure, match=message):
        graded(env)
    assert env.drops.metrics()["train/dropped_judge_refused"] == 1


@pytest.fixture
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that fails is not tried again after a while."""
    monkeypatch.setattr("atroposlib.inference.client.MAX_ATTEMPTS", 1)


@pytest.mark.usefixtures("asked_once")
def test_what_is_no_completion_at_all_is_counted_and_said_once(
    env: JudgeEnv, judge: Judge, caplog: pytest.LogCaptureFixture
) -> None:
    judge.says = [b"<html>a page</html>"]
    for _ in range(2):
        with pytest.raises(RolloutFailure, match=r"answered no completion, but .*a page"):
            graded(env)
    assert env.drops.metrics()["train/dropped_judge_nonsense"] == 2
    assert caplog.text.count("is that an OpenAI endpoint? (logged once)") == 1


@pytest.mark.usefixtures("asked_once")
def test_a_judge_that_answers_too_late_is_counted_as_that(env: JudgeEnv, judge: Judge) -> None:
    judge.says = [60.0]
    env.config.judge_timeout = 0.1
    asyncio.run(env.setup())
    assert env.judge is not None
    env.judge.config.timeout = 0.05  # type: ignore[assignment]
    with pytest.raises(RolloutFailure, match="APITimeoutError"):
        graded(env)
    assert env.drops.metrics()["train/dropped_judge_late"] == 1


def test_a_judge_that_is_away_is_waited_for_and_given_up_in_time(
    env: JudgeEnv, judge: Judge
) -> None:
    judge.says = [503, 503, "Score: 4"]
    assert graded(env) == (0.4, False)
    judge.says = [503]
    env.config.judge_timeout = 1.0
    with pytest.raises(InferenceUnavailable, match="judge at http://127") as failure:
        graded(env)
    assert isinstance(failure.value, EnvironmentFailure)
    assert env.drops.metrics()["train/dropped_judge_away"] == 1


@pytest.mark.e2e
def test_the_served_model_may_judge(
    stack: Stack, shared_inference: str, tokenizer_dir: Path
) -> None:
    stack.use_inference(shared_inference, text="Quite good.\nScore: 8")
    config, (server,) = JudgeEnv.config_init()
    config.tokenizer_name, server.base_url = str(tokenizer_dir), f"{shared_inference}/v1"
    env = JudgeEnv(config, [server])

    async def run() -> float:
        await env.setup()
        score = (await env.grade(QUESTION, Response("an answer", 3, True))).score
        await env.server.close()
        return score

    assert asyncio.run(run()) == 0.8


@pytest.mark.e2e
def test_it_serves_a_trainer_what_the_judge_says(
    stack: Stack, shared_inference: str, judge: Judge
) -> None:
    stack.use_inference(shared_inference, text="an answer")
    stack.start_service()
    stack.register_trainer(num_steps=1, batch_size=8)
    stack.next_batch()
    # The first item meets nonsense, and is given up; then every group of four has two judgements of
    # each kind.
    judge.says = ["nonsense"] * 12 + ["Score: 2", "Score: 9"] * 200
    flags = ("--env.group_size", "4", "--env.judge_url", judge.url, "--env.max_num_workers", "1")
    environment = stack.start_environment(JUDGE, *flags)
    (batch,) = stack.take_batches(1)
    assert all(set(group["scores"]) == {0.2, 0.9} for group in batch)
    log = environment.log_path.read_text()
    assert (
        log.count(
            "the judge gave no number: 'nonsense'; ask another model (--env.judge_url) "
            "(logged once)"
        )
        == 1
    )
    assert "an item was given up: the judge gave no number in 3 attempts" in log
    assert "Traceback" not in log


@given(
    st.floats(0, 10).map(lambda value: round(value, 2)), st.text(alphabet="ab \n*:0", max_size=40)
)
def test_the_last_number_counts(value: float, before: str) -> None:
    assert read_score(f"{before}\nScore: {value}") == pytest.approx(value / 10)
    assert read_score(f"Score: {value}\n</think>{before}") is None
    assert read_score(f"Score: 3\nScore: {value + 10.5}") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "Score:",
        "Score: -1",
        "Score -1",
        "Score - 70",
        "Score: nan",
        "Score: 1e3",
        "the Score: 7 is what I give",
        "Score: 7 or 8",
        "Score: 9\nScore: not yet",
        "Score: 4/5",
        "Score: 8%",
        "Score: 3\nFinal Score: 70",
    ],
)
def test_what_is_no_score(text: str) -> None:
    assert read_score(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "Score: 7 out of 10",
        "Clarity\nScore: 9\n**Final Score: 7/10**",
        "Score：7",
        "Score - 7",
        "**Score** – 7/10",
        "- Score: 7",
        r"Score: \boxed{7}",
        "Score: $7$",
        "`Score: 7`",
        "Score: [7]",
        "Overall score: 7 points.",
        "### Score\n\n**Score**: **7/10**",
        "score 7",
    ],
)
def test_spellings_of_a_score(text: str) -> None:
    assert read_score(text) == 0.7


@given(st.text(max_size=300))
def test_an_answer_cannot_end_itself(answer: str) -> None:
    (message,) = judge_messages("q", "r", answer)
    content = str(message["content"])
    mark = content.partition("[")[2].partition("]")[0]
    assert content.count(f"[{mark}]") == 3
    assert content.partition(f"\n[{mark}]\n")[2].partition(f"\n[{mark}]\n")[0] == harmless(answer)


def test_requests_of_the_openai_client_are_not_logged(judge: Judge) -> None:
    code = (
        "from atroposlib.envs.runner.command_line import configure_logging; configure_logging()\n"
        f"import openai; client = openai.OpenAI(base_url={judge.url!r}, api_key='a key')\n"
        "client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'q'}])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env=os.environ | {"LOG_LEVEL": "INFO"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("", "")


def test_prompts_are_read_and_held_out(env: JudgeEnv, tmp_path: Path) -> None:
    assert read_prompt({"prompt": " p ", "rubric": "r"}) == Prompt("p", "r")
    for row, fault in (
        ([], "not a JSON object with prompt"),
        ({"prompt": 3}, "'prompt': input should be"),
        ({"prompt": "p", "rubric": 1}, "'rubric': input should be"),
    ):
        with pytest.raises(BadRow, match=fault):
            read_prompt(row)
    (tmp_path / "p.jsonl").write_text('{"prompt": "p"}\n\n{"prompt": ""}\n')
    assert train_and_test(tmp_path / "p.jsonl", read_prompt, "prompts", env.drops.add) == (
        [Prompt("p")],
        [Prompt("p")],
    )
    assert env.drops.metrics()["train/dropped_bad_rows"] == 1
    with pytest.raises(UsageError, match="cannot read"):
        train_and_test(tmp_path / "nothing.jsonl", read_prompt, "prompts", env.drops.add)
    train, test = made_prompts()
    assert len({prompt.text for prompt in train}) == len(train) > 300
    assert not any(
        re.search(rf"\b{topic}\b", prompt.text) for topic in HELD_OUT_TOPICS for prompt in train
    )
    assert test
