"""The order in which both sides add the products of a layer whose inputs vLLM splits over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PARTS = (1, 2, 4, 8)
"""Numbers of tensor-parallel ranks that a sampler may have."""
ENTRY = "sum_plan"
"""Name of the plan's entry in a provenance."""
_PREFIX = "parts="


@dataclass(frozen=True)
class SumPlan:
    """The sum of o_proj, down_proj and every other row-parallel product.

    The columns of the weight are cut into equal parts. The product over each part is rounded to
    the model's dtype. The parts are added in float32 in their order, and the sum is rounded once.
    A bias is added to the first part, after its rounding, which is then rounded again.

    The bits depend on the plan alone, and not on which process computes a part.

    Attributes:
        parts: the sampler's tensor-parallel ranks.
    """

    parts: int = 1

    def __post_init__(self) -> None:
        if self.parts not in PARTS:
            raise ValueError(
                f"a sum of {self.parts} parts: deterministic mode has "
                f"{', '.join(map(str, PARTS[:-1]))} and {PARTS[-1]}"
            )

    def __str__(self) -> str:
        return f"{_PREFIX}{self.parts}"

    def parts_of_rank(self, ranks: int) -> int:
        """Return how many parts each of `ranks` tensor-parallel trainer ranks computes.

        Raises:
            ValueError: the ranks cannot share the parts equally.
        """
        if ranks < 1 or self.parts % ranks:
            raise ValueError(
                f"{ranks} ranks cannot compute equal shares of {self.parts} parts: "
                f"take {' or '.join(map(str, self.trainer_ranks()))}"
            )
        return self.parts // ranks

    def trainer_ranks(self) -> list[int]:
        """Return the tensor-parallel degrees of trainers that can follow the plan."""
        return [ranks for ranks in PARTS if self.parts % ranks == 0]


def plan_of(provenance: Mapping[str, str]) -> SumPlan:
    """Return the plan that a provenance names; one part if it names none, as older servers do.

    Raises:
        ValueError: the entry is not a plan.
    """
    entry = provenance.get(ENTRY, str(SumPlan()))
    number = entry.removeprefix(_PREFIX)
    if not (entry.startswith(_PREFIX) and number.isdigit()):
        raise ValueError(f"{ENTRY} {entry!r} is not of the form {_PREFIX}N")
    return SumPlan(int(number))
