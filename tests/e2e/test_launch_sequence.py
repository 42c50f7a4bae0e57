"""The README's launch sequence, typed as it stands there but for the model's name: what it promises must appear.

The problems come from a local copy of GSM8K with the format reward, because a test has no network and its model of two million
parameters solves none of them; those two flags are the only ones added, beside two for short answers in large groups, which are
sampled in few steps. Where one of the documented ports is taken on this machine, another takes its place in all commands, and
comes as a flag where none is typed. The shell's environment has vLLM fork its engine and its ranks.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from example_trainer.child_processes.guard import descendants
from example_trainer.child_processes.ports import PortReservations
from example_trainer.child_processes.processes import ManagedProcess
from tests.conftest import ROOT, Processes
from tests.e2e.conftest import FORKED_ENGINES
from tests.still_running import command_line

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(540)]

GSM8K = ROOT.parent / "shared" / "gsm8k"
STARTER = ROOT / "assets" / "starter_model"
SERVICE, VLLM, RENDEZVOUS = 8000, 9001, 29500
README_MODEL = "Qwen/Qwen2.5-14B-Instruct"


def launch_commands() -> list[str]:
    """The shell blocks of the README's launch sequence, in order."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Launch sequence", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    assert len(blocks) >= 7, "the README's launch sequence has lost its commands"
    return blocks


@pytest.fixture
def shell(processes: Processes, tmp_path: Path) -> Iterator[Shell]:
    with PortReservations() as reserved:  # no other test picks one of them meanwhile
        ports = {port: port if reserved.take(port) else reserved.pick() for port in (SERVICE, VLLM, RENDEZVOUS)}
        for name in ("atroposlib", "environments", "example_trainer", "vllm_patching"):
            (tmp_path / name).symlink_to(ROOT / name)
        yield Shell(processes, tmp_path, ports)


class Shell:
    """One bash that stays open, so that `export` and `&` mean what they mean to a person.

    Attributes:
        folder: its working directory.
        ports: by the port that is documented, the one that is used.
    """

    def __init__(self, processes: Processes, folder: Path, ports: Mapping[int, int]) -> None:
        self.folder, self.ports = folder, ports
        environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        environment |= FORKED_ENGINES
        self._script = folder / "commands"
        os.mkfifo(self._script)
        self.process: ManagedProcess = processes.start("shell", ["bash", self._script], environment, folder)
        self._pipe = self._script.open("w")

    def type(self, command: str) -> None:
        self._pipe.write(self._at_its_ports(command).rstrip("\n") + "\n")
        self._pipe.flush()

    def _at_its_ports(self, command: str) -> str:
        documented = "|".join(map(str, self.ports))
        command = re.sub(rf"\b({documented})\b", lambda port: str(self.ports[int(port[0])]), command)
        if (port := self.ports[SERVICE]) != SERVICE:
            command = command.replace("atroposlib.cli.run_api", f"atroposlib.cli.run_api --port {port}")
            command = command.replace("gsm8k_server.py", f"gsm8k_server.py --env.rollout_server_url http://localhost:{port}")
            command = command.replace("grpo.py", f"grpo.py --atropos-url http://localhost:{port}")
        if (port := self.ports[VLLM]) != VLLM:
            command = command.replace("gsm8k_server.py", f"gsm8k_server.py --openai.base_url http://localhost:{port}/v1")
        return command

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, name: str, text: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.read(name):
            assert time.monotonic() < deadline, f"{name} lacks {text!r}; it ends with:\n{self.read(name)[-3000:]}"
            time.sleep(0.25)


def test_every_command_works_and_prints_what_it_promises(shell: Shell) -> None:
    if not GSM8K.is_dir():
        pytest.skip("no local copy of GSM8K in ../shared/gsm8k")
    extra = f"--env.dataset_path {shlex.quote(str(GSM8K))} --env.format_reward --env.max_token_length 16 --env.group_size 16"
    vllm_port = shell.ports[VLLM]
    for block in launch_commands():
        command = block.replace(README_MODEL, str(STARTER))
        command = command.replace("environments/gsm8k_server.py", f"environments/gsm8k_server.py {extra}")
        if command.startswith("tail -f vllm.log"):
            shell.wait_for("vllm.log", f"Uvicorn running on http://0.0.0.0:{vllm_port}", 240)
        elif command.startswith("tail -f trainer.log"):
            shell.wait_for("trainer.log", "Step 2/100", 240)
        elif command.startswith(("grep", "curl")):
            name = f"answer-{time.monotonic_ns()}"
            shell.type(f"{command.strip()} > {name}; echo done >> {name}")
            shell.wait_for(name, "done", 120)
            assert shell.read(name).removesuffix("done\n").strip(), f"{command!r} found nothing"
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
        answer = httpx.get(f"http://127.0.0.1:{vllm_port}{path}", headers=headers, timeout=30, trust_env=False)
        assert answer.status_code == status, (path, headers, answer.text)
    paused = httpx.post(f"http://127.0.0.1:{vllm_port}/bridge/begin", headers=far, json={}, timeout=30, trust_env=False)
    assert (paused.status_code, "set VLLM_API_KEY" in paused.text) == (403, True)
    assert re.search(r"\[vLLM Patch\] ✓ Exported \d+ params", vllm)
    assert "[vLLM Patch] ✓ Shared memory setup complete!" in vllm
    for rank in (0, 1):
        assert f"[vLLM Patch] ✓ Weight updater thread started (name: WeightUpdater_TP{rank})" in vllm
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

    # A person stops it with Ctrl-C: the trainer keeps what it has learned, and nothing stays behind.
    below = descendants(shell.process.command_pid())
    trainers = [pid for pid in below if "example_trainer/grpo.py" in command_line(pid)]
    assert trainers, "the trainer has ended before it was stopped"
    for pid in trainers:
        os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + 180
    while not list((shell.folder / "trained_model_checkpoints").glob("step_*/model.safetensors")):
        assert time.monotonic() < deadline, shell.read("trainer.log")[-2000:]
        time.sleep(0.25)
    os.kill(shell.process.command_pid(), signal.SIGTERM)
