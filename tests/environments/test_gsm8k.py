"""GSM8K: reading the data, order, grading, the two adjustments of the reward; and the real data where it is at hand."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.single_turn import Grade, Response
from atroposlib.errors import UsageError
from environments.gsm8k_data import Question, load_from_path, read_file, read_row, shuffled
from environments.gsm8k_server import Gsm8kEnv
from tests.atroposlib.envs.env_stack import Stack

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT / "environments" / "gsm8k_server.py"
DATA = ROOT.parent / "shared" / "gsm8k"
needs_data = pytest.mark.skipif(not (DATA / "test.jsonl").exists(), reason=f"the real GSM8K is not at {DATA}")


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


GOOD = {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"}


def test_gold_is_what_follows_the_marks_without_commas() -> None:
    assert read_row({"question": " q ", "answer": "text #### 3\nmore\n#### 1,234,567 "}, "row") == Question("q", "1234567")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": oops', "line 2: not JSON"),
        ("[1, 2]", "line 2: not a JSON object"),
        ({"question": "q"}, "line 2: 'answer' is missing"),
        ({"question": "", "answer": "#### 1"}, "line 2: 'question' is missing"),
        ({"question": "q", "answer": 7}, "line 2: 'answer' is missing or no text"),
        ({"question": "q", "answer": "no marks"}, "line 2: 'answer' has no final answer after ####"),
        ({"question": "q", "answer": "#### "}, "line 2: 'answer' has no final answer"),
    ],
)
def test_a_broken_line_is_named_with_its_file(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        read_file(write(tmp_path / "train.jsonl", GOOD, line, GOOD))
    assert str(refusal.value).startswith(str(tmp_path / "train.jsonl"))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.jsonl", write(tmp_path / "empty.jsonl", "", " ")):
        with pytest.raises(UsageError, match=path.name):
            read_file(path)
    write(tmp_path / "train.jsonl", GOOD)
    with pytest.raises(UsageError, match=r"test\.jsonl"):
        load_from_path(tmp_path)


def test_order_is_that_of_the_datasets_package() -> None:
    datasets = pytest.importorskip("datasets")
    questions = [Question(str(i), str(i)) for i in range(50)]
    theirs = datasets.Dataset.from_dict({"n": list(range(50))}).shuffle(seed=42)["n"]
    assert [int(question.gold) for question in shuffled(questions, 42)] == list(theirs)


@pytest.fixture
def env(tokenizer_dir: Path) -> Iterator[Gsm8kEnv]:
    from atroposlib.utils.math_scoring import MathScorer

    config, servers = Gsm8kEnv.config_init()
    config.tokenizer_name = str(tokenizer_dir)
    made = Gsm8kEnv(config, servers)
    made.scorer = MathScorer()
    yield made
    made.scorer.close()


def graded(env: Gsm8kEnv, text: str, finished: bool = True, gold: str = "18") -> Grade:
    return asyncio.run(env.grade(Question("q", gold), Response(text, 5, finished)))


def test_the_last_box_decides(env: Gsm8kEnv) -> None:
    assert graded(env, r"\boxed{17} no, \boxed{18}") == Grade(1.0, True, "18")
    assert graded(env, r"\boxed{18} no, \boxed{17}") == Grade(-1.0, False, "17")
    assert graded(env, "it is 18") == Grade(-1.0, False, None)
    assert graded(env, r"<think>\boxed{18}</think> I forgot").correct is False
    assert graded(env, r"\boxed{\$18.00}").correct is True


def test_format_reward_is_partial_credit_for_wrong_answers_only(env: Gsm8kEnv) -> None:
    env.config.format_reward = True
    assert graded(env, r"\boxed{17}").score == -0.5
    assert graded(env, r"\boxed{17}", finished=False).score == -0.75
    assert graded(env, r"\boxed{17} \boxed{16}").score == -0.75
    assert graded(env, "no box", finished=False).score == -1.0
    assert graded(env, r"\boxed{18}").score == 1.0


def test_length_costs_only_where_every_answer_is_right(env: Gsm8kEnv) -> None:
    env.config.max_token_length = 100
    right, wrong = Grade(1.0, True), Grade(-1.0, False)
    lengths = [Response("", n, True) for n in (10, 50, 75, 100)]
    assert env.adjust_scores([right] * 4, lengths) == [1.0, 1.0, 0.5, 0.0]
    assert env.adjust_scores([right, right, right, wrong], lengths) == [1.0, 1.0, 1.0, -1.0]


@needs_data
def test_every_gold_answer_of_the_real_data_is_a_number_that_scores(env: Gsm8kEnv) -> None:
    from atroposlib.utils.math_scoring import as_number

    train, test = load_from_path(DATA)
    assert (len(train), len(test)) == (7473, 1319)
    assert all(as_number(question.gold) is not None for question in train + test)


@pytest.mark.e2e
@needs_data
def test_the_real_data_is_served_and_evaluated(stack: Stack, shared_inference: str, tmp_path: Path) -> None:
    stack.use_inference(shared_inference)
    output = tmp_path / "result.json"
    flags = ("--env.dataset_path", str(DATA), "--env.eval_size", "20", "--env.eval_output", str(output))
    stack.processes.finish(stack.start_environment(GSM8K, "evaluate", *flags), 120)
    result = json.loads(output.read_text())
    assert (result["environment"], result["num_problems"]) == ("gsm8k", 20)
    samples = [json.loads(line) for line in output.with_name("result.samples.jsonl").read_text().splitlines()]
    assert samples[0]["messages"][0]["role"] == "system"
    assert "\\boxed{" in samples[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--env.dataset_path", "/nowhere"), "error: --env.dataset_path: cannot read /nowhere"),
        (("--env.dataset_pat", "x"), "error: unknown flag --env.dataset_pat (did you mean --env.dataset_path?)"),
    ],
)
def test_the_program_ends_with_one_clear_line(flags: tuple[str, ...], message: str) -> None:
    ended = subprocess.run(
        [sys.executable, str(GSM8K), *flags],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(message)
    assert len(ended.stderr.strip().splitlines()) == 1


def test_without_the_hub_it_says_which_flag_to_pass() -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent", "HF_DATASETS_CACHE": "/tmp/none"}
    ended = subprocess.run([sys.executable, str(GSM8K)], capture_output=True, text=True, timeout=180, env=environment)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: cannot load gsm8k/main")
    assert "--env.dataset_path" in last
