"""Does a trainer of any layout recompute every logprob of a vLLM server with several
tensor-parallel ranks, bit for bit?

    python tests/gpu/check_exact_layouts.py --output DIR                          2 GPUs: vLLM on both, a trainer of one rank
    python tests/gpu/check_exact_layouts.py --output DIR --trainer-ranks 2        FSDP2 over two
    python tests/gpu/check_exact_layouts.py --output DIR --bridge single-copy     as many ranks as vLLM, in the same memory
    python tests/gpu/check_exact_layouts.py --output DIR --tensor-parallel 4 --trainer-ranks 1 2      4 GPUs, two trainers
    python tests/gpu/check_exact_layouts.py --output DIR --tensor-parallel 4 --trainer-ranks 4 --brief    FSDP2 over all four
    python tests/gpu/check_exact_layouts.py --output DIR --shape qwen3-8b         two GPUs of 80 GB
    python tests/gpu/check_exact_layouts.py --output DIR --tiny --device cpu      tries the script

Ends within nine minutes. The trainers come one after the other, each with weights of its own, and
take the server's sum plan. They are on the last GPUs: on the server's, if there are no others. Each
layout compares at least a million tokens, also after updates. At the end a trainer follows another
plan than the server's: that control must differ. Prints a table and writes
exact_layouts_SHAPE_tpN[_fsdpM][_single_copy].json. It ends with status 1 if a token differs, if too
few are compared, or if a control does not differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.gpu.processes import BenchError, Worker
from bench.gpu.runs import Sitting, common_options, run_and_report, shrink_if_tiny
from bench.gpu.shapes import cache_gib, write_model_folder
from bench.gpu.summary import table
from bench.measured import Options, command_line
from tests.gpu.check_parity_matrix import CELL_SECONDS, EDGES, SYNC_CELL, TINY_CELL, Cell

LEAST_TOKENS = 1_000_000
"""Each layout compares so many."""
UPDATES = 3
CACHE_TOKENS = 1 << 18
CONTROL = "control: another plan"

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


MOST: Cell = {**CELLS["512 at a time"], "requests": 2816}
"""About 0.99 million sampled tokens."""
BESIDE_OTHERS: dict[str, Cell] = {
    "512 at a time": MOST, "8 at a time": CELLS["8 at a time"], "long prompts": CELLS["long prompts"],
}  # fmt: skip
"""Cells of the first of several layouts, which share the nine minutes."""


@dataclass(frozen=True)
class Layout:
    """A trainer.

    Attributes:
        name: in the results.
        suffix: of the name of a results file.
        ranks: of the trainer.
        bridge: `broadcast` or `single_copy`.
    """

    name: str
    suffix: str
    ranks: int
    bridge: str = "broadcast"

    @property
    def splits(self) -> bool:
        """Report if each rank holds a part of every layer."""
        return self.bridge == "single_copy"

    def other_plan(self, parts: int) -> int:
        """Return the parts of a plan that is not the server's and that these ranks can follow."""
        return 2 * parts if self.splits else 1


def layouts_of(args: argparse.Namespace) -> list[Layout]:
    """The layouts that the options name, in the order in which they are compared."""
    found = []
    for ranks in args.trainer_ranks if "broadcast" in args.bridge else ():
        if ranks == 1:
            found.append(Layout("one rank", "", 1))
        else:
            found.append(Layout(f"FSDP2 over {ranks}", f"_fsdp{ranks}", ranks))
    if "single-copy" in args.bridge:
        ranks = args.tensor_parallel
        found.append(Layout("single copy", "_single_copy", ranks, "single_copy"))
    return found


def cells_of(number: int, layouts: int, brief: bool = False) -> Mapping[str, Cell]:
    """The cells of one of several layouts, which are numbered from 0.

    Args:
        brief: as if others came before it.
    """
    if brief or number:
        return {"512 at a time": MOST}
    return BESIDE_OTHERS if layouts > 1 else CELLS


class Layouts(Sitting):
    """One server of several ranks, and one trainer after the other."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        super().__init__(args, work, stack, shape=args.shape, tensor_parallel=args.tensor_parallel)
        self.model = write_model_folder(work / "model", args.shape)

    def run(self) -> None:
        """Compare each layout's cells, then the same after updates, then its control."""
        self.describe()
        layouts, ranks, flags = layouts_of(self.args), self.args.tensor_parallel, ()
        visible = torch.cuda.device_count()
        most = max([ranks, *(layout.ranks for layout in layouts)])
        if self.on_gpu and visible < most:
            raise BenchError(f"needs {most} GPUs, and sees {visible}")
        sizes: dict[str, Any] = {"max_model_len": 512}
        if self.on_gpu:
            flags = ("--deterministic", "--max-num-batched-tokens", "2048")
            cache = cache_gib(self.args.shape, CACHE_TOKENS, ranks)
            sizes = {"max_model_len": 4096, "max_num_seqs": 512, "cache_gib": cache}
        server = self.server("server", self.model, _gpus(0, ranks), tp=ranks, flags=flags, **sizes)
        # They import their modules while the server starts.
        trainers = [self._start(layout, server.port, visible) for layout in layouts]
        if self.results.measure("ready", run=partial(self.ready, server)) is not None:
            for number, (layout, trainer) in enumerate(zip(layouts, trainers, strict=True)):
                self._check(layout, trainer, cells_of(number, len(layouts), self.args.brief))
                trainer.stop()
        self.results.failures += judged(self.results.data, self.on_gpu)

    def _start(self, layout: Layout, port: int, visible: int) -> Worker:
        gpus = _gpus(visible - layout.ranks, visible)
        module, flags = "tests.gpu.parity_trainer", list[str]()
        if layout.splits:
            gpus, flags = _gpus(0, layout.ranks), ["--split"]
        if layout.ranks > 1:
            module = "tests.gpu.spread_parity_trainer"
        name = f"trainer{layout.suffix}"
        return self.trainer(name, module, port, gpus, layout.ranks, *flags)

    def _check(self, layout: Layout, trainer: Worker, cells: Mapping[str, Cell]) -> None:
        measure = partial(self.results.measure, "layouts", layout.name)
        steps: dict[str, dict[str, Any]] = {"load": {}, "connect": {"kind": layout.bridge}}
        # The first of these that fails leaves nothing to compare.
        for name, arguments in (steps | {"pair": {}}).items():
            ask = partial(trainer.ask, name, timeout=200, **arguments)
            found = measure(name, run=ask)
            if found is None:
                return
        print(f"        {found}", flush=True)
        differences = [found[name] for name in ("provenance", "rotary_table") if found[name]]
        if self.on_gpu and differences:
            self.results.failures.append(f"{layout.name} does not pair: {differences[0]}")
            return
        few = len(cells) if self.on_gpu else 1
        for name, cell in list(cells.items())[:few]:
            self._compare(layout, trainer, name, cell)
        for update in range(1, (UPDATES if self.on_gpu else 1) + 1):
            name = f"after update {update}"
            if measure(name, run=partial(trainer.ask, "sync", timeout=120, count=1)) is not None:
                self._compare(layout, trainer, name, {**SYNC_CELL, "seed": 100 * update})
        parts = layout.other_plan(self.args.tensor_parallel)
        measure("another plan", run=partial(trainer.ask, "plan", timeout=60, parts=parts))
        self._compare(layout, trainer, CONTROL, SYNC_CELL)
        measure("close", run=partial(trainer.ask, "close", timeout=60))

    def _compare(self, layout: Layout, trainer: Worker, name: str, cell: Cell) -> None:
        if not self.on_gpu:
            cell = TINY_CELL
        ask = partial(trainer.ask, "cell", timeout=CELL_SECONDS, **cell)
        figures = self.results.measure("layouts", layout.name, "cells", name, run=ask)
        if figures is not None:
            first = figures["first"] or ""
            print(
                f"        {figures['mismatched']} of {figures['tokens']} differ  {first}",
                flush=True,
            )
            found = total(self.results.data["layouts"][layout.name])
            self.results.put("layouts", layout.name, "total", value=found)


def _gpus(first: int, end: int) -> str:
    return ",".join(map(str, range(first, end)))


def compared(layout: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of every comparison of a layout that was made, by the cell's name."""
    return {name: cell for name, cell in layout.get("cells", {}).items() if "mismatched" in cell}


def total(layout: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of a layout that were compared, and how many differ, without the control."""
    counted = [cell for name, cell in compared(layout).items() if name != CONTROL]
    return {key: sum(cell[key] for cell in counted) for key in ("tokens", "mismatched")}


def judged(data: Mapping[str, Any], on_gpu: bool) -> list[str]:
    """Return the reasons why the results do not show equal bits; none on a CPU, which only tries
    the script.
    """
    failures: list[str] = []
    for layout, found in data.get("layouts", {}).items() if on_gpu else ():
        cells = compared(found)
        failures += [
            f"{layout}: {name}: {cell['mismatched']} of {cell['tokens']} tokens differ"
            for name, cell in cells.items()
            if name != CONTROL and cell["mismatched"]
        ]
        tokens = total(found)["tokens"]
        if tokens < LEAST_TOKENS:
            failures.append(f"{layout}: {tokens} tokens compared, at least {LEAST_TOKENS} wanted")
        if CONTROL not in cells or not cells[CONTROL]["mismatched"]:
            failures.append(
                f"{layout}: the control shows no difference, so the comparison proves nothing"
            )
    return failures


def report(data: Mapping[str, Any]) -> str:
    """The table of a results file."""
    shown = ("tokens", "mismatched", "preemptions", "prefix_cache_hits")
    found = data.get("layouts", {})
    rows = [
        [layout, name, *(cell[key] for key in shown), f"{cell['max_difference']:.3g}"]
        for layout, one in found.items()
        for name, cell in compared(one).items()
    ]
    heads = ["trainer", "cell", "tokens", "differ", "preempted", "cached", "max"]
    sums = {layout: total(one) for layout, one in found.items()}
    lines = [
        f"{layout}: {one['tokens']} tokens compared, {one['mismatched']} differ"
        for layout, one in sums.items()
    ]
    return "\n".join([table(heads, rows), "", *lines])


OPTIONS: Options = {
    "--name": {"help": "of the results file, without .json"},
    "--version-ending": {"default": "", "help": "of the name, if --name is not given"},
    "--tensor-parallel": {"type": int, "choices": [2, 4, 8], "default": 2, "help": "vLLM's ranks"},
    "--trainer-ranks": {
        "type": int,
        "nargs": "+",
        "default": [1],
        "help": "of trainers that broadcast: one, or FSDP2 over several",
    },
    "--bridge": {"nargs": "+", "choices": ["broadcast", "single-copy"], "default": ["broadcast"]},
    "--brief": {"action": "store_true", "help": "compare the million tokens of one cell alone"},
}


def main(arguments: list[str] | None = None) -> int:
    options = common_options("", "qwen3-0.6b") | OPTIONS
    parser = command_line(__doc__, options)
    args = shrink_if_tiny(parser.parse_args(arguments))
    if args.tensor_parallel == 8 and "single-copy" in args.bridge:
        parser.error(
            "--bridge single-copy: for eight ranks there is no other plan, for the control"
        )
    layouts = "".join(layout.suffix for layout in layouts_of(args))
    name = f"exact_layouts_{args.shape}_tp{args.tensor_parallel}{layouts}{args.version_ending}"
    args.name = args.name or name
    return run_and_report(args, Layouts, report)


if __name__ == "__main__":
    raise SystemExit(main())
