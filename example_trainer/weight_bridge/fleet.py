"""The policy of a fleet, without clocks, threads or I/O. It decides which servers an update goes
to, which ones it goes on without, and the lines about them.

    joining ──served──▶ good ──failed──▶ quarantined ──served──▶ good
                         │                    │
                         └────silent────▶ away ──seen, served──▶ good

A server is *due* when it answers, does not serve the present weights, and may be tried again: one
full update then makes it `good`. A server that fails again and again is tried at growing intervals,
so that it seldom delays the others. A server that another trainer has taken over, or that holds
another model, is *hopeless*: only its restart helps.

`diagnose` decides which servers an update goes on without:

- Facts come first: a process that ended, restarted or belongs to another trainer, a failed step.
- A symptom counts only if no server has a fact against it: the others may wait for that server.
- A server that is merely slow has one timeout, the patience.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from typing import Any

FIRST_PAUSE_SECONDS = 10.0
"""Between the second try to bring a server back and the third; the second comes at once, each later
pause is twice as long."""
LONGEST_PAUSE_SECONDS = 300.0


class Standing(StrEnum):
    """The trainer's view of a server."""

    JOINING = "joining"
    GOOD = "good"
    QUARANTINED = "quarantined"
    AWAY = "away"


class Verdict(StrEnum):
    """The trainer's next action."""

    GO = "go"
    WAIT = "wait"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Sight:
    """A server's state at the last poll.

    Attributes:
        instance: names its process.
        weight_version, weight_epoch: of the weights that it serves, or would.
        trouble: why its weights cannot be used, although it answers; empty if they can.
        taken_by: the trainer that has joined it since this one did; empty if there is none.
        hangs: whether its engine makes no progress, so that it cannot be updated either.
    """

    instance: str
    weight_version: int
    weight_epoch: int
    trouble: str = ""
    taken_by: str = ""
    hangs: bool = False


@dataclass
class Place:
    """One server in the fleet's table.

    Attributes:
        url: its address, which is its name.
        standing: see Standing.
        since: when it came to stand so.
        reason: why it is not good; empty if it is.
        instance: of the process that was joined last; empty before.
        weight_version, weight_epoch: that it serves as far as is known; None before it was seen.
        answers: whether it did when it was looked at last, and has not failed since.
        hangs: whether its engine makes no progress.
        hopeless: whether waiting will not help.
        failures: tries that failed, since it was good.
        not_before: when it may be tried again.
        lost: when it stopped being good; None while it is, or was not yet.
        silent_since: time of the first look in a row that it did not answer.
    """

    url: str
    since: float
    standing: Standing = Standing.JOINING
    reason: str = "has not been asked yet"
    instance: str = ""
    weight_version: int | None = None
    weight_epoch: int | None = None
    answers: bool = False
    hangs: bool = False
    hopeless: bool = False
    failures: int = 0
    not_before: float = 0.0
    lost: float | None = None
    silent_since: float | None = None


@dataclass(frozen=True)
class Change:
    """A server whose standing has become another.

    Attributes:
        url: its address.
        before, now: what it was, and what it became.
        reason: why it is not good; empty if it is.
        weight_version: that it serves; None if that is not known.
        absence: seconds for which it was not good, if it is good again; None if it is so for the
            first time.
    """

    url: str
    before: Standing
    now: Standing
    reason: str
    weight_version: int | None
    absence: float | None


class Fleet:
    """The servers, in the order in which they were named. Times are seconds of a clock that does
    not jump, given by the caller.

    Example:
        fleet = Fleet(["http://a:9001", "http://b:9001"], least=1, patience=10.0, now=time.monotonic())
        fleet.saw("http://a:9001", sight, time.monotonic())
        if fleet.verdict(waited=0.0, limit=300.0, now=time.monotonic()) is Verdict.GO:
            update(fleet.takes_part(time.monotonic()))
    """

    def __init__(self, urls: Iterable[str], least: int, patience: float, now: float) -> None:
        """
        Args:
            urls: of the servers that the options name.
            least: good servers without which training waits (--min-servers).
            patience: seconds that a server may be silent before it counts as away
                (--server-patience).
            now: the time.
        """
        self.least, self.patience = least, patience
        self._named = list(dict.fromkeys(urls))
        self.places: dict[str, Place] = {url: Place(url, now) for url in self._named}
        self._changes: list[Change] = []

    # ---- what is known ----

    def saw(self, url: str, sight: Sight | None, now: float) -> None:
        """Note the poll of a server outside an update; `sight` is None if it did not answer."""
        place = self.places.get(url)
        if place is None:
            return  # it has left the fleet
        if sight is None:
            place.answers = False
            place.silent_since = now if place.silent_since is None else place.silent_since
            if place.standing is not Standing.AWAY and now - place.silent_since >= self.patience:
                self._stand(place, Standing.AWAY, "does not answer", now)
            return
        place.answers, place.silent_since, place.hangs = True, None, sight.hangs
        before = (place.weight_version, place.weight_epoch)
        place.weight_version, place.weight_epoch = sight.weight_version, sight.weight_epoch
        if place.instance and sight.instance != place.instance:
            place.hopeless, place.failures, place.not_before = False, 0, now
            place.instance = ""
            self._stand(place, Standing.JOINING, "was restarted", now)
        elif sight.taken_by:
            place.hopeless = True
            self._stand(place, Standing.QUARANTINED, f"{sight.taken_by} has taken it over", now)
        elif place.standing is Standing.GOOD and sight.trouble:
            self._stand(place, Standing.QUARANTINED, sight.trouble, now)
        elif place.standing is Standing.GOOD and before != (
            sight.weight_version,
            sight.weight_epoch,
        ):
            told = f"serves version {sight.weight_version} (weight epoch {sight.weight_epoch}) instead of {before[0]}"
            self._stand(place, Standing.QUARANTINED, told, now)
        elif sight.hangs:
            self._stand(place, place.standing, sight.trouble, now)

    def failed(
        self,
        url: str,
        reason: str,
        now: float,
        away: bool = False,
        hopeless: bool = False,
        instance: str = "",
    ) -> None:
        """Note a server that failed to join or failed in an update.

        Args:
            away: it was silent, or its process has ended.
            hopeless: it will never do it, as long as it is not restarted.
            instance: of the process that failed, by which its restart is noticed; empty if unknown.
        """
        place = self.places.get(url)
        if place is None:
            return
        place.answers, place.hopeless = False, place.hopeless or hopeless
        place.instance = instance or place.instance
        pause = (
            min(FIRST_PAUSE_SECONDS * 2 ** (place.failures - 1), LONGEST_PAUSE_SECONDS)
            if place.failures
            else 0.0
        )
        place.failures = min(place.failures + 1, 20)
        place.not_before = now + pause
        self._stand(place, Standing.AWAY if away else Standing.QUARANTINED, reason, now)

    def joined(self, url: str, instance: str) -> None:
        """Note a server that has accepted this trainer. It does not have its weights yet."""
        if url in self.places:
            self.places[url].instance = instance

    def served(self, url: str, version: int, epoch: int, now: float) -> None:
        """Note a server that has verified the weights of `version` and serves them."""
        place = self.places.get(url)
        if place is None:
            return
        place.weight_version, place.weight_epoch = version, epoch
        place.answers, place.hopeless, place.failures, place.silent_since = True, False, 0, None
        self._stand(place, Standing.GOOD, "", now)

    def change_members(
        self, wanted: Iterable[str], left: Iterable[str], now: float
    ) -> tuple[list[str], list[str]]:
        """Add servers beside the named ones, and remove others. Returns the new servers and the
        removed ones.
        """
        gone = set(left)
        members = [url for url in dict.fromkeys([*self._named, *wanted]) if url not in gone]
        came = [url for url in members if url not in self.places]
        went = [url for url in self.places if url not in members]
        for url in went:
            del self.places[url]
        for url in came:
            self.places[url] = Place(url, now)
        return came, went

    # ---- what follows ----

    @property
    def good(self) -> list[str]:
        """Return the servers that serve the present weights."""
        return self._standing(Standing.GOOD)

    def due(self, now: float) -> list[str]:
        """Return the servers that one full update would bring in, or back."""
        return [
            place.url
            for place in self.places.values()
            if place.standing is not Standing.GOOD
            and place.answers
            and not (place.hopeless or place.hangs)
            and now >= place.not_before
        ]

    def takes_part(self, now: float) -> list[str]:
        """Return the servers of the next update, in the fleet's order."""
        chosen = {*self.good, *self.due(now)}
        return [url for url in self.places if url in chosen]

    def verdict(self, waited: float, limit: float, now: float) -> Verdict:
        """Decide whether there are enough servers for an update.

        Args:
            waited: seconds that training has waited for servers.
            limit: that it may.
        """
        if len(self.takes_part(now)) >= self.least:
            return Verdict.GO
        hoped = sum(not place.hopeless for place in self.places.values())
        # A server that left may be followed by one that joins. So only servers that are there and
        # hopeless end the training.
        lost = hoped < self.least <= len(self.places)
        return Verdict.GIVE_UP if lost or waited >= limit else Verdict.WAIT

    def counts(self) -> dict[str, int]:
        """Return the number of servers by standing, and `size` in all."""
        return {"size": len(self.places)} | {str(s): len(self._standing(s)) for s in Standing}

    def take_changes(self) -> list[Change]:
        """Return the changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _standing(self, standing: Standing) -> list[str]:
        return [place.url for place in self.places.values() if place.standing is standing]

    def _stand(self, place: Place, standing: Standing, reason: str, now: float) -> None:
        before, absence = place.standing, None if place.lost is None else now - place.lost
        place.reason = reason
        if before is standing:
            return
        place.standing, place.since = standing, now
        if before is Standing.GOOD:
            place.lost = now
        elif standing is Standing.GOOD:
            place.lost = None
        back = absence if standing is Standing.GOOD else None
        self._changes.append(
            Change(place.url, before, standing, reason, place.weight_version, back)
        )


class Loss(Enum):
    """The way in which an update lost a server, which decides how the trainer treats it."""

    FAILED = auto()
    """It did not do its part: quarantine it."""
    AWAY = auto()
    """It does not answer."""
    RESTARTED = auto()
    """Another process answers at its address."""
    TAKEN_OVER = auto()
    """Another trainer has joined it: only its restart helps."""
    GAVE_UP = auto()
    """It received nothing from this trainer for too long: join it again."""


@dataclass(frozen=True)
class Reason:
    """One sentence about a server, without its address, and what the loss is."""

    text: str
    loss: Loss = Loss.FAILED


@dataclass(frozen=True)
class Evidence:
    """The trainer's knowledge of one server in an update.

    Attributes:
        answers: the server answered the last request for its state.
        broken: the reason in its state why it cannot finish the update.
        failure: its step of the update failed, or the others stopped waiting for it.
        late: the failure is only that its answer did not come in time.
        gave_up: its own report of a version that it gave up.
        absent: it did not come to the cohort.
        rank_errors: errors that its ranks report.
        silent: seconds without an answer from the server or its workers.
        received: bytes at its slowest rank.
        idle: a rank that is to receive does not ask for its next bytes.
        stalled: seconds without a change of `received` or `idle`.
        behind: seconds since another server first had more than `received`.
    """

    answers: bool = True
    broken: Reason | None = None
    failure: Reason | None = None
    late: bool = False
    gave_up: str = ""
    absent: bool = False
    rank_errors: str = ""
    silent: float = 0.0
    received: int = 0
    idle: bool = False
    stalled: float = 0.0
    behind: float = 0.0

    def reason(self, text: str) -> Reason:
        """Return the text as the reason for a server that failed, or that is away."""
        if self.answers:
            return Reason(text)
        return Reason(text, Loss.AWAY)


Servers = Mapping[str, Evidence]


def diagnose(servers: Servers, patience: float, error: str = "") -> dict[str, Reason]:
    """Name the servers to go on without.

    Args:
        servers: the evidence on each, by address.
        patience: seconds for which one server may delay the others.
        error: the error that ended the update; empty while the update runs.

    Returns:
        The reason for each lost server. Empty while the update runs: all may still finish. Empty
        after an error: the evidence fits every server.
    """
    unknown = {}
    if error and len(servers) == 1:
        unknown = {url: server.reason(error) for url, server in servers.items()}
    return (
        _failed(servers)
        or _gave_up(servers)
        or _absent(servers, error)
        or _silent(servers, patience, bool(error))
        or _idle(servers, patience)
        or _behind(servers, patience)
        or unknown
    )


def _failed(servers: Servers) -> dict[str, Reason]:
    # A server without all its bytes cannot answer in time. It is not lost if a server that takes
    # none of its bytes is late, too: the bytes may come through that one.
    blocked = any(server.late and server.idle for server in servers.values())
    reasons = {}
    for url, server in servers.items():
        if server.broken:
            reasons[url] = server.broken
        elif server.failure and not (server.late and blocked and not server.idle):
            reasons[url] = _of_failure(server, server.failure)
    return reasons


def _of_failure(server: Evidence, failure: Reason) -> Reason:
    if failure.loss is Loss.GAVE_UP:
        return Reason(server.gave_up or failure.text, Loss.GAVE_UP)
    return server.reason(failure.text)


def _gave_up(servers: Servers) -> dict[str, Reason]:
    return {
        url: Reason(server.gave_up, Loss.GAVE_UP)
        for url, server in servers.items()
        if server.gave_up
    }


def _absent(servers: Servers, error: str) -> dict[str, Reason]:
    return {
        url: server.reason(f"did not come to the cohort: {server.rank_errors or error}")
        for url, server in servers.items()
        if server.absent
    }


def _silent(servers: Servers, patience: float, ended: bool) -> dict[str, Reason]:
    if ended:
        return {
            url: server.reason("does not answer")
            for url, server in servers.items()
            if not server.answers
        }
    return {
        url: server.reason(f"has not answered for {server.silent:.0f} s")
        for url, server in servers.items()
        if server.silent >= patience
    }


def _idle(servers: Servers, patience: float) -> dict[str, Reason]:
    if all(server.idle for server in servers.values()):
        return {}  # all do something else at the same time, such as a step of the engine
    return {
        url: server.reason(f"takes none of its bytes for {server.stalled:.0f} s")
        for url, server in servers.items()
        if server.idle and server.stalled >= patience
    }


def _behind(servers: Servers, patience: float) -> dict[str, Reason]:
    return {
        url: server.reason(f"is {server.behind:.0f} s behind the others")
        for url, server in servers.items()
        if server.behind >= patience
    }


class Progress:
    """Measures how long servers stand still, and how long they are behind the first of them."""

    def __init__(self) -> None:
        self._first_at: dict[int, float] = {}
        """Time at which the first server had so many bytes."""
        self._unchanged: dict[str, tuple[int, bool, float]] = {}
        """The last `received` and `idle` of each server, and since when."""

    def timed(self, servers: Servers, now: float) -> dict[str, Evidence]:
        """Return the evidence with `stalled` and `behind` set.

        Args:
            now: seconds of any clock that does not go back.
        """
        for url, server in servers.items():
            self._first_at.setdefault(server.received, now)
            if self._unchanged.get(url, ())[:2] != (server.received, server.idle):
                self._unchanged[url] = (server.received, server.idle, now)
        timed = {}
        for url, server in servers.items():
            ahead = [at for received, at in self._first_at.items() if received > server.received]
            timed[url] = replace(
                server,
                stalled=now - self._unchanged[url][2],
                behind=now - min(ahead, default=now),
            )
        return timed


def line_of(change: Change, fleet: Fleet) -> str:
    """Return one log line about a server whose standing has changed; empty if it needs none."""
    version = f"serves version {change.weight_version}"
    if change.now is Standing.GOOD:
        if change.absence is None:
            return f"[Fleet] {change.url} joined: {version}"
        return f"[Fleet] {change.url} is back: {version} after {change.absence:.1f} s"
    if change.before is Standing.GOOD or (
        change.now is not Standing.JOINING and change.before is Standing.JOINING
    ):
        good, size = len(fleet.good), len(fleet.places)
        goes_on = f"training goes on with {good} of {size} servers"
        if good < fleet.least:
            goes_on = (
                f"training waits: {good} of {size} servers are good, --min-servers {fleet.least}"
            )
        return f"[Fleet] {change.url} {change.now}: {change.reason}; {goes_on}"
    return ""


def not_good(fleet: Fleet) -> str:
    """Return the servers that are not good, each with the reason; empty if all are."""
    missing = [place for place in fleet.places.values() if place.standing is not Standing.GOOD]
    return " ".join(f"{place.url} ({place.reason})" for place in missing)


def missing_servers(fleet: Fleet) -> str:
    """Return `not_good`, or a phrase if it is empty."""
    return not_good(fleet) or "no others are known"


def waiting_line(fleet: Fleet, left: float) -> str:
    """Name the servers that training waits for. `left`: seconds until it gives up."""
    clock = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
    told = f"{len(fleet.good)} good, --min-servers {fleet.least}: {missing_servers(fleet)}"
    return f"[Fleet] waiting for servers: {told}; until {clock}"


def given_up(fleet: Fleet, waited: float) -> str:
    """Return why training ends."""
    return (
        f"{len(fleet.good)} of {len(fleet.places)} vLLM servers are good after {waited:.0f} s of waiting, --min-servers "
        f"{fleet.least}: {missing_servers(fleet)}; restart them, then start the trainer again with --resume auto"
    )


def table(fleet: Fleet) -> list[dict[str, Any]]:
    """Return the rows that the rollout service's /fleet shows."""
    unix = time.time() - time.monotonic()
    return [
        {
            "url": place.url,
            "standing": str(place.standing),
            "weight_version": place.weight_version,
            "weight_epoch": place.weight_epoch,
            "since": round(unix + place.since, 3),
            "reason": place.reason,
        }
        for place in fleet.places.values()
    ]
