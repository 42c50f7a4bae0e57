"""Draw what the run brought as one PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from example_trainer.child_processes.files import write_whole
from example_trainer.launcher.quickstart.display import Step, number

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e3e7ec"
REWARD, LENGTH, BEFORE, AFTER = "#2463c9", "#c05621", "#a9b4c2", "#2463c9"


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Mean over a window of so many values around each one, cut off at the ends."""
    half = span // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def style(axes: Axes, title: str) -> None:
    """The look that all three panels share."""
    axes.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold", pad=10)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_locator(MaxNLocator(5))


def curve(axes: Axes, steps: Sequence[Step], key: str, color: str) -> list[float]:
    """One column over the steps: every value faint, a running mean on top; returns the running
    mean.
    """
    points = [(number(step, "step"), number(step, key)) for step in steps]
    known = [(x, y) for x, y in points if x is not None and y is not None]
    xs, ys = [x for x, _ in known], [y for _, y in known]
    mean = smooth(ys, 5)
    axes.plot(xs, ys, color=color, alpha=0.28, linewidth=1.2)
    axes.plot(xs, mean, color=color, linewidth=2.2, solid_capstyle="round")
    axes.set_xlabel("optimizer step", fontsize=9, color=MUTED)
    axes.margins(x=0.02)
    return mean


def draw(
    path: Path,
    steps: Sequence[Step],
    eval_before: float,
    eval_after: float,
    problems: int,
    subtitle: str,
) -> None:
    """Write the plot: reward, use of tools (or response length, where there are none), and accuracy
    before and after.

    Args:
        path: the PNG to write; 2000 pixels wide, so that it is sharp at the width of a README.
        steps: lines of the trainer's metrics.
        eval_before, eval_after: fractions correct on the held-out problems.
        problems: how many held-out problems there were.
        subtitle: one line about the run.
    """
    figure = Figure(
        figsize=(10, 3.5),
        dpi=200,
        facecolor="white",
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03),
    )
    figure.suptitle(subtitle, x=0.014, ha="left", fontsize=9, color=MUTED)
    reward, second, accuracy = figure.subplots(1, 3, width_ratios=[1.25, 1.25, 0.8])

    style(reward, "Reward of sampled answers")
    curve(reward, steps, "reward_mean", REWARD)

    tools = any("tool_use" in step for step in steps)
    title, key = "Response length (tokens)", "response_length_mean"
    if tools:
        title, key = "Answers that used the tool (fraction)", "tool_use"
    style(second, title)
    curve(second, steps, key, LENGTH)
    second.set_ylim(bottom=0)

    style(accuracy, f"Solved of {problems} held out")
    bars = accuracy.bar(
        ["before", "after"],
        [100 * eval_before, 100 * eval_after],
        color=[BEFORE, AFTER],
        width=0.62,
    )
    accuracy.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=11, color=INK, fontweight="bold")
    accuracy.set_ylim(0, 112)
    accuracy.set_yticks([0, 50, 100], ["0", "50", "100 %"])
    accuracy.tick_params(axis="x", labelsize=10, colors=INK)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix(".") or "png")
    write_whole(path, content.getvalue())
