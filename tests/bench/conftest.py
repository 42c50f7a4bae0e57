"""What the tests of the benchmarks share."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import processes
from tests.forked_commands import what_forks


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks fork the commands of this project that they start, where they would execute them."""

    def start(words: Sequence[str], **options: Any) -> Any:
        found = None if options["stdin"] == subprocess.PIPE else what_forks(words, options["env"])
        if found is None:
            return subprocess.Popen(words, **options)
        server, command = found
        return server.fork(command, options["env"], options["cwd"], options["stderr"].fileno())

    others = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=start, **others))
