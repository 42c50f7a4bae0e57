"""The routes by which results of evaluations go from environments to a trainer, or to whoever asks."""

from __future__ import annotations

import logging
import time

from fastapi import FastAPI, Request
from fastapi.responses import Response

from atroposlib.api.answers import answer, query_int
from atroposlib.api.openapi import takes
from atroposlib.api.schemas import PostedEvaluation, read
from atroposlib.api.service import RolloutService

logger = logging.getLogger(__name__)


def add_evaluation_routes(app: FastAPI, service: RolloutService) -> None:
    """POST and GET /evaluations."""

    @app.post("/evaluations", **takes(PostedEvaluation))
    async def post_evaluation(request: Request) -> Response:
        """The result of an evaluation. The newest ones are kept."""
        posted = read(PostedEvaluation, await request.body())
        now, arrived = service.clock(), time.time()
        number = await service.run(
            lambda queue: queue.evaluated(
                now,
                time=arrived,
                env_id=posted.env_id,
                name=posted.name,
                weight_version=posted.weight_version,
                weight_epoch=posted.weight_epoch,
                metrics=posted.metrics,
                key=posted.idempotency_key,
            )
        )
        logger.info("evaluation %d, of %s at weight version %s: %d metrics", number, posted.name, posted.weight_version,
                    len(posted.metrics))  # fmt: skip
        return answer({"status": "received", "id": number})

    @app.get("/evaluations")
    async def evaluations(request: Request) -> Response:
        """The results that came after the one with the id `after` (default 0, all that are kept), oldest first."""
        after = query_int(request, "after") or 0
        found = await service.run(lambda queue: queue.evaluations.after(after))
        return answer({"evaluations": [evaluation.told() for evaluation in found]})
