"""The shape of a LoRA adapter, as the options give it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from example_trainer.errors import ModelError
from vllm_patching.weights.families import PROJECTIONS, Geometry, adapted_projections

_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
ALL_LINEAR = "all-linear"
"""PEFT's name for all of them."""


@dataclass(frozen=True)
class LoraSettings:
    """The shape of an adapter: y = W x + alpha / rank · B A dropout(x) (arXiv:2106.09685).

    Attributes:
        rank: rows of A and columns of B.
        alpha: scale, before it is divided by the rank.
        dropout: share of the adapter's inputs that are dropped while training.
        targets: the projections that have an adapter, in the order of PROJECTIONS.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor of B A x."""
        return self.alpha / self.rank

    def of_model(self, geometry: Geometry) -> LoraSettings:
        """The same settings with the model's own names of its projections.

        Raises:
            ModelError: some of the projections have no adapters in this model, and not all of the
                table are asked for.
        """
        own = adapted_projections(geometry, PROJECTIONS)
        absent = [name for name in self.targets if name in _OF_EXPERTS and name not in own]
        if geometry.num_experts and absent and set(self.targets) != {*PROJECTIONS}:
            raise ModelError(
                f"--lora-target-modules {', '.join(absent)}: experts have no adapters; give "
                f"{ALL_LINEAR}, which leaves them as they are, or some of {', '.join(own)}"
            )
        return replace(self, targets=adapted_projections(geometry, self.targets))


def base_model_name(model: str) -> str:
    """A model's id, or its folder's absolute path: an adapter that names it may be loaded from
    anywhere.
    """
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def parse_targets(names: list[str]) -> tuple[str, ...]:
    """Names of projections, or "all-linear" for all of them, in the order of PROJECTIONS and each once.

    Raises:
        ValueError: a name is not a projection; the message lists the projections.
    """
    unknown = [name for name in names if name not in (*PROJECTIONS, ALL_LINEAR)]
    if unknown:
        raise ValueError(
            f"no projection is called {', '.join(map(repr, unknown))}; give {ALL_LINEAR}, or some of {', '.join(PROJECTIONS)}"
        )
    return tuple(name for name in PROJECTIONS if name in names or ALL_LINEAR in names)
