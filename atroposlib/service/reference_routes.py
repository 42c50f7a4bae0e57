"""The routes of reference workers: groups that wait for ref_logprobs go out to them, and come back
with those.

The number by which a worker knows a group is made of the group's own and of a checksum of its
content and of the model, so that an answer that comes after `/reset_data` or from before another
store was put there is never taken for another group's.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from atroposlib.service.answers import Service, answer, takes
from atroposlib.service.group_schema import with_reference
from atroposlib.service.queue import RolloutQueue
from atroposlib.service.schemas import AnsweredReference, LeaseReferences, ReferencesDone, read
from atroposlib.service.service import RolloutService
from atroposlib.service.store import DamagedError

logger = logging.getLogger(__name__)

CHECK_BITS = 20
"""Bits of a checksum in a group's id: enough that an answer meant for another group is taken once in a million
times, and that numbers stay below 2**53 for eight billion groups."""
SHOWN = ("tokens", "masks", "sampling_params")
"""Fields of a group that a worker needs."""
GONE = "it no longer waits for a reference: it was dropped, another run has begun, or it was answered long ago"


router = APIRouter()


@router.post("/reference/lease", **takes(LeaseReferences))
async def lease(request: Request, service: Service) -> Response:
    """Groups that wait for reference logprobs, for a worker that computes them; none if there are
    none now.
    """
    return answer(await lend(service, read(LeaseReferences, await request.body())))


@router.post("/reference/done", **takes(ReferencesDone))
async def done(request: Request, service: Service) -> Response:
    """Reference logprobs of groups.

    The first answer for a group is taken; sending it again does no harm.
    """
    return answer(await take(service, read(ReferencesDone, await request.body())))


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


async def lend(service: RolloutService, lease: LeaseReferences) -> dict[str, Any]:
    """The answer to a worker that asks for groups."""
    if lease.worker not in service.queue.reference.workers:
        logger.info("reference worker %s asks for groups, with model %s", lease.worker, lease.model)
    now = service.clock()

    def take_out(queue: RolloutQueue) -> list[int]:
        return [
            group.seq
            for group in queue.lend_references(
                lease.worker, lease.model, lease.max_tokens, lease.seconds, now
            )
        ]

    shown: list[dict[str, Any]] = []
    while not shown and (
        seqs := await service.run(take_out)
    ):  # until what the disk has damaged is out of the way
        bodies = await _bodies(service, seqs)
        shown = await asyncio.to_thread(_shown, bodies, lease.model)
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
    return content


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


async def take(service: RolloutService, posted: ReferencesDone) -> dict[str, Any]:
    """The answer to a worker that has computed the reference logprobs of groups."""
    now, queue, stage = service.clock(), service.queue, service.queue.reference
    model = (queue.registration.reference_model if queue.registration else None) or ""
    answers = {group.id >> CHECK_BITS: group for group in posted.groups}
    bodies = await _bodies(service, [seq for seq in answers if seq in stage.waiting])
    lengths = {seq: loan.lengths for seq, loan in stage.loans.items() if seq in bodies}
    read = await asyncio.to_thread(
        lambda: {
            seq: _answered(seq, body, model, answers[seq], lengths.get(seq))
            for seq, body in bodies.items()
        }
    )
    right = {seq: body for seq, body in read.items() if not isinstance(body, str)}
    await service.run(lambda queue: queue.take_references(posted.worker, right, now))
    accepted, refused = [], []
    stage = service.queue.reference
    for seq, group in answers.items():
        wrong = read.get(seq, GONE)
        if not isinstance(wrong, str) or (seq not in read and stage.was_answered(seq)):
            accepted.append(group.id)
            if group.unusable is not None and seq in read:
                logger.warning(
                    "reference worker %s can do nothing with group %d: %s",
                    posted.worker,
                    seq,
                    group.unusable,
                )
            continue
        refused.append({"id": group.id, "reason": wrong})
        if seq in read:
            stage.take_back(seq)
            logger.warning(
                "refused what reference worker %s answered for group %d: %s",
                posted.worker,
                seq,
                wrong,
            )
    return {"accepted": accepted, "refused": refused}


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
    """The bodies of groups that wait for a reference, without those that the disk has damaged: they
    are dropped.
    """
    try:
        return dict(zip(seqs, await service.bodies(seqs), strict=True))
    except DamagedError as error:
        damaged = error.seqs
        if dropped := await service.run(lambda queue: queue.drop_unreadable(damaged)):
            logger.error("%s; dropped %d groups that waited for a reference", error, dropped)
        left = [seq for seq in seqs if seq not in damaged]
        return await _bodies(service, left) if left else {}
