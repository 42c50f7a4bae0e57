"""torchao's import leaves no line in a server's log, and its other warnings stay."""

from __future__ import annotations

import sys

from tests.forked_commands import run_command

IMPORT = """
import logging, sys
from vllm_patching.compat.torchao_logs import quiet_torchao
quiet_torchao()
quiet_torchao()
import torchao
assert "torchao.optim" in sys.modules
logging.getLogger("torchao").warning("something else")
assert len(logging.getLogger("torchao").filters) == 1
"""


def test_importing_torchao_logs_nothing_and_other_warnings_stay() -> None:
    done = run_command([sys.executable, "-c", IMPORT])
    assert done.returncode == 0, done.stdout
    assert [line for line in done.stdout.splitlines() if line.strip()] == ["something else"]
