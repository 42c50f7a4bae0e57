"""The trainer's side of the cohorts: everyone is waited for, lanes are formed, and all ranks leave
together what is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from example_trainer.errors import BridgeError
from example_trainer.parallel.ranks import Ranks
from example_trainer.weight_bridge.send_plan import SendPlan
from vllm_patching.protocol.messages import Route
from vllm_patching.transport.addresses import RendezvousError
from vllm_patching.transport.lane import (
    GO,
    NEAR,
    SENDER,
    Lane,
    LanePlace,
    SendMemory,
    close_lanes,
    form_lanes,
    lane_places,
)
from vllm_patching.transport.rendezvous import Meeting, connect_store, first_line

logger = logging.getLogger(__name__)

_ASK_SECONDS = 0.1
_LOOK_SECONDS = 0.02


class CohortError(BridgeError):
    """The cohorts could not be formed; every rank raises the same.

    Attributes:
        missing: receivers that did not come, from 1; empty if it failed for another reason.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = list(missing)


class LossWatch:
    """Whether what is under way still has a purpose: rank 0 asks, in a thread, and tells the others
    through the store.

    Waits in a lane, where no rank hears another, end by it.
    """

    def __init__(self, ranks: Ranks, store: dist.Store, key: str, lost: Callable[[], str]) -> None:
        """
        Args:
            store: the one that the trainer's rank 0 hosts.
            key: that nothing else is known by there.
            lost: asked on rank 0, by a thread of its own: why it has none, or an empty string.
        """
        self._ranks, self._store, self._key, self._lost = ranks, store, key, lost
        self._reason = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loss watch", daemon=True)

    def reason(self) -> str:
        """Why everything is to be broken off; empty as long as nothing is."""
        return self._reason

    def __enter__(self) -> LossWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_ASK_SECONDS):
            try:
                if not self._ranks.is_main:
                    if self._store.check([self._key]):
                        self._reason = self._store.get(self._key).decode()
                elif reason := self._lost():
                    self._reason = reason
                    self._store.set(self._key, reason)
            except Exception as error:  # noqa: BLE001 - must not end without a word
                if self._ended.is_set():
                    return
                self._reason = (
                    f"whether the update goes on cannot be asked any more: {first_line(error)}"
                )
            if self._reason:
                return


class Cohort:
    """This process's lanes to the receivers of one layout, and what is needed to leave them
    together.

    A cohort that is closed can be formed anew under another key, with other members. Collective but
    for `close`.
    """

    def __init__(
        self,
        ranks: Ranks,
        plan: SendPlan,
        device: torch.device,
        timeout: float,
        memory: SendMemory | None = None,
    ) -> None:
        """
        Args:
            timeout: seconds that a transfer may take.
            memory: that this process sends from, where receivers may read it.
        """
        self.ranks, self.plan, self.timeout = ranks, plan, timeout
        self.key = ""
        self._device, self._memory = device, memory
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._store: dist.Store | None = None
        self._watched = 0

    @property
    def formed(self) -> bool:
        """Whether there are lanes to send over."""
        return self._store is not None

    def form(
        self,
        meeting: Meeting,
        key: str,
        members: int,
        route: Route,
        store: dist.Store,
        seconds: float,
        lost: Callable[[], str],
    ) -> None:
        """Wait for the receivers, which have been told the same, and form the lanes.

        Args:
            meeting: the store, as the receivers reach it.
            key: that no forming before has had.
            members: receivers of each cohort.
            route: how the weights travel.
            store: the same, of which rank 0 is the host.
            seconds: for the receivers to come, and again for the lanes to be formed.
            lost: asked on rank 0 by a thread: why nothing can come of it, or an empty string.

        Raises:
            CohortError: it did not work; those who came have been told so. The cohort is closed.
        """
        self.close()
        own = self.plan.own_lanes(self.ranks.rank)
        places = [
            lane_places(meeting, key, r, [lane], SENDER, members, route)[0] for r, lane in own
        ]
        for place in places:
            store.set(place.offer, self._memory.offer if self._memory is not None else "")
        with LossWatch(self.ranks, store, f"lockstep/{key}/forming", lost) as watch:
            missing, why = self._wait_for_all(places, seconds, watch)
            told = self._agree([missing, why])
            absent = sorted({member for row, _ in told for member in row})
            reason = next((error for _, error in told if error), "")
            if absent or reason:
                shown = ", ".join(str(member - 1) for member in absent)
                reason = (
                    reason
                    or f"receiver(s) {shown} of {members} (numbered from 0) did not come within {seconds:g} s"
                )
                self._say(store, places, f"off: {reason}")
                raise CohortError(f"the cohorts {key} were not formed: {reason}", absent)
            for place in places:
                near = [
                    m for m in range(1, place.size) if store.get(place.here(m)) == NEAR.encode()
                ]
                self._say(store, [place], " ".join(map(str, [GO, *near])))
            lanes, why = self._form_lanes(places, seconds, watch)
            reason = next((error for _, error in self._agree([[], why]) if error), "")
            if reason:
                close_lanes(lanes)
                raise CohortError(f"the cohorts {key} were not formed: {reason}")
        self._lanes = dict(zip(own, lanes, strict=True))
        self._store, self.key = store, key

    def lane(self, cohort: int, bucket: int) -> Lane:
        """The lane of this process that a bucket goes over."""
        return self._lanes[cohort, bucket % self.plan.lanes]

    @property
    def own_lanes(self) -> list[Lane]:
        """All lanes of this process."""
        return list(self._lanes.values())

    def watch(self, lost: Callable[[], str]) -> LossWatch:
        """A watch over the transfer that begins now."""
        assert self._store is not None
        self._watched += 1
        return LossWatch(
            self.ranks, self._store, f"lockstep/{self.key}/transfer{self._watched}", lost
        )

    def close(self) -> None:
        """Leave the lanes, and break off what is in flight. Safe to call twice."""
        close_lanes(self._lanes.values())
        self._lanes, self._store = {}, None

    def _wait_for_all(
        self, places: Sequence[LanePlace], seconds: float, watch: LossWatch
    ) -> tuple[list[int], str]:
        """The receivers that have not come in time, and another reason to give up."""
        if not places:
            return [], ""
        deadline = time.monotonic() + seconds
        try:
            store = connect_store(places[0].meeting, f"trainer rank {self.ranks.rank}", seconds)
            keys = {
                place.here(member): member for place in places for member in range(1, place.size)
            }
            while not store.check(list(keys)):
                if watch.reason() or time.monotonic() > deadline:
                    return sorted(
                        {member for key, member in keys.items() if not store.check([key])}
                    ), watch.reason()
                time.sleep(_LOOK_SECONDS)
            return [], watch.reason()
        except (RendezvousError, RuntimeError) as error:
            return [], f"trainer rank {self.ranks.rank}: {first_line(error)}"

    def _form_lanes(
        self, places: Sequence[LanePlace], seconds: float, watch: LossWatch
    ) -> tuple[list[Lane], str]:
        who = f"trainer rank {self.ranks.rank}"
        try:
            return form_lanes(
                places, self._device, self.timeout, seconds, watch.reason, who, self._memory
            ), ""
        except RendezvousError as error:
            return [], str(error)

    def _agree(self, mine: Any) -> list[Any]:
        return self.ranks.gather(mine, "forming the cohorts")

    @staticmethod
    def _say(store: dist.Store, places: Sequence[LanePlace], word: str) -> None:
        for place in places:
            store.set(place.word, word)
