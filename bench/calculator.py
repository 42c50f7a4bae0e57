"""Does a model that knows how to ask discover that the calculator pays? With three seeds, and without learning.

    python bench/calculator.py --output DIR                     seeds 0, 1 and 2, and seed 0 with learning rate 0
    python bench/calculator.py --output DIR --runs 0 "0 flat"   some of them; the others in the file stay as they are
    python bench/calculator.py --output DIR --environment arithmetic --runs 0 1 2       the default quick start likewise

Each run is `scripts/quickstart.sh --environment calculator --cpu`, without the set-up. Its figures go into
bench/results/ENVIRONMENT.json (or --into FILE) as soon as it is over, with what else the machine had to do: the load before and
after it, and the processor time of all of the run's processes, which is about the same on a machine that is busy.
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
import resource
import subprocess
import time
from typing import Any

from bench.gpu.machine import describe
from bench.measured import measured, put_into

MODELS = {"calculator": ROOT / "assets" / "calculator_model", "arithmetic": ROOT / "assets" / "starter_model"}
RUNS = ("0", "1", "2", "0 flat")
"""A seed, and `flat` for a learning rate of 0."""
KEPT = (
    "steps", "lr", "seed", "bridge", "eval_problems", "eval_before", "eval_after", "tool_use_before", "tool_use_after",
    "response_length_before", "response_length_after", "tokens_trained", "weight_updates", "params_mapped", "params_total",
    "seconds_train", "seconds_by_phase",
)  # fmt: skip
"""Of a run's summary.json."""
EVERY = 5
"""Steps between two points of the curves that are kept."""


def command(run: str, environment: str, steps: int, output: Path, model: Path) -> list[str]:
    """What is run for one of `RUNS`."""
    seed, _, how = run.partition(" ")
    words = [sys.executable, "-m", "scripts.quickstart", "--cpu", "--environment", environment, "--seed", seed]
    words += ["--steps", str(steps), "--output", str(output), "--model", str(model)]
    return [*words, "--lr", "0"] if how == "flat" else words


def curves(lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Share of right answers, and of those that used a tool, among the sampled ones, each a mean over `EVERY` lines.

    Args:
        lines: of its metrics.jsonl; those without `train/percent_correct` do not count.
    """
    known = [line for line in lines if "train/percent_correct" in line]
    parts = [known[begin : begin + EVERY] for begin in range(0, len(known), EVERY)]
    names = {"solved": "train/percent_correct", "tool_use": "train/tool_use"}
    return {
        short: [round(sum(line[name] for line in part) / len(part), 4) for part in parts]
        for short, name in names.items()
        if known and name in known[0]
    }


def processor_seconds() -> float:
    """Of all processes below this one that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(run: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run's figures.

    Raises:
        RuntimeError: it failed, or took longer than --seconds; the message ends with what it said.
    """
    output = args.output / f"{args.environment}-{run.replace(' ', '-')}"
    output.parent.mkdir(parents=True, exist_ok=True)
    before, began, used = os.getloadavg(), time.monotonic(), processor_seconds()
    words = command(run, args.environment, args.steps, output, args.model)
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        try:
            said = child.communicate(timeout=args.seconds)[0]
        except subprocess.TimeoutExpired:
            child.terminate()  # it stops all of its processes
            said = child.communicate()[0] + f"\nstopped after {args.seconds:g} seconds"
    if child.returncode:
        raise RuntimeError(f"run {run!r} ended with status {child.returncode}: {said[-1500:]}")
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    lines = (output / "environment" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        **{name: summary[name] for name in KEPT},
        "curves": curves([json.loads(line) for line in lines]),
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(processor_seconds() - used, 1),
        "load_before": [round(value, 1) for value in before],
        "load_after": [round(value, 1) for value in os.getloadavg()],
        "model_sha256": hashlib.sha256((args.model / "model.safetensors").read_bytes()).hexdigest(),
        "machine": describe(),
        "measured": measured(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for what the runs leave")
    parser.add_argument("--into", type=Path, default=None, help="results file (default: bench/results/ENVIRONMENT.json)")
    parser.add_argument("--environment", choices=tuple(MODELS), default="calculator")
    parser.add_argument("--model", type=Path, default=None, help="folder of a checkpoint (default: the environment's)")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1800.0, help="longest time of a run")
    args = parser.parse_args(arguments)
    args.output, args.model = args.output.absolute(), (args.model or MODELS[args.environment]).absolute()
    into = args.into or ROOT / "bench" / "results" / f"{args.environment}.json"
    failures = 0
    for run in args.runs:
        try:
            found = measure(run, args)
        except RuntimeError as error:
            print(f"{run}: {error}", flush=True)
            failures += 1
            continue
        put_into(into, f"seed {run}", found)
        print(
            f"seed {run}: solved {found['eval_before']:.1%} -> {found['eval_after']:.1%}, used the tool "
            f"{found['tool_use_before']} -> {found['tool_use_after']}, {found['seconds']:.0f} s, "
            f"{found['processor_seconds']:.0f} s of processor time",
            flush=True,
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
