"""start.sh's reading of its flags and variables: options, GPUs, and commands that the programs
themselves understand.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from example_trainer.command_line import parse_config
from example_trainer.launcher.command_line import LauncherError
from example_trainer.launcher.options import choose_gpus, parse, save
from example_trainer.launcher.stack import Stack
from example_trainer.launcher.starter_models import BATCHES, LEARNING_RATES, STARTER_MODEL


@pytest.mark.parametrize(
    ("asked", "visible", "expected"),
    [
        ((None, None), (), ((), ())),
        ((None, None), (0,), ((0,), (0,))),
        ((None, None), (0, 1), ((0,), (1,))),
        ((None, None), (0, 1, 2), ((0, 1), (2,))),
        (((0, 1), (2, 3)), (0, 1, 2, 3), ((0, 1), (2, 3))),
        (((1,), None), (0, 1), ((1,), (1,))),
    ],
)
def test_gpus_are_dealt_out(
    asked: tuple[object, object], visible: tuple[int, ...], expected: object
) -> None:
    assert choose_gpus(*asked, visible, cpu=False) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainr"], "'trainr' is no part of the stack"),
        (["--bridge", "magic"], "--bridge magic: give one of auto"),
        (["--cpu", "--vllm-gpus", "0"], "--cpu excludes --vllm-gpus"),
        (["--vllm-gpus", "7"], "GPU 7 is not there"),
        (["--environment", "nowhere.py"], "--environment nowhere.py"),
        (["--model", "./nowhere"], "--model ./nowhere"),
        (["vllm", "--bridge", "restart", "--cpu"], "the trainer starts vLLM itself"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(LauncherError, match=message) as caught:
        parse(arguments)
    assert "\n" not in str(caught.value)


def test_a_line_that_does_not_parse_names_this_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--vllm-port", "high"])
    assert capsys.readouterr().err == (
        "start: argument --vllm-port: 'high' is no TCP port (see scripts/start.sh --help)\n"
    )


def test_variables_are_defaults_and_flags_win(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCKSTEP_VLLM_PORT", "9901")
    monkeypatch.setenv("LOCKSTEP_STEPS", "7")
    monkeypatch.setenv("LOCKSTEP_VLLM_ARGS", "--max-num-seqs 4")
    monkeypatch.setenv("LOCKSTEP_RUN", str(tmp_path))
    monkeypatch.setenv("MASTER_PORT", "29777")
    options = parse(["--cpu", "--steps", "8"])
    assert (options.vllm_port, options.steps, options.run, options.master_port) == (
        9901,
        8,
        tmp_path,
        29777,
    )
    assert options.vllm_args == ("--max-num-seqs", "4")


def test_defaults_are_the_starter_model_on_this_machine() -> None:
    options = parse(["--cpu"])
    assert (options.model, options.environment, options.parts) == (
        str(STARTER_MODEL), "arithmetic", ("service", "vllm", "environment", "trainer")
    )  # fmt: skip
    assert Stack(options).log("environment").name == "env.log"
    assert Stack(options).ports() == {
        8000: "--service-port",
        9001: "--vllm-port",
        29500: "--master-port",
    }


def test_the_starter_model_is_trained_as_by_the_quick_start() -> None:
    stack = Stack(parse(["--cpu"]))
    trainer, environment = stack.command("trainer"), stack.command("environment")
    config = parse_config(
        trainer.arguments[trainer.arguments.index("example_trainer/grpo.py") + 1 :]
    )
    shape = BATCHES["arithmetic"]
    assert (config.lr, config.lr_schedule) == (LEARNING_RATES["arithmetic"], "cosine")
    assert config.batch_size * config.gradient_accumulation_steps == shape.rollouts
    assert f"--env.group_size {shape.group_size}" in " ".join(environment.arguments)


def on_gpus(monkeypatch: pytest.MonkeyPatch, visible: tuple[int, ...], *arguments: str) -> Stack:
    monkeypatch.setattr("example_trainer.launcher.options.visible_gpus", lambda: visible)
    return Stack(parse(["--model", "Qwen/Qwen2.5-14B-Instruct", *arguments]))


def test_the_launch_sequence_of_the_readme_on_three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = on_gpus(
        monkeypatch, (0, 1, 2), "--bridge", "broadcast", "--lr", "1e-6", "--batch-size", "4"
    )
    vllm, trainer, environment = (
        stack.command("vllm"),
        stack.command("trainer"),
        stack.command("environment"),
    )
    assert vllm.variables["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert trainer.variables["CUDA_VISIBLE_DEVICES"] == "2"
    assert vllm.variables["VLLM_ENABLE_SHARED_WEIGHTS"] == "1"
    assert "--tensor-parallel-size 2" in " ".join(vllm.arguments)
    assert "--gpu-memory-utilization" not in vllm.arguments
    config = parse_config(
        trainer.arguments[trainer.arguments.index("example_trainer/grpo.py") + 1 :]
    )
    assert (config.weight_bridge_mode, config.use_shared_memory, config.lr, config.batch_size) == (
        "shared_vllm",
        True,
        1e-6,
        4,
    )
    assert environment.arguments[2] == "environments/gsm8k_server.py"
    assert stack.log("environment").name == "gsm8k.log"


def test_one_gpu_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = on_gpus(monkeypatch, (0,), "--bridge", "single-copy")
    assert "--gpu-memory-utilization 0.45" in " ".join(stack.command("vllm").arguments)
    assert "--tensor-parallel-size" not in stack.command("vllm").arguments
    assert "--single-copy" in stack.command("trainer").arguments


def test_several_trainer_gpus_get_a_process_each(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = on_gpus(
        monkeypatch, (0, 1, 2, 3), "--vllm-gpus", "0,1", "--trainer-gpus", "2,3"
    ).command("trainer")
    assert trainer.arguments[1:3] == ("-u", "example_trainer/grpo.py"), (
        "it starts a process for each GPU by itself"
    )
    assert trainer.variables["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_adapters_need_a_server_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = on_gpus(monkeypatch, (0, 1), "--bridge", "lora")
    assert "--enable-lora" in stack.command("vllm").arguments
    assert stack.command("vllm").variables["VLLM_ENABLE_SHARED_WEIGHTS"] == "0"
    assert "lora_only" in stack.command("trainer").arguments


def test_restart_mode_leaves_vllm_to_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = on_gpus(
        monkeypatch,
        (0, 1, 2),
        "--bridge",
        "restart",
        "--restart-interval",
        "5",
        "--vllm-args=--max-num-seqs 4",
    )
    assert stack.options.parts == ("service", "environment", "trainer")
    command = stack.command("trainer")
    config = parse_config(
        command.arguments[command.arguments.index("example_trainer/grpo.py") + 1 :]
    )
    assert (config.weight_bridge_mode, config.vllm_restart_interval, config.vllm_gpus) == (
        "none",
        5,
        "0,1",
    )
    assert (
        config.vllm_args
        == "--host 127.0.0.1 --tensor-parallel-size 2 --dtype bfloat16 --max-num-seqs 4"
    )
    assert 9001 in stack.ports()
    assert (stack.port("trainer"), stack.port("vllm")) == (9001, 0)
    assert command.variables["VLLM_ENABLE_SHARED_WEIGHTS"] == "0"


def test_resume_takes_the_options_of_the_last_start(tmp_path: Path) -> None:
    run = ["--run", str(tmp_path)]
    first = parse([*run, "--cpu", "--steps", "7", "--vllm-args=--max-num-seqs 4"])
    save(first)
    again = parse([*run, "--resume"])
    assert again == replace(first, resume=True)
    assert parse([*run, "--resume", "vllm"]).parts == ("vllm",)
    assert "--resume auto" in " ".join(Stack(again).command("trainer").arguments)
    assert "--resume" not in Stack(first).command("trainer").arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "nothing that could go on was started in"),
        (["--resume", "--steps", "3"], "leave --steps out"),
    ],
)
def test_resume_says_what_is_in_its_way(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(LauncherError, match=message):
        parse(["--run", str(tmp_path), *arguments])


def test_resume_knows_the_parts_that_there_were(tmp_path: Path) -> None:
    save(parse(["service", "trainer", "--cpu", "--run", str(tmp_path)]))
    with pytest.raises(
        LauncherError, match="'vllm' was no part of the last start, which had service, trainer"
    ):
        parse(["vllm", "--resume", "--run", str(tmp_path)])
