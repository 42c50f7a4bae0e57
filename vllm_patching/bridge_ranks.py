"""Calls to vLLM's workers, all ranks at once, with deadlines and answers that name the rank."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_patching import compat
from vllm_patching.manifest import Manifest, mismatches

_POLL_SECONDS = 0.002
_PATIENCE_SECONDS = 0.05


class BridgeRefusal(RuntimeError):
    """An answer other than success: the HTTP status and one sentence that says what and what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RankCalls:
    """Methods of a worker extension (worker_extension, lora_worker), carried out on the main thread of every rank's worker."""

    def __init__(self, engine: Any, timeout: float) -> None:
        """
        Args:
            engine: vLLM's AsyncLLM.
            timeout: seconds for each call, and for each wait.
        """
        self._engine = engine
        self._timeout = timeout
        self._who = "vLLM's workers"

    def count(self, ranks: int) -> None:
        """How many there are, for messages."""
        self._who = "vLLM's worker of rank 0" if ranks == 1 else f"one of vLLM's workers of ranks 0 to {ranks - 1}"

    async def call(self, method: str, *args: Any, seconds: float | None = None) -> list[Any]:
        """One answer of each rank.

        Args:
            seconds: for this call, if not as long as for every other.

        Raises:
            BridgeRefusal: they did not answer in time, or the engine has died.
        """
        limit = self._timeout if seconds is None else seconds
        try:
            return list(await asyncio.wait_for(self._engine.collective_rpc(method, args=args), limit))
        except TimeoutError:
            raise BridgeRefusal(504, f"{self._who} did not answer {method} within {limit:g} s") from None
        except Exception as error:
            if compat.engine_is_dead(self._engine):
                raise BridgeRefusal(503, "vLLM's engine process has died; restart the server") from error
            raise

    async def first_step(self) -> float | None:
        """When rank 0 began its first step since weights were last received or checked (time.monotonic()); None: not yet."""
        began = {answer["tp_rank"]: answer["began"] for answer in await self.call("lockstep_first_step")}
        return began[0]

    async def until(
        self, wanted: str, what: str, waiting: str, also: tuple[str, ...] = (), may_block: bool = False
    ) -> list[dict[str, Any]]:
        """Wait until the updater thread of every rank is in phase `wanted` (or one of `also`).

        Args:
            what, waiting: for messages: what is waited for, and for whom.
            may_block: the engine is paused, so a worker may wait itself; otherwise that would hold up its next step.

        Returns:
            Their statuses, by rank.

        Raises:
            BridgeRefusal: one failed, or is late.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            answers = await self.call("lockstep_status", _PATIENCE_SECONDS if may_block else 0.0)
            statuses = sorted(answers, key=lambda status: status["tp_rank"])
            for status in statuses:
                if status["phase"] == "failed":
                    place = f"rank {status['tp_rank']} failed in {what} (epoch {status['epoch']})"
                    raise BridgeRefusal(502, f"{place}: {status['error']}")
            late = [status for status in statuses if status["phase"] not in (wanted, *also)]
            if not late:
                return statuses
            if time.monotonic() > deadline:
                who = ", ".join(f"rank {status['tp_rank']} is {status['phase']}" for status in late)
                raise BridgeRefusal(504, f"{what}: {who} after {self._timeout:g} s, {waiting}")
            await asyncio.sleep(0.0 if may_block else _POLL_SECONDS)


def compare(answers: Sequence[Mapping[str, Any]], expected: Sequence[str], version: int, what: str) -> None:
    """Refuse weights that are not what the trainer sent, or that nothing can be computed with.

    Args:
        answers: of each rank: `tp_rank`, `checksum` and `not_finite`.
        expected: the trainer's checksums, by rank.
        version, what: for messages: which weights, and what the rank does with them.

    Raises:
        BridgeRefusal: names the rank and both checksums, or the parameter.
    """
    for answer in answers:
        rank = answer["tp_rank"]
        if answer["not_finite"]:
            raise BridgeRefusal(422, f"rank {rank} refuses version {version}: {answer['not_finite']} holds NaN or infinity")
        if answer["checksum"] != expected[rank]:
            raise BridgeRefusal(
                502, f"rank {rank} {what} checksum {answer['checksum']} of version {version}, the trainer's is {expected[rank]}"
            )


def require_fitting(manifests: Sequence[Manifest], parameters: Mapping[str, tuple[tuple[int, ...], str]], model: str) -> None:
    """Refuse a trainer whose parameters are not those of every rank.

    Args:
        manifests: of the ranks.
        parameters: name -> (full shape, dtype) of the trainer's.
        model: the server's, for the message.

    Raises:
        BridgeRefusal: names the first few that differ, and both values.
    """
    for manifest in manifests:
        problems = mismatches(manifest, parameters)
        if problems:
            raise BridgeRefusal(
                422,
                f"{len(problems)} parameter(s) of the trainer do not fit vLLM's rank {manifest.tp_rank} "
                f"(server's model: {model}): {'; '.join(problems[:5])}. Start both with the same model and dtype.",
            )


def require_one_each(what: str, count: int, ranks: int) -> None:
    """Raise BridgeRefusal unless there is one of something for each rank."""
    if count != ranks:
        raise BridgeRefusal(422, f"{count} {what}(s) for {ranks} rank(s)")
