"""What reference workers send, as pydantic models."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, FiniteFloat, model_validator

from atroposlib.api.schemas import FloatRows, Name, Request, Version

WorkerName = Annotated[str, Field(min_length=1, max_length=256)]
MOST_LEASED_TOKENS = 1 << 22
"""At a reference worker at a time, by one request: its answer is read at once."""


class LeaseReferences(Request):
    """POST /reference/lease."""

    worker: WorkerName
    """The worker's own name."""
    model: Name
    """Whose logprobs it computes: as the trainer named it when it registered."""
    max_tokens: Annotated[int, Field(ge=1, le=MOST_LEASED_TOKENS)]
    """Of all sequences of all groups. A group that has more comes alone."""
    seconds: Annotated[FiniteFloat, Field(gt=0, le=86400)]
    """After which the groups go to another worker."""


class AnsweredReference(Request):
    """The reference logprobs of one group, or why there are none."""

    id: Version
    """As it came with the group."""
    ref_logprobs: FloatRows | None = None
    """[n][length]: aligned with the group's tokens; where the mask is -100, as in inference_logprobs, 1.0."""
    unusable: Name | None = None
    """Why there can be none for this group: it goes on to the trainer without."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.ref_logprobs is None) == (self.unusable is None):
            raise ValueError("a group has either ref_logprobs, or says in unusable why there can be none")
        return self


class ReferencesDone(Request):
    """POST /reference/done."""

    worker: WorkerName
    groups: Annotated[list[AnsweredReference], Field(fail_fast=True)]
