"""Mathematical questions: reading any dataset, suites, order, grading, adjustments of the reward;
GSM8K where at hand.
"""

import asyncio
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.envs.graded import Attempt
from atroposlib.envs.runner.command_line import merge, parse_flags
from atroposlib.envs.single_turn import Grade, Response
from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.utils.math_scoring import MathScorer, as_number
from atroposlib.utils.metrics import pass_at_k
from environments.gsm8k_server import Gsm8kEnv
from environments.math_server import (
    Columns,
    MathConfig,
    MathEnv,
    Question,
    gold_answer,
    load_from_path,
    load_suite,
    read_file,
    shuffled,
    suite_metrics,
)
from tests.atroposlib.envs.env_stack import Stack
from tests.forked_commands import run_command

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT / "environments" / "gsm8k_server.py"
MATH = ROOT / "environments" / "math_server.py"
DATA = ROOT.parent / "shared" / "gsm8k"
needs_data = pytest.mark.skipif(
    not (DATA / "test.jsonl").exists(), reason=f"the real GSM8K is not at {DATA}"
)


def write(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


GOOD = {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"}


@pytest.mark.parametrize(
    ("cell", "gold"),
    [
        ("text #### 3\nmore\n#### 1,234,567 ", "1234567"),
        ("#### (1,2)", "(1,2)"),
        (r"so it is \boxed{\frac{1}{2}}, not \boxed{3}", "3"),
        (r" \left(3, \frac{\pi}{2}\right)", r"\left(3, \frac{\pi}{2}\right)"),
        (204, "204"),
        (0.5, "0.5"),
        ("", None),
        ("#### ", None),
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
        (Decimal("5.00"), "5.00"),
        (r"so \boxed{5", None),
        (True, None),
        ([1], None),
    ],
)
def test_a_gold_answer_is_what_follows_the_marks_or_stands_in_the_last_box_or_alone(
    cell: Any, gold: str | None
) -> None:
    assert gold_answer(cell) == gold


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_rows_without_an_answer_are_counted_and_never_asked(tmp_path: Path, ending: str) -> None:
    rows = [
        GOOD,
        {"question": "q", "answer": None},
        {"question": " ", "answer": "1"},
        {"question": "b", "answer": "7"},
    ]
    path = tmp_path / f"train.{ending}"
    if ending == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    else:
        path.write_text(
            json.dumps(rows) if ending == "json" else "\n\n".join(map(json.dumps, rows))
        )
    read = read_file(path)
    assert read.good == [Question("Two and two?", "4"), Question("b", "7")]
    assert len(read.faults) == 2
    assert read.faults[0].startswith(str(path))
    assert "'answer' holds no answer: None" in read.faults[0]


def test_columns_go_by_name_or_are_the_usual_ones(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl", {"problem": "p", "text": "t", "solution": r"so \boxed{1}", "level": 3}
    )
    assert read_file(path).good == [Question("p", "1")]
    assert read_file(path, Columns("text", "level")).good == [Question("t", "3")]
    with pytest.raises(
        UsageError,
        match=r"line 1: no column 'txt'; it has problem, text, .*: name it with --env\.question_column",
    ):
        read_file(path, Columns("txt"))
    # Data sets of several sources have columns that are empty in some rows.
    merged = {"question": None, "problem": "p", "answer": "", "solution": r"so \boxed{1}"}
    assert read_file(
        write(tmp_path / "m.jsonl", merged, {"problem": "\ud800", "answer": "1"})
    ).good == [Question("p", "1")]
    with pytest.raises(
        UsageError, match=r"no column answer or .*: name it with --env\.answer_column"
    ):
        read_file(write(tmp_path / "y.jsonl", {"question": "q"}))
    with pytest.raises(
        UsageError, match=r"has no question with an answer; .*'solution' holds no answer"
    ):
        read_file(write(tmp_path / "z.jsonl", {"question": "q", "solution": "it is clear"}))
    plain = write(tmp_path / "plain.jsonl", {"question": "q", "solution": "72"})
    with pytest.raises(UsageError, match=r"give --env\.answer_column solution$"):
        read_file(plain)
    assert read_file(plain, Columns(answer="solution")).good == [Question("q", "72")]


def test_a_csv_file_as_a_spreadsheet_writes_it(tmp_path: Path) -> None:
    """A byte order mark, quotes, a line break in a cell, other columns, a row that lacks a cell."""
    path = tmp_path / "questions.csv"
    rows = (
        'question,answer,source\r\n"What is ""half"" of ten,\nplus one?",6,book\r\n'
        "How many legs has a spider?,8,\r\nHow many?,7\r\n"
    )
    path.write_bytes(b"\xef\xbb\xbf" + rows.encode())
    train, _ = load_from_path(path)
    assert [(one.question, one.gold) for one in train.good] == [
        ('What is "half" of ten,\nplus one?', "6"), ("How many legs has a spider?", "8"),
    ]  # fmt: skip
    assert train.faults == [f"{path}, line 5: not 3 cells, as the header has"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"question;answer\nTwo and two?;4\n", r"line 1: its columns are separated by ';'"),
        (b'question,answer\n"Two and "two?,4\n', r"below line 1: .* expected after '\"'; mend it"),
        (b"question,answer\nTwo\xe9,4\n", "not UTF-8 .*; save it as UTF-8"),
        (b"question,answer\n", "has no question with an answer"),
    ],
)
def test_a_csv_file_that_cannot_be_read_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (path := tmp_path / "q.csv").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_file(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"question": oops', "line 2: not JSON"), ("[1]", "line 2: not a JSON object")],
)
def test_a_broken_line_is_counted_and_named_with_its_file(
    tmp_path: Path, line: str, message: str
) -> None:
    read = read_file(write(tmp_path / "train.jsonl", GOOD, line, GOOD))
    assert (len(read.good), len(read.faults)) == (2, 1)
    assert read.faults[0].startswith(f"{tmp_path / 'train.jsonl'}, {message}")
    assert "\n" not in read.faults[0]


def test_shapes_of_other_trainers_are_named(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1?"}]
    for row, fault in (
        ({"prompt": messages, "solution": "$2$"}, "'prompt' is a list of messages"),
        ({"prompt": messages, "reward_model": {"ground_truth": "2"}}, r"--env\.answer_column"),
        ({"problem": "a", "final_answer": ["2"]}, "'final_answer' is a list"),
    ):
        with pytest.raises(UsageError, match=fault):
            read_file(write(tmp_path / "rows.jsonl", row))


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    parquet = tmp_path / "no.parquet"
    parquet.write_bytes(b"this is none")
    for path in (tmp_path / "nothing.jsonl", write(tmp_path / "empty.jsonl", "", " "), parquet):
        with pytest.raises(UsageError, match=path.name):
            read_file(path)
    write(tmp_path / "train.jsonl", GOOD)
    with pytest.raises(UsageError, match=r"has no test\.jsonl"):
        load_from_path(tmp_path)


def test_order_is_that_of_the_datasets_package() -> None:
    datasets = pytest.importorskip("datasets")
    questions = [Question(str(i), str(i)) for i in range(50)]
    theirs = datasets.Dataset.from_dict({"n": list(range(50))}).shuffle(seed=42)["n"]
    assert [int(question.gold) for question in shuffled(questions, 42)] == list(theirs)


@given(n=st.integers(1, 40), data=st.data())
def test_pass_at_k_is_the_share_of_choices_that_hold_a_right_answer(
    n: int, data: st.DataObject
) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    # The closed form, as a product: 1 - (1 - k/(n-c+1)) (1 - k/(n-c+2)) … (1 - k/n).
    product = math.prod(1 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 0.0
    assert pass_at_k(n, c, k) == pytest.approx(1 - product, abs=1e-12)
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)
    assert pass_at_k(n, c, n) == (c > 0)
    with pytest.raises(ValueError, match="k must be 1 to the number of samples"):
        pass_at_k(n, c, n + 1)


def test_a_suite_s_figures_are_means_over_its_problems() -> None:
    rows = [[Attempt({"correct": i < right}, None) for i in range(6)] for right in (0, 1, 6)]
    assert suite_metrics(rows) == {
        "mean": pytest.approx((0 + 1 / 6 + 1) / 3),
        "pass@2": pytest.approx((0 + 1 / 3 + 1) / 3),
        "pass@4": pytest.approx((0 + 4 / 6 + 1) / 3),
        "pass@6": pytest.approx(2 / 3),
    }
    assert suite_metrics([row[:1] for row in rows]) == {"mean": pytest.approx(2 / 3)}


def config(*flags: str) -> MathConfig:
    default, servers = MathEnv.config_init()
    merged = merge(default, servers, parse_flags([*flags], MathConfig), {}).env
    assert isinstance(merged, MathConfig)
    return merged


def test_suites_go_by_name_with_their_numbers_of_samples() -> None:
    assert config("--env.eval_suites", "math500,aime24:16").eval_suites == {
        "math500": None,
        "aime24": 16,
    }
    for flags, message in (
        (
            ("--env.eval_suites", "aime23"),
            "there is no suite 'aime23', only math500, aime24, aime25, gsm8k",
        ),
        (("--env.eval_suites", "aime24:0"), "aime24:0 asks for no answer"),
        (
            ("--env.eval_suites", "aime24:4", "--env.eval_temperature", "0"),
            "gives the same answer each time",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            config(*flags)


def test_a_suite_that_is_not_there_says_which_file_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError) as refusal:
        load_suite("math500", tmp_path)
    for part in (
        f"{tmp_path}/math500.jsonl",
        "test split (500 rows, HuggingFaceH4/MATH-500 on the hub)",
        "`problem`",
        "`answer`",
    ):
        assert part in str(refusal.value)
    write(tmp_path / "aime25.jsonl", {"problem": "p", "answer": 70})
    assert load_suite("aime25", tmp_path).good == [Question("p", "70")]
    datasets = pytest.importorskip("datasets")

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        EnvironmentFailure, match=r"cannot load math-ai/aime25 .*no route.*--env\.suites_folder"
    ):
        load_suite("aime25", None)


async def test_what_is_measured_is_not_trained_on(
    tokenizer_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(
        tmp_path / "train.jsonl",
        *({"question": f"q{n}", "answer": n} for n in range(6)),
        {"question": "q", "answer": ""},
    )
    write(tmp_path / "test.jsonl", {"question": "q0", "answer": 0})
    write(tmp_path / "aime24.jsonl", {"problem": "q1", "answer": 1})
    settings, servers = MathEnv.config_init()
    settings.tokenizer_name, settings.dataset_path = str(tokenizer_dir), str(tmp_path)
    settings.suites_folder, settings.eval_suites = str(tmp_path), {"aime24": 2}
    made = MathEnv(settings, servers)
    with caplog.at_level(logging.WARNING):
        await made.setup()
    assert sorted(question.question for question in made.train) == ["q2", "q3", "q4", "q5"]
    assert "2 training questions are also in what is evaluated" in caplog.text
    assert "1 of 7 rows of the training set are left out" in caplog.text
    assert made.drops.metrics()["train/dropped_bad_rows"] == 1
    assert "the suite aime24 has 1 questions, not the usual 30" in caplog.text
    assert [await made.item_at(n) for n in range(4)] == [
        await made.get_next_item() for _ in range(4)
    ]


@pytest.fixture
def env(tokenizer_dir: Path) -> Iterator[Gsm8kEnv]:
    config, servers = Gsm8kEnv.config_init()
    config.tokenizer_name = str(tokenizer_dir)
    made = Gsm8kEnv(config, servers)
    made.scorer = MathScorer()
    yield made
    made.scorer.close()


def graded(env: Gsm8kEnv, text: str, finished: bool = True, gold: str = "18") -> Grade:
    return asyncio.run(env.grade(Question("q", gold), Response(text, 5, finished)))


def test_rows_that_are_left_out_are_counted_and_told_with_the_first(
    env: Gsm8kEnv, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [GOOD, *[{"question": "q", "answer": None}] * 2]
    read_file(write(tmp_path / "x.jsonl", *rows)).report_faults("the training set", env.drops.add)
    assert env.drops.metrics()["train/dropped_bad_rows"] == 2
    (line,) = [record.getMessage() for record in caplog.records]
    assert "2 of 3 rows of the training set are left out, mend or remove them" in line
    assert "x.jsonl" in line


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
    train, test = load_from_path(DATA)
    assert (len(train.good), len(test.good)) == (7473, 1319)
    assert train.faults == test.faults == []
    assert all(as_number(question.gold) is not None for question in train.good + test.good)


@pytest.mark.e2e
@needs_data
def test_the_real_data_is_served_and_evaluated(
    stack: Stack, shared_inference: str, tmp_path: Path
) -> None:
    stack.use_inference(shared_inference)
    output = tmp_path / "result.json"
    flags = (
        "--env.dataset_path",
        str(DATA),
        "--env.eval_size",
        "20",
        "--env.eval_output",
        str(output),
    )
    stack.processes.finish(stack.start_environment(GSM8K, "evaluate", *flags), 120)
    result = json.loads(output.read_text())
    assert (result["environment"], result["num_problems"]) == ("gsm8k", 20)
    samples = [
        json.loads(line)
        for line in output.with_name("result.samples.jsonl").read_text().splitlines()
    ]
    assert samples[0]["messages"][0]["role"] == "system"
    assert "\\boxed{" in samples[0]["messages"][0]["content"]


@pytest.mark.e2e
def test_suites_are_evaluated_with_several_answers_to_each_problem(
    stack: Stack, shared_inference: str, tmp_path: Path
) -> None:
    # The stand-in's four choices of one request differ; one of them is right.
    stack.use_inference(shared_inference, cycle=[f"\\boxed{{{n}}}" for n in range(4)])
    write(tmp_path / "aime24.jsonl", *({"problem": f"p{n}", "answer": 1} for n in range(3)))
    write(tmp_path / "aime25.jsonl", *({"problem": f"p{n}", "answer": 9} for n in range(2)))
    output = tmp_path / "result.json"
    flags = (
        "--env.eval_suites",
        "aime24:4,aime25:2",
        "--env.suites_folder",
        str(tmp_path),
        "--env.eval_output",
        str(output),
    )
    stack.processes.finish(stack.start_environment(MATH, "evaluate", *flags), 120)
    stack.control(cycle=None)
    result = json.loads(output.read_text())
    assert (result["num_problems"], result["correct"]) == (3 * 4 + 2 * 2, 3)
    assert [result[f"aime24/{name}"] for name in ("mean", "pass@2", "pass@4")] == [0.25, 0.5, 1.0]
    assert [result[f"aime25/{name}"] for name in ("mean", "pass@2")] == [0.0, 0.0]
    samples = [
        json.loads(line)
        for line in output.with_name("result.samples.jsonl").read_text().splitlines()
    ]
    assert [(row["suite"], row["temperature"]) for row in samples] == [("aime24", 1.0)] * 12 + [
        ("aime25", 1.0)
    ] * 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--env.dataset_path", "/nowhere"), "error: --env.dataset_path: cannot read /nowhere"),
        (
            ("--env.dataset_pat", "x"),
            "error: unknown flag --env.dataset_pat (did you mean --env.dataset_path?)",
        ),
    ],
)
def test_the_program_ends_with_one_clear_line(flags: tuple[str, ...], message: str) -> None:
    ended = run_command([sys.executable, GSM8K, *flags])
    assert ended.returncode == 2
    assert ended.stdout.startswith(message)
    assert len(ended.stdout.strip().splitlines()) == 1


def test_without_the_hub_it_says_which_flag_to_pass() -> None:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": "/nonexistent",
        "HF_DATASETS_CACHE": "/tmp/none",
    }
    # Executed: what loads it reads these variables when it is imported.
    ended = subprocess.run(
        [sys.executable, str(GSM8K)], capture_output=True, text=True, timeout=180, env=environment
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: cannot load openai/gsm8k/main")
    assert "--env.dataset_path" in last
