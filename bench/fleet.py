"""What does an update of several servers take, against one; and how long does a client wait for its
next token?

    python bench/fleet.py --output DIR --device cpu --parts servers clients      1, 2, 4, 8 servers as processes, without GPUs
    python bench/fleet.py --output DIR --parts clients engine                    2 GPUs: clients and vLLM's own engine
    python bench/fleet.py --output DIR --parts servers --concurrency 64          3 GPUs or more: 1, 2, … servers, one on each
    python bench/fleet.py --output DIR --device cpu --tiny                       everything but the figures

Parts: servers: whole updates of 1, 2, … servers. Without GPUs, of light ones (the bridge's own
routes, updater and checks, no engine of vLLM's) and of two real ones; with GPUs, of real ones, each
on a GPU of its own, all under load, and by vLLM's own NCCL weight-transfer engine, measured alike.
clients: one server under load, with keys and values anew (`recompute`) and kept (`keep`), and what
its engine computes anew after an update. engine: vLLM's own there. Prints tables and writes
fleet.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from bench.gpu import engine_clock
from bench.gpu.light_fleet import LightFleet
from bench.gpu.processes import BenchError, Worker
from bench.gpu.runs import (
    ASK_SECONDS,
    TRAINER_TIMEOUT,
    LoadedSitting,
    add_load,
    command_line,
    figures,
    run_and_report,
    shrink_if_tiny,
)
from bench.gpu.shapes import model_bytes, write_model_folder
from bench.gpu.summary import result_table, updates_of
from bench.gpu.trainer import trainer_arguments
from bench.gpu.vllm_server import VllmServer

PARTS = ("servers", "clients", "engine")
INFLIGHT = ("recompute", "keep")
LIGHT_SHAPES = ("tiny", "100mb")
OWN_ENGINE: dict[str, Any] = {
    "flags": ("--weight-transfer-config", '{"backend": "nccl"}'),
    "shared": False,
    "environment": (("VLLM_SERVER_DEV_MODE", "1"),),
}
"""How a server is started for vLLM's own engine."""


class Benchmark(LoadedSitting):
    """The servers, the trainers and the load of one run."""

    def __init__(self, args: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        super().__init__(args, work, stack, args.name)
        self.more_loads: list[Worker] = []
        self.model = write_model_folder(work / "model", args.shape)

    def run(self) -> None:
        """Everything that was asked for."""
        self.describe(
            shape=self.args.shape,
            model_bytes=model_bytes(self.args.shape),
            load_before=os.getloadavg(),
        )
        if "clients" in self.args.parts:
            self._clients()
        if "engine" in self.args.parts and self.on_gpu:
            self._engine()
        if "servers" in self.args.parts and self.on_gpu:
            self._own_gpus()
        elif "servers" in self.args.parts:
            for shape in LIGHT_SHAPES:
                self._light(shape)
        self.results.put("load_after", value=os.getloadavg())

    # -- a client's view

    def _clients(self) -> None:
        """Both settings of --inflight-cache; the second server mirrored, so that no GPU holds a
        server and its own trainer.
        """
        servers = {
            name: self._start(name, ("--inflight-cache", name), name == "keep", steps=True)
            for name in INFLIGHT
        }
        trainers = {
            name: self._trainer(f"trainer {name}", "bench.gpu.trainer", server)
            for name, server in servers.items()
        }
        self.results.put("seconds_to_ready", value=self.ready(*servers.values()))
        for name, server in servers.items():
            trainer = trainers[name]
            if (
                self.results.measure(
                    "clients",
                    name,
                    "trainer",
                    run=partial(trainer.ask, "load", timeout=180, spare=True),
                )
                is None
            ):
                continue
            self.warm_up(server, max(self.args.concurrency))
            for transfer in self.args.transfers:
                self._under_loads(
                    server,
                    trainer,
                    ("clients", name, transfer),
                    {"kind": "broadcast", "transfer": transfer},
                )
        if "servers" in self.args.parts and not self.on_gpu:
            both = {
                "kind": "broadcast",
                "transfer": "overlapped",
                "ports": [server.port for server in servers.values()],
            }
            self._under_loads(
                servers["recompute"],
                trainers["recompute"],
                ("clients", "recompute", "overlapped, two servers"),
                both,
            )
        for name in INFLIGHT:
            trainers[name].stop()
            servers[name].stop()

    def _under_loads(
        self, server: VllmServer, trainer: Worker, place: tuple[str, ...], how: dict[str, Any]
    ) -> None:
        measure = partial(self.results.measure, *place)
        if (
            measure("connect", run=partial(trainer.ask, "connect", timeout=ASK_SECONDS, **how))
            is None
        ):
            return
        measure(
            "idle",
            run=lambda: figures(trainer.ask("sync", timeout=ASK_SECONDS, count=self.args.updates)),
        )
        for concurrency in self.args.concurrency:
            under_load = partial(
                self.under_load,
                server,
                trainer,
                concurrency,
                first_steps=True,
                steps=self._steps(server.name),
            )
            measure(f"load_{concurrency}", run=under_load)
        if "ports" not in how:
            measure("check", run=lambda: self.check(trainer))

    def _engine(self) -> None:
        """vLLM's own NCCL weight-transfer engine, with the same model, weights and load."""
        server = self._start("vllm own engine", **OWN_ENGINE)
        trainer = self._trainer(
            "trainer of vllm own engine", "bench.gpu.vllm_engine_trainer", server
        )
        measure = partial(self.results.measure, "vllm_engine")
        self.ready(server)
        measure("model", run=lambda: trainer.ask("load", timeout=180, spare=True))
        self.warm_up(server, max(self.args.concurrency))
        if measure("join", run=lambda: trainer.ask("join", timeout=180)) is not None:
            measure(
                "idle",
                run=lambda: figures(
                    trainer.ask("sync", timeout=ASK_SECONDS, count=self.args.updates)
                ),
            )
            for concurrency in self.args.concurrency:
                measure(
                    f"load_{concurrency}",
                    run=partial(self.under_load, server, trainer, concurrency),
                )
        trainer.stop()
        server.stop()

    def _steps(self, name: str) -> Path:
        """Where a server's engine notes its steps."""
        return self.work / f"steps-{name}.txt"

    def _start(
        self,
        name: str,
        flags: tuple[str, ...] = (),
        mirrored: bool = False,
        steps: bool = False,
        gpu: str = "",
        **options: Any,
    ) -> VllmServer:
        seats = max(256, *self.args.concurrency)
        if steps:
            options["environment"] = tuple(
                engine_clock.variables(self._steps(name), engine_clock.STEPS_FILE).items()
            )
        # Nobody is preempted for want of room, whose keys and values would be computed anew without
        # an update.
        room = {"max_num_seqs": seats, "cache_gib": 16 * math.ceil(seats / 256)}
        return self.server(
            name, self.model, gpu or ("1" if mirrored else "0"), flags=flags, **room, **options
        )

    def _trainer(self, name: str, module: str, server: VllmServer) -> Worker:
        gpu = "1" if server.options.gpus == "0" else "0"
        return self.trainer(name, module, server.port, gpu)

    # -- several servers

    def _own_gpus(self) -> None:
        """Whole updates of 1, 2, … vLLM servers, each on a GPU of its own, by a trainer on the
        first; then by vLLM's engine.
        """
        most, gpus = max(self.args.servers), torch.cuda.device_count()
        if most >= gpus:
            raise BenchError(
                f"--servers {most} needs {most + 1} GPUs, one for the trainer and one for each server: {gpus} are here"
            )
        servers = [self._start(f"vllm {number}", gpu=str(number)) for number in range(1, most + 1)]
        ports = [server.port for server in servers]
        trainer = self._trainer("trainer of several", "bench.gpu.trainer", servers[0])
        self.results.put("seconds_to_ready", value=self.ready(*servers))
        self._warm_up_all(servers)
        measure = partial(self.results.measure, "servers", self.args.shape)
        if measure("trainer", run=lambda: trainer.ask("load", timeout=180, spare=True)) is not None:
            for transfer in self.args.transfers:
                for count in self.args.servers:
                    how = {"kind": "broadcast", "transfer": transfer, "ports": ports[:count]}
                    self._several(
                        servers[:count],
                        trainer,
                        (transfer, str(count)),
                        partial(trainer.ask, "connect", **how),
                    )
        for started in (trainer, *servers):
            started.stop()

        servers = [
            self._start(f"vllm own engine {number}", gpu=str(number), **OWN_ENGINE)
            for number in range(1, most + 1)
        ]
        self.ready(*servers)
        self._warm_up_all(servers)
        for count in reversed(
            self.args.servers
        ):  # each number with a trainer of its own: a group is met once
            own, *more = servers[:count]
            trainer = self._trainer(
                f"trainer of vllm own engine {count}", "bench.gpu.vllm_engine_trainer", own
            )
            if measure(
                "vLLM's own engine",
                str(count),
                "trainer",
                run=partial(trainer.ask, "load", timeout=180, spare=True),
            ):
                join = partial(trainer.ask, "join", others=[server.port for server in more])
                self._several(servers[:count], trainer, ("vLLM's own engine", str(count)), join)
            trainer.stop()

    def _several(
        self,
        servers: list[VllmServer],
        trainer: Worker,
        place: tuple[str, str],
        connect: Callable[..., Any],
    ) -> None:
        """Updates of these servers, idle and with so many requests in flight at each, and whether
        all hold what was sent.
        """
        measure = partial(self.results.measure, "servers", self.args.shape, *place)
        if measure("connect", run=partial(connect, timeout=ASK_SECONDS)) is None:
            return
        measure(
            "idle",
            run=lambda: figures(trainer.ask("sync", timeout=ASK_SECONDS, count=self.args.updates)),
        )
        for concurrency in self.args.concurrency:
            with self._loaded_too(servers[1:], concurrency):
                measure(
                    f"load_{concurrency}",
                    run=partial(self.under_load, servers[0], trainer, concurrency),
                )
        measure("check", run=lambda: self._checked(servers, trainer))

    def _checked(self, servers: list[VllmServer], trainer: Worker) -> dict[str, Any]:
        """Raise BenchError unless every server samples what the trainer's weights say."""
        found = [
            trainer.ask("check", timeout=ASK_SECONDS, seed=1, port=server.port)
            for server in servers
        ]
        if not all(row["new_not_old"] and row.get("checksums_equal", True) for row in found):
            raise BenchError(f"not all servers hold the weights that were sent: {found}")
        return {
            "servers": len(found),
            "largest_difference": max(
                row["mean_logprob_difference_to_new_weights"] for row in found
            ),
        }

    def _warm_up_all(self, servers: list[VllmServer]) -> None:
        with self._loaded_too(servers[1:], max(self.args.concurrency)):
            self.warm_up(servers[0], max(self.args.concurrency))

    @contextmanager
    def _loaded_too(self, servers: list[VllmServer], concurrency: int) -> Iterator[None]:
        """Keep so many requests in flight at each of these, too."""
        with ExitStack() as loads:
            for number, server in enumerate(servers):
                if number == len(self.more_loads):
                    self.more_loads.append(
                        self.worker(f"load {number + 2}", "bench.gpu.load", gpus="")
                    )
                loads.enter_context(self.loaded(server, concurrency, 0.0, self.more_loads[number]))
            yield

    def _light(self, shape: str) -> None:
        """Whole updates of 1, 2, 4, … light servers by one trainer."""
        fleet = LightFleet(shape, self.args.output, TRAINER_TIMEOUT)
        self.stack.callback(fleet.stop)
        ports = [
            fleet.start(self.work / f"light-{shape}-{number}")
            for number in range(max(self.args.servers))
        ]
        arguments = trainer_arguments(shape, ports[0], self.args.device, TRAINER_TIMEOUT)
        trainer = self.worker(f"trainer of {shape}", "bench.gpu.trainer", arguments)
        measure = partial(self.results.measure, "servers", shape)
        if measure("trainer", run=lambda: trainer.ask("load", timeout=180, spare=True)) is None:
            return
        for transfer in self.args.transfers:
            for count in self.args.servers:
                place = (transfer, str(count))
                how = {"kind": "broadcast", "transfer": transfer, "ports": ports[:count]}
                connect = partial(trainer.ask, "connect", timeout=ASK_SECONDS, **how)
                if measure(*place, "connect", run=connect) is not None:
                    measure(
                        *place,
                        "idle",
                        run=lambda: figures(
                            trainer.ask("sync", timeout=ASK_SECONDS, count=self.args.updates)
                        ),
                    )
        trainer.stop()
        fleet.stop()


def times_one(found: dict[str, Any], condition: str = "idle") -> dict[str, float]:
    """How many times as long an update of N servers takes as that of one: {N: ratio of the
    medians}.

    Args:
        found: rows of one shape and transfer, by the number of servers.
        condition: idle, or under which load.
    """
    medians = {
        number: row[condition]["whole_update_ms"]["median"]
        for number, row in found.items()
        if "whole_update_ms" in row.get(condition, {})
    }
    if "1" not in medians:
        return {}
    return {number: round(median / medians["1"], 2) for number, median in medians.items()}


CLIENT_COLUMNS = {
    "longest gap between two tokens at a client, per update: median ms": (
        "largest_gap_per_update_ms/median"
    ),
    "p90": "largest_gap_per_update_ms/p90",
    "max": "largest_gap_per_update_ms/max",
    "usual gap ms": "usual_gap_ms/median",
    "the trainer waits: median ms": "whole_update_ms/median",
    "max ": "whole_update_ms/max",
    "halted ms": "halted_ms/median",
    "to the first step ms": "stalled_ms/median",
    "tokens computed anew": "computed_anew/tokens",
    "ms for them": "computed_anew/ms/median",
    "updates": "updates",
}
SERVER_COLUMNS = {
    "the trainer waits: median ms": "whole_update_ms/median",
    "p90": "whole_update_ms/p90",
    "max": "whole_update_ms/max",
    "halted ms": "halted_ms/median",
    "gap at a client ms": "largest_gap_per_update_ms/median",
    "times one server": "times_one",
    "updates": "updates",
}


def report(data: dict[str, Any]) -> str:
    """Format the tables of a results file; the figures of a client come first."""
    sides = {
        f"{name}, {way}": row
        for name, part in data.get("clients", {}).items()
        for way, row in part.items()
        if way != "trainer"
    }
    if "vllm_engine" in data:
        sides["vLLM's engine"] = data["vllm_engine"]
    lines = result_table(updates_of(sides), CLIENT_COLUMNS)
    servers: dict[str, Any] = {}
    for shape, by_transfer in data.get("servers", {}).items():
        for transfer, by_number in by_transfer.items():
            if transfer != "trainer":
                servers |= _rows_of_servers(f"{shape}, {transfer}", by_number)
    lines += result_table(servers, SERVER_COLUMNS, "servers")
    loads = (data.get("load_before"), data.get("load_after"))
    return "\n".join([*lines, "load of the machine before and after: {}, {}".format(*loads)])


def _rows_of_servers(title: str, by_number: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the results of updates, each with its ratio to that of one server."""
    sides = {f"{title}, {number} servers": part for number, part in by_number.items()}
    rows = {}
    for label, row in updates_of(sides).items():
        side, condition = label.rsplit(", ", 1)
        number = side.rsplit(", ", 1)[1].split()[0]
        rows[label] = {**row, "times_one": times_one(by_number, condition).get(number)}
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, "qwen3-1.7b", "fleet")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--servers",
        type=int,
        nargs="+",
        help="how many; by default 1, 2, 4, 8, or one for each GPU but one",
    )
    parser.add_argument("--transfers", nargs="+", default=["direct", "overlapped"])
    add_load(parser, [256, 512], 0.5)
    parser.set_defaults(shape=None, concurrency=None)
    args = parser.parse_args(arguments)
    on_gpu = args.device == "cuda"
    # Two servers and their trainers must fit into a small machine's memory, and its cores into the
    # load.
    args.shape = args.shape or ("qwen3-1.7b" if on_gpu else "100mb")
    args.concurrency = args.concurrency or ([256, 512] if on_gpu else [8])
    args.servers = args.servers or (
        list(range(1, max(2, torch.cuda.device_count()))) if on_gpu else [1, 2, 4, 8]
    )
    if args.tiny:
        args.servers = [count for count in args.servers if count <= 2]
    return shrink_if_tiny(args)


def main() -> int:
    args = parse()
    return run_and_report(args.output, partial(Benchmark, args), report)


if __name__ == "__main__":
    sys.exit(main())
