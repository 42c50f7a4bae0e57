"""How long would an update of a fleet take that we do not have? Computed from what was measured,
with the formula written out.

    python bench/fleet_on_paper.py                                               72B to 32 servers of TP 4 from 32 trainer GPUs
    python bench/fleet_on_paper.py --servers 64 --tp 8 --trainer-gpus 64 --output FILE

Measured (bench/results): what share of NCCL's own broadcast our transfer reaches, how fast sums and
copies run on a GPU, and how long a server under load takes for its answers. Assumed, and said in
the output: what NCCL gets out of a network interface.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from bench.gpu.shapes import SHAPES, model_bytes, shard_shapes
from bench.gpu.summary import table
from bench.measured import measured as stamp
from bench.measured import put_into
from vllm_patching.protocol.pieces import BUCKET_BYTES

RESULTS = ROOT / "bench" / "results"
SOURCE = "weight_sync_qwen2.5-14b_crossed.json"
NCCL_CHUNK = 512 << 10
"""Bytes that a member of NCCL's ring hands on at once: its buffer of 4 MiB in eight steps
(NCCL_BUFFSIZE, NCCL_STEPS)."""

FORMULA = """\
rank_bytes    = bytes of one of vLLM's ranks (its tensor-parallel share of all layers)
senders       = trainer GPUs W / TP: those of one cohort, with a lane each
lane_bytes    = rank_bytes / senders
nic           = line rate x what NCCL gets out of it (assumed) x what our transfer gets out of NCCL (measured)
receive       = rank_bytes / nic: a receiver's interface takes in all lanes of its rank, and hands them on at the same time
send          = (lane_bytes + lane_bytes x (W - 1) / W) / nic: a trainer GPU's lane, and what it hands to the others (FSDP2)
fill          = buckets of a lane x servers x chunk / nic / senders: until a bucket is at the ring's end; other lanes go on
transfer      = max(receive, send) + fill + bucket / nic: the first is gathered alone, all others while the one before is sent
sums          = bucket / sums per second (measured): of the last; all others are summed while the next arrives
begin, commit = a server's answers under load (measured); all servers are asked at the same time
direct        : begin + transfer + sums + commit; generation stands still for all of it but begin
overlapped    : the same + copy, copy = rank_bytes / copies per second (measured); it stands still for copy + commit
A client's gap is as long as generation stands still; with --inflight-cache recompute, keys and values come on top."""


@dataclass(frozen=True)
class Measured:
    """What two GPUs told, of the 14B model from FSDP2 over two ranks to two.

    Attributes:
        share_of_nccl: our transfer's bytes per second by those of NCCL's broadcast alone.
        sums, copies: bytes per second of one GPU: its part summed up, and copied from the staging
            buffer to the live weights.
        begin, commit: seconds that a server with 64 requests in flight takes to answer.
    """

    share_of_nccl: float
    sums: float
    copies: float
    begin: float
    commit: float


@dataclass(frozen=True)
class Fleet:
    """What is to be computed.

    Attributes:
        shape: a key of SHAPES.
        servers, tp: how many, of how many GPUs each.
        trainer_gpus: FSDP2's ranks; a multiple of tp.
        gbit: line rate of each GPU's own network interface.
        nccl_share: of the line rate that NCCL's broadcast reaches; assumed.
    """

    shape: str = "qwen2.5-72b"
    servers: int = 32
    tp: int = 4
    trainer_gpus: int = 32
    gbit: float = 400.0
    nccl_share: float = 0.9


def read_measured(path: Path = RESULTS / SOURCE) -> Measured:
    """From a results file of bench/weight_sync.py with --crossed."""
    data = json.loads(path.read_text())
    direct, overlapped = data["bridge"]["direct"], data["bridge"]["overlapped"]
    part = data["model_bytes"] / data["tensor_parallel_size"]
    idle, loaded = direct["idle"]["phases_ms"], direct["load_64"]["phases_ms"]
    rate = (
        data["model_bytes"] / idle["transfer"]["median"] / 1e6
    )  # GB/s, both ranks at the same time
    return Measured(
        share_of_nccl=rate / data["ceiling"]["broadcast_gb_per_s"],
        sums=part / idle["checksum"]["median"] * 1e3,
        copies=part / overlapped["idle"]["server_ms"]["to_committed"]["median"] * 1e3,
        begin=(loaded["prepare"]["median"] + loaded["pause"]["median"]) / 1e3,
        commit=loaded["commit"]["median"] / 1e3,
    )


def update_seconds(fleet: Fleet, measured: Measured) -> dict[str, float]:
    """The terms of FORMULA, in seconds (bytes where the name says so).

    Raises:
        ValueError: the trainer's GPUs are no multiple of the servers'.
    """
    if fleet.trainer_gpus % fleet.tp:
        raise ValueError(
            f"{fleet.trainer_gpus} trainer GPUs are no multiple of TP {fleet.tp}: lanes would differ in length"
        )
    itemsize = model_bytes(fleet.shape) / sum(
        math.prod(shape) for shape in shard_shapes(fleet.shape)
    )
    rank_bytes = itemsize * sum(
        math.prod(shape) for shape in shard_shapes(fleet.shape, 0, fleet.tp)
    )
    senders = fleet.trainer_gpus // fleet.tp
    lane_bytes = rank_bytes / senders
    nic = fleet.gbit * 1e9 / 8 * fleet.nccl_share * measured.share_of_nccl
    receive = rank_bytes / nic
    handed = lane_bytes * (fleet.trainer_gpus - 1) / fleet.trainer_gpus
    send = (lane_bytes + handed) / nic
    buckets = math.ceil(lane_bytes / BUCKET_BYTES)
    fill = buckets * fleet.servers * NCCL_CHUNK / nic / senders
    transfer = max(receive, send) + fill + BUCKET_BYTES / nic
    copy, sums = rank_bytes / measured.copies, BUCKET_BYTES / measured.sums
    direct = measured.begin + transfer + sums + measured.commit
    return {
        "rank_bytes": rank_bytes,
        "lane_bytes": lane_bytes,
        "receive": receive,
        "send": send,
        "fill": fill,
        "transfer": transfer,
        "copy": copy,
        "direct_stands_still": transfer + sums + measured.commit,
        "direct_whole": direct,
        "overlapped_stands_still": copy + measured.commit,
        "overlapped_whole": direct + copy,
    }


def report(fleet: Fleet, measured: Measured, found: dict[str, float]) -> str:
    """Formula, what was put in, and the table: how long generation stands still comes first."""
    rows: list[list[object]] = []
    for name in ("direct", "overlapped"):
        seconds = [found[f"{name}_stands_still"], found[f"{name}_whole"], found["transfer"]]
        rows.append([name, *(round(value * 1e3, 1) for value in seconds)])
    head = ["transfer", "generation stands still ms", "whole update ms", "of it the transfer ms"]
    m = measured
    return "\n".join(
        [
            f"ON PAPER: {fleet.shape}, {fleet.servers} servers of TP {fleet.tp} from {fleet.trainer_gpus} trainer GPUs",
            FORMULA,
            f"assumed: an interface of {fleet.gbit:g} Gbit/s for every GPU, out of which NCCL gets {fleet.nccl_share:.0%}",
            f"measured ({SOURCE}): our transfer reaches {m.share_of_nccl:.1%} of NCCL's broadcast,",
            f"  sums {m.sums / 1e9:.0f} GB/s, copies {m.copies / 1e9:.0f} GB/s",
            f"  begin {m.begin * 1e3:.1f} ms, commit {m.commit * 1e3:.1f} ms",
            f"rank_bytes {found['rank_bytes'] / 1e9:.2f} GB, "
            + _milliseconds(found, "receive", "send", "fill", "copy"),
            table(head, rows),
        ]
    )


def _milliseconds(found: dict[str, float], *names: str) -> str:
    return ", ".join(f"{name} {found[name] * 1e3:.1f} ms" for name in names)


def to_json(fleet: Fleet, measured: Measured, found: dict[str, float]) -> dict[str, Any]:
    """What a results file keeps of it."""
    return {
        "fleet": asdict(fleet),
        "from": SOURCE.removesuffix(".json"),
        "measured_there": asdict(measured),
        "formula": FORMULA.splitlines(),
        "found": found,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    default = Fleet()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default=default.shape)
    parser.add_argument("--servers", type=int, default=default.servers)
    parser.add_argument("--tp", type=int, default=default.tp)
    parser.add_argument("--trainer-gpus", type=int, default=default.trainer_gpus)
    parser.add_argument(
        "--gbit", type=float, default=default.gbit, help="line rate of a GPU's network interface"
    )
    parser.add_argument(
        "--nccl-share", type=float, default=default.nccl_share, help="of it that NCCL reaches"
    )
    parser.add_argument("--output", type=Path, help="a results file to put it into, under on_paper")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    fleet = Fleet(args.shape, args.servers, args.tp, args.trainer_gpus, args.gbit, args.nccl_share)
    measured = read_measured()
    found = update_seconds(fleet, measured)
    print(report(fleet, measured, found))
    if args.output:
        put_into(args.output, "on_paper", {**to_json(fleet, measured, found), "measured": stamp()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
