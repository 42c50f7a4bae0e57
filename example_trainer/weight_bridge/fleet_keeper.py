"""Looks after the fleet between updates: who is away, who is back, who is wanted beside the servers
that the options name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import httpx

from atroposlib.web.connections import direct_client
from example_trainer.api_keys import ServerKeys
from example_trainer.errors import BridgeError
from example_trainer.weight_bridge.asking import at_once
from example_trainer.weight_bridge.fleet import Fleet, Standing
from example_trainer.weight_bridge.fleet_report import line_of, table
from example_trainer.weight_bridge.members import LOOK_SECONDS, Member
from example_trainer.weight_bridge.server import BridgeServer

logger = logging.getLogger(__name__)

PUBLISH_SECONDS = 5.0
"""The longest time between two tables that the rollout service is given."""
_ROUND_SECONDS = 1.0
_SERVICE_SECONDS = 3.0


class Board(Protocol):
    """Where the fleet's table hangs, and where others write whom they want in it."""

    def publish(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]] | None:
        """Show the table. Returns (wanted, left) as they are there now; None if nobody answers."""

    def close(self) -> None:
        """Hang up."""


class ServiceBoard:
    """The rollout service's /fleet. A service that is away, or has no such route, is asked again
    with the next table.

    A refusal is said once. So is silence, but by a parameter server alone: a trainer's batches come
    from the same service, and whoever gets them says that it is away, if there is to be one at all.
    """

    def __init__(
        self, url: str, api_key: str | None, by: str = "", keys: ServerKeys | None = None
    ) -> None:
        """
        Args:
            keys: to which servers the key of theirs may go; None: there is no such key.
            by: which of several publishers this is; empty for a trainer.
        """
        self._by = {"by": by} if by else {}
        self._url, self._has_key = url.rstrip("/"), bool(api_key)
        self._keys = keys or ServerKeys(False, ())
        self._http = direct_client(url, _SERVICE_SECONDS, api_key)
        self._said: set[str] = set()

    def publish(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]] | None:
        """See Board.publish."""
        try:
            answer = self._http.post("/fleet", json={"servers": list(rows), **self._by})
        except httpx.HTTPError as error:
            what = str(error) or type(error).__name__
            if self._by:
                self._say(type(error).__name__, f"no answer ({what})", _remedy(0))
            else:
                logger.debug("no answer to POST %s/fleet: %s", self._url, what)
            return None
        status = answer.status_code
        body = _json_object(answer) if status == 200 else None
        if body is None:
            self._say(
                str(status), f"{status} {' '.join(answer.text[:200].split())}", _remedy(status)
            )
            return None
        if self._said:
            self._said.clear()
            logger.info(
                "[Fleet] the rollout service at %s takes the fleet's table again", self._url
            )
        wanted = self._keys.trusted(
            body.get("wanted") or [], self._has_key and body.get("keyed") is True
        )
        return wanted, list(body.get("left") or [])

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        self._http.close()

    def _say(self, reason: str, told: str, remedy: str) -> None:
        """Once for each reason, until the table is taken again."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning(
                "[Fleet] the rollout service at %s does not take the fleet's table: POST /fleet: %s; until it does, nobody "
                "joins by /fleet/join, and status.sh shows an old table or none; %s",
                self._url, told, remedy,
            )  # fmt: skip


def _json_object(answer: httpx.Response) -> dict[str, Any] | None:
    try:
        body = answer.json()
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _remedy(status: int) -> str:
    """What to do about an answer of the rollout service that is no table; 0: there is none."""
    if status == 401:
        return "give the service's key: --atropos-api-key, or ROLLOUT_API_KEY where this process is started"
    if status == 403:
        return "do as it says, or start it with a key and give that here: --atropos-api-key, or ROLLOUT_API_KEY"
    if status == 409:
        return "another training has registered there: give this one a rollout service of its own with --atropos-url"
    if status in (200, 404, 405):
        return "is --atropos-url one of this project's services? Start it with `python -m atroposlib.cli.run_api`"
    if status in (0, 429) or status >= 500:
        return "it is asked again; if it has ended, start it with `python -m atroposlib.cli.run_api`, or correct --atropos-url"
    return "look at its log; is it of another version than this process? Start both from the same checkout"


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
            forced: also while an update is made, which teaches more than a look; asked by whoever
                makes it.
        """
        with self.lock:
            members, begun = dict(self.members), self._updates
            if self._updating and not forced:
                return
        states = at_once(
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
        """An update is made meanwhile: servers are looked at by those who make it."""
        with self.lock:
            self._updating = True
        try:
            yield
        finally:
            with self.lock:
                self._updating, self._updates = False, self._updates + 1
                self.tell()

    def change_epoch(self, weight_epoch: int) -> None:
        """What is sent from now on belongs to this weight epoch: servers that joined for another
        one join anew.
        """
        with self.lock:
            self._weight_epoch = weight_epoch
            for member in self.members.values():
                if member.server.weight_epoch != weight_epoch:
                    member.server.weight_epoch, member.joined = weight_epoch, False

    def due(self) -> list[str]:
        """Who could be brought in now, as of the last look.

        Raises:
            BridgeError: the thread has failed.
        """
        if self._failure is not None:
            raise BridgeError(
                f"the servers are not looked after any more ({type(self._failure).__name__}: {self._failure}); start "
                "this process again, a trainer with --resume auto; the traceback is in its log, at [Fleet]"
            ) from self._failure
        with self.lock:
            return self.fleet.due(time.monotonic())

    def tell(self) -> None:
        """Say in the log what has changed, and have the table published. `lock` is held."""
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
            self._thread.join(LOOK_SECONDS + _SERVICE_SECONDS + _ROUND_SECONDS)
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
        wishes = self._board.publish(rows)
        if wishes is None:
            return
        with self.lock:
            if not self._updating:  # whoever is being updated stays until that is done
                self.wish(*wishes)

    def wish(self, wanted: Sequence[str], left: Sequence[str]) -> None:
        """Others ask for these servers beside the named ones, and for those to go.

        `lock` is held; no update is made.
        """
        came, went = self.fleet.wish(wanted, left, time.monotonic())
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
