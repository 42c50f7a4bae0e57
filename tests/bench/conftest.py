"""What the tests of the benchmarks share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bench import rollout_api_load, service_kills
from bench.gpu import processes
from tests.forked_commands import what_forks


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks fork the commands of this project that they start, where they would execute them."""

    def start(words: Sequence[str], **options: Any) -> Any:
        variables: Mapping[str, str] = options.get("env", os.environ)
        found = what_forks(words, variables)
        if found is None:
            return subprocess.Popen(words, **options)
        server, command = found
        fork = server.fork_with_pipes if options.get("stdin") == subprocess.PIPE else server.fork
        return fork(command, variables, options["cwd"], options["stderr"].fileno())

    others = {
        name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired", "run")
    }
    for module in (processes, rollout_api_load, service_kills):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=start, **others))
