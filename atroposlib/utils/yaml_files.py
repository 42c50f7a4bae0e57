"""The project's only YAML reader."""

from __future__ import annotations

import math
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

import yaml

Value = TypeVar("Value")

MERGE = "tag:yaml.org,2002:merge"


class YamlError(ValueError):
    """The text is not UTF-8 or not YAML, a key stands twice, or a number is not finite.

    The message is one line without values, which may be secret.
    """


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file in UTF-8, with or without a byte order mark, in any locale.

    Raises:
        OSError: the file cannot be read.
        YamlError: see load_yaml, and the file is in another encoding.
    """
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        encoding = "Latin-1 or another encoding"
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            encoding = "UTF-16"
        raise YamlError(
            f"line {line} is not UTF-8 (the file may be in {encoding}); save the file as UTF-8"
        ) from None
    if "\0" in text:
        raise YamlError(
            "the file holds zero bytes, as UTF-16 and binary files do; save it as text in UTF-8"
        )
    return load_yaml(text)


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice.

    It does so before construction, because PyYAML then replaces merge keys (`<<`) by the keys that
    they stand for.
    """

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[Hashable, yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            earlier = first.setdefault((key.tag, key.value), key)
            if earlier is not key and key.tag != MERGE:
                lines = f"lines {earlier.start_mark.line + 1} and {key.start_mark.line + 1}"
                raise YamlError(
                    f"key {key.value!r:.80} stands twice, in {lines}; remove one of them"
                )
        return node


def _finite_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    number: float = loader.construct_yaml_float(node)
    if not math.isfinite(number):
        raise YamlError(f"{node.value!r:.80}{_place(node.start_mark)} is not a finite number")
    return number


_Loader.add_constructor("tag:yaml.org,2002:float", _finite_float)


def load_yaml(text: str) -> Any:
    """Return the value of one YAML document; a number such as `1e-5`, which YAML reads as text,
    stays text.

    Raises:
        YamlError: the text is not YAML, a mapping has the same key twice, or a number is not
            finite.
    """
    try:
        return yaml.load(text, _Loader)
    except YamlError:
        raise
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context
        raise YamlError(f"{_first_line(problem)}{_place(error.problem_mark)}") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise YamlError(_first_line(getattr(error, "reason", None) or error)) from None
    except RecursionError:
        raise YamlError("the values are nested too deeply") from None
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        # PyYAML's own conversions of dates, numbers and tags raise these.
        raise YamlError(
            f"a value cannot be read ({type(error).__name__}); put text in quotes"
        ) from None


def _first_line(problem: object) -> str:
    return " ".join(str(problem or "the text is not YAML").split())[:200]


def _place(mark: yaml.Mark | None) -> str:
    if mark is None:
        return ""
    return f" in line {mark.line + 1}, column {mark.column + 1}"


def underscored(table: dict[Any, Value]) -> dict[str, Value]:
    """Return a table with `_` for `-` in its keys.

    Raises:
        YamlError: two keys become the same.
    """
    names: dict[str, Any] = {}
    for key in table:
        name = str(key).replace("-", "_")
        if name in names:
            raise YamlError(
                f"keys {names[name]!r} and {key!r} are the same option; remove one of them"
            )
        names[name] = key
    return {name: table[key] for name, key in names.items()}
