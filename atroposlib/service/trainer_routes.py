"""The routes that a trainer calls: to register, to take batches and say what it has learned from,
and to end its run.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from atroposlib.service.answers import Service, answer, query_int, refuse, takes
from atroposlib.service.fleet import FleetStatus
from atroposlib.service.records import NotRegisteredError, Registration
from atroposlib.service.run_state import FIRST_EPOCHS
from atroposlib.service.schemas import (
    AckBatch,
    BatchReport,
    EndRun,
    EpochRequest,
    RegisterTrainer,
    invalid,
    read,
)
from atroposlib.service.service import RolloutService
from atroposlib.web.middleware import GZIP_FROM, accepts_gzip, compress
from atroposlib.wire import TrainerSession

logger = logging.getLogger(__name__)


router = APIRouter()


@router.post("/register", **takes(RegisterTrainer))
async def register(request: Request, service: Service) -> Response:
    """Register the trainer.

    A later registration takes over, with the batches that were not acknowledged yet.
    """
    body = read(RegisterTrainer, await request.body())
    sessions = [TrainerSession(epoch, start) for epoch, start in body.lives or ()]
    _check_epochs(service, "weight_epoch", [body.weight_epoch])
    _check_epochs(service, "lives", [session.epoch for session in sessions])
    registration = Registration(uuid=secrets.randbits(52), **body.model_dump(exclude={"lives"}))
    service.note_trainer_call(publishes=False)
    dropped = await service.run(lambda queue: queue.register(registration, sessions))
    service.name_set_aside()
    service.trainer_activity.count()
    if service.recorder is not None:
        service.recorder.model(body.model)
    _log_registration(body, registration.weight_epoch, dropped)
    epoch = {"weight_epoch": registration.weight_epoch} if registration.weight_epoch else {}
    return answer({"uuid": registration.uuid} | epoch)


def _log_registration(body: RegisterTrainer, weight_epoch: int, dropped: int) -> None:
    logger.info(
        "trainer registered: batch_size %d, max_token_len %d, starting_step %d, max_staleness %s, weight_epoch %d",
        body.batch_size,
        body.max_token_len,
        body.starting_step,
        body.max_staleness,
        weight_epoch,
    )
    if body.replay is not None:
        logger.info(
            "replay: %s, each group in up to %d batches", body.replay.policy, body.replay.max_reuse
        )
    if dropped:
        logger.warning(
            "dropped %d groups that this trainer's weights did not sample: of another run, or of a version above "
            "starting_step %d",
            dropped,
            body.starting_step,
        )


@router.post("/weight-epoch", **takes(EpochRequest))
async def weight_epoch(request: Request, service: Service) -> Response:
    """An epoch for the weights of a trainer that starts: no other trainer of this service has it,
    or a higher one.
    """
    body = read(EpochRequest, await request.body())
    _check_epochs(service, "asked", [body.asked])
    return answer(
        {"weight_epoch": await service.run(lambda queue: queue.give_epoch(body.asked, body.run))}
    )


@router.get("/batch")
async def batch(request: Request, service: Service) -> Response:
    """The next batch, exactly batch_size sequences in whole groups, or null if there is none yet."""
    received, uuid = query_int(request, "received"), query_int(request, "uuid")
    service.note_trainer_call()
    await request.body()  # so that what comes next on this connection is its end
    return BatchResponse(service, received, uuid, accepts_gzip(request.headers))


@router.post("/batch/ack", **takes(AckBatch))
async def ack(request: Request, service: Service) -> Response:
    """The trainer has learned from a batch: it is gone for good."""
    body = read(AckBatch, await request.body())
    service.note_trainer_call()
    handed_out = service.handed_out(body.batch_id) if body.report is not None else []
    groups = await service.run(
        lambda queue: queue.ack(
            body.batch_id, body.weight_version, body.uuid, body.skipped, body.keep
        )
    )
    service.trainer_activity.count()
    service.reported(handed_out, body.report)
    if body.skipped is not None and not body.keep:
        which = "what it held" if body.batch_id is None else f"batch {body.batch_id}"
        logger.warning("the trainer skipped %s, %d groups: %s", which, groups, body.skipped)
    return answer(
        {"status": "success", "groups": groups, "weight_version": service.queue.sampling_version()}
    )


@router.post("/batch/report", **takes(BatchReport))
async def report(request: Request, service: Service) -> Response:
    """A trainer ends with a batch in hand.

    The trainer that registers next gets it, unless it is set aside.
    """
    body = read(BatchReport, await request.body())
    service.queue.require_trainer(body.uuid)
    service.reported(service.handed_out(body.batch_id), body.report)
    await service.run(lambda queue: queue.report_end(body.batch_id, body.error))
    service.name_set_aside()
    return answer({"status": "success"})


@router.get("/batch/set-aside")
async def set_aside(request: Request, service: Service) -> Response:
    """The batches that are handed out no more, because trainers ended with them.

    With batch_id, one of them in full.
    """
    batch_id = query_int(request, "batch_id")
    if batch_id is None:
        return answer({"batches": service.queue.set_aside(), "total": service.queue.failures.total})
    body = await service.set_aside_body(batch_id)
    if body is None:
        return refuse(
            404, f"batch {batch_id} is not set aside; GET /batch/set-aside lists those that are"
        )
    return Response(body, media_type="application/json")


@router.post("/run/end", **takes(EndRun))
async def end(request: Request, service: Service) -> Response:
    """The trainer's run is over: what starts next is another one."""
    uuid = read(EndRun, await request.body()).uuid
    await service.run(lambda queue: queue.end(uuid))
    service.trainer_activity.count()
    logger.info(
        "the trainer says that its run has ended, at version %d", service.queue.sampling_version()
    )
    return answer({"status": "success"})


@router.get("/info")
async def info(service: Service) -> Response:
    """Sizes of the trainer that an environment needs."""
    trainer = service.queue.registration
    if trainer is None:
        return answer({"batch_size": -1, "max_token_len": -1})
    return answer({"batch_size": trainer.batch_size, "max_token_len": trainer.max_token_len})


@router.get("/wandb_info")
async def wandb_info(service: Service) -> Response:
    """Where the trainer logs.

    Null after the end of a run: an environment that asks then waits for the next trainer.
    """
    trainer = service.queue.registration
    if trainer is None or service.queue.ended:
        return answer({"group": None, "project": None})
    return answer({"group": trainer.wandb_group, "project": trainer.wandb_project})


@router.get("/reset_data")
async def reset_data(service: Service) -> Response:
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
            f"{field} names epoch {epoch}: an epoch must be at most {FIRST_EPOCHS}, "
            "or close to one that this service gave"
        )
        raise invalid([field], epoch, message)


class BatchResponse(Response):
    """A batch, taken only now that it can be sent, so that whatever interrupts it, it is not taken
    for sent or on its way.
    """

    def __init__(
        self, service: RolloutService, received: int | None, uuid: int | None, gzip_accepted: bool
    ) -> None:
        super().__init__()
        self.service, self.received, self.uuid, self.gzip_accepted = (
            service,
            received,
            uuid,
            gzip_accepted,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            async with self.service.handing_out(self.received, self.uuid) as hand_out:
                if hand_out is None:
                    why = (
                        {"reason": self.service.queue.waiting}
                        if self.service.queue.takes_references()
                        else {}
                    )
                    await answer({"batch": None, **why})(scope, receive, send)
                else:
                    hand_out.complete = await self._send(hand_out.body, receive, send)
        except NotRegisteredError as error:
            await answer({"status": "error", "message": str(error), "batch": []})(
                scope, receive, send
            )

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
