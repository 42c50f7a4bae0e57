"""Trainer and vLLM on one GPU with one copy of the weights: what is gained by taking turns with the
keys' and values' memory?

    python bench/colocate.py --output DIR                       1 GPU
    python bench/colocate.py --output DIR --tiny --device cpu   everything but the figures, without a GPU

Once with turns and once without. The first figure is the number of tokens that one forward and
backward pass can hold. It is doubled until memory runs out, then halved in between three times.
Others are the tokens trained per second at that size and at the largest that both can do. The last
ones are the seconds of a turn beyond the step, and the bytes that vLLM gives back. Requests are in
flight all the time. Writes colocate.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.gpu.processes import BenchError, Worker
from bench.gpu.runs import (
    ASK_SECONDS,
    LoadedSitting,
    common_options,
    load_options,
    run_and_report,
    shrink_if_tiny,
)
from bench.gpu.shapes import model_bytes, write_model_folder
from bench.gpu.summary import table
from bench.gpu.vllm_server import VllmServer
from bench.measured import Options, command_line

MODES = ("turns", "beside each other")
LENGTH = 2048
"""Tokens of a sequence."""


class Benchmark(LoadedSitting):
    """One server and one trainer after the other, in either mode."""

    def run(self) -> None:
        """Measure both modes, and each again at the largest size that both can do."""
        args = self.args
        folder = write_model_folder(self.work / "model", args.shape)
        self.describe(
            shape=args.shape,
            model_bytes=model_bytes(args.shape),
            cache_gib=args.cache_gib,
            length=args.length,
        )
        for mode in MODES:
            server, trainer = self._begin(mode, folder)
            with self.loaded(server, args.concurrency[0], args.ramp) as seen:
                found = self.results.measure(mode, "longest", run=partial(self._longest, trainer))
                if found is not None:
                    self.results.measure(
                        mode, "at_the_longest", run=partial(self._steps, trainer, found["tokens"])
                    )
            self.results.put(mode, "request_failures", value=seen["failures"])
            self.results.put(mode, "served_version", value=server.state()["weight_version"])
            trainer.stop()
            server.stop()
        self._same_size(folder)

    def _begin(self, mode: str, folder: Path) -> tuple[VllmServer, Worker]:
        args, turns = self.args, mode == "turns"
        flags: tuple[str, ...] = ("--colocate",) if turns else ()
        if not self.on_gpu:
            flags += ("--num-gpu-blocks-override", "256")
        name = mode.replace(" ", "-")
        server = self.server(
            f"vllm {name}", folder, cache_gib=args.cache_gib, max_model_len=4096, flags=flags
        )
        self.results.put(mode, "seconds_to_ready", value=next(iter(self.ready(server).values())))
        trainer = self.trainer(f"trainer {name}", "bench.gpu.turns_trainer", server.port)
        trainer.ask("load", timeout=180, optimizer=True)
        trainer.ask(
            "connect", timeout=180, kind="single_copy", **({"colocate": True} if turns else {})
        )
        return server, trainer

    def _longest(self, trainer: Worker) -> dict[str, Any]:
        """Find the most tokens of one pass, to an eighth; `why` gives the reason for the end."""

        def out_of_memory(tokens: int) -> str | None:
            found = trainer.ask(
                "steps", timeout=2 * ASK_SECONDS, count=1, tokens=tokens, length=self.args.length
            )
            return found.get("out_of_memory")

        found = longest(out_of_memory, self.args.length, self.args.most)
        if not found["tokens"]:
            raise BenchError(f"not even the shortest pass fits: {found['why']}")
        return found

    def _steps(self, trainer: Worker, tokens: int) -> dict[str, Any]:
        found = trainer.ask(
            "steps",
            timeout=3 * ASK_SECONDS,
            count=self.args.updates,
            tokens=tokens,
            length=self.args.length,
        )
        if "out_of_memory" in found:
            raise BenchError(
                f"{tokens} tokens fitted once and do not now: {found['out_of_memory']}"
            )
        return summary(found, tokens)

    def _same_size(self, folder: Path) -> None:
        """With turns at the size that fits without them."""
        same = self.results.data.get(MODES[1], {}).get("longest", {}).get("tokens")
        if not same or same == self.results.data.get(MODES[0], {}).get("longest", {}).get("tokens"):
            return
        server, trainer = self._begin(MODES[0], folder)
        with self.loaded(server, self.args.concurrency[0], self.args.ramp):
            self.results.measure(MODES[0], "at_the_same", run=partial(self._steps, trainer, same))


def longest(refusal: Callable[[int], str | None], shortest: int, most: int) -> dict[str, Any]:
    """The largest size that is not refused, found by doubling, then by halving the rest three
    times.

    Args:
        refusal: why a size does not fit; None: it does.
        shortest: the first size that is tried; all are multiples of it.
        most: larger ones are not tried.

    Returns:
        tokens, 0 if not even the shortest fits; why a larger one was not taken.
    """
    fits, tried, why = 0, shortest, f"--most {most}"
    while tried <= most:
        refused = refusal(tried)
        if refused is not None:
            why = f"{tried}: {refused}"
            break
        fits, tried = tried, 2 * tried
    else:
        return {"tokens": fits, "why": why}
    for _ in range(3):
        middle = (fits + tried) // 2 // shortest * shortest
        if middle <= fits:
            break
        refused = refusal(middle)
        if refused is None:
            fits = middle
        else:
            tried, why = middle, f"{middle}: {refused}"
    return {"tokens": fits, "why": why}


def summary(found: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Medians over the steps of one size, the first left out if there are others.

    Returns:
        tokens; seconds of a step; tokens_per_second; peak_reserved_bytes; and with turns seconds of
        a turn, rest and wake, and freed_bytes.
    """
    rows = found["steps"][1:] or found["steps"]
    seconds = statistics.median(row["seconds"] for row in rows)
    turn = {key: statistics.median(row["turn"][key] for row in rows) for key in rows[0]["turn"]}
    return {
        "tokens": tokens,
        "steps": len(rows),
        "seconds": round(seconds, 4),
        "tokens_per_second": round(found["tokens"] / seconds, 1),
        "peak_reserved_bytes": max(row["peak_reserved_bytes"] for row in rows),
        **{f"turn_{key}": round(value, 4) for key, value in turn.items()},
    }


def report(data: dict[str, Any]) -> str:
    """The table of a results file."""
    rows = []
    for mode in MODES:
        for size in ("at_the_longest", "at_the_same"):
            row = data.get(mode, {}).get(size, {})
            if "seconds" in row:
                freed = row.get("turn_freed_bytes")
                figures = [row.get(f"turn_{key}") for key in ("seconds", "rest", "wake")]
                figures.append(None if freed is None else round(freed / 2**30, 2))
                rows.append(
                    [mode, row["tokens"], row["tokens_per_second"], row["seconds"], *figures]
                )
    head = [
        "",
        "tokens of a pass",
        "trained tokens/s",
        "step s",
        "turn s",
        "rest s",
        "wake s",
        "given back GiB",
    ]
    if not rows:
        return "nothing was measured"
    return table(head, rows)


OPTIONS: Options = {
    "--cache-gib": {"type": int, "default": 32, "help": "of keys and values"},
    "--length": {"type": int, "default": LENGTH, "help": "tokens of a sequence"},
    "--most": {"type": int, "default": 1 << 18, "help": "tokens of a pass, at most"},
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    common = common_options("colocate", "qwen3-1.7b")
    parser = command_line(__doc__, common | OPTIONS | load_options([64], updates=5))
    args = shrink_if_tiny(parser.parse_args(arguments))
    if args.tiny:
        args.length, args.most = 64, 256
    return args


def main(arguments: list[str] | None = None) -> int:
    return run_and_report(parse(arguments), Benchmark, report)


if __name__ == "__main__":
    sys.exit(main())
