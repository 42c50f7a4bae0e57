"""Calls to vLLM's workers, all ranks at once, with deadlines and answers that name the rank."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from vllm_patching.compat.engine import ask_engine_core, engine_is_dead, pause_and_keep
from vllm_patching.compat.versions import UnsupportedVllm
from vllm_patching.protocol.manifest import Manifest, mismatches
from vllm_patching.protocol.verification import CAN_VERIFY_AND_RESUME, VERIFY_AND_RESUME, BridgeRefusal
from vllm_patching.server.silence import Silence

logger = logging.getLogger("vllm.lockstep.bridge")

_POLL_SECONDS = 0.002
_PATIENCE_SECONDS = 0.05
_ANSWER_SECONDS = 1.0
"""How long before the end of our own wait the engine must not go on any more: its answer has to arrive in time."""
_STOP_SECONDS = 2.0
_LOOK_SECONDS = 0.25
"""How often it is looked whether the engine that is waited for has died."""


async def answer_in_time(engine: Any, question: Awaitable[Any], what: str, limit: float, who: str) -> Any:
    """The answer of vLLM's engine.

    Args:
        engine: vLLM's AsyncLLM.
        what, who: for messages: what is asked, and of whom.
        limit: seconds.

    Raises:
        BridgeRefusal: there was none in time, or an error, or the engine has died.
        UnsupportedVllm: this vLLM cannot be asked that.
    """
    asked = asyncio.ensure_future(question)
    try:
        if not await answered(engine, asked, limit):
            raise BridgeRefusal(504, f"{who} did not answer {what} within {limit:g} s")
        return asked.result()
    except (UnsupportedVllm, BridgeRefusal):
        raise
    except Exception as error:
        if engine_is_dead(engine):
            raise BridgeRefusal(503, "vLLM's engine process has died; restart the server") from error
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise BridgeRefusal(502, f"{who} failed in {what}: {told[0][:500]}; the server's log has more") from error
    finally:
        asked.cancel()


async def answered(engine: Any, asked: asyncio.Future[Any], limit: float) -> bool:
    """Wait for an answer of vLLM's engine, whatever it is. Returns whether it has come within `limit` seconds.

    Raises:
        BridgeRefusal: the engine's process has died. vLLM leaves what it was asked unanswered then.
    """
    deadline = time.monotonic() + limit
    while True:
        await asyncio.wait({asked}, timeout=max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic())))
        if asked.done():
            return True
        if engine_is_dead(engine):
            asked.cancel()
            raise BridgeRefusal(503, "vLLM's engine process has died; restart the server")
        if time.monotonic() >= deadline:
            return False


def _tell_late(answer: asyncio.Future[Any], resumed: Callable[[float], None]) -> None:
    if answer.cancelled():
        return
    error = answer.exception()
    if error is not None:
        logger.warning("[Bridge] a check that was given up has failed: %s", error)
    elif answer.result()["resumed_at"] is not None:
        resumed(answer.result()["resumed_at"])


class RankCalls:
    """Methods of a worker extension (worker_extension, lora_worker), carried out on the main thread of every rank's worker."""

    def __init__(self, engine: Any, timeout: float, silence: Silence | None = None) -> None:
        """
        Args:
            engine: vLLM's AsyncLLM.
            timeout: seconds for each call, and for each wait.
            silence: told of calls that wait for their answer.
        """
        self.last_seen: list[dict[str, Any]] = []
        """What each rank's updater thread did at the last look; by replica and rank."""
        self._silence = silence or Silence()
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
        return list(await self._in_time(self._engine.collective_rpc(method, args=args), method, limit))

    async def verify_and_resume(
        self, method: str, expected: Sequence[str], version: int, resumed: Callable[[float], None]
    ) -> tuple[list[Any], float | None, bool]:
        """Ask all ranks for checksums and, if they are as expected, let the paused engine go on, all in one message.

        An engine that answers late may have gone on at the last moment. It is told to stand still then; since it answers in
        order, its first answer has come when it has done so.

        Args:
            method: of the workers, whose answers are those that `compare` wants.
            expected: the trainer's checksums, by rank.
            version: of the weights.
            resumed: called with the moment at which the engine went on, if that becomes known after this call has raised.

        Returns:
            one answer of each rank; when the engine went on (time.monotonic(), seconds), None if it did not; and whether it
            still runs.

        Raises:
            BridgeRefusal: it has not answered, and may run or not; or it failed or has died.
        """
        deadline = time.monotonic() + max(self._timeout / 2, self._timeout - _ANSWER_SECONDS)
        asked = ask_engine_core(self._engine, VERIFY_AND_RESUME, method, list(expected), version, deadline)
        question = asyncio.ensure_future(asked)
        runs = True
        with self._silence.waiting():
            if not await answered(self._engine, question, self._timeout):
                stop = pause_and_keep(self._engine, clear_cache=False)
                with suppress(BridgeRefusal):
                    await answer_in_time(self._engine, stop, "a pause", _STOP_SECONDS, self._who)
                    runs = False
                    await answered(self._engine, question, _STOP_SECONDS)
        if not question.done():
            question.add_done_callback(lambda late: _tell_late(late, resumed))
            raise BridgeRefusal(504, f"{self._who} did not answer {method} within {self._timeout:g} s")
        answer = await answer_in_time(self._engine, question, method, self._timeout, self._who)
        resumed_at = answer["resumed_at"]
        return list(answer["answers"]), resumed_at, runs and resumed_at is not None

    async def require_engine_core(self) -> None:
        """Raise UnsupportedVllm unless the engine core has what `verify_and_resume` asks of it."""
        question = ask_engine_core(self._engine, CAN_VERIFY_AND_RESUME)
        await self._in_time(question, CAN_VERIFY_AND_RESUME, self._timeout)

    async def _in_time(self, question: Awaitable[Any], what: str, limit: float) -> Any:
        with self._silence.waiting():
            return await answer_in_time(self._engine, question, what, limit, self._who)

    async def choose_transfer(self, asked: str) -> str:
        """`direct` or `overlapped`: what was asked for, or with `auto` overlapped if every rank has room for it.

        Raises:
            BridgeRefusal: overlapped was asked for, and there is no room.
        """
        if asked == "direct":
            return asked
        rooms = await self.call("lockstep_room")
        tight = next((r for r in rooms if r["free"] is not None and r["free"] < r["needed"]), None)
        if tight is None:
            return "overlapped"
        figures = (
            f"an overlapped transfer needs {tight['needed'] / 1e9:.2f} GB more on each of vLLM's GPUs, "
            f"{max(0, tight['free']) / 1e9:.2f} GB are free"
        )
        if asked == "overlapped":
            raise BridgeRefusal(
                409, f"{figures}: start vLLM with a lower --gpu-memory-utilization, or train with --weight-transfer direct"
            )
        logger.info("[Bridge] Transfers go directly into the live weights: %s", figures)
        return "direct"

    async def first_step(self) -> float | None:
        """When rank 0 began its first step since weights were last received or checked (time.monotonic()); None: not yet."""
        began = {answer["tp_rank"]: answer["began"] for answer in await self.call("lockstep_first_step")}
        return began[0]

    async def statuses(self, patience: float = 0.0) -> list[dict[str, Any]]:
        """What the updater thread of each rank does, by replica and rank. Raises BridgeRefusal as `call` does.

        Args:
            patience: seconds that a worker may wait for its thread's command to end.
        """
        answers = await self.call("lockstep_status", patience)
        statuses = sorted(answers, key=lambda status: (status.get("replica", 0), status["tp_rank"]))
        blank = {"replica": 0, "cohort": "", "version": None, "received_bytes": 0, "error": ""}
        keys = ("replica", "tp_rank", "phase", "cohort", "version", "received_bytes", "error")
        self.last_seen = [{key: ({**blank, **status})[key] for key in keys} for status in statuses]
        return statuses

    @property
    def are_joining(self) -> bool:
        """Whether, at the last look, an updater thread was about to meet a cohort."""
        return any(rank["phase"] == "joining" for rank in self.last_seen)

    async def until(
        self,
        wanted: str,
        what: str,
        waiting: str,
        also: tuple[str, ...] = (),
        may_block: bool = False,
        called_off: Callable[[], str] = lambda: "",
    ) -> list[dict[str, Any]]:
        """Wait until the updater thread of every rank is in phase `wanted` (or one of `also`).

        Args:
            what, waiting: for messages: what is waited for, and for whom.
            may_block: the engine is paused, so a worker may wait itself; otherwise that would hold up its next step.
            called_off: asked again and again; a reason not to wait any longer, or an empty string.

        Returns:
            Their statuses, by replica and rank.

        Raises:
            BridgeRefusal: one failed or is late, or the wait was called off.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            statuses = await self.statuses(_PATIENCE_SECONDS if may_block else 0.0)
            for status in statuses:
                if status["phase"] == "failed":
                    place = f"rank {status['tp_rank']} failed in {what} (epoch {status['epoch']})"
                    raise BridgeRefusal(502, f"{place}: {status['error']}")
            late = [status for status in statuses if status["phase"] not in (wanted, *also)]
            if not late:
                return statuses
            if called_off():
                raise BridgeRefusal(409, f"{what} was broken off: {called_off()}")
            if time.monotonic() > deadline:
                who = ", ".join(f"rank {status['tp_rank']} is {status['phase']}" for status in late)
                raise BridgeRefusal(504, f"{what}: {who} after {self._timeout:g} s, {waiting}")
            await asyncio.sleep(0.0 if may_block else _POLL_SECONDS)


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
