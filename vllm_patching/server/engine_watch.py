"""The watch over the progress of vLLM's engine. It ends the requests of an engine that makes none."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_patching.compat.engine import ask_engine_cores, engine_is_dead, replicas
from vllm_patching.engine_core.progress import PROGRESS, WATCH_STEPS, FirstSteps
from vllm_patching.server.engine_calls import answer_in_time

FIRST_STEP_FACTOR = 10
"""A step of a shape that never ran before may compile kernels. It has so many times the limit."""
REMEDY = "it serves again when the engine goes on; if it does not, restart the server"


@dataclass(slots=True)
class _Replica:
    """One engine core.

    Attributes:
        silent: seconds without progress, outside first steps.
        in_first_step: seconds of a step of a new shape.
        unheard: seconds since its last answer, outside first steps.
        executed: batches that it had begun at its last answer; None before the first.
    """

    silent: float = 0.0
    in_first_step: float = 0.0
    unheard: float = 0.0
    executed: int | None = None


class EngineProgress:
    """Counts how long each replica of an engine has made no progress.

    A replica makes progress if it answers and has begun another batch since its last answer. It
    also does if it has no request that a step would advance. An engine in a pause has none.
    """

    def __init__(self, limit: float, replicas: int = 1) -> None:
        """
        Args:
            limit: seconds without progress after which there is trouble.
        """
        self._limit = limit
        self._replicas = [_Replica() for _ in range(replicas)]

    def passed(self, seconds: float, first_steps: Sequence[bool]) -> None:
        """Count time that has passed.

        Args:
            first_steps: for each replica, whether a step of a new shape is under way.
        """
        for replica, first in zip(self._replicas, first_steps, strict=True):
            if first:
                replica.in_first_step += seconds
            else:
                replica.silent += seconds
                replica.unheard += seconds

    def excused(self) -> None:
        """Begin to count again: the engine is paused on purpose."""
        for replica in self._replicas:
            self._progressed(replica)

    def answered(self, number: int, executed: int, due: int) -> None:
        """Take in an answer of one replica.

        Args:
            executed: batches that it has begun.
            due: requests that its next steps should advance.
        """
        replica = self._replicas[number]
        if due == 0 or executed != replica.executed:
            self._progressed(replica)
        replica.unheard, replica.executed = 0.0, executed

    @property
    def trouble(self) -> str:
        """Return why no token can be sampled; empty if all replicas make progress.

        The text has no number that grows, so it rarely changes while the trouble lasts. A replica
        counts as answering for half of the limit after its last answer. Later it may have been stopped.
        """
        for number, replica in enumerate(self._replicas):
            name = f"vLLM's engine core {number}" if len(self._replicas) > 1 else "vLLM's engine"
            if replica.silent > self._limit:
                answers = replica.unheard < self._limit / 2
                done = "answers, but has made no step" if answers else "has not answered"
                return f"{name} {done} for {self._limit:g} s (--engine-timeout): {REMEDY}"
            if replica.in_first_step > FIRST_STEP_FACTOR * self._limit:
                longest = f"{FIRST_STEP_FACTOR * self._limit:g} s ({FIRST_STEP_FACTOR} times --engine-timeout)"
                return f"{name} has been in its first step of a new shape for {longest}: {REMEDY}"
        return ""

    @staticmethod
    def _progressed(replica: _Replica) -> None:
        replica.silent = replica.in_first_step = replica.unheard = 0.0


logger = logging.getLogger("vllm.lockstep.engine")

TICK_SECONDS = 0.5
LONGEST_TICK_SECONDS = 1.0
"""A tick that took longer counts as this: the API process was stopped or busy, and may not have
read the engine's answer."""
QUESTIONS = 10
"""The engine is asked so many times within the limit."""


class EngineWatch:
    """Asks every engine core for its progress, one question at a time. `EngineProgress` judges the
    answers.
    """

    def __init__(
        self,
        engine: Any,
        limit: float,
        held: Callable[[], bool],
        end_requests: Callable[[str], Coroutine[Any, Any, None]],
    ) -> None:
        """
        Args:
            engine: vLLM's AsyncLLM.
            limit: seconds without progress after which there is trouble (--engine-timeout).
            held: return whether the engine is paused on purpose.
            end_requests: answer every request in flight with a reason.
        """
        self._engine, self._limit, self._held, self._end_requests = (
            engine,
            limit,
            held,
            end_requests,
        )
        self._count = replicas(engine)
        self._progress = EngineProgress(limit, self._count)
        self._first_steps: FirstSteps | None = None
        self._questions: dict[int, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._asked = 0.0
        self._trouble = self._failure = ""

    @property
    def trouble(self) -> str:
        """Return why no token can be sampled; empty while the engine makes progress."""
        return self._trouble

    async def start(self, timeout: float) -> None:
        """Begin to watch. Call from within the engine's event loop.

        Args:
            timeout: seconds for the engine's first answer.

        Raises:
            BridgeRefusal: the engine did not answer in time.
            UnsupportedVllm: the engine core has no such method.
        """
        handle, name = tempfile.mkstemp(prefix="lockstep-steps-")
        os.close(handle)
        self._first_steps = FirstSteps(Path(name), self._count)
        try:
            for question in ask_engine_cores(self._engine, WATCH_STEPS, name, self._count):
                await answer_in_time(self._engine, question, WATCH_STEPS, timeout, "vLLM's engine")
        finally:
            self._first_steps.remove_file()
        self._task = asyncio.create_task(self._watch(), name="engine watch")

    async def stop(self) -> None:
        """End the watch."""
        tasks = [
            task
            for task in (self._task, self._ending, *self._questions.values())
            if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            passed, last = min(now - last, LONGEST_TICK_SECONDS), now
            try:
                await self._tick(passed, now)
            except Exception as error:  # the watch must go on; the same error is logged once
                if repr(error) != self._failure:
                    logger.exception(
                        "[Engine] the watch over vLLM's engine failed in one look; it goes on"
                    )
                self._failure = repr(error)

    async def _tick(self, passed: float, now: float) -> None:
        assert self._first_steps is not None
        if engine_is_dead(self._engine):
            return
        self._progress.passed(
            passed, [self._first_steps.under_way(number) for number in range(self._count)]
        )
        if self._held():
            self._progress.excused()
        if self._trouble or now - self._asked >= self._limit / QUESTIONS:
            self._asked = now
            self._ask()
        before, self._trouble = self._trouble, self._progress.trouble
        if self._trouble and not before:
            logger.error("[Engine] UNHEALTHY: %s; requests in flight end with 503", self._trouble)
            self._ending = asyncio.create_task(
                self._end_requests(self._trouble), name="end of requests"
            )
        elif before and not self._trouble:
            logger.warning("[Engine] vLLM's engine makes progress again: requests are answered")

    def _ask(self) -> None:
        """Ask those engine cores that have answered the question before."""
        free = [
            n for n in range(self._count) if n not in self._questions or self._questions[n].done()
        ]
        if not free:
            return
        for number, question in enumerate(ask_engine_cores(self._engine, PROGRESS)):
            if number in free:
                self._questions[number] = asyncio.create_task(
                    self._answer(number, question), name=f"progress of {number}"
                )
            elif asyncio.iscoroutine(question):
                question.close()

    async def _answer(self, number: int, question: Awaitable[Any]) -> None:
        try:
            answer = await question
        except Exception as error:  # noqa: BLE001 - an engine that cannot answer makes no progress, whatever it raises
            logger.debug("[Engine] engine core %d did not answer: %r", number, error)
            return
        self._progress.answered(number, int(answer["executed"]), int(answer["due"]))
