"""The routes for people, scripts and Prometheus: how the service is, and which inference servers
the run has. The trainer tells of those, people change them, and environments follow."""

from __future__ import annotations

import logging
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from atroposlib.service.answers import Service, answer, takes
from atroposlib.service.schemas import PublishedFleet, ServerAddress, read

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


router = APIRouter()


@router.get("/")
async def root() -> Response:
    """Says that the service is there; needs no token."""
    return answer({"message": "AtroposLib API"})


@router.get("/status")
async def status(service: Service) -> Response:
    """Batches handed out, and groups that are ready; batches that were set aside, if there are any."""
    queue = service.queue
    aside = {"batches_set_aside": queue.failures.total} if queue.failures.total else {}
    return answer({"current_step": queue.current_step, "queue_size": queue.lines.groups} | aside)


@router.get("/stats")
async def stats(service: Service) -> Response:
    """Everything that says whether data flows: what waits, what is leased, what was dropped and
    why, who is behind.
    """
    return answer(service.stats())


@router.get("/latest_example")
async def latest_example(service: Service) -> Response:
    """The group posted last."""
    if service.latest is None:
        return answer(NO_EXAMPLE)
    return Response(service.latest, media_type="application/json")


@router.get("/metrics")
async def metrics(service: Service) -> Response:
    """Counters and gauges for Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/fleet")
async def fleet(service: Service) -> Response:
    """The inference servers: what the trainer says of each, and which are wanted or shall leave."""
    requests = await service.run(lambda queue: queue.fleet.answered(service.keyed))
    table = service.fleet_status
    age = table.age(service.clock())
    return answer(
        {"servers": table.servers, **requests, "published": table.published, "published_ago": age}
    )


@router.post("/fleet", **takes(PublishedFleet))
async def publish(request: Request, service: Service) -> Response:
    """The trainer, or a parameter server, tells how its servers are.

    The table replaces its one before.
    """
    body = read(PublishedFleet, await request.body())
    if body.uuid is not None:
        service.queue.require_trainer(body.uuid)
    if not body.by:
        service.note_trainer_call(publishes=True)
    rows = [server.model_dump() for server in body.servers]
    service.fleet_status = service.fleet_status.updated(body.by, rows, service.clock(), time.time())
    requests = await service.run(lambda queue: queue.fleet.answered(service.keyed))
    return answer({"status": "success", **requests})


@router.post("/fleet/join", **takes(ServerAddress))
async def join(request: Request, service: Service) -> Response:
    """A server is wanted: the trainer brings it in as soon as it answers."""
    url = read(ServerAddress, await request.body()).url
    await service.run(lambda queue: queue.join_fleet(url, service.keyed))
    logger.info("%s is wanted in the fleet", url)
    return answer({"status": "success", **service.queue.fleet.answered(service.keyed)})


@router.post("/fleet/leave", **takes(ServerAddress))
async def leave(request: Request, service: Service) -> Response:
    """A server shall leave: the trainer and the environments let go of it."""
    url = read(ServerAddress, await request.body()).url
    await service.run(lambda queue: queue.leave_fleet(url, service.fleet_status.urls()))
    logger.info("%s is to leave the fleet", url)
    return answer({"status": "success", **service.queue.fleet.answered(service.keyed)})
