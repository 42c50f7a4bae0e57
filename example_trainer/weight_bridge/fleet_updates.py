"""Rank 0's part of a fleet. It watches the servers between updates and chooses the servers of an
update. It calls them all at the same time, and goes on without servers that fail.

- `call_all` asks each server in a thread and goes on without the late ones. A later answer is
  dropped; the thread ends with its request, which has the deadline of the server's client.
- Rank 0 sends its decisions to the other ranks, so that all of them act alike; see broadcast.py.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from example_trainer.errors import BridgeError, TrainerError
from example_trainer.vllm_client import ServerSilent
from example_trainer.weight_bridge.base import LeaseLost, OneServerRefused
from example_trainer.weight_bridge.fleet import (
    Evidence,
    Fleet,
    Loss,
    Progress,
    Reason,
    Sight,
    Standing,
    Verdict,
    diagnose,
    given_up,
    line_of,
    table,
    waiting_line,
)
from example_trainer.weight_bridge.server import BridgeServer, Shapes, check_layout, manifests_of
from example_trainer.weight_bridge.service_board import SERVICE_SECONDS, Board
from example_trainer.weight_bridge.stream import CohortError, route_to, sent_together
from vllm_patching.protocol.manifest import Manifest, flat_layout
from vllm_patching.protocol.messages import Route
from vllm_patching.transport.rendezvous import Meeting

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_SECONDS = 0.1
_TICK_SECONDS = 1.5


class TimedOut(BridgeError):
    """A server that the others did not wait for any longer."""


class RunningClock:
    """Seconds for which this process has run. Time in which it is stopped, or its machine sleeps,
    does not count.

    A caller asks it again and again, never longer than `_TICK_SECONDS` between two calls.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._now = 0.0

    def now(self) -> float:
        """Never goes back."""
        with self._lock:
            looked, self._looked = self._looked, time.monotonic()
            self._now += min(self._looked - looked, _TICK_SECONDS)
            return self._now


@dataclass
class Answers(Generic[T]):
    """Answers of servers that were called at the same time, by address."""

    ok: dict[str, T] = field(default_factory=dict)
    failed: dict[str, BridgeError] = field(default_factory=dict)

    def add(self, url: str, value: T | None, error: BaseException | None) -> None:
        """Note an answer. Raises an error that is not a BridgeError."""
        if error is None:
            self.ok[url] = value  # type: ignore[assignment]
        elif isinstance(error, BridgeError):
            self.failed[url] = error
        else:
            raise error


def call_all(
    calls: Mapping[str, Callable[[], T]],
    limit: float,
    patience: float | None = None,
    enough: Callable[[Mapping[str, T]], bool] = bool,
    lost: Callable[[], Mapping[str, str]] = dict,
    clock: RunningClock | None = None,
) -> Answers[T]:
    """Do all calls at the same time, each in a thread.

    Args:
        calls: by a server's address.
        limit: seconds after which no server is waited for.
        patience: seconds for which the rest is waited for, after the last answer that came; None:
            until `limit`.
        enough: whether the answers so far suffice to go on without the rest, once they are late.
        lost: returns servers that will not answer any more, with the reason.
        clock: the caller's, if it has one.

    Raises:
        Exception: an error of a call other than BridgeError.
    """
    results: queue.SimpleQueue[tuple[str, T | None, BaseException | None]] = queue.SimpleQueue()

    def work(url: str, call: Callable[[], T]) -> None:
        try:
            results.put((url, call(), None))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            results.put((url, None, error))

    for url, call in calls.items():
        threading.Thread(target=work, args=(url, call), name=f"asks {url}", daemon=True).start()
    answers: Answers[T] = Answers()
    waiting = set(calls)
    clock = clock or RunningClock()
    begun = last = clock.now()
    while waiting:
        try:
            url, value, error = results.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            now = clock.now()
            reasons = {url: reason for url, reason in lost().items() if url in waiting}
            if now - begun >= limit:
                reasons = dict.fromkeys(waiting, f"did not answer within {limit:g} s") | reasons
            elif patience is not None and now - last >= patience and enough(answers.ok):
                reasons = (
                    dict.fromkeys(waiting, f"is {now - last:.0f} s behind the others") | reasons
                )
            answers.failed |= {url: TimedOut(f"{url} {reason}") for url, reason in reasons.items()}
            waiting -= reasons.keys()
            continue
        if url in waiting:
            waiting.discard(url)
            last = clock.now()
            answers.add(url, value, error)
    return answers


LOOK_SECONDS = 2.0
"""For the answer to a look at a server's state."""
_FIRST_LOOK_SECONDS = 1.0
"""An update that takes no longer than this is not watched."""
_NEXT_LOOK_SECONDS = 0.5
_SAY_EVERY_SECONDS = 10.0


class Unfit(BridgeError):
    """A server that cannot be a member however often it is asked: only another server at its
    address can.
    """


class Refused(Unfit):
    """A server that only a check keeps out: training begins without it."""


class Member:
    """One server, and what this trainer has agreed with it.

    Attributes:
        server: speaks its routes.
        info: what /bridge/info answered last.
        manifests: of its ranks.
        epoch: of this trainer at that server; 0 before it has joined.
        joined: whether it takes steps of this trainer.
        transfer: how weights arrive, as the server chose.
        route: how they travel, as this process chose.
        replicas: engine cores behind it; each one receives.
    """

    def __init__(self, server: BridgeServer) -> None:
        self.server = server
        self.info: dict[str, Any] = {}
        self.manifests: list[Manifest] = []
        self._replica_bytes = 0
        self.epoch, self.replicas = 0, 1
        self.joined = False
        self.transfer = ""
        self.route = Route.GLOO

    @property
    def url(self) -> str:
        """Its address, which is its name in the fleet."""
        return self.server.url

    @property
    def instance(self) -> str:
        """Return the instance of the process whose layout is known."""
        return str(self.info.get("instance", ""))

    @property
    def layout(self) -> str:
        """Servers with the same one can receive the same bytes at the same time."""
        return ",".join([self.route, *(manifest.digest() for manifest in self.manifests)])

    @property
    def num_bytes(self) -> int:
        """Bytes that an update brings to all replicas."""
        return self.replicas * self._replica_bytes

    def ask(self) -> None:
        """Read the server's layout into `info` and `manifests`. Waits for a server that is still
        loading.
        """
        self.info = self.server.wait_for_info()
        self.manifests = manifests_of(self.info)
        self._replica_bytes = sum(
            item.num_bytes for manifest in self.manifests for item in flat_layout(manifest)[0]
        )

    def join(
        self,
        shapes: Callable[[dict[str, Any]], Shapes],
        transfer: str,
        gpus: Sequence[str],
        check: MemberCheck,
        kernels: Mapping[str, str] | None,
        may_wait: Callable[[], bool],
    ) -> int:
        """Begin an epoch with the server that answers now. Returns the number of parameters mapped,
        which is all of them.

        Args:
            shapes: what this trainer sends, by the server's info.
            transfer: auto, direct or overlapped.
            gpus: UUID of each trainer rank's GPU; empty on a CPU.
            check: raises if it must not be let in.
            kernels: of this trainer, in deterministic mode.
            may_wait: see BridgeServer.init.

        Raises:
            Unfit: it holds something else, or cannot be sent to.
            BridgeError: it refuses now, or does not answer.
        """
        self.joined = False
        state = self.state()
        if state is None:
            raise ServerSilent(f"{self.url} does not answer")
        if state["instance"] != self.instance:
            self.ask()
        elif state["target_version"] is not None and state["epoch"] == self.epoch:
            self.server.abort(
                self.epoch, "the trainer joins again"
            )  # else what is left of that update keeps it waiting
        told = shapes(self.info)
        try:
            mapped = check_layout(self.info, told)
        except BridgeError as error:
            raise Unfit(str(error)) from error
        try:
            check(self)
        except BridgeError:
            raise
        except OneServerRefused as error:
            raise Refused(str(error)) from error
        except TrainerError as error:
            raise Unfit(str(error)) from error
        answer = self.server.init("broadcast", told, transfer, kernels=kernels, may_wait=may_wait)
        self.epoch, self.transfer = answer["epoch"], answer["transfer"]
        self.route = route_to(self.info, gpus)
        self.replicas = int(answer.get("replicas", 1))
        self.joined = True
        return mapped

    def state(self) -> dict[str, Any] | None:
        """Return the server's present state; None if it does not answer."""
        return self.server.look("/bridge/state", LOOK_SECONDS)

    def seen_in(self, state: dict[str, Any] | None) -> Sight | None:
        """Return the policy's view of a server with this state; None if it does not answer."""
        if state is None:
            return None
        ours = not self.joined or state["instance"] != self.instance or state["epoch"] == self.epoch
        hangs = str(state.get("engine_trouble", ""))
        trouble = "vLLM's engine process has died" if state["engine_dead"] else hangs
        if not trouble and not state["healthy"]:
            trouble = state.get("quarantine") or state["last_error"] or "is unhealthy"
        taken_by = "" if ours else taken_over(state)
        return Sight(
            state["instance"],
            state["weight_version"],
            state["weight_epoch"],
            trouble,
            taken_by,
            bool(hangs),
        )

    def evidence(self, state: dict[str, Any] | None, version: int) -> Evidence:
        """Return the evidence of a state on the update to `version`; None: the server did not
        answer.
        """
        if state is None:
            return Evidence(answers=False)
        gave_up = ""
        if state["target_version"] is None and state.get("gave_up_waiting") == version:
            gave_up = f"gave version {version} up: {state['last_error']}"
        ranks = state.get("ranks", [])
        errors = dict.fromkeys(str(rank["error"]) for rank in ranks if rank.get("error"))
        return Evidence(
            broken=self._broken(state),
            gave_up=gave_up,
            rank_errors="; ".join(errors),
            silent=float(state.get("silent_seconds", 0.0)),
            received=min((int(rank.get("received_bytes") or 0) for rank in ranks), default=0),
            idle=any(
                rank.get("phase") == "receiving" and not rank.get("waits", True) for rank in ranks
            ),
        )

    def _broken(self, state: dict[str, Any]) -> Reason | None:
        """Return why the server cannot finish its update; None while it may."""
        if state["instance"] != self.instance:
            return Reason("was restarted", Loss.RESTARTED)
        if state["epoch"] != self.epoch:
            return Reason(f"{taken_over(state)} has taken it over", Loss.TAKEN_OVER)
        if state["engine_dead"]:
            return Reason("vLLM's engine process has died")
        if state.get("engine_trouble"):
            return Reason(str(state["engine_trouble"]))
        return None


MemberCheck = Callable[[Member], None]


def taken_over(state: Mapping[str, Any]) -> str:
    """Return the trainer that a server belongs to now, for messages."""
    return f"{state['trainer']} (epoch {state['epoch']})"


def is_away(error: BaseException) -> bool:
    """Return whether a failure means that the server does not answer."""
    return isinstance(error, ServerSilent | TimedOut)


class Watch:
    """Looks at all members while they do the same step of an update. Names the servers not to wait
    for, and logs the server that all wait for.

    Used as a context; any thread may read `lost` and `reasons`.
    """

    def __init__(
        self, members: Mapping[str, Member], version: int, patience: float, limit: float
    ) -> None:
        """
        Args:
            members: by address.
            version: that they are sent.
            patience: seconds for which one of them may delay the others.
            limit: seconds for all of it, from the first byte on.
        """
        self._members, self._version = members, version
        self._patience, self._limit = patience, limit
        self._progress = Progress()
        self._clock = RunningClock()
        self._reasons: dict[str, Reason] = {}
        self._forming = False
        self._sent_since: float | None = None
        self._next_line = 0.0
        self._behind = dict.fromkeys(members, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch over an update", daemon=True)
        self._answered = dict.fromkeys(members, self._clock.now())
        self._failure: BaseException | None = None

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @property
    def reasons(self) -> dict[str, Reason]:
        """The servers not to wait for."""
        if self._failure is not None:
            raise self._failure
        return dict(self._reasons)

    def texts(self) -> dict[str, str]:
        """Return `reasons` as sentences without the address."""
        return {url: reason.text for url, reason in self.reasons.items()}

    def lost(self) -> str:
        """Return `reasons` as one sentence; empty while all may still come."""
        return "; ".join(f"{url} {text}" for url, text in self.texts().items())

    def forming(self) -> None:
        """Begin to watch the members meet."""
        self._forming, self._sent_since = True, None

    def sending(self) -> None:
        """Begin to watch the members receive."""
        self._forming, self._sent_since = False, self._clock.now()

    def sent(self) -> None:
        """Stop to log which member all wait for: everything has been sent."""
        self._sent_since = None

    def _run(self) -> None:
        pause = _FIRST_LOOK_SECONDS
        while not self._ended.wait(pause):
            pause = _NEXT_LOOK_SECONDS
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - raised where the watch is read
                self._failure = error
                return

    def _look(self) -> None:
        calls = {url: member.state for url, member in self._members.items()}
        states = call_all(calls, LOOK_SECONDS + 1.0, clock=self._clock).ok
        now = self._clock.now()
        evidence = {
            url: self._evidence(url, member, states.get(url), now)
            for url, member in self._members.items()
        }
        if self._ended.is_set() or self._reasons:
            return
        self._reasons = diagnose(self._progress.timed(evidence, now), self._patience)
        if not self._reasons:
            self._log_slowest({url: one.received for url, one in evidence.items()}, now)

    def _evidence(
        self, url: str, member: Member, state: dict[str, Any] | None, now: float
    ) -> Evidence:
        evidence = member.evidence(state, self._version)
        if state is None:
            return replace(evidence, silent=now - self._answered[url])
        self._answered[url] = now
        # A server that gave the version up is joined again once its own step has failed.
        evidence = replace(evidence, gave_up="")
        if not self._forming:
            return evidence
        # The meeting itself shows which receivers did not come.
        evidence = replace(evidence, received=0, idle=False)
        if evidence.rank_errors:
            return replace(evidence, failure=Reason(evidence.rank_errors))
        return evidence

    def _log_slowest(self, received: Mapping[str, int], now: float) -> None:
        """Log which members all wait for. A slow member that is not late is waited for.

        No member is ever ahead by more than the sender's two buckets, so each look adds up how far
        behind a member is.
        """
        most = max(received.values())
        for url, amount in received.items():
            self._behind[url] += most - amount
        since = self._sent_since
        if since is None or now - since < self._patience or now < self._next_line:
            return
        self._next_line = now + _SAY_EVERY_SECONDS
        worst = max(self._behind.values())
        slowest = ", ".join(
            f"{url} (has {_megabytes(received[url])})"
            for url in received
            if self._behind[url] == worst
        )
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + since + self._limit - now))
        logger.warning(
            "[Fleet] version %d is on its way for %.0f s, waiting for %s; the fastest of %d servers has %s; until %s",
            self._version, now - since, slowest, len(received), _megabytes(most), until,
        )  # fmt: skip


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


PUBLISH_SECONDS = 5.0
"""The longest time between two tables that the rollout service is given."""
_ROUND_SECONDS = 1.0


class FleetKeeper:
    """Owns the fleet and its members, on rank 0. A thread looks at all servers every second while
    no update is made.

    `lock` guards `fleet` and `members`, and is held for no longer than it takes to read or change
    them.
    """

    def __init__(
        self,
        fleet: Fleet,
        members: Mapping[str, Member],
        make: Callable[[str], BridgeServer],
        board: Board | None = None,
    ) -> None:
        """
        Args:
            fleet: the policy.
            members: its servers, by address.
            make: speaks to a server that joins later, by its address.
            board: where the table is shown; None: nowhere.
        """
        self.fleet, self.members = fleet, dict(members)
        self.lock = threading.RLock()
        self._make, self._board = make, board
        self._ended, self._changed = threading.Event(), threading.Event()
        self._updates = 0
        self._updating = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fleet keeper", daemon=True)
        self._said_away: set[str] = set()
        self._weight_epoch: int | None = None

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def look(self, forced: bool = False) -> None:
        """Look at all servers now, at the same time; at most a second longer than LOOK_SECONDS.

        Args:
            forced: poll even during an update; for the thread that makes the update.
        """
        with self.lock:
            members, begun = dict(self.members), self._updates
            if self._updating and not forced:
                return
        states = call_all(
            {url: member.state for url, member in members.items()}, LOOK_SECONDS + 1.0
        ).ok
        with self.lock:
            if not forced and (self._updating or self._updates != begun):
                return  # what was seen is older than what the update has taught
            for url, member in members.items():
                self.fleet.saw(url, member.seen_in(states.get(url)), time.monotonic())
                self._say_away(url, states.get(url) is None)
            self.tell()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Make an update within the block. The keeper's thread does not poll the servers for that
        time.
        """
        with self.lock:
            self._updating = True
        try:
            yield
        finally:
            with self.lock:
                self._updating, self._updates = False, self._updates + 1
                self.tell()

    def change_epoch(self, weight_epoch: int) -> None:
        """Set the weight epoch of later updates. Servers that joined for another one join again."""
        with self.lock:
            self._weight_epoch = weight_epoch
            for member in self.members.values():
                if member.server.weight_epoch != weight_epoch:
                    member.server.weight_epoch, member.joined = weight_epoch, False

    def due(self) -> list[str]:
        """Return the servers that could be brought in now, by the last poll.

        Raises:
            BridgeError: the thread has failed.
        """
        if self._failure is not None:
            raise BridgeError(
                f"the servers are not looked after any more ({type(self._failure).__name__}: "
                f"{self._failure}). Start this process again, a trainer with --resume auto. The "
                "traceback is in its log, at [Fleet]"
            ) from self._failure
        with self.lock:
            return self.fleet.due(time.monotonic())

    def tell(self) -> None:
        """Log the changes, and have the table published. `lock` is held."""
        for change in self.fleet.take_changes():
            self._changed.set()
            level = logging.WARNING
            if change.now is Standing.GOOD:
                level = logging.INFO
            if line := line_of(change, self.fleet):
                logger.log(level, "%s", line)

    def close(self) -> None:
        """Stop looking. Safe to call twice."""
        self._ended.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_SECONDS + SERVICE_SECONDS + _ROUND_SECONDS)
        if self._board is not None:
            self._board.close()

    def _run(self) -> None:
        published = 0.0
        try:
            while not self._ended.is_set():
                self.look()
                now = time.monotonic()
                if self._changed.is_set() or now - published >= PUBLISH_SECONDS / 2:
                    self._changed.clear()
                    published = now
                    self._publish()
                self._changed.wait(_ROUND_SECONDS)
        except Exception as error:
            self._failure = error
            logger.exception("[Fleet] servers are not looked after any more")

    def _publish(self) -> None:
        if self._board is None:
            return
        with self.lock:
            rows = table(self.fleet)
        membership = self._board.publish(rows)
        if membership is None:
            return
        with self.lock:
            if not self._updating:  # a server in an update stays until its end
                self.change_members(*membership)

    def change_members(self, wanted: Sequence[str], left: Sequence[str]) -> None:
        """Add and remove servers, as others demand. `lock` is held; no update is made."""
        came, went = self.fleet.change_members(wanted, left, time.monotonic())
        for url in went:
            logger.info(
                "[Fleet] %s has left: training goes on with %d servers", url, len(self.fleet.good)
            )
            self.members.pop(url).server.close()
        for url in came:
            logger.info("[Fleet] %s shall join", url)
            server = self._make(url)
            if self._weight_epoch is not None:
                server.weight_epoch = self._weight_epoch
            self.members[url] = Member(server)
        if came or went:
            self._changed.set()

    def _say_away(self, url: str, away: bool) -> None:
        place = self.fleet.places.get(url)
        if not away or place is None or place.standing is Standing.GOOD:
            self._said_away.discard(url)
        elif url not in self._said_away:
            self._said_away.add(url)
            what = self.members[url].server.what
            logger.warning(
                "[Bridge] the %s at %s does not answer; start it again, it will get the weights",
                what,
                url,
            )


class GroupMember(BaseModel):
    """One server of a group: a restarted server, or one that joined again, is another member."""

    model_config = ConfigDict(frozen=True)

    url: str
    epoch: int
    replicas: int
    instance: str


class UpdateGroup(BaseModel):
    """Servers that share one broadcast.

    Attributes:
        layout: names the layout of their weights, and which group of that layout this is.
        key: name of their cohort.
        route: the way that the weights take.
        members: in the order of their places in the cohort.
        manifests: of the layout's ranks; empty if the other ranks know the layout already.
    """

    model_config = ConfigDict(frozen=True)

    layout: str
    key: str
    route: Route
    members: tuple[GroupMember, ...]
    manifests: tuple[dict[str, Any], ...]

    @property
    def urls(self) -> list[str]:
        """Addresses of the members."""
        return [member.url for member in self.members]

    @property
    def receivers(self) -> int:
        """Number of engine cores that receive, in all members."""
        return sum(member.replicas for member in self.members)

    def at(self, numbers: Iterable[int]) -> set[str]:
        """Return the addresses of the receivers at these places of the cohort, from 1."""
        places = [member.url for member in self.members for _ in range(member.replicas)]
        return {places[number - 1] for number in numbers if 0 < number <= len(places)}


class Groups:
    """Makes groups. Remembers the layouts that the other ranks have received."""

    def __init__(self) -> None:
        self._keys, self._known_layouts = 0, set[str]()

    def of(self, members: Sequence[Member], alone: Collection[str]) -> list[UpdateGroup]:
        """Put the members of one layout together, except members that share a GPU.

        Args:
            alone: addresses of members that get a group of their own, after the others.
        """
        ordered = sorted(members, key=lambda member: member.url in alone)
        kinds = []
        for member in ordered:
            kind = (member.layout, member.url in alone and member.url)
            kinds.append((kind, member.route, member.info["gpu_uuids"]))
        return [
            self._group([ordered[place] for place in places], number)
            for number, places in sent_together(kinds)
        ]

    def _group(self, members: Sequence[Member], number: int) -> UpdateGroup:
        layout = f"{members[0].layout} {number}"
        self._keys += 1
        manifests: tuple[dict[str, Any], ...] = ()
        if layout not in self._known_layouts:
            self._known_layouts.add(layout)
            manifests = tuple(manifest.to_json() for manifest in members[0].manifests)
        return UpdateGroup(
            layout=hashlib.sha256(layout.encode()).hexdigest(),
            key=f"cohort{self._keys}",
            route=members[0].route,
            members=tuple(
                GroupMember(url=m.url, epoch=m.epoch, replicas=m.replicas, instance=m.instance)
                for m in members
            ),
            manifests=manifests,
        )


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
        self.kernels: Mapping[str, str] | None = None
        self._groups = Groups()
        self.joins = self.mapped = 0
        self.begin_version(0, False)

    @property
    def patience(self) -> float:
        """Seconds for which one server may keep the others waiting."""
        return self._keeper.fleet.patience

    def begin_version(self, version: int, everyone: bool) -> None:
        """Begin an update: of all servers, or only of servers that can be brought in."""
        self._version, self._everyone, self._phase = version, everyone, ""
        self._done: dict[str, dict[str, Any]] = {}
        self._reloaded: dict[str, list[str]] = {}
        self._again: set[str] = set()
        self._alone: set[str] = set()
        self._late: set[str] = set()
        self._failures: dict[str, BridgeError] = {}
        self._waiting_since: float | None = None
        self._checksum, self._verified, self._bytes = "", 0.0, 0

    # ---- the start of a training ----

    def gather(self) -> list[Member]:
        """Wait for the servers that the options name. Late servers join when they are there.

        Raises:
            BridgeError: too few are there in time, or one of them cannot be joined by any trainer.
        """
        members = self._keeper.members
        limit = self._longest_wait + self._timeout
        answers = call_all(
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
                f"{len(present)} vLLM servers on {len(found)} hosts "
                f"({', '.join(sorted(found)) or 'none'}) are there after {limit:g} s. "
                f"--min-servers {self._keeper.fleet.least} and NUM_INFERENCE_NODES={self._hosts} "
                "ask for more. Start them, or ask for fewer: "
                f"{'; '.join(str(error) for error in answers.failed.values())}"
            )
        return present

    def _suffices(self, there: Mapping[str, Any]) -> bool:
        hosts = {str(self._keeper.members[url].info["hostname"]) for url in there}
        return len(there) >= self._keeper.fleet.least and len(hosts) >= self._hosts

    def prepare(self, shapes: Callable[[dict[str, Any]], Shapes], gpus: Sequence[str]) -> None:
        """Set what this trainer sends (by a server's info), and from where; join the servers that
        are there.

        Args:
            gpus: UUID of each trainer rank's GPU; empty on a CPU.

        A server that a check refuses is left out if enough others are there.

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
            failed = self._join(present, self._longest_wait).failed
        left = len(present) - sum(isinstance(error, Refused) for error in failed.values())
        for error in failed.values():
            refused = isinstance(error, Refused)
            if refused and left < self._keeper.fleet.least:
                raise error
            if not (refused or is_away(error)):
                raise error
        self._keeper.start()

    # ---- receivers ----

    def choose(self) -> list[UpdateGroup]:
        """Return the groups of servers to send to now. Waits while there are too few, and joins new
        ones.

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

    def _join(self, urls: Iterable[str], wait: float = 0.0) -> Answers[int]:
        """Join servers, all at the same time.

        Args:
            wait: seconds for servers that another trainer occupies. Not in a training: such a
                server is tried again at a later update.
        """
        members = {url: self._keeper.members[url] for url in urls}
        over = threading.Event()  # a late thread must not join after a later call has joined

        def may_wait() -> bool:
            return wait > 0 and not over.is_set()

        how = (self._shapes, self._transfer, self._gpus, self._check, self.kernels, may_wait)
        calls = {url: partial(member.join, *how) for url, member in members.items()}
        others = self._others_wait(calls)
        limit = wait + self._timeout + _CALL_OFF_SECONDS
        try:
            answers = call_all(calls, limit, self.patience, lambda ok: others or bool(ok))
        finally:
            over.set()
        with self._keeper.lock:
            for url, mapped in answers.ok.items():
                self.joins, self.mapped = self.joins + 1, mapped
                self._keeper.fleet.joined(url, members[url].instance)
            for url, error in answers.failed.items():
                reason = _failure(url, error).text
                unfit = isinstance(error, Unfit)
                instance = members[url].instance * unfit
                self._blame(url, reason, is_away(error), unfit, instance)
            self._keeper.tell()
        return answers

    def require(self, check: MemberCheck) -> None:
        """Check servers that join from now on. The check raises ConfigError or BridgeError."""
        self._checks.append(check)

    def _check(self, member: Member) -> None:
        for check in self._checks:
            check(member)

    # ---- the steps, for one group ----

    def watch(self, group: UpdateGroup) -> Watch:
        """Return a watch over the members of a group during their update."""
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
        self._compare_reloads(group.layout, answers)
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

    def _compare_reloads(self, layout: str, answers: Answers[dict[str, Any]]) -> None:
        """Count a server as failed if vLLM has made other parameters of the same weights."""
        reloaded = [answer.get("parameters", []) for answer in answers.ok.values()]
        if not reloaded:
            return
        first = self._reloaded.setdefault(layout, max(reloaded, key=reloaded.count))
        for url, answer in list(answers.ok.items()):
            if answer.get("parameters", []) != first:
                del answers.ok[url]
                answers.failed[url] = BridgeError(
                    f"{url} has reloaded version {self._version} to parameters with the checksums "
                    f"{answer.get('parameters')}, and others to {first}: start all with the same "
                    "vLLM and options"
                )

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
        return call_all(calls, limit, self.patience, lambda ok: others or bool(ok), watch.texts)

    def _others_wait(self, urls: Collection[str]) -> bool:
        """Return whether good servers wait for these: in an update of all, other groups do."""
        with self._keeper.lock:
            return self._everyone and not set(self._keeper.fleet.good) <= set(urls)

    # ---- what went wrong ----

    def break_off(self, group: UpdateGroup, error: BridgeError, watch: Watch) -> None:
        """Have the members of a group forget the update, and send again to members that are not
        lost. If the evidence fits every member, each of them gets the update in a group of its own.
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
            failures: of servers that failed in their own step.
            error: the reason why the others have to forget the update.
            absent: servers that did not come to the cohort.
            anew: a server that has ended the update joins again, too.
        """
        states = call_all({url: self._keeper.members[url].state for url in urls}, 3.0).ok
        evidence = {
            url: self._evidence(url, states.get(url), failures.get(url), url in absent)
            for url in urls
        }
        lost = diagnose(evidence, self.patience, error)
        if not lost:
            logger.warning(
                "[Fleet] %s; no server gives a reason: the %d servers are updated one by one",
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
        late = isinstance(self._failures.get(url), TimedOut)
        return replace(evidence, broken=broken, failure=failure, late=late, absent=absent)

    def _once_more(self, urls: Collection[str], reason: str, anew: bool) -> None:
        """Have servers forget the update, and send it to them again."""
        members = {url: self._keeper.members[url] for url in urls}
        calls = {url: partial(m.server.abort, m.epoch, reason) for url, m in members.items()}
        answers = call_all(calls, self._timeout + _CALL_OFF_SECONDS, self.patience)
        for url, member in members.items():
            self._again.add(url)
            # A server that did not answer forgets the update when it joins again.
            member.joined = not anew and answers.ok.get(url, False)

    def _leave(self, lost: Mapping[str, Reason]) -> None:
        """Go on without these servers. Servers that gave up waiting join again, once."""
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
        answers = call_all(calls, _CALL_OFF_SECONDS, self.patience, lambda _: True)
        for url, error in answers.failed.items():
            logger.info("[Fleet] %s does not know that it is quarantined: %s", url, error)

    def _blame(self, url: str, reason: str, away: bool, hopeless: bool, instance: str = "") -> None:
        self._keeper.members[url].joined = False
        self._keeper.fleet.failed(url, reason, time.monotonic(), away, hopeless, instance)

    def _of(self, group: UpdateGroup) -> dict[str, Member]:
        return {url: self._keeper.members[url] for url in group.urls}

    # ---- how it ends ----

    def settled(self) -> bool:
        """Return whether the update is over: all servers that can be sent to have it, and they are
        enough.
        """
        if self._again:
            return False
        with self._keeper.lock:
            good = [url for url in self._keeper.fleet.good if url in self._done]
            return not self._everyone or len(good) >= self._keeper.fleet.least

    def report(self) -> dict[str, Any]:
        """Return the results for SyncReport."""
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
