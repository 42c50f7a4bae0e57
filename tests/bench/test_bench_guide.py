"""The guide's commands: as bench/gpu/guide.py has them, as they are typed, and the log of a trainer
that restarts vLLM.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu.guide import COMMANDS, PKILL, TypedShell, words_of
from bench.gpu.processes import BenchError
from bench.guide_commands import PARTS, legacy_figures, legacy_table, on_devices
from tests.conftest import ROOT

GUIDE = next(iter((ROOT.parent / "shared" / "seeds").glob("002*.txt")), None)
NOT_A_COMMAND = ("#", "echo ", "sleep ", "tail -f", "pip install")


"""Commands that a person reads, waits for, or types once. Tests wait for the log lines that `tail
-f` would show.
"""


def commands_of_the_guide() -> list[str]:
    """Each command in the guide's shell blocks."""
    if GUIDE is None:
        pytest.skip("no guide in ../shared/seeds")
    found = []
    for block in re.findall(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.strip()
            if command.startswith(
                'echo "CUDA'
            ):  # the command that the guide prints for the reader to type
                command = command.removeprefix('echo "').removesuffix('"')
            if command and not command.startswith(NOT_A_COMMAND) and "..." not in command:
                found.append(command)
    return found


def test_every_command_of_the_guide_is_here() -> None:
    here = [words_of(command) for command in COMMANDS.values()]
    exports = "export VLLM_ENABLE_SHARED_WEIGHTS=1 NUM_INFERENCE_NODES=0 MASTER_ADDR=localhost MASTER_PORT=29500"
    found = commands_of_the_guide()
    assert len(found) > 25
    for command in found:
        if command.startswith("export ") and set(command.split()) <= set(exports.split()):
            continue
        assert words_of(command) in here, command


def test_only_devices_are_replaced() -> None:
    changed = on_devices(COMMANDS["vllm"], "0", 1)
    assert "CUDA_VISIBLE_DEVICES=0 python" in changed
    assert "--tensor-parallel-size 1 --port 9001 --dtype bfloat16" in changed
    assert on_devices(COMMANDS["vllm"], "0,1", 2) == COMMANDS["vllm"]


@pytest.mark.parametrize(
    ("part", "gpus", "devices"),
    [
        ("headline", 2, ("0", "1")),
        ("headline", 3, ("0,1", "2")),
        ("headline", 4, ("0,1", "3")),
        ("single-copy", 4, ("0,1", "0,1")),
        ("multi-gpu", 3, ("0", "1,2")),
        ("multi-gpu", 4, ("0,1", "2,3")),
        ("legacy", 2, ("0", "0")),
    ],
)
def test_gpus_of_vllm_and_of_the_trainer(part: str, gpus: int, devices: tuple[str, str]) -> None:
    assert PARTS[part].devices(gpus) == devices


def test_vllm_can_have_other_gpus_and_the_trainer_all_others() -> None:
    assert PARTS["multi-gpu"].devices(8, 4) == ("0,1,2,3", "4,5,6,7")
    assert PARTS["multi-gpu"].devices(8, 2) == ("0,1", "2,3,4,5,6,7")


@pytest.fixture
def shell(tmp_path: Path, free_port: Callable[[], int]) -> TypedShell:
    return TypedShell(tmp_path, {}, {port: free_port() for port in (8000, 9001, 29500)})


def test_other_ports_are_flags_where_the_guide_types_none(shell: TypedShell) -> None:
    service, vllm = shell.ports[8000], shell.ports[9001]
    try:
        assert shell.at_its_ports(COMMANDS["service"]).startswith(
            f"python -m atroposlib.cli.run_api --port {service} >"
        )
        assert f"--port {vllm}" in shell.at_its_ports(COMMANDS["vllm"])
        legacy = shell.at_its_ports(COMMANDS["legacy trainer"])
        assert (
            f"grpo.py --atropos-url http://localhost:{service} --vllm-port {vllm} --model-name"
            in legacy
        )
        assert shell.at_its_ports(COMMANDS["trainer"]).count("--vllm-port") == 1
        environment = shell.at_its_ports(COMMANDS["environment"])
        assert (
            f"gsm8k_server.py --env.rollout_server_url http://localhost:{service} --openai.base_url"
            in environment
        )
        assert "length_env.py serve --env.rollout_server_url" in shell.at_its_ports(
            "python bench/gpu/length_env.py serve"
        )
    finally:
        shell.process.stop()


def test_the_shell_runs_what_is_typed_and_kills_what_the_pattern_matches(
    shell: TypedShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        shell.type("cd ~/atropos_stuff/atropos; export WORD=there")
        assert (
            shell.answer('ls -d example_trainer/grpo.py; echo "$WORD"')
            == "example_trainer/grpo.py\nthere\n"
        )
        shell.type(
            "python -c 'import time; print(\"up\", flush=True); time.sleep(600)' 2>&1 | tee one.log > /dev/null &"
        )
        shell.wait_for("one.log", "up", 120, "time.sleep(600)")
        assert {bool(PKILL.search(line)) for line in shell.pids().values()} == {True, False}, (
            "tee is not matched"
        )
        shell.kill()
        assert shell.pids() == {}
        shell.type("sleep 600 &")
        while not shell.pids_of(
            "sleep 600"
        ):  # the shell starts it some time later; the test's time limit ends the loop
            time.sleep(0.05)
        monkeypatch.setattr("bench.gpu.guide.END_SECONDS", 1.0)
        with pytest.raises(
            BenchError, match=r"after SIGKILL of 0 processes these still run: .*sleep 600"
        ):
            shell.kill()
        end, looks = tmp_path / "end", list[bool]()

        def end_when_seen() -> None:
            # Between two looks that see the process, wait_for has seen it too. One look may see two
            # processes, for a child has its parent's command line until it starts its program.
            looks.append(bool(shell.pids_of("until")))
            if looks.count(True) > 1:
                end.touch()

        shell.type(f"sh -c 'until [ -e {end} ]; do sleep 0.05; done' > two.log &")
        with pytest.raises(BenchError, match=r"until ended, and two\.log lacks 'never'"):
            shell.wait_for("two.log", "never", 120, "until", end_when_seen)
    finally:
        shell.process.stop()


LOG = """\
12:00:00 [Bridge] vLLM will run on GPU 0, beside the trainer; it gets --gpu-memory-utilization 0.29
12:00:40 [Bridge] vLLM serves weight version 0 after 40.1 s
23:59:50 Saved the weights of out/step_2 for vLLM
00:00:10 [Bridge] vLLM serves weight version 2 after 18.5 s
00:00:25 Saved checkpoint out/step_2
00:00:30 Saved checkpoint out/step_3
"""


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    for step in (2, 10):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "model.safetensors").write_bytes(b"0" * 2_000_000)
    (tmp_path / "step_10" / "trainer_state").mkdir()
    (tmp_path / "step_10" / "trainer_state" / "optimizer.safetensors").write_bytes(
        b"0" * 12_000_000
    )
    rows = [{"step": 1}, {"step": 2, "sync/stop": 1.234, "sync/start": 17.25}]
    found = legacy_figures(LOG, rows, tmp_path)
    assert found["server"].endswith("--gpu-memory-utilization 0.29")
    assert found["starts"] == [{"version": 0, "seconds": 40.1}, {"version": 2, "seconds": 18.5}]
    assert found["seconds_of_restarts"] == [{"step": 2, "stop": 1.23, "start": 17.25}]
    assert found["seconds_from_weights_to_state"] == {"step_2": 35}
    assert list(found["checkpoints"].items()) == [
        ("step_2", {"weights_gb": 0.002, "state_gb": 0.0}),
        ("step_10", {"weights_gb": 0.002, "state_gb": 0.012}),
    ]
    shown = legacy_table(found)
    assert "18.5" in shown
    assert "step_10" in shown
