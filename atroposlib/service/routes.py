"""The routes of the rollout service, by who calls them: trainers, environments, reference workers,
and people, scripts and Prometheus.

Each route reads its request, makes one call on the service, and returns the answer. The routes read
their bodies themselves, so FastAPI cannot describe these: `takes` and `describe` add them to
/openapi.json.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import TypeAdapter
from starlette.types import Receive, Scope, Send

from atroposlib.service.fleet import FleetStatus
from atroposlib.service.group_reader import GroupReader, ScoredData, with_reference
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import (
    BatchTooSmallError,
    NotRegisteredError,
    QueueError,
    Receipt,
    UnknownEnvironmentError,
)
from atroposlib.service.run_state import FIRST_EPOCHS
from atroposlib.service.schemas import (
    AckBatch,
    AnsweredReference,
    BatchReport,
    EndRun,
    EnvIdentifier,
    EnvStatus,
    EpochRequest,
    InvalidRequestError,
    LeaseReferences,
    PostedEvaluation,
    PublishedFleet,
    ReferencesDone,
    RegisterEnv,
    RegisterTrainer,
    Registration,
    ServerAddress,
    invalid,
    read,
)
from atroposlib.service.service import RolloutService
from atroposlib.service.store import DamagedError, StoreError
from atroposlib.web.middleware import GZIP_FROM, accepts_gzip, compress
from atroposlib.wire import TrainerSession

logger = logging.getLogger(__name__)
router = APIRouter()

PREFIX = "#/components/schemas/"
MODELS: dict[str, type[Any]] = {}
"""Bodies that routes take, by name: pydantic models and typed dictionaries. `takes` adds them."""
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": text,
        "content": {"application/json": {"schema": {"type": "object", "required": ["detail"]}}},
    }
    for status, text in {
        400: "The body is not valid gzip",
        401: "No bearer token, or a wrong one",
        403: "Without a key: a web page, or a Host that is not this service's",
        404: "No such environment, batch or inference server",
        408: "The body did not arrive in time",
        409: "No trainer has registered, or another one has taken over, or it has another model",
        413: "The body is too large",
        415: "A Content-Encoding other than gzip",
        422: "The body does not validate; the answer names field, index and value",
        429: "The queue, or the list of servers, is at its bound; see Retry-After",
        503: "Not done in time; see Retry-After",
        507: "The store cannot take more data",
    }.items()
}
"""Answers that refuse a request, for /openapi.json."""


async def _service(request: Request) -> RolloutService:
    service: RolloutService = request.app.state.service
    return service


async def _reader(request: Request) -> GroupReader:
    reader: GroupReader = request.app.state.reader
    return reader


Service = Annotated[RolloutService, Depends(_service)]
"""The service of the application that a route belongs to."""
Reader = Annotated[GroupReader, Depends(_reader)]


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON answer."""
    return Response(orjson.dumps(content), status, headers, "application/json")


def refuse(status: int, detail: Any, headers: dict[str, str] | None = None) -> Response:
    """Return a refusal with its reason."""
    return answer({"detail": detail}, status, headers)


def query_int(request: Request, name: str) -> int | None:
    """Return an integer of the query; None if it is missing.

    Raises:
        InvalidRequestError: the value is not an integer, or too large for some JSON readers.
    """
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 2**63
    if abs(value) >= 2**53:
        error = {
            "type": "int_parsing",
            "loc": ["query", name],
            "msg": f"{name} is {text[:64]!r}: it must be an integer below 2**53 in magnitude",
            "input": text[:64],
        }
        raise InvalidRequestError([error])
    return value


def takes(model: type[Any], many: bool = False, required: bool = True) -> dict[str, Any]:
    """Return the arguments of a route's decorator that describe its body."""
    MODELS[model.__name__] = model
    schema: dict[str, Any] = {"$ref": PREFIX + model.__name__}
    if many:
        schema = {"type": "array", "items": schema}
    return {
        "openapi_extra": {
            "requestBody": {
                "required": required,
                "content": {"application/json": {"schema": schema}},
            }
        }
    }


def describe(app: FastAPI) -> None:
    """Add the bodies of the routes to /openapi.json."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            bodies = [(name, "validation", TypeAdapter(model)) for name, model in MODELS.items()]
            _, models = TypeAdapter.json_schemas(bodies, ref_template=PREFIX + "{model}")  # type: ignore[arg-type]
            schema.setdefault("components", {}).setdefault("schemas", {}).update(models["$defs"])
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


# ---- trainers: register, take batches, acknowledge them, end the run ----


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
    last_run = service.queue.last_run()
    epoch = await service.run(lambda queue: queue.give_epoch(body.asked, body.run))
    return answer({"weight_epoch": epoch} | ({"last_run": last_run} if last_run else {}))


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
            404, f"batch {batch_id} is not set aside; GET /batch/set-aside lists the batches"
        )
    return Response(body, media_type="application/json")


@router.post("/run/end", **takes(EndRun))
async def end(request: Request, service: Service) -> Response:
    """The trainer's run is over: what starts next is another one."""
    uuid = read(EndRun, await request.body()).uuid
    await service.run(lambda queue: queue.end(uuid))
    service.trainer_activity.count()
    logger.info(
        "the trainer reports the end of its run, at version %d", service.queue.sampling_version()
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
    """The trainer's project and group at W&B.

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
    """A batch that is taken from the queue only when it can be sent. So no interruption leaves it
    marked as sent or under way.
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
        """Send a batch. Return True if all of it was sent."""
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


# ---- environments: register, pace themselves, post groups and results of evaluations ----

RUN_ENDED = (
    "the last trainer's run has ended; an environment that registers now waits for the next trainer"
)
"""Reason in the answer to /register-env after the end of a run."""


@router.post("/register-env", **takes(RegisterEnv))
async def register_env(request: Request, service: Service) -> Response:
    """Register an environment. It waits until a trainer has asked for its first batch.

    After the end of a run it waits for the next trainer.
    """
    body = read(RegisterEnv, await request.body())
    now = service.clock()
    environment = await service.run(
        lambda queue: queue.register_env(
            body.desired_name,
            body.weight,
            body.group_size,
            body.max_token_length,
            body.min_batch_allocation,
            now,
            body.stream,
        )
    )
    trainer = service.queue.registration
    if environment is None or trainer is None:
        why = {"reason": RUN_ENDED} if service.queue.ended else {}
        return answer({"status": "wait for trainer to start"} | why)
    logger.info("environment %d registered: %s", environment.env_id, environment.wandb_name)
    if body.group_size > trainer.batch_size:
        logger.warning(
            "environment %s: its group_size %d is above the trainer's batch_size %d, so its whole groups "
            "are refused. Lower group_size, or raise batch_size",
            environment.wandb_name,
            body.group_size,
            trainer.batch_size,
        )
    elif trainer.batch_size % body.group_size:
        logger.warning(
            "environment %s: its group_size %d does not divide the trainer's batch_size %d, "
            "so its groups can only fill a batch together with others",
            environment.wandb_name,
            body.group_size,
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


@router.post("/disconnect-env", **takes(EnvIdentifier))
async def disconnect_env(request: Request, service: Service) -> Response:
    """An environment leaves; what it posted stays."""
    env_id = read(EnvIdentifier, await request.body()).env_id
    try:
        await service.run(lambda queue: queue.disconnect_env(env_id))
    except UnknownEnvironmentError as error:
        return answer({"status": "failure", "error": str(error)})
    return answer({"status": "success"})


@router.get("/status-env", **takes(EnvStatus, required=False))
async def status_env(request: Request, service: Service) -> Response:
    """The state by which an environment paces itself. The id comes in a JSON body, or as ?env_id=.

    A worker that has nothing to do hands back the `moves` of its last answer, and how long it may
    `wait`. The answer comes when the trainer has registered, taken or acknowledged a batch, or
    ended its run since. It comes at the latest when that time is over.
    """
    env_id, process, trouble = query_int(request, "env_id"), "", ""
    if env_id is None:
        text = await request.body()
        if not text:
            message = 'env_id is missing: send the JSON body {"env_id": 0}, or ?env_id=0'
            raise invalid(["env_id"], None, message)
        body = read(EnvStatus, text)
        env_id, process, trouble = body.env_id, body.process, body.trouble
        if body.moves is not None:
            await service.trainer_activity.wait_for_change(body.moves, body.wait)
    now, moves = service.clock(), service.trainer_activity.number
    return answer(
        await service.run(lambda queue: queue.status_env(env_id, now, process, trouble))
        | {"moves": moves}
    )


@router.post("/scored_data", **takes(ScoredData))
async def scored_data(request: Request, service: Service, reader: Reader) -> Response:
    """Post one group."""
    (receipt,) = await post(service, reader, await request.body(), many=False)
    fields = asdict(receipt)
    return answer({name: value for name, value in fields.items() if value is not None})


@router.post("/scored_data_list", **takes(ScoredData, many=True))
async def scored_data_list(request: Request, service: Service, reader: Reader) -> Response:
    """Post several groups: all of them are accepted, or none."""
    receipts = await post(service, reader, await request.body(), many=True)
    result: dict[str, Any] = {"status": "received", "groups_processed": len(receipts)}
    buffered = [receipt for receipt in receipts if receipt.status == "buffered"]
    if buffered:
        result |= {"buffered": len(buffered), "last_buffer_size": buffered[-1].buffer_size}
    dropped = [receipt for receipt in receipts if receipt.status == "dropped"]
    if dropped:
        result |= {"dropped": len(dropped), "reason": dropped[-1].reason}
    return answer(result)


@router.post("/evaluations", **takes(PostedEvaluation))
async def post_evaluation(request: Request, service: Service) -> Response:
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


@router.get("/evaluations")
async def evaluations(request: Request, service: Service) -> Response:
    """The results that came after the one with the id `after` (default 0, all that are kept),
    oldest first.
    """
    after = query_int(request, "after") or 0
    newer = await service.run(lambda queue: queue.evaluations.after(after))
    return answer({"evaluations": [evaluation.to_json() for evaluation in newer]})


async def post(
    service: RolloutService, reader: GroupReader, body: bytes, many: bool
) -> list[Receipt]:
    """Read and post groups.

    Name the field of a group that is too large, and count the post if it is refused.
    """
    try:
        await service.post_space.require(len(body))
        with service.post_space.taken(len(body)):
            groups = await reader.read(body, many)
            try:
                return await service.post(groups)
            except BatchTooSmallError as error:
                raise invalid(
                    [error.index, "tokens"] if many else ["tokens"], error.size, f"tokens: {error}"
                ) from None
    except (InvalidRequestError, QueueError, StoreError) as refusal:
        service.queue.refusals.note_refusal(str(refusal))
        raise


# ---- reference workers: groups that wait for ref_logprobs go out to them, and come back with those ----

# Workers know a group by a number. It is made of the group's own number and a checksum of its
# content and of the model. So an answer from before a `/reset_data` or from another store is never
# taken for another group's.

CHECK_BITS = 20
"""Bits of a checksum in a group's id. They are enough that an answer meant for another group is
taken once in a million times. Numbers still stay below 2**53 for eight billion groups.
"""
SHOWN = ("tokens", "masks", "sampling_params")
"""Fields of a group that a worker needs."""
GONE = "it no longer waits for a reference: it was dropped, another run has begun, or it was answered long ago"


@router.get("/reference")
async def reference(service: Service) -> Response:
    """Groups that wait for reference logprobs, and the workers."""
    return answer(await service.run(lambda queue: _status(queue, service.clock())))


def _status(queue: RolloutQueue, now: float) -> dict[str, Any]:
    stage, trainer = queue.reference, queue.registration
    return {
        "wanted": queue.takes_references(),
        "model": trainer.reference_model if trainer else None,
        "reference": trainer.reference if trainer else None,
        "waiting": len(stage.waiting),
        "leased": stage.lent(now),
        "answered": stage.answered,
        "unusable": stage.unusable,
        "expired": stage.expired,
        "workers": [
            {
                "worker": worker.name,
                "model": worker.model or None,
                "leased": sum(
                    loan.worker == worker.name and now < loan.until for loan in stage.loans.values()
                ),
                "answered": worker.answered,
                "seconds_silent": round(now - worker.seen, 1),
            }
            for worker in stage.workers.values()
        ],
    }


@router.post("/reference/lease", **takes(LeaseReferences))
async def lease(request: Request, service: Service) -> Response:
    """Groups that wait for reference logprobs, for a worker that computes them; none if there are
    none now.
    """
    loan = read(LeaseReferences, await request.body())
    if loan.worker not in service.queue.reference.workers:
        logger.info("reference worker %s asks for groups, with model %s", loan.worker, loan.model)
    now = service.clock()

    def take_out(queue: RolloutQueue) -> list[int]:
        return [
            group.seq
            for group in queue.lend_references(
                loan.worker, loan.model, loan.max_tokens, loan.seconds, now, loan.follows
            )
        ]

    shown: list[dict[str, Any]] = []
    while not shown and (
        seqs := await service.run(take_out)
    ):  # until what the disk has damaged is out of the way
        bodies = await _bodies(service, seqs)
        shown = await asyncio.to_thread(_shown, bodies, loan.model)
        loans = service.queue.reference.loans
        for seq, group in zip(bodies, shown, strict=True):
            if seq in loans:
                loans[seq].lengths = [len(row) for row in group["tokens"]]
    queue, trainer = service.queue, service.queue.registration
    takes_references = trainer is not None and queue.takes_references()
    waiting = len(queue.reference.waiting) - queue.reference.lent(now)
    content = {
        "groups": shown,
        "waiting": waiting,
        "reference": trainer.reference if trainer and takes_references else None,
    }
    if trainer is None:
        content["reason"] = "no trainer has registered"
    elif not takes_references:
        content["reason"] = (
            "the trainer takes no ref_logprobs from workers (--ref-logprobs-from-workers)"
        )
    return answer(content)


def _shown(bodies: Mapping[int, bytes], model: str) -> list[dict[str, Any]]:
    """Return the fields of groups that a worker needs."""
    shown = []
    for seq, body in bodies.items():
        group = orjson.loads(body)
        shown.append({"id": number_of(seq, body, model), **{name: group[name] for name in SHOWN}})
    return shown


def number_of(seq: int, body: bytes, model: str) -> int:
    """The number by which a worker knows a group."""
    check = zlib.crc32(body, zlib.crc32(model.encode()))
    return seq << CHECK_BITS | check & (1 << CHECK_BITS) - 1


@router.post("/reference/done", **takes(ReferencesDone))
async def done(request: Request, service: Service) -> Response:
    """Reference logprobs of groups.

    The first answer for a group is taken; sending it again does no harm.
    """
    posted = read(ReferencesDone, await request.body())
    now, queue, stage = service.clock(), service.queue, service.queue.reference
    model = (queue.registration.reference_model if queue.registration else None) or ""
    answers = {group.id >> CHECK_BITS: group for group in posted.groups}
    bodies = await _bodies(service, [seq for seq in answers if seq in stage.waiting])
    lengths = {seq: loan.lengths for seq, loan in stage.loans.items() if seq in bodies}
    checked = await asyncio.to_thread(
        lambda: {
            seq: _answered(seq, body, model, answers[seq], lengths.get(seq))
            for seq, body in bodies.items()
        }
    )
    right = {seq: body for seq, body in checked.items() if not isinstance(body, str)}
    await service.run(lambda queue: queue.take_references(posted.worker, right, now))
    accepted, refused = [], []
    stage = service.queue.reference
    for seq, group in answers.items():
        wrong = checked.get(seq, GONE)
        if not isinstance(wrong, str) or (seq not in checked and stage.was_answered(seq)):
            accepted.append(group.id)
            if group.unusable is not None and seq in checked:
                logger.warning(
                    "reference worker %s can do nothing with group %d: %s",
                    posted.worker,
                    seq,
                    group.unusable,
                )
            continue
        refused.append({"id": group.id, "reason": wrong})
        if seq in checked:
            stage.loans.pop(seq, None)  # the next worker can have it
            logger.warning(
                "refused what reference worker %s answered for group %d: %s",
                posted.worker,
                seq,
                wrong,
            )
    return answer({"accepted": accepted, "refused": refused})


def _answered(
    seq: int, body: bytes, model: str, reference: AnsweredReference, lengths: list[int] | None
) -> bytes | str | None:
    """The body with its reference, None if there can be none for it, or what is wrong with the
    answer.
    """
    if reference.id != number_of(seq, body, model):
        return "the id is not of a group that waits here: hand ids back as they came"
    if reference.ref_logprobs is None:
        return None
    lengths = lengths or [len(row) for row in orjson.loads(body)["tokens"]]
    row_lengths = [len(row) for row in reference.ref_logprobs]
    if row_lengths != lengths:
        return f"ref_logprobs has rows of {row_lengths} entries, the group's sequences have {lengths} tokens"
    return with_reference(body, orjson.dumps(reference.ref_logprobs))


async def _bodies(service: RolloutService, seqs: Sequence[int]) -> dict[int, bytes]:
    """Return the bodies of groups that wait for a reference. Groups whose bodies are damaged on the
    disk are dropped.
    """
    try:
        return dict(zip(seqs, await service.bodies(seqs), strict=True))
    except DamagedError as error:
        damaged = error.seqs
        if dropped := await service.run(lambda queue: queue.drop_unreadable(damaged)):
            logger.error("%s; dropped %d groups that waited for a reference", error, dropped)
        left = [seq for seq in seqs if seq not in damaged]
        return await _bodies(service, left) if left else {}


# ---- people, scripts and Prometheus: how the service is, and which inference servers the run has ----

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


@router.get("/")
async def root() -> Response:
    """Answer that the service runs. This route needs no token."""
    return answer({"message": "AtroposLib API"})


@router.get("/status")
async def status(service: Service) -> Response:
    """Batches handed out, and groups that are ready; batches that were set aside, if there are any."""
    queue = service.queue
    aside = {"batches_set_aside": queue.failures.total} if queue.failures.total else {}
    return answer({"current_step": queue.current_step, "queue_size": queue.lines.groups} | aside)


@router.get("/stats")
async def stats(service: Service) -> Response:
    """Figures on the flow of data: waiting, leased and dropped groups, with reasons, and the state
    of each environment.
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
    """The inference servers: the trainer's state of each, and requests to join or leave."""
    requests = await service.run(lambda queue: queue.fleet.answered(service.keyed))
    table = service.fleet_status
    age = table.age(service.clock())
    return answer(
        {"servers": table.servers, **requests, "published": table.published, "published_ago": age}
    )


@router.post("/fleet", **takes(PublishedFleet))
async def publish(request: Request, service: Service) -> Response:
    """Publish the states of servers, by the trainer or a parameter server.

    The table replaces the publisher's earlier one.
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
    """Request a server: the trainer brings it in as soon as it answers."""
    url = read(ServerAddress, await request.body()).url
    await service.run(lambda queue: queue.join_fleet(url, service.keyed))
    logger.info("%s is wanted in the fleet", url)
    return answer({"status": "success", **service.queue.fleet.answered(service.keyed)})


@router.post("/fleet/leave", **takes(ServerAddress))
async def leave(request: Request, service: Service) -> Response:
    """Request that a server leave: the trainer and the environments let it go."""
    url = read(ServerAddress, await request.body()).url
    await service.run(lambda queue: queue.leave_fleet(url, service.fleet_status.urls()))
    logger.info("%s is to leave the fleet", url)
    return answer({"status": "success", **service.queue.fleet.answered(service.keyed)})
