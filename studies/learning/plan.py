"""Which trainings studies/learning/trainings.py and mixtures.py compare, in which order, and how
long that takes.

Pure: no I/O, no processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UNCORRECTED = ("--correction", "none")
ORDINARY = ("--no-batch-invariant",)
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "token_truncate": ("--correction", "token_truncate"),
    "sequence_truncate": ("--correction", "sequence_truncate"),
    "token_mask": ("--correction", "token_mask"),
    "sequence_mask": ("--correction", "sequence_mask"),
    "sequence_kl": (*UNCORRECTED, "--sequence-kl-limit", "0.02"),
}
SLOW = ("--lr", "3e-5")
DAMPED = (
    (
        "token_mask_now",
        "token mask, bounds around the sampler",
        ("--correction", "token_mask", "--correction-ratio", "now"),
    ),
    (
        "sequence_mask_now",
        "sequence mask, bounds around the sampler",
        ("--correction", "sequence_mask", "--correction-ratio", "now"),
    ),
    (
        "token_truncate_at_1",
        "token truncate at 1",
        ("--correction", "token_truncate", "--correction-high", "1"),
    ),
    ("slow", "uncorrected, 0.3 of the learning rate", (*UNCORRECTED, *SLOW)),
    (
        "token_truncate_slow",
        "token truncate, 0.3 of the learning rate",
        ("--correction", "token_truncate", *SLOW),
    ),
)
"""Protections that may hold runs of old batches where a correction alone does not: name, label,
flags (the last of a name counts).
"""
TWICE = ("--ppo-epochs", "2", "--minibatches", "2", "--two-copies")
"""vLLM's weights must not change between the updates of a batch."""


@dataclass(frozen=True)
class Variant:
    """One way of training.

    Attributes:
        name: on the command line and in the results.
        chapter: what it is compared with, see CHAPTERS.
        label: in tables and plots.
        flags: of simple_rl.py.
        gpus: over which it spreads, where there are so many.
        cpu: whether it can be trained without one.
    """

    name: str
    chapter: str
    label: str
    flags: tuple[str, ...]
    gpus: int = 1
    cpu: bool = True


def _variants() -> list[Variant]:
    found = [
        Variant("exact", "arithmetic", "equal to the bit", ("--batch-invariant", *UNCORRECTED), cpu=False),
        Variant("ordinary", "arithmetic", "ordinary kernels", (*ORDINARY, *UNCORRECTED)),
        Variant(
            "two_dtypes", "arithmetic", "bfloat16 sampler, float32 trainer",
            (*ORDINARY, *UNCORRECTED, "--two-copies", "--dtype", "float32"), gpus=2, cpu=False,
        ),
    ]  # fmt: skip
    for age in (1, 4, 16):
        found.append(
            Variant(
                f"stale_{age}",
                "staleness",
                f"{age} step{'s' if age > 1 else ''} old",
                (*ORDINARY, *UNCORRECTED, *_stale(age)),
            )
        )
    for age in (4, 16):
        for name, flags in CORRECTIONS.items():
            label = name.replace("_", " ")
            found.append(
                Variant(
                    f"{name}_{age}", f"corrections_{age}", label, (*ORDINARY, *flags, *_stale(age))
                )
            )
    for name, label, flags in DAMPED:
        found.append(Variant(f"{name}_4", "damping_4", label, (*ORDINARY, *flags, *_stale(4))))
    for loss in ("dapo", "gspo", "cispo"):
        found.append(
            Variant(loss, "losses", loss.upper(), (*ORDINARY, *UNCORRECTED, "--loss", loss))
        )
    for loss in ("grpo", "dapo", "gspo", "cispo"):
        flags = (*ORDINARY, *UNCORRECTED, "--loss", loss, *TWICE)
        found.append(Variant(f"{loss}_2x2", "losses_2x2", loss.upper(), flags, gpus=2))
    return found


def _stale(age: int) -> tuple[str, ...]:
    return ("--staleness", str(age))


def _arms() -> list[Variant]:
    arms = (
        ("ordinary", "ordinary kernels", ORDINARY, True),
        ("replay", "ordinary kernels, router replay", (*ORDINARY, "--router-replay"), False),
        ("exact", "equal to the bit", ("--batch-invariant",), False),
    )
    return [
        Variant(
            f"{name}_{age}",
            f"age_{age}",
            f"{label}, {age} steps old",
            (*flags, *UNCORRECTED, *_stale(age)),
            cpu=cpu,
        )
        for age in (0, 4)
        for name, label, flags, cpu in arms
    ]


VARIANTS = {variant.name: variant for variant in _variants()}
MIXTURES = {variant.name: variant for variant in _arms()}
"""The trainings of a mixture of experts. An age counts the steps between the weights that sampled a
batch and its training."""
CHAPTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "arithmetic": ("Sampler and trainer by the same arithmetic, and not", ()),
    "staleness": ("Uncorrected, of one age throughout", ("ordinary",)),
    "corrections_4": ("4 steps old, corrected", ("ordinary", "stale_4")),
    "corrections_16": ("16 steps old, corrected", ("ordinary", "stale_16")),
    "damping_4": ("4 steps old, held otherwise", ("stale_4", "token_truncate_4")),
    "losses": ("Losses, one update a batch", ("ordinary",)),
    "losses_2x2": ("Losses, two epochs of two minibatches", ()),
}
"""One comparison: a title, and the variants of other chapters that are shown beside it."""
TINY = ("stale_1", "sequence_mask_4", "gspo_2x2")
"""One of each kind, for a CPU."""


def shown_in(chapter: str) -> list[Variant]:
    """The variants of a picture or a table: those it is compared with first."""
    beside = CHAPTERS[chapter][1]
    return [VARIANTS[name] for name in beside] + [
        v for v in VARIANTS.values() if v.chapter == chapter
    ]


@dataclass(frozen=True)
class Training:
    """One run of a variant."""

    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant.name} {self.seed}"


def plan(
    only: Sequence[str], seeds: Sequence[int], variants: Mapping[str, Variant] = VARIANTS
) -> list[Training]:
    """Return all trainings, every variant's first seed before any second one: a run that is cut
    short has some of everything.
    """
    chosen = [variant for variant in variants.values() if variant.name in only]
    return [Training(variant, seed) for seed in seeds for variant in chosen]


def refusal(variant: Variant, on_cpu: bool) -> str | None:
    """Why a variant cannot be trained on this machine; None if it can."""
    return None if variant.cpu or not on_cpu else "what it compares is on GPUs alone"


def gpus_of(training: Training, slot: int, gpus: int) -> str:
    """For CUDA_VISIBLE_DEVICES: the slot's GPU, which is the trainer's, and those behind it, going
    round.
    """
    return ",".join(
        str((slot + number) % gpus) for number in range(min(training.variant.gpus, gpus))
    )


def estimated_seconds(trainings: int, slots: int, seconds_each: float) -> float:
    """Estimate the time of so many trainings, `slots` at a time."""
    return math.ceil(trainings / slots) * seconds_each
