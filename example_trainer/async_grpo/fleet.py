"""Tells the trainer, by way of the rollout service, which vLLM servers this run has.

Its keeper does the rest.
"""

from __future__ import annotations

import json
import logging
import urllib.error
from collections.abc import Collection
from typing import Protocol

from example_trainer.async_grpo.launch import Address
from example_trainer.child_processes.readiness import get_json, post_json

logger = logging.getLogger(__name__)


class Fleet(Protocol):
    """Who is told."""

    def moved(self, before: Address, now: Address) -> None:
        """A server that was at one address is at another. Said to nobody yet."""

    def tell(self, service: Address, servers: Collection[str] | None) -> None:
        """Say what is still to be said; called again and again while the service is up.

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
        """See Fleet. What fails is tried again at the next call, for as long as the run lasts: a
        trainer that does not learn of a server would leave it without weights for good."""
        try:
            if not self._compared and servers is not None:
                self._compare(service, servers)
            while self._owed:
                url, wish = next(iter(self._owed.items()))
                self._post(service, url, wish)
                del self._owed[url]
                logger.info("[Async] the trainer is told that %s shall %s", url, wish)
        except (OSError, ValueError) as error:
            if not self._refused:
                owed = (
                    ", ".join(f"{url} shall {wish}" for url, wish in self._owed.items())
                    or "which servers there are"
                )
                logger.warning(
                    "[Async] the trainer cannot be told yet (%s); it is tried until the rollout service at %s takes it: %s",
                    owed, service.url, reason(error),
                )  # fmt: skip
            self._refused = True
            return
        if self._refused:
            logger.info(
                "[Async] the rollout service at %s has taken what the trainer was to be told",
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
            # Nobody knows it: it is gone already, which is all that was asked for.


def reason(error: Exception) -> str:
    """Why a request failed, as one line, with what the service says of it."""
    if not isinstance(error, urllib.error.HTTPError):
        return " ".join(str(error).split())
    try:
        detail = json.loads(error.read())["detail"]
    except (OSError, ValueError, LookupError, TypeError):
        detail = error.reason
    return f"status {error.code}: {detail}"
