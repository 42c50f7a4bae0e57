"""A run of one file of the public repository, and what its rows and answers are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Rows = dict[str, dict[str, list[dict[str, Any]]]]


@dataclass(frozen=True)
class Case:
    """One file, run once with each SDK.

    Attributes:
        name: of the row in the results.
        file: under `environments/` of the clone.
        kind: in words, for the table.
        answers: the model's, in turn; or `rules` for answers that depend on the prompt.
        rows: {data set: {split: rows}}.
        hub: {name in a data set's repository: text} for files that are downloaded one by one.
        rules: [{"when": regular expression, "answers": [...]}]; made of `answers` if not given.
        command: `serve`, `process` or `evaluate`.
        env: settings over the common ones of every run; becomes flags.
        flags: further flags.
        yaml: a YAML file of the clone that is given as `--config`.
        files: written into the working folder (which is $HOME too) first.
        environ: further environment variables.
        server_type: of the inference server.
        servers: how many servers the environment has by default; from 2 on they are given in a YAML
            file of ours.
        group_size, batch_size, groups, seconds: sizes, how many groups are compared, and how long
            both may take.
        expected: the verdict that a run must find.
        why: what differs, or why it does not run, in words.
    """

    name: str
    file: str
    kind: str
    answers: Sequence[str] = ()
    rows: Rows = field(default_factory=dict)
    hub: Mapping[str, str] = field(default_factory=dict)
    rules: Sequence[Mapping[str, Any]] = ()
    command: str = "serve"
    env: Mapping[str, Any] = field(default_factory=dict)
    flags: Sequence[tuple[str, Any]] = ()
    yaml: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    server_type: str = "vllm"
    servers: int = 1
    group_size: int = 4
    batch_size: int = 4
    groups: int = 3
    seconds: float = 300.0
    expected: str = "same"
    why: str = ""

    def __post_init__(self) -> None:
        if not self.rules:
            object.__setattr__(self, "rules", [{"when": "", "answers": list(self.answers)}])


def numbered(count: int, make: Any) -> list[dict[str, Any]]:
    return [make(number) for number in range(count)]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": who, "value": text} for who, text in turns]
