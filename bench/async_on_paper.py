"""What would 1,000 generators need? Computed from what bench/async_scaling.py measured, with the
formula written out.

    python bench/async_on_paper.py bench/results/async.json                  from its `scaling`, into `on_paper` there
    python bench/async_on_paper.py bench/results/async.json --generators 5000

Everything is of one machine's processor for the service, and of one H200 for a generator and a
trainer's GPU. Slower models are assumed to sample, and to train, as much slower as they have more
parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.gpu.summary import table
from bench.measured import measured as stamp
from bench.measured import put_into

GENERATORS = (1, 10, 100, 1000)
SIZES = {"1.7B": 1.0, "32B": 32.8 / 1.72}
"""How many times as slow as the model that was measured, by parameters; assumed."""
TRAINER = (
    "trainer_speed",
    "cases/1.7B, groups of 8, prompt shared/step/sequence_tokens_per_second",
)

FORMULA = """\
groups/s       = generators x tokens/s of one / (sequences of a group x tokens of a sequence)
service        = groups/s / groups/s at which one rollout service was full: as many services, each with its own trainer's batch
wire           = groups/s x bytes of a group as it is posted
trainer GPUs   = generators x tokens/s of one / tokens/s that a GPU trains on
one service is full at (its groups/s) x (tokens of a group) / (tokens/s of a generator) generators"""


@dataclass(frozen=True)
class Measured:
    """What the figures follow from.

    Attributes:
        tokens_per_second: that a generator samples.
        group_tokens: sampled tokens of a group.
        body_bytes: of a group on the wire.
        service_groups: groups a second at which a service was full, its trainer taking all of them.
        trained_tokens: sequence tokens a second that a trainer's GPU trains on.
    """

    tokens_per_second: float
    group_tokens: float
    body_bytes: float
    service_groups: float
    trained_tokens: float


def need(generators: int, times_slower: float, of: Measured) -> dict[str, float]:
    """The terms of FORMULA for so many generators of a model that is so many times slower."""
    rate = of.tokens_per_second / times_slower
    groups = generators * rate / of.group_tokens
    return {
        "generators": generators,
        "tokens_per_second": generators * rate,
        "groups_per_second": groups,
        "services": groups / of.service_groups,
        "wire_mb_per_second": groups * of.body_bytes / 1e6,
        "trainer_gpus": math.ceil(round(generators * rate * times_slower / of.trained_tokens, 6)),
    }


def full_at(times_slower: float, of: Measured) -> float:
    """Generators that fill one service."""
    return of.service_groups * of.group_tokens * times_slower / of.tokens_per_second


def read(scaling: Mapping[str, Any]) -> Measured:
    """From the data of bench/async_scaling.py, and the trainer's speed in bench/results."""
    simulated, service = scaling["settings"]["simulated"], scaling["saturation"]["service"]
    speed: Any = json.loads(
        (ROOT / "bench" / "results" / f"{TRAINER[0]}.json").read_text(encoding="utf-8")
    )
    for key in TRAINER[1].split("/"):
        speed = speed[key]
    rates = [
        service["trained_groups_per_second"],
        *(row["groups_per_second"] for row in scaling["generators"].values()),
    ]
    return Measured(
        tokens_per_second=simulated["tokens_per_second"],
        group_tokens=simulated["group"] * simulated["tokens"],
        body_bytes=service["body_bytes"],
        service_groups=max(rates),
        trained_tokens=speed,
    )


def from_measured(
    scaling: Mapping[str, Any], generators: Sequence[int] = GENERATORS
) -> dict[str, Any]:
    """What a results file keeps of it."""
    of = read(scaling)
    return {
        "formula": FORMULA.splitlines(),
        "measured_there": asdict(of),
        "assumed": "a model samples and trains as much slower as it has more parameters",
        "full_at": {size: round(full_at(times, of), 1) for size, times in SIZES.items()},
        "found": {
            size: {str(n): need(n, times, of) for n in generators} for size, times in SIZES.items()
        },
        "measured": stamp(),
    }


def report(data: Mapping[str, Any]) -> str:
    """Formula, what was put in, and the table."""
    rows: list[list[object]] = [
        [
            size,
            number,
            *(
                round(found[key], 2)
                for key in ("groups_per_second", "services", "wire_mb_per_second", "trainer_gpus")
            ),
        ]
        for size, by_number in data["found"].items()
        for number, found in by_number.items()
    ]
    head = ["", "generators", "groups/s", "of a service", "wire MB/s", "trainer GPUs"]
    full = ", ".join(f"{generators:g} of {size}" for size, generators in data["full_at"].items())
    lines = [
        "ON PAPER",
        *data["formula"],
        f"assumed: {data['assumed']}",
        f"measured: {data['measured_there']}",
    ]
    return "\n".join([*lines, table(head, rows), f"one service is full at {full}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="the file with `scaling`")
    parser.add_argument("--generators", type=int, nargs="+", default=list(GENERATORS))
    args = parser.parse_args(arguments)
    scaling = json.loads(args.results.read_text(encoding="utf-8"))["scaling"]
    found = from_measured(scaling, args.generators)
    print(report(found))
    put_into(args.results, "scaling", {**scaling, "on_paper": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
