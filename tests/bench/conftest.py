"""What the tests of the benchmarks share."""

from __future__ import annotations

import pytest

from example_trainer.child_processes.processes import ManagedProcess
from tests.forked_commands import start_guard


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks fork the commands of this project that they start, where they would execute them."""

    monkeypatch.setattr(ManagedProcess, "start_guard", start_guard)
