"""The commands of the user's guide, and a shell into which they are typed.

A test types them on the CPU with the starter model, and bench/guide_commands.py types them on GPUs.
Both replace nothing but the model's name, lists of devices, numbers of steps and, where a machine
needs it, ports.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.gpu.processes import ROOT, BenchError, tail
from example_trainer.child_processes.guard import descendants, send
from example_trainer.child_processes.processes import ManagedProcess

SERVICE, VLLM, RENDEZVOUS = 8000, 9001, 29500
"""The ports of the guide."""
PKILL = re.compile("vllm|grpo|python|run-api")
"""Command lines that `pkill -9 -u $USER -f "vllm|grpo|python|run-api"` matches."""
END_SECONDS = 60.0
"""After SIGKILL of what PKILL matches, the rest must have ended by itself after so many seconds."""

ENVIRONMENT = r"python (environments/\w+_server|bench/gpu/length_env)\.py( serve)?"
TRAINER = r"python (-u )?example_trainer/grpo\.py"
"""Forms in which a command starts these programs."""

_VLLM_14B = """CUDA_VISIBLE_DEVICES=0,1 python -u example_trainer/vllm_api_server.py \\
    --model Qwen/Qwen2.5-14B-Instruct --tensor-parallel-size 2 --port 9001"""
_BROADCAST = "--weight-bridge-mode shared_vllm --use-shared-memory"
_LORA = "python example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode lora_only"

COMMANDS = {
    "kill": 'pkill -9 -u $USER -f "vllm|grpo|python|run-api" 2>/dev/null; sleep 3',
    "stop all": 'pkill -9 -u $USER -f "vllm|grpo|python|run-api"',
    "folder": "cd ~/atropos_stuff/atropos",
    "old files": "rm -f vllm_bridge_config.json vllm.log trainer.log api.log gsm8k.log",
    "variables": "export VLLM_ENABLE_SHARED_WEIGHTS=1 NUM_INFERENCE_NODES=0 MASTER_ADDR=localhost MASTER_PORT=29500",
    "service": "python -m atroposlib.cli.run_api > api.log 2>&1 &",
    "environment": "python environments/gsm8k_server.py > gsm8k.log 2>&1 &",
    "vllm": f"{_VLLM_14B} --dtype bfloat16 > vllm.log 2>&1 &",
    "shared memory": 'grep -E "thread|updater|Exported|Shared memory" vllm.log',
    "trainer": """CUDA_VISIBLE_DEVICES=2 python -u example_trainer/grpo.py --model-name Qwen/Qwen2.5-14B-Instruct \\
    --weight-bridge-mode shared_vllm --vllm-port 9001 --lr 1e-6 --batch-size 4 --training-steps 100 --use-shared-memory \\
    2>&1 | tee trainer.log""",
    "single copy vllm": f"{_VLLM_14B} > vllm.log 2>&1 &",
    "single copy trainer": """CUDA_VISIBLE_DEVICES=0,1 python -u example_trainer/grpo.py \\
    --model-name Qwen/Qwen2.5-14B-Instruct --weight-bridge-mode shared_vllm --single-copy --training-steps 100 \\
    2>&1 | tee trainer.log""",
    "legacy trainer": """python example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct --weight-bridge-mode none \\
    --training-steps 100 --vllm-restart-interval 10 --batch-size 2 --lr 1e-5""",
    "lora trainer": f"{_LORA} --lora-r 16 --lora-alpha 32 --training-steps 100 --batch-size 2 --lr 1e-4",
    "threads": 'grep -E "thread|updater|ERROR" vllm.log',
    "exported": 'grep "Exported" vllm.log',
    "gpu memory": "nvidia-smi",
    "processes": 'ps aux | grep -E "(run_api|vllm|grpo|gsm8k)" | grep $USER',
    "api log": "tail -20 api.log",
    "environment log": "tail -20 gsm8k.log",
    "vllm log": "tail -20 vllm.log",
    "trainer log": "tail -20 trainer.log",
    "small vllm": """CUDA_VISIBLE_DEVICES=0 python -u example_trainer/vllm_api_server.py \\
    --model Qwen/Qwen2.5-3B-Instruct --port 9001 > vllm.log 2>&1 &""",
    "small trainer": f"""CUDA_VISIBLE_DEVICES=1 python -u example_trainer/grpo.py --model-name Qwen/Qwen2.5-3B-Instruct \\
    {_BROADCAST} --training-steps 10 2>&1 | tee trainer.log""",
    "quick test": f"{_LORA} --training-steps 5 --batch-size 1",
    "production": f"""CUDA_VISIBLE_DEVICES=2 python -u example_trainer/grpo.py --model-name Qwen/Qwen2.5-14B-Instruct \\
    {_BROADCAST} --training-steps 1000 --batch-size 4 --lr 1e-6""",
    "multi-gpu vllm": """CUDA_VISIBLE_DEVICES=0,1,2,3 python -u example_trainer/vllm_api_server.py \\
    --model Qwen/Qwen2.5-72B-Instruct --tensor-parallel-size 4 --port 9001 > vllm.log 2>&1 &""",
    "multi-gpu trainer": f"""CUDA_VISIBLE_DEVICES=4,5 python -u example_trainer/grpo.py \\
    --model-name Qwen/Qwen2.5-72B-Instruct {_BROADCAST} --training-steps 100 2>&1 | tee trainer.log""",
}
"""Name -> the command as the guide has it; line breaks and the order of flags do not count."""


def words_of(command: str) -> list[str]:
    """The words of a command, sorted, without line breaks: two commands with the same words do the
    same here.
    """
    return sorted(command.replace("\\\n", " ").split())


class TypedShell:
    """One bash that stays open, so that `export`, `cd` and `&` mean what they mean to a person.

    Attributes:
        folder: its working directory; `~/atropos_stuff/atropos` leads to it, and it leads to the
            code.
        process: the shell, under a guard that ends everything below it.
        ports: port of the guide -> the port that is used.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str | None],
        ports: Mapping[int, int],
        python: str = sys.executable,
    ) -> None:
        """
        Args:
            folder: an empty one.
            environment: variables on top of this process's own.
            python: `python` in the commands.
        """
        self.folder, self.ports = folder, dict(ports)
        for name in ("atroposlib", "environments", "example_trainer", "vllm_patching", "bench"):
            (folder / name).symlink_to(ROOT / name)
        programs = folder / "programs"
        programs.mkdir()
        # The interpreter may have the name python3 alone. A link to it would lose its virtual
        # environment.
        (programs / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n')
        (programs / "python").chmod(0o755)
        home = folder / "home"
        (home / "atropos_stuff").mkdir(parents=True)
        (home / "atropos_stuff" / "atropos").symlink_to(folder)
        cache = Path.home() / ".cache"  # what is compiled once and kept stays where it was
        cache.mkdir(exist_ok=True)
        (home / ".cache").symlink_to(cache)
        variables: dict[str, str | None] = {
            "HOME": str(home),
            "PATH": os.pathsep.join([str(programs), str(Path(python).parent), os.environ["PATH"]]),
            "USER": os.environ.get("USER") or "root",
        }
        script = folder / "commands"
        os.mkfifo(script)
        self.process = ManagedProcess(
            "shell",
            ["bash", str(script)],
            folder / "shell.log",
            variables | dict(environment),
            folder,
        )
        self._pipe = script.open("w")  # waits until the shell reads from it
        self._shell = self.process.command_pid()

    def type(self, command: str) -> None:
        """Type a command; the shell runs it when the one before has ended or is in the background."""
        self._pipe.write(self.at_its_ports(command).rstrip("\n") + "\n")
        self._pipe.flush()

    def at_its_ports(self, command: str) -> str:
        """The command with the ports that are used, as flags where the guide types none."""
        documented = "|".join(map(str, self.ports))
        command = re.sub(
            rf"\b({documented})\b", lambda port: str(self.ports[int(port[0])]), command
        )
        service, vllm = self.ports[SERVICE], self.ports[VLLM]
        flags = {ENVIRONMENT: [], TRAINER: []}  # type: dict[str, list[str]]
        if service != SERVICE:
            command = command.replace(
                "atroposlib.cli.run_api", f"atroposlib.cli.run_api --port {service}"
            )
            flags[ENVIRONMENT].append(f"--env.rollout_server_url http://localhost:{service}")
            flags[TRAINER].append(f"--atropos-url http://localhost:{service}")
        if vllm != VLLM:
            flags[ENVIRONMENT].append(f"--openai.base_url http://localhost:{vllm}/v1")
            flags[TRAINER] += [] if "--vllm-port" in command else [f"--vllm-port {vllm}"]
        for program, more in flags.items():
            command = re.sub(program, lambda found, more=more: " ".join([found[0], *more]), command)  # type: ignore[misc]
        return command

    def answer(self, command: str, seconds: float = 60.0) -> str:
        """Type a command that ends; return what it prints.

        Raises:
            BenchError: it did not end in time.
        """
        name = f"answer-{time.monotonic_ns()}"
        self.type(f"{{ {command.strip()} ; }} > {name} 2>&1; echo END >> {name}")
        self.wait_for(name, "END\n", seconds)
        return self.read(name).removesuffix("END\n")

    def read(self, name: str) -> str:
        """A log, as far as it is there."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(
        self,
        name: str,
        text: str,
        seconds: float,
        program: str = "",
        idle: Callable[[], None] = lambda: None,
    ) -> float:
        """Wait until a log has a text; return the seconds it took.

        Args:
            program: a word of the command line that writes the log; once such a process has been
                seen and none is left, the waiting ends.
            idle: called several times a second.

        Raises:
            BenchError: it did not come in time, or the program ended without it.
        """
        began = time.monotonic()
        seen = False
        while text not in self.read(name):
            running = not program or bool(self.pids_of(program))
            if seen and not running and text not in self.read(name):
                raise BenchError(
                    f"{program} ended, and {name} lacks {text!r}; it ends with:\n{tail(self.folder / name)}"
                )
            seen = seen or (bool(program) and running)
            if time.monotonic() - began > seconds:
                raise BenchError(
                    f"{name} lacks {text!r} after {seconds:g} s; it ends with:\n{tail(self.folder / name)}"
                )
            idle()
            time.sleep(0.2)
        return time.monotonic() - began

    def pids(self) -> dict[int, str]:
        """Process id -> command line of everything that was started from the shell and still runs."""
        found = {
            pid: command_line(pid)
            for pid in descendants(self.process.guard.pid)
            if pid != self._shell
        }
        return {pid: line for pid, line in found.items() if line}

    def pids_of(self, program: str) -> list[int]:
        """Processes whose command line has this word."""
        return [pid for pid, line in self.pids().items() if program in line]

    def kill(self, may_stay: str = "$never") -> float:
        """Do what the guide's pkill does, by process id: SIGKILL for what it matches, in any order.

        Args:
            may_stay: pattern of command lines that are not waited for.

        Returns:
            seconds until everything else had ended by itself.

        Raises:
            BenchError: something outlives it by more than END_SECONDS.
        """
        matched = [pid for pid, line in self.pids().items() if PKILL.search(line)]
        for pid in matched:
            send(pid, signal.SIGKILL)
        began = time.monotonic()
        while left := {
            pid: line for pid, line in self.pids().items() if not re.search(may_stay, line)
        }:
            if time.monotonic() - began > END_SECONDS:
                raise BenchError(
                    f"{END_SECONDS:g} s after SIGKILL of {len(matched)} processes these still run: {left}"
                )
            time.sleep(0.02)
        return time.monotonic() - began


def command_line(pid: int) -> str:
    """The words of a process's command line; empty if it has ended."""
    try:
        return (
            Path("/proc", str(pid), "cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except (FileNotFoundError, ProcessLookupError):
        return ""
