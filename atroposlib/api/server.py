"""The rollout service's routes. Each reads its request, makes one call on the service, and shapes the answer."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from atroposlib.api.access import Access
from atroposlib.api.answers import answer, query_int, refuse
from atroposlib.api.evaluation_routes import add_evaluation_routes
from atroposlib.api.fleet import Table
from atroposlib.api.fleet_routes import add_fleet_routes
from atroposlib.api.group_reader import GroupReader, ReaderError
from atroposlib.api.middleware import GZIP_FROM, Gate, Place, RequestLimits, accepts_gzip, compress
from atroposlib.api.openapi import describe, takes
from atroposlib.api.reference_routes import add_reference_routes
from atroposlib.api.refusals import InvalidRequestError, invalid
from atroposlib.api.schemas import (
    AckBatch,
    EndRun,
    EnvIdentifier,
    RegisterEnv,
    RegisterTrainer,
    ScoredData,
    read,
)
from atroposlib.api.service import RolloutService
from atroposlib.api.state import (
    BatchTooSmallError,
    Draft,
    NotRegisteredError,
    QueueFullError,
    Receipt,
    Registration,
    SupersededError,
    UnknownBatchError,
    UnknownEnvironmentError,
)
from atroposlib.api.store import MemoryStore, StoreError

logger = logging.getLogger(__name__)

NO_EXAMPLE: dict[str, list[Any]] = {
    name: []
    for name in (
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "generation_params",
        "inference_logprobs",
        "messages",
        "images",
    )
}
"""What /latest_example answers before anything was posted."""


def __getattr__(name: str) -> Any:
    """`uvicorn atroposlib.api.server:app` serves from memory; `python -m atroposlib.cli.run_api` has a store, and options."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    logger.warning("app: everything is kept in memory only; python -m atroposlib.cli.run_api keeps it on the disk")
    access = Access(os.environ.get("ROLLOUT_API_KEY") or None)
    globals()["app"] = make_app(RolloutService(MemoryStore()), RequestLimits(access=access))
    return globals()["app"]


class BatchResponse(Response):
    """A batch, taken only now that it can be sent, so that whatever interrupts it, it is not taken for sent or on its way."""

    def __init__(self, service: RolloutService, received: int | None, uuid: int | None, gzip_accepted: bool) -> None:
        super().__init__()
        self.service, self.received, self.uuid, self.gzip_accepted = service, received, uuid, gzip_accepted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            async with self.service.handing_out(self.received, self.uuid) as hand_out:
                if hand_out is None:
                    why = {"reason": self.service.queue.waiting} if self.service.queue.takes_references() else {}
                    await answer({"batch": None, **why})(scope, receive, send)
                else:
                    hand_out.complete = await self._send(hand_out.body, receive, send)
        except NotRegisteredError as error:
            await answer({"status": "error", "message": str(error), "batch": []})(scope, receive, send)

    async def _send(self, body: bytes, receive: Receive, send: Send) -> bool:
        """Send a batch; whether all of it went out."""
        headers = {"content-type": "application/json"}
        if len(body) > GZIP_FROM and self.gzip_accepted:
            body = await compress(body)
            headers |= {"content-encoding": "gzip", "vary": "Accept-Encoding"}
        headers["content-length"] = str(len(body))
        self.init_headers(headers)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        # Sending nothing more waits until the connection has taken what was sent.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        gone = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        complete = not (gone.done() and gone.result()["type"] == "http.disconnect")
        gone.cancel()
        await send({"type": "http.response.body", "body": b""})
        return complete


def make_app(service: RolloutService, limits: RequestLimits | None = None) -> FastAPI:
    """The ASGI application that serves one rollout service."""

    limits = limits or RequestLimits()
    reader = GroupReader(limits.seconds)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        reader.close()
        await service.close()

    app = FastAPI(title="Lockstep rollout service", version="0.1.0", lifespan=lifespan)
    app.add_middleware(Gate, limits=limits, metrics=service.metrics)
    add_error_handlers(app)
    add_trainer_routes(app, service)
    add_environment_routes(app, service, reader)
    add_evaluation_routes(app, service)
    add_fleet_routes(app, service)
    add_reference_routes(app, service)
    add_status_routes(app, service)
    describe(app)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Every refusal of the layers below becomes one clear answer."""

    @app.exception_handler(InvalidRequestError)
    async def _(_: Request, error: InvalidRequestError) -> Response:
        return refuse(422, error.errors)

    @app.exception_handler(QueueFullError)
    async def _(_: Request, error: QueueFullError) -> Response:
        return refuse(429, str(error), {"Retry-After": "1"})

    @app.exception_handler(StoreError)
    async def _(_: Request, error: StoreError) -> Response:
        return refuse(507, str(error), {"Retry-After": "5"})

    @app.exception_handler(ReaderError)
    async def _(_: Request, error: ReaderError) -> Response:
        logger.error("%s", error)
        return refuse(503, str(error), {"Retry-After": "1"})

    @app.exception_handler(UnknownEnvironmentError)
    @app.exception_handler(UnknownBatchError)
    async def _(_: Request, error: Exception) -> Response:
        return refuse(404, str(error))

    @app.exception_handler(SupersededError)
    @app.exception_handler(NotRegisteredError)
    async def _(_: Request, error: Exception) -> Response:
        return refuse(409, str(error))


def add_trainer_routes(app: FastAPI, service: RolloutService) -> None:
    """What a trainer calls."""

    @app.post("/register", **takes(RegisterTrainer))
    async def register(request: Request) -> Response:
        """Register the trainer. A later registration takes over, with the batches that were not acknowledged yet."""
        asked = read(RegisterTrainer, await request.body())
        registration = Registration(uuid=secrets.randbits(52), **asked.model_dump())
        dropped = await service.run(lambda queue: queue.register(registration))
        logger.info(
            "trainer registered: batch_size %d, max_token_len %d, starting_step %d, max_staleness %s, weight_epoch %d",
            asked.batch_size,
            asked.max_token_len,
            asked.starting_step,
            asked.max_staleness,
            asked.weight_epoch,
        )
        if asked.replay is not None:
            logger.info("replay: %s, each group in up to %d batches", asked.replay.policy, asked.replay.max_reuse)
        if dropped:
            logger.warning(
                "dropped %d groups that this trainer's weights did not sample: of another run, or of a version above "
                "starting_step %d",
                dropped,
                asked.starting_step,
            )
        return answer({"uuid": registration.uuid})

    @app.get("/batch")
    async def batch(request: Request) -> Response:
        """The next batch, exactly batch_size sequences in whole groups, or null if there is none yet."""
        received, uuid = query_int(request, "received"), query_int(request, "uuid")
        await request.body()  # so that what comes next on this connection is its end
        return BatchResponse(service, received, uuid, accepts_gzip(request.headers))

    @app.post("/batch/ack", **takes(AckBatch))
    async def ack(request: Request) -> Response:
        """The trainer has learned from a batch: it is gone for good."""
        asked = read(AckBatch, await request.body())
        groups = await service.run(
            lambda queue: queue.ack(asked.batch_id, asked.weight_version, asked.uuid, asked.skipped, asked.keep)
        )
        if asked.skipped is not None and not asked.keep:
            which = "what it held" if asked.batch_id is None else f"batch {asked.batch_id}"
            logger.warning("the trainer skipped %s, %d groups: %s", which, groups, asked.skipped)
        return answer({"status": "success", "groups": groups, "weight_version": service.queue.sampling_version()})

    @app.post("/run/end", **takes(EndRun))
    async def end(request: Request) -> Response:
        """The trainer's run is over: what starts next is another one."""
        uuid = read(EndRun, await request.body()).uuid
        await service.run(lambda queue: queue.end(uuid))
        logger.info("the trainer says that its run has ended, at version %d", service.queue.sampling_version())
        return answer({"status": "success"})

    @app.get("/info")
    async def info() -> Response:
        """What an environment must know of the trainer."""
        trainer = service.queue.registration
        return answer(
            {
                "batch_size": trainer.batch_size if trainer else -1,
                "max_token_len": trainer.max_token_len if trainer else -1,
            }
        )

    @app.get("/wandb_info")
    async def wandb_info() -> Response:
        """Where the trainer logs."""
        trainer = service.queue.registration
        return answer(
            {"group": trainer.wandb_group if trainer else None, "project": trainer.wandb_project if trainer else None}
        )

    @app.get("/reset_data")
    async def reset_data() -> Response:
        """Forget everything, registrations included."""
        groups = service.queue.held_groups
        await service.run(lambda queue: queue.reset())
        service.latest, service.fleet_table = None, Table()
        logger.warning("reset: %d groups and all registrations are gone", groups)
        return Response("Reset successful", media_type="text/plain")


def add_environment_routes(app: FastAPI, service: RolloutService, reader: GroupReader) -> None:
    """What an environment calls."""

    @app.post("/register-env", **takes(RegisterEnv))
    async def register_env(request: Request) -> Response:
        """Register an environment; it has to wait until the trainer has asked for its first batch."""
        asked = read(RegisterEnv, await request.body())
        now = service.clock()
        environment = await service.run(
            lambda queue: queue.register_env(
                asked.desired_name,
                asked.weight,
                asked.group_size,
                asked.max_token_length,
                asked.min_batch_allocation,
                now,
                asked.stream,
            )
        )
        trainer = service.queue.registration
        if environment is None or trainer is None:
            return answer({"status": "wait for trainer to start"})
        logger.info("environment %d registered: %s", environment.env_id, environment.wandb_name)
        if trainer.batch_size % asked.group_size:
            logger.warning(
                "environment %s: its group_size %d does not divide the trainer's batch_size %d, "
                "so its groups can only fill a batch together with others",
                environment.wandb_name,
                asked.group_size,
                trainer.batch_size,
            )
        return answer(
            {
                "status": "success",
                "env_id": environment.env_id,
                "wandb_name": environment.wandb_name,
                "checkpoint_dir": trainer.checkpoint_dir,
                "starting_step": service.queue.current_step,
                "checkpoint_interval": trainer.save_checkpoint_interval,
                "num_steps": trainer.num_steps,
            }
        )

    @app.post("/disconnect-env", **takes(EnvIdentifier))
    async def disconnect_env(request: Request) -> Response:
        """An environment leaves; what it posted stays."""
        env_id = read(EnvIdentifier, await request.body()).env_id
        try:
            await service.run(lambda queue: queue.disconnect_env(env_id))
        except UnknownEnvironmentError as error:
            return answer({"status": "failure", "error": str(error)})
        return answer({"status": "success"})

    @app.get("/status-env", **takes(EnvIdentifier, required=False))
    async def status_env(request: Request) -> Response:
        """How an environment should pace itself. The id comes in a JSON body, or as ?env_id=."""
        env_id = query_int(request, "env_id")
        if env_id is None:
            env_id = read(EnvIdentifier, await request.body()).env_id
        now = service.clock()
        return answer(await service.run(lambda queue: queue.status_env(env_id, now)))

    @app.post("/scored_data", **takes(ScoredData))
    async def scored_data(request: Request) -> Response:
        """Post one group."""
        drafts = await reader.read(await request.body(), many=False)
        (receipt,) = await post(service, request, drafts, many=False)
        return answer(_receipt(receipt))

    @app.post("/scored_data_list", **takes(ScoredData, many=True))
    async def scored_data_list(request: Request) -> Response:
        """Post several groups: all of them are accepted, or none."""
        drafts = await reader.read(await request.body(), many=True)
        receipts = await post(service, request, drafts, many=True)
        result: dict[str, Any] = {"status": "received", "groups_processed": len(receipts)}
        buffered = [receipt for receipt in receipts if receipt.status == "buffered"]
        if buffered:
            result |= {"buffered": len(buffered), "last_buffer_size": buffered[-1].buffer_size}
        dropped = [receipt for receipt in receipts if receipt.status == "dropped"]
        if dropped:
            result |= {"dropped": len(dropped), "reason": dropped[-1].reason}
        return answer(result)


async def post(service: RolloutService, request: Request, drafts: list[Draft], many: bool) -> list[Receipt]:
    """Post groups, and name the field of one that is too large."""
    place: Place = request.state.place
    await place.reached()
    try:
        return await service.post(drafts, place.taken)
    except BatchTooSmallError as error:
        raise invalid([error.index, "tokens"] if many else ["tokens"], error.size, f"tokens: {error}") from None


def _receipt(receipt: Receipt) -> dict[str, Any]:
    result: dict[str, Any] = {"status": receipt.status}
    if receipt.buffer_size is not None:
        result["buffer_size"] = receipt.buffer_size
    if receipt.reason is not None:
        result["reason"] = receipt.reason
    return result


def add_status_routes(app: FastAPI, service: RolloutService) -> None:
    """What a person, a script or Prometheus asks."""

    @app.get("/")
    async def root() -> Response:
        """Says that the service is there; needs no token."""
        return answer({"message": "AtroposLib API"})

    @app.get("/status")
    async def status() -> Response:
        """Batches handed out, and groups that are ready."""
        return answer({"current_step": service.queue.current_step, "queue_size": service.queue.lines.groups})

    @app.get("/stats")
    async def stats() -> Response:
        """Everything that says whether data flows: what waits, what is leased, what was dropped and why, who is behind."""
        return answer(service.stats())

    @app.get("/latest_example")
    async def latest_example() -> Response:
        """The group posted last."""
        if service.latest is None:
            return answer(NO_EXAMPLE)
        return Response(service.latest, media_type="application/json")

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters and gauges for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
