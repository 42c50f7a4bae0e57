"""Files of an environment: groups, metrics, its own state; and the fate of values that cannot be
written.
"""

import asyncio
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from atroposlib.envs.runner.reporting import numbers_of, write_evaluation
from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.utils.jsonl import JsonLinesWriter
from tests.atroposlib.envs.scripted_env import ScriptedEnv, response, run


def write_json(path: Path, content: Any) -> None:
    write_evaluation(path, content, Path(os.devnull), None)


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    write_evaluation(Path(os.devnull), {}, path, rows)


def test_groups_are_kept_in_the_file_that_is_named(tmp_path: Path) -> None:
    env = ScriptedEnv(
        [response(1.0), response(-1.0)],
        data_path_to_save_groups=str(tmp_path / "deep" / "groups.jsonl"),
    )
    run(env)
    (line,) = (tmp_path / "deep" / "groups.jsonl").read_bytes().splitlines()
    assert orjson.loads(line)["scores"] == [1.0, -1.0]


def test_earlier_groups_are_never_overwritten(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    groups.write_text("earlier")
    (tmp_path / "groups_1.jsonl").write_text("too")
    env = ScriptedEnv([], data_path_to_save_groups=str(groups))
    assert env.config.data_path_to_save_groups == str(tmp_path / "groups_2.jsonl")
    assert groups.read_text() == "earlier"


def test_metrics_go_to_the_file_and_are_counted_anew(tmp_path: Path) -> None:
    env = ScriptedEnv([response(1.0), response(-1.0)], metrics_path=str(tmp_path / "metrics.jsonl"))
    run(env)

    async def log_twice() -> None:
        await env.wandb_log({"own": 1.5})
        await env.wandb_log()

    asyncio.run(log_twice())
    first, second = (
        orjson.loads(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    )
    assert (first["own"], first["train/completion_lengths"]) == (1.5, 2.0)
    assert "train/completion_lengths" not in second


class RecordingWandb:
    """Has W&B's interface and keeps what it is given: the real one is optional, and needs an
    account.
    """

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []

    class Table:
        def __init__(self, columns: list[str]):
            self.rows: list[tuple[Any, ...]] = []

        def add_data(self, *row: Any) -> None:
            self.rows.append(row)

    def init(self, **settings: Any) -> None:
        self.runs.append(settings)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.logged.append((step, metrics))


def test_wandb_gets_each_environments_metrics_under_its_name(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    wandb = RecordingWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    env = ScriptedEnv([response(1.0), response(-1.0)], use_wandb=True, wandb_name="mine")
    env.tokenizer = tokenizer
    env._runner.reports.start_wandb("project", "group")
    env.wandb_prepend, env.curr_step = "mine_0", 12
    run(env)
    asyncio.run(env.wandb_log({"train/percent_correct": 0.5}))
    ((step, metrics),) = wandb.logged
    assert (wandb.runs[0]["project"], wandb.runs[0]["group"]) == ("project", "group")
    assert wandb.runs[0]["name"].startswith("mine-")
    assert step == 12
    assert metrics["mine_0_train/percent_correct"] == 0.5
    (table,) = [value for value in metrics.values() if isinstance(value, RecordingWandb.Table)]
    assert [score for _, score in table.rows] == [1.0]


def test_wandb_that_is_not_installed_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    env = ScriptedEnv([], use_wandb=True)
    with pytest.raises(UsageError, match="pip install wandb"):
        env._runner.reports.start_wandb("project", "group")


def test_checkpoints_keep_the_environments_own_state(tmp_path: Path) -> None:
    env = ScriptedEnv([])
    env.checkpoint_dir, env.wandb_prepend = str(tmp_path), "scripted_0"
    env.save_checkpoint(5, {"position": 17})
    later = ScriptedEnv([])
    later.checkpoint_dir, later.wandb_prepend, later.curr_step = str(tmp_path), "scripted_0", 5
    later.load_checkpoint()
    assert later.position == 17  # type: ignore[attr-defined]


class Unwritable:
    """Values that JSON cannot hold."""


@pytest.mark.parametrize("as_list", [False, True])
def test_a_group_that_cannot_be_written_is_dropped_alone(
    as_list: bool, tmp_path: Path, caplog: Any
) -> None:
    env = ScriptedEnv([], data_path_to_save_groups=str(tmp_path / "groups.jsonl"))
    good = {"tokens": [[1], [1]], "masks": [[1], [1]], "scores": [1.0, -1.0]}
    bad = good | {"messages": [[{"role": "user", "content": Unwritable()}], []]}
    if as_list:
        asyncio.run(env.handle_send_to_api([dict(good), bad, dict(good)]))
        assert [len(posted) for posted in env.posted] == [2]
    else:
        assert asyncio.run(env.handle_send_to_api(bad)) == 0
        assert env.posted == []
    assert env.drops.by_reason == {"malformed": 1}
    assert "'messages': Unwritable cannot be written as JSON" in caplog.text


def test_metrics_that_cannot_be_written_are_left_out_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = ScriptedEnv([], metrics_path=str(tmp_path / "metrics.jsonl"))
    asyncio.run(env.wandb_log({"train/table": Unwritable(), "train/x": 1.5}))
    (row,) = map(orjson.loads, (tmp_path / "metrics.jsonl").read_bytes().splitlines())
    assert row["train/x"] == 1.5
    assert "train/table" not in row
    assert "metric 'train/table' is left out" in caplog.text


def test_half_a_character_or_a_huge_integer_costs_neither_samples_nor_the_file_before(
    tmp_path: Path,
) -> None:
    path = tmp_path / "new" / "samples.jsonl"
    write_json_lines(path, [{"answer": "before"}])
    write_json_lines(path, [{"answer": "\ud800x", "\udc00": 10**400}, {"answer": "whole"}])
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert rows == [{"answer": "\\ud800x", "\\udc00": hex(10**400)}, {"answer": "whole"}]
    with pytest.raises(UsageError, match=r"samples\.jsonl: Unwritable cannot be written as JSON"):
        write_json_lines(path, [{"answer": "after"}, {"answer": Unwritable()}])
    assert [orjson.loads(line) for line in path.read_bytes().splitlines()] == rows
    write_json(tmp_path / "new" / "metrics.json", {"accuracy": 0.5, "error": "\ud800"})
    assert orjson.loads((tmp_path / "new" / "metrics.json").read_bytes()) == {
        "accuracy": 0.5,
        "error": "\\ud800",
    }
    assert sorted(one.name for one in path.parent.iterdir()) == ["metrics.json", "samples.jsonl"]


def test_a_result_that_cannot_be_written_keeps_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    write_json(path, {"accuracy": 0.5})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(
            EnvironmentFailure, match=r"cannot write \d+ bytes to .*metrics.json: File too large"
        ):
            write_json(path, {"accuracy": "x" * 500})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert orjson.loads(path.read_bytes()) == {"accuracy": 0.5}
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.json"]


def test_metrics_that_the_service_would_refuse_are_not_posted() -> None:
    metrics = {
        "a": 1,
        "b": 10**400,
        "c": 1e39,
        "d": float("nan"),
        "e": -1e38,
        "f\ud800": 2.0,
        "weight_version": 3,
    }
    assert numbers_of(metrics) == {"a": 1.0, "e": -1e38, "f\\ud800": 2.0}


def test_a_full_disk_loses_no_group(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = ScriptedEnv([], metrics_path="/dev/full")
    env._runner.state.jsonl_writer = JsonLinesWriter("/dev/full")
    good = {"tokens": [[1], [1]], "masks": [[1], [1]], "scores": [1.0, -1.0]}
    asyncio.run(env.handle_send_to_api(dict(good)))
    asyncio.run(env.wandb_log({"train/x": 1.5}))
    assert len(env.posted) == 1
    waiting = [line for line in caplog.messages if "lines wait in memory" in line]
    assert waiting[0].startswith("cannot write 59 bytes to /dev/full: No space left on device")
    assert len(waiting) == 2, "one for the groups, one for the metrics"
    with pytest.raises(EnvironmentFailure, match=r"cannot write \d+ bytes to /dev/full"):
        asyncio.run(
            env.handle_send_to_api(dict(good), do_send_to_api=False)
        )  # the file is all that is wanted


def test_a_file_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        EnvironmentFailure,
        match=r"cannot write .*rows\.jsonl: (Not a directory|File exists); name another",
    ):
        JsonLinesWriter(tmp_path / "file" / "rows.jsonl")


def test_a_row_of_which_the_disk_took_a_part_is_taken_back(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = JsonLinesWriter(tmp_path / "rows.jsonl")
    writer.write({"a": 1})
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(EnvironmentFailure, match="File too large"):
            writer.write({"b": "x" * 500})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    writer.write({"c": 3})
    assert (tmp_path / "rows.jsonl").read_text() == '{"a":1}\n{"c":3}\n'
