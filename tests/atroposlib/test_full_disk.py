"""Everything that the SDK and the page write, on a full disk: one line, the earlier file, no half
row.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from atroposlib.cli.collecting import RowsFile
from atroposlib.compat.jsonl2html import generate_html
from atroposlib.dashboard.live.monitor import ObservedFolder
from atroposlib.dashboard.rollouts.recorder import RolloutRecorder
from atroposlib.envs.graded import Curriculum
from atroposlib.envs.runner.reporting import write_evaluation
from atroposlib.errors import EnvironmentFailure
from atroposlib.utils.jsonl import JsonLinesWriter
from tests.atroposlib.dashboard.rollouts.test_rollout_archive import body
from tests.atroposlib.envs.scripted_env import ScriptedEnv
from tests.full_disks import FullDisk, fill, small_disk

LONG = "x" * 20_000


def env_state(folder: Path, text: str) -> None:
    env = ScriptedEnv([])
    env.checkpoint_dir = str(folder)
    env._runner.keep_state(3, {"text": text})


def page_of_groups(folder: Path, text: str) -> None:
    groups = folder / "groups.jsonl"
    if not groups.exists():
        groups.write_text(
            json.dumps({"messages": [[{"role": "user", "content": LONG}]], "scores": [1.0]}) + "\n"
        )
    generate_html(groups)


WRITERS: dict[str, Callable[[Path, str], None]] = {
    "an evaluation's metrics": lambda folder, text: write_evaluation(
        folder / "metrics.json", {"text": text}, folder / "none.jsonl", None
    ),
    "an evaluation's samples": lambda folder, text: write_evaluation(
        Path(os.devnull), {}, folder / "samples.jsonl", [{"text": text}] * 3
    ),
    "an environment's state": env_state,
    "a page of groups": page_of_groups,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_kept_as_it_was_and_the_line_names_it(full_disk: FullDisk, name: str) -> None:
    folder = full_disk.path / "files"
    folder.mkdir()
    WRITERS[name](folder, "earlier")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert before
    with full_disk.full(), pytest.raises((EnvironmentFailure, OSError)) as caught:
        WRITERS[name](folder, LONG)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    if isinstance(caught.value, EnvironmentFailure):
        line = str(caught.value)
        assert line.startswith("cannot write ")
        assert str(folder) in line
        assert "make room" in line
        assert len(line.splitlines()) == 1
    WRITERS[name](folder, LONG)
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after.keys() == before.keys(), "nothing temporary is left"


def test_rows_of_data_for_fine_tuning_come_whole_or_not_at_all(full_disk: FullDisk) -> None:
    path = full_disk.path / "rows.jsonl"
    rows = RowsFile(path, may_exist=False)
    rows.write([b'{"a": 1}\n'])
    with (
        full_disk.full(),
        pytest.raises(
            EnvironmentFailure,
            match=r"cannot write 40,000 bytes to .*rows\.jsonl: .*go on with --resume",
        ),
    ):
        rows.write([b"x" * 19_999 + b"\n"] * 2)
    assert path.read_bytes() == b'{"a": 1}\n'
    rows.write([b'{"a": 2}\n'])
    rows.close()
    assert (path.read_bytes(), rows.rows) == (b'{"a": 1}\n{"a": 2}\n', 2)


def test_groups_of_an_environment_come_whole_or_not_at_all(full_disk: FullDisk) -> None:
    path = full_disk.path / "groups.jsonl"
    writer = JsonLinesWriter(path)
    writer.write({"a": 1})
    with (
        full_disk.full(),
        pytest.raises(
            EnvironmentFailure, match=r"cannot write 20,\d{3} bytes to .*groups\.jsonl: .*make room"
        ),
    ):
        writer.write({"a": LONG})
    assert path.read_bytes() == b'{"a":1}\n'
    with full_disk.full():  # of one that is posted, and is in the file for people alone
        writer.write_later({"a": LONG})
    writer.write({"a": 2})
    writer.close()
    assert [str(json.loads(line)["a"])[:1] for line in path.read_text().splitlines()] == [
        "1",
        "x",
        "2",
    ]


def test_an_evaluation_that_cannot_be_kept_is_posted_all_the_same(
    full_disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    output = full_disk.path / "evaluation.json"
    env = ScriptedEnv([], eval_output=str(output))
    posted: list[tuple[str, object]] = []

    async def post(name: str, metrics: object) -> None:
        posted.append((name, metrics))

    env._runner.reports._post_evaluation = post  # type: ignore[method-assign, assignment]
    env._runner.state.env_id = 0
    asyncio.run(env.evaluate_log({"right": 1.0}))
    before = output.read_bytes()
    with full_disk.full():
        asyncio.run(env.evaluate_log({"right": 0.5}))
    assert [metrics for _, metrics in posted] == [{"right": 1.0}, {"right": 0.5}]
    assert output.read_bytes() == before
    assert "an evaluation is posted but not kept: cannot write" in caplog.text
    env._runner.state.env_id = None
    with full_disk.full(), pytest.raises(EnvironmentFailure, match="make room there"):
        asyncio.run(env.evaluate_log({"right": 0.5}))


def test_a_curriculum_goes_on_and_is_whole_again(
    full_disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    path = full_disk.path / "curriculum.jsonl"
    curriculum = Curriculum(0.1, path)
    with full_disk.full():
        for number in range(3):
            curriculum.note(f"{number}" * 5000, 1, 4)
    curriculum.note("last", 1, 4)
    assert Curriculum(0.1, path).known.keys() == curriculum.known.keys()
    assert sum("make room there" in line for line in caplog.messages) == 1


def test_what_the_page_notes_waits_and_its_files_stay_whole(
    full_disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    folder = ObservedFolder(full_disk.path / "observed")
    folder.write("stack.json", {"n": 1})
    folder.append("events", [{"n": 1}])
    for begin in (2, 4):
        with full_disk.full():
            for number in (begin, begin + 1):
                folder.write("stack.json", {"n": number, "more": LONG})
                folder.append("events", [{"n": number, "more": LONG}])
        assert folder.stack["n"] == begin - 1
        folder.append("events", [])
        folder.write("stack.json", {"n": begin + 1})
    rows = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    assert [row["n"] for row in rows] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in folder.path.iterdir()) == ["events.jsonl", "stack.json"]
    complaints = [line for line in caplog.messages if line.startswith("the page cannot write")]
    assert len(complaints) == 2, "one line each time the disk is full"
    assert all("make room there" in line for line in complaints)


def test_a_run_folder_that_was_removed_stays_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = ObservedFolder(tmp_path / "run" / "observed")
    folder.write("stack.json", {"n": 1})
    shutil.rmtree(tmp_path / "run")
    folder.write("stack.json", {"n": 2})
    folder.append("events", [{"n": 1}])
    assert not (tmp_path / "run").exists()
    assert len(caplog.messages) == 1


class WatchedRecorder(RolloutRecorder):
    """Notes that it has announced a group, and that it has left one out."""

    def __init__(self, folder: Path) -> None:
        self.told, self.warned = threading.Event(), threading.Event()
        super().__init__(folder, on_kept=lambda *_: self.told.set())

    def _warn(self, text: str) -> None:
        super()._warn(text)
        self.warned.set()


def test_the_archive_of_rollouts_leaves_out_what_the_disk_refuses_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread writes while the limit on files holds for the whole process, so the disk is one
    that SQLite calls full.
    """
    recorder = WatchedRecorder(tmp_path / "observed")
    recorder.posted([(1, "sums", body((1.0, 2)))])
    assert recorder.told.wait(60)
    archive = recorder._archive
    assert archive is not None
    (pages,) = archive._connection.execute("PRAGMA page_count").fetchone()
    archive._connection.execute(f"PRAGMA max_page_count = {pages}")
    large = body(*((1.0, 3000) for _ in range(8)))
    recorder.told.clear()
    recorder.posted([(2, "sums", large)])
    assert recorder.warned.wait(60)
    archive._connection.execute("PRAGMA max_page_count = 1000000")
    recorder.posted([(3, "sums", body((0.0, 2)))])
    assert recorder.told.wait(60)
    recorder.close()
    assert recorder.stats() == {"recorded": 2, "left_out": 1}
    assert "is the disk full?" in caplog.text
    assert "Traceback" not in caplog.text


def test_an_archive_that_cannot_begin_begins_when_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path, 4) as disk:
        other = fill(disk)
        recorder = WatchedRecorder(disk / "observed")
        recorder.posted([(1, "sums", body((1.0, 2)))])
        assert recorder.warned.wait(60)
        other.unlink()
        recorder.posted([(2, "sums", body((1.0, 2)))])
        assert recorder.told.wait(60)
        recorder.close()
        assert recorder.stats() == {"recorded": 1, "left_out": 1}
    (line,) = caplog.messages
    assert line.startswith("1 groups and reports are not kept for the page: ")
    assert "make room there" in line
