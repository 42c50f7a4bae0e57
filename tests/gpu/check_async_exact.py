"""A run on Ray that is killed whole and started again equals an undisturbed run, bit for bit, on a
GPU.

    # one GPU: one copy of the weights, trainer and vLLM in turns
    python tests/gpu/check_async_exact.py --output DIR
    # two GPUs: the weights are broadcast
    python tests/gpu/check_async_exact.py --output DIR --copies 2
    # without a GPU, vLLM one answer at a time
    python tests/gpu/check_async_exact.py --output DIR --device cpu

This is the section "Resumed exactly" of docs/async.md: `orchestration.exact_resume`, on GPUs in
deterministic mode, with the driver's own command. One run is left alone. Every process of the other
gets SIGKILL, the driver first. That is once the trainer has taken some steps and the rollout
service holds a part of the next batch. Then the same command is given again. Each step's checksum,
reward and tokens must be equal, and the last weights. Prints a table and writes async_exact.json;
ends with status 1 if they differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import argparse
import hashlib
import os
import re
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import httpx
import psutil
import yaml

from bench.gpu.processes import BenchError, Child, tail
from bench.gpu.runs import Sitting, common_options, run_and_report
from bench.gpu.shapes import STARTER
from bench.gpu.summary import table
from bench.gpu.training_stack import read_rows, wait_for_end
from bench.measured import Options, command_line
from example_trainer.child_processes.guard import descendants
from example_trainer.child_processes.run_keys import read_keys

GROUP, CAP, MODEL_LENGTH, CACHE_BYTES = 4, 24, 256, 2 << 30
BATCH = 4
"""Groups of an optimizer step."""
END_SECONDS = 60.0
"""For what was killed to be gone."""


def configuration(device: str, copies: int, eager: bool, folder: Path, output: Path) -> Path:
    """Write what a run is started with. Returns the file."""
    on_gpu = device == "cuda"
    cpus = {
        "service_cpus": 0.1,
        "generator_cpus": 0.5,
        "environment_cpus": 0.1,
        "trainer_cpus": 0.5,
    }
    length = {
        "group_size": GROUP,
        "max_response_tokens": CAP,
        "max_model_length": MODEL_LENGTH,
        "seed": 42,
    }
    # An exact size, so that other programs may use the GPU at the same time.
    memory = ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(CACHE_BYTES)]
    memory = (
        [*memory, *(["--enforce-eager"] if eager else [])]
        if on_gpu
        else ["--num-gpu-blocks-override", "256"]
    )
    training = {
        "model_name": str(STARTER),
        "batch_size": GROUP * BATCH,
        "seq_len": MODEL_LENGTH,
        "lr": 1e-3,
    }
    training |= {
        "gradient_accumulation_steps": 1,
        "checkpoint_interval": 1,
        "keep_checkpoints": 2,
        **({"deterministic": True} if on_gpu else {}),
    }
    sections = {
        "orchestration": {"device": "gpu" if on_gpu else "cpu", "exact_resume": True, **cpus},
        "inference": {"environment": "arithmetic", "server_args": memory, **length},
        "training": training | ({"colocate": True} if copies == 1 else {}),
        "logging": {"folder": str(folder), "timeline": False},
    }
    file = output / f"{folder.name}.yaml"
    file.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return file


class Run:
    """A driver and what it has started."""

    def __init__(self, name: str, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        self.name, self.args, self.stack, self.folder = name, args, stack, work / name
        self.config = configuration(args.device, args.copies, args.eager, self.folder, args.output)
        self.starts = 0

    def start(self) -> None:
        """The driver's own command, the same each time."""
        self.starts += 1
        command = [
            sys.executable,
            "-u",
            "-m",
            "example_trainer.async_grpo",
            "--config",
            str(self.config),
        ]
        log = self.args.output / f"{self.name}-driver-{self.starts}.log"
        self.driver = Child("driver", [*command, "--steps", str(self.args.steps)], log, {})
        self.stack.callback(self.driver.stop)

    def taken(self) -> list[dict[str, Any]]:
        """The trainer's rows."""
        return read_rows(self.folder / "trainer" / "metrics.jsonl")

    def in_the_middle(self) -> bool:
        """Report if enough steps have been taken and a part of the next batch, but not all, is at
        the service.
        """
        found = re.findall(
            r"\[Async\] service on (\S+) port (\d+)",
            self.driver.log_path.read_text(errors="replace"),
        )
        if not found:
            return False
        headers = {"Authorization": f"Bearer {read_keys(self.folder)['ROLLOUT_API_KEY']}"}
        try:
            stats = httpx.get(
                "http://{}:{}/stats".format(*found[-1]),
                headers=headers,
                timeout=30,
                trust_env=False,
            ).json()
        except httpx.HTTPError:
            return False
        part = 0 < stats["queue"]["groups"] < BATCH and not stats["leases"]
        return bool(part and stats["trainer_version"] >= self.args.kill_after)

    def kill(self) -> int:
        """SIGKILL for every process of the run, the driver first. Returns the last step that it had
        taken.

        Raises:
            BenchError: something of it lives on.
        """
        family = [
            *descendants(self.driver.guard_pid),
            *self._writers(),
        ]
        deadline = time.monotonic() + END_SECONDS
        while family:
            for pid in dict.fromkeys(family):
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
            time.sleep(0.05)
            family = self._writers()
            if time.monotonic() > deadline:
                raise BenchError(
                    f"processes {family} of {self.name} live on after SIGKILL for {END_SECONDS:g} s"
                )
        self.driver.wait_for_guard(END_SECONDS)
        return int(max((row["step"] for row in self.taken()), default=0))

    def _writers(self) -> list[int]:
        """Living processes that write to the logs of the run's roles: none of them need be the
        driver's descendant.
        """
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if Path(os.readlink(f"/proc/{process.pid}/fd/1")).is_relative_to(
                    self.folder / "logs"
                ):
                    found.append(process.pid)
        return found

    def finish(self) -> dict[str, Any]:
        """Wait for the end of the training. Returns what each step came to, and the digest of the
        last weights.

        Raises:
            BenchError: it failed, took too long, or lacks a step.
        """
        try:
            wait_for_end(self.driver, self.args.seconds)
        except BenchError as error:
            logs = "\n".join(
                f"== {log.name}\n{tail(log)}"
                for log in sorted((self.folder / "logs").glob("*.log"))
            )
            raise BenchError(f"{error}\n{logs}") from error
        rows = {row["step"]: row for row in self.taken()}
        if list(rows) != list(range(1, self.args.steps + 1)):
            raise BenchError(f"{self.name} has steps {list(rows)} of {self.args.steps}")
        last = self.folder / "checkpoints" / f"step_{self.args.steps}" / "model.safetensors"
        facts = ("checksum", "reward_mean", "tokens", "compared_tokens", "mismatched_tokens")
        return {
            "steps": [[row.get(fact) for fact in facts] for row in rows.values()],
            "weights": hashlib.sha256(last.read_bytes()).hexdigest(),
        }


class Benchmark(Sitting):
    """A run that is left alone, and one that is killed."""

    def run(self) -> None:
        """One after the other: both want the whole GPU."""
        shown = ("device", "copies", "steps", "kill_after")
        self.describe(settings={name: getattr(self.args, name) for name in shown})
        whole = self.results.measure("runs", "whole", run=self._whole)
        if whole is not None:
            self.results.measure("runs", "killed", run=partial(self._killed, whole))

    def _whole(self) -> dict[str, Any]:
        run = Run("whole", self.args, self.work, self.stack)
        run.start()
        found = run.finish()
        if len({checksum for checksum, *_ in found["steps"]}) != self.args.steps:
            raise BenchError("a step changed nothing, so that equal weights would prove nothing")
        return found

    def _killed(self, whole: dict[str, Any]) -> dict[str, Any]:
        run = Run("killed", self.args, self.work, self.stack)
        run.start()
        wait_for_end(run.driver, self.args.seconds, run.in_the_middle)
        taken = run.kill()
        if not 0 < taken < self.args.steps:
            raise BenchError(
                f"it was killed after step {taken} of {self.args.steps}, which is not in the middle"
            )
        run.start()
        found = run.finish() | {"killed_after_step": taken}
        for key in ("steps", "weights"):
            if found[key] != whole[key]:
                raise BenchError(
                    f"{key} of the run that was killed are {found[key]}, of the one that was not {whole[key]}"
                )
        return found


def report(data: dict[str, Any]) -> str:
    """The table of a results file."""
    rows: list[list[object]] = []
    for name, found in data.get("runs", {}).items():
        if "weights" not in found:
            rows.append([name, *[""] * 4, str(found.get("failed", ""))[:200]])
            continue
        steps = found["steps"]
        compared, differ = (sum(step[place] or 0 for step in steps) for place in (3, 4))
        rows.append(
            [
                name,
                len(steps),
                found.get("killed_after_step", ""),
                compared,
                differ,
                found["weights"][:16],
            ]
        )
    return table(
        ["run", "steps", "killed after", "tokens compared", "of them differ", "last weights"], rows
    )


OPTIONS: Options = {
    "--copies": {
        "type": int,
        "choices": (1, 2),
        "default": 1,
        "help": "of the weights: one, shared in turns, or two",
    },
    "--steps": {"type": int, "default": 8},
    "--kill-after": {
        "type": int,
        "default": 3,
        "metavar": "STEP",
        "help": "kill all when so many have been taken",
    },
    "--eager": {
        "action": "store_true",
        "help": "vLLM without compilation and CUDA graphs (starts faster)",
    },
    "--seconds": {"type": float, "default": 280.0, "help": "time limit of each start of a run"},
}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__, common_options("async_exact") | OPTIONS)
    args = parser.parse_args(arguments)
    if not 0 < args.kill_after < args.steps:
        parser.error(
            f"--kill-after {args.kill_after} must be at least 1 and less than --steps {args.steps}"
        )
    return run_and_report(args, Benchmark, report)


if __name__ == "__main__":
    sys.exit(main())
