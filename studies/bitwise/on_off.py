"""Train with deterministic mode on and off, from several seeds, and compare what was learned. One
GPU.

    # the published study: 3 seeds, 100 steps
    python studies/bitwise/on_off.py --output DIR --jobs 6
    # the same at two learning rates
    python studies/bitwise/on_off.py --output DIR --jobs 6 --lr 1e-5 3e-4
    # GRPO with its defaults, sums of 3 digits
    python studies/bitwise/on_off.py --output DIR --jobs 6 --protocol sums
    python studies/bitwise/on_off.py --output DIR --modes off --steps 2 --device cpu --seeds 0 -- --held-out 8

Each run is a process of simple_rl.py with its own vLLM; `--jobs` runs share the GPU at a time.
Options after `--` go to simple_rl.py and win over the protocol's. The script prints a table and
keeps it in DIR/NAME.json, NAME by protocol. It rewrites the file every few seconds, so that a
script that is killed leaves what it has seen. A run that fails stays in the file with its last
line, and the others continue.

The published study (protocol `published`) is TorchTitan's deterministic_vllm_rl experiment: 10
problems that never change, each answered 8 times in each of 2 batches. So a step has 160 answers.
It has exponential advantages of β = 0.1; PPO on whole answers (studies/bitwise/published_loss.py);
AdamW at 1e-5 with a weight decay of 0.01; 100 steps. The study trained Qwen3-1.7B on GSM8K. Pass
`-- --model Qwen/Qwen3-1.7B --problems FILE` to do that; the default is the starter model and sums
of three digits.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import argparse
import json
import shutil
import time
from dataclasses import dataclass
from typing import Any

from bench.gpu.machine import describe
from bench.gpu.processes import ended_by_sigterm
from bench.gpu.runs import Results
from bench.gpu.summary import table
from bench.measured import Options, command_line, measured
from example_trainer.child_processes.processes import ManagedProcess, Supervisor
from studies.bitwise.summary import HEAD, differences, row_of

MODES = {"on": "--batch-invariant", "off": "--no-batch-invariant"}
KEPT = (
    "reward_mean", "entropy", "response_length_mean", "grad_norm", "mismatched_tokens", "compared_tokens", "parity_kl",
    "max_logprob_difference", "weights_sha",
)  # fmt: skip
LOOK_SECONDS = 3.0
UNFINISHED = "it had not ended when this was written"


@dataclass(frozen=True)
class Protocol:
    """A setting of the study.

    Attributes:
        file: name of the results file, without .json.
        lr: learning rate.
        options: of simple_rl.py.
    """

    file: str
    lr: float
    options: tuple[str, ...]


PROTOCOLS = {
    "published": Protocol(
        "on_off_published",
        1e-5,
        (
            "--problem-count", "10", "--groups", "20", "--group-size", "8", "--max-tokens", "100", "--digits", "3",
            "--advantages", "exponential", "--advantage-beta", "0.1",
            "--loss", "studies.bitwise.published_loss:sequence_ppo", "--correction", "none", "--loss-normalisation", "sequence",
            "--weight-decay", "0.01", "--beta2", "0.999", "--max-grad-norm", "1",
        ),
    ),
    "sums": Protocol("bi_on_off", 3e-4, ("--digits", "3")),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        mode: of MODES.
        seed: of problems and samples.
        lr: learning rate.
        folder: of its logs and metrics.
    """

    mode: str
    seed: int
    lr: float
    folder: Path

    @property
    def name(self) -> str:
        """Its key in the results: `on 0 1e-05`."""
        return f"{self.mode} {self.seed} {self.lr:g}"

    def course(self) -> dict[str, Any]:
        """Return the figures of all steps so far, and the held-out evaluations."""
        rows, held_out = (
            _read(self.folder / f"{name}.jsonl") for name in ("metrics", "evaluations")
        )
        return {
            "mode": self.mode,
            "seed": self.seed,
            "lr": self.lr,
            "steps": len(rows),
            **{name: [row.get(name) for row in rows] for name in KEPT},
            "held_out": [[row["weight_version"], row["metrics"]["solved"]] for row in held_out],
        }


def _read(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON lines file; a half-written last line is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def command_of(run: Run, args: argparse.Namespace) -> list[str]:
    """The command line of one training."""
    command = [
        sys.executable,
        "-u",
        str(ROOT / "example_trainer" / "simple_rl.py"),
        MODES[run.mode],
    ]
    command += [
        "--seed",
        str(run.seed),
        "--steps",
        str(args.steps),
        "--lr",
        str(run.lr),
        "--device",
        args.device,
    ]
    command += ["--evaluate-every", str(args.steps), *PROTOCOLS[args.protocol].options, *args.rest]
    return [*command, "--output", str(run.folder)]


def outcome_of(run: Run, process: ManagedProcess, limit: float) -> dict[str, Any]:
    """Return a training's course so far, how it stands, and whether it has failed. Stops it if it
    takes too long.

    Args:
        limit: seconds that it may take.
    """
    seconds = time.monotonic() - process.started
    if seconds > limit and process.poll() is None:
        process.stop()
        failure = f"stopped after {seconds:.0f} s, its limit"
    elif process.is_missed():
        failure = " | ".join(line.strip() for line in str(process.died()).splitlines())[:1000]
    else:
        failure = "" if process.poll() == 0 else UNFINISHED
    last = " ".join(process.tail(1))[:500]
    return {
        **run.course(),
        "seconds": round(seconds, 1),
        "failed": failure,
        "last_line": last,
        "measured": measured(),
    }


def train_all(runs: list[Run], args: argparse.Namespace, results: Results) -> list[dict[str, Any]]:
    """Train all, `--jobs` at a time, and keep what is known of each in the results file."""
    began, waiting, outcomes = time.monotonic(), list(runs), dict[str, dict[str, Any]]()
    running: dict[Run, ManagedProcess] = {}
    with (
        Supervisor() as supervisor
    ):  # it ends the runs and their servers, however this process ends
        while waiting or running:
            left = args.deadline - (time.monotonic() - began)
            while waiting and len(running) < args.jobs and left > 0:
                run = waiting.pop(0)
                log = run.folder / "run.log"
                running[run] = supervisor.start(
                    run.name, command_of(run, args), log, grace=30.0, may_finish=True
                )
            if left <= 0:
                for process in running.values():
                    process.release()  # all begin to stop before the first is waited for
            for run, process in list(running.items()):
                used = time.monotonic() - process.started
                outcomes[run.name] = outcome = outcome_of(
                    run, process, min(args.run_timeout, used + left)
                )
                results.put("runs", run.name, value=outcome)
                if outcome["failed"] != UNFINISHED:
                    del running[run]
                    shutil.rmtree(
                        run.folder / "checkpoints", ignore_errors=True
                    )  # the curves are what is kept
                    print(
                        f"{run.name}: {outcome['steps']} steps, {outcome['seconds']} s, {outcome['last_line']}",
                        flush=True,
                    )
            if left <= 0 and not running:
                break
            time.sleep(LOOK_SECONDS)
    for run in waiting:
        print(f"{run.name}: not started within --deadline {args.deadline:g} s")
    return [outcomes[run.name] for run in runs if run.name in outcomes]


OPTIONS: Options = {
    "--output": {"type": Path, "required": True},
    "--protocol": {
        "choices": sorted(PROTOCOLS),
        "default": "published",
        "help": "default: %(default)s",
    },
    "--modes": {"nargs": "+", "choices": sorted(MODES), "default": ["on", "off"]},
    "--seeds": {"nargs": "+", "type": int, "default": [0, 1, 2]},
    "--lr": {"nargs": "+", "type": float, "help": "learning rates; not given: the protocol's"},
    "--steps": {"type": int, "default": 100},
    "--device": {"default": "auto"},
    "--jobs": {"type": int, "default": 1, "help": "runs at the same time (default: %(default)s)"},
    "--run-timeout": {"type": float, "default": 3600.0, "help": "seconds that one run may take"},
    "--deadline": {
        "type": float,
        "default": 6 * 3600.0,
        "help": "seconds after which every run is stopped",
    },
    "rest": {"nargs": "*", "help": "options of simple_rl.py, behind --"},
}


def options() -> argparse.Namespace:
    """The command line."""
    args = command_line(__doc__, OPTIONS).parse_args()
    args.lr = args.lr or [PROTOCOLS[args.protocol].lr]
    if args.jobs > 1 and args.device != "cpu" and "--cache-gib" not in args.rest:
        # vLLM takes its share from what is free when it starts, which other starts change at the
        # same time.
        args.rest += ["--gpu-memory", "0.02", "--cache-gib", "2"]
    return args


def main() -> int:
    """Return the exit status: 1 if a run failed or was not started."""
    args = options()
    args.output.mkdir(parents=True, exist_ok=True)
    protocol = PROTOCOLS[args.protocol]
    facts = {
        "protocol": args.protocol,
        "steps": args.steps,
        "options": [*protocol.options, *args.rest],
    }
    results = Results(args.output / f"{protocol.file}.json", **facts)
    results.put("machine", value=describe())
    # For each seed one mode directly after the other: what changes on the machine changes for both.
    asked = [(mode, seed, lr) for lr in args.lr for seed in args.seeds for mode in args.modes]
    runs = [Run(mode, seed, lr, args.output / f"{mode}-{seed}-{lr:g}") for mode, seed, lr in asked]
    with ended_by_sigterm():
        outcomes = train_all(runs, args, results)
    print(f"{results.data['machine']}\n{results.data['measured']}\n")
    print(table(HEAD, [row_of(outcome) for outcome in outcomes]))
    print("\n".join(["", *differences(outcomes)]))
    return int(len(outcomes) < len(runs) or any(outcome["failed"] for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
