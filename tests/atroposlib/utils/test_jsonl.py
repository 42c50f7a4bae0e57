"""A file that another process writes is followed: each line once, whatever happens to the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from atroposlib.utils import jsonl
from atroposlib.utils.jsonl import JsonLinesFollower, LineFollower, last_rows


def lines_of(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as out:
        out.write(content)


def read_all(file: JsonLinesFollower) -> tuple[list[dict[str, Any]], bool]:
    rows: list[dict[str, Any]] = []
    rewritten, more = False, True
    while more:
        new = file.read_rows()
        rows, rewritten, more = rows + new.rows, rewritten or new.rewritten, new.more
    return rows, rewritten


VALUES = st.one_of(st.none(), st.integers(-(2**53), 2**53), st.floats(), st.text(max_size=8))
ROWS = st.lists(st.dictionaries(st.text(max_size=8), VALUES, max_size=4), max_size=20)


@given(ROWS, st.lists(st.integers(1, 60), max_size=30), st.integers(8, 200))
def test_a_file_that_grows_is_read_once_wherever_it_is_torn(
    rows: list[Any], steps: list[int], piece: int
) -> None:
    written, at = lines_of(*rows), 0
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "PIECE", piece)
        path = Path(folder, "rows.jsonl")
        file, found = JsonLinesFollower(path), []
        for step in [*steps, len(written)]:
            append(path, written[at : at + step])
            at += step
            new, rewritten = read_all(file)
            assert not rewritten
            found += new
        assert json.dumps(found) == json.dumps(rows), "NaN and infinities are read too"
        assert file.unreadable == 0
        assert json.dumps(last_rows(path, 1 << 20)) == json.dumps(rows)
        tail = last_rows(path, piece)
        assert json.dumps(tail) == json.dumps(rows[len(rows) - len(tail) :])


@given(ROWS, ROWS, st.booleans())
@example([{"first": 1}, {"long": "x" * 300}], [{"other": 1}, {"long": "x" * 300}], True)
def test_a_file_that_was_written_anew_is_read_from_its_beginning(
    old: list[Any], new: list[Any], in_place: bool
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        path.write_bytes(lines_of(*old))
        file = JsonLinesFollower(path)
        read_all(file)
        if in_place:
            path.write_bytes(lines_of(*new))
        else:
            Path(folder, "draft").write_bytes(lines_of(*new))
            Path(folder, "draft").replace(path)
        rows, rewritten = read_all(file)
        before, after = lines_of(*old), lines_of(*new)
        grew = in_place and after.startswith(before)
        marks_are_equal = (
            after[:256] == before[:256] and after[: len(before)][-256:] == before[-256:]
        )
        assume(
            grew or not (in_place and marks_are_equal)
        )  # a difference between the marks is not looked for
        assert rewritten is not grew
        assert json.dumps(rows) == json.dumps(new[len(old) :] if grew else new)


def test_what_is_no_row_is_counted_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "PIECE", 64)
    monkeypatch.setattr(jsonl, "MAX_LINE", 256)
    path = tmp_path / "rows.jsonl"
    file = JsonLinesFollower(path)
    assert read_all(file) == ([], False), "it is not there yet"
    append(path, b'{"step": 1}\nnonsense\n[1]\n\n\xff\xfe\n' + b"x" * 1000)
    assert read_all(file)[0] == [{"step": 1}]
    append(path, b"x" * 1000 + b'\n{"step": 2}\n{"st')
    assert read_all(file)[0] == [{"step": 2}]
    assert file.unreadable == 4
    path.unlink()
    assert read_all(file) == ([], True)
    append(path, b'{"step": 3}\n')
    assert read_all(file)[0] == [{"step": 3}]


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "metrics.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="is no file"):
        JsonLinesFollower(pipe).read_rows()  # would wait for a writer
    assert last_rows(pipe) == []


@given(
    st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=9),
    st.binary(max_size=5),
    st.integers(0, 60),
)
def test_the_last_bytes_begin_with_a_whole_line(
    lines: list[bytes], tail: bytes, last_bytes: int
) -> None:
    tail = tail.replace(b"\n", b"")
    written = b"".join(line + b"\n" for line in lines) + tail
    with TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        path.write_bytes(written)
        follower = LineFollower(path, last_bytes=last_bytes)
        starts = [
            len(b"".join(line + b"\n" for line in lines[:number])) for number in range(len(lines))
        ]
        expected = [
            line
            for line, start in zip(lines, starts, strict=True)
            if start >= len(written) - last_bytes
        ]
        assert follower.read_new().lines == expected
        follower.take_tail()
        append(path, b"\nnext\n")
        assert follower.read_new().lines[-1] == b"next"
