"""What a node is told about a process.

Standard library alone: actors are made often, and must be light.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PYTHON = "{python}"
"""Stands in a command for the interpreter of the node on which it is started."""


@dataclass(frozen=True)
class Address:
    """Where a role was put.

    Attributes:
        host: by which the other roles reach it; localhost where all nodes are one machine.
        ports: those that it may listen on.
        gpus: indices of its GPUs on that node.
    """

    host: str
    ports: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def server(self) -> str:
        """`host:port`."""
        return f"{self.host}:{self.ports[0]}"

    @property
    def url(self) -> str:
        """`http://host:port`."""
        return f"http://{self.server}"

    @property
    def listen(self) -> str:
        """The address to listen on."""
        return "127.0.0.1" if self.host == "localhost" else "0.0.0.0"


@dataclass(frozen=True)
class Launch:
    """What a node is told to start.

    Attributes:
        arguments: program and arguments; PYTHON for the interpreter there.
        variables: on top of the node's; None removes one.
        files: path within the run's folder -> text, written before.
        stale: patterns within the run's folder of what is removed before.
    """

    arguments: tuple[str, ...]
    variables: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stale: tuple[str, ...] = ()
