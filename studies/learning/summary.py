"""Outcome of trainings: curves short enough to keep, divergence, figures over seeds.

Pure: no I/O, no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

CURVES = (
    "reward_mean", "kl", "entropy", "response_length_mean", "grad_norm", "ess", "ratio_mean", "ratio_max", "ratio_p01",
    "ratio_p99", "mismatch_kl", "clip_fraction_low", "clip_fraction_high", "correction_weight", "correction_ess",
    "correction_masked", "correction_masked_sequences", "age_mean", "mismatched_tokens", "compared_tokens", "seconds_wait",
    "seconds_train", "expert_load", "expert_load_max", "unused_experts", "router_entropy",
    "rerouted_share",
)  # fmt: skip
"""Columns of metrics.jsonl that are kept; missing ones are left out."""
POINTS = 40
"""Points of a kept curve, at most."""
WINDOW = 0.1
"""Share of a run's steps over which a reward is a mean: its first and its last ones."""
LOWEST_REWARD = -1.0
COLLAPSE = 0.5
"""A run has collapsed if at its end it has lost this share of the reward that it had, counted from
the lowest."""
KL_LIMIT = 0.5
"""Nats per token between trainer and sampler, as a mean over a window, from which they are
different models."""
NOT_FINITE = ("is NaN or infinite", "non-finite", "not finite")
"""Text in the trainer's last line if its gradient or weights are not finite."""


def downsampled(values: Sequence[float | None], points: int = POINTS) -> list[float | None]:
    """Means of neighbours, at most `points` of them, of five digits; None where nothing is known."""
    span = window_of(len(values), points)
    return [_mean(values[start : start + span]) for start in range(0, len(values), span)]


def steps_of(count: int, points: int = POINTS) -> list[float]:
    """The step, counted from 1, in the middle of each mean of `downsampled`."""
    span = window_of(count, points)
    return [(start + 1 + min(start + span, count)) / 2 for start in range(0, count, span)]


def window_of(count: int, points: int = POINTS) -> int:
    """Number of values that go into one mean."""
    return max(1, math.ceil(count / points))


def curves(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """The kept curves of a run, and the steps that they stand for."""
    found = {
        name: downsampled([row.get(name) for row in rows])
        for name in CURVES
        if any(name in row for row in rows)
    }
    return {"step": list(steps_of(len(rows))), **found}


def divergence(rows: Sequence[Row], last_line: str) -> str | None:
    """Describe a run's failure in a few words; None if it did not fail.

    An error without a link to numbers does not count as divergence, whatever the curves had come
    to.

    Args:
        rows: of its steps.
        last_line: of its log, if it ended with an error; else empty.
    """
    if any(words in last_line for words in NOT_FINITE):
        return f"not finite after step {len(rows)}"
    if last_line:
        return None
    span = window_of(len(rows), round(1 / WINDOW))
    rewards, kls = (
        _windows([row.get(name) for row in rows], span) for name in ("reward_mean", "kl")
    )
    large = next(
        (number for number, kl in enumerate(kls) if kl is not None and not kl <= KL_LIMIT), None
    )
    if large is not None:
        return f"KL of {kls[large]:.2g} nats a token at step {min((large + 1) * span, len(rows))}"
    known = [reward for reward in rewards if reward is not None]
    if known and max(known) - known[-1] > COLLAPSE * (max(known) - LOWEST_REWARD):
        return f"reward fell from {max(known):.2f} to {known[-1]:.2f}"
    return None


def figures(rows: Sequence[Row], evaluations: Sequence[Row]) -> dict[str, float]:
    """A run in a few numbers: rewards of its first and last steps, solved before and after, the
    largest KL, seconds a step.
    """
    span = window_of(len(rows), round(1 / WINDOW))
    found: dict[str, float] = {}
    if rows:
        rewards, kls = (
            _windows([r["reward_mean"] for r in rows], span),
            _windows([r["kl"] for r in rows], span),
        )
        found |= {"reward_first": rewards[0] or 0.0, "reward_last": rewards[-1] or 0.0}
        found |= {"kl_max": max((kl for kl in kls if kl is not None), default=0.0)}
        found["step_seconds"] = round(
            statistics.median(r["seconds_wait"] + r["seconds_train"] for r in rows), 3
        )
    if evaluations:
        found |= {
            "solved_first": evaluations[0]["metrics"]["solved"],
            "solved_last": evaluations[-1]["metrics"]["solved"],
            "solved_best": max(row["metrics"]["solved"] for row in evaluations),
        }
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def over_seeds(runs: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float] | None:
    """Mean and standard deviation of a figure over the runs that have it; None if none has, 0 for
    the spread of one.
    """
    values = [run["figures"][name] for run in runs if name in run.get("figures", {})]
    if not values:
        return None
    spread = 0.0
    if len(values) > 1:
        spread = statistics.stdev(values)
    return statistics.fmean(values), spread


def variant_rows(
    runs: Mapping[str, Mapping[str, Any]], variants: Sequence[tuple[str, str]]
) -> list[list[str]]:
    """The cells of a table, one row for each variant that was trained.

    Args:
        runs: by "variant seed", as learning.json has them.
        variants: name and label.
    """
    rows = []
    for name, label in variants:
        mine = [
            run for run in runs.values() if run["variant"] == name and run["status"] != "failed"
        ]
        if not mine:
            continue
        wrong = [run["diverged"] for run in mine if run["diverged"]]
        cells = [_pair(over_seeds(mine, key), form, len(mine)) for key, form in COLUMNS.values()]
        rows.append([label, str(len(mine)), *cells, "; ".join(wrong) or "0"])
    return rows


COLUMNS: dict[str, tuple[str, str]] = {
    "reward, last tenth": ("reward_last", ".3f"),
    "solved before": ("solved_first", ".1%"),
    "solved after": ("solved_last", ".1%"),
    "largest KL": ("kl_max", ".2g"),
}
"""Heading -> figure and its format, between the number of runs and what diverged."""
HEADS = ["", "runs", *COLUMNS, "diverged"]


def band(
    runs: Sequence[tuple[Sequence[float], Sequence[float | None]]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Where at least one run has a value: places, means, and the least and the greatest of the
    runs' values there.

    Args:
        runs: places (ascending) and values of each.
    """
    at: dict[float, list[float]] = {}
    for places, values in runs:
        for place, value in zip(places, values, strict=True):
            if value is not None and math.isfinite(value):
                at.setdefault(place, []).append(value)
    ordered = sorted(at)
    return (
        ordered,
        [statistics.fmean(at[place]) for place in ordered],
        [min(at[place]) for place in ordered],
        [max(at[place]) for place in ordered],
    )


def _windows(values: Sequence[float | None], span: int) -> list[float | None]:
    """Means over neighbours, `span` of them each.

    The last one is over the last `span`, which may overlap those before.
    """
    return [
        _mean(values[max(0, min(start, len(values) - span)) :][:span])
        for start in range(0, max(1, len(values)), span)
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return float(f"{statistics.fmean(known):.5g}")


def _pair(found: tuple[float, float] | None, form: str, runs: int) -> str:
    if found is None:
        return "-"
    if runs == 1:
        return format(found[0], form)
    return f"{format(found[0], form)} ± {format(found[1], form)}"
