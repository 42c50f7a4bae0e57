"""The routes by which the trainer tells of its inference servers, people change them, and environments follow."""

from __future__ import annotations

import logging
import time

from fastapi import FastAPI, Request
from fastapi.responses import Response

from atroposlib.api.answers import answer, refuse
from atroposlib.api.fleet import FleetFullError, UnknownServerError
from atroposlib.api.openapi import takes
from atroposlib.api.schemas import PublishedFleet, ServerAddress, read
from atroposlib.api.service import RolloutService

logger = logging.getLogger(__name__)


def add_fleet_routes(app: FastAPI, service: RolloutService) -> None:
    """GET and POST /fleet, POST /fleet/join and /fleet/leave."""

    @app.exception_handler(UnknownServerError)
    async def _(_: Request, error: UnknownServerError) -> Response:
        return refuse(404, str(error))

    @app.exception_handler(FleetFullError)
    async def _(_: Request, error: FleetFullError) -> Response:
        return refuse(429, str(error), {"Retry-After": "60"})

    @app.get("/fleet")
    async def fleet() -> Response:
        """The inference servers: what the trainer says of each, and which are wanted or shall leave."""
        wishes = await service.run(lambda queue: queue.fleet.stored())
        table = service.fleet_table
        return answer({"servers": table.servers, **wishes, "published": table.published})

    @app.post("/fleet", **takes(PublishedFleet))
    async def publish(request: Request) -> Response:
        """The trainer, or a parameter server, tells how its servers are. The table replaces its one before."""
        told = read(PublishedFleet, await request.body())
        if told.uuid is not None:
            service.queue.require_trainer(told.uuid)
        rows = [server.model_dump() for server in told.servers]
        service.fleet_table = service.fleet_table.told(told.by, rows, time.time())
        wishes = await service.run(lambda queue: queue.fleet.stored())
        return answer({"status": "success", **wishes})

    @app.post("/fleet/join", **takes(ServerAddress))
    async def join(request: Request) -> Response:
        """A server is wanted: the trainer brings it in as soon as it answers."""
        url = read(ServerAddress, await request.body()).url
        await service.run(lambda queue: queue.fleet.join(url))
        logger.info("%s is wanted in the fleet", url)
        return answer({"status": "success", **service.queue.fleet.stored()})

    @app.post("/fleet/leave", **takes(ServerAddress))
    async def leave(request: Request) -> Response:
        """A server shall leave: the trainer and the environments let go of it."""
        url = read(ServerAddress, await request.body()).url
        await service.run(lambda queue: queue.fleet.leave(url, service.fleet_table.urls()))
        logger.info("%s is to leave the fleet", url)
        return answer({"status": "success", **service.queue.fleet.stored()})
