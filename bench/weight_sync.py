"""How fast does a full set of weights get from the trainer's GPU into vLLM, and what does generation lose by it?

    python bench/weight_sync.py --output DIR                                     2 GPUs: vLLM on 0, the trainer on 1
    python bench/weight_sync.py --output DIR --shape qwen2.5-14b --tp 2          4 GPUs: vLLM on 0 and 1, the trainer on 2
    python bench/weight_sync.py --output DIR --tiny --device cpu                 everything but the figures, without a GPU

In one run and on the same GPUs: NCCL's own ceiling, this project's broadcast bridge (each way of transfer), and vLLM's own NCCL
weight-transfer engine. Prints tables and writes weight_sync_SHAPE.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench.gpu import ceiling
from bench.gpu.processes import BenchError, Worker, end_on_sigterm, wait_all
from bench.gpu.runs import ASK_SECONDS, Results, figures, loaded, median_of, tokens_per_second, updates_under_load
from bench.gpu.shapes import SHAPES, model_bytes, write_model_folder
from bench.gpu.summary import table
from bench.gpu.trainer import trainer_arguments
from bench.gpu.vllm_server import READY_SECONDS, ServerOptions, VllmServer

PARTS = ("ceiling", "bridge", "engine", "throughput")
TRAINER_TIMEOUT = 60.0


class Benchmark:
    """The servers, the trainers and the load of one run."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        self.args, self.stack = args, stack
        self.shape: str = args.shape
        self.lengths = {"min_tokens": 8, "max_tokens": 24} if args.tiny else {}
        self.model = write_model_folder(work / "model", self.shape)
        self.results = Results(args.output / f"weight_sync_{self.shape}.json")
        gpus = args.device == "cuda"
        mine = ",".join(map(str, range(args.tp))) if gpus else ""
        self.trainer_gpu = str(args.tp) if gpus else "cpu"
        self.server = VllmServer("vllm", self.model, args.output, ServerOptions(mine, args.tp, utilization=0.4))
        stack.callback(self.server.stop)
        self.rival: VllmServer | None = None
        self.rival_trainer_gpu = "0"
        if gpus and "engine" in args.parts:
            # The mirror image, so that both servers start at the same time: their workers where our trainer will be.
            theirs = ",".join(map(str, range(args.tp, 2 * args.tp)))
            flags = ("--weight-transfer-config", '{"backend": "nccl"}')
            options = ServerOptions(
                theirs, args.tp, shared=False, utilization=0.4, flags=flags, environment=(("VLLM_SERVER_DEV_MODE", "1"),)
            )
            self.rival = VllmServer("vllm own engine", self.model, args.output, options)
            stack.callback(self.rival.stop)

    def run(self) -> None:
        """Everything that was asked for."""
        from bench.gpu.machine import describe

        args, results = self.args, self.results
        results.put("machine", value=describe())
        for key, value in (("shape", self.shape), ("tensor_parallel_size", args.tp), ("model_bytes", model_bytes(self.shape))):
            results.put(key, value=value)
        probes = {server.name: server.ready for server in (self.server, self.rival) if server is not None}
        results.put("seconds_to_ready", value=wait_all(probes, READY_SECONDS))
        print(f"ready after {results.data['seconds_to_ready']}", flush=True)
        if "ceiling" in args.parts:
            gpus = [self.trainer_gpu, *("cpu" if args.device == "cpu" else str(i) for i in range(args.tp))]
            small = 1 << 20 if args.device == "cpu" else 1 << 30
            results.measure("ceiling", run=lambda: ceiling.measure(self.shape, gpus, args.output, args.updates, gibibyte=small))
        load = Worker("load", "bench.gpu.load", [], args.output / "load.log", {})
        self.stack.callback(load.stop)
        if "bridge" in args.parts or "throughput" in args.parts:
            trainer = self._trainer("trainer", "bench.gpu.trainer", self.server, self.trainer_gpu)
            results.put("trainer", value=trainer.ask("load", timeout=120))
            self._warm_up(load)
            if "throughput" in args.parts:
                results.measure("throughput", "without updates", run=lambda: self._steady(load))
            for transfer in args.transfers:
                self._bridge(transfer, trainer, load)
            if "throughput" in args.parts:
                results.measure("throughput", "without updates, again", run=lambda: self._steady(load))
                self._ratios()
            trainer.stop()
        if self.rival is not None:
            self._engine(load)

    def _trainer(self, name: str, module: str, server: VllmServer, gpu: str) -> Worker:
        environment = {"CUDA_VISIBLE_DEVICES": gpu} if self.args.device == "cuda" else {"OMP_NUM_THREADS": "1"}
        arguments = trainer_arguments(self.shape, server.port, self.args.device, TRAINER_TIMEOUT)
        worker = Worker(name, module, arguments, self.args.output / f"{name.replace(' ', '-')}.log", environment)
        self.stack.callback(worker.stop)
        return worker

    def _warm_up(self, load: Worker) -> None:
        """The first batches of each size compile kernels, which is no part of any figure."""
        concurrency = max(self.args.throughput_concurrency, *self.args.concurrency)
        with loaded(load, self.server, self.shape, concurrency, 2 * self.args.ramp, self.lengths):
            pass

    def _ratios(self) -> None:
        """Compare what was sampled during updates with the mean of what was sampled before and after, without any."""
        rows = {name: row for name, row in self.results.data["throughput"].items() if "tokens_per_s" in row}
        without = [row["tokens_per_s"] for name, row in rows.items() if name.startswith("without")]
        for row in rows.values():
            if "updates" in row and any(without):
                row["ratio"] = round(row["tokens_per_s"] * len(without) / sum(without), 4)
        self.results.put("throughput", value=self.results.data["throughput"])

    def _bridge(self, transfer: str, trainer: Worker, load: Worker) -> None:
        args, results = self.args, self.results
        options = {} if transfer == "default" else {"transfer": transfer}
        connected = results.measure(
            "bridge", transfer, "connect", run=lambda: trainer.ask("connect", timeout=120, kind="broadcast", **options)
        )
        if connected is None:
            return
        if "bridge" in args.parts:
            results.measure(
                "bridge", transfer, "idle", run=lambda: figures(trainer.ask("sync", timeout=ASK_SECONDS, count=args.updates))
            )
            results.measure("bridge", transfer, "check", run=lambda: self._check(trainer))
            for concurrency in args.concurrency:
                run = partial(self._under_load, load, self.server, trainer, concurrency)
                results.measure("bridge", transfer, f"load_{concurrency}", run=run)
            results.measure("bridge", transfer, "check_after_load", run=lambda: self._check(trainer))
        if "throughput" in args.parts:
            results.measure(
                "throughput", f"one update every {args.update_every:g} s, {transfer}", run=lambda: self._steady(load, trainer)
            )

    def _steady(self, load: Worker, trainer: Worker | None = None) -> dict[str, Any]:
        """Tokens per second over a while, with or without updates."""
        args = self.args
        count = max(1, int(args.throughput_seconds / args.update_every))

        def work() -> None:
            if trainer is not None:
                started = time.monotonic()
                trainer.ask("sync", timeout=args.throughput_seconds + ASK_SECONDS, count=count, interval=args.update_every)
                time.sleep(max(0.0, started + count * args.update_every - time.monotonic()))
            else:
                time.sleep(args.throughput_seconds)

        with loaded(load, self.server, self.shape, args.throughput_concurrency, args.ramp + 1, self.lengths) as seen:
            rate, seconds = tokens_per_second(self.server, work)
        answer: dict[str, Any] = {
            "tokens_per_s": round(rate, 1),
            "seconds": round(seconds, 2),
            "concurrency": args.throughput_concurrency,
        }
        if trainer is not None:
            answer["updates"] = count
        return answer | {"request_failures": seen["failures"]}

    def _check(self, trainer: Worker) -> dict[str, Any]:
        found: dict[str, Any] = trainer.ask("check", timeout=ASK_SECONDS, seed=1)
        if not (found["checksums_equal"] and found["new_not_old"] and found["served"] == found["version"]):
            raise BenchError(f"the weights that the server holds are not the ones that were sent: {found}")
        return found

    def _engine(self, load: Worker) -> None:
        assert self.rival is not None
        results, args, rival = self.results, self.args, self.rival
        trainer = self._trainer("trainer of vllm own engine", "bench.gpu.vllm_engine_trainer", rival, self.rival_trainer_gpu)
        results.measure("vllm_engine", "load", run=lambda: trainer.ask("load", timeout=120))
        if results.measure("vllm_engine", "join", run=lambda: trainer.ask("join", timeout=180)) is None:
            return
        results.measure(
            "vllm_engine", "idle", run=lambda: figures(trainer.ask("sync", timeout=ASK_SECONDS, count=args.updates))
        )
        results.measure("vllm_engine", "check", run=lambda: trainer.ask("check", timeout=ASK_SECONDS))
        for concurrency in args.concurrency:
            run = partial(self._under_load, load, rival, trainer, concurrency)
            results.measure("vllm_engine", f"load_{concurrency}", run=run)

    def _under_load(self, load: Worker, server: VllmServer, trainer: Worker, concurrency: int) -> dict[str, Any]:
        args = self.args
        interval = args.interval * (2 if concurrency > 64 else 1)
        updates = args.updates
        return updates_under_load(
            load, server, trainer, self.shape, concurrency, updates, interval, args.ramp, lengths=self.lengths
        )


def report(data: dict[str, Any]) -> str:
    """The tables of a results file."""
    ceiling_found = data.get("ceiling") or {}
    broadcast, coalesced = ceiling_found.get("broadcast_gb_per_s"), ceiling_found.get("model_gb_per_s")
    lines = [
        f"{data.get('shape')}, {data.get('model_bytes', 0) / 1e9:.2f} GB, vLLM on {data.get('tensor_parallel_size')} rank(s)"
    ]
    for name, row in (ceiling_found.get("patterns") or {}).items():
        lines.append(f"  {ceiling_found['backend']} {name}: {row['gb_per_s']} GB/s, {row['ms']['median']:.2f} ms")
    rows = []
    sides = {f"bridge, {name}": part for name, part in data.get("bridge", {}).items()}
    sides |= {"vLLM's engine": data["vllm_engine"]} if "vllm_engine" in data else {}
    for side, part in sides.items():
        for condition in [key for key in part if key == "idle" or key.startswith("load_")]:
            found = part[condition]
            if "updates" not in found:
                continue
            speed = found["gb_per_s"]
            rows.append(
                [
                    f"{side}, {condition}",
                    found["updates"],
                    *(median_of(found, "first_byte_to_verified_ms", what) for what in ("median", "p90", "max")),
                    speed,
                    round(100 * speed / broadcast, 1) if broadcast else None,
                    round(100 * speed / coalesced, 1) if coalesced else None,
                    *(median_of(found, "halted_ms", what) for what in ("median", "max")),
                    median_of(found, "usual_gap_ms"),
                    *(median_of(found, "largest_gap_per_update_ms", what) for what in ("median", "max")),
                ]
            )
    head = ["", "updates", "first byte to verified: median ms", "p90", "max", "GB/s", "% of broadcast", "% of coalesced"]
    head += ["halted: median ms", "max", "usual gap ms", "gap at an update: median ms", "max"]
    lines += [table(head, rows)] if rows else []
    for side, part in sides.items():
        phases = part.get("idle", {}).get("phases_ms", {})
        server = part.get("idle", {}).get("server_ms", {})
        lines.append(
            f"{side}, idle, median ms by phase: " + _phases(phases) + ("; server: " + _phases(server) if server else "")
        )
        check = part.get("check", {})
        if "mean_logprob_difference_to_new_weights" in check:
            lines.append(
                f"  logprobs differ by {check['mean_logprob_difference_to_new_weights']:.3f} from the new weights' and "
                f"{check['mean_logprob_difference_to_old_weights']:.3f} from the old ones'; checksums equal: "
                f"{check.get('checksums_equal', 'not known')}"
            )
        connect = part.get("connect", {})
        if "params_mapped" in connect:
            lines.append(f"  mapped {connect['params_mapped']}/{connect['params_total']} parameters")
    steady = data.get("throughput", {})
    if steady:
        cells = [[name, row.get("tokens_per_s"), row.get("ratio"), row.get("updates")] for name, row in steady.items()]
        cells = [[a, b, None if c is None else f"{c:.4f}", d] for a, b, c, d in cells]
        lines.append(table(["generation", "tokens/s", "ratio", "updates"], cells))
    return "\n".join(lines)


def _phases(phases: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{name} {row['median']:.2f}" for name, row in phases.items() if "median" in row)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the results and the logs")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument("--tp", type=int, default=1, help="vLLM's tensor-parallel degree")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape and short measurements, to try the script itself")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--transfers", nargs="+", default=["direct", "overlapped"])
    parser.add_argument("--updates", type=int, default=20, help="per measurement")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between updates under load (twice that above 64)")
    parser.add_argument("--throughput-seconds", type=float, default=30.0)
    parser.add_argument("--throughput-concurrency", type=int, default=256)
    parser.add_argument("--update-every", type=float, default=5.0)
    parser.add_argument("--ramp", type=float, default=3.0, help="seconds from the load's start to the measurement's")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.shape = "tiny"
        args.concurrency, args.throughput_concurrency = [4], 4
        args.updates, args.interval, args.ramp = min(args.updates, 3), 0.2, 0.5
        args.throughput_seconds, args.update_every = min(args.throughput_seconds, 2.0), 1.0
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    end_on_sigterm()
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        benchmark = Benchmark(args, Path(work), stack)
        try:
            benchmark.run()
        except BenchError as error:
            benchmark.results.failures.append(str(error))
        finally:
            print(report(benchmark.results.data))
    for failure in benchmark.results.failures:
        print(f"FAILED  {failure}")
    return 1 if benchmark.results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
