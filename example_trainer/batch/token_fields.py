"""The numbers that a rollout has for each of its trained tokens.

`TOKEN_FIELDS` lists them once. Sequences, bins and the messages between ranks carry whatever is in
it, so a new field is one line here. If a group brings the field along as one number for each token,
`wire` names it and the group reader fills it in; the field's own line in
`atroposlib.wire.ScoredDataGroup` describes it for environments and the service.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from example_trainer.batch.teacher_logprobs import ROUNDING

UNKNOWN_VERSION = -1


@dataclass(frozen=True)
class TokenField:
    """One number for each trained token.

    Attributes:
        dtype: of the number.
        fill: stands where a sequence has no number.
        wire: field of a group that holds it for each token; None if the group reader works it out.
        largest: a number above it is a placeholder, as 1.0 is at prompt positions, and is replaced
            by `fill`. None if every number counts.
        ordering: whether the numbers decide, with the rest of a rollout's content, which bin the
            rollout comes into where lengths are equal; "unless_filled": if they are not all `fill`.
    """

    dtype: type[np.int64] | type[np.float32]
    fill: float
    wire: str | None = None
    largest: float | None = None
    ordering: Literal["always", "unless_filled", "never"] = "always"

    def filled(self, length: int) -> npt.NDArray[Any]:
        """Return the numbers of tokens that have none."""
        return np.full(length, self.fill, dtype=self.dtype)

    def orders(self, row: npt.NDArray[Any]) -> bool:
        """Return True if these numbers decide where their rollout goes."""
        if self.ordering == "unless_filled":
            return not np.array_equal(row, self.filled(len(row)), equal_nan=True)
        return self.ordering == "always"


TOKEN_FIELDS = {
    "advantages": TokenField(np.float32, 0.0),
    "rollout_logprobs": TokenField(np.float32, math.nan, "inference_logprobs", ROUNDING),
    # The weight version that the token was sampled under, on the trainer's line of weights.
    "versions": TokenField(np.int64, UNKNOWN_VERSION),
    # The temperature that the token was sampled at; its logits are divided by it.
    "temperatures": TokenField(np.float32, 1.0, ordering="unless_filled"),
    "teacher_logprobs": TokenField(np.float32, math.nan, ordering="unless_filled"),
    # They are the same bits whether workers send them or the trainer computes them, so they must
    # not decide where a rollout goes.
    "reference_logprobs": TokenField(
        np.float32, math.nan, "ref_logprobs", ROUNDING, ordering="never"
    ),
}
