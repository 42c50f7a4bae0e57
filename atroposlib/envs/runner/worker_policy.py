"""How many items an environment may have in work: admission keeps data fresh, so that nothing has
to be thrown away.

Every group that is queued at the service or in work here will be trained on later than it was
started. When at most `max_batches_offpolicy` batches are queued or in work, no group is older than
that many optimizer steps when it is taken.
"""

import math
from dataclasses import dataclass

from atroposlib.envs.config import EvalHandlingEnum


@dataclass(frozen=True)
class WorkerLimits:
    """The bounds of the number of workers.

    Attributes:
        max_workers: most items in work, whatever the queue says.
        group_size: sequences that one item yields.
        batch_size: sequences per batch; 0 or less when no trainer has said.
        max_batches_offpolicy: batches that may be queued or in work; below 0 for no bound.
        min_batch_allocation: share of each batch reserved for this environment.
    """

    max_workers: int
    group_size: int
    batch_size: int
    max_batches_offpolicy: int
    min_batch_allocation: float | None = None


@dataclass(frozen=True)
class QueueState:
    """The answer of `/status-env`, sizes in groups.

    Attributes:
        queue_size: groups queued, of all environments.
        self_queue_size: groups queued, of this environment.
        unallocated_fraction: share of a batch that no environment has reserved.
        groups_wanted: how many more groups the service wants from this environment; None when it
            does not say.
    """

    queue_size: int = 0
    self_queue_size: int = 0
    unallocated_fraction: float = 1.0
    groups_wanted: int | None = None


def allowed_workers(limits: WorkerLimits, queue: QueueState) -> int:
    """Items that may be in work now, those already in work included.

    >>> limits = WorkerLimits(max_workers=64, group_size=8, batch_size=64, max_batches_offpolicy=3)
    >>> allowed_workers(limits, QueueState(queue_size=0)), allowed_workers(limits, QueueState(queue_size=20))
    (24, 4)
    """
    if limits.batch_size <= 0:
        return 0
    if limits.max_batches_offpolicy < 0:
        allowed: float = limits.max_workers
    else:
        # On-policy (0) still needs the batch that the trainer waits for.
        batches = max(1, limits.max_batches_offpolicy)
        share = min(1.0, queue.unallocated_fraction + (limits.min_batch_allocation or 0.0))
        allowed = (
            math.ceil(batches * limits.batch_size * share / limits.group_size) - queue.queue_size
        )
        if limits.min_batch_allocation is not None:
            # Other environments' groups may fill the queue; the reserved share is still ours to
            # fill.
            reserved = math.ceil(
                batches * limits.batch_size * limits.min_batch_allocation / limits.group_size
            )
            allowed = max(allowed, reserved - queue.self_queue_size)
    if queue.groups_wanted is not None:
        allowed = min(allowed, queue.groups_wanted)
    return max(0, min(limits.max_workers, int(allowed)))


def workers_during_eval(allowed: int, handling: EvalHandlingEnum, ratio: float) -> int:
    """Return the number of workers that may train while an evaluation runs."""
    if handling is EvalHandlingEnum.STOP_TRAIN:
        return 0
    if handling is EvalHandlingEnum.LIMIT_TRAIN:
        return int(allowed * ratio)
    return allowed
