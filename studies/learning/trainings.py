r"""Which methods learn, and which fall apart: trainings of a small model on word problems of many steps, several seeds of each.

    python -m studies.word_problems.make_model --output model  # first, once: minutes on one GPU
    # every variant, 3 seeds, all GPUs of this machine
    python studies/learning/trainings.py --output DIR --model model
    python studies/learning/trainings.py --output DIR --model model --only stale_16 sequence_mask_16 --seeds 0 1 --steps 60
    # three trainings of the starter model, to try it all
    python studies/learning/trainings.py --output DIR --device cpu --tiny
    python studies/learning/trainings.py --output DIR --list  # the variants

Each training is simple_rl.py with a vLLM server of its own. Sampler and trainer take turns, so that
the staleness of a variant is exact and a seed means the same problems to all. Several share a GPU.
A training that is finished is kept in DIR and not run again, whatever ends this program. This holds
as long as its flags, the model's weights and the code that trains are the same. One is not begun if
it would not end in --seconds. A training that diverges is a result.

If one day is too short for all, add the rest on another with the same weights. Then --add-to takes
over the runs of an earlier learning.json, and trains the missing ones. The code may have changed in
between: each run names its commit.

    python studies/learning/trainings.py --output DIR --model model --add-to bench/results/learning.json

On a machine with GPUs whose commands have a time limit, let this run on by itself and look at it now and then:

    export LOCKSTEP_COMMIT=...  # where there is no .git
    python -m studies.word_problems.make_model --output model
    # minutes
    python studies/learning/trainings.py --output out --model model --seeds 0 --steps 20 \
        --only exact ordinary stale_4 two_dtypes
    setsid nohup python studies/learning/trainings.py --output out --model model --seconds 1200 > out/log 2>&1 &
    tail out/log  # repeat; learning.json grows as trainings end
    cp out/learning.json bench/results/
    python studies/learning/plots.py && python bench/figures.py

The trial run shows the cost of a step beside others; give it to the next one with --step-seconds
and --start-seconds. `--mps` lets processes of one GPU compute at the same time instead of in turns.
Prints a table and writes learning.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import argparse
import hashlib
import json
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.machine import describe
from bench.gpu.mps import start_mps
from bench.gpu.processes import BenchError, Child, tail
from bench.gpu.runs import Results, run_and_report
from bench.gpu.summary import table
from bench.gpu.training_stack import read_rows
from bench.measured import Options, command_line, measured
from studies.learning.plan import (
    TINY,
    VARIANTS,
    Training,
    Variant,
    estimated_seconds,
    gpus_of,
    plan,
    refusal,
)
from studies.learning.summary import HEADS, curves, divergence, figures, variant_rows

STARTER = ROOT / "assets" / "starter_model"
TASK = "studies.word_problems.problems:"
CODE = ("atroposlib/utils", "studies/word_problems", "example_trainer", "vllm_patching")
"""Folders whose Python decides what a training comes to."""
# As vLLM runs in deterministic mode: graphs of layers that are not compiled, which starts soon.
GRAPHS = '--compilation-config \'{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}\''
GRACE_SECONDS = 25.0
"""Before the end of --seconds, to stop what is left."""


@dataclass
class Running:
    """A training that has been started."""

    training: Training
    slot: tuple[int, int]
    child: Child
    folder: Path
    began: float


class Learning:
    """One sitting: starts trainings as places become free, and keeps what they come to.

    Attributes:
        variants: that are compared.
        file: name of the results.
    """

    variants: Mapping[str, Variant] = VARIANTS
    file = "learning.json"

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        self.args, self.stack, self.began = args, stack, time.monotonic()
        self.on_cpu = args.device == "cpu"
        self.gpus, threads, self.places = torch.cuda.device_count(), "2", "GPUs"
        if self.on_cpu:
            self.gpus, threads, self.places = 1, "1", "CPU"
        self.results = Results(args.output / self.file, settings=self._settings())
        self.running: list[Running] = []
        self.made_of: dict[str, str] = {}
        self.environment = {"OMP_NUM_THREADS": threads, "VLLM_API_KEY": ""}
        self.environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.folders = args.output / "trainings"
        self._last_start = 0.0
        if args.mps:
            self.environment |= start_mps(work / "mps", stack)
        stack.callback(self._stop_all)  # before MPS ends, which waits for its programs

    def refusal(self, variant: Variant) -> str | None:
        """Return the reason why a variant cannot be trained here; None if it can."""
        return refusal(variant, self.on_cpu)

    def _plan(self, only: Sequence[str]) -> list[Training]:
        return plan(only, self.args.seeds, self.variants)

    def _settings(self) -> dict[str, Any]:
        args = self.args
        names = (
            "steps",
            "groups",
            "group_size",
            "max_tokens",
            "lr",
            "evaluate_every",
            "held_out",
            "problems",
            "jobs",
            "rest",
        )
        log, rows = args.model / "training_log.jsonl", list[dict[str, Any]]()
        if log.exists():
            rows = [json.loads(line) for line in log.read_text().splitlines()]
        made = {
            key: value
            for row in rows
            for key, value in row.items()
            if key.startswith(("solved_", "parameters", "plan"))
        }
        return {name: getattr(args, name) for name in names} | {
            "model": made or args.model.name,
            "mps": args.mps,
        }

    def run(self) -> None:
        """Everything that is not there yet, as far as the time goes.

        Raises BenchError if the model or a GPU is missing.
        """
        if not (self.args.model / "config.json").exists():
            raise BenchError(
                f"there is no model in {self.args.model}; make one: python -m studies.word_problems.make_model"
            )
        if not self.gpus:
            raise BenchError("no GPU can be seen; --device cpu --tiny tries it without one")
        self.results.put("machine", value=describe())
        self.made_of = made_of(self.args.model)
        self._take_over()
        waiting = self._left_to_do()
        self._say_what_is_missing()
        free = [(number, job) for job in range(self.args.jobs) for number in range(self.gpus)]
        self._say_how_long(len(waiting), len(free))
        while waiting or self.running:
            if free and waiting and self._may_start(len(waiting)):
                self._start(waiting.pop(0), free.pop(0))
            for one in [
                one for one in self.running if one.child.poll() is not None or self._late(one)
            ]:
                self.running.remove(one)
                free.append(one.slot)
                self._finish(one)
            if waiting and not self.running and self._remaining() < self._seconds_each():
                print(
                    f"no time is left for {len(waiting)} trainings; the same command goes on with them",
                    flush=True,
                )
                return
            if self._remaining() < 0:
                print(
                    f"out of time: {len(self.running)} trainings are cut off, {len(waiting)} were not begun",
                    flush=True,
                )
                return
            time.sleep(0.2)

    def _take_over(self) -> None:
        """Put what --add-to has of the flags and the model of now into the results.

        Raises BenchError if it cannot be read.
        """
        if self.args.add_to is None:
            return
        try:
            runs = json.loads(self.args.add_to.read_text(encoding="utf-8")).get("runs", {})
        except (OSError, ValueError) as error:
            raise BenchError(f"--add-to {self.args.add_to}: {error}") from error
        for name, found in runs.items():
            variant = self.variants.get(found["variant"])
            if variant is None or found["status"] != "done":
                continue
            others = [
                what
                for what in self._differences(Training(variant, found["seed"]), found)
                if what != "code"
            ]
            if others:
                print(
                    f"{name} of {self.args.add_to} is left out: it is of other {' and '.join(others)}",
                    flush=True,
                )
            else:
                self.results.put("runs", name, value=found)

    def _say_what_is_missing(self) -> None:
        """Keep the names of the trainings, of all variants and the seeds of now, that have no
        result.
        """
        done = {
            name
            for name, run in self.results.data.get("runs", {}).items()
            if run["status"] == "done"
        }
        every = [training.name for training in self._plan(list(self.variants))]
        self.results.put("missing", value=[name for name in every if name not in done])

    def _left_to_do(self) -> list[Training]:
        """Return the trainings that DIR does not hold yet; the others go into the results."""
        todo, kept_ones = [], []
        for training in self._plan(self.args.only):
            reason = self.refusal(training.variant)
            kept = self._folder(training) / "result.json"
            found = (
                json.loads(kept.read_text(encoding="utf-8")) if kept.exists() and not reason else {}
            )
            others = self._differences(training, found)
            if reason:
                self.results.put("skipped", training.variant.name, value=reason)
            elif found and not others:
                self.results.put("runs", training.name, value=found)
                kept_ones.append(training.name)
            elif training.name in self.results.data.get("runs", {}):
                kept_ones.append(training.name)
            else:
                todo.append(training)
                if found:
                    print(
                        f"{training.name} is trained again: what {self.folders} has is of other {' and '.join(others)}",
                        flush=True,
                    )
        if kept_ones:
            print(f"kept, and not trained again: {', '.join(kept_ones)}", flush=True)
        return todo

    def _differences(self, training: Training, found: dict[str, Any]) -> list[str]:
        """Which of flags, model and code a kept result has others of."""
        now = {"flags": self._flags(training), **self.made_of}
        before = {"flags": found.get("flags"), **found.get("made_of", {})}
        return [name for name, value in now.items() if before.get(name) != value]

    def _say_how_long(self, trainings: int, places: int) -> None:
        seconds = estimated_seconds(trainings, places, self._seconds_each())
        print(
            f"{trainings} trainings of {self.args.steps} steps, {places} at a time on {self.gpus} "
            f"{self.places}, {self._seconds_each():.0f} s each: about {seconds / 60:.1f} minutes",
            flush=True,
        )

    def _seconds_each(self) -> float:
        """Estimate the time of a training: from the options, until three have ended."""
        ended = sorted(
            run["seconds"]
            for run in self.results.data.get("runs", {}).values()
            if run["status"] == "done"
        )
        if len(ended) >= 3:
            return float(ended[-1])
        return float(self.args.start_seconds + self.args.steps * self.args.step_seconds)

    def _remaining(self) -> float:
        return self.args.seconds - GRACE_SECONDS - (time.monotonic() - self.began)

    def _may_start(self, waiting: int) -> bool:
        pause = time.monotonic() - self._last_start
        return pause >= self.args.stagger and self._remaining() >= self._seconds_each()

    def _folder(self, training: Training) -> Path:
        path: Path = self.folders / training.name.replace(" ", "-")
        return path

    def _flags(self, training: Training) -> list[str]:
        """Return the options of simple_rl.py except the folders of model and output, which are this
        machine's.
        """
        args = self.args
        common = {
            "problems": args.problems, "steps": args.steps, "groups": args.groups,
            "group-size": args.group_size, "max-tokens": args.max_tokens, "max-model-len": args.max_model_len, "lr": args.lr,
            "evaluate-every": args.evaluate_every, "held-out": args.held_out, "device": args.device, "seed": training.seed,
        }  # fmt: skip
        flags = [word for name, value in common.items() for word in (f"--{name}", str(value))]
        vllm = f"--max-num-seqs {args.max_num_seqs}"
        if not self.on_cpu:
            # A share of the GPU is measured at the start, and would be measured wrong beside other
            # starts.
            flags += ["--gpu-memory", "0.02", "--cache-gib", str(args.cache_gib)]
            vllm += "" if "--batch-invariant" in training.variant.flags else f" {GRAPHS}"
        return [*flags, "--vllm-args", vllm, *training.variant.flags, *args.rest]

    def _start(self, training: Training, slot: tuple[int, int]) -> None:
        folder = self._folder(training)
        shutil.rmtree(folder, ignore_errors=True)
        command = [
            sys.executable,
            "-u",
            str(ROOT / "example_trainer" / "simple_rl.py"),
            *self._flags(training),
        ]
        environment = dict(self.environment)
        if not self.on_cpu:
            environment["CUDA_VISIBLE_DEVICES"] = gpus_of(training, slot[0], self.gpus)
        command += ["--model", str(self.args.model), "--output", str(folder)]
        self._last_start = time.monotonic()
        child = Child(training.name, command, folder / "run.log", environment)
        self.running.append(Running(training, slot, child, folder, self._last_start))

    def _late(self, one: Running) -> bool:
        return time.monotonic() - one.began > self.args.run_timeout

    def _finish(self, one: Running) -> None:
        """Keep what a training that has ended, or has not in time, came to."""
        status = one.child.poll()
        seconds = round(time.monotonic() - one.began, 1)
        one.child.stop()
        shutil.rmtree(one.folder / "checkpoints", ignore_errors=True)  # the curves are what is kept
        rows, evaluations = (
            read_rows(one.folder / name) for name in ("metrics.jsonl", "evaluations.jsonl")
        )
        last = tail(one.child.log_path, 1)[:500]
        wrong = divergence(rows, last * bool(status))
        failed, outcome = bool(status is None or (status and not wrong)), "done"
        if failed:
            outcome = "failed"
        if status is None:
            last = f"not finished after {seconds:.0f} s: {last}"
        found = {
            "variant": one.training.variant.name,
            "seed": one.training.seed,
            "status": outcome,
            "diverged": wrong,
            "last_line": last,
            "seconds": seconds,
            "steps": len(rows),
            "figures": figures(rows, evaluations),
            "curves": curves(rows),
            "evaluation": {
                "weight_version": [row["weight_version"] for row in evaluations],
                "solved": [round(row["metrics"]["solved"], 5) for row in evaluations],
            },
            "flags": self._flags(one.training),
            "made_of": self.made_of,
            "measured": measured(),
        }
        if failed:
            self.results.failures.append(f"{one.training.name}: {found['last_line']}")
        else:
            (one.folder / "result.json").write_text(json.dumps(found), encoding="utf-8")
        self.results.put("runs", one.training.name, value=found)
        self._say_what_is_missing()
        shown = wrong or last * failed or found["figures"]
        print(f"{seconds:6.1f} s  {one.training.name}: {len(rows)} steps, {shown}", flush=True)

    def _stop_all(self) -> None:
        for one in self.running:  # all are asked first, and so end at the same time
            one.child.release()
        for one in self.running:
            one.child.stop()


def made_of(model: Path, root: Path = ROOT) -> dict[str, str]:
    """Return digests of the other inputs of a training beside the flags: `model` of its weights,
    `code` of the Python in CODE.

    A commit would not do: it does not cover edited files, and changes with files that no training
    reads.
    """
    code = sorted(path for folder in CODE for path in (root / folder).rglob("*.py"))
    return {
        "model": _digest(model, sorted(model.glob("*.safetensors"))),
        "code": _digest(root, code),
    }


def _digest(folder: Path, files: list[Path]) -> str:
    """Return a digest of names and contents, 16 hexadecimal digits."""
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(
                f"{path.relative_to(folder)} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode()
            )
    return whole.hexdigest()[:16]


def report(data: dict[str, Any], variants: Mapping[str, Variant] = VARIANTS) -> str:
    """A table of the variants, and why others are missing."""
    runs = data.get("runs", {})
    rows = variant_rows(runs, [(variant.name, variant.name) for variant in variants.values()])
    notes = [f"{name}: not trained: {reason}" for name, reason in data.get("skipped", {}).items()]
    notes += [
        f"{name}: failed: {run['last_line']}"
        for name, run in runs.items()
        if run["status"] == "failed"
    ]
    if data.get("missing"):
        notes.append(f"not there yet: {', '.join(data['missing'])}")
    if not rows:
        return "\n".join(["nothing was trained", *notes])
    return "\n".join([table(HEADS, rows), *notes])


OPTIONS: Options = {
    "--output": {
        "type": Path,
        "required": True,
        "help": "folder of learning.json, and of each training's files",
    },
    "--model": {
        "type": Path,
        "default": None,
        "help": "what studies.word_problems.make_model wrote; --tiny: the starter model",
    },
    "--add-to": {
        "type": Path,
        "default": None,
        "metavar": "FILE",
        "help": "an earlier learning.json, whose runs are taken over",
    },
    "--only": {
        "nargs": "+",
        "choices": VARIANTS,
        "metavar": "VARIANT",
        "help": "variants to train; default: all of --list",
    },
    "--seeds": {"nargs": "+", "type": int, "default": None, "help": "default: 0 1 2; --tiny: 0"},
    "--steps": {"type": int, "default": None, "help": "default: 150; --tiny: 3"},
    "--groups": {"type": int, "default": 16, "help": "problems in a step (default: %(default)s)"},
    "--group-size": {"type": int, "default": 8, "help": "answers to each (default: %(default)s)"},
    "--max-tokens": {"type": int, "default": 192, "help": "of an answer (default: %(default)s)"},
    "--max-model-len": {"type": int, "default": 512},
    "--max-num-seqs": {"type": int, "default": 256},
    "--lr": {"type": float, "default": 1e-4, "help": "learning rate (default: %(default)s)"},
    "--problems": {"default": f"{TASK}REWARDED", "help": "see simple_rl.py (default: %(default)s)"},
    "--evaluate-every": {"type": int, "default": 25, "help": "steps (default: %(default)s)"},
    "--held-out": {
        "type": int,
        "default": 250,
        "help": "problems of an evaluation (default: %(default)s)",
    },
    "--device": {"choices": ["cuda", "cpu"], "default": "cuda"},
    "--tiny": {
        "action": "store_true",
        "help": "the starter model, few steps, one seed and three variants, to try the script",
    },
    "--jobs": {
        "type": int,
        "default": 6,
        "help": "trainings at a time on each GPU (default: %(default)s); --tiny: 1",
    },
    "--cache-gib": {
        "type": float,
        "default": 3.0,
        "help": "of each vLLM server (default: %(default)s)",
    },
    "--mps": {"action": "store_true", "help": "start CUDA's MPS for the trainings"},
    "--stagger": {
        "type": float,
        "default": 1.0,
        "help": "seconds between two starts (default: %(default)s)",
    },
    "--start-seconds": {
        "type": float,
        "default": 100.0,
        "help": "expected, until trainings have ended (default: %(default)s)",
    },
    "--step-seconds": {"type": float, "default": 2.0, "help": "expected (default: %(default)s)"},
    "--run-timeout": {
        "type": float,
        "default": 900.0,
        "help": "seconds that one training may take (default: %(default)s)",
    },
    "--seconds": {"type": float, "default": float("inf"), "help": "time limit of everything"},
    "--list": {"action": "store_true", "help": "name the variants and end"},
    "rest": {"nargs": "*", "help": "further options of simple_rl.py for all, behind --"},
}


SMALL = {
    "groups": 2, "group_size": 4, "max_tokens": 32, "evaluate_every": 2, "held_out": 4, "jobs": 1, "lr": 3e-4,
    "problems": f"{TASK}STARTER",
}  # fmt: skip
"""Options of --tiny."""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    args = command_line(__doc__, OPTIONS).parse_args(arguments)
    whole = {"only": list(VARIANTS), "seeds": [0, 1, 2], "steps": 150, "model": Path("model")}
    return completed(args, whole, {"only": list(TINY), "seeds": [0], "steps": 3, "model": STARTER})


def completed(
    args: argparse.Namespace, whole: Mapping[str, Any], tiny: Mapping[str, Any]
) -> argparse.Namespace:
    """Fill in what was not given.

    Args:
        whole, tiny: defaults without --tiny and with it, beside SMALL.
    """
    defaults = whole
    if args.tiny:
        defaults = tiny
        vars(args).update(SMALL)
    for name, value in defaults.items():
        setattr(args, name, getattr(args, name) or value)
    args.model = args.model.resolve()
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.list:
        for variant in VARIANTS.values():
            print(f"{variant.name:<22}{variant.label:<36}{shlex.join(variant.flags)}")
        return 0
    return run_and_report(args, Learning, report)


if __name__ == "__main__":
    raise SystemExit(main())
