"""Kernels for the same job, compared: the part that scripts of kernels share."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.processes import BenchError
from bench.gpu.runs import Sitting
from bench.gpu.speed_worker import Timer
from bench.gpu.summary import table
from bench.measured import Options
from vllm_patching.batch_invariant.settings import enable_settings

WARM_UP, REPEATS = 2, 5
LARGEST_ERROR = 1e-2
COLUMNS = ("ms", "tflops", "gb_per_s", "error", "repeats", "same_bits")
TINY_DIVISOR = 256


@dataclass(frozen=True)
class Candidate:
    """One way to compute the same results.

    Attributes:
        name: in the table.
        run: computes them.
        ours: its bits are compared with our first one's.
        fixed: its sums have an order, so a second run gives the same bits.
    """

    name: str
    run: Callable[[], tuple[Tensor, ...]]
    ours: bool = True
    fixed: bool = True


@dataclass(frozen=True)
class Comparison:
    """Candidates for the same results.

    Attributes:
        flops: of the shortest way to them.
        candidates: the errors of the others are against the first one's results.
        read: bytes that any way must read, for a table of speeds; 0: not shown.
    """

    flops: float
    candidates: list[Candidate]
    read: int = 0


class KernelCandidates(Sitting):
    """The comparisons of one run and their figures."""

    calls = 1
    """Calls that are timed together, in a CUDA graph if they are several: a short kernel takes less
    time than its launch from Python."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        super().__init__(args, work, stack)
        self.ends = time.monotonic() + args.seconds
        self.device = torch.device(args.device)
        self.generator = torch.Generator(self.device).manual_seed(0)
        # The interpreter of Triton has no product of bfloat16.
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float16
        self.smaller = TINY_DIVISOR if args.tiny else 1

    def comparisons(self) -> dict[str, Callable[[], Comparison]]:
        """Return a function that makes each comparison, by name."""
        raise NotImplementedError

    def run(self) -> None:
        """Make every comparison that the time suffices for."""
        self.describe()
        for name, made in self.comparisons().items():
            if time.monotonic() > self.ends:
                self.results.put("cases", name, value={"skipped": "no time was left"})
                continue
            self.results.measure("cases", name, run=lambda made=made: self.compared(made()))  # type: ignore[misc]
            if self.on_gpu:
                torch.cuda.empty_cache()

    def normal(self, *sizes: int) -> Tensor:
        """Draw one tensor."""
        return torch.randn(sizes, generator=self.generator, device=self.device).to(self.dtype)

    def compared(self, comparison: Comparison) -> dict[str, Any]:
        """The figures of each candidate, by name.

        Raises:
            BenchError: a candidate's gradients are wrong, or change from run to run.
        """
        first: list[Tensor] = []
        bits: list[Tensor] = []
        rows: dict[str, Any] = {}
        for one in comparison.candidates:
            try:
                found = [part.clone() for part in one.run()]
            except compiler_error() as error:
                rows[one.name] = {"refused": (str(error) or type(error).__name__)[:200]}
                continue
            first = first or found
            bits = bits or (found if one.ours else [])
            row = rows[one.name] = {
                "error": max(map(distance, found, first)),
                "repeats": all(map(torch.equal, found, one.run())),
                "same_bits": all(map(torch.equal, found, bits)) if one.ours else None,
            }
            if not row["error"] <= LARGEST_ERROR or (one.fixed and not row["repeats"]):
                raise BenchError(f"{one.name}: {row}")
            row |= self.times(one, comparison)
        return {"candidates": rows}

    def times(self, one: Candidate, comparison: Comparison) -> dict[str, float]:
        """The shortest time of one candidate, after some to warm up."""
        timer = Timer(self.device)
        repeats = 1 if self.args.tiny else REPEATS
        for _ in range(0 if self.args.tiny else WARM_UP):
            one.run()
        calls = self.calls if self.on_gpu else 1
        run: Callable[[], Any] = one.run
        if calls > 1:
            run = graph_of(one.run, calls).replay
            run()
        seconds = min(timer(run) for _ in range(repeats)) / calls
        found = {"ms": seconds * 1e3, "tflops": comparison.flops / seconds / 1e12}
        if comparison.read:
            found["gb_per_s"] = comparison.read / seconds / 1e9
        return {name: round(value, 4) for name, value in found.items()}


def graph_of(run: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of so many calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph


def compiler_error() -> type[Exception]:
    """Return the error that Triton raises for blocks that do not fit into the GPU."""
    from triton.errors import TritonError

    found: type[Exception] = TritonError
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative error of one result."""
    norm = expected.float().norm().item()
    return float((found.float() - expected.float()).norm()) / (norm or 1.0)


def report(data: dict[str, Any]) -> str:
    """A table of each comparison, the fastest candidates first, and what did not run."""
    parts = []
    for name, case in data.get("cases", {}).items():
        if "candidates" not in case:
            parts.append(f"{name}: {case}")
            continue
        rows = sorted(case["candidates"].items(), key=lambda row: row[1].get("ms", 1e9))
        timed = [(label, row) for label, row in rows if "ms" in row]
        columns = [key for key in COLUMNS if any(key in row for _, row in timed)]
        cells = [
            [label, *(f"{row[key]:.1e}" if key == "error" else row[key] for key in columns)]
            for label, row in timed
        ]
        parts += [table([name, *columns], cells)] if cells else []
        parts += [f"{label}: refused: {row['refused']}" for label, row in rows if "refused" in row]
    return "\n\n".join(parts)


OPTIONS: Options = {
    "--tiny": {"action": "store_true", "help": "tiny sizes, to try the script itself"},
    "--seconds": {"type": float, "default": 205.0, "help": "then no comparison begins any more"},
}


def prepare(device: str) -> None:
    """Choose the settings of deterministic mode, or Triton's interpreter; call it before Triton is
    imported.
    """
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        enable_settings()
