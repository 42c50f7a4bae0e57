"""Whether vLLM's engine runs or stands still, as far as that is known, and the commands that change
it.

vLLM stops scheduling when it reads the command to pause, and answers when no step is in flight. So
after a command that was not answered, or that failed, the engine may be in either state. Commands
are carried out in order: one that is answered settles it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from vllm_patching.compat.engine import pause_and_keep
from vllm_patching.compat.outputs import HeldOutputs
from vllm_patching.protocol.verification import BridgeRefusal
from vllm_patching.server.ranks import answer_in_time
from vllm_patching.server.silence import Silence


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
            silence: told of commands that wait for their answer.
        """
        self._state = EngineState.RUNNING
        self.told: Callable[[EngineState], None] = lambda state: None
        """Called with each state that it comes to."""
        self.pauses = 0
        """How often it was stopped."""
        self.pausing = False
        """Whether it is told to pause and has not answered yet."""
        self.resting = False
        """Whether its keys' and values' memory is away (see turns), without which it must not go
        on."""
        self._engine, self._timeout, self._keep_cache = engine, timeout, keep_cache
        self._silence = silence or Silence()
        self._outputs = HeldOutputs(engine)

    @property
    def state(self) -> EngineState:
        """What is known of it."""
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state
        self.told(state)

    @property
    def paused(self) -> bool:
        """Whether it is known to stand still."""
        return self.state is EngineState.PAUSED

    def hold_outputs(self, seconds: float) -> None:
        """Hand out nothing that was sampled, until the engine is known to go on or to stand still
        for long, or for that long.

        With hundreds of requests handing out takes longer than a whole update; and while an answer
        is late that says whether the engine went on, nobody knows with which weights a token was
        sampled.
        """
        self._outputs.hold(seconds)

    def release_outputs(self) -> None:
        """Hand out what was held."""
        self._outputs.release()

    async def pause(self) -> None:
        """Return when it stands still.

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
        """Somebody else's command to it was not answered."""
        self.state = EngineState.UNKNOWN

    def note(self, runs: bool) -> None:
        """Somebody else's command to it was answered."""
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
