"""The guide's commands, changed as little as a machine without a GPU, and with the starter model,
asks for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.gpu.guide import COMMANDS, RENDEZVOUS, SERVICE, VLLM, TypedShell
from example_trainer.child_processes.ports import PortReservations
from tests.conftest import ROOT
from tests.e2e.conftest import FORKED_ENGINES

GSM8K = ROOT.parent / "shared" / "gsm8k"
STARTER = ROOT / "assets" / "starter_model"
NEEDS_GSM8K = pytest.mark.skipif(
    not GSM8K.is_dir(), reason="no local copy of GSM8K in ../shared/gsm8k"
)
# A test has no network, and a model of two million parameters solves none of the problems. They
# come from a local copy, and the reward is for the format. Short answers in large groups are
# sampled in few steps.
ENVIRONMENT_FLAGS = (
    f"--env.dataset_path {shlex.quote(str(GSM8K))} --env.format_reward "
    "--env.max_token_length 16 --env.group_size 16"
)


@contextmanager
def guide_shell(folder: Path) -> Iterator[TypedShell]:
    """A shell whose vLLM forks its engine and its ranks.

    Other ports take the place of the guide's. Programs that run beside the test may take their
    defaults, which are the same, without a reservation, between a look and the server's start.
    """
    with PortReservations() as reserved:
        ports = {port: reserved.pick() for port in (SERVICE, VLLM, RENDEZVOUS)}
        shell = TypedShell(folder, {"OMP_NUM_THREADS": "1", **FORKED_ENGINES}, ports)
        try:
            yield shell
        finally:
            shell.process.stop()


def on_this_machine(command: str, **numbers: int) -> str:
    """The command with the starter model, the local problems, and other numbers for flags.

    Args:
        numbers: `training_steps=2` for `--training-steps 2`; the command must have the flag.
    """
    command = re.sub(r"Qwen/Qwen2\.5-\w+-Instruct", str(STARTER), command)
    command = command.replace(
        "environments/gsm8k_server.py", f"environments/gsm8k_server.py {ENVIRONMENT_FLAGS}"
    )
    for name, number in numbers.items():
        flag = "--" + name.replace("_", "-")
        command, count = re.subn(rf"{flag} \d+", f"{flag} {number}", command)
        assert count == 1, f"{flag} stands {count} times in {command}"
    return command


def type_named(shell: TypedShell, name: str, more: str = "", **numbers: int) -> None:
    """Type one of COMMANDS.

    Args:
        more: put behind it, such as a redirection where the guide leaves the output on the
            terminal.
        numbers: see on_this_machine.
    """
    shell.type(f"{on_this_machine(COMMANDS[name], **numbers)} {more}".strip())


def wait_for_vllm(shell: TypedShell) -> None:
    """Wait for the line that the guide waits for."""
    shell.wait_for(
        "vllm.log",
        f"Uvicorn running on http://0.0.0.0:{shell.ports[VLLM]}",
        240,
        "vllm_api_server.py",
    )
