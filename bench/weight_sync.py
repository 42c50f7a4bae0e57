"""The time in which new weights get into running vLLM servers, and what generation loses by it.

    python bench/weight_sync.py --output DIR                                     2 GPUs: vLLM on 0, the trainer on 1
    python bench/weight_sync.py --output DIR --shape qwen2.5-14b --tp 2          4 GPUs: vLLM on 0 and 1, the trainer on 2
    python bench/weight_sync.py --output DIR --shape qwen2.5-14b --tp 2 --trainer-ranks 2 --crossed --parts ceiling bridge
                                                     2 GPUs: a rank of both on each, and each sends to the other GPU
    python bench/weight_sync.py --output DIR --shape qwen3-30b-a3b --parts bridge --transfers direct --drawn --cache-gib 6
                                                     2 GPUs of 80 GB: a mixture of experts, which fits each of them once
    python bench/weight_sync.py --output DIR --parts servers --concurrency 64    3 GPUs or more: 1, 2, … servers, one on each
    python bench/weight_sync.py --output DIR --parts single_copy                 1 GPU; so does lora
    python bench/weight_sync.py --output DIR --tiny --device cpu                 everything but the figures, without a GPU

Parts:

    ceiling      the rates that NCCL itself reaches between the same GPUs
    bridge       updates by the project's broadcast bridge, idle and under load, for each way of transfer
    clients      the same with keys and values computed again (`recompute`) and kept (`keep`), and
                 the tokens computed again
    engine       the same by vLLM's own NCCL weight-transfer engine
    throughput   generation with and without updates, for both settings of --inflight-cache
    servers      whole updates of 1, 2, … servers. With GPUs each has one of its own, and vLLM's own engine is measured too.
                 Without GPUs they are light ones: the bridge's own routes, updater and checks, and no engine of vLLM's.
    single_copy  proofs that trainer and vLLM share one copy of the weights, and the pause of an update, also with an optimizer
    lora         exchanges of LoRA adapters of rank 16 on all linear layers, and the time to the next first token

Prints tables and writes NAME.json; the parts single_copy and lora write single_copy.json and lora_swap.json by default.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from bench.gpu import ceiling, engine_clock
from bench.gpu.light_fleet import LightFleet
from bench.gpu.processes import BenchError, Worker, crossed_gpus
from bench.gpu.runs import (
    ASK_SECONDS,
    TRAINER_TIMEOUT,
    LoadedSitting,
    common_options,
    figures,
    load_options,
    run_and_report,
    shrink_if_tiny,
    tokens_per_second,
)
from bench.gpu.shapes import model_bytes, write_model_folder
from bench.gpu.summary import (
    alternate,
    find_halts,
    phases_line,
    result_table,
    spread_by_phase,
    spread_ms,
    summary_of_pairs,
    updates_of,
)
from bench.gpu.trainer import trainer_arguments
from bench.gpu.vllm_server import VllmServer
from bench.measured import Options, command_line

SIDES = {
    "recompute": {"bridge", "clients", "throughput"},
    "keep": {"clients", "throughput"},
    "engine": {"engine"},
}
"""A server with its trainer -> the parts that need it. Two of them run at the same time."""
OWN_FILES = {"single_copy": "single_copy", "lora": "lora_swap"}
"""Part with servers of its own -> its results file."""
PARTS = ("ceiling", "bridge", "clients", "engine", "throughput", "servers", *OWN_FILES)
DEFAULT_PARTS = ["ceiling", "bridge", "engine", "throughput"]
LIGHT_SHAPES = ("tiny", "100mb")
OWN_ENGINE: dict[str, Any] = {
    "flags": ("--weight-transfer-config", '{"backend": "nccl"}'),
    "shared": False,
    "environment": (("VLLM_SERVER_DEV_MODE", "1"),),
}
"""The options of a server for vLLM's own engine."""
ONE_COPY_SHARE = 0.05
"""Largest share of the model's bytes that joining may add to the GPU's memory; a second copy would
add all of them."""
NCCL_TRAINER = "bench.gpu.vllm_engine_trainer"
LORA_STATUS = ("swaps", "slots", "capacity", "last_error")


class Benchmark(LoadedSitting):
    """The servers, the trainers and the load of one run."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        super().__init__(args, work, stack)
        self.more_loads: list[Worker] = []
        self.model = write_model_folder(work / "model", args.shape)

    def run(self) -> None:
        """Measure all parts, those first that share servers."""
        args, parts = self.args, set(self.args.parts)
        self.describe(
            shape=args.shape, tensor_parallel_size=args.tp, trainer_ranks=args.trainer_ranks, crossed=args.crossed,
            model_bytes=model_bytes(args.shape), drawn=args.drawn, load_before=os.getloadavg(),
        )  # fmt: skip
        sides = [side for side, needed_by in SIDES.items() if parts & needed_by]
        if not self.on_gpu and "engine" in sides:
            sides.remove("engine")
        self._measure_sides(sides)
        if "servers" in parts and self.on_gpu:
            self._own_gpus()
        elif "servers" in parts:
            for shape in LIGHT_SHAPES:
                self._light(shape)
        if "single_copy" in parts:
            SingleCopy(self).measure()
        if "lora" in parts:
            self._lora()
        self.results.put("load_after", value=os.getloadavg())

    # -- one server at a time

    def _measure_sides(self, sides: list[str]) -> None:
        """Measure two sides that start together, then the others.

        The second side is mirrored: its server is where the first one's trainer is.
        """
        running = {side: self._start_side(side, side != sides[0]) for side in sides[:2]}
        if running:
            servers = [server for server, _ in running.values()]
            self.results.put("seconds_to_ready", value=self.ready(*servers))
        if "ceiling" in self.args.parts:
            self._ceiling()
        for side in sides:
            if side not in running:
                running[side] = self._start_side(side, mirrored=True)
                self.ready(running[side][0])
            self._measure_side(side, *running[side])
            for process in reversed(running[side]):
                process.stop()

    def _start_side(self, side: str, mirrored: bool) -> tuple[VllmServer, Worker]:
        """Start a server and its trainer, which imports its modules while the server starts."""
        args = self.args
        places = (
            [str(rank) for rank in range(args.tp)],
            [str(args.tp + rank) for rank in range(max(args.tp, args.trainer_ranks))],
        )
        server_gpus, trainer_gpus = places[mirrored], places[not mirrored]
        if side == "engine":
            server = self._start("vllm own engine", server_gpus[: args.tp], **OWN_ENGINE)
            module, ranks = NCCL_TRAINER, 1
        else:
            options: dict[str, Any] = {"flags": ("--inflight-cache", side)}
            if "clients" in args.parts:
                clock = engine_clock.variables(self._steps(side), engine_clock.STEPS_FILE)
                options["environment"] = tuple(clock.items())
            server = self._start(f"vllm {side}", server_gpus[: args.tp], **options)
            module, ranks = "bench.gpu.trainer", args.trainer_ranks
        if ranks > 1:
            module = "bench.gpu.spread_trainer"
        gpus = trainer_gpus[:ranks]
        if args.crossed:
            gpus = crossed_gpus(ranks)
        return server, self.trainer(f"trainer {side}", module, server.port, ",".join(gpus), ranks)

    def _start(self, name: str, gpus: list[str], **options: Any) -> VllmServer:
        seats = max(256, *self.args.concurrency)
        # No request is preempted for lack of cache: its keys and values would be computed again
        # without an update.
        gibibytes = self.args.cache_gib or 16 * math.ceil(seats / 256)
        cache = {"max_num_seqs": seats, "cache_gib": gibibytes}
        return self.server(name, self.model, ",".join(gpus), tp=self.args.tp, **cache, **options)

    def _steps(self, side: str) -> Path:
        """Return the file in which a server's engine notes its steps."""
        return self.work / f"steps-{side}.txt"

    def _ceiling(self) -> None:
        args = self.args
        senders = [str(args.tp)]
        if args.crossed:
            senders = crossed_gpus(args.trainer_ranks)
        gpus, gibibyte = [*senders, *map(str, range(args.tp))], 1 << 30
        if not self.on_gpu:
            gpus, gibibyte = ["cpu"] * len(gpus), 1 << 20
        ask = partial(
            ceiling.measure, args.shape, gpus, args.output, args.updates, gibibyte=gibibyte
        )
        self.results.measure("ceiling", run=partial(ask, pairs=args.crossed))

    def _measure_side(self, side: str, server: VllmServer, trainer: Worker) -> None:
        args, measure = self.args, self.results.measure
        kept = {"spare": not args.drawn, "drawn": args.drawn}
        load = partial(trainer.ask, "load", timeout=180, **kept)
        if measure("trainers", side, run=load) is None:
            return
        self.warm_up(server, max(args.throughput_concurrency, *args.concurrency))
        if side == "engine":
            if measure("vllm_engine", "join", run=partial(trainer.ask, "join", timeout=180)):
                check = partial(Worker.ask, command="check", timeout=ASK_SECONDS)
                self.updates(server, trainer, "vllm_engine", check=check)
            return
        for transfer in args.transfers:
            ask = partial(
                trainer.ask, "connect", timeout=ASK_SECONDS, kind="broadcast", transfer=transfer
            )
            if measure("bridge", transfer, f"connect, {side}", run=ask) is None:
                continue
            update = partial(self.updates, server, trainer, first_steps=True, check=self.check)
            if "bridge" in args.parts and side == "recompute":
                update("bridge", transfer)
            if "clients" in args.parts:
                update("clients", side, transfer, steps=self._steps(side))
            if "throughput" in args.parts:
                steady = partial(self._steady, server, trainer)
                measure("throughput", f"{transfer}, {side}", run=steady)

    def _steady(self, server: VllmServer, trainer: Worker) -> dict[str, Any]:
        """Count tokens per second with and without an update every so often, in turn."""
        args = self.args
        rows: list[dict[str, Any]] = []

        def spell(updates: bool) -> float:
            def work() -> None:
                ends = time.monotonic() + args.update_every
                if updates:
                    limit = args.update_every + ASK_SECONDS
                    rows.extend(trainer.ask("sync", timeout=limit, count=1))
                time.sleep(max(0.0, ends - time.monotonic()))

            return tokens_per_second(server, work)[0]

        pairs = max(2, round(args.throughput_seconds / args.update_every))
        method = f"{pairs} pairs of neighbouring spells of {args.update_every:g} s, with and without an update"
        self.results.put("method", value=method)
        with self.loaded(server, args.throughput_concurrency, 2 * args.ramp) as seen:
            rates = summary_of_pairs(alternate(spell, pairs))
        halts = find_halts(seen["streams"], [(row["start"], row["end"]) for row in rows])
        return {
            "concurrency": args.throughput_concurrency,
            "seconds_between_updates": args.update_every,
            **rates,
            **halts.to_json(),
            "halted_ms": figures(rows)["halted_ms"],
            "request_failures": seen["failures"],
        }

    # -- several servers

    def _own_gpus(self) -> None:
        """Update 1, 2, … vLLM servers, each on a GPU of its own, by a trainer on the first GPU;
        then by vLLM's engine.
        """
        args, most, gpus = self.args, max(self.args.servers), torch.cuda.device_count()
        if most >= gpus:
            raise BenchError(
                f"--servers {most} needs {most + 1} GPUs, one for the trainer and one for each server: {gpus} are here"
            )
        measure = partial(self.results.measure, "servers", args.shape)
        servers = self._started_on_own_gpus(most)
        trainer = self.trainer("trainer of several", "bench.gpu.trainer", servers[0].port)
        self.results.put("seconds_to_ready", value=self.ready(*servers))
        self._warm_up_all(servers)
        if measure("trainer", run=partial(trainer.ask, "load", timeout=180, spare=True)):
            for transfer in args.transfers:
                for count in args.servers:
                    ports = [server.port for server in servers[:count]]
                    how = {"kind": "broadcast", "transfer": transfer, "ports": ports}
                    connect = partial(trainer.ask, "connect", timeout=ASK_SECONDS, **how)
                    self._several(servers[:count], trainer, transfer, connect)
        for process in (trainer, *servers):
            process.stop()

        servers = self._started_on_own_gpus(most, **OWN_ENGINE)
        self.ready(*servers)
        self._warm_up_all(servers)
        own = "vLLM's own engine"
        # Each number has a trainer of its own: a group is met once.
        for count in reversed(args.servers):
            port, *more = (server.port for server in servers[:count])
            trainer = self.trainer(f"trainer of {own} {count}", NCCL_TRAINER, port)
            load = partial(trainer.ask, "load", timeout=180, spare=True)
            if measure(own, str(count), "trainer", run=load):
                join = partial(trainer.ask, "join", timeout=ASK_SECONDS, others=more)
                self._several(servers[:count], trainer, own, join)
            trainer.stop()

    def _started_on_own_gpus(self, count: int, **options: Any) -> list[VllmServer]:
        kind = "own engine " * bool(options)
        return [
            self._start(f"vllm {kind}{number}", [str(number)], **options)
            for number in range(1, count + 1)
        ]

    def _several(
        self, servers: list[VllmServer], trainer: Worker, way: str, connect: Callable[[], Any]
    ) -> None:
        """Update these servers, idle and with requests in flight at each, and check all of them."""
        place = ("servers", self.args.shape, way, str(len(servers)))
        if self.results.measure(*place, "connect", run=connect) is not None:
            with self._loaded_too(servers[1:], max(self.args.concurrency)):
                self.updates(servers[0], trainer, *place)
            self.results.measure(*place, "check", run=partial(self._checked, servers, trainer))

    def _checked(self, servers: list[VllmServer], trainer: Worker) -> dict[str, Any]:
        """Raise BenchError unless every server samples with the trainer's weights."""
        rows = [
            trainer.ask("check", timeout=ASK_SECONDS, seed=1, port=server.port)
            for server in servers
        ]
        if not all(row["new_not_old"] and row.get("checksums_equal", True) for row in rows):
            raise BenchError(f"not all servers hold the weights that were sent: {rows}")
        difference = max(row["mean_logprob_difference_to_new_weights"] for row in rows)
        return {"servers": len(rows), "largest_difference": difference}

    def _warm_up_all(self, servers: list[VllmServer]) -> None:
        with self._loaded_too(servers[1:], max(self.args.concurrency)):
            self.warm_up(servers[0], max(self.args.concurrency))

    @contextmanager
    def _loaded_too(self, servers: list[VllmServer], concurrency: int) -> Iterator[None]:
        """Keep requests in flight at each of these, too."""
        with ExitStack() as loads:
            for number, server in enumerate(servers):
                if number == len(self.more_loads):
                    load = self.worker(f"load {number + 2}", "bench.gpu.load", gpus="")
                    self.more_loads.append(load)
                loads.enter_context(self.loaded(server, concurrency, 0.0, self.more_loads[number]))
            yield

    def _light(self, shape: str) -> None:
        """Update 1, 2, 4, … light servers by one trainer."""
        fleet = LightFleet(shape, self.args.output, TRAINER_TIMEOUT)
        self.stack.callback(fleet.stop)
        ports = [
            fleet.start(self.work / f"light-{shape}-{number}")
            for number in range(max(self.args.servers))
        ]
        arguments = trainer_arguments(shape, ports[0], self.args.device, TRAINER_TIMEOUT)
        trainer = self.worker(f"trainer of {shape}", "bench.gpu.trainer", arguments)
        measure = partial(self.results.measure, "servers", shape)
        measure("trainer", run=partial(trainer.ask, "load", timeout=180, spare=True))
        sync = partial(trainer.ask, "sync", timeout=ASK_SECONDS, count=self.args.updates)
        for transfer in self.args.transfers:
            for count in self.args.servers:
                how = {"kind": "broadcast", "transfer": transfer, "ports": ports[:count]}
                connect = partial(trainer.ask, "connect", timeout=ASK_SECONDS, **how)
                if measure(transfer, str(count), "connect", run=connect) is not None:
                    measure(transfer, str(count), "idle", run=lambda: figures(sync()))
        trainer.stop()
        fleet.stop()

    # -- LoRA adapters

    def _lora(self) -> None:
        """Write the base model, start the server on it, and exchange adapters."""
        results, trainer = self.results, self.trainer("trainer lora", "bench.gpu.lora_trainer", 1)
        base = str(self.work / "base")
        results.put("adapter", value=trainer.ask("save_base", timeout=180, folder=base))
        flags = ("--enable-lora", "--max-lora-rank", "16")
        options: dict[str, Any] = {"shared": False, "load_format": "auto", "flags": flags}
        server = self.server("vllm lora", Path(base), **options)
        results.put("seconds_to_ready", value=self.ready(server)["vllm lora"])
        how = {"port": server.port, "base_model": base, "folder": str(self.work / "adapters")}
        connect = partial(trainer.ask, "connect_lora", timeout=120, **how)
        if results.measure("connect", run=connect) is None:
            return
        self.warm_up(server, max(self.args.concurrency))
        trainer.ask("sync", timeout=ASK_SECONDS, count=3)

        def first_tokens() -> dict[str, float]:
            return spread_ms(trainer.ask("first_tokens", 60, count=20)["all"])

        def first_tokens_loaded(concurrency: int) -> dict[str, float]:
            with self.loaded(server, concurrency, self.args.ramp):
                return first_tokens()

        results.measure("first_token_without_swaps", run=first_tokens)
        self.updates(server, trainer, summarise=swap_figures, check=check_adapter)
        for concurrency in self.args.concurrency:
            usual = partial(first_tokens_loaded, concurrency)
            results.measure(f"first_token_without_swaps, load_{concurrency}", run=usual)
        status = server.get("/lora/status")
        results.put("lora_status", value={key: status[key] for key in LORA_STATUS})


class SingleCopy:
    """Proofs that there is one copy, and its pauses, in an order that a reader can follow."""

    def __init__(self, sitting: Benchmark) -> None:
        self.sitting, self.tp, self.results = sitting, sitting.args.tp, sitting.results
        gpus = ",".join(map(str, range(self.tp)))
        self.server = sitting.server("vllm single copy", sitting.model, gpus, tp=self.tp)
        module, flags = "bench.gpu.trainer", list[str]()
        if self.tp > 1:
            module, flags = "bench.gpu.spread_trainer", ["--split"]
        port = self.server.port
        self.trainer = sitting.trainer("trainer single copy", module, port, gpus, self.tp, *flags)

    def measure(self) -> None:
        """Measure everything."""
        measure, args, trainer = self.results.measure, self.sitting.args, self.trainer
        ready = self.sitting.ready(self.server)
        self.results.put("seconds_to_ready", value=ready["vllm single copy"])
        if measure("one_copy", run=self._one_copy) is None:
            return
        measure("read_on_the_other_side", run=self._write_here_read_there)
        update = partial(
            self.sitting.updates, self.server, trainer, summarise=pause_figures, first_steps=True
        )
        update(check=self.sitting.check)
        if self.tp > 1:
            # Masters and moments of a model that needs several GPUs would not fit beside two sets
            # of weights.
            return
        command = "sync_with_optimizer"
        measure("optimizer, idle", run=partial(self._optimizer, command))
        for concurrency in args.concurrency:
            loaded = partial(
                self.sitting.under_load, self.server, trainer, concurrency, command,
                summarise=pause_figures, first_steps=True,
            )  # fmt: skip
            measure(f"optimizer, load_{concurrency}", run=loaded)

    def _one_copy(self) -> dict[str, Any]:
        """Load, join, and account for the (first) GPU's memory: joining must give back what loading
        took.
        """
        trainer, on_gpu = self.trainer, self.sitting.on_gpu
        before = trainer.ask("memory", timeout=60)
        loaded = trainer.ask("load", timeout=180, optimizer=self.tp == 1)
        with_own_copy = trainer.ask("memory", timeout=60)
        connected = trainer.ask("connect", timeout=180, kind="single_copy")
        joined = trainer.ask("memory", timeout=60)
        moved = connected["first_update"]["bytes_moved"]
        # The optimizer's masters and the two sets to write from stay; the model's own copy goes.
        freed, size = (
            with_own_copy["gpu_bytes_used"] - joined["gpu_bytes_used"],
            loaded["model_bytes"] // self.tp,
        )
        if moved:
            raise BenchError(f"an update of a single copy moved {moved} bytes")
        if on_gpu and freed < (1 - ONE_COPY_SHARE) * size:
            raise BenchError(
                f"joining freed {freed} bytes of the {size} that the trainer's own copy took"
            )
        memory = {"before_loading": before, "model_loaded": with_own_copy, "joined": joined}
        return {
            "params_mapped": connected["params_mapped"],
            "params_total": connected["params_total"],
            "model_bytes": size,
            "bytes_moved_by_an_update": moved,
            "gpu_bytes_used": memory,
            "gpu_bytes_freed_by_joining": freed,
        }

    def _write_here_read_there(self) -> dict[str, Any]:
        """Write zeros into the last norm, without a message to the server: every token must become
        equally likely.
        """
        trainer, server = self.trainer, self.server
        trainer.ask("sync", timeout=ASK_SECONDS, count=1)
        _, before = server.greedy([5, 6, 7], max_tokens=1)
        vocab = trainer.ask("flatten_head", timeout=30)["vocab"]
        try:
            _, flat = server.greedy([8, 9, 10], max_tokens=1)
        finally:
            trainer.ask("flatten_head", timeout=30, undo=True)
        _, again = server.greedy([11, 6, 7], max_tokens=1)
        even = -math.log(vocab)
        seen = {
            "before": before[0],
            "zeroed": flat[0],
            "expected_when_zeroed": even,
            "restored": again[0],
        }
        nearest = min(abs(values[0] - even) for values in (before, again))
        if abs(flat[0] - even) > 0.01 or nearest < 0.1:
            raise BenchError(f"vLLM does not read what the trainer writes: {seen}")
        return seen

    def _optimizer(self, command: str) -> dict[str, Any]:
        updates = self.sitting.args.updates
        rows = self.trainer.ask(command, timeout=ASK_SECONDS, count=updates)
        return {**pause_figures(rows), "loss": [row["loss"] for row in rows]}


def check_adapter(trainer: Worker) -> dict[str, Any]:
    """Raise BenchError unless the server samples with the adapter that was sent last."""
    seen: dict[str, Any] = trainer.ask("check_adapter", timeout=ASK_SECONDS)
    if not (seen["new_not_old"] and seen["weight_versions"] == [seen["sent"]]):
        raise BenchError(f"the server does not sample with the adapter that was sent: {seen}")
    return seen


def pause_figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return figures of updates, and how much longer than the write itself the engine stood still.

    Its end is the answer to resume (`pause_beyond_write_ms`) and, with requests in flight, also the
    first step of the worker (`stalled_beyond_write_ms`). That step may come before the answer.
    """
    shown = figures(rows)
    shown["write_ms"] = spread_ms([row["write"] for row in rows])
    for name, end in (("pause", "halted"), ("stalled", "stalled")):
        beyond = [row["server"][end] - row["write"] for row in rows if end in row["server"]]
        if beyond:
            shown[f"{name}_beyond_write_ms"] = spread_ms(beyond)
    if "optimizer_step" in rows[0]:
        shown["optimizer_step_ms"] = spread_ms([row["optimizer_step"] for row in rows])
        whole = [
            row["forward_backward"] + row["optimizer_step"] + row["end"] - row["start"]
            for row in rows
        ]
        shown["median_seconds_per_training_step"] = round(statistics.median(whole), 4)
    return shown


def swap_figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return milliseconds of exchanges from the trainer's call to the answer, by phase on both
    sides, and of the next first token.
    """
    return {
        "swaps": len(rows),
        "adapter_bytes": rows[0]["bytes_moved"],
        "swap_ms": spread_ms([row["end"] - row["start"] for row in rows]),
        "request_to_served_ms": spread_ms([row["seconds"]["load"] for row in rows]),
        "phases_ms": spread_by_phase([row["seconds"] for row in rows]),
        "server_ms": spread_by_phase([row["server"] for row in rows]),
        "first_token_after_swap_ms": spread_ms([row["first_token"] for row in rows]),
    }


def times_one(rows: dict[str, Any], condition: str = "idle") -> dict[str, float]:
    """Return the median time of an update of N servers over that of one, by N.

    Args:
        rows: of one shape and transfer, by the number of servers.
        condition: idle, or under which load.
    """
    medians = {
        number: row[condition]["whole_update_ms"]["median"]
        for number, row in rows.items()
        if "whole_update_ms" in row.get(condition, {})
    }
    if "1" not in medians:
        return {}
    return {number: round(median / medians["1"], 2) for number, median in medians.items()}


UPDATE_COLUMNS = {
    "longest gap between two tokens at a client, per update: median ms": (
        "largest_gap_per_update_ms/median"
    ),
    "max": "largest_gap_per_update_ms/max",
    "usual gap ms": "usual_gap_ms/median",
    "the trainer waits: median ms": "whole_update_ms/median",
    "max ": "whole_update_ms/max",
    "times one server": "times_one",
    "halted: median ms": "halted_ms/median",
    "max  ": "halted_ms/max",
    "to the first step ms": "stalled_ms/median",
    "pause beyond the write ms": "pause_beyond_write_ms/median",
    "first byte to verified: median ms": "first_byte_to_verified_ms/median",
    "GB/s": "gb_per_s",
    "tokens computed again": "computed_anew/tokens",
    "updates": "updates",
}
THROUGHPUT_COLUMNS = {
    "pairs": "pairs",
    "tokens/s without": "tokens_per_s_without_updates",
    "with updates": "tokens_per_s",
    "ratio": "ratio",
    "of single pairs": "ratios",
    "usual gap ms": "usual_gap_ms/median",
    "gap at an update ms": "largest_gap_per_update_ms/median",
}
SWAP_COLUMNS = {
    "swaps": "swaps",
    "swap: median ms": "swap_ms/median",
    "p90": "swap_ms/p90",
    "max": "swap_ms/max",
    "request to served ms": "request_to_served_ms/median",
    "first token after ms": "first_token_after_swap_ms/median",
    "usual gap ms": "usual_gap_ms/median",
    "gap at a swap ms": "largest_gap_per_update_ms/median",
}


def report(data: dict[str, Any]) -> str:
    """Format the tables of a results file."""
    lines = [f"{data.get('shape')}, {data.get('model_bytes', 0) / 1e9:.2f} GB"]
    ceilings = data.get("ceiling", {})
    for name, row in ceilings.get("patterns", {}).items():
        rate = f"{row['gb_per_s']} GB/s, {row['ms']['median']:.2f} ms"
        lines.append(f"  {ceilings['backend']} {name}: {rate}")
    sides = {f"bridge, {name}": part for name, part in data.get("bridge", {}).items()}
    for side, by_transfer in data.get("clients", {}).items():
        sides |= {f"clients, {side}, {way}": row for way, row in by_transfer.items()}
    sides["vLLM's engine"] = data.get("vllm_engine", {})
    rows = dict(updates_of(sides))
    for shape, by_transfer in data.get("servers", {}).items():
        for transfer, by_number in by_transfer.items():
            if transfer != "trainer":
                rows |= rows_of_servers(f"{shape}, {transfer}", by_number)
    rows |= updates_of({"single copy": data})
    lines += result_table(rows, UPDATE_COLUMNS)
    lines += result_table(data.get("throughput", {}), THROUGHPUT_COLUMNS)
    swaps = {name: row for name, row in data.items() if "swap_ms" in as_dict(row)}
    lines += result_table(swaps, SWAP_COLUMNS)
    usual = {name: row for name, row in data.items() if name.startswith("first_token")}
    lines += result_table(usual, {"median ms": "median", "p90": "p90", "max": "max"})
    for label, row in {**rows, **swaps}.items():
        if label.endswith("idle"):
            lines += phases_line(f"{label}, trainer", row.get("phases_ms", {}))
            lines += phases_line(f"{label}, server", row.get("server_ms", {}))
    return "\n".join(lines)


def as_dict(value: Any) -> dict[str, Any]:
    """Return the value if it is a dictionary, else an empty one."""
    if isinstance(value, dict):
        return value
    return {}


def rows_of_servers(title: str, by_number: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the results of updates, each with its ratio to that of one server."""
    rows = {}
    for number, part in by_number.items():
        for label, row in updates_of({f"{title}, {number} servers": part}).items():
            ratios = times_one(by_number, label.rpartition(", ")[2])
            rows[label] = {**row, "times_one": ratios.get(number)}
    return rows


OPTIONS: Options = {
    "--tp": {"type": int, "default": 1, "help": "vLLM's tensor-parallel degree"},
    "--trainer-ranks": {
        "type": int,
        "default": 1,
        "help": "processes of the trainer (torchrun, FSDP2)",
    },
    "--crossed": {
        "action": "store_true",
        "help": "each rank of the trainer on the GPU of one of vLLM's that another sends to",
    },
    "--drawn": {
        "action": "store_true",
        "help": "the trainer draws each update's weights and keeps no second set: for models that do not fit twice",
    },
    "--cache-gib": {
        "type": int,
        "default": 0,
        "help": "of each GPU of vLLM's; default: 16 for 256 requests",
    },
    "--parts": {"nargs": "+", "choices": PARTS, "default": DEFAULT_PARTS},
    "--transfers": {"nargs": "+", "default": ["direct", "overlapped"]},
    "--servers": {
        "type": int,
        "nargs": "+",
        "help": "how many; by default 1, 2, 4, 8, or one for each GPU but one",
    },
    "--throughput-seconds": {
        "type": float,
        "default": 30.0,
        "help": "with updates; as many without",
    },
    "--throughput-concurrency": {"type": int, "default": 256},
    "--update-every": {
        "type": float,
        "default": 5.0,
        "help": "seconds, when throughput is measured",
    },
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    common = common_options("", "qwen3-1.7b")
    name = {"--name": {"help": "of the results file, without .json"}}
    parser = command_line(__doc__, common | name | OPTIONS | load_options([64, 256]))
    args = parser.parse_args(arguments)
    parts = set(args.parts)
    if args.crossed and (
        args.tp < 2 or args.trainer_ranks != args.tp or not {"ceiling", "bridge"} >= parts
    ):
        parser.error(
            "--crossed needs --tp 2 or more, as many --trainer-ranks, and --parts ceiling bridge (or one of them)"
        )
    if len(parts) > 1 and parts & OWN_FILES.keys():
        parser.error(f"--parts {' '.join(args.parts)}: give single_copy or lora alone")
    gpus = 0
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
    args.servers = args.servers or list(range(1, gpus)) or [1, 2, 4, 8]
    if args.tiny:
        args.servers = [count for count in args.servers if count <= 2]
        args.throughput_concurrency, args.update_every = 4, 1.0
        args.throughput_seconds = min(args.throughput_seconds, 2.0)
    shrink_if_tiny(args)
    args.name = args.name or OWN_FILES.get(args.parts[0]) or f"weight_sync_{args.shape}"
    return args


def main(arguments: list[str] | None = None) -> int:
    return run_and_report(parse(arguments), Benchmark, report)


if __name__ == "__main__":
    sys.exit(main())
