"""The routes for people, scripts and Prometheus: how the service is, and which inference servers the run has. The trainer tells
of those, people change them, and environments follow."""

from __future__ import annotations

import logging
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from atroposlib.service.answers import answer, refuse, takes
from atroposlib.service.fleet import FleetFullError, TooManyPublishersError, UnknownServerError
from atroposlib.service.schemas import PublishedFleet, ServerAddress, read
from atroposlib.service.service import RolloutService

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
"""Answer of /latest_example before the first post."""


def add_status_routes(app: FastAPI, service: RolloutService) -> None:
    """Routes for people, scripts and Prometheus."""

    @app.get("/")
    async def root() -> Response:
        """Says that the service is there; needs no token."""
        return answer({"message": "AtroposLib API"})

    @app.get("/status")
    async def status() -> Response:
        """Batches handed out, and groups that are ready; batches that were set aside, if there are any."""
        queue = service.queue
        aside = {"batches_set_aside": queue.failures.total} if queue.failures.total else {}
        return answer({"current_step": queue.current_step, "queue_size": queue.lines.groups} | aside)

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


def add_fleet_routes(app: FastAPI, service: RolloutService) -> None:
    """GET and POST /fleet, POST /fleet/join and /fleet/leave."""

    @app.exception_handler(UnknownServerError)
    async def _(_: Request, error: UnknownServerError) -> Response:
        return refuse(404, str(error))

    @app.exception_handler(FleetFullError)
    async def _(_: Request, error: FleetFullError) -> Response:
        return refuse(429, str(error), {"Retry-After": "60"})

    @app.exception_handler(TooManyPublishersError)
    async def _(_: Request, error: TooManyPublishersError) -> Response:
        return refuse(429, str(error), {"Retry-After": "60"})

    @app.get("/fleet")
    async def fleet() -> Response:
        """The inference servers: what the trainer says of each, and which are wanted or shall leave."""
        requests = await service.run(lambda queue: queue.fleet.answered(service.keyed))
        table = service.fleet_status
        age = table.age(service.clock())
        return answer({"servers": table.servers, **requests, "published": table.published, "published_ago": age})

    @app.post("/fleet", **takes(PublishedFleet))
    async def publish(request: Request) -> Response:
        """The trainer, or a parameter server, tells how its servers are. The table replaces its one before."""
        told = read(PublishedFleet, await request.body())
        if told.uuid is not None:
            service.queue.require_trainer(told.uuid)
        if not told.by:
            service.heard_trainer(publishes=True)
        rows = [server.model_dump() for server in told.servers]
        service.fleet_status = service.fleet_status.updated(told.by, rows, service.clock(), time.time())
        requests = await service.run(lambda queue: queue.fleet.answered(service.keyed))
        return answer({"status": "success", **requests})

    @app.post("/fleet/join", **takes(ServerAddress))
    async def join(request: Request) -> Response:
        """A server is wanted: the trainer brings it in as soon as it answers."""
        url = read(ServerAddress, await request.body()).url
        await service.run(lambda queue: queue.fleet.join(url, service.keyed))
        logger.info("%s is wanted in the fleet", url)
        return answer({"status": "success", **service.queue.fleet.answered(service.keyed)})

    @app.post("/fleet/leave", **takes(ServerAddress))
    async def leave(request: Request) -> Response:
        """A server shall leave: the trainer and the environments let go of it."""
        url = read(ServerAddress, await request.body()).url
        await service.run(lambda queue: queue.fleet.leave(url, service.fleet_status.urls()))
        logger.info("%s is to leave the fleet", url)
        return answer({"status": "success", **service.queue.fleet.answered(service.keyed)})
