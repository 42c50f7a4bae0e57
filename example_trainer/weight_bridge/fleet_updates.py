"""Rank 0's part of an update of a fleet: choose the servers, call them, and go on without those
that fail.

Rank 0 sends its decisions to the other ranks, so that all of them act alike; see broadcast.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from example_trainer.errors import BridgeError
from example_trainer.weight_bridge.asking import Answers, Late, at_once
from example_trainer.weight_bridge.base import LeaseLost
from example_trainer.weight_bridge.cohorts import CohortError
from example_trainer.weight_bridge.diagnosis import Evidence, Loss, Reason, diagnose
from example_trainer.weight_bridge.fleet import Verdict
from example_trainer.weight_bridge.fleet_keeper import FleetKeeper
from example_trainer.weight_bridge.fleet_report import given_up, waiting_line
from example_trainer.weight_bridge.groups import Groups, UpdateGroup
from example_trainer.weight_bridge.members import Member, MemberCheck, Unfit, Watch, is_away
from example_trainer.weight_bridge.server import Shapes
from vllm_patching.transport.rendezvous import Meeting

logger = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 10.0
_LOOK_EVERY_SECONDS = 0.5
_CALL_OFF_SECONDS = 15.0
"""For a server to hear that an update is over, and to end its part of it."""


class FleetUpdates:
    """Makes updates, one after the other. Used by the training thread of rank 0."""

    def __init__(
        self,
        keeper: FleetKeeper,
        transfer: str,
        timeout: float,
        longest_wait: float,
        sleep: Callable[[float], None],
        hosts: int,
    ) -> None:
        """
        Args:
            keeper: has the fleet.
            transfer: auto, direct or overlapped.
            timeout: seconds for each step of an update.
            longest_wait: seconds for which training waits for servers.
            sleep: how to wait; may raise to end the wait.
            hosts: so many machines must have a server when training begins; 0: any number.
        """
        self._keeper, self._transfer, self._hosts = keeper, transfer, hosts
        self._timeout, self._longest_wait, self._sleep = timeout, longest_wait, sleep
        self._shapes: Callable[[dict[str, Any]], Shapes] = lambda info: {}
        self._gpus: Sequence[str] = [""]
        self._checks: list[MemberCheck] = []
        self._groups = Groups()
        self.joins = self.mapped = 0
        self.begin_version(0, False)

    @property
    def patience(self) -> float:
        """Seconds for which one server may keep the others waiting."""
        return self._keeper.fleet.patience

    def begin_version(self, version: int, everyone: bool) -> None:
        """Begin an update: of all servers, or of those alone that can be brought in."""
        self._version, self._everyone, self._phase = version, everyone, ""
        self._done: dict[str, dict[str, Any]] = {}
        self._again: set[str] = set()
        self._alone: set[str] = set()
        self._late: set[str] = set()
        self._failures: dict[str, BridgeError] = {}
        self._waiting_since: float | None = None
        self._checksum, self._verified, self._bytes = "", 0.0, 0

    # ---- the start of a training ----

    def gather(self) -> list[Member]:
        """Wait for the servers that the options name. Those that take longer than the others join
        when they are there.

        Raises:
            BridgeError: too few are there in time, or one of them cannot be joined by any trainer.
        """
        members = self._keeper.members
        limit = self._longest_wait + self._timeout
        answers = at_once(
            {url: member.ask for url, member in members.items()},
            limit,
            self.patience,
            self._suffices,
        )
        for error in answers.failed.values():
            if not is_away(error):
                raise error
        present = [member for url, member in members.items() if url in answers.ok]
        if not self._suffices(answers.ok):
            found = {str(member.info["hostname"]) for member in present}
            raise BridgeError(
                f"{len(present)} vLLM servers on {len(found)} hosts ({', '.join(sorted(found)) or 'none'}) are there after "
                f"{limit:g} s; --min-servers {self._keeper.fleet.least} and NUM_INFERENCE_NODES={self._hosts} ask for more: "
                f"start them, or ask for fewer: {'; '.join(str(error) for error in answers.failed.values())}"
            )
        return present

    def _suffices(self, there: Mapping[str, Any]) -> bool:
        hosts = {str(self._keeper.members[url].info["hostname"]) for url in there}
        return len(there) >= self._keeper.fleet.least and len(hosts) >= self._hosts

    def prepare(self, shapes: Callable[[dict[str, Any]], Shapes], gpus: Sequence[str]) -> None:
        """Say what this trainer sends (by a server's info), and from where; join the servers that
        are there.

        Args:
            gpus: UUID of each trainer rank's GPU; empty on a CPU.

        Raises:
            BridgeError: one of them holds something else, or too few can be joined.
        """
        self._shapes, self._gpus = shapes, gpus
        if self._keeper.fleet.least and not any(
            member.info for member in self._keeper.members.values()
        ):
            self.gather()
        present = [url for url, member in self._keeper.members.items() if member.info]
        with self._keeper.updating():
            self._keeper.look(forced=True)
            failed = self._join(present).failed
        for error in failed.values():
            if not is_away(error):
                raise error
        self._keeper.start()

    # ---- whom it goes to ----

    def choose(self) -> list[UpdateGroup]:
        """The groups of servers that are sent to now. Waits while there are too few, and joins
        whoever is new.

        Raises:
            BridgeError: there are too few for too long.
        """
        logged = 0.0
        while True:
            now = time.monotonic()
            with self._keeper.lock:
                fleet = self._keeper.fleet
                waited = 0.0 if self._waiting_since is None else now - self._waiting_since
                chosen = fleet.takes_part(now) if self._everyone else fleet.due(now)
                verdict = fleet.verdict(waited, self._longest_wait, now)
                urls = [
                    url
                    for url in chosen
                    if url in self._again or (not self._again and url not in self._done)
                ]
                waiting, ending = (
                    waiting_line(fleet, self._longest_wait - waited),
                    given_up(fleet, waited),
                )
            if verdict is Verdict.GO or self._again or not self._everyone:
                ready = self._join([url for url in urls if self._must_join(url)])
                urls = [url for url in urls if url not in ready.failed]
                if urls or not self._everyone or not ready.failed:
                    self._again.clear()
                    return self._groups.of([self._keeper.members[url] for url in urls], self._alone)
                continue
            if verdict is Verdict.GIVE_UP:
                raise BridgeError(ending)
            if self._waiting_since is None:
                self._waiting_since = now
            if time.monotonic() >= logged:
                logger.warning("%s", waiting)
                logged = time.monotonic() + _LOG_EVERY_SECONDS
            self._sleep(_LOOK_EVERY_SECONDS)
            self._keeper.look(forced=True)

    def _must_join(self, url: str) -> bool:
        member, place = self._keeper.members[url], self._keeper.fleet.places[url]
        return not member.joined or place.instance != member.instance

    def _join(self, urls: Iterable[str]) -> Answers[int]:
        """Join servers, all at the same time."""
        members = {url: self._keeper.members[url] for url in urls}
        calls = {
            url: partial(member.join, self._shapes, self._transfer, self._gpus, self._check)
            for url, member in members.items()
        }
        others = self._others_wait(calls)
        answers = at_once(
            calls, self._timeout + _CALL_OFF_SECONDS, self.patience, lambda ok: others or bool(ok)
        )
        with self._keeper.lock:
            for url, mapped in answers.ok.items():
                self.joins, self.mapped = self.joins + 1, mapped
                self._keeper.fleet.joined(url, members[url].instance)
            for url, error in answers.failed.items():
                reason = _failure(url, error).text
                self._blame(url, reason, is_away(error), isinstance(error, Unfit))
            self._keeper.tell()
        return answers

    def require(self, check: MemberCheck) -> None:
        """Whoever joins from now on must pass a check, which raises ConfigError or BridgeError
        otherwise.
        """
        self._checks.append(check)

    def _check(self, member: Member) -> None:
        for check in self._checks:
            check(member)

    # ---- the steps, for one group ----

    def watch(self, group: UpdateGroup) -> Watch:
        """Over the members of a group, for as long as they are sent to."""
        self._failures = {}
        return Watch(self._of(group), self._version, self.patience, self._timeout)

    def call_together(self, group: UpdateGroup, meeting: Meeting, lanes: int, watch: Watch) -> None:
        """Have the members meet at the trainer's store.

        Raises:
            BridgeError: some refuse.
        """
        index, calls = 0, {}
        for url, member in self._of(group).items():
            calls[url] = partial(
                member.server.cohort,
                member.epoch,
                meeting,
                group.key,
                group.receivers,
                index,
                lanes,
                group.route,
            )
            index += member.replicas
        watch.forming()
        self._phase = "meeting"
        self._all(calls, watch, "did not take part in forming the cohort")

    def begin(self, group: UpdateGroup, key: str, watch: Watch) -> None:
        """Have the members receive. Raises BridgeError if some do not."""
        watch.sending()
        version, self._phase = self._version, "begin"
        self._all(
            {
                url: partial(m.server.begin, m.epoch, version, key)
                for url, m in self._of(group).items()
            },
            watch,
            f"did not begin the update to version {version}",
        )
        self._phase = "transfer"

    def commit(self, group: UpdateGroup, checksums: list[str], begun: float, watch: Watch) -> None:
        """Have the members check what they have received, and serve it. Each is judged by itself.

        Args:
            checksums: by vLLM rank.
            begun: time.perf_counter() when the first byte was sent.
        """
        members, version = self._of(group), self._version
        watch.sent()
        self._phase = "commit"
        answers = self._ask(
            {
                url: partial(m.server.commit, m.epoch, version, checksums)
                for url, m in members.items()
            },
            watch,
        )
        verified = time.perf_counter() - begun
        self._checksum = self._checksum or checksums[0]
        with self._keeper.lock:
            for url, answer in answers.ok.items():
                self._done[url] = answer
                self._bytes += members[url].num_bytes
                self._keeper.fleet.served(
                    url, version, members[url].server.weight_epoch, time.monotonic()
                )
            self._keeper.tell()
        resumed = min(
            (float(answer["seconds"].get("resume", 0.0)) for answer in answers.ok.values()),
            default=0.0,
        )
        self._verified = max(self._verified, verified - resumed)
        if answers.failed:
            self._failures = answers.failed
            failures = {url: _failure(url, error) for url, error in answers.failed.items()}
            once_more = f"the update to version {version} is made once more"
            self._go_on(failures, failures, once_more, anew=True)

    def _all(self, calls: Mapping[str, Callable[[], Any]], watch: Watch, what: str) -> None:
        answers = self._ask(calls, watch)
        if answers.failed:
            self._failures = answers.failed
            raise BridgeError(
                f"{', '.join(answers.failed)} {what}: {next(iter(answers.failed.values()))}"
            )

    def _ask(self, calls: Mapping[str, Callable[[], Any]], watch: Watch) -> Answers[Any]:
        """Each member of a group."""
        others = self._others_wait(calls)
        limit = self._timeout + _CALL_OFF_SECONDS
        return at_once(calls, limit, self.patience, lambda ok: others or bool(ok), watch.texts)

    def _others_wait(self, urls: Collection[str]) -> bool:
        """Whether good servers wait for these: in an update of all, those of other groups do."""
        with self._keeper.lock:
            return self._everyone and not set(self._keeper.fleet.good) <= set(urls)

    # ---- what went wrong ----

    def break_off(self, group: UpdateGroup, error: BridgeError, watch: Watch) -> None:
        """Have the members of a group forget the update, and send again to those that are not lost.
        If the evidence fits every member, each of them gets the update in a group of its own.
        """
        failures = {url: _failure(url, failure) for url, failure in self._failures.items()}
        absent: Collection[str] = ()
        if isinstance(error, CohortError):
            absent = group.at(error.missing)
        self._go_on(group.urls, failures or watch.reasons, str(error), absent)

    def _go_on(
        self,
        urls: Collection[str],
        failures: Mapping[str, Reason],
        error: str,
        absent: Collection[str] = (),
        anew: bool = False,
    ) -> None:
        """Decide which of these servers are lost. The others get the update again.

        Args:
            failures: of those that failed in their own step.
            error: the reason why the others have to forget the update.
            absent: those that did not come to the cohort.
            anew: also a server that has ended the update after all joins again.
        """
        states = at_once({url: self._keeper.members[url].state for url in urls}, 3.0).ok
        evidence = {
            url: self._evidence(url, states.get(url), failures.get(url), url in absent)
            for url in urls
        }
        lost = diagnose(evidence, self.patience, error)
        if not lost:
            logger.warning(
                "[Fleet] %s; nobody says why: the %d servers are updated one by one",
                error,
                len(urls),
            )
            self._alone |= set(urls)
        self._once_more([url for url in urls if url not in lost], error, anew)
        self._leave(lost)

    def _evidence(
        self, url: str, state: dict[str, Any] | None, failure: Reason | None, absent: bool
    ) -> Evidence:
        evidence = self._keeper.members[url].evidence(state, self._version)
        broken = evidence.broken
        if broken is not None:
            text = f"{broken.text}, in the {self._phase} of version {self._version}"
            broken = replace(broken, text=text)
        late = isinstance(self._failures.get(url), Late)
        return replace(evidence, broken=broken, failure=failure, late=late, absent=absent)

    def _once_more(self, urls: Collection[str], reason: str, anew: bool) -> None:
        """Have servers forget the update, and send it to them again."""
        members = {url: self._keeper.members[url] for url in urls}
        calls = {url: partial(m.server.abort, m.epoch, reason) for url, m in members.items()}
        answers = at_once(calls, self._timeout + _CALL_OFF_SECONDS, self.patience)
        for url, member in members.items():
            self._again.add(url)
            # A server that did not answer forgets the update when it joins again.
            member.joined = not anew and answers.ok.get(url, False)

    def _leave(self, lost: Mapping[str, Reason]) -> None:
        """Go on without these servers. Those that gave up waiting join again, once."""
        calls = {}
        with self._keeper.lock:
            for url, reason in lost.items():
                member = self._keeper.members[url]
                if reason.loss is Loss.GAVE_UP and url not in self._late:
                    logger.warning(
                        "[Bridge] %s %s: joining it again to send version %d",
                        url,
                        reason.text,
                        self._version,
                    )
                    member.joined = False
                    self._late.add(url)
                    self._again.add(url)
                    continue
                away, hopeless = reason.loss is Loss.AWAY, reason.loss is Loss.TAKEN_OVER
                self._blame(url, reason.text, away, hopeless)
                if reason.loss in (Loss.FAILED, Loss.GAVE_UP):
                    text = f"{url} {reason.text}"
                    calls[url] = partial(member.server.quarantine, member.epoch, text)
            self._keeper.tell()
        answers = at_once(calls, _CALL_OFF_SECONDS, self.patience, lambda _: True)
        for url, error in answers.failed.items():
            logger.info("[Fleet] %s has not heard that it is quarantined: %s", url, error)

    def _blame(self, url: str, reason: str, away: bool, hopeless: bool) -> None:
        self._keeper.members[url].joined = False
        self._keeper.fleet.failed(url, reason, time.monotonic(), away, hopeless)

    def _of(self, group: UpdateGroup) -> dict[str, Member]:
        return {url: self._keeper.members[url] for url in group.urls}

    # ---- how it ends ----

    def settled(self) -> bool:
        """Whether the update is over: everybody has it who could be sent to, and they are enough."""
        if self._again:
            return False
        with self._keeper.lock:
            good = [url for url in self._keeper.fleet.good if url in self._done]
            return not self._everyone or len(good) >= self._keeper.fleet.least

    def report(self) -> dict[str, Any]:
        """What was done, for SyncReport."""
        with self._keeper.lock:
            counts = self._keeper.fleet.counts()
        of_all: list[dict[str, float]] = [answer["seconds"] for answer in self._done.values()]
        slowest = max(of_all, key=lambda seconds: sum(seconds.values()), default={})
        return {
            "checksum": self._checksum,
            "bytes_moved": self._bytes,
            "first_byte_to_verified": self._verified,
            "server_seconds": slowest,
            "fleet": counts,
            "joins": self.joins,
            "mapped": self.mapped,
        }


def _failure(url: str, error: BridgeError) -> Reason:
    """Return the failure of a server's own step as a reason."""
    text = " ".join(str(error).removeprefix(url).split())
    if isinstance(error, LeaseLost):
        return Reason(text, Loss.GAVE_UP)
    return Reason(text)
