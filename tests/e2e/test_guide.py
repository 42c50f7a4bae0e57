"""The guide's other commands, typed in its order: single copy, restarts, LoRA, its answers to
questions, and several GPUs.

The launch sequence and the production run are in test_launch_sequence.py. Every part ends with the
guide's clean-up, after which nothing may be left. Only the model's name, lists of devices and
numbers of steps are replaced.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from bench.gpu.guide import COMMANDS, TypedShell, words_of
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

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(540), NEEDS_GSM8K]


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
    assert shell.kill() < 5  # the ranks that the trainer started among the rest


def test_restarts(shell: TypedShell) -> None:
    type_named(
        shell, "legacy trainer", "2>&1 | tee trainer.log > /dev/null &", vllm_restart_interval=1
    )
    shell.wait_for("trainer.log", "Step 2/100", 400, "grpo.py")
    assert shell.read("trainer.log").count("[Bridge] Starting vLLM on ") >= 2
    assert shell.kill() < 5  # the server of the trainer among the rest


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
    assert shell.kill() < 5


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
    # here: twice, on a crowded machine, ps and grep printed nothing at all, and what this project
    # decides is only how its processes are called.
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
    assert shell.kill() < 5


@NEEDS_RAY
def test_roles_on_ray_end_with_what_is_killed(tmp_path: Path) -> None:
    """Ray's workers rename themselves too. The service is real, and the other roles weigh nothing.

    Two agents of Ray's own, which hold no GPU, go on for a minute: they try to report the end to a
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
        assert shell.kill(may_stay=r"^ray::(Dashboard|RuntimeEnv)Agent") < 5
