"""Tables of docs/weight-bridge.md out of bench/results/: what an update makes a trainer and a
client wait for, first of all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from bench.results_book import Book, FigureError, commit_of

SYNC_17B = "weight_sync_qwen3-1.7b"
THROUGHPUT = "weight_sync_qwen3-1.7b_throughput_"
CONDITIONS = {"idle": "idle", "load_64": "64 requests in flight", "load_256": "256"}
OLD_CLOCK = (
    "vLLM's engine was timed then with a new HTTP client for the longest of its calls, which costs tens of milliseconds, and "
    "without the write of the weights."
)
"""Holds for the rows of vLLM's engine that have no commit of their own."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


LONG = 4
"""So many rows of a table are named one by one as those of a run."""


def sources(book: Book, places: Mapping[str, tuple[str, str]]) -> str:
    """One line on where a table's rows come from.

    Args:
        places: for each side of the table, a file and a path in it.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for side, (file, path) in places.items():
        row = book.measured(file, path)
        found.setdefault((commit_of(row), row["date"].split()[0], row["run"]), []).append(side)
    if len(found) == 1:
        ((commit, date, _),) = found
        return f"One run of {date}, {commit}."
    most = max(found.values(), key=len)  # of long tables only the exceptions are named
    parts = []
    for (commit, date, _), sides in sorted(
        found.items(), key=lambda item: len(item[1]) > LONG and item[1] is most
    ):
        names = "all others" if sides is most and len(sides) > LONG else ", ".join(sides)
        parts.append(f"{names}: {date}, {commit}")
    return "Not of one run. " + "; ".join(parts) + "."


def updates(file: str, title: Callable[[Book], str]) -> Callable[[Book], str]:
    """The table of a results file of bench/weight_sync.py."""

    def table(book: Book) -> str:
        page = book.page(file)
        sides = {name: f"bridge/{name}" for name in page["bridge"]}
        sides |= {"vLLM's own NCCL engine": "vllm_engine"} if "vllm_engine" in page else {}
        conditions = [
            key
            for key in CONDITIONS
            if any(book.maybe(file, f"{p}/{key}/updates") for p in sides.values())
        ]
        rows = []
        for text, key in (
            ("**the trainer waits for an update**", "whole_update_ms"),
            (
                "**longest gap between two tokens at a client**, at an update",
                "largest_gap_per_update_ms",
            ),
            ("the engine pauses", "halted_ms"),
        ):
            for condition in conditions:
                cells = [
                    _with_most(book, file, f"{place}/{condition}/{key}") for place in sides.values()
                ]
                if any(cells):
                    rows.append([f"{text}, {CONDITIONS[condition]}", *cells])
        cells = [_first_byte(book, file, f"{place}/{conditions[0]}") for place in sides.values()]
        rows.append([f"first byte to verified, {CONDITIONS[conditions[0]]}", *cells])
        usual = [
            book.maybe(file, f"{p}/{c}/usual_gap_ms/median")
            for p in sides.values()
            for c in conditions
        ]
        gaps = [gap for gap in usual if gap is not None]
        last = {
            p: [c for c in conditions if book.maybe(file, f"{p}/{c}/updates")][-1]
            for p in sides.values()
        }
        places = {name: (file, f"{place}/{last[place]}") for name, place in sides.items()}
        text = markdown([title(book), *sides], rows)
        between = (
            " to ".join(dict.fromkeys(f"{gap:.0f}" for gap in (min(gaps), max(gaps))))
            if gaps
            else "?"
        )
        count = max(
            book.maybe(file, f"{place}/{conditions[0]}/updates") or 0 for place in sides.values()
        )
        told = [
            f"Medians, in brackets the largest of {count:.0f}; gaps without an update: {between} ms.",
            sources(book, places),
        ]
        if "vllm_engine" in page and "recorded_in" in book.measured(
            *places["vLLM's own NCCL engine"]
        ):
            told.append(OLD_CLOCK)
        return f"{text}\n\n{' '.join(told)}"

    return table


def _with_most(book: Book, file: str, path: str) -> str:
    """`31.3 ms (37.7)`: median and largest; empty if it was not measured."""
    median, most = book.maybe(file, f"{path}/median"), book.maybe(file, f"{path}/max")
    return "" if median is None or most is None else f"{_ms(median)} ms ({_ms(most)})"


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _first_byte(book: Book, file: str, path: str) -> str:
    median = book.maybe(file, f"{path}/first_byte_to_verified_ms/median")
    if median is None:
        return ""
    rate = f" ({book.number(file, f'{path}/gb_per_s'):.0f} GB/s)" if path.endswith("idle") else ""
    return f"{_ms(median)} ms{rate}" + (", not verified" if path.startswith("vllm_engine") else "")


def _title(shape: str, file: str, more: str = "") -> Callable[[Book], str]:
    def title(book: Book) -> str:
        mapped = book.number(file, "bridge/direct/connect, recompute/params_mapped")
        total = book.number(file, "bridge/direct/connect, recompute/params_total")
        return f"{shape} shape, {mapped}/{total} parameters, {book.number(file, 'model_bytes') / 1e9:.2f} GB{more}"

    return title


def throughputs(book: Book) -> list[str]:
    """The files of runs that compared generation with and without updates, oldest first."""
    found = sorted(path.stem for path in book.folder.glob(f"{THROUGHPUT}*.json"))
    if not found:
        raise FigureError(f"there is no {THROUGHPUT}*.json in bench/results")
    return found


def generation_in_all(book: Book) -> str:
    """`0.99 ± 0.02`: mean over all settings and runs, and its standard error."""
    found = [
        row["ratio"] for file in throughputs(book) for row in book.get(file, "throughput").values()
    ]
    return f"{statistics.fmean(found):.2f} ± {statistics.stdev(found) / math.sqrt(len(found)):.2f}"


def single_copy(book: Book) -> str:
    """The table of bench/single_copy.py, of one rank and of two."""
    files = {
        "Qwen3-1.7B shape, one rank": "single_copy",
        "Qwen2.5-14B shape, two ranks of each": "single_copy_qwen2.5-14b",
    }

    def row(text: str, cell: Callable[[str], str]) -> list[str]:
        return [text, *(cell(file) for file in files.values())]

    def freed(file: str) -> str:
        mb = [
            book.number(file, f"one_copy/{key}") / 1e6
            for key in ("gpu_bytes_freed_by_joining", "model_bytes")
        ]
        return f"{mb[0]:,.0f} MB, its own copy's {mb[1]:,.0f}"

    def mapped(file: str) -> str:
        numbers = [
            book.number(file, f"one_copy/{key}")
            for key in ("params_mapped", "params_total", "bytes_moved_by_an_update")
        ]
        return f"{numbers[0]}/{numbers[1]}; {numbers[2]}"

    rows = [
        row(
            "**the trainer waits for an update**, idle",
            lambda f: _with_most(book, f, "idle/whole_update_ms"),
        ),
        row(
            "**the same**, 64 requests in flight",
            lambda f: _with_most(book, f, "load_64/whole_update_ms"),
        ),
        row(
            "**longest gap at a client**, 64",
            lambda f: _with_most(book, f, "load_64/largest_gap_per_update_ms"),
        ),
        row(
            "of it the write, idle · 64",
            lambda f: " · ".join(_median(book, f, f"{c}/write_ms") for c in ("idle", "load_64")),
        ),
        row(
            "pause beyond the write, idle",
            lambda f: _with_most(book, f, "idle/pause_beyond_write_ms"),
        ),
        row("parameters mapped; bytes moved by an update", mapped),
        row("GPU memory freed on the first GPU when the trainer joins", freed),
    ]
    places = {text: (file, "load_64") for text, file in files.items()}
    count = book.number("single_copy", "idle/updates")
    return f"{markdown(['', *files], rows)}\n\nMedians, in brackets the largest of {count:.0f}. {sources(book, places)}"


def _median(book: Book, file: str, path: str) -> str:
    return f"{_ms(book.number(file, f'{path}/median'))} ms"


def faults_in_all(file: str) -> Callable[[Book], str]:
    """How many faults were done. Raises FigureError unless all of them ended as they should."""

    def count(book: Book) -> str:
        rows = book.get(file, "faults")
        bad = [row["fault"] for row in rows if not row["good"]]
        if bad:
            raise FigureError(
                f"{file}.json: not good, so no document may call all of them so: {', '.join(bad)}"
            )
        return str(len(rows))

    return count


def largest_kl(book: Book) -> str:
    """The largest KL of any step of the whole runs."""
    modes = book.get("training_modes", "modes")
    return f"{max(abs(value) for row in modes.values() for value in row['kl']):.4f}"


NAMED: dict[str, Callable[[Book], str]] = {
    "updates_1.7b": updates(SYNC_17B, _title("Qwen3-1.7B", SYNC_17B)),
    "generation_in_all": generation_in_all,
    "single_copy": single_copy,
    "faults_in_all": faults_in_all("bridge_faults"),
    "faults_on_one_gpu": faults_in_all("bridge_faults_one_gpu"),
    "largest_kl": largest_kl,
}
