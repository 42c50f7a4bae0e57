"""Files that are written whole or not at all, in both packages that have the functions, and logs on
a full disk.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.utils import files as ours
from atroposlib.utils.files import DISK_REFUSALS, KeptLines, append_whole
from atroposlib.utils.log_lines import LogLines
from example_trainer.child_processes import files as theirs
from tests.full_disks import FullDisk, limited_files

BOTH = pytest.mark.parametrize("module", [ours, theirs], ids=["atroposlib", "example_trainer"])


@BOTH
def test_a_file_is_replaced_whole_with_its_mode(tmp_path: Path, module: ModuleType) -> None:
    path = tmp_path / "a.json"
    module.write_whole(path, b"first")
    module.write_whole(path, b"second", mode=0o600)
    assert path.read_bytes() == b"second"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@BOTH
@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("number", sorted(DISK_REFUSALS))
def test_whatever_call_fails_the_earlier_file_stays_and_the_temporary_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, call: str, number: int
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"earlier")

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        with pytest.raises(OSError, match=r"a\.json") as caught:
            module.write_whole(path, b"later")
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]
    assert path.read_bytes() == b"earlier"
    line = module.disk_refusal(caught.value)
    assert line.startswith(f"cannot write {path}: {os.strerror(number)}")
    assert "bytes are free there" in line or number not in (errno.ENOSPC, errno.EDQUOT)
    assert line.endswith("make room there, or write elsewhere")
    assert len(line.splitlines()) == 1


@BOTH
def test_a_full_disk_keeps_the_earlier_file(full_disk: FullDisk, module: ModuleType) -> None:
    path = full_disk.path / "a.json"
    module.write_whole(path, b"earlier")
    with full_disk.full(), pytest.raises(OSError, match=r"a\.json") as caught:
        module.write_whole(path, b"x" * 100_000)
    assert module.disk_refusal(caught.value)
    assert "cannot write 100,000 bytes to" in module.cannot_write(path, caught.value, 100_000)
    assert [one.name for one in full_disk.path.iterdir()] == ["a.json"]
    assert path.read_bytes() == b"earlier"


@BOTH
def test_only_a_disks_refusals_have_that_line(module: ModuleType) -> None:
    for other in (
        OSError(errno.ENOENT, "missing"),
        ValueError("of a program"),
        OSError(errno.EIO, "a terminal that is gone"),
    ):
        assert module.disk_refusal(other) is None
    assert module.disk_refusal(OSError(errno.ENOSPC, "No space left on device")) == (
        "the disk refuses to be written: No space left on device; make room, or write elsewhere"
    )


@given(st.binary(max_size=300), st.integers(0, 400))
def test_lines_are_appended_whole_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, limit: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"row\n")
    with path.open("ab", buffering=0) as file:
        with limited_files(limit):
            try:
                append_whole(file.fileno(), content)
                taken = True
            except OSError:
                taken = False
        assert taken == (not content or 4 + len(content) <= limit)
        assert path.read_bytes() == b"row\n" + content * taken


def test_lines_wait_for_space_and_come_in_their_order(
    full_disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    path = full_disk.path / "a.jsonl"
    path.write_bytes(b'{"half')
    lines = KeptLines(path)
    lines.write(b"1")
    with full_disk.full():
        for number in range(2, 5):
            lines.write(b"%d" % number * 5000)
    assert path.read_bytes() == b'{"half\n1\n'
    lines.write(b"5")
    lines.close()
    assert path.read_bytes().split(b"\n")[1:] == [
        b"1",
        b"2" * 5000,
        b"3" * 5000,
        b"4" * 5000,
        b"5",
        b"",
    ]
    refused, again = caplog.messages
    assert refused.startswith(f"cannot write 5,001 bytes to {path}: ")
    assert refused.endswith(
        "; make room there: lines wait in memory and are written when there is space"
    )
    assert again == f"{path} is written again, with all lines that waited"


def test_lines_go_into_a_pipe() -> None:
    read, write = os.pipe()
    lines = KeptLines(Path(f"/dev/fd/{write}"))
    lines.write(b"one")
    lines.write_now(b"two")
    lines.close()
    assert os.read(read, 100) == b"one\ntwo\n"
    os.close(read)
    os.close(write)


def test_lines_that_never_find_space_are_counted(
    full_disk: FullDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ours, "MAX_KEPT_BYTES", 20_000)
    lines = KeptLines(full_disk.path / "a.jsonl")
    with full_disk.full():
        for _ in range(6):
            lines.write(b"x" * 5000)
        lines.close()
    assert (full_disk.path / "a.jsonl").read_bytes() == b""
    assert caplog.messages[-1].endswith("the last 6 lines are lost")


class Disk(io.StringIO):
    """A log file on a disk that may be full."""

    full = False

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_a_log_on_a_full_disk_says_what_is_missing_without_tracebacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk = Disk()
    logger = logging.Logger("of_this_test")
    logger.addHandler(LogLines(disk))
    logger.info("one")
    disk.full = True
    logger.info("two")
    logger.info("three")
    disk.full = False
    logger.info("four")
    logger.info("five")
    assert disk.getvalue().splitlines() == [
        "one", "", "2 lines may be missing here: the disk of this log refused them", "four", "five",
    ]  # fmt: skip
    assert capsys.readouterr().err == ""
    logger.info("%d", "a bug of the caller")
    assert "TypeError" in capsys.readouterr().err, "other errors are shown as ever"
