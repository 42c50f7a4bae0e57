"""Files that are written whole, followed, or read as YAML and as data."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from atroposlib.errors import EnvironmentFailure, UsageError
from atroposlib.utils import files as ours
from atroposlib.utils import jsonl
from atroposlib.utils.files import DISK_REFUSALS, KeptLines, append_whole
from atroposlib.utils.jsonl import (
    BadRow,
    JsonLinesFollower,
    LineFollower,
    last_rows,
    replace_file,
    rows_of_file,
    usable_rows,
)
from atroposlib.utils.log_lines import LogLines
from atroposlib.utils.yaml_files import YamlError, load_yaml, read_yaml, underscored
from atroposlib.wire import refuse_boolean
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
    with pytest.raises(OSError, match="is not a file"):
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


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_what_was_written_is_read(value: Any) -> None:
    assert load_yaml(yaml.safe_dump(value)) == value


@given(st.text(alphabet="ab:-[]{}&*!<?|>'\"#%@, \n01.\t\x00\x85", max_size=40))
@example("a: 2026-13-45")
@example("!!int ''")
@example("!!float x")
@example("? [a]\n: 1")
@example("a: &b [*b]")
@example("!!python/object:os.system {}")
@example("a: \ufffe")
@example("[" * 5000)
@example("a: 1\n---\nb: 2")
def test_any_text_is_a_value_or_one_line(text: str) -> None:
    message = ""
    try:
        load_yaml(text)
    except YamlError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "key 'a' stands twice, in lines 1 and 3"),
        ("a: 1\n'a': 3", "key 'a' stands twice, in lines 1 and 2"),
        ("s:\n  - {x: 1, y: 2, x: 3}", "key 'x' stands twice, in lines 2 and 2"),
        ("1: a\n1: b", "key '1' stands twice"),
    ],
)
def test_a_key_that_stands_twice_is_refused(text: str, message: str) -> None:
    with pytest.raises(YamlError) as caught:
        load_yaml(text)
    assert str(caught.value).startswith(message)


def test_a_merged_table_may_be_overridden() -> None:
    text = "base: &b {x: 1, y: 2}\nmore: &m {<<: *b, y: 3}\nlast: {<<: *m, x: 5}"
    assert load_yaml(text)["last"] == {"x": 5, "y": 3}
    assert underscored({"a-b": 1, "c": 2}) == {"a_b": 1, "c": 2}
    with pytest.raises(YamlError, match="'a-b' and 'a_b' are the same option"):
        underscored({"a-b": 1, "a_b": 2})


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("utf-8", ""),
        ("utf-8-sig", ""),
        ("utf-16", "UTF-16"),
        ("utf-16-le", "not UTF-8"),
        ("latin-1", "line 1 is not UTF-8"),
    ],
)
def test_encodings(encoding: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes("# caf\u00e9\nname: \u00fc\n".encode(encoding))
    if message:
        with pytest.raises(YamlError, match=message):
            read_yaml(file)
    else:
        assert read_yaml(file) == {"name": "\u00fc"}


def test_utf_8_is_read_in_the_c_locale(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes("name: \u00fc\n".encode())
    code = "import sys, pathlib as p, atroposlib.utils.yaml_files as y; print(ascii(y.read_yaml(p.Path(sys.argv[1]))))"
    variables = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "c.yaml")]
    shown = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert shown.strip() == r"{'name': '\xfc'}"


@pytest.mark.parametrize(
    ("annotation", "value", "refused"),
    [
        (int, True, True), (float, False, True), (int | None, True, True), (Annotated[int, Field(ge=1)], True, True),
        (int | Literal["auto"], True, True), (list[int], [1, True], True), (dict[str, float] | None, {"a": True}, True),
        (bool, True, False), (bool | int, True, False), (Any, True, False), (str, True, False), (int, 1, False),
        (list[bool], [True], False), (dict[str, Any], {"a": True}, False), (Literal["auto"] | bool, False, False),
        (tuple[int, ...], (1, False), True), (float, "true", False), (list[list[int]], [[True]], True),
    ],
)  # fmt: skip
def test_a_boolean_is_not_a_number(annotation: Any, value: Any, refused: bool) -> None:
    if refused:
        with pytest.raises(ValueError, match="a boolean is not a number"):
            refuse_boolean(annotation, value)
    else:
        refuse_boolean(annotation, value)


texts = st.text(
    st.characters(exclude_categories=["Cs"])
    | st.sampled_from("\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\n"),
    max_size=20,
)


values = st.dictionaries(texts, texts | st.integers() | st.lists(texts, max_size=2), max_size=3)


@given(
    rows=st.lists(values, max_size=5),
    escaped=st.booleans(),
    mark=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\n \n"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_survive_whatever_their_strings_hold(
    tmp_path: Path, rows: list[dict[str, Any]], escaped: bool, mark: bool, end: str
) -> None:
    encoding = "utf-8-sig" if mark else "utf-8"
    lines = tmp_path / "rows.jsonl"
    lines.write_bytes(
        "".join(json.dumps(row, ensure_ascii=escaped) + end for row in rows).encode(encoding)
    )
    assert [row.value for row in rows_of_file(lines)] == rows
    whole = tmp_path / "rows.json"
    whole.write_bytes(json.dumps(rows, ensure_ascii=escaped).encode(encoding))
    assert [row.value for row in rows_of_file(whole)] == rows


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"{oops", "not JSON"),
        (b'"\xff"', "not UTF-8"),
        (b"9" * 5000, "not JSON that Python reads"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": 1} {"a": 2}', "not JSON (Extra data"),
    ],
    ids=["broken", "latin-1", "long number", "deep", "two objects"],
)
def test_a_bad_row_is_counted_and_the_others_are_read(
    tmp_path: Path, line: bytes, fault: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    rows = usable_rows(rows_of_file(path), lambda row: row["a"])
    assert rows.good == [1, 3]
    assert len(rows.faults) == 1
    assert rows.faults[0].startswith(f"{path}, line 2: {fault}")


def test_a_row_that_the_task_cannot_use_is_counted(tmp_path: Path) -> None:
    def read(row: Any) -> Any:
        if not isinstance(row, dict):
            raise BadRow("not an object")
        return row

    path = tmp_path / "rows.jsonl"
    path.write_text('["b", "2"]\n{}\n')
    rows = usable_rows(rows_of_file(path), read)
    assert (rows.good, rows.faults) == ([{}], [f"{path}, line 1: not an object"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'[{"a": 1}, {"a": 2}]', "call it .json instead"),
        ("a.jsonl", b'[\n  {"a": 1}\n]', "call it .json instead"),
        ("a.json", b'{"a": 1}', "not a list of rows"),
        ("a.json", b'[{"a": 1}', "line 1: not JSON"),
        ("a.json", b'["\xff"]', "cannot read"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "it is UTF-16; save it as UTF-8"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", "unpack it with gunzip"),
        ("a.jsonl", b"PAR1", "it is Parquet; call it .parquet"),
        ("a.jsonl", b"PK\x03\x04", "a zip archive or a spreadsheet"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
        ("a.jsonl", b"<!DOCTYPE html>", "it is HTML or XML"),
        ("a.parquet", b"something else", "cannot read"),
    ],
)
def test_a_file_of_another_format_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as refusal:
        list(rows_of_file(path))
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*nothing\.jsonl: No such file"):
        rows_of_file(tmp_path / "nothing.jsonl")


def test_files_that_were_joined_have_several_marks(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(2 * b'\xef\xbb\xbf{"a": 1}\n')
    assert [row.value for row in rows_of_file(path)] == [{"a": 1}, {"a": 1}]


def test_a_path_that_is_a_folder_needs_another_path_and_no_room(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match=r": Is a directory; name another path$"):
        replace_file(tmp_path, b"text")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room there, or write elsewhere"),
        (errno.EACCES, "let this user write there, or write elsewhere"),
        (errno.EEXIST, "write elsewhere"),
    ],
)
def test_the_advice_fits_the_error(number: int, advice: str) -> None:
    assert ours.remedy(OSError(number, "reason"), "write elsewhere") == advice
