"""The routes that a trainer calls: to register, to take batches and say what it has learned from, and to end its run."""

from __future__ import annotations

import asyncio
import logging
import secrets

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from atroposlib.service.answers import answer, query_int, refuse, takes
from atroposlib.service.fleet import FleetStatus
from atroposlib.service.records import NotRegisteredError, Registration
from atroposlib.service.schemas import AckBatch, AskEpoch, BatchReport, EndRun, RegisterTrainer, invalid, read
from atroposlib.service.service import RolloutService
from atroposlib.service.weight_epochs import FIRST_EPOCHS, read_lives
from atroposlib.web.middleware import GZIP_FROM, accepts_gzip, compress

logger = logging.getLogger(__name__)


def add_trainer_routes(app: FastAPI, service: RolloutService) -> None:
    """What a trainer calls."""

    @app.post("/register", **takes(RegisterTrainer))
    async def register(request: Request) -> Response:
        """Register the trainer. A later registration takes over, with the batches that were not acknowledged yet."""
        asked = read(RegisterTrainer, await request.body())
        lives = read_lives(asked.lives)
        _check_epochs(service, "weight_epoch", [asked.weight_epoch])
        _check_epochs(service, "lives", [life.epoch for life in lives])
        registration = Registration(uuid=secrets.randbits(52), **asked.model_dump(exclude={"lives"}))
        service.heard_trainer(publishes=False)
        dropped = await service.run(lambda queue: queue.register(registration, lives))
        service.name_set_aside()
        service.trainer_activity.count()
        if service.recorder is not None:
            service.recorder.model(asked.model)
        logger.info(
            "trainer registered: batch_size %d, max_token_len %d, starting_step %d, max_staleness %s, weight_epoch %d",
            asked.batch_size,
            asked.max_token_len,
            asked.starting_step,
            asked.max_staleness,
            registration.weight_epoch,
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
        epoch = {"weight_epoch": registration.weight_epoch} if registration.weight_epoch else {}
        return answer({"uuid": registration.uuid} | epoch)

    @app.post("/weight-epoch", **takes(AskEpoch))
    async def weight_epoch(request: Request) -> Response:
        """An epoch for the weights of a trainer that starts: no other trainer of this service has it, or a higher one."""
        asked = read(AskEpoch, await request.body())
        _check_epochs(service, "asked", [asked.asked])
        return answer({"weight_epoch": await service.run(lambda queue: queue.give_epoch(asked.asked, asked.run))})

    @app.get("/batch")
    async def batch(request: Request) -> Response:
        """The next batch, exactly batch_size sequences in whole groups, or null if there is none yet."""
        received, uuid = query_int(request, "received"), query_int(request, "uuid")
        service.heard_trainer()
        await request.body()  # so that what comes next on this connection is its end
        return BatchResponse(service, received, uuid, accepts_gzip(request.headers))

    @app.post("/batch/ack", **takes(AckBatch))
    async def ack(request: Request) -> Response:
        """The trainer has learned from a batch: it is gone for good."""
        asked = read(AckBatch, await request.body())
        service.heard_trainer()
        handed_out = service.handed_out(asked.batch_id) if asked.report is not None else []
        groups = await service.run(
            lambda queue: queue.ack(asked.batch_id, asked.weight_version, asked.uuid, asked.skipped, asked.keep)
        )
        service.trainer_activity.count()
        service.reported(handed_out, asked.report)
        if asked.skipped is not None and not asked.keep:
            which = "what it held" if asked.batch_id is None else f"batch {asked.batch_id}"
            logger.warning("the trainer skipped %s, %d groups: %s", which, groups, asked.skipped)
        return answer({"status": "success", "groups": groups, "weight_version": service.queue.sampling_version()})

    @app.post("/batch/report", **takes(BatchReport))
    async def report(request: Request) -> Response:
        """A trainer ends with a batch in hand. The trainer that registers next gets it, unless it is set aside."""
        asked = read(BatchReport, await request.body())
        service.queue.require_trainer(asked.uuid)
        service.reported(service.handed_out(asked.batch_id), asked.report)
        await service.run(lambda queue: queue.report_end(asked.batch_id, asked.error))
        service.name_set_aside()
        return answer({"status": "success"})

    @app.get("/batch/set-aside")
    async def set_aside(request: Request) -> Response:
        """The batches that are handed out no more, because trainers ended with them. With batch_id, one of them in full."""
        batch_id = query_int(request, "batch_id")
        if batch_id is None:
            return answer({"batches": service.queue.set_aside(), "total": service.queue.failures.total})
        body = await service.set_aside_body(batch_id)
        if body is None:
            return refuse(404, f"batch {batch_id} is not set aside; GET /batch/set-aside lists those that are")
        return Response(body, media_type="application/json")

    @app.post("/run/end", **takes(EndRun))
    async def end(request: Request) -> Response:
        """The trainer's run is over: what starts next is another one."""
        uuid = read(EndRun, await request.body()).uuid
        await service.run(lambda queue: queue.end(uuid))
        service.trainer_activity.count()
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
        """Where the trainer logs. Null after the end of a run: an environment that asks then waits for the next trainer."""
        trainer = None if service.queue.ended else service.queue.registration
        return answer(
            {"group": trainer.wandb_group if trainer else None, "project": trainer.wandb_project if trainer else None}
        )

    @app.get("/reset_data")
    async def reset_data() -> Response:
        """Forget everything, registrations included."""
        groups = service.queue.held_groups
        await service.run(lambda queue: queue.reset())
        service.latest, service.fleet_status = None, FleetStatus()
        logger.warning("reset: %d groups and all registrations are gone", groups)
        return Response("Reset successful", media_type="text/plain")


def _check_epochs(service: RolloutService, field: str, named: list[int]) -> None:
    """Check the epochs that a trainer names.

    Raises:
        InvalidRequestError: one is so high that the service could not give higher ones.
    """
    epoch = service.queue.epochs.too_high(named)
    if epoch is not None:
        message = (
            f"{field} names epoch {epoch}: an epoch must be at most {FIRST_EPOCHS}, or close to one that this service gave"
        )
        raise invalid([field], epoch, message)


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
