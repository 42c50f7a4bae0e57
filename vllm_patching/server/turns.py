"""A server that takes turns with its trainer on one GPU (`--colocate`).

While the trainer computes, the engine stands still and the memory of its keys and values is the
trainer's. Before a token is sampled it is vLLM's again. Requests wait during the trainer's turn.
The weights are one copy, which stays in place.

    sampling ── /turns/rest: pause, prefixes forgotten, memory given back ──▶ training
    training ── /turns/wake: memory taken again, the engine goes on       ──▶ sampling

An update of the weights in the trainer's turn is an update as any other, but that the engine goes
on with the wake. If a step fails, the server tries to sample again until it can, and is unhealthy
until then. A trainer that ends in its turn is noticed by the watchdog. The turn ends with it, once
the weights that it may have written are settled (see settlement).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from enum import StrEnum
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from vllm_patching.protocol.messages import (
    OCCUPIED,
    BridgeRefusal,
    CacheAnswer,
    Epoch,
    Message,
    TurnsWorker,
    Writer,
)
from vllm_patching.server.engine_calls import EngineSwitch, RankCalls
from vllm_patching.server.state import BridgeConflict, BridgeState

logger = logging.getLogger("vllm.lockstep.turns")

VARIABLE = "LOCKSTEP_COLOCATE"
"""Set to 1 in the environment of the workers (worker/turns.py)."""
NO_MEMORY = 507
"""HTTP status: the keys' and values' memory could not be taken again, yet."""


class Turn(StrEnum):
    SAMPLING = "sampling"
    TRAINING = "training"


NO_TURNS = {"turn": str(Turn.SAMPLING), "turn_seconds": 0.0, "turn_reason": ""}
"""In the state of a server without --colocate."""


class Turns:
    """The present turn. Call from within the engine's event loop."""

    def __init__(
        self,
        state: BridgeState,
        ranks: RankCalls,
        switch: EngineSwitch,
        lock: asyncio.Lock,
        trainer: Callable[[], tuple[Sequence[Writer], Sequence[Writer]]],
    ) -> None:
        """
        Args:
            lock: the controller's, which each call that changes the engine's or the bridge's state
                holds.
            trainer: the processes of the present trainer, and those among them that could not be
                seen from here.
        """
        self._state, self._ranks, self._switch, self._lock, self._trainer = (
            state,
            ranks,
            switch,
            lock,
            trainer,
        )
        self.turn = Turn.SAMPLING
        self.bytes = 0
        """Bytes that each rank gives back, at least; 0 in a server without --colocate."""
        self.changing = False
        """The engine is being paused or released for a turn. New requests wait, as in the turn."""
        self.trouble = ""
        """The reason why the server cannot sample though it should; empty if it can, or need
        not."""
        self._whose: Sequence[Writer] = ()
        self._name = ""
        self._since = time.monotonic()

    async def open(self) -> None:
        """Find the memory that can be given back. Call once, when the workers are set up.

        Raises:
            BridgeRefusal: a rank has none, or did not answer.
        """
        self.bytes = min(
            answer["bytes"] for answer in await self._asked(TurnsWorker.lockstep_cache_bytes)
        )
        logger.info(
            "[Turns] The trainer's turn gives it %.2f GiB of keys and values", self.bytes / 2**30
        )

    async def rest(self, epoch: int) -> dict[str, Any]:
        """Begin the trainer's turn: the engine is paused with its requests kept, and its keys and
        values are freed.

        Returns:
            turn; bytes: freed by this call, over all ranks; seconds: that it took.

        Raises:
            BridgeRefusal: it does not begin; the server samples on, or tries to.
        """
        async with self._lock:
            self._require("rest", epoch)
            writers, unseen = self._trainer()
            if unseen:
                raise BridgeRefusal(
                    409,
                    f"process {unseen[0]} of {self._state.trainer} cannot be seen from here, so "
                    "the server would not notice that it ended in its turn. Run trainer and "
                    "server in one container (or with one --pid namespace)",
                )
            if self.turn is Turn.TRAINING:
                return self._told(0, 0.0)
            begun = time.monotonic()
            self.turn, self._since, self._whose, self._name = (
                Turn.TRAINING,
                begun,
                writers,
                self._state.trainer,
            )
            self.changing = True
            try:
                await self._switch.pause()
                self._switch.resting = True
                answers = await self._asked(TurnsWorker.lockstep_give_back)
                self.changing = False
            except BridgeRefusal as refusal:
                await self._sample_if_possible(f"its turn could not begin: {refusal}")
                raise
            self.trouble = ""
            return self._told(sum(answer["bytes"] for answer in answers), time.monotonic() - begun)

    async def wake(self, epoch: int) -> dict[str, Any]:
        """End the trainer's turn: vLLM gets the memory back, and the engine continues if its
        weights are whole.

        Returns:
            turn; bytes: of each rank that are vLLM's again; seconds: that it took.

        Raises:
            BridgeRefusal: the memory could not be taken again (507), or the engine does not answer.
                The server goes on trying; ask again, or find out from /bridge/state.
        """
        async with self._lock:
            self._require("wake", epoch)
            if self.turn is Turn.SAMPLING and not self.trouble:
                return self._told(0, 0.0)
            begun = time.monotonic()
            await self._sample()
            return self._told(self.bytes, time.monotonic() - begun)

    async def require_over(self, writers: Sequence[Writer]) -> None:
        """End the turn of a trainer that has ended, before another one joins. The lock is held.

        Args:
            writers: the processes of the joining trainer.

        Raises:
            BridgeRefusal: it is the turn of another one, which computes.
        """
        if self.turn is Turn.SAMPLING or set(writers) == set(self._whose):
            return
        if not self._ended():
            raise BridgeRefusal(
                OCCUPIED,
                f"{self._name} has had its turn on this GPU for {time.monotonic() - self._since:.0f} s and still computes; "
                "wait until it has ended, or end its process",
            )
        await self.look()

    async def look(self) -> None:
        """Try again to sample, or end the turn of a dead trainer. For the watchdog, with the lock
        held and outside an update.
        """
        if self.trouble:
            await self._sample_if_possible("")
        elif self.turn is Turn.TRAINING and (ended := self._ended()):
            await self._sample_if_possible(
                f"{self._name} has ended in its turn (process {', '.join(ended)})"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the turn, its seconds, and why no token is sampled now, for /bridge/state."""
        return {
            "turn": str(self.turn),
            "turn_seconds": time.monotonic() - self._since,
            "turn_reason": self.reason,
        }

    @property
    def reason(self) -> str:
        """Return why requests wait; empty if they do not."""
        if self.trouble or self.turn is Turn.SAMPLING:
            return self.trouble
        return f"{self._name} computes on this GPU; requests wait for the end of its turn"

    def _ended(self) -> list[str]:
        return [str(writer) for writer in self._whose if writer.has_ended()]

    def _require(self, step: str, epoch: int) -> None:
        if not self.bytes:
            raise BridgeRefusal(
                409,
                "this server does not take turns: stop it and start it with --colocate, or leave the trainer's --colocate out",
            )
        try:
            self._state.check_epoch(epoch)
        except BridgeConflict as conflict:
            raise BridgeRefusal(409, str(conflict)) from conflict
        if self._state.in_update:
            raise BridgeRefusal(
                409,
                f"/turns/{step} in phase {self._state.phase} of the update to {self._state.target_version}: end that first",
            )

    async def _asked(self, method: Callable[[Any], CacheAnswer]) -> list[CacheAnswer]:
        answers = await self._ranks.call(method)
        errors = [
            f"rank {answer['tp_rank']}: {answer['error']}" for answer in answers if answer["error"]
        ]
        if errors:
            raise BridgeRefusal(NO_MEMORY, "; ".join(errors))
        return answers

    async def _sample(self) -> None:
        """Take the memory again and go on.

        Raises BridgeRefusal; `trouble` then has the reason.
        """
        if self.turn is Turn.TRAINING:
            self.turn, self._since = Turn.SAMPLING, time.monotonic()
        self.changing = True
        try:
            await self._asked(TurnsWorker.lockstep_take_again)
            self._switch.resting = False
            if self._state.healthy:  # else the update that mends the weights lets it go on
                await self._switch.resume()
        except BridgeRefusal as refusal:
            told = f"the GPU cannot be sampled on again: {refusal}; it is tried again and again"
            if told != self.trouble:
                logger.error("[Turns] %s", told)
            self.trouble = told
            raise
        finally:
            self.changing = False
        self.trouble = ""

    async def _sample_if_possible(self, why: str) -> None:
        if why:
            logger.warning("[Turns] %s; sampling again", why)
        in_trouble = bool(self.trouble)
        try:
            await self._sample()
        except BridgeRefusal:
            return  # it is in `trouble`, and in the log
        if in_trouble:
            logger.warning("[Turns] The keys' and values' memory is there again: sampling")

    def _told(self, size: int, seconds: float) -> dict[str, Any]:
        return {"turn": str(self.turn), "bytes": size, "seconds": seconds}


def prepare(args: argparse.Namespace, shared: bool, variables: MutableMapping[str, str]) -> str:
    """Have the workers of a server with --colocate make memory that can be given back.

    Args:
        args: the server's.
        shared: whether it shares its weights.
        variables: os.environ.

    Returns:
        empty, or why --colocate does not go with what else was asked for.
    """
    variables.pop(VARIABLE, None)
    if not args.colocate:
        return ""
    if not shared:
        return "--colocate needs `export VLLM_ENABLE_SHARED_WEIGHTS=1`: the trainer works on vLLM's copy of the weights"
    if args.inflight_cache != "recompute":
        return f"--inflight-cache {args.inflight_cache} and --colocate exclude each other: no keys and values survive a turn"
    for name, why in (
        ("data_parallel_size", "its replicas would have to rest on several GPUs at once"),
        ("kv_transfer_config", "what takes keys and values elsewhere holds their addresses"),
        ("kv_offloading_size", "what takes keys and values elsewhere holds their addresses"),
    ):
        value = getattr(args, name, None)
        if value not in (None, 1):
            return f"--{name.replace('_', '-')} {value} and --colocate exclude each other: {why}"
    variables[VARIABLE] = "1"
    return ""


class TurnBody(Message):
    epoch: Epoch


def add_turn_routes(router: APIRouter, turns: Callable[[], Turns | None], not_shared: str) -> None:
    """POST /turns/rest and /turns/wake.

    Args:
        turns: asked at each request; None while there are none.
        not_shared: what is answered then.
    """

    def route(path: str, step: Callable[[Turns, int], Awaitable[dict[str, Any]]]) -> None:
        async def endpoint(body: TurnBody) -> JSONResponse:
            found = turns()
            if found is None:
                return JSONResponse({"error": not_shared}, 409)
            try:
                return JSONResponse(await step(found, body.epoch))
            except BridgeRefusal as refusal:
                logger.warning("[Turns] %s: %s", path, refusal)
                return JSONResponse({"error": str(refusal)}, refusal.status)

        endpoint.__annotations__["body"] = TurnBody
        router.post(path)(endpoint)

    route("/turns/rest", lambda found, epoch: found.rest(epoch))
    route("/turns/wake", lambda found, epoch: found.wake(epoch))
