"""LoRA adapters, exchanged while the server runs: a request that names no adapter uses the newest
one.

Every load gets an id and a name that were never used before. vLLM's prefix cache is keyed by the
adapter's name. So values of one adapter are never used for another, and nothing has to be paused or
cleared. A request keeps the adapter that it began with; an adapter is forgotten when its last
request has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field

from vllm_patching.compat.adapters import lora_request
from vllm_patching.protocol.messages import (
    LARGEST,
    BridgeRefusal,
    LoraLoad,
    LoraSetup,
    LoraWorker,
    Message,
)
from vllm_patching.server.engine_calls import Answer, Arguments, RankCalls
from vllm_patching.server.state import Span, VersionSpans, Weights
from vllm_patching.transport.adapter_file import AdapterError, open_adapter
from vllm_patching.weights.families import Geometry

logger = logging.getLogger("vllm.lockstep.lora")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 5.0


class AdapterRemovals:
    """Removes adapters in the background. Used on the event loop.

    Attributes:
        trouble: why the last try to remove the pending ones did not succeed; empty if none has
            failed.
    """

    def __init__(
        self, remove: Callable[[list[int]], Awaitable[list[list[int]]]], freed: Callable[[], None]
    ) -> None:
        """
        Args:
            remove: has the workers forget adapters. Returns the adapters that each rank holds then.
                Has a deadline.
            freed: called when another adapter fits.
        """
        self._remove, self._freed = remove, freed
        self._pending: set[int] = set()
        self._task: asyncio.Task[None] | None = None
        self.trouble = ""

    @property
    def pending(self) -> list[int]:
        """Ids of the adapters that may still take a place."""
        return sorted(self._pending)

    def add(self, adapter_id: int) -> None:
        """Remove this one, or make sure that it is not there."""
        self._pending.add(adapter_id)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="LoRA removals")

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while self._pending:
            asked = self.pending
            try:
                held = {adapter_id for rank in await self._remove(asked) for adapter_id in rank}
                self._pending -= set(asked) - held
                if kept := held & set(asked):
                    raise RuntimeError(f"a worker still holds {sorted(kept)}")
            except Exception as error:  # noqa: BLE001  # whatever it is, the places must be found out about
                if not self.trouble:
                    logger.error(
                        "[LoRA] cannot find out whether adapters %s are removed: %s; asking again",
                        asked,
                        error,
                    )
                self.trouble = str(error) or type(error).__name__
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            if self.trouble:
                logger.info("[LoRA] adapters %s are removed after all", asked)
            self.trouble, pause = "", _FIRST_PAUSE_SECONDS
            self._freed()


NOT_ENABLED = (
    "this server takes no LoRA adapters: start it with --enable-lora (and --max-lora-rank N for ranks above 16), "
    "without VLLM_ENABLE_SHARED_WEIGHTS=1"
)
SETUP_SECONDS = 1800.0
"""For the checksum of the base model, once: a minute for some GB on a busy CPU, nothing on a
GPU."""
FIRST_ID = 1_000_000
"""vLLM counts the adapters of its own flags and routes from 1."""


class LoraRefusal(RuntimeError):
    """The server refuses a request. It still serves what it served before.

    Attributes:
        status: HTTP status of the answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdapterSpans(VersionSpans):
    """Spans of requests that keep the weights they began with."""

    def __init__(self, version: int = 0, epoch: int = 0) -> None:
        super().__init__(version, epoch)
        self._began: dict[str, Weights] = {}

    def start(self, request_id: str) -> None:
        self._began[request_id] = self.weights

    def finish(self, request_id: str, num_tokens: int) -> list[Span]:
        return [Span(self._began.pop(request_id), num_tokens)]

    def forget(self, request_id: str) -> None:
        self._began.pop(request_id, None)


@dataclass
class Adapter:
    """One that vLLM holds.

    Attributes:
        weight_epoch: the life of the trainer that made it (see version_spans.Weights).
        request: what vLLM wants with a request that uses it.
        requests: how many run with it now.
    """

    adapter_id: int
    name: str
    version: int
    path: str
    rank: int
    checksum: str
    request: Any
    weight_epoch: int = 0
    requests: int = 0
    loaded_at: str = field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")
    )

    def to_json(self) -> dict[str, Any]:
        fields = (
            "name",
            "version",
            "weight_epoch",
            "path",
            "rank",
            "checksum",
            "requests",
            "loaded_at",
        )
        return {name: getattr(self, name) for name in fields}


class LoraController:
    """Loads adapters into one server, in its API process. Used on the event loop.

    Args:
        engine: vLLM's engine client.
        model: what the server calls its base model.
        timeout: seconds that a load may take, waiting included.
        spans: receives the version that new requests begin with.
    """

    def __init__(self, engine: Any, model: str, timeout: float, spans: AdapterSpans) -> None:
        self._engine, self._model, self.timeout, self._spans = engine, model, timeout, spans
        self._workers = RankCalls(engine, timeout)
        self._base_weights = spans.weights
        self._generate = engine.generate
        self._current: Adapter | None = None
        self._retiring: dict[int, Adapter] = {}
        self._next_id = FIRST_ID
        self._lock = asyncio.Lock()
        self._room = asyncio.Event()
        self._removals = AdapterRemovals(
            lambda ids: self._rpc(LoraWorker.lora_remove, ids), self._room.set
        )
        self._ranks: list[LoraSetup] = []
        self.swaps = 0
        self.last_error = ""
        self.last_swap: dict[str, float] = {}

    async def start(self) -> None:
        """Ask the workers what they hold, and stand before the engine: requests that name no
        adapter get the newest.
        """
        self._geometry = Geometry.from_config(self._engine.model_config.hf_config.to_dict())
        self._ranks = await self._rpc(LoraWorker.lora_setup, seconds=SETUP_SECONDS)
        self._engine.generate = self.generate
        logger.info(
            "[vLLM Patch] ✓ LoRA ready: rank up to %d, %d adapters at the same time, %d in memory",
            self._ranks[0]["max_rank"], self._ranks[0]["slots"], self._ranks[0]["capacity"],
        )  # fmt: skip

    async def generate(
        self, *args: Any, lora_request: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """The engine's generate.

        Takes the newest adapter when the first output is asked for, unless another was named.
        """
        adapter = self._current if lora_request is None else None
        if adapter is not None:
            lora_request = adapter.request
            adapter.requests += 1
        try:
            async with aclosing(
                self._generate(*args, lora_request=lora_request, **kwargs)
            ) as outputs:
                async for output in outputs:
                    yield output
        finally:
            if adapter is not None:
                adapter.requests -= 1
                self._retire_if_idle(adapter)

    def info(self) -> dict[str, Any]:
        """Return the facts that a trainer compares with its model before the first load."""
        return {"model": self._model, **self._limits(), "ranks": [rank["manifest"] for rank in self._ranks],
                "base_checksums": [rank["checksum"] for rank in self._ranks]}  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Return the served adapter, and the figures of the last exchange."""
        return {
            "enabled": True,
            "model": self._model,
            **self._limits(),
            "current": self._current.to_json() if self._current else None,
            "weight_version": self._spans.weights.version,
            "weight_epoch": self._spans.weights.epoch,
            "retiring": [adapter.to_json() for adapter in self._retiring.values()],
            "removing": self._removals.pending,
            "removal_error": self._removals.trouble,
            "swaps": self.swaps,
            "last_swap": dict(self.last_swap),
            "last_error": self.last_error,
        }

    async def load(
        self,
        path: str,
        version: int,
        checksum: str | None,
        replaces: str | None,
        weight_epoch: int = 0,
    ) -> dict[str, Any]:
        """Serve the adapter in a folder to every request that begins from now on.

        Args:
            path: absolute; the folder must stay as it is for as long as `paths_in_use` names it.
            version: what /generate reports for tokens sampled with it.
            checksum: what the file must have; None accepts any.
            replaces: name of the adapter that the caller believes to be served; None does not care.
            weight_epoch: of the trainer that made it.

        Raises:
            LoraRefusal: it cannot be served, and why; what was served before is served still.
        """
        asked = time.perf_counter()
        async with self._lock:
            try:
                return await self._load(
                    path, Weights(weight_epoch, version), checksum, replaces, asked
                )
            except LoraRefusal as refusal:
                self.last_error = str(refusal)
                raise

    async def unload(self) -> dict[str, Any]:
        """Serve the base model to every request that begins from now on."""
        async with self._lock:
            self._replace_by(None)
            logger.info("[LoRA] Serving the base model")
            return self.status()

    async def _load(
        self, path: str, weights: Weights, checksum: str | None, replaces: str | None, asked: float
    ) -> dict[str, Any]:
        version = weights.version
        serves = self._current.name if self._current else None
        # A server that was restarted serves no adapter and may be given any.
        if replaces is not None and serves not in (None, replaces):
            raise LoraRefusal(
                409,
                f"{serves} is served, not {replaces}: another trainer or person has loaded it since",
            )
        folder = Path(path)
        if not folder.is_absolute():
            raise LoraRefusal(
                400,
                f"path {path!r} must be absolute: this server may run in another folder than you",
            )
        try:
            file = await asyncio.to_thread(
                open_adapter, folder, self._geometry, self._ranks[0]["max_rank"]
            )
        except AdapterError as error:
            raise LoraRefusal(400, str(error)) from error
        await self._wait_for_room()
        seconds = {"wait": time.perf_counter() - asked}
        adapter_id = self._next_id
        self._next_id += 1
        began = time.perf_counter()
        answers = await self._load_on_ranks(path, adapter_id, checksum)
        took = time.perf_counter() - began
        seconds |= {
            phase: max(answer["seconds"][phase] for answer in answers)
            for phase in answers[0]["seconds"]
        }
        seconds["call"] = max(0.0, took - sum(seconds[phase] for phase in answers[0]["seconds"]))
        name = f"lora-v{version}-{adapter_id}"
        request = lora_request(name, adapter_id, path)
        adapter = Adapter(
            adapter_id,
            name,
            version,
            path,
            file.rank,
            answers[0]["checksum"],
            request,
            weights.epoch,
        )
        self._replace_by(adapter)
        self.swaps += 1
        self.last_error = ""
        self.last_swap = {**seconds, "total": time.perf_counter() - asked}
        logger.info(
            "[LoRA] Serving %s (weight version %d, %.1f ms)",
            name,
            version,
            self.last_swap["total"] * 1e3,
        )
        in_use = [other.path for other in (adapter, *self._retiring.values())]
        return {**adapter.to_json(), "seconds": self.last_swap, "paths_in_use": in_use}

    async def _load_on_ranks(
        self, path: str, adapter_id: int, checksum: str | None
    ) -> list[LoraLoad]:
        try:
            answers = await self._rpc(LoraWorker.lora_load, path, adapter_id, checksum)
        except (
            BaseException
        ):  # without an answer it may be there on some ranks, or come to be there later
            self._removals.add(adapter_id)
            raise
        failed = [
            f"rank {rank}: {answer['error']}"
            for rank, answer in enumerate(answers)
            if answer["error"]
        ]
        if failed:
            self._removals.add(adapter_id)
            raise LoraRefusal(422, failed[0])
        return answers

    async def _wait_for_room(self) -> None:
        """Wait until another adapter fits beside the adapters in use."""
        capacity, deadline = self._ranks[0]["capacity"], time.monotonic() + self.timeout
        while (
            len(self._retiring) + len(self._removals.pending) + (self._current is not None)
            >= capacity
        ):
            self._room.clear()
            try:
                await asyncio.wait_for(self._room.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                taken = [f"{a.name} ({a.requests} requests)" for a in self._retiring.values()]
                if self._removals.trouble:
                    taken.append(
                        f"{len(self._removals.pending)} whose removal is not certain ({self._removals.trouble})"
                    )
                raise LoraRefusal(
                    503,
                    f"all {capacity} places for adapters were in use for {self.timeout:g} s: "
                    f"{', '.join(taken)}. Start the server with a larger --max-cpu-loras, or see "
                    "why it does not answer",
                ) from None

    def _replace_by(self, adapter: Adapter | None) -> None:
        old, self._current = self._current, adapter
        self._spans.weights = (
            Weights(adapter.weight_epoch, adapter.version) if adapter else self._base_weights
        )
        if old is not None:
            self._retiring[old.adapter_id] = old
            self._retire_if_idle(old)

    def _retire_if_idle(self, adapter: Adapter) -> None:
        if adapter.requests == 0 and self._retiring.pop(adapter.adapter_id, None) is not None:
            self._removals.add(adapter.adapter_id)

    async def _rpc(
        self,
        method: Callable[[Any, *Arguments], Answer],
        *args: *Arguments,
        seconds: float | None = None,
    ) -> list[Answer]:
        try:
            return await self._workers.call(method, *args, seconds=seconds)
        except BridgeRefusal as refusal:
            raise LoraRefusal(refusal.status, str(refusal)) from refusal

    def _limits(self) -> dict[str, Any]:
        return {key: self._ranks[0][key] for key in ("dtype", "max_rank", "slots", "capacity")}


class LoadBody(Message):
    """The body of POST /lora/load."""

    path: str = Field(
        min_length=1,
        description="absolute path of a folder in PEFT's format, on the server's machine",
    )
    version: int = Field(
        ge=0, le=LARGEST, description="weight version that /generate reports for it"
    )
    checksum: str | None = Field(
        default=None, description="of the weights file, as the trainer computes it"
    )
    replaces: str | None = Field(
        default=None, description="name of the adapter that must be served now, if any is"
    )
    weight_epoch: int = Field(
        default=0,
        ge=0,
        le=LARGEST,
        description="weight epoch of the trainer that made it",
    )


def add_lora_routes(router: APIRouter, service: Any) -> None:
    """Add /lora/status, /lora/info, /lora/load and /lora/unload.

    Args:
        service: has `engine` and `lora`, a LoraController or None.
    """

    def refusal() -> JSONResponse | None:
        if service.engine is None:
            return _error(503, "the engine is still loading")
        return None if service.lora is not None else _error(409, NOT_ENABLED)

    @router.get("/lora/status")
    async def lora_status() -> JSONResponse:
        return refusal() or JSONResponse(service.lora.status())

    @router.get("/lora/info")
    async def lora_info() -> JSONResponse:
        return refusal() or JSONResponse(service.lora.info())

    @router.post("/lora/load")
    async def lora_load(body: LoadBody) -> JSONResponse:
        refused = refusal()
        if refused is not None:
            return refused
        try:
            return JSONResponse(await service.lora.load(**body.model_dump()))
        except LoraRefusal as error:
            logger.warning("[LoRA] /lora/load of version %d: %s", body.version, error)
            return _error(error.status, str(error))

    @router.post("/lora/unload")
    async def lora_unload() -> JSONResponse:
        return refusal() or JSONResponse(await service.lora.unload())


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)
