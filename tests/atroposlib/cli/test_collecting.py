"""Data for fine-tuning and preference learning: what is kept of a group, and that no row is lost or
written twice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.cli import collecting, dpo, sft
from atroposlib.cli.collecting import RowsFile
from atroposlib.errors import EnvironmentFailure, ServiceUnavailable, UsageError
from tests.atroposlib.service.conftest import ROOT, Service, free_port, group, trainer

SCORES = st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=8)
LEAST = st.sampled_from([0.0, 0.3, 0.5, 1.0])


class Letters:
    """A tokenizer: token 97 is an a."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def talk(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]


def told(scores: list[float], mark: int = 7) -> dict[str, Any]:
    """A group with messages that name themselves."""
    return group(len(scores), mark=mark) | {
        "scores": scores,
        "messages": [talk(f"{mark}.{i}") for i in range(len(scores))],
    }


@given(SCORES, LEAST, st.booleans(), st.integers(0, 4))
def test_the_best_of_a_group_are_kept_in_their_order(
    scores: list[float], least: float, negative: bool, most: int
) -> None:
    rows = sft.best_of_group(told(scores), None, most, least, negative)
    good = [s for s in scores if (negative or s > 0) and (least == 0 or s - min(scores) > least)]
    assert [row["score"] for row in rows] == sorted(good, reverse=True)[:most]
    numbers = [int(row["messages"][1]["content"].partition(".")[2]) for row in rows]
    assert [scores[i] for i in numbers] == [row["score"] for row in rows]
    assert len(set(numbers)) == len(numbers)


@given(SCORES, LEAST, st.booleans(), st.integers(0, 4))
def test_pairs_hold_each_response_once_and_differ_enough(
    scores: list[float], least: float, negative: bool, most: int
) -> None:
    pairs = dpo.pairs_of_group(told(scores), None, most, least, negative)
    used = [
        int(side[1]["content"].partition(".")[2])
        for pair in pairs
        for side in (pair["pos"], pair["neg"])
    ]
    assert len(set(used)) == len(used) == 2 * len(pairs) <= 2 * most
    for better, worse in zip(used[::2], used[1::2], strict=True):
        assert scores[better] - scores[worse] > least
        assert negative or scores[better] > 0
    if most and max(scores) - min(scores) > least and (negative or max(scores) > 0):
        assert (pairs[0]["score"], scores[used[1]]) == (max(scores), min(scores))


def test_text_is_divided_where_the_model_began() -> None:
    texts = {
        "tokens": [[*b"2+2=4"], [*b"2+2=5!"]],
        "masks": [[-100] * 4 + [*b"4"], [-100] * 4 + [*b"5!"]],
        "scores": [1.0, -1.0],
    }
    assert sft.best_of_group(texts, Letters(), 3, 0.0, False) == [
        {"prefix": "2+2=", "completion": "4", "score": 1.0}
    ]
    assert dpo.pairs_of_group(texts, Letters(), 3, 0.5, False) == [
        {"prefix": "2+2=", "pos": "4", "neg": "5!", "score": 1.0}
    ]
    other = texts | {"tokens": [[*b"2+2=4"], [*b"2-2=5!"]]}
    assert dpo.pairs_of_group(other, Letters(), 3, 0.5, False) == [], (
        "these answer different prompts"
    )


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"), "--store", "memory").start()
    yield service
    service.signal(signal.SIGTERM)


def collect(service: Service, file: Path, *flags: str) -> None:
    """Collect single responses: batches of two groups of two."""
    arguments = [
        str(file),
        "--api-url",
        f"http://127.0.0.1:{service.port}",
        "--tasks-per-step",
        "2",
        "--save-messages",
        "--save-top-n-per-group",
        "1",
        *flags,
    ]
    parsed = sft.parse_arguments(arguments)
    collecting.collect(parsed, sft.NAME, sft.select)


def written(file: Path) -> list[str]:
    return [json.loads(line)["messages"][1]["content"] for line in file.read_text().splitlines()]


def post(service: Service, *marks: int) -> None:
    for mark in marks:
        service.post("/scored_data", told([-1.0, 1.0], mark))


def test_a_run_that_is_stopped_anywhere_goes_on_without_loss_or_doubles(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.http.get("/reset_data")
    file = tmp_path / "data.jsonl"
    service.post("/register", trainer(wandb_project=sft.NAME, batch_size=4))
    post(service, 1, 2, 3, 4, 5, 6)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(collecting.Service, "acknowledge", killed)
        with pytest.raises(KeyboardInterrupt):
            collect(service, file, "--num-seqs-to-save", "5")
    assert written(file) == ["1.1", "2.1"], "they are in the file, but not acknowledged"
    with file.open("a") as torn:
        torn.write('{"mess')
    collect(service, file, "--num-seqs-to-save", "5", "--resume")
    assert written(file) == ["1.1", "2.1", "3.1", "4.1", "5.1"]
    assert service.get("/stats")["run_ended"] is True
    collect(service, file, "--num-seqs-to-save", "5", "--resume")
    with pytest.raises(UsageError, match=r"exists: --resume goes on .* --append-to-previous"):
        collect(service, file)
    post(service, 7, 8)
    collect(service, file, "--num-seqs-to-save", "1", "--append-to-previous")
    assert written(file)[5:] == ["7.1"]


def test_another_trainers_run_is_not_taken_over_unasked(service: Service, tmp_path: Path) -> None:
    service.http.get("/reset_data")
    file = tmp_path / "data.jsonl"
    service.begin(batch_size=4)
    post(service, 1, 2)
    with pytest.raises(
        UsageError, match=r"has a trainer \(project 'p'\) whose run has not ended.*--take-over"
    ):
        collect(service, file)
    assert not file.exists()
    collect(service, file, "--num-seqs-to-save", "2", "--take-over")
    assert written(file) == ["1.1", "2.1"]


def test_groups_without_messages_and_no_groups_at_all_are_said(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.http.get("/reset_data")
    file = tmp_path / "data.jsonl"
    with pytest.raises(ServiceUnavailable, match="is an environment running"):
        collect(service, file, "--service-timeout", "0.1")
    service.post("/scored_data_list", [group(2), group(2)])
    with pytest.raises(EnvironmentFailure, match="leave --save-messages out"):
        collect(service, file)
    assert not file.exists(), "a file without a row would only be in the way"
    with pytest.raises(SystemExit):
        collect(service, file, "--api-url", "localhost:1")
    assert "does not begin with http://" in capsys.readouterr().err


def test_two_writers_and_a_disk_that_refuses(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    first = RowsFile(path, may_exist=False)
    first.write([b"1\n"])
    with pytest.raises(UsageError, match="another process"):
        RowsFile(path, may_exist=True)
    assert [first.ends_with(rows) for rows in ([b"1\n", b"2\n"], [b"2\n"], [b"0\n", b"1\n"])] == [
        1,
        0,
        0,
    ]
    first.close()
    with pytest.raises(UsageError, match="cannot write"):
        RowsFile(tmp_path / "nowhere" / "data.jsonl", may_exist=False)


def test_bad_usage_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as ended:
            dpo.main([str(tmp_path / "pairs.jsonl")])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "atropos-dpo-gen: error: groups hold tokens: name the sampled model's tokenizer "
        "(--tokenizer), or pass --save-messages (see atropos-dpo-gen --help)"
    )


def test_a_command_that_waits_stops_at_once(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "atroposlib.cli.dpo",
        str(tmp_path / "pairs.jsonl"),
        "--save-messages",
    ]
    with subprocess.Popen(
        [*command, "--api-url", f"http://127.0.0.1:{free_port()}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as waiting:
        assert waiting.stderr is not None
        assert "Waiting for the rollout service" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(120) == 128 + signal.SIGTERM
        assert "--resume" in waiting.stderr.read()
    assert list(tmp_path.iterdir()) == []
