"""The reader of data files: lines, marks, bad rows and formats."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atroposlib.errors import UsageError
from atroposlib.utils.jsonl import BadRow, rows_of_file, usable_rows

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
