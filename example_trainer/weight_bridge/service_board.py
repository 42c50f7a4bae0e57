"""The rollout service's /fleet: it shows the fleet's table, and holds requests to join or leave."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import httpx

from atroposlib.web.connections import direct_client
from example_trainer.api_keys import ServerKeys
from example_trainer.vllm_client import json_object

logger = logging.getLogger(__name__)

SERVICE_SECONDS = 3.0
"""For each answer of the rollout service."""


class Board(Protocol):
    """A place that shows the fleet's table, and holds requests to join or leave."""

    def publish(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]] | None:
        """Show the table. Returns (wanted, left) as they are there now; None without an answer."""

    def close(self) -> None:
        """Hang up."""


class ServiceBoard:
    """The rollout service's /fleet. A service that is away, or has no such route, is asked again
    with the next table.

    A refusal is logged once. A parameter server also logs silence once. A trainer does not: its
    batches come from the same service, so the part that fetches them reports that it is away.
    """

    def __init__(
        self, url: str, api_key: str | None, by: str = "", keys: ServerKeys | None = None
    ) -> None:
        """
        Args:
            keys: decides which servers may get the servers' key; None: there is no such key.
            by: which of several publishers this is; empty for a trainer.
        """
        self._by = {"by": by} if by else {}
        self._url, self._has_key = url.rstrip("/"), bool(api_key)
        self._keys = keys or ServerKeys(False, ())
        self._http = direct_client(url, SERVICE_SECONDS, api_key)
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
        body = json_object(answer) if status == 200 else None
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
        """Log a reason once, until the table is taken again."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning(
                "[Fleet] the rollout service at %s does not take the fleet's table: POST /fleet: "
                "%s. Until it does, no server joins by /fleet/join, and status.sh shows an old "
                "table or none; %s",
                self._url, told, remedy,
            )  # fmt: skip


def _remedy(status: int) -> str:
    """Return the remedy for an answer of the rollout service that is not a table; 0: no answer."""
    if status == 401:
        return "give the service's key: --atropos-api-key, or ROLLOUT_API_KEY where this process is started"
    if status == 403:
        return (
            "follow its message, or start it with a key and give that here: --atropos-api-key, or "
            "ROLLOUT_API_KEY"
        )
    if status == 409:
        return "another training has registered there: give this one a rollout service of its own with --atropos-url"
    if status in (200, 404, 405):
        return "is --atropos-url one of this project's services? Start it with `python -m atroposlib.cli.run_api`"
    if status in (0, 429) or status >= 500:
        return "it is asked again; if it has ended, start it with `python -m atroposlib.cli.run_api`, or correct --atropos-url"
    return "look at its log; is it of another version than this process? Start both from the same checkout"
