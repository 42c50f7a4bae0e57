"""Draw what studies/learning/trainings.py found: for each chapter of its plan one PNG with rewards, held-out
problems and KL.

    python studies/learning/plots.py  # bench/results/learning.json into docs/images/
    python studies/learning/plots.py out/learning.json --output out

A line is the mean over the seeds, the band around it reaches from the least to the greatest. Runs
that diverged are drawn too, as far as they came. A chapter without trainings gets no picture.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from example_trainer.launcher.quickstart.plot import INK, MUTED, style
from studies.learning.plan import CHAPTERS, Variant, shown_in
from studies.learning.summary import band

COLOURS = ("#1f2933", "#8a97a6", "#2463c9", "#c05621", "#2f855a", "#8b3fa0", "#b7950b")
"""Put the baseline of a chapter first."""
Runs = Mapping[str, Mapping[str, Any]]


def of_variant(runs: Runs, variant: Variant) -> list[Mapping[str, Any]]:
    """A variant's runs that were trained, by seed."""
    mine = [
        run for run in runs.values() if run["variant"] == variant.name and run["status"] != "failed"
    ]
    return sorted(mine, key=lambda run: int(run["seed"]))


def draw_band(
    axes: Axes,
    runs: Sequence[tuple[Sequence[float], Sequence[float | None]]],
    colour: str,
    label: str,
) -> None:
    """Mean and band of some runs."""
    places, means, least, greatest = band(runs)
    axes.plot(places, means, color=colour, linewidth=1.8, label=label, solid_capstyle="round")
    axes.fill_between(places, least, greatest, color=colour, alpha=0.15, linewidth=0)


def draw(chapter: str, runs: Runs) -> Figure | None:
    """A chapter's picture; None if none of its own variants was trained."""
    variants = [(variant, of_variant(runs, variant)) for variant in shown_in(chapter)]
    if not any(mine for variant, mine in variants if variant.chapter == chapter):
        return None
    figure = Figure(figsize=(12, 4.2), dpi=170, facecolor="white", layout="constrained")
    seeds = sorted({int(run["seed"]) for _, mine in variants for run in mine})
    figure.suptitle(
        f"{CHAPTERS[chapter][0]} ({len(seeds)} seed{'s' if len(seeds) > 1 else ''})",
        x=0.014,
        ha="left",
        fontsize=12,
        color=INK,
        fontweight="bold",
    )
    reward, solved, kl = figure.subplots(1, 3)
    style(reward, "Reward of sampled answers")
    style(solved, "Held-out problems solved, greedy")
    style(kl, "KL of trainer and sampler, nats a token")
    for (variant, mine), colour in zip(variants, COLOURS, strict=False):
        if not mine:
            continue
        lost = sum(run["diverged"] is not None for run in mine)
        label = variant.label + (f" ({lost} of {len(mine)} diverged)" if lost else "")
        draw_band(
            reward,
            [(run["curves"]["step"], run["curves"]["reward_mean"]) for run in mine if run["steps"]],
            colour,
            label,
        )
        draw_band(
            solved,
            [(run["evaluation"]["weight_version"], run["evaluation"]["solved"]) for run in mine],
            colour,
            label,
        )
        draw_band(
            kl,
            [(run["curves"]["step"], run["curves"]["kl"]) for run in mine if run["steps"]],
            colour,
            label,
        )
    solved.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    kl.set_yscale("symlog", linthresh=1e-5)
    kl.set_ylim(bottom=0)
    for axes in (reward, solved, kl):
        axes.set_xlabel("optimizer step", fontsize=9, color=MUTED)
        axes.margins(x=0.02)
    handles, labels = reward.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=4,
        fontsize=9,
        frameon=False,
        labelcolor=INK,
    )
    return figure


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = ROOT / "bench" / "results" / "learning.json"
    parser.add_argument(
        "results", type=Path, nargs="?", default=results, help="default: %(default)s"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "docs" / "images",
        help="folder (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    runs = json.loads(args.results.read_text(encoding="utf-8")).get("runs", {})
    args.output.mkdir(parents=True, exist_ok=True)
    for chapter in CHAPTERS:
        figure = draw(chapter, runs)
        path = args.output / f"learning_{chapter}.png"
        if figure is None:
            print(f"nothing of {chapter} was trained")
        else:
            figure.savefig(path)
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
