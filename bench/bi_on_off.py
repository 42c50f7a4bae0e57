"""Does it matter for learning that sampler and trainer agree bit for bit? simple_rl.py with the mode on and off, several seeds.

    python bench/bi_on_off.py --output DIR                                  1 GPU; 3 seeds, 100 steps, sums of 3 digits
    python bench/bi_on_off.py --output DIR --jobs 6                         all at the same time, on one GPU
    python bench/bi_on_off.py --output DIR --steps 300 --seeds 0 1 2 3 4 -- --lr 3e-4
    python bench/bi_on_off.py --output DIR --modes off --steps 2 --device cpu -- --groups 2 --group-size 4 --max-tokens 16

What follows `--` goes to simple_rl.py. Each run has a vLLM of its own; `--jobs` at a time share the GPU. A run that failed is
in the result with its last line, and the others go on. Prints a table and writes bi_on_off.json: reward, entropy, tokens that
differed and the hash of the weights at every step.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.gpu.machine import describe
from bench.gpu.runs import Results
from bench.gpu.summary import table
from bench.measured import measured
from example_trainer.child_processes.processes import ProcessError, Supervisor

MODES = {"on": "--batch-invariant", "off": "--no-batch-invariant"}
KEPT = ("reward_mean", "entropy", "response_length_mean", "grad_norm", "mismatched_tokens", "compared_tokens", "parity_kl")
LAST = 10
"""Steps whose mean reward is a run's result."""


def run(mode: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One training run; returns its course, or how it failed."""
    folder = args.output / f"{mode}-{seed}"
    command = [sys.executable, "-u", str(ROOT / "example_trainer" / "simple_rl.py"), MODES[mode], "--seed", str(seed)]
    command += ["--steps", str(args.steps), "--digits", str(args.digits), "--device", args.device]
    command += ["--output", str(folder), *args.rest]
    begun, failure = time.monotonic(), ""
    with Supervisor() as supervisor:  # which ends the run, and its vLLM, however this process ends
        process = supervisor.start(f"{mode} {seed}", command, folder / "run.log", grace=30.0, may_finish=True)
        try:
            process.wait(args.run_timeout)
        except ProcessError as error:
            failure = " | ".join(line.strip() for line in str(error).splitlines())[:1000]
    seconds, last = round(time.monotonic() - begun, 1), " ".join(process.tail(1))[:500]
    result: dict[str, Any] = {"mode": mode, "seed": seed, "seconds": seconds, "failed": failure, "last_line": last}
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    result |= {name: [row[name] for row in rows] for name in KEPT}
    result["weights_sha"] = [row["weights_sha"] for row in rows]
    return result


def summary(runs: list[dict[str, Any]], mode: str) -> list[str]:
    """One row of the table."""
    done = [r for r in runs if r["mode"] == mode and not r["failed"]]
    if not done:
        return [mode, "0", "", "", "", ""]
    finals = [statistics.mean(r["reward_mean"][-LAST:]) for r in done]
    whole = [statistics.mean(r["reward_mean"]) for r in done]
    spread = statistics.stdev(finals) if len(finals) > 1 else 0.0
    tokens, wrong = sum(sum(r["compared_tokens"]) for r in done), sum(sum(r["mismatched_tokens"]) for r in done)
    return [
        mode,
        str(len(done)),
        f"{statistics.mean(finals):.3f} ± {spread:.3f}",
        " ".join(f"{value:.3f}" for value in finals),
        f"{statistics.mean(whole):.3f}",
        f"{wrong:,} of {tokens:,}",
    ]


def main() -> int:
    """Returns the process's status: 1 if any run failed."""
    parser = argparse.ArgumentParser(description="Learning with and without equal bits.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=["on", "off"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--digits", type=int, default=3, help="of the operands (default: %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: %(default)s)")
    parser.add_argument("--run-timeout", type=float, default=3600.0, help="seconds that one run may take")
    parser.add_argument("rest", nargs="*", help="options of simple_rl.py, behind --")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results = Results(args.output / "bi_on_off.json", steps=args.steps, digits=args.digits, options=args.rest)
    results.put("machine", value=describe())
    if args.jobs > 1 and args.device != "cpu" and "--cache-gib" not in args.rest:
        # A share of the GPU is measured at the start, and would be measured wrong beside other starts.
        args.rest += ["--gpu-memory", "0.02", "--cache-gib", "4"]
    runs = []
    # One mode after the other for each seed, so that what changes on the machine in the meantime changes for both.
    asked = [(mode, seed) for seed in args.seeds for mode in args.modes]
    with ThreadPoolExecutor(max_workers=args.jobs) as pool:
        for (mode, seed), done in zip(asked, pool.map(lambda pair: run(*pair, args), asked), strict=True):
            runs.append(done)
            results.put("runs", f"{mode} {seed}", value={**done, "measured": measured()})
            print(f"{mode} {seed}: {done['seconds']} s, {done['last_line']}", flush=True)
    head = ["mode", "runs", f"reward, last {LAST} steps", "of each seed", "reward, all steps", "tokens that differ"]
    print(table(head, [summary(runs, mode) for mode in args.modes]))
    return int(any(r["failed"] for r in runs))


if __name__ == "__main__":
    sys.exit(main())
