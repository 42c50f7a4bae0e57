"""Does a trainer of one rank recompute every logprob of a vLLM server with several tensor-parallel
ranks, bit for bit?

    python tests/gpu/check_exact_layouts.py --output DIR                          2 GPUs: vLLM on both
    python tests/gpu/check_exact_layouts.py --output DIR --tensor-parallel 4      4 GPUs
    python tests/gpu/check_exact_layouts.py --output DIR --tiny --device cpu      tries the script

Ends within nine minutes. The trainer is on the server's last GPU and takes the server's sum plan. At
least a million tokens are compared, also after updates. At the end the trainer sums in one part
instead, as if the server had one GPU: that control must differ. Prints a table, writes
exact_layouts_SHAPE_tpN.json, and ends with status 1 if a token differs, if too few are compared, or
if the control does not differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import argparse
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench.gpu.processes import BenchError, Worker
from bench.gpu.runs import Sitting, common_options, run_and_report, shrink_if_tiny
from bench.gpu.shapes import write_model_folder
from bench.gpu.summary import table
from bench.measured import Options, command_line
from tests.gpu.check_parity_matrix import CELL_SECONDS, EDGES, SYNC_CELL, TINY_CELL, Cell

LEAST_TOKENS = 1_000_000
UPDATES = 3
CACHE_GIB = 28
CONTROL = "control: one part"

CELLS: dict[str, Cell] = {
    "1 at a time": {"concurrency": 1, "requests": 4, "prompts": (1, 127, 300), "new": (128, 256)},
    "8 at a time": {"concurrency": 8, "requests": 32, "prompts": EDGES, "new": (200, 400)},
    "64 at a time": {"concurrency": 64, "requests": 128, "prompts": EDGES, "new": (200, 500)},
    "512 at a time": {"concurrency": 512, "requests": 2048, "prompts": EDGES, "new": (200, 500)},
    "long prompts": {
        "concurrency": 64, "requests": 96, "prompts": (1000, 2047, 2049, 3000), "new": (100, 300),
    },
    "long answers": {"concurrency": 96, "requests": 96, "prompts": EDGES, "new": (2500, 3700)},
    "prefix, cold": {
        "concurrency": 64, "requests": 64, "prompts": (1100, 1300), "new": (100, 200),
        "shared": 1024,
    },
    "prefix, warm": {
        "concurrency": 64, "requests": 64, "prompts": (1100, 1300), "new": (100, 200),
        "shared": 1024,
    },
}  # fmt: skip
"""Together about 1.1 million sampled tokens."""


class Layouts(Sitting):
    """One server of several ranks, and one trainer."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        super().__init__(args, work, stack, shape=args.shape, tensor_parallel=args.tensor_parallel)
        self.model = write_model_folder(work / "model", args.shape)

    def run(self) -> None:
        """Compare every cell, then the same after updates, then the control."""
        self.describe()
        ranks, flags, sizes = self.args.tensor_parallel, (), {"max_model_len": 512}
        if self.on_gpu:
            flags = ("--deterministic", "--max-num-batched-tokens", "2048")
            sizes = {"max_model_len": 4096, "max_num_seqs": 512, "cache_gib": CACHE_GIB}
        gpus = ",".join(map(str, range(ranks)))
        server = self.server("server", self.model, gpus, tp=ranks, flags=flags, **sizes)
        if self.results.measure("ready", run=partial(self.ready, server)) is None:
            return
        trainer = self.trainer("trainer", "tests.gpu.parity_trainer", server.port, str(ranks - 1))
        # The first of these that fails leaves nothing to compare.
        for name, arguments in {"load": {}, "connect": {"kind": "broadcast"}, "pair": {}}.items():
            ask = partial(trainer.ask, name, timeout=200, **arguments)
            if self.results.measure(name, run=ask) is None:
                return
        self._require_pair()
        few = 1
        if self.on_gpu:
            few = len(CELLS)
        for name, cell in list(CELLS.items())[:few]:
            self._compare(trainer, name, cell)
        for update in range(1, min(UPDATES, few) + 1):
            name = f"after update {update}"
            sync = partial(trainer.ask, "sync", timeout=120, count=1)
            if self.results.measure(name, "sync", run=sync) is not None:
                self._compare(trainer, name, {**SYNC_CELL, "seed": 100 * update})
        self.results.measure("one part", run=partial(trainer.ask, "plan", timeout=60, parts=1))
        self._compare(trainer, CONTROL, SYNC_CELL)
        self.results.failures += judged(self.results.data, self.on_gpu)

    def _require_pair(self) -> None:
        """Raise BenchError unless both sides name the same kernels and the same plan."""
        pair = self.results.data["pair"]
        print(f"        {pair}", flush=True)
        differences = [pair[name] for name in ("provenance", "rotary_table") if pair[name]]
        if self.on_gpu and differences:
            raise BenchError(f"the two sides do not pair: {differences[0]}")

    def _compare(self, trainer: Worker, name: str, cell: Cell) -> None:
        if not self.on_gpu:
            cell = TINY_CELL
        ask = partial(trainer.ask, "cell", timeout=CELL_SECONDS, **cell)
        figures = self.results.measure("cells", name, run=ask)
        if figures is not None:
            first = figures["first"] or ""
            print(
                f"        {figures['mismatched']} of {figures['tokens']} differ  {first}",
                flush=True,
            )
            self.results.put("total", value=total(self.results.data))


def compared(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of every comparison that was made, by the cell's name."""
    return {name: cell for name, cell in data.get("cells", {}).items() if "mismatched" in cell}


def total(data: dict[str, Any]) -> dict[str, int]:
    """Tokens that were compared, and how many of them differ, without the control."""
    counted = [cell for name, cell in compared(data).items() if name != CONTROL]
    return {key: sum(cell[key] for cell in counted) for key in ("tokens", "mismatched")}


def judged(data: dict[str, Any], on_gpu: bool) -> list[str]:
    """Return the reasons why the results do not show equal bits; none on a CPU, which only tries
    the script.
    """
    if not on_gpu:
        return []
    cells = compared(data)
    failures = [
        f"{name}: {cell['mismatched']} of {cell['tokens']} tokens differ"
        for name, cell in cells.items()
        if name != CONTROL and cell["mismatched"]
    ]
    tokens = total(data)["tokens"]
    if tokens < LEAST_TOKENS:
        failures.append(f"{tokens} tokens compared, at least {LEAST_TOKENS} wanted")
    if CONTROL not in cells or not cells[CONTROL]["mismatched"]:
        failures.append("the control shows no difference, so the comparison proves nothing")
    return failures


def report(data: dict[str, Any]) -> str:
    """The table of a results file."""
    shown = ("tokens", "mismatched", "preemptions", "prefix_cache_hits")
    rows = [
        [name, *(cell[key] for key in shown), f"{cell['max_difference']:.3g}"]
        for name, cell in compared(data).items()
    ]
    sums = total(data)
    text = table(["cell", "tokens", "differ", "preempted", "cached", "max"], rows)
    return f"{text}\n\n{sums['tokens']} tokens compared, {sums['mismatched']} differ"


OPTIONS: Options = {
    "--name": {"help": "of the results file, without .json"},
    "--tensor-parallel": {"type": int, "choices": [2, 4, 8], "default": 2, "help": "vLLM's ranks"},
}


def main(arguments: list[str] | None = None) -> int:
    options = common_options("", "qwen3-0.6b") | OPTIONS
    args = shrink_if_tiny(command_line(__doc__, options).parse_args(arguments))
    args.name = args.name or f"exact_layouts_{args.shape}_tp{args.tensor_parallel}"
    return run_and_report(args, Layouts, report)


if __name__ == "__main__":
    raise SystemExit(main())
