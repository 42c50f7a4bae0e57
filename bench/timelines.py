"""Draw when each process of a run worked, waited and stood still: a picture, and a trace for
chrome://tracing or Perfetto.

    python -m bench.timelines FOLDER --output DIR                      FOLDER is what LOCKSTEP_TIMELINE named
    python -m bench.timelines A B C --output DIR --from 20 --to 50     one panel for each, seconds since its first span

Writes DIR/timeline.svg, and for each FOLDER DIR/FOLDER.trace.json. Prints how long each process was
at what. In the picture pieces of one kind that lie nearer than a pixel are drawn as one; the trace
has all as they were.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import argparse
import json
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.gpu.summary import table
from bench.timeline_spans import (
    Process,
    check_trace,
    chrome_trace,
    extent,
    lanes,
    merged,
    read_folder,
    shares,
    within,
)
from example_trainer.launcher.quickstart.plot import GRID, INK, MUTED, style

COLOURS = {
    "generating": "#2463c9",
    "halted": "#b7950b",
    "train": "#2f855a",
    "wait": "#d5dbe2",
    "sync": "#c05621",
    "push": "#c05621",
    "pull": "#8b3fa0",
    "update": "#8b3fa0",
    "busy": "#2463c9",
    "waits": "#d5dbe2",
}
OTHER = "#8a97a6"
PIXELS = 1500
"""Pixels of the picture's width, about."""
Panel = tuple[str, Sequence[Process], int, int]
"""Title, processes, and the moments (Unix ns) between which they are drawn."""


def draw(panels: Sequence[Panel]) -> Figure:
    """One panel below the other; all have the scale of the longest, so that lengths compare."""
    heights = [
        sum(len(lanes(within(process, begin, end).spans)) or 1 for process in processes)
        for _, processes, begin, end in panels
    ]
    figure = Figure(
        figsize=(11, 0.6 + sum(0.75 + 0.34 * height for height in heights)),
        facecolor="white",
        layout="constrained",
    )
    axes = figure.subplots(
        len(panels), 1, squeeze=False, height_ratios=[1 + 0.4 * height for height in heights]
    )[:, 0]
    longest = max(end - begin for _, _, begin, end in panels) / 1e9
    seen: dict[str, None] = {}
    for place, (title, processes, begin, end) in zip(axes, panels, strict=True):
        style(place, title)
        seen |= _draw_panel(place, processes, begin, end)
        place.set_xlim(0, longest)
    axes[-1].set_xlabel("seconds", fontsize=9, color=MUTED)
    patches = [Patch(color=COLOURS.get(what, OTHER), label=what) for what in sorted(seen)]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=8,
        fontsize=9,
        frameon=False,
        labelcolor=INK,
    )
    return figure


def _draw_panel(axes: Axes, processes: Sequence[Process], begin: int, end: int) -> dict[str, None]:
    """Draw the processes from the top down; returns the kinds of spans that were met."""
    row, ticks, seen = 0, list[tuple[int, str]](), dict[str, None]()
    for process in processes:
        ticks.append((row, f"{process.role} {process.name}"))
        drawn = merged(within(process, begin, end).spans, gap=(end - begin) // PIXELS)
        for lane in lanes(drawn) or [[]]:
            for what in sorted({span.what for span in lane}):
                bars = [
                    ((span.begin - begin) / 1e9, (span.end - span.begin) / 1e9)
                    for span in lane
                    if span.what == what
                ]
                axes.broken_barh(
                    bars, (row - 0.4, 0.8), color=COLOURS.get(what, OTHER), linewidth=0
                )
                seen[what] = None
            row += 1
    axes.set_ylim(row - 0.4, -0.6)
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], color=INK)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    return seen


def save(figure: Figure, path: Path) -> None:
    """Write a picture whose bytes depend on what it shows alone."""
    with matplotlib.rc_context({"svg.hashsalt": "lockstep", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def write_trace(processes: Sequence[Process], path: Path) -> None:
    """Write a Chrome trace.

    Raises ValueError if there is nothing to write, or a viewer could not read it.
    """
    trace = chrome_trace(processes)
    check_trace(trace)
    path.write_text(json.dumps(trace), encoding="utf-8")


def report(panels: Sequence[Panel]) -> str:
    """List each process's work, in shares of its panel's time."""
    rows: list[list[object]] = []
    for title, processes, begin, end in panels:
        for process in processes:
            found = shares(process, begin, end)
            told = ", ".join(f"{what} {share:.0%}" for what, share in sorted(found.items()))
            rows.append([title, process.role, process.name, told])
    return table(["", "role", "name", "share of the time"], rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the picture and the traces"
    )
    parser.add_argument(
        "--from", dest="begin", type=float, default=0.0, help="seconds after a folder's first span"
    )
    parser.add_argument(
        "--to", dest="end", type=float, help="seconds after it; default: the last span's end"
    )
    args = parser.parse_args(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    panels: list[Panel] = []
    for number, folder in enumerate(args.folders):
        try:
            processes, unreadable = read_folder(folder)
            first, last = extent(processes)
            begin, end = (
                first + int(args.begin * 1e9),
                last if args.end is None else first + int(args.end * 1e9),
            )
            if end <= begin:
                raise ValueError(
                    f"{folder} ends {(last - first) / 1e9:.1f} s after its first span: nothing from {args.begin:g} s on"
                )
            name = folder.resolve().name
            taken = name in {title for title, *_ in panels}
            write_trace(
                processes, args.output / f"{name}{f'-{number + 1}' if taken else ''}.trace.json"
            )
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        if unreadable:
            print(f"{folder}: {unreadable} lines are not spans, and were passed over")
        panels.append((name, processes, begin, end))
    save(draw(panels), args.output / "timeline.svg")
    print(report(panels))
    print(f"written to {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
