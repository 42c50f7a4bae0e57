"""Measure how fast the trainer trains, and how long a sequence can be. Random weights of real
shapes; no network, no server.

    python bench/trainer_speed.py --output DIR                       one GPU; with two also 14B over both (FSDP2)
    python bench/trainer_speed.py --output DIR --only "1.7B, 512"    some cases
    python bench/trainer_speed.py --output DIR --seconds 560         begin no case that might end later than this
    python bench/trainer_speed.py --output DIR --shape tiny --device cpu      that the script runs, without a GPU

A case is a process of its own. It times forward and backward of one bin of packed tokens, with the
trainer's own step and loss. Then it times whole steps of several bins, optimizer and write of the
weights included. Each figure is the best of several. "With a checkpoint" adds the time of each step
while one is written to the disk in the background. Beside ours in the same sitting: plain packed
PyTorch (bench/gpu/plain_decoder.py). Where there are several GPUs, cases for one GPU run on all of
them at the same time, unless --alone is given. The column mfu is 6 · parameters of the layers' and
the output matrix · forwarded tokens over seconds, of 790 TFLOP/s for each GPU. In a mixture only
the experts of one token count (`active_parameters`). The column counted has the operations that
observe/perf.py counts. Prints a table and writes trainer_speed.json after each case.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import importlib.util
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from math import inf
from typing import Any

import torch

from bench.gpu.processes import Task, device_variables
from bench.gpu.runs import Sitting, common_options, run_and_report
from bench.gpu.shapes import SHAPES
from bench.gpu.speed_worker import Case
from bench.gpu.summary import table
from bench.measured import Options, command_line

GROUPS: dict[str, Any] = {"length": 553, "prompt": 103, "group": 8}
"""GSM8K's questions and answers of 450 tokens on average, in groups."""
LONG: dict[str, Any] = {
    "length": 32768,
    "tokens": 32768,
    "checkpointing": False,
    "bins": 2,
    "repeats": 4,
    "warm_up": 2,
}

OFFLOADED: dict[str, Any] = {
    "shape": "qwen3-8b",
    "length": 4096,
    "checkpointing": True,
    "offload": True,
    "bins": 2,
    "warm_up": 1,
    "repeats": 2,
    "seconds": 400,
}
CASES: dict[str, Case] = {
    "1.7B, 512": Case("ours"),
    "1.7B, 512, plain PyTorch, layers compiled": Case("plain, layers compiled"),
    "1.7B, 512, plain PyTorch": Case("plain"),
    "1.7B, 512, deterministic": Case("ours, deterministic"),
    "14B, 4k, FSDP2 over two GPUs": Case(
        "ours",
        "qwen3-14b",
        length=4096,
        checkpointing=True,
        offload=True,
        ranks=2,
        bins=4,
        warm_up=2,
        repeats=4,
        seconds=280,
    ),
    "14B, 4k, packs of 8k, FSDP2 over two GPUs": Case(
        "ours",
        "qwen3-14b",
        length=4096,
        tokens=8192,
        checkpointing=True,
        offload=True,
        ranks=2,
        bins=8,
        warm_up=1,
        repeats=2,
        seconds=145,
    ),
    "1.7B, 4k": Case("ours", length=4096),
    "1.7B, 4k, plain PyTorch, layers compiled": Case("plain, layers compiled", length=4096),
    "1.7B, 4k, plain PyTorch": Case("plain", length=4096),
    "1.7B, 4k, deterministic": Case("ours, deterministic", length=4096),
    "1.7B, 32k": Case("ours", **LONG),
    "1.7B, 32k, plain PyTorch, layers compiled": Case("plain, layers compiled", **LONG),
    "1.7B, 32k, plain PyTorch": Case("plain", **LONG),
    "1.7B, 32k, deterministic": Case("ours, deterministic", **LONG),
    "1.7B, groups of 8, prompt shared": Case("ours", **GROUPS, share=True),
    "1.7B, groups of 8, prompt repeated": Case("ours", **GROUPS),
    "1.7B, 512, with a checkpoint": Case("ours", saved_steps=5, repeats=2, seconds=300),
    "8B, one GPU, offloaded": Case("ours", **OFFLOADED),
    "8B, one GPU, offloaded, deterministic": Case("ours, deterministic", **OFFLOADED),
}
"""In this order, so that what is compared with each other is measured together and what must be
there comes first."""
LONGEST = [1 << 15, 1 << 16, 1 << 17, 1 << 18]
"""Lengths that are tried one after the other, until one runs out of memory."""


def longest(length: int) -> Case:
    """One sequence of this length in one bin, and a whole step on it."""
    return Case(
        "ours",
        length=length,
        tokens=length,
        checkpointing=True,
        bins=1,
        warm_up=1,
        repeats=1,
        seconds=240,
    )


def tiny(case: Case, device: str, shape: str = "tiny") -> Case:
    """The same case, of a tiny shape and with few tokens."""
    shrunk: dict[str, Any] = {
        "length": max(24, case.length // 128),
        "prompt": min(case.prompt, 9),
        "warm_up": 1,
        "repeats": 2,
    }
    shrunk |= {
        "tokens": max(case.tokens // 128, shrunk["length"] * case.group),
        "bins": min(case.bins, 2),
    }
    return replace(case, shape=shape, device=device, **shrunk)


class TrainerSpeed(Sitting):
    """The cases of one run and their figures."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        super().__init__(args, work, stack)
        self.began = time.monotonic()
        self.gpus = list(range(torch.cuda.device_count())) if self.on_gpu else [0, 1]

    def run(self) -> None:
        """Every case that was asked for and that the GPUs suffice for; then longer and longer
        sequences.
        """
        alone = self.args.alone or not self.on_gpu
        self.describe(cases_at_a_time=1 if alone else len(self.gpus))
        asked = {
            self._label(name): case
            for name, case in CASES.items()
            if not self.args.only or name in self.args.only
        }
        # Cases that need several GPUs come first, while all are free.
        self._together({name: case for name, case in asked.items() if case.ranks > 1}, places=1)
        self._together(
            {name: case for name, case in asked.items() if case.ranks == 1},
            1 if alone else len(self.gpus),
        )
        if not self.args.only or "longest" in self.args.only:
            self._together(
                {f"1.7B, one sequence of {length // 1024}k": longest(length) for length in LONGEST},
                1,
                "longest",
            )

    def _label(self, name: str) -> str:
        """Return a case's name in the results, with the shape that was asked for."""
        shape: str = self.args.shape or "tiny"
        if shape.startswith("tiny"):
            return name
        return f"{shape}, {name.partition(', ')[2]}"

    def _together(self, cases: dict[str, Case], places: int, part: str = "cases") -> None:
        """Run these in their order, as many at a time as there are places, each on the GPUs of its
        place.

        Where there is one place, the next one's process starts while one is measured, and imports;
        that is half of its time.
        """
        waiting, running, held = list(cases.items()), dict[int, Task](), dict[str, Task]()
        while waiting or running:
            free = [place for place in range(places) if place not in running]
            if waiting and free:
                name, case = waiting.pop(0)
                reason = self._refusal(case)
                if reason:
                    self.results.put(part, name, value={"skipped": reason})
                else:
                    task = held.pop(name, None) or self._start(
                        name, case, self._gpus(case, free[0])
                    )
                    task.begin(min(self._left, case.seconds))
                    running[free[0]] = task
            if (
                places == 1
                and running
                and waiting
                and not held
                and not self._refusal(waiting[0][1])
            ):
                held[waiting[0][0]] = self._start(*waiting[0], self._gpus(waiting[0][1], 0))
            for place, task in list(running.items()):
                if task.answers:
                    self.results.measure(part, task.name, run=task.answer)
                    running.pop(place).stop()
                    if part == "longest" and not self._is_longer(task.name):
                        for name, _ in waiting:
                            self.results.put(
                                part, name, value={"skipped": f"{task.name} did not train"}
                            )
                        waiting.clear()
            time.sleep(0.1)
        for task in held.values():
            task.stop()

    def _is_longer(self, name: str) -> bool:
        """Report if this sequence trained, and record it as the longest one that did."""
        found = self.results.data["longest"][name]
        if "pass" in found:
            self.results.put("longest_sequence", value=found["case"]["length"])
        return "pass" in found

    def _gpus(self, case: Case, place: int) -> list[int]:
        return [place] if case.ranks == 1 else list(range(case.ranks))

    @property
    def _left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.began)

    def _refusal(self, case: Case) -> str | None:
        if case.arithmetic == "ours, deterministic" and importlib.util.find_spec("vllm") is None:
            return "vLLM, whose kernels deterministic mode runs, is not installed"
        if case.ranks > len(self.gpus):
            return f"it needs {case.ranks} GPUs, and {len(self.gpus)} are here"
        if self._left < 45:
            return f"--seconds {self.args.seconds:g} leave no time for it"
        return None

    def _start(self, name: str, case: Case, gpus: list[int]) -> Task:
        if (self.args.shape or "").startswith("tiny"):
            case = tiny(case, self.args.device, self.args.shape)
        elif self.args.shape:
            case = replace(case, shape=self.args.shape)
        environment = device_variables(not self.on_gpu, ",".join(map(str, gpus)))
        module = "bench.gpu.speed_worker"
        task = Task(
            name,
            module,
            asdict(case),
            self.args.output,
            case.seconds,
            case.ranks,
            environment,
            held=True,
        )
        self.stack.callback(task.stop)
        return task


def report(data: dict[str, Any]) -> str:
    """A table of the cases, and what did not run."""
    rows, notes = [], []
    for name, found in [*data.get("cases", {}).items(), *data.get("longest", {}).items()]:
        if "pass" not in found:
            notes += [
                f"{name}: {key}: {found[key]}"
                for key in ("skipped", "failed", "out_of_memory")
                if key in found
            ]
            continue
        one, step = found["pass"], found.get("step", {})
        if "checkpoint" in found:
            saved = found["checkpoint"]
            before, after = (saved[f"step_seconds_{when}"] for when in ("before", "after"))
            notes.append(
                f"{name}: {saved['bytes'] / 1e9:.2f} GB, complete after {saved['complete_seconds']:.1f} s; whole steps took "
                f"{statistics.median(before):.3f} s, those after it began {', '.join(f'{seconds:.3f}' for seconds in after)} s"
            )
        rows.append(
            [name, *(round(one[f"{what}_tokens_per_second"]) for what in ("forwarded", "sequence")), f"{one['mfu']:.3f}",
             f"{one['mfu_counted']:.3f}", f"{max(one['peak_bytes'], step.get('peak_bytes', 0)) / 1e9:.1f}",
             round(step["forwarded_tokens_per_second"]) if step else None, f"{step['mfu']:.3f}" if step else None,
             found.get("attention")]
        )  # fmt: skip
    heads = [
        "forward and backward",
        "tokens/s",
        "of sequences",
        "mfu",
        "counted",
        "peak GB",
        "whole steps",
        "mfu",
        "attention",
    ]
    longest_line = (
        [f"longest sequence that trained: {data['longest_sequence']}"]
        if "longest_sequence" in data
        else []
    )
    return "\n".join([table(heads, rows), *longest_line, *notes])


OPTIONS: Options = {
    "--shape": {
        "choices": SHAPES,
        "help": "all cases with this shape; tiny ones with few tokens too",
    },
    "--only": {"nargs": "+", "metavar": "CASE", "choices": [*CASES, "longest"]},
    "--seconds": {"type": float, "default": inf, "help": "time limit of all cases together"},
    "--alone": {"action": "store_true", "help": "one case at a time, whatever the number of GPUs"},
}


def main(arguments: list[str] | None = None) -> int:
    options = common_options("trainer_speed") | OPTIONS
    args = command_line(__doc__, options).parse_args(arguments)
    return run_and_report(args, TrainerSpeed, report)


if __name__ == "__main__":
    raise SystemExit(main())
