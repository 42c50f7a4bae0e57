"""Does the trainer recompute every logprob of vLLM's, bit for bit, whatever vLLM was doing at the
same time?

    python tests/gpu/check_parity_matrix.py --output DIR                      1 GPU: servers and trainers on it
    python tests/gpu/check_parity_matrix.py --output DIR --shape qwen3-1.7b
    python tests/gpu/check_parity_matrix.py --output DIR --shape qwen3-30b-a3b-12l --at-a-time 2    a mixture of experts
    python tests/gpu/check_parity_matrix.py --output DIR --gpus 2             broadcast from a trainer on the second GPU
    python tests/gpu/check_parity_matrix.py --output DIR --tiny --device cpu  only the control, to try the script without a GPU

Three servers are in deterministic mode (CUDA graphs with chunked prefill and prefix cache; eager
without either; one whose cache is too small, which preempts). One without it is the control. Prints
a table, writes parity_matrix_SHAPE.json; ends with status 1 if a token differs in deterministic
mode, or if none does in the control.
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

from bench.gpu.processes import Worker
from bench.gpu.runs import Sitting, common_options, run_and_report, shrink_if_tiny
from bench.gpu.shapes import cache_gib, write_model_folder
from bench.gpu.summary import table
from bench.gpu.vllm_server import VllmServer
from bench.measured import Options, command_line

CELL_SECONDS = 300.0
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)

Cell = dict[str, Any]
SYNC_CELL: Cell = {"concurrency": 64, "requests": 64, "prompts": EDGES, "new": (200, 400)}

SERVERS: dict[str, tuple[tuple[str, ...], int, dict[str, Cell]]] = {
    "graphs, chunks, prefix cache": (
        ("--deterministic", "--max-num-batched-tokens", "2048"),
        1 << 18,
        {
            "1 at a time": {
                "concurrency": 1,
                "requests": 6,
                "prompts": (1, 127, 300),
                "new": (128, 256),
            },
            "8 at a time": {"concurrency": 8, "requests": 32, "prompts": EDGES, "new": (200, 400)},
            "64 at a time": {
                "concurrency": 64,
                "requests": 128,
                "prompts": EDGES,
                "new": (200, 500),
            },
            "256 at a time": {
                "concurrency": 256,
                "requests": 512,
                "prompts": EDGES,
                "new": (200, 500),
            },
            "512 at a time": {
                "concurrency": 512,
                "requests": 1024,
                "prompts": EDGES,
                "new": (200, 500),
            },
            "long prompts": {
                "concurrency": 64,
                "requests": 96,
                "prompts": (1000, 2047, 2049, 3000, 3600),
                "new": (100, 300),
            },
            "long answers": {
                "concurrency": 64,
                "requests": 64,
                "prompts": EDGES,
                "new": (2500, 3700),
            },
            "prefix, cold": {
                "concurrency": 64,
                "requests": 64,
                "prompts": (1100, 1300),
                "new": (100, 200),
                "shared": 1024,
            },
            "prefix, warm": {
                "concurrency": 64,
                "requests": 64,
                "prompts": (1100, 1300),
                "new": (100, 200),
                "shared": 1024,
            },
        },
    ),
    "eager, whole prefills, no prefix cache": (
        (
            *(
                "--deterministic",
                "--enforce-eager",
                "--no-enable-chunked-prefill",
                "--no-enable-prefix-caching",
            ),
            *("--max-num-batched-tokens", "8192"),
        ),
        1 << 17,
        {
            "8 at a time": {"concurrency": 8, "requests": 16, "prompts": EDGES, "new": (100, 200)},
            "256 at a time": {
                "concurrency": 256,
                "requests": 512,
                "prompts": (*EDGES, 1500),
                "new": (100, 250),
            },
        },
    ),
    "graphs, small cache": (
        ("--deterministic", "--num-gpu-blocks-override", "1200"),
        36_000,
        {"preempted": {"concurrency": 128, "requests": 192, "prompts": EDGES, "new": (300, 600)}},
    ),
    "control: mode off": (
        (),
        56_000,
        {"64 at a time": {"concurrency": 64, "requests": 128, "prompts": EDGES, "new": (200, 400)}},
    ),
}
"""Name -> its flags, tokens of its cache, and its cells."""

TINY_CELL: Cell = {"concurrency": 4, "requests": 6, "prompts": (1, 17, 40), "new": (4, 12)}


class Matrix(Sitting):
    """The servers and trainers of one run."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        super().__init__(args, work, stack, shape=args.shape)
        self.model = write_model_folder(work / "model", args.shape)

    def run(self) -> None:
        """Start the servers together, or as few at a time as asked; measure one after the other."""
        self.describe()
        kinds = [
            name for name in SERVERS if self.on_gpu or "--deterministic" not in SERVERS[name][0]
        ]
        chosen = [name for name in kinds if self.args.only in name]
        waiting, servers = list(chosen), dict[str, VllmServer]()
        for name in chosen:
            while waiting and len(servers) < (self.args.at_a_time or len(chosen)):
                following = waiting.pop(0)
                servers[following] = self._start(following)
            server = servers[name]
            if self.results.measure(name, "ready", run=partial(self.ready, server)) is not None:
                self._measure(name, server, "single_copy", SERVERS[name][2])
                if name == kinds[0]:
                    self._measure(name, server, "broadcast", {})
            server.stop()
            del servers[name]
        compared = total(self.results.data)["tokens"]
        if self.on_gpu and compared < self.args.least_tokens:
            self.results.failures.append(
                f"{compared} tokens compared, at least {self.args.least_tokens} wanted"
            )

    def _start(self, name: str) -> VllmServer:
        flags, tokens, _ = SERVERS[name] if self.on_gpu else ((), 1, {})
        return self.server(
            name.replace(",", "").replace(":", ""), self.model, max_model_len=4096 if self.on_gpu else 512,
            max_num_seqs=512 if self.on_gpu else 8, flags=flags, cache_gib=cache_gib(self.args.shape, tokens),
        )  # fmt: skip

    def _measure(self, name: str, server: VllmServer, bridge: str, cells: dict[str, Cell]) -> None:
        label = f"trainer {server.name} {bridge}".replace(" ", "-")
        trainer = self.trainer(label, "tests.gpu.parity_trainer", server.port, self._gpu(bridge))
        measure = partial(self.results.measure, name, bridge)
        if measure("load", run=lambda: trainer.ask("load", timeout=200)) is None:
            return
        if measure("connect", run=lambda: trainer.ask("connect", timeout=120, kind=bridge)) is None:
            return
        pair = measure("differences of the two sides", run=lambda: trainer.ask("pair", timeout=60))
        print(f"        {pair}", flush=True)
        for label, cell in cells.items():
            self._cell(trainer, name, bridge, label, cell if self.on_gpu else TINY_CELL)
        deterministic = not name.startswith("control")
        for update in range(
            1, 4 if deterministic and (bridge == "broadcast" or "graphs, chunks" in name) else 1
        ):
            if (
                measure(f"update {update}", run=lambda: trainer.ask("sync", timeout=120, count=1))
                is not None
            ):
                self._cell(
                    trainer,
                    name,
                    bridge,
                    f"after update {update}",
                    {**SYNC_CELL, "seed": 100 * update},
                )
        trainer.stop()

    def _gpu(self, bridge: str) -> str:
        """The trainer's: a single copy is on the server's."""
        return "1" if bridge == "broadcast" and self.args.gpus > 1 else "0"

    def _cell(self, trainer: Worker, name: str, bridge: str, label: str, cell: Cell) -> None:
        found = self.results.measure(
            name, bridge, label, run=lambda: trainer.ask("cell", timeout=CELL_SECONDS, **cell)
        )
        if found is None:
            return
        print(
            f"        {found['mismatched']} of {found['tokens']} differ  {found['first'] or ''}",
            flush=True,
        )
        control = name.startswith("control")
        if control and not found["mismatched"]:
            self.results.failures.append(
                "the control shows no difference, so the comparison proves nothing"
            )
        elif not control and found["mismatched"]:
            self.results.failures.append(
                f"{name}, {bridge}, {label}: {found['mismatched']} tokens differ"
            )
        self.results.put("total", value=total(self.results.data))


def cells(data: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Server, bridge with the cell's name, and figures of every comparison in a results file."""
    return [
        (name, f"{bridge}: {label}", found)
        for name in SERVERS
        for bridge in ("single_copy", "broadcast")
        for label, found in data.get(name, {}).get(bridge, {}).items()
        if "mismatched" in found
    ]


def total(data: dict[str, Any]) -> dict[str, int]:
    """Return the tokens that were compared in deterministic mode, and how many of them differ."""
    counted = [found for name, _, found in cells(data) if not name.startswith("control")]
    return {key: sum(found[key] for found in counted) for key in ("tokens", "mismatched")}


def report(data: dict[str, Any]) -> str:
    """The table of a results file."""
    shown = ("tokens", "mismatched", "preemptions", "prefix_cache_hits")
    rows = [
        [name, label, *(f[key] for key in shown), f"{f['max_difference']:.3g}", f"{f['kl']:.3g}"]
        for name, label, f in cells(data)
    ]
    found = total(data)
    text = table(["server", "cell", "tokens", "differ", "preempted", "cached", "max", "KL"], rows)
    return f"{text}\n\n{found['tokens']} tokens compared in deterministic mode, {found['mismatched']} differ"


OPTIONS: Options = {
    "--name": {"help": "of the results file, without .json"},
    "--gpus": {"type": int, "choices": [1, 2], "default": 1},
    "--only": {"default": "", "help": "only servers whose name holds this"},
    "--least-tokens": {"type": int, "default": 0, "help": "fewer compared tokens are a failure"},
    "--at-a-time": {
        "type": int,
        "default": 0,
        "help": "servers on the GPU at the same time, the next one starts when one has ended; default: all",
    },
}


def main(arguments: list[str] | None = None) -> int:
    options = common_options("", "qwen3-0.6b") | OPTIONS
    args = shrink_if_tiny(command_line(__doc__, options).parse_args(arguments))
    args.name = args.name or f"parity_matrix_{args.shape}"
    return run_and_report(args, Matrix, report)


if __name__ == "__main__":
    raise SystemExit(main())
