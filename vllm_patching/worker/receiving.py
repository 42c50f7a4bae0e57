"""What each rank that receives weights can do for the bridge: vLLM's workers, and processes that
hold weights for others.

All of it is called on the main thread of the rank's process. Names are prefixed: in vLLM's worker
they share one space with its own. Nothing here needs vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from vllm_patching.protocol.checksum import WeightSums
from vllm_patching.protocol.manifest import Manifest, flat_layout, local_view
from vllm_patching.protocol.messages import Route
from vllm_patching.protocol.workers import Check, FirstStepAnswer, Room
from vllm_patching.transport.cohort import CohortPlace
from vllm_patching.transport.rendezvous import Meeting
from vllm_patching.transport.shared_memory import SharedMemoryError, open_event, reached_in_time
from vllm_patching.worker.first_step import FirstStep
from vllm_patching.worker.updater import WeightUpdater

STAGING_MARGIN = 1 << 30
"""Bytes of GPU memory that a staging buffer must leave free for whatever vLLM still allocates."""
LEAVE_SECONDS = 2.0
"""How long a trainer that joins waits for the memory that the one before it needed here."""


class WeightReceiver:
    """Mixed into vLLM's worker.

    Attributes are made by `lockstep_open`, since vLLM never calls an __init__ of ours.
    """

    def lockstep_open(
        self,
        manifest: Manifest,
        parameters: Mapping[str, torch.Tensor],
        replica: int,
        logger: logging.Logger,
        updater: WeightUpdater | None = None,
    ) -> None:
        """Start the updater thread of a rank.

        Args:
            manifest: of the rank.
            parameters: what it holds, by name.
            replica: which of its server's engine cores it belongs to, from 0.
            logger: whose lines appear in the process's log.
            updater: the thread, if not an ordinary one.
        """
        self._lockstep_logger = logger
        self._lockstep_rank, self._lockstep_replica = manifest.tp_rank, replica
        self._lockstep_device = next(iter(parameters.values())).device
        layout, num_bytes = flat_layout(manifest)
        live = [(item.name, local_view(item, parameters[item.name].data)) for item in layout]
        self._lockstep_live = [tensor for _, tensor in live]
        self._lockstep_sums = WeightSums(live)
        self._lockstep_written: torch.cuda.Event | None = None
        self._lockstep_writer = ("", 0.0)
        self._lockstep_updater = updater or WeightUpdater(
            manifest.tp_rank, layout, num_bytes, live, logger
        )
        self._lockstep_updater.start()
        self._lockstep_first_step = FirstStep(self)

    def lockstep_room(self) -> Room:
        """Bytes that a staging buffer needs, and bytes free for one (None on a CPU, where memory is
        not the question).
        """
        updater = self._lockstep_updater
        free = None
        if self._lockstep_device.type == "cuda":
            free = torch.cuda.mem_get_info(self._lockstep_device)[0] - STAGING_MARGIN
        return {"needed": 0 if updater.staging is not None else updater.num_bytes, "free": free}

    def lockstep_aim(self, direct: bool) -> None:
        """Choose where transfers go from now on: into the live parameters, or into a staging
        buffer. Leaves the cohort that the updater thread is in. Returns at once.
        """
        self._lockstep_updater.aim_at(direct)

    def lockstep_cohort(
        self,
        host: str,
        port: int,
        secret: str,
        key: str,
        members: int,
        index: int,
        lanes: int,
        route: str,
        epoch: int,
        timeout: float,
    ) -> None:
        """Have the updater thread leave its cohort and join another. Returns at once.

        Args:
            host, port, secret: see Meeting.
            key: names this forming of the cohorts.
            members: receivers of each cohort: replicas of every server; 0: only leave.
            index: of the first of this server's replicas among them.
            lanes: senders to each rank, at most.
            route: how the weights travel (see Route).
            epoch: see CohortPlace.
            timeout: seconds for forming, and for a whole transfer.
        """
        if not members:
            self._lockstep_updater.leave(keep_staging=True)
            return
        member, rank = index + self._lockstep_replica, self._lockstep_rank
        meeting = Meeting(host, port, secret)
        place = CohortPlace(
            meeting, key, members, member, lanes, rank, epoch, Route(route), timeout, timeout
        )
        self._lockstep_updater.join_cohort(place)

    def lockstep_leave(self) -> None:
        """Have the updater thread leave its trainer and give its staging buffer back: the next one
        writes by itself.
        """
        self._lockstep_updater.leave()
        self._lockstep_updater.wait(LEAVE_SECONDS)

    def lockstep_receive(self, version: int) -> None:
        """Have the updater thread receive the weights of `version`. Returns at once."""
        if self._lockstep_device.type == "cuda":
            # a direct transfer must not overtake a step that still reads the old weights
            torch.cuda.synchronize()
        self._lockstep_first_step.watch()
        self._lockstep_updater.receive(version)

    def lockstep_status(self, patience: float = 0.0) -> dict[str, Any]:
        """The updater thread's status, the rank and whether the trainer has ended; waits up to
        `patience` seconds for the thread's command to end.
        """
        updater = self._lockstep_updater
        status = updater.wait(patience).to_json()
        who = {"tp_rank": self._lockstep_rank, "replica": self._lockstep_replica}
        return {**who, "trainer_gone": updater.trainer_gone(), **status}

    def lockstep_commit(self) -> Check:
        """Copy what is staged into the live parameters, and check those."""
        with torch.no_grad():
            torch._foreach_copy_(self._lockstep_live, self._lockstep_updater.staged())
        return self.lockstep_check()

    def lockstep_first_step(self) -> FirstStepAnswer:
        """When this rank began its first step since weights were last received or checked
        (time.monotonic(), or None).
        """
        return {"tp_rank": self._lockstep_rank, "began": self._lockstep_first_step.began}

    def lockstep_discard(self, patience: float) -> bool:
        """Forget what was received; a transfer in flight is called off.

        Returns whether it has ended by then.
        """
        return self._lockstep_updater.discard(patience)

    def lockstep_follow(self, events: list[str], trainer: str, seconds: float) -> str:
        """Have checks of what a trainer of a single copy wrote wait for what it has enqueued by the
        time that it asks for one.

        Args:
            events: handle of an event for each rank, which the trainer records behind its writes;
                none: nothing to wait for.
            trainer: for messages.
            seconds: that a check waits at most.

        Returns:
            empty, or why this rank cannot; then the trainer must wait itself before it asks.
        """
        self._lockstep_written, self._lockstep_writer = None, (trainer, seconds)
        try:
            if events:
                self._lockstep_written = open_event(
                    events[self._lockstep_rank], self._lockstep_device
                )
        except SharedMemoryError as error:
            self._lockstep_logger.warning("[vLLM Patch] rank %d: %s", self._lockstep_rank, error)
            return str(error)
        return ""

    def lockstep_check_written(self) -> Check:
        """As lockstep_check, behind the writes of the trainer that is followed.

        Its process may have been killed after it recorded its event and before its GPU came there.
        So the wait has an end, and `late` says then what did not come; the weights are not looked
        at.
        """
        trainer, seconds = self._lockstep_writer
        late = ""
        try:
            if self._lockstep_written is not None and not reached_in_time(
                self._lockstep_written, seconds
            ):
                late = f"{trainer} has not finished its writes on the GPU within {seconds:g} s"
        except SharedMemoryError as error:
            late = f"whether {trainer} has finished its writes cannot be known: {error}"
        if late:
            # An answer and not an exception: vLLM would leave the other ranks' answers behind, for
            # the next call to find.
            return {"tp_rank": self._lockstep_rank, "checksum": "", "not_finite": "", "late": late}
        return self.lockstep_check()

    def lockstep_check(self) -> Check:
        """Checksum of the live parameters and the first of them that holds NaN or infinity (or an
        empty string).

        On a GPU it comes after every step of the engine.
        """
        if self._lockstep_device.type == "cuda":
            torch.cuda.synchronize()
        summary = self._lockstep_sums.all()
        self._lockstep_first_step.watch()
        return {
            "tp_rank": self._lockstep_rank,
            "checksum": summary.checksum,
            "not_finite": summary.not_finite,
        }
