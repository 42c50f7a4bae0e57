"""The recorder: it keeps what it can, never waits or raises, and counts the rest."""

from __future__ import annotations

import gc
import logging
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from atroposlib.dashboard.rollouts import recorder as recorder_module
from atroposlib.dashboard.rollouts import text as text_module
from atroposlib.dashboard.rollouts.archive import Archive, NoSuchError
from atroposlib.dashboard.rollouts.files import GroupFiles, OpenArchives
from atroposlib.dashboard.rollouts.recorder import Allowance, RolloutRecorder
from atroposlib.dashboard.rollouts.text import TextOfTokens
from atroposlib.dashboard.run_folders.runs import RunFiles
from tests.atroposlib.dashboard.rollouts.test_rollout_archive import body, encoded

STARTER = Path(__file__).resolve().parents[4] / "assets" / "starter_model"
WAIT = 60.0


class Told:
    """Waits until the recorder has announced so many groups."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.groups = self.newest = 0

    def __call__(self, newest: int, groups: int) -> None:
        with self.changed:
            self.newest, self.groups = newest, groups
            self.changed.notify_all()

    def wait_for(self, groups: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.groups >= groups, WAIT), self.groups


def report(sequence: int = 0, **more: Any) -> dict[str, Any]:
    told = {
        "group": 1,
        "sequence": sequence,
        "trained": 2,
        "logprobs": encoded(-0.5, -0.75),
        "entropies": encoded(1.0, 2.0),
    }
    return {"weight_version": 6, "sequences": [told | {"advantages": 0.5}]} | more


def test_groups_and_what_the_trainer_tells_of_them_are_kept_and_a_model_makes_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, told = tmp_path / "observed" / "rollouts.db", Told()
    recorder = RolloutRecorder(path.parent, on_kept=told)
    assert not path.exists(), "nothing has come"
    recorder.model(str(STARTER))
    recorder.posted([(4, "sums", body((1.0, 2))), (5, "code", body((0.0, 2)))])
    recorder.reported([4, 5], report())
    recorder.reported([4, 5], {"sequences": "nonsense"})
    told.wait_for(2)
    recorder.close()
    assert caplog.messages == [
        "the trainer's report of tokens is not kept for the page: sequences: Input should be a valid list"
    ]
    recorder.posted([(6, "late", body((0.0, 1)))])
    assert recorder.stats() == {"recorded": 2, "left_out": 0}
    source = Archive(path, read_only=True)
    assert source.environments() == ["sums", "code"]
    (found,) = source.listed("drifted").rollouts
    assert (found["group"], found["drift"], found["trained_version"]) == (told.newest, 0.125, 6)
    assert source.text().has_tokenizer
    assert source.listed(text=source.text().whole([10, 11])).rollouts


def test_another_run_has_an_archive_of_its_own_and_two_are_kept(tmp_path: Path) -> None:
    told = Told()
    files = RunFiles("live", "live", tmp_path, tmp_path / "m", tmp_path / "e", observed=tmp_path)
    archives = OpenArchives()
    recorder = RolloutRecorder(tmp_path, on_kept=told)
    recorder.another_run()  # nothing was kept of the one before
    recorder.posted([(0, "", body((1.0, 1)))])
    told.wait_for(1)
    assert scores_of(archives.of(files)) == [1.0]
    for run in (2, 3):
        recorder.another_run()
        recorder.posted([(0, "", body((float(run), 1)))])
        told.wait_for(run)
        assert scores_of(archives.of(files)) == [float(run)], "the lists are of one run"
    recorder.close()
    recorder = RolloutRecorder(tmp_path, on_kept=told)  # the service is started again
    recorder.posted([(1, "", body((4.0, 1)))])
    recorder.close()
    assert scores_of(archives.of(files)) == [4.0, 3.0]
    assert sorted(path.name for path in tmp_path.glob("*.db")) == ["rollouts.2.db", "rollouts.3.db"]


def test_what_comes_too_fast_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "BURST_BYTES", 100_000)
    recorder = RolloutRecorder(tmp_path, bytes_per_second=1e-9)
    for seq in range(50):
        recorder.posted([(seq, "", body((0.0, 2)))])
    recorder.close()
    counts = recorder.stats()
    assert counts["recorded"] + counts["left_out"] == 50
    assert 1 <= counts["recorded"] <= 3
    assert Archive(tmp_path / "rollouts.db", read_only=True).total() == counts["recorded"]


def test_a_service_that_is_busy_keeps_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "COMMIT_SECONDS", 0.001)
    for cores, share in ((0.0, recorder_module.BUSY_SHARE), (1e9, 1.0)):
        monkeypatch.setattr(recorder_module, "BUSY_CORES", cores)
        recorder = RolloutRecorder(tmp_path, bytes_per_second=1000.0)
        recorder.posted([(0, "", body((0.0, 1)))])
        recorder.close()
        assert recorder._allowance.per_second == 1000.0 * share


def test_groups_that_are_none_and_a_file_of_another_kind_harm_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, told = tmp_path / "rollouts.db", Told()
    recorder = RolloutRecorder(path.parent, on_kept=told)
    recorder.posted(
        [(0, "", b"[]"), (1, "", b'{"scores": [1.0], "tokens": 3}'), (2, "", body((1.0, 1)))]
    )
    told.wait_for(1)
    recorder.close()
    assert recorder.stats()["left_out"] >= 1
    assert "group 0 is not kept for the page" in caplog.text
    other = tmp_path / "other" / "rollouts.db"
    other.parent.mkdir()
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE theirs (id INTEGER)")
    with caplog.at_level(logging.WARNING):
        recorder = RolloutRecorder(other.parent)
        recorder.posted([(0, "", body((0.0, 1)))])
        recorder.close()
    assert "is not an archive of rollouts" in caplog.text
    RolloutRecorder(None).posted([(0, "", b"")])


@given(
    sizes=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 300)), max_size=30),
    per_second=st.integers(1, 50),
    most=st.integers(1, 200),
)
def test_no_more_is_taken_than_is_allowed(
    sizes: list[tuple[float, int]], per_second: int, most: int
) -> None:
    allowance, now, taken, largest = Allowance(per_second, most, 0.0), 0.0, 0, 0
    for wait, size in sizes:
        now += wait
        if allowance.take(size, now):
            taken, largest = taken + size, max(largest, size)
    assert taken <= most + per_second * now + max(0, largest - most) * len(sizes) + 1e-6
    assert Allowance(per_second, most, 0.0).take(10 * most, 0.0), (
        "one that is larger than all goes when all is there"
    )


def scores_of(source: Archive, limit: int = 50) -> list[float]:
    return [head["score"] for head in source.listed(limit=limit).rollouts]


def test_files_of_groups_become_an_archive_of_their_newest_that_grows_with_them(
    tmp_path: Path,
) -> None:
    file = tmp_path / "groups.jsonl"
    lines = [body((float(number), 2)) for number in range(20)]
    file.write_bytes(
        b"\n".join([*lines[:10], b"nonsense", b"", *lines[10:]])
    )  # without an end of its last line
    groups = GroupFiles([file], str(STARTER))
    source = groups.archive()
    assert (source.total(), scores_of(source, 3)) == (20, [19.0, 18.0, 17.0])
    assert source.listed().rollouts[0]["environment"] == "groups"
    with file.open("ab") as grown:
        grown.write(b"\n" + lines[5] + b"\n" + lines[6][:20])
    assert groups.archive() is source, "it is not made anew"
    assert (source.total(), scores_of(source, 2)) == (21, [5.0, 19.0])
    with file.open("ab") as grown:
        grown.write(lines[6][20:])
    assert scores_of(groups.archive(), 2) == [6.0, 5.0]
    file.write_bytes(lines[3] + b"\n")
    assert scores_of(groups.archive()) == [3.0], "the file was begun anew"
    groups.close()
    file.write_bytes(b"\n".join(lines) + b"\n")
    newest = GroupFiles([file], max_bytes=len(lines[-1]) * 2 + len(lines[-1]) // 2)
    assert scores_of(newest.archive()) == [19.0, 18.0]
    newest.close()


def test_one_archive_that_is_made_holds_no_other_up(tmp_path: Path) -> None:
    """While files of groups are read into an archive, another run's rollouts are there at once."""
    archives = OpenArchives()
    slow, quick = tmp_path / "slow.jsonl", tmp_path / "quick.jsonl"
    for file in slow, quick:
        file.write_bytes(body((1.0, 1)) + b"\n")
    runs = [
        RunFiles(
            f.stem, f.stem, tmp_path, f / "metrics.jsonl", f / "evaluations.jsonl", groups=(f,)
        )
        for f in (slow, quick)
    ]
    reading = archives.of(runs[0])
    with archives._open[(slow, slow.stat().st_ino),]._lock:  # type: ignore[attr-defined]
        waiting = threading.Thread(target=archives.of, args=(runs[0],), daemon=True)
        waiting.start()
        assert archives.of(runs[1]).total() == 1
        assert waiting.is_alive()
    waiting.join(WAIT)
    assert archives.of(runs[0]) is reading
    slow.unlink()
    with pytest.raises(NoSuchError, match="no rollouts are kept of slow"):
        archives.of(runs[0])


def test_a_tokenizer_is_read_once_for_all_who_have_it() -> None:
    content = (STARTER / "tokenizer.json").read_bytes()
    first, second = (TextOfTokens.of_file(content) for _ in range(2))
    assert first is second
    whole = Tokenizer.from_buffer(content)
    every = list(range(whole.get_vocab_size()))
    assert first.whole(every) == whole.decode(every, skip_special_tokens=False), (
        "merges are not missed"
    )
    assert len(text_module._without_merges(content)) < len(content)
    assert text_module._without_merges(b"none") == b"none"
    del first, second
    gc.collect()
    assert not text_module._in_use, "nobody has it any more"
