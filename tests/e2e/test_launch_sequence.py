"""The launch sequence of example_trainer/README.md, typed as it stands there but for the model's
name, and its promises.

Then come the guide's production run beside the same services, and its clean-up, after which nothing
may be left.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.gpu.guide import COMMANDS, VLLM, TypedShell, words_of
from tests.conftest import ROOT
from tests.e2e.guide_shell import (
    NEEDS_GSM8K,
    guide_shell,
    on_this_machine,
    type_named,
    wait_for_vllm,
)

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(540), NEEDS_GSM8K]

LAUNCHED = ("old files", "service", "environment", "vllm", "shared memory", "trainer")
"""The guide's commands that the page's sequence has too."""


def launch_commands() -> list[str]:
    """The shell blocks of the launch sequence, in order."""
    page = (ROOT / "example_trainer" / "README.md").read_text(encoding="utf-8")
    section = page.split("## Launch sequence", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    assert len(blocks) >= 7, "the launch sequence has lost its commands"
    return blocks


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[TypedShell]:
    with guide_shell(tmp_path) as shell:
        yield shell


def test_the_sequence_has_the_commands_of_the_guide() -> None:
    lines = [
        line for block in launch_commands() for line in block.replace("\\\n", " ").splitlines()
    ]
    here = [words_of(line) for line in lines]
    for name in LAUNCHED:
        assert words_of(COMMANDS[name]) in here, name


def test_every_command_works_and_prints_what_it_promises(shell: TypedShell) -> None:
    vllm_port = shell.ports[VLLM]
    for block in launch_commands():
        command = on_this_machine(block)
        if command.startswith("tail -f vllm.log"):
            wait_for_vllm(shell)
        elif command.startswith("tail -f trainer.log"):
            shell.wait_for("trainer.log", "Step 2/100", 240, "grpo.py")
        elif command.startswith(("grep", "curl")):
            assert shell.answer(command, 120).strip(), f"{command!r} found nothing"
        elif "grpo.py" in command:
            shell.type(command.rstrip() + " > /dev/null &")
        else:
            shell.type(command)

    vllm, trainer = shell.read("vllm.log"), shell.read("trainer.log")
    assert f"No VLLM_API_KEY: whoever reaches port {vllm_port} may sample" in vllm
    far, page = {"X-Forwarded-For": "192.0.2.7"}, {"Origin": "https://page.example"}
    for path, headers, status in (
        ("/bridge/state", {}, 200), ("/bridge/state", far, 403), ("/v1/models", far, 200), ("/v1/models", page, 403),
        ("/v1/models", {"Host": "rebound.example"}, 403),
    ):  # fmt: skip
        answer = httpx.get(
            f"http://127.0.0.1:{vllm_port}{path}", headers=headers, timeout=30, trust_env=False
        )
        assert answer.status_code == status, (path, headers, answer.text)
    paused = httpx.post(
        f"http://127.0.0.1:{vllm_port}/bridge/begin",
        headers=far,
        json={},
        timeout=30,
        trust_env=False,
    )
    assert (paused.status_code, "set VLLM_API_KEY" in paused.text) == (403, True)
    assert re.search(r"\[vLLM Patch\] ✓ Exported \d+ params", vllm)
    assert "[vLLM Patch] ✓ Shared memory setup complete!" in vllm
    for rank in (0, 1):
        assert (
            f"[vLLM Patch] ✓ Weight updater thread started (name: WeightUpdater_TP{rank})" in vllm
        )
    for line in (
        "[Bridge] ✓ Gloo group created",
        "[Bridge] ✓ NCCL group created",
        "[Bridge] ✓ All ranks synchronized and ready",
        "Step 1/100",
    ):
        assert line in trainer
    mapped = re.search(r"\[Bridge\] Mapped (\d+)/(\d+) params from vLLM to trainer", trainer)
    assert mapped is not None
    assert mapped[1] == mapped[2] != "0"
    assert "Serving weight version 2" in vllm
    assert '"param_mappings": {"model.embed_tokens.weight"' in shell.read("vllm_bridge_config.json")

    # A person stops it with Ctrl-C: the trainer keeps what it has learned.
    trainers = shell.pids_of("example_trainer/grpo.py")
    assert trainers, "the trainer has ended before it was stopped"
    for pid in trainers:
        os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + 180
    while shell.pids_of("example_trainer/grpo.py"):
        assert time.monotonic() < deadline, shell.read("trainer.log")[-2000:]
        time.sleep(0.25)
    assert list((shell.folder / "trained_model_checkpoints").glob("step_*/model.safetensors"))

    # The other processes still run, and another training beside them is the guide's production run.
    type_named(shell, "production", "> production.log 2>&1 &")
    shell.wait_for("production.log", "Step 1/1000", 240, "grpo.py")
    assert shell.kill() < 5
