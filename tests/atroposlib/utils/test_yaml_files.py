"""YAML files: encodings, double keys, and text that is not YAML; and booleans where numbers are
wanted.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field

from atroposlib.utils.yaml_files import YamlError, load_yaml, read_yaml, underscored
from atroposlib.wire import refuse_boolean

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
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
