"""Run quick starts and keep the figures of each run.

    python studies/quick_starts.py --output DIR  # ten runs of the default quick start
    # some runs; the other rows of the file stay
    python studies/quick_starts.py --output DIR --runs 3 "0 flat"
    # seeds 0, 1 and 2, and seed 0 with learning rate 0
    python studies/quick_starts.py --output DIR --environment calculator

Each run is `scripts/quickstart.sh --cpu` without the set-up. As soon as it has ended, its figures
go into bench/results/quick_starts.json (calculator.json for the calculator), or into --into FILE. A
row has the machine's load during the run, because timing decides which rollouts make up a batch. It
also has the processor time of all processes of the run, which depends little on the load.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import hashlib
import json
import os
import re
import resource
import subprocess
import time
from typing import Any

from bench.gpu.machine import describe
from bench.measured import Options, command_line, measured, put_into
from example_trainer.launcher.starter_models import MODELS, STEPS

FILES = {"arithmetic": "quick_starts", "calculator": "calculator"}
"""Results file of each environment."""
RUNS = {"arithmetic": tuple(map(str, range(10))), "calculator": ("0", "1", "2", "0 flat")}
"""Runs of each environment unless --runs is given; see `run_name`."""
KEPT = (
    "steps", "lr", "seed", "bridge", "eval_problems", "eval_before", "eval_after", "tool_use_before", "tool_use_after",
    "response_length_before", "response_length_after", "tokens_trained", "weight_updates", "params_mapped", "params_total",
    "seconds_train", "seconds_by_phase",
)  # fmt: skip
"""Keys of summary.json that a row keeps."""
EVERY = 5
"""Steps between two points of the curves that are kept."""
LATE = 20
"""Steps at the end of a run whose batches `late_batches` summarises."""
LOAD_INTERVAL = 5.0
"""Seconds between two readings of the machine's load."""


def run_name(text: str) -> str:
    """Check the name of a run: a seed, `SEED flat` for learning rate 0, or `SEED #2` for another
    run of that seed.
    """
    if not re.fullmatch(r"\d+( flat)?( #\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} names no run: give a seed such as 3, '3 flat' or '3 #2'"
        )
    return text


def command(run: str, environment: str, steps: int, output: Path, model: Path) -> list[str]:
    """Return the command of one run."""
    seed, *how = run.split()
    words = [
        sys.executable,
        "-m",
        "example_trainer.launcher.quickstart",
        "--cpu",
        "--environment",
        environment,
        "--seed",
        seed,
    ]
    words += ["--steps", str(steps), "--output", str(output), "--model", str(model)]
    if "flat" in how:
        words += ["--lr", "0"]
    return words


def curves(lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the shares of right answers and of answers that used a tool, each a mean over `EVERY`
    lines.

    Args:
        lines: rows of the environment's metrics.jsonl; those without `train/percent_correct` do not
            count.
    """
    known = [line for line in lines if "train/percent_correct" in line]
    parts = [known[begin : begin + EVERY] for begin in range(0, len(known), EVERY)]
    names = {"solved": "train/percent_correct", "tool_use": "train/tool_use"}
    return {
        short: [round(sum(line[name] for line in part) / len(part), 4) for part in parts]
        for short, name in names.items()
        if known and name in known[0]
    }


def late_batches(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean and the lowest share of right answers in a batch, over the last `LATE` steps.

    Args:
        lines: rows of the trainer's metrics.jsonl, in which a right answer has reward 1 and a wrong
            one -1.
    """
    solved = [(1 + line["reward_mean"]) / 2 for line in lines[-LATE:]]
    return {"mean": round(sum(solved) / len(solved), 4), "lowest": round(min(solved), 4)}


def processor_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def wait_and_read_load(child: subprocess.Popen[str], seconds: float) -> list[float]:
    """Wait for a process and read the machine's load of the last minute.

    Raises:
        TimeoutError: the process still runs after `seconds`.
    """
    deadline, loads = time.monotonic() + seconds, [os.getloadavg()[0]]
    while True:
        try:
            child.wait(timeout=LOAD_INTERVAL)
            return loads
        except subprocess.TimeoutExpired:
            loads.append(os.getloadavg()[0])
        if time.monotonic() > deadline:
            raise TimeoutError(f"it was stopped after {seconds:g} seconds")


def run_and_read_load(words: list[str], log: Path, seconds: float) -> list[float]:
    """Run a command with its output in `log`; return the readings of the machine's load.

    Raises:
        RuntimeError: the command failed or took longer than `seconds`; the message ends with the
            end of its output.
    """
    problem = ""
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, text=True)
        try:
            loads = wait_and_read_load(child, seconds)
            problem = f"it ended with status {child.returncode}" if child.returncode else ""
        except TimeoutError as error:
            problem = str(error)
        finally:
            child.terminate()  # the quick start then stops all of its processes
            child.wait()
    if problem:
        raise RuntimeError(f"{problem}: {log.read_text(encoding='utf-8')[-1500:]}")
    return loads


def measure(run: str, args: argparse.Namespace) -> dict[str, Any]:
    """Do one run and return its row.

    Raises:
        RuntimeError: see `run_and_read_load`.
    """
    output = args.output / f"{args.environment}-{run.replace(' ', '-').replace('#', '')}"
    output.parent.mkdir(parents=True, exist_ok=True)
    before, began, used = os.getloadavg(), time.monotonic(), processor_seconds()
    words = command(run, args.environment, args.steps, output, args.model)
    loads = run_and_read_load(words, output.with_suffix(".log"), args.seconds)
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    environment, trainer = (
        [
            json.loads(line)
            for line in (output / part / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for part in ("environment", "trainer")
    )
    late = {} if args.environment == "calculator" else {"late_batches": late_batches(trainer)}
    return {
        **{name: summary[name] for name in KEPT},
        "curves": curves(environment),
        **late,
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(processor_seconds() - used, 1),
        "load_before": [round(value, 1) for value in before],
        "load": {
            "lowest": min(loads),
            "mean": round(sum(loads) / len(loads), 2),
            "highest": max(loads),
        },
        "model_sha256": hashlib.sha256((args.model / "model.safetensors").read_bytes()).hexdigest(),
        "machine": describe(),
        "measured": measured(),
    }


OPTIONS: Options = {
    "--output": {"type": Path, "required": True, "help": "folder for the runs and their logs"},
    "--into": {
        "type": Path,
        "default": None,
        "help": "results file (default: the environment's in bench/results)",
    },
    "--environment": {"choices": tuple(FILES), "default": "arithmetic"},
    "--model": {
        "type": Path,
        "default": None,
        "help": "folder of a checkpoint (default: the environment's)",
    },
    "--steps": {
        "type": int,
        "default": None,
        "help": "optimizer steps (default: the environment's)",
    },
    "--seconds": {"type": float, "default": 1800.0, "help": "longest time of a run"},
    "--runs": {
        "nargs": "+",
        "type": run_name,
        "help": "seeds; '0 flat': learning rate 0; '0 #2': again",
    },
}


def main(arguments: list[str] | None = None) -> int:
    args = command_line(__doc__, OPTIONS).parse_args(arguments)
    args.output = args.output.absolute()
    args.model = (args.model or MODELS[args.environment]).absolute()
    args.steps = args.steps or STEPS[args.environment]
    into = args.into or ROOT / "bench" / "results" / f"{FILES[args.environment]}.json"
    failures = 0
    for run in args.runs or RUNS[args.environment]:
        try:
            row = measure(run, args)
        except RuntimeError as error:
            print(f"{run}: {error}", flush=True)
            failures += 1
            continue
        put_into(into, f"seed {run}", row)
        print(
            f"seed {run}: solved {row['eval_before']:.1%} -> {row['eval_after']:.1%}, {row['seconds']:.0f} s, "
            f"{row['processor_seconds']:.0f} s of processor time, load {row['load']['mean']:.1f}",
            flush=True,
        )
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
