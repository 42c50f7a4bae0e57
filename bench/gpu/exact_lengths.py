"""Measure the cost of exactness in the trainer by the length of sequences. The figures are forward
and backward of one bin with the ordinary and the exact operations, and the kernels that take the
time.

    python bench/gpu/exact_lengths.py --output DIR                          one GPU, Qwen3-1.7B; 512, 4k and 32k tokens
    python bench/gpu/exact_lengths.py --output DIR --only "4k, exact"       some cases
    python bench/gpu/exact_lengths.py --output DIR --tiny --device cpu      that the script runs, without a GPU

`repeats` shows whether two passes gave the same bits. Prints a table and, for each case, its
longest kernels; writes exact_lengths.json after each case.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import argparse
import importlib.util
from dataclasses import asdict, replace
from functools import partial
from typing import Any, get_args

from bench.gpu.processes import Task, device_variables
from bench.gpu.profile_worker import ProfiledCase, Way
from bench.gpu.runs import Sitting, common_options, run_and_report
from bench.gpu.summary import table
from bench.measured import Options, command_line

LENGTHS = {"512": (512, 16384), "4k": (4096, 16384), "32k": (32768, 32768)}
"""Name -> tokens of a sequence, and of the bin."""
WAYS: tuple[Way, ...] = get_args(Way)
CASES = {
    f"{name}, {way}": ProfiledCase(way, length=length, tokens=tokens)
    for name, (length, tokens) in LENGTHS.items()
    for way in WAYS
}
SHOWN_KERNELS = 8


def tiny(case: ProfiledCase, device: str) -> ProfiledCase:
    """The same case, of the tiny shape and with few tokens."""
    length = max(8, case.length // 512)
    few: dict[str, Any] = {"length": length, "tokens": max(2 * length, case.tokens // 512)}
    return replace(case, shape="tiny", device=device, warm_up=1, repeats=2, **few)


class ExactLengths(Sitting):
    """The cases of one run and their figures."""

    def run(self) -> None:
        """Measure every case that was asked for, one after the other."""
        self.describe()
        for name, case in CASES.items():
            if self.args.only and name not in self.args.only:
                continue
            if self.args.tiny:
                case = tiny(case, self.args.device)
            else:
                case = replace(case, shape=self.args.shape, device=self.args.device)
            if reason := self._refusal(case):
                self.results.put("cases", name, value={"skipped": reason})
                continue
            self.results.measure("cases", name, run=partial(self._measured, name, case))
        self.results.put("ratios", value=ratios(self.results.data))

    def _refusal(self, case: ProfiledCase) -> str:
        if case.way != "ordinary" and importlib.util.find_spec("vllm") is None and self.on_gpu:
            return "vLLM, whose kernels deterministic mode runs, is not installed"
        return ""

    def _measured(self, name: str, case: ProfiledCase) -> dict[str, Any]:
        environment = device_variables(not self.on_gpu, "0")
        module, limit = "bench.gpu.profile_worker", case.seconds
        task = Task(name, module, asdict(case), self.args.output, limit, environment=environment)
        self.stack.callback(task.stop)
        try:
            return task.answer()
        finally:
            task.stop()


def ratios(data: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Tokens per second of each exact way over the ordinary way's, by length."""
    relative: dict[str, dict[str, float]] = {}
    cases = data.get("cases", {})
    for length in LENGTHS:
        rates = {way: speed_of(cases.get(f"{length}, {way}", {})) for way in WAYS}
        ordinary = rates["ordinary"]
        if not ordinary:
            continue
        relative[length] = {
            way: round(rate / ordinary, 3) for way, rate in rates.items() if rate and way != WAYS[0]
        }
    return relative


def speed_of(case: dict[str, Any]) -> float:
    """Forwarded tokens per second of a case; 0 if it has none."""
    return float(case.get("pass", {}).get("forwarded_tokens_per_second", 0))


def report(data: dict[str, Any]) -> str:
    """A table of the cases, then the longest kernels of each, and the cases that did not run."""
    rows, lines, relative = [], [], ratios(data)
    for name, case in data.get("cases", {}).items():
        if "pass" not in case:
            reasons = ("skipped", "failed", "out_of_memory")
            lines += [f"{name}: {key}: {case[key]}" for key in reasons if key in case]
            continue
        length, _, way = name.partition(", ")
        one = case["pass"]
        rows.append(
            [name, round(speed_of(case)), relative.get(length, {}).get(way), f"{one['mfu']:.3f}",
             f"{one['peak_bytes'] / 1e9:.1f}", case.get("repeats")]
        )  # fmt: skip
        lines += [f"{name}: {case['busy_seconds']:.4f} s in kernels"]
        lines += [
            f"  {seconds:9.5f} s  {seconds / case['busy_seconds']:5.1%}  {count:6d} x {kernel}"
            for kernel, count, seconds in case["kernels"][:SHOWN_KERNELS]
        ]
    heads = ["forward and backward", "tokens/s", "÷ ordinary", "mfu", "peak GB", "repeats"]
    return "\n".join([table(heads, rows), *lines])


OPTIONS: Options = {"--only": {"nargs": "+", "metavar": "CASE", "choices": list(CASES)}}


def main(arguments: list[str] | None = None) -> int:
    options = common_options("exact_lengths", "qwen3-1.7b") | OPTIONS
    args: argparse.Namespace = command_line(__doc__, options).parse_args(arguments)
    return run_and_report(args, ExactLengths, report)


if __name__ == "__main__":
    raise SystemExit(main())
