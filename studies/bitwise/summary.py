"""The table and the verdict of studies/bitwise/on_off.py. Pure: no I/O, no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

WINDOW = 10
"""Steps whose mean reward is reported: the first, the last, and the best that follow each other."""
STUDENT_95 = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}
"""Degrees of freedom -> quantile 0.975 of Student's t."""


def best_window(rewards: list[float]) -> float:
    """Return the highest mean of WINDOW rewards that follow each other; of all of them if there are
    fewer.
    """
    ends = range(min(WINDOW, len(rewards)), len(rewards) + 1)
    return max(statistics.fmean(rewards[max(0, end - WINDOW) : end]) for end in ends)


def row_of(course: dict[str, Any]) -> list[str]:
    """Return one run's row of the table.

    Args:
        course: what the results file holds of the run.
    """
    rewards, tokens = course["reward_mean"], sum(course["compared_tokens"])
    name = f"{course['mode']}, seed {course['seed']}, lr {course['lr']:g}"
    if not rewards:
        return [name, "0", *["-"] * 7]
    solved = [f"{share:.1%}" for _, share in course["held_out"]]
    first, *rest = solved or ["-"]
    return [
        name,
        str(course["steps"]),
        *(
            f"{value:+.3f}"
            for value in (statistics.fmean(rewards[:WINDOW]), statistics.fmean(rewards[-WINDOW:]))
        ),
        f"{best_window(rewards):+.3f}",
        f"{statistics.fmean(kl for kl in course['parity_kl'] if kl is not None):.1e}",
        f"{sum(course['mismatched_tokens']):,} of {tokens:,}",
        first,
        (rest or ["-"])[-1],
    ]


HEAD = [
    "run", "steps", f"reward, first {WINDOW}", f"last {WINDOW}", f"best {WINDOW}", "KL, nats per token", "tokens that differ",
    "held out before", "after",
]  # fmt: skip


def differences(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return one line for each learning rate: by how much the mode changes the reward of the last
    WINDOW steps.

    The difference is taken seed by seed. Its 95 % interval is Student's t.
    """
    return [_difference(runs, lr) for lr in sorted({run["lr"] for run in runs})]


def _difference(runs: Sequence[dict[str, Any]], lr: float) -> str:
    last = {
        (run["mode"], run["seed"]): statistics.fmean(run["reward_mean"][-WINDOW:])
        for run in runs
        if run["lr"] == lr and run["reward_mean"]
    }
    found = [
        last["on", seed] - last["off", seed]
        for mode, seed in sorted(last)
        if mode == "on" and ("off", seed) in last
    ]
    if len(found) - 1 not in STUDENT_95:
        return f"Learning rate {lr:g}: {len(found)} seeds ran in both modes; 2 to {len(STUDENT_95) + 1} give an interval."
    mean = statistics.fmean(found)
    half = STUDENT_95[len(found) - 1] * statistics.stdev(found) / math.sqrt(len(found))
    each = ", ".join(f"{value:+.3f}" for value in found)
    verdict = f"The interval includes 0: {len(found)} seeds show no difference."
    if mean > half:
        verdict = "The interval excludes 0: the mode raises the reward here."
    elif mean < -half:
        verdict = "The interval excludes 0: the mode lowers the reward here."
    return (
        f"Learning rate {lr:g}, mode on minus mode off, mean reward of the last {WINDOW} steps: {mean:+.3f}, 95 % interval "
        f"{mean - half:+.3f} to {mean + half:+.3f} (seed by seed {each}). {verdict}"
    )
