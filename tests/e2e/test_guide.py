"""The guide's launch sequence and its other commands, typed in its order."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from bench.gpu.guide import COMMANDS, VLLM, TypedShell, words_of
from bench.guide_commands import on_devices
from tests.conftest import ROOT
from tests.e2e.conftest import NEEDS_RAY
from tests.e2e.guide_shell import (
    NEEDS_GSM8K,
    guide_shell,
    on_this_machine,
    type_named,
    wait_for_vllm,
)

pytestmark = [NEEDS_GSM8K, pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(540)]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[TypedShell]:
    """A shell in which steps 1 to 5 of the guide have been typed: service and environment are up."""
    with guide_shell(tmp_path) as shell:
        for name in ("folder", "old files", "variables", "service", "environment"):
            type_named(shell, name)
        yield shell


def test_single_copy(shell: TypedShell) -> None:
    type_named(shell, "single copy vllm")
    wait_for_vllm(shell)
    type_named(shell, "single copy trainer", "> /dev/null &")
    shell.wait_for("trainer.log", "Step 2/100", 240, "grpo.py")
    assert re.search(
        r"\[Bridge\] Mapped (\d+)/\1 params from vLLM to trainer", shell.read("trainer.log")
    )
    shell.kill()  # the ranks that the trainer started among the rest


def test_restarts(shell: TypedShell) -> None:
    type_named(
        shell, "legacy trainer", "2>&1 | tee trainer.log > /dev/null &", vllm_restart_interval=1
    )
    shell.wait_for("trainer.log", "Step 2/100", 400, "grpo.py")
    assert shell.read("trainer.log").count("[Bridge] Starting vLLM on ") >= 2
    shell.kill()  # the server of the trainer among the rest


def test_lora_and_the_quick_test(shell: TypedShell) -> None:
    # The guide names no server for LoRA: it is started with adapters, and without shared weights
    # (docs/lora.md).
    vllm = on_this_machine(COMMANDS["small vllm"]).replace(
        "vllm_api_server.py", "vllm_api_server.py --enable-lora"
    )
    shell.type(f"VLLM_ENABLE_SHARED_WEIGHTS=0 {vllm}")
    wait_for_vllm(shell)
    type_named(shell, "lora trainer", "2>&1 | tee lora.log > /dev/null &", training_steps=2)
    shell.wait_for("lora.log", "Training complete: 2 steps", 240, "grpo.py")
    assert list(
        (shell.folder / "trained_model_checkpoints").glob(
            "adapter_step_2/adapter_model.safetensors"
        )
    )
    # The run has ended, and its environment with it. The next environment waits for the next
    # trainer.
    type_named(shell, "environment")
    type_named(shell, "quick test", "2>&1 | tee quick.log > /dev/null &")
    shell.wait_for("quick.log", "Training complete: 5 steps", 240, "grpo.py")
    shell.kill()


def test_the_smaller_model_the_answers_to_questions_and_several_gpus(shell: TypedShell) -> None:
    type_named(shell, "small vllm")
    wait_for_vllm(shell)
    type_named(shell, "small trainer", "> /dev/null &")
    shell.wait_for("trainer.log", "Step 2/10", 240, "grpo.py")
    for name, text in (
        ("threads", "[vLLM Patch] ✓ Weight updater thread started (name: WeightUpdater_TP0)"),
        ("exported", "[vLLM Patch] ✓ Exported "),
        ("api log", "trainer registered"),
        ("environment log", "registered as gsm8k_0"),
        ("vllm log", "POST /generate"),
        ("trainer log", "Step 2/10"),
    ):
        assert text in shell.answer(COMMANDS[name]), name
    # The guide looks for its processes with ps and a pattern. The command lines come from /proc
    # here: twice, on a crowded machine, ps and grep printed nothing at all. This project decides
    # only how its processes are called.
    pattern = re.search(r'grep -E "([^"]+)"', COMMANDS["processes"])
    assert pattern, COMMANDS["processes"]
    programs = [line for line in shell.pids().values() if re.search(pattern[1], line)]
    for program in ("atroposlib.cli.run_api", "gsm8k_server.py", "vllm_api_server.py", "grpo.py"):
        assert any(program in line for line in programs), f"{program} is not among {programs}"
    # On this machine the server for several GPUs is the same one.
    alike = on_devices(on_this_machine(COMMANDS["multi-gpu vllm"]), "0", 1).replace(
        "--tensor-parallel-size 1", ""
    )
    assert words_of(alike) == words_of(on_this_machine(COMMANDS["small vllm"]))
    for pid in shell.pids_of("grpo.py"):
        os.kill(pid, signal.SIGINT)
    shell.wait_for("trainer.log", "Stopped by SIGINT", 120)
    type_named(shell, "multi-gpu trainer", "> /dev/null &")
    shell.wait_for("trainer.log", "Step 1/100", 240, "grpo.py")
    shell.kill()


@NEEDS_RAY
def test_roles_on_ray_end_with_what_is_killed(tmp_path: Path) -> None:
    """Ray's workers rename themselves too. The service is real, and the other roles weigh nothing.

    Two agents of Ray's own, which hold no GPU, go on for a minute. They try to report the end to a
    server that has ended.
    """
    sections = {
        "orchestration": {
            "device": "cpu",
            "generators": 1,
            "service_cpus": 0.1,
            "generator_cpus": 0.1,
            "environment_cpus": 0.1,
        }
        | {"trainer_cpus": 0.1},
        "inference": {"environment": "arithmetic"},
        "training": {"model_name": str(ROOT / "assets/starter_model")},
        "logging": {"timeline": False},
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(sections))
    folder = tmp_path / "checkout"
    folder.mkdir()
    with guide_shell(folder) as shell:
        shell.type(
            f"python -u {ROOT}/tests/e2e/async_roles.py drive --config {config} --folder {folder}/run > driver.log 2>&1 &"
        )
        shell.wait_for("driver.log", "[Async] trainer runs", 240, "async_roles.py drive")
        renamed = [line for line in shell.pids().values() if line.startswith("ray::")]
        assert renamed, "no worker of Ray has renamed itself"
        shell.kill(may_stay=r"^ray::(Dashboard|RuntimeEnv)Agent")


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
def shell_launch_sequence(tmp_path: Path) -> Iterator[TypedShell]:
    with guide_shell(tmp_path) as shell_launch_sequence:
        yield shell_launch_sequence


def test_the_sequence_has_the_commands_of_the_guide() -> None:
    lines = [
        line for block in launch_commands() for line in block.replace("\\\n", " ").splitlines()
    ]
    here = [words_of(line) for line in lines]
    for name in LAUNCHED:
        assert words_of(COMMANDS[name]) in here, name


def test_every_command_works_and_prints_what_it_promises(shell_launch_sequence: TypedShell) -> None:
    vllm_port = shell_launch_sequence.ports[VLLM]
    for block in launch_commands():
        command = on_this_machine(block)
        if command.startswith("tail -f vllm.log"):
            wait_for_vllm(shell_launch_sequence)
        elif command.startswith("tail -f trainer.log"):
            shell_launch_sequence.wait_for("trainer.log", "Step 2/100", 240, "grpo.py")
        elif command.startswith(("grep", "curl")):
            assert shell_launch_sequence.answer(command, 120).strip(), f"{command!r} found nothing"
        elif "grpo.py" in command:
            shell_launch_sequence.type(command.rstrip() + " > /dev/null &")
        else:
            shell_launch_sequence.type(command)

    vllm, trainer = (
        shell_launch_sequence.read("vllm.log"),
        shell_launch_sequence.read("trainer.log"),
    )
    assert f"No VLLM_API_KEY: all that reach port {vllm_port} may sample" in vllm
    expect_only_this_machine(vllm_port)
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
    assert '"param_mappings": {"model.embed_tokens.weight"' in shell_launch_sequence.read(
        "vllm_bridge_config.json"
    )

    # A person stops it with Ctrl-C: the trainer keeps what it has learned.
    trainers = shell_launch_sequence.pids_of("example_trainer/grpo.py")
    assert trainers, "the trainer has ended before it was stopped"
    for pid in trainers:
        os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + 180
    while shell_launch_sequence.pids_of("example_trainer/grpo.py"):
        assert time.monotonic() < deadline, shell_launch_sequence.read("trainer.log")[-2000:]
        time.sleep(0.25)
    assert list(
        (shell_launch_sequence.folder / "trained_model_checkpoints").glob(
            "step_*/model.safetensors"
        )
    )

    # The other processes still run, and another training beside them is the guide's production run.
    type_named(shell_launch_sequence, "production", "> production.log 2>&1 &")
    shell_launch_sequence.wait_for("production.log", "Step 1/1000", 240, "grpo.py")
    shell_launch_sequence.kill()


def expect_only_this_machine(vllm_port: int) -> None:
    """Without a key, other machines may sample and no more, and pages of others not even that."""
    far, page = {"X-Forwarded-For": "192.0.2.7"}, {"Origin": "https://page.example"}
    for path, headers, status in (
        ("/bridge/state", {}, 200), ("/bridge/state", far, 403), ("/v1/models", far, 200), ("/v1/models", page, 403),
        ("/v1/models", {"Host": "rebound.example"}, 403),
    ):  # fmt: skip
        answer = httpx.get(
            f"http://127.0.0.1:{vllm_port}{path}", headers=headers, timeout=120, trust_env=False
        )
        assert answer.status_code == status, (path, headers, answer.text)
    paused = httpx.post(
        f"http://127.0.0.1:{vllm_port}/bridge/begin",
        headers=far,
        json={},
        timeout=120,
        trust_env=False,
    )
    assert (paused.status_code, "Set VLLM_API_KEY" in paused.text) == (403, True)
