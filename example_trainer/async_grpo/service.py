"""The driver's questions to the rollout service, and the servers that it reports to it.

A role's process may run and do nothing: it is stopped, deadlocked, or waits for a dead disk.

An actor sees that a process runs, and not that it works. So the driver asks others. The rollout
service knows when each environment and each reference worker called it last. The service itself and
the parameter servers have to answer.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from example_trainer.async_grpo.actor import Address
from example_trainer.async_grpo.restarts import Keeper, State
from example_trainer.child_processes.processes import get_json, post_json, read_answer

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
"""From one round of questions to the next."""
ANSWER_SECONDS = 5.0
"""Deadline of each question."""
NAMED_SECONDS = 60.0
"""A role that is silent for this long is named, and again after as long."""
WATCHED = ("service", "parameter-server", "environment", "reference")
"""Kinds of roles. Not the trainer, which may compute for long, and not the generators, which the
trainer's fleet watches."""


class Silences:
    """Asks in a thread of its own, since a silent process takes a whole deadline.

    Args:
        key: of the rollout service.
        clock: the time to go by.
    """

    def __init__(self, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._key, self._clock = key, clock
        self._lock = threading.Lock()
        """Guards what follows."""
        self._active: dict[str, float] = {}
        """Role that listens -> when it answered last, or else when it was asked first."""
        self._called: dict[str, float] = {}
        """Role that calls the service -> when it did so last."""
        self._service_answers = 0
        """Rounds in a row. After a silence of its own the service takes others for silent, until
        they have called again."""
        self._asked = -LOOK_SECONDS
        self._asking: threading.Thread | None = None

    def watch(self, keepers: Iterable[Keeper]) -> None:
        """Begin a round of questions, if the last one has ended and is old enough.

        Return at once.
        """
        now = self._clock()
        if now - self._asked < LOOK_SECONDS or (
            self._asking is not None and self._asking.is_alive()
        ):
            return
        self._asked = now
        up = [
            keeper for keeper in keepers if keeper.state is State.UP and keeper.role.kind in WATCHED
        ]
        places = [(keeper.role, keeper.place) for keeper in up if keeper.place is not None]
        servers = {role.name: place.url + role.ready[1] for role, place in places if role.ready[1]}
        service = next((place for role, place in places if role.kind == "service"), None)
        self._asking = threading.Thread(
            target=self.round, args=(service, servers), name="silences", daemon=True
        )
        self._asking.start()

    def why_to_end(self, keeper: Keeper, limit: float, log: str, now: float) -> str:
        """Return why a role has to be ended, or an empty string. Name one that is silent for less.

        Args:
            keeper: of the role.
            limit: seconds of silence after which it is ended; 0: it never is.
            log: its path.
            now: seconds of the clock.
        """
        if keeper.state is not State.UP or keeper.role.kind not in WATCHED:
            return ""
        silent = self.seconds(keeper.role.name, keeper.since)
        text = f"{keeper.role.name} has been silent for {silent:.0f} s, though its process runs; log: {log}"
        if limit and silent >= limit:
            return f"{text}; orchestration.silent_seconds is {limit:.0f}"
        if silent >= NAMED_SECONDS and now - keeper.told >= NAMED_SECONDS:
            keeper.told = now
            then = "orchestration.silent_seconds is 0"
            if limit:
                then = f"after {limit:.0f} s it is ended and started again"
            logger.warning("[Async] %s; %s", text, then)
        return ""

    def forget(self, role: str | None = None) -> None:
        """Forget a role that is restarted, or all roles if this process was stopped itself."""
        with self._lock:
            if role is not None:
                self._active.pop(role, None)
                self._called.pop(role, None)
                return
            self._active.clear()
            self._called.clear()
            self._service_answers = 0

    def seconds(self, role: str, since: float) -> float:
        """Return for how many seconds a role has been silent; 0 if nothing is known of it since
        then.
        """
        with self._lock:
            active = self._active.get(role)
            if active is None and self._service_answers > 1:
                active = self._called.get(role)
        if active is None or active < since:
            return 0.0
        return self._clock() - active

    def round(self, service: Address | None, servers: Mapping[str, str]) -> None:
        """Ask once.

        Args:
            service: the rollout service; None while it is not up.
            servers: role -> URL that it answers, of each role that listens.
        """
        for role, url in servers.items():
            answered = answers(url)
            with self._lock:
                if answered or role not in self._active:
                    self._active[role] = self._clock()
        stats = self._get(service, "/stats")
        called = {
            **calls(stats, "environments", "process", self._clock()),
            **calls(self._get(service, "/reference"), "workers", "worker", self._clock()),
        }
        with self._lock:
            self._called = called
            self._service_answers = 0 if stats is None else self._service_answers + 1

    def _get(self, service: Address | None, path: str) -> Any:
        if service is None:
            return None
        try:
            return get_json(service.url + path, ANSWER_SECONDS, self._key)
        except (OSError, ValueError):
            return None


def answers(url: str) -> bool:
    """Return whether a server answers, whatever its status."""
    try:
        read_answer(url, ANSWER_SECONDS)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def calls(answer: Any, rows: str, name: str, now: float) -> dict[str, float]:
    """Read when each process called the service last.

    A role's earlier lives have rows of the same name: the newest counts.
    """
    newest: dict[str, float] = {}
    if not isinstance(answer, dict):
        return newest
    for row in answer.get(rows) or ():
        if isinstance(role := row.get(name), str):
            called = now - float(row["seconds_silent"])
            newest[role] = max(called, newest.get(role, called))
    return newest


# The vLLM servers of this run, reported to the trainer through the rollout service.
#
# Its keeper does the rest.


class Fleet(Protocol):
    """Receiver of changes of the servers' addresses."""

    def moved(self, before: Address, now: Address) -> None:
        """Note that a server has another address; `tell` reports it."""

    def tell(self, service: Address, servers: Collection[str] | None) -> None:
        """Report what is still due; called again and again while the service is up.

        Args:
            service: the rollout service.
            servers: addresses of all generators; None as long as one has none.
        """


class ServiceFleet:
    """POST /fleet/join and /fleet/leave at the rollout service, each until it is taken.

    Args:
        key: of the rollout service.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._owed: dict[str, str] = {}
        """Address -> join or leave, what was learnt last at the end."""
        self._compared = False
        self._refused = False

    def moved(self, before: Address, now: Address) -> None:
        """See Fleet."""
        self._owe(now.url, "join")
        self._owe(before.url, "leave")

    def _owe(self, url: str, wish: str) -> None:
        self._owed.pop(url, None)  # of two wishes the later one counts, and comes later
        self._owed[url] = wish

    def tell(self, service: Address, servers: Collection[str] | None) -> None:
        """See Fleet. A failed report is repeated at the next call, for as long as the run lasts. A
        trainer that does not learn of a server would leave it without weights for good.
        """
        try:
            if not self._compared and servers is not None:
                self._compare(service, servers)
            while self._owed:
                url, wish = next(iter(self._owed.items()))
                self._post(service, url, wish)
                del self._owed[url]
                logger.info("[Async] the trainer learns that %s shall %s", url, wish)
        except (OSError, ValueError) as error:
            if not self._refused:
                owed = (
                    ", ".join(f"{url} shall {wish}" for url, wish in self._owed.items())
                    or "which servers there are"
                )
                logger.warning(
                    "[Async] the trainer cannot learn yet that (%s); it is tried until the rollout "
                    "service at %s takes it: %s",
                    owed, service.url, reason(error),
                )  # fmt: skip
            self._refused = True
            return
        if self._refused:
            logger.info(
                "[Async] the rollout service at %s has taken the changes for the trainer",
                service.url,
            )
        self._refused = False

    def _compare(self, service: Address, servers: Collection[str]) -> None:
        """Owe what undoes the wishes of an earlier run: the service keeps them, and a run begins
        with servers of its own.

        Once in a run, so that who joins or leaves by hand later is left alone.
        """
        wishes = get_json(f"{service.url}/fleet", key=self._key)
        for url in wishes["wanted"]:
            if url not in servers and url not in self._owed:
                self._owe(url, "leave")
        for url in wishes["left"]:
            if url in servers and url not in self._owed:
                self._owe(url, "join")
        self._compared = True

    def _post(self, service: Address, url: str, wish: str) -> None:
        try:
            post_json(f"{service.url}/fleet/{wish}", {"url": url}, key=self._key)
        except urllib.error.HTTPError as error:
            if wish != "leave" or error.code != 404:
                raise
            # The service does not know it: it is gone already.


def reason(error: Exception) -> str:
    """Return the reason of a failed request as one line, with the service's detail."""
    if not isinstance(error, urllib.error.HTTPError):
        return " ".join(str(error).split())
    try:
        detail = json.loads(error.read())["detail"]
    except (OSError, ValueError, LookupError, TypeError):
        detail = error.reason
    return f"status {error.code}: {detail}"
