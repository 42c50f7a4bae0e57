"""The command line behind scripts/start.sh and its like: flags, variables, commands of the parts, and logs."""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.cli import run_api
from atroposlib.utils.processes import identify
from example_trainer import reference_worker
from example_trainer.async_grpo.actor import PYTHON
from example_trainer.command_line import parse_config, parse_section
from example_trainer.launcher import __main__ as command
from example_trainer.launcher import roles
from example_trainer.launcher.command_line import ROOT, LauncherError
from example_trainer.launcher.logs import Follower, show
from example_trainer.launcher.options import choose_gpus, parse, save
from example_trainer.launcher.records import PARTS, Record, Records
from example_trainer.launcher.stack import Stack
from example_trainer.launcher.starter_models import BATCHES, LEARNING_RATES, STARTER_MODEL
from example_trainer.parameter_server.options import ParameterServerOptions


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
        (["trainr"], "'trainr' is not a part of the stack"),
        (["--bridge", "magic"], "--bridge magic: give one of auto"),
        (["--cpu", "--vllm-gpus", "0"], "--cpu excludes --vllm-gpus"),
        (["--vllm-gpus", "7"], "GPU 7 is not there"),
        (["--environment", "nowhere.py"], "--environment nowhere.py"),
        (["--environment", str(ROOT / "README.md")], "README.md: give arithmetic or gsm8k, or the"),
        (["--model", "./nowhere"], "--model ./nowhere"),
        (["--model", "runs/nowhere"], "--model runs/nowhere: no such folder"),
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
        "scripts/start.sh: error: argument --vllm-port: 'high' is not a TCP port (see scripts/start.sh --help)\n"
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


def test_variables_set_options_without_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CPU", "1")
    with pytest.raises(LauncherError, match="--cpu excludes --vllm-gpus"):
        parse(["--vllm-gpus", "0"])
    monkeypatch.setenv("LOCKSTEP_CPU", "yes")
    with pytest.raises(LauncherError, match="LOCKSTEP_CPU=yes: give 1 to switch it on, or 0"):
        parse([])


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("STEPS", "many", "'many' is not a whole number of at least 1"),
        ("VLLM_PORT", "high", "'high' is not a TCP port"),
        ("WAIT", "long", "'long' is not a whole number of at least 1"),
        ("RUN", "/etc/passwd", "/etc/passwd is a file: give the folder of a run"),
    ],
)
def test_a_bad_value_of_a_variable_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(f"LOCKSTEP_{variable}", value)
    with pytest.raises(LauncherError, match=f"^LOCKSTEP_{variable}={value}: {reason}"):
        parse(["--cpu"])


@pytest.mark.parametrize("name", ["start", "stop", "status", "logs"])
def test_a_file_is_not_a_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.COMMANDS[name](["--run", "/etc/passwd"])
    assert ended.value.code == 2
    line = "argument --run: /etc/passwd is a file: give the folder of a run"
    assert line in capsys.readouterr().err


def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_VENV", ".venv")  # of another program
    assert parse(["--cpu"]).vllm_ports == (9001,)
    monkeypatch.setenv("LOCKSTEP_VLLM_PROT", "9901")
    with pytest.raises(LauncherError, match=r"VLLM_PROT .* did you mean LOCKSTEP_VLLM_PORT\?"):
        parse(["--cpu"])


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


def test_further_parts_take_what_the_living_ones_use(tmp_path: Path) -> None:
    """Service and vLLM first, the trainer later, as the guide of environments types it."""
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    run = ["--cpu", "--run", str(tmp_path / "a run")]
    ports = ["--service-port", "18000", "--vllm-port", "19001", "--master-port", "19500"]
    first = parse(["service", *run, *ports, "--model", str(model), "--bridge", "lora"])
    first.run.mkdir()
    save(first)
    me = identify(os.getpid())
    assert me is not None
    Records(first.run).write(Record("service", me, 0.0, "api.log"))
    later = parse(["trainer", *run, "--steps", "5", "--bridge", "broadcast"])
    assert (later.service_port, later.vllm_ports, later.master_port) == (18000, (19001,), 19500)
    assert (later.model, later.bridge, later.steps) == (str(model), "broadcast", 5)
    (first.run / "processes" / "service.json").unlink()
    assert parse(["trainer", *run]).service_port == 8000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--resume"],
            r"nothing that could go on was started in .*: options\.json is not there\. .*stop\.sh\.",
        ),
        (["--resume", "--steps", "3"], "leave --steps out"),
    ],
)
def test_resume_says_what_is_in_its_way(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(LauncherError, match=message):
        parse(["--run", str(tmp_path), *arguments])


def test_options_that_were_spoilt_are_told(tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text("")
    with pytest.raises(LauncherError, match=r"options\.json cannot be read .*without --resume"):
        parse(["--run", str(tmp_path), "--resume"])


def test_resume_knows_the_parts_that_there_were(tmp_path: Path) -> None:
    save(parse(["service", "trainer", "--cpu", "--run", str(tmp_path)]))
    with pytest.raises(
        LauncherError, match="'vllm' was not part of the last start, which had service, trainer"
    ):
        parse(["vllm", "--resume", "--run", str(tmp_path)])


CONFIG = str(ROOT / "example_trainer" / "configs" / "arithmetic_async_cpu.yaml")


class Replaced(Exception):
    """Stands for the end of this process's program."""


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--ray"], ["--config", CONFIG]),
        (["--steps", "3", "--ray"], ["--config", CONFIG, "--steps", "3"]),
        (["--ray", "--config", "a.yaml"], ["--config", "a.yaml"]),
        (["--ray", "--config=a.yaml"], ["--config=a.yaml"]),
    ],
)
def test_a_run_on_ray_gets_every_other_word(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], words: list[str]
) -> None:
    def replace(program: str, arguments: list[str], variables: dict[str, str]) -> None:
        assert program == sys.executable
        assert arguments == [sys.executable, "-m", "example_trainer.async_grpo", *words]
        assert variables["PYTHONPATH"].split(":") == [str(ROOT), "/elsewhere"]
        raise Replaced

    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setattr("os.execve", replace)
    with pytest.raises(Replaced):
        command.start(typed)
    assert Path(CONFIG).is_file()


@pytest.mark.parametrize("words", [[], ["--help"], ["halt"]])
def test_a_word_that_is_no_command_is_refused_with_their_names(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words) == 2
    assert "is not one of start, status, stop, restart, logs" in capsys.readouterr().err


@pytest.mark.parametrize("name", command.COMMANDS)
def test_a_shell_command_without_an_installation_names_the_remedy(
    name: str, tmp_path: Path
) -> None:
    script = [ROOT / "scripts" / f"{name}.sh"]
    done = subprocess.run(
        script,
        env={"PATH": "/usr/bin:/bin", "LOCKSTEP_VENV": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert (
        done.stderr == f"{name}: {tmp_path}/bin/python is not there: run scripts/setup.sh first\n"
    )


@pytest.mark.parametrize("name", ["status", "stop", "logs"])
def test_a_run_of_another_user_is_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    # Root may read every folder, so the folder itself would refuse nothing.
    monkeypatch.setattr(Path, "glob", refuse)
    assert command.main([name, "--run", str(tmp_path)]) == 1
    line = capsys.readouterr().err
    assert line.startswith(f"{name}: {tmp_path}")
    assert line.endswith("call this as the run's own user\n")
    assert line.count("\n") == 1


SERVERS = ["http://localhost:1", "http://localhost:2"]


@given(
    st.text(min_size=1),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.lists(st.text(min_size=1)),
    st.none() | st.just("x y"),
)
def test_a_program_reads_the_values_that_were_written_as_flags(
    text: str, number: int, real: float, bare: bool, several: list[str], optional: str | None
) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--a-text")
    parser.add_argument("--number", type=int)
    parser.add_argument("--real", type=float)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--several", action="append", default=[])
    parser.add_argument("--optional")
    read = parser.parse_args(
        roles.flags(
            a_text=text, number=number, real=real, bare=bare, several=several, optional=optional
        )
    )
    assert (read.a_text, read.number, read.real, read.bare) == (text, number, real, bare)
    assert (read.several, read.optional) == (several, optional)


def test_each_program_takes_its_command(tmp_path: Path) -> None:
    service = roles.service(
        "127.0.0.1", 8000, store=tmp_path / "rollouts.db", vllm_server=SERVERS, max_queue_groups=5
    )
    read = run_api.parse_arguments(service[service.index("atroposlib.cli.run_api") + 1 :])
    assert (read.port, read.vllm_server, read.max_queue_groups) == (8000, SERVERS, 5)
    reference = roles.reference_worker(
        "owner/name", "http://service", name="reference-1", deterministic=True
    )
    config, worker = reference_worker.parse_arguments(
        reference[reference.index("example_trainer.reference_worker") + 1 :]
    )
    assert (config.atropos_url, worker.name, config.deterministic) == (
        "http://service",
        "reference-1",
        True,
    )
    words = roles.parameter_server(
        "owner/name", "http://service", ["a:1", "b:2"], part="2/3", log_dir=tmp_path
    )
    options = parse_section(
        ParameterServerOptions, "parameter_server", words[words.index("-m") + 2 :]
    )
    assert (options.part, list(options.vllm_servers)) == ("2/3", ["a:1", "b:2"])


@pytest.mark.parametrize("bridge", roles.BRIDGE_FLAGS)
def test_the_trainer_takes_the_flags_of_each_bridge(bridge: str) -> None:
    words = roles.trainer(
        "owner/name", bridge, "http://service", {"training_steps": 7, "lr": 1e-5, "vllm_port": 9001}
    )
    config = parse_config(words[words.index("example_trainer/grpo.py") + 1 :])
    assert (config.training_steps, config.lr, config.atropos_url) == (7, 1e-5, "http://service")
    assert config.weight_bridge_mode == roles.BRIDGE_FLAGS[bridge][1]


def test_settings_of_an_environment_are_words_that_it_reads() -> None:
    words = roles.environment(
        "arithmetic",
        "http://service",
        SERVERS,
        settings={"group_size": 8, "seed": None, "exact_resume": True, "x": False},
    )
    assert words[2:4] == ["environments/arithmetic_server.py", "serve"]
    assert words[words.index("--openai.base_url") + 1] == ",".join(SERVERS)
    assert words[-6:] == ["--env.group_size", "8", "--env.exact_resume", "true", "--env.x", "false"]
    assert roles.environment("mine.py", "", [], settings={})[2] == "mine.py"


def test_a_placeholder_can_stand_for_the_interpreter() -> None:
    flags = roles.vllm_flags("0.0.0.0", on_gpu=False)
    assert roles.vllm_server("owner/name", 1, flags)[0] == sys.executable
    assert roles.vllm_server("owner/name", 1, flags, python=PYTHON)[0] == PYTHON
    assert flags == ["--host", "0.0.0.0", "--dtype", "float32", "--enforce-eager"]
    assert roles.vllm_flags("h", on_gpu=True) == ["--host", "h", "--dtype", "bfloat16"]


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1)
)
def test_a_command_as_it_is_typed_is_read_as_it_was(words: list[str]) -> None:
    command = roles.Command("part", tuple(words), {"LOGDIR": "/a folder"}, "part.log")
    assert shlex.split(command.typed()) == ["LOGDIR=/a folder", *words]


def test_a_follower_reads_whole_lines_as_they_come(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("old\n")
    follower = Follower(log)
    assert follower.read() == []
    with log.open("a") as file:
        file.write("one\ntw")
    assert follower.read() == ["one"]
    with log.open("a") as file:
        file.write("o\n")
    assert follower.read() == ["two"]


def test_a_follower_survives_a_new_file_and_an_emptied_one(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    follower = Follower(log)
    assert follower.read() == []
    log.write_text("first\n")
    assert follower.read() == ["first"]
    log.rename(tmp_path / "a.previous.log")
    log.write_text("of the next start, which wrote more\n")
    assert follower.read() == ["of the next start, which wrote more"]
    with log.open("w") as file:
        file.write("short\n")
    assert follower.read() == ["short"]


def test_each_line_stands_behind_its_part(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    for name in ("api.log", "vllm.log", "gsm8k.log", "trainer.log", "trainer/vllm.log"):
        (tmp_path / name).write_text(f"old\nlast of {name}\n")
    said: list[str] = []
    rounds = iter([False, False, True])

    def done() -> bool:
        with (tmp_path / "trainer.log").open("a") as file:
            file.write("new\n")
        return next(rounds)

    show(tmp_path, PARTS, lines=1, follow=True, say=said.append, done=done)
    assert sorted(said[:5]) == [
        "environment | last of gsm8k.log",
        "service     | last of api.log",
        "trainer     | last of trainer.log",
        "vllm        | last of trainer/vllm.log",
        "vllm        | last of vllm.log",
    ]
    assert said[5:] == ["trainer     | new"] * 2
    said.clear()
    show(tmp_path, ["service"], lines=2, follow=False, say=said.append)
    assert said == ["service     | old", "service     | last of api.log"]


def test_options_of_a_start_that_are_not_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text("[1]")
    with pytest.raises(LauncherError, match=r"options\.json is of another version"):
        parse(["--run", str(tmp_path), "--resume"])
