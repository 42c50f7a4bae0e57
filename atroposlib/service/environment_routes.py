"""The routes that an environment calls: to register, to pace itself, and to post groups and results
of evaluations.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from atroposlib.service.answers import Reader, Service, answer, query_int, takes
from atroposlib.service.group_reader import GroupReader
from atroposlib.service.group_schema import ScoredData
from atroposlib.service.records import (
    BatchTooSmallError,
    QueueError,
    Receipt,
    UnknownEnvironmentError,
)
from atroposlib.service.schemas import (
    EnvIdentifier,
    EnvStatus,
    InvalidRequestError,
    PostedEvaluation,
    RegisterEnv,
    invalid,
    read,
)
from atroposlib.service.service import RolloutService
from atroposlib.service.store import StoreError

logger = logging.getLogger(__name__)

RUN_ENDED = (
    "the last trainer's run has ended; an environment that registers now waits for the next trainer"
)
"""Reason in the answer to /register-env after the end of a run."""


router = APIRouter()


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
    if trainer.batch_size % body.group_size:
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

    One that has nothing to do hands back the `moves` of its last answer, and how long it may
    `wait`: it is answered when the trainer has registered, taken or acknowledged a batch, or ended
    its run since, or when that time is over.
    """
    env_id, process = query_int(request, "env_id"), ""
    if env_id is None:
        body = read(EnvStatus, await request.body())
        env_id, process = body.env_id, body.process
        if body.moves is not None:
            await service.trainer_activity.wait_for_change(body.moves, body.wait)
    now, moves = service.clock(), service.trainer_activity.number
    return answer(
        await service.run(lambda queue: queue.status_env(env_id, now, process)) | {"moves": moves}
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
