"""Whether weights are what the trainer sent: asked by the server's front end, and by vLLM's engine
core before it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

VERIFY_AND_RESUME = "lockstep_verify_and_resume"
CAN_VERIFY_AND_RESUME = "lockstep_can_verify_and_resume"
"""What the module engine_core adds to vLLM's engine core."""


class BridgeRefusal(RuntimeError):
    """An answer other than success: the HTTP status and one sentence that says what and what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def rank_name(answer: Mapping[str, Any]) -> str:
    """Whose answer it is, for messages: of several replicas the first is not named."""
    replica = answer.get("replica", 0)
    return (
        f"rank {answer['tp_rank']} of replica {replica}" if replica else f"rank {answer['tp_rank']}"
    )


def compare(
    answers: Sequence[Mapping[str, Any]], expected: Sequence[str], version: int, what: str
) -> None:
    """Refuse weights that are not what the trainer sent, or that nothing can be computed with.

    Args:
        answers: of each rank: `tp_rank`, `checksum` and `not_finite`; `late` where the writes that
            it had to wait for did not come in time.
        expected: the trainer's checksums, by rank.
        version, what: for messages: which weights, and what the rank does with them.

    Raises:
        BridgeRefusal: names the rank and both checksums, or the parameter.
    """
    for answer in answers:
        rank, who = answer["tp_rank"], rank_name(answer)
        if answer.get("late"):
            raise BridgeRefusal(504, f"{who} does not have version {version}: {answer['late']}")
        if answer["not_finite"]:
            raise BridgeRefusal(
                422,
                f"{who} refuses version {version}: {answer['not_finite']} holds NaN or infinity",
            )
        if answer["checksum"] != expected[rank]:
            raise BridgeRefusal(
                502,
                f"{who} {what} checksum {answer['checksum']} of version {version}, the trainer's is {expected[rank]}",
            )
