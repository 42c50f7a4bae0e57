"""Calls to vLLM's engine and workers: deadlines, the engine's state, and errors that name the rank.

vLLM stops scheduling when it reads the command to pause, and answers when no step is in flight. So
after a command without an answer the engine may be in either state. Commands are carried out in
order: the answer to a later one settles the state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Any, TypeVar, TypeVarTuple

from vllm_patching.compat.engine import (
    ask_engine_cores,
    ask_workers,
    engine_is_dead,
    pause_and_keep,
)
from vllm_patching.compat.outputs import HeldOutputs
from vllm_patching.compat.versions import UnsupportedVllm
from vllm_patching.protocol.manifest import Manifest, mismatches
from vllm_patching.protocol.messages import (
    CAN_VERIFY_AND_RESUME,
    VERIFY_AND_RESUME,
    BridgeRefusal,
    BridgeWorker,
    Check,
    rank_name,
)

FURTHER_SECONDS = 1.0
"""Seconds to wait for other answers while one is overdue. vLLM answers in order, so each step that
gives an update up would wait as long as the first."""


class Silence:
    """Calls without an answer, including calls that no one waits for any more."""

    def __init__(self) -> None:
        self._since: dict[object, float] = {}
        self._overdue: set[asyncio.Future[Any]] = set()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as a wait for an answer."""
        question = object()
        self._since[question] = time.monotonic()
        try:
            yield
        finally:
            del self._since[question]

    def overdue(self, question: asyncio.Future[Any], asked_for: float) -> None:
        """Note that a call is late and no one waits for it. Its answer ends the silence.

        Args:
            asked_for: seconds for which it has been waited for.
        """
        self._since[question] = time.monotonic() - asked_for
        self._overdue.add(question)
        question.add_done_callback(self._has_come)

    def patience(self, seconds: float) -> float:
        """Return how long to wait for a new call with a limit of so many seconds."""
        if self._overdue:
            return min(seconds, FURTHER_SECONDS)
        return seconds

    @property
    def seconds(self) -> float:
        """Return the age of the oldest call without an answer; 0.0 if there is none."""
        now = time.monotonic()
        return max(0.0, now - min(self._since.values(), default=now))

    def _has_come(self, question: asyncio.Future[Any]) -> None:
        self._overdue.discard(question)
        self._since.pop(question, None)
        if not question.cancelled():
            question.exception()  # otherwise asyncio logs that the error was never retrieved


Answer = TypeVar("Answer")
Arguments = TypeVarTuple("Arguments")

logger = logging.getLogger("vllm.lockstep.bridge")

_POLL_SECONDS = 0.002
_PATIENCE_SECONDS = 0.05
_ANSWER_SECONDS = 1.0
"""Seconds before the end of our wait after which the engine must not continue, so that its answer
arrives in time."""
_STOP_SECONDS = 2.0
_LOOK_SECONDS = 0.25
"""Seconds between two checks whether the engine has died."""


async def answer_in_time(
    engine: Any,
    question: Awaitable[Any],
    what: str,
    limit: float,
    who: str,
    silence: Silence | None = None,
) -> Any:
    """Return the answer of vLLM's engine.

    Args:
        engine: vLLM's AsyncLLM.
        what, who: for messages: the call, and the process that is called.
        limit: seconds.
        silence: receives a call that is late, which is then left to be answered. Without it the
            call is cancelled.

    Raises:
        BridgeRefusal: there was none in time, or an error, or the engine has died.
        UnsupportedVllm: this vLLM cannot be asked that.
    """
    asked = asyncio.ensure_future(question)
    left = False
    try:
        if not await answered(engine, asked, limit):
            if silence is not None:
                silence.overdue(asked, limit)
                left = True
            raise BridgeRefusal(504, f"{who} did not answer {what} within {limit:g} s")
        return asked.result()
    except (UnsupportedVllm, BridgeRefusal):
        raise
    except Exception as error:
        if engine_is_dead(engine):
            raise BridgeRefusal(
                503, "vLLM's engine process has died; restart the server"
            ) from error
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise BridgeRefusal(
            502, f"{who} failed in {what}: {told[0][:500]}; the server's log has more"
        ) from error
    finally:
        if not left:
            asked.cancel()


async def answered(engine: Any, asked: asyncio.Future[Any], limit: float) -> bool:
    """Wait for an answer of vLLM's engine, whatever it is. Returns whether it has come within
    `limit` seconds.

    Raises:
        BridgeRefusal: the engine's process has died. vLLM leaves what it was asked unanswered then.
    """
    deadline = time.monotonic() + limit
    while True:
        await asyncio.wait(
            {asked}, timeout=max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))
        )
        if asked.done():
            return True
        if engine_is_dead(engine):
            asked.cancel()
            raise BridgeRefusal(503, "vLLM's engine process has died; restart the server")
        if time.monotonic() >= deadline:
            return False


def _went_on(question: asyncio.Future[Any]) -> float | None:
    """When an engine core that was asked for VERIFY_AND_RESUME went on (time.monotonic()); None:
    not, as far as known.
    """
    if not question.done() or question.exception() is not None:
        return None
    moment: float | None = question.result()["resumed_at"]
    return moment


def _placed(by_replica: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the answers of all replicas' ranks. Dicts get the number of their replica."""
    return [
        {**answer, "replica": replica} if isinstance(answer, dict) else answer
        for replica, answers in enumerate(by_replica)
        for answer in answers
    ]


def _tell_late(answer: asyncio.Future[Any], resumed: Callable[[float], None]) -> None:
    if answer.cancelled():
        return
    error = answer.exception()
    if error is not None:
        logger.warning("[Bridge] a check that was given up has failed: %s", error)
    elif answer.result()["resumed_at"] is not None:
        resumed(answer.result()["resumed_at"])


class RankCalls:
    """Methods of a worker extension (worker_extension, lora_worker), carried out on the main thread
    of every rank's worker.
    """

    def __init__(self, engine: Any, timeout: float, silence: Silence | None = None) -> None:
        """
        Args:
            engine: vLLM's AsyncLLM.
            timeout: seconds for each call, and for each wait.
            silence: receives calls that wait for their answer.
        """
        self.last_seen: list[dict[str, Any]] = []
        """Last known status of each rank's updater thread, by replica and rank."""
        self._silence = silence or Silence()
        self._engine = engine
        self._timeout = timeout
        self._who = "vLLM's workers"

    def count(self, ranks: int, replicas: int = 1) -> None:
        """Set the numbers of ranks and replicas, for messages."""
        self._who = "vLLM's worker of rank 0"
        if ranks > 1:
            self._who = f"one of vLLM's workers of ranks 0 to {ranks - 1}"
        if replicas > 1:
            self._who += f" of {replicas} replicas"

    async def call(
        self,
        method: Callable[[Any, *Arguments], Answer],
        *args: *Arguments,
        seconds: float | None = None,
    ) -> list[Answer]:
        """Return one answer of each rank of each replica. Dicts get the key `replica`.

        Args:
            method: of a protocol in protocol/workers.py.
            seconds: for this call, if not as long as for every other.

        Raises:
            BridgeRefusal: they did not answer in time, or the engine has died.
        """
        limit = self._timeout if seconds is None else seconds
        name = method.__name__
        by_replica = await self._in_time(ask_workers(self._engine, name, args), name, limit)
        return _placed(by_replica)

    async def verify_and_resume(
        self,
        method: Callable[[Any], Check],
        expected: Sequence[str],
        version: int,
        resumed: Callable[[float], None],
    ) -> tuple[list[Check], float | None, bool]:
        """Ask all ranks for checksums and, if they are as expected, let the paused engine go on,
        all in one message.

        Each replica compares the answers of its own ranks and continues by itself. If some do not
        continue, the others are paused again.

        A late engine may have continued at the last moment, so it gets a pause. It answers in
        order: when the pause is confirmed, its first answer has come.

        Args:
            method: of the workers; it returns what `compare` takes.
            expected: the trainer's checksums, by rank.
            version: of the weights.
            resumed: called with the moment at which an engine core went on, if this call raises or
                not all went on. It is called too if this call raised before that became known.

        Returns:
            one answer of each rank of each replica. Then when the first engine core went on
            (time.monotonic(), seconds), None if none did. Last, whether all of them still run.

        Raises:
            BridgeRefusal: one has not answered, and may run or not; or it failed or has died.
        """
        deadline = time.monotonic() + max(self._timeout / 2, self._timeout - _ANSWER_SECONDS)
        asked = ask_engine_cores(
            self._engine, VERIFY_AND_RESUME, method.__name__, list(expected), version, deadline
        )
        questions = [asyncio.ensure_future(question) for question in asked]
        all_asked = asyncio.ensure_future(asyncio.wait(questions))
        runs = True
        with self._silence.waiting():
            try:
                in_time = await answered(self._engine, all_asked, self._timeout)
            except BridgeRefusal:
                for question in questions:
                    question.cancel()
                raise
            if not in_time:
                with suppress(BridgeRefusal):
                    await self._stop(_STOP_SECONDS)
                    runs = False
                    await answered(self._engine, all_asked, _STOP_SECONDS)
        moments = [moment for question in questions if (moment := _went_on(question)) is not None]
        if moments and len(moments) < len(questions):
            resumed(min(moments))
        await self._require_answers(questions, method.__name__, resumed)
        if runs and 0 < len(moments) < len(questions):
            await self._stop(self._timeout)
            runs = False
        answers = _placed([question.result()["answers"] for question in questions])
        return answers, min(moments, default=None), runs and bool(moments)

    async def _require_answers(
        self,
        questions: Sequence[asyncio.Future[Any]],
        what: str,
        resumed: Callable[[float], None],
    ) -> None:
        """Raise BridgeRefusal unless every engine core has answered well."""
        open_ones = [question for question in questions if not question.done()]
        for question in open_ones:
            question.add_done_callback(lambda late: _tell_late(late, resumed))
            self._silence.overdue(question, self._timeout)
        for question in questions:
            if question.done() and question.exception() is not None:
                await answer_in_time(self._engine, question, what, self._timeout, self._who)
        if open_ones:
            raise BridgeRefusal(
                504, f"{self._who} did not answer {what} within {self._timeout:g} s"
            )

    async def require_engine_core(self) -> None:
        """Raise UnsupportedVllm unless every engine core has what `verify_and_resume` asks of it."""
        for question in ask_engine_cores(self._engine, CAN_VERIFY_AND_RESUME):
            await self._in_time(question, CAN_VERIFY_AND_RESUME, self._timeout)

    async def _stop(self, limit: float) -> None:
        """Pause all replicas.

        Raises BridgeRefusal if one does not answer within `limit` seconds.
        """
        stop = pause_and_keep(self._engine, clear_cache=False)
        await answer_in_time(self._engine, stop, "a pause", limit, self._who)

    async def _in_time(self, question: Awaitable[Any], what: str, limit: float) -> Any:
        with self._silence.waiting():
            return await answer_in_time(
                self._engine,
                question,
                what,
                self._silence.patience(limit),
                self._who,
                self._silence,
            )

    async def choose_transfer(self, asked: str) -> str:
        """Return `direct` or `overlapped`: the demanded one. `auto` means overlapped if every rank
        has the memory.

        Raises:
            BridgeRefusal: the trainer demands overlapped, and the memory does not suffice.
        """
        if asked == "direct":
            return asked
        rooms = await self.call(BridgeWorker.lockstep_room)
        tight = [
            (room["needed"], room["free"])
            for room in rooms
            if room["free"] is not None and room["free"] < room["needed"]
        ]
        if not tight:
            return "overlapped"
        needed, free = tight[0]
        figures = (
            f"an overlapped transfer needs {needed / 1e9:.2f} GB more on each of vLLM's GPUs, "
            f"{max(0, free) / 1e9:.2f} GB are free"
        )
        if asked == "overlapped":
            raise BridgeRefusal(
                409,
                f"{figures}: start vLLM with a lower --gpu-memory-utilization, or train with --weight-transfer direct",
            )
        logger.info("[Bridge] Transfers go directly into the live weights: %s", figures)
        return "direct"

    async def first_step(self) -> float | None:
        """Return when a rank 0 first began a step after the last transfer or check
        (time.monotonic()); None: not yet.
        """
        answers = await self.call(BridgeWorker.lockstep_first_step)
        began = [
            answer["began"]
            for answer in answers
            if answer["tp_rank"] == 0 and answer["began"] is not None
        ]
        return min(began, default=None)

    async def statuses(self, patience: float = 0.0) -> list[dict[str, Any]]:
        """Return the status of each rank's updater thread, by replica and rank. Raises
        BridgeRefusal as `call` does.

        Args:
            patience: seconds that a worker may wait for its thread's command to end.
        """
        answers = await self.call(BridgeWorker.lockstep_status, patience)
        statuses = sorted(answers, key=lambda status: (status.get("replica", 0), status["tp_rank"]))
        blank = {
            "replica": 0,
            "cohort": "",
            "version": None,
            "received_bytes": 0,
            "waits": False,
            "error": "",
        }
        keys = (
            "replica",
            "tp_rank",
            "phase",
            "cohort",
            "version",
            "received_bytes",
            "waits",
            "error",
        )
        self.last_seen = [{key: ({**blank, **status})[key] for key in keys} for status in statuses]
        return statuses

    @property
    def are_joining(self) -> bool:
        """True if an updater thread was about to meet a cohort at the last look."""
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
            what, waiting: for messages: the expected event, and the process that it depends on.
            may_block: the engine is paused, so a worker may wait itself; otherwise that would hold
                up its next step.
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
                    place = f"{rank_name(status)} failed in {what} (epoch {status['epoch']})"
                    raise BridgeRefusal(502, f"{place}: {status['error']}")
            late = [status for status in statuses if status["phase"] not in (wanted, *also)]
            if not late:
                return statuses
            if called_off():
                raise BridgeRefusal(409, f"{what} was broken off: {called_off()}")
            if time.monotonic() > deadline:
                who = ", ".join(f"{rank_name(status)} is {status['phase']}" for status in late)
                raise BridgeRefusal(504, f"{what}: {who} after {self._timeout:g} s, {waiting}")
            await asyncio.sleep(0.0 if may_block else _POLL_SECONDS)


def require_fitting(
    manifests: Sequence[Manifest], parameters: Mapping[str, tuple[tuple[int, ...], str]], model: str
) -> None:
    """Refuse a trainer whose parameters differ from a rank's.

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


class EngineState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    UNKNOWN = "unknown"


class EngineSwitch:
    """Stops the engine between two steps, with its requests kept, and lets it go on."""

    def __init__(
        self, engine: Any, timeout: float, keep_cache: bool, silence: Silence | None = None
    ) -> None:
        """
        Args:
            engine: vLLM's AsyncLLM, running. Call from within its event loop.
            timeout: seconds for each command.
            keep_cache: do not drop the cached keys and values at a pause.
            silence: receives commands that wait for their answer.
        """
        self._state = EngineState.RUNNING
        self.told: Callable[[EngineState], None] = lambda state: None
        """Called with each new state."""
        self.pauses = 0
        """Number of pauses."""
        self.pausing = False
        """A pause was commanded and is not confirmed yet."""
        self.resting = False
        """The memory of its keys and values is given away (see turns). The engine must not continue
        without it."""
        self._engine, self._timeout, self._keep_cache = engine, timeout, keep_cache
        self._silence = silence or Silence()
        self._outputs = HeldOutputs(engine)

    @property
    def state(self) -> EngineState:
        """Return the last known state."""
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state
        self.told(state)

    @property
    def paused(self) -> bool:
        """Return whether the engine is known to be paused."""
        return self.state is EngineState.PAUSED

    def hold_outputs(self, seconds: float) -> None:
        """Hand out nothing that was sampled, until the engine is known to go on or to stand still
        for long, or for that long.

        With hundreds of requests the hand-out takes longer than an update. While the engine's
        answer is late, the weights of a new token are not known.
        """
        self._outputs.hold(seconds)

    def release_outputs(self) -> None:
        """Hand out what was held."""
        self._outputs.release()

    async def pause(self) -> None:
        """Pause the engine, and return once it is paused.

        Raises:
            BridgeRefusal: it does not answer in time, failed or has died; it may stand still or
                not.
        """
        self.state = EngineState.UNKNOWN
        self.pausing = True
        try:
            await self._command(
                pause_and_keep(self._engine, clear_cache=not self._keep_cache), "a pause"
            )
        finally:
            self.pausing = False
        self.state = EngineState.PAUSED
        self.pauses += 1

    async def resume(self) -> None:
        """Return when it goes on, and hand out what was held; at once if it runs, or rests, which
        ends in another way.

        Raises:
            BridgeRefusal: as `pause`.
        """
        if self.state is not EngineState.RUNNING and not self.resting:
            self.state = EngineState.UNKNOWN
            await self._command(self._engine.resume_generation(), "the command to go on")
            self.state = EngineState.RUNNING
        self._outputs.release()

    def lose_track(self) -> None:
        """Note that another command to the engine has no answer."""
        self.state = EngineState.UNKNOWN

    def note(self, runs: bool) -> None:
        """Note the state after another command that was answered."""
        self.state = EngineState.RUNNING if runs else EngineState.PAUSED

    async def _command(self, command: Any, what: str) -> None:
        try:
            with self._silence.waiting():
                await answer_in_time(
                    self._engine,
                    command,
                    what,
                    self._silence.patience(self._timeout),
                    "vLLM's engine",
                )
        except BridgeRefusal as refusal:
            raise BridgeRefusal(
                refusal.status, f"{refusal}; whether it stands still is not known"
            ) from refusal
