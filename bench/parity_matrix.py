"""Does the trainer recompute every logprob of vLLM's, bit for bit, whatever vLLM was doing at the same time?

    python bench/parity_matrix.py --output DIR                      1 GPU: servers and trainers on it, single copy
    python bench/parity_matrix.py --output DIR --shape qwen3-1.7b
    python bench/parity_matrix.py --output DIR --gpus 2             also broadcast, from a trainer on the second GPU
    python bench/parity_matrix.py --output DIR --tiny --device cpu  only the control, to try the script without a GPU

Three servers in deterministic mode (CUDA graphs with chunked prefill and prefix cache; eager without either; one whose cache is
too small, which preempts) and one without it, the control. Prints a table, writes parity_matrix_SHAPE.json; ends with status
1 if a token differs in deterministic mode, or if none does in the control.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import tempfile
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench.gpu.processes import BenchError, Worker, end_on_sigterm, wait_all
from bench.gpu.runs import Results
from bench.gpu.shapes import SHAPES, write_model_folder
from bench.gpu.summary import table
from bench.gpu.trainer import trainer_arguments
from bench.gpu.vllm_server import READY_SECONDS, ServerOptions, VllmServer

CELL_SECONDS = 300.0
TIMEOUT = 60.0
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)


Cell = dict[str, Any]
SYNC_CELL: Cell = {"concurrency": 64, "requests": 64, "prompts": EDGES, "new": (200, 400)}

SERVERS: dict[str, tuple[tuple[str, ...], int, dict[str, Cell]]] = {
    "graphs, chunks, prefix cache": (
        ("--deterministic", "--max-num-batched-tokens", "2048"),
        28,
        {
            "1 at a time": {"concurrency": 1, "requests": 6, "prompts": (1, 127, 300), "new": (128, 256)},
            "8 at a time": {"concurrency": 8, "requests": 32, "prompts": EDGES, "new": (200, 400)},
            "64 at a time": {"concurrency": 64, "requests": 128, "prompts": EDGES, "new": (200, 500)},
            "256 at a time": {"concurrency": 256, "requests": 512, "prompts": EDGES, "new": (200, 500)},
            "512 at a time": {"concurrency": 512, "requests": 1024, "prompts": EDGES, "new": (200, 500)},
            "long prompts": {"concurrency": 64, "requests": 96, "prompts": (1000, 2047, 2049, 3000, 3600), "new": (100, 300)},
            "long answers": {"concurrency": 64, "requests": 64, "prompts": EDGES, "new": (2500, 3700)},
            "prefix, cold": {"concurrency": 64, "requests": 64, "prompts": (1100, 1300), "new": (100, 200), "shared": 1024},
            "prefix, warm": {"concurrency": 64, "requests": 64, "prompts": (1100, 1300), "new": (100, 200), "shared": 1024},
        },
    ),
    "eager, whole prefills, no prefix cache": (
        (
            *("--deterministic", "--enforce-eager", "--no-enable-chunked-prefill", "--no-enable-prefix-caching"),
            *("--max-num-batched-tokens", "8192"),
        ),
        14,
        {
            "8 at a time": {"concurrency": 8, "requests": 16, "prompts": EDGES, "new": (100, 200)},
            "256 at a time": {"concurrency": 256, "requests": 512, "prompts": (*EDGES, 1500), "new": (100, 250)},
        },
    ),
    "graphs, small cache": (
        ("--deterministic", "--num-gpu-blocks-override", "1200"),
        4,
        {"preempted": {"concurrency": 128, "requests": 192, "prompts": EDGES, "new": (300, 600)}},
    ),
    "control: mode off": (
        (),
        6,
        {"64 at a time": {"concurrency": 64, "requests": 128, "prompts": EDGES, "new": (200, 400)}},
    ),
}
"""Name -> its flags, GiB of its cache, and its cells."""

TINY_CELL: Cell = {"concurrency": 4, "requests": 6, "prompts": (1, 17, 40), "new": (4, 12)}


class Matrix:
    """The servers and trainers of one run."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        self.args, self.stack = args, stack
        self.gpus = args.device == "cuda"
        self.model = write_model_folder(work / "model", args.shape)
        self.results = Results(args.output / f"parity_matrix_{args.shape}.json", shape=args.shape)
        self.cells: list[tuple[str, str, dict[str, Any]]] = []

    def run(self) -> None:
        """All servers start at the same time; one trainer after the other, as its server is ready."""
        from bench.gpu.machine import describe

        self.results.put("machine", value=describe())
        chosen = [name for name in SERVERS if self.gpus or "--deterministic" not in SERVERS[name][0]]
        servers = {name: self._start(name) for name in chosen if self.args.only in name}
        for name, server in servers.items():
            if self.results.measure(name, "ready", run=partial(wait_all, {name: server.ready}, READY_SECONDS)) is None:
                continue
            self._measure(name, server, "single_copy", SERVERS[name][2])
            if self.args.gpus > 1 and name == next(iter(SERVERS)):
                self._measure(name, server, "broadcast", {})
            server.stop()

    def _start(self, name: str) -> VllmServer:
        flags, gibibytes, _ = SERVERS[name] if self.gpus else ((), 1, {})
        options = ServerOptions(
            "0" if self.gpus else "", max_model_len=4096 if self.gpus else 512,
            max_num_seqs=512 if self.gpus else 8, flags=flags, cache_gib=gibibytes,
        )  # fmt: skip
        server = VllmServer(name.replace(",", "").replace(":", ""), self.model, self.args.output, options)
        self.stack.callback(server.stop)
        return server

    def _measure(self, name: str, server: VllmServer, bridge: str, cells: dict[str, Cell]) -> None:
        gpu = "1" if bridge == "broadcast" else "0"
        environment = {"CUDA_VISIBLE_DEVICES": gpu} if self.gpus else {"OMP_NUM_THREADS": "1"}
        trainer = Worker(
            f"trainer {server.name} {bridge}".replace(" ", "-"),
            "bench.gpu.parity_trainer",
            trainer_arguments(self.args.shape, server.port, self.args.device, TIMEOUT),
            self.args.output / f"trainer-{server.name}-{bridge}.log".replace(" ", "-"),
            environment,
        )
        self.stack.callback(trainer.stop)
        measure = partial(self.results.measure, name, bridge)
        if measure("load", run=lambda: trainer.ask("load", timeout=200)) is None:
            return
        if measure("connect", run=lambda: trainer.ask("connect", timeout=120, kind=bridge)) is None:
            return
        pair = measure("differences of the two sides", run=lambda: trainer.ask("pair", timeout=60))
        print(f"        {pair}", flush=True)
        for label, cell in cells.items():
            self._cell(trainer, name, bridge, label, cell if self.gpus else TINY_CELL)
        deterministic = not name.startswith("control")
        for update in range(1, 4 if deterministic and (bridge == "broadcast" or "graphs, chunks" in name) else 1):
            if measure(f"update {update}", run=lambda: trainer.ask("sync", timeout=120, count=1)) is not None:
                self._cell(trainer, name, bridge, f"after update {update}", {**SYNC_CELL, "seed": 100 * update})
        trainer.stop()

    def _cell(self, trainer: Worker, name: str, bridge: str, label: str, cell: Cell) -> None:
        found = self.results.measure(name, bridge, label, run=lambda: trainer.ask("cell", timeout=CELL_SECONDS, **cell))
        if found is not None:
            self.cells.append((name, f"{bridge}: {label}", found))
            print(f"        {found['mismatched']} of {found['tokens']} differ  {found['first'] or ''}", flush=True)

    def verdict(self) -> int:
        """Print the table; 0 if every comparison came out as it should."""
        shown = ("tokens", "mismatched", "preemptions", "prefix_cache_hits")
        rows = [
            [name, label, *(f[key] for key in shown), f"{f['max_difference']:.3g}", f"{f['kl']:.3g}"]
            for name, label, f in self.cells
        ]
        print(table(["server", "cell", "tokens", "differ", "preempted", "cached", "max", "KL"], rows))
        wrong = [f for name, _, f in self.cells if not name.startswith("control") and f["mismatched"]]
        blind = [f for name, _, f in self.cells if name.startswith("control") and not f["mismatched"]]
        compared = sum(f["tokens"] for name, _, f in self.cells if not name.startswith("control"))
        self.results.put("total", value={"tokens": compared, "mismatched": sum(f["mismatched"] for f in wrong)})
        print(f"\n{compared} tokens compared in deterministic mode, {sum(f['mismatched'] for f in wrong)} differ")
        if blind:
            print("the control shows no difference, so the comparison proves nothing")
        for failure in self.results.failures:
            print(f"FAILED  {failure.splitlines()[0]}")
        return 1 if wrong or blind or self.results.failures else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the results and the logs")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, choices=[1, 2], default=1)
    parser.add_argument("--tiny", action="store_true", help="the tiny shape")
    parser.add_argument("--only", default="", help="only servers whose name holds this")
    args = parser.parse_args()
    if args.tiny:
        args.shape = "tiny"
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="parity-") as work, ExitStack() as stack:
        matrix = Matrix(args, Path(work), stack)
        try:
            matrix.run()
        except BenchError as error:
            matrix.results.failures.append(str(error))
        status = matrix.verdict()
    raise SystemExit(status)


if __name__ == "__main__":
    main()
