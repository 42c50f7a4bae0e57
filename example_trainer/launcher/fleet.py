"""The fleet of a run: the weights that each vLLM server serves. The trainer publishes them at the
rollout service, or each server answers for itself.
"""

from __future__ import annotations

import math
import time
import urllib.error
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from example_trainer.child_processes.processes import get_json, post_json
from example_trainer.launcher.command_line import LauncherError

PROBE_SECONDS = 5.0
STALE_SECONDS = 30.0
"""Age from which a published table counts as out of date; the trainer publishes at least every
5 s."""
GOOD = "good"
SILENT, SERVING, REFUSING = "silent", "serving", "not serving"
"""Standings of servers that were asked themselves; the trainer's are joining, good, quarantined and
away."""


@dataclass(frozen=True)
class FleetRow:
    """One server.

    Attributes:
        url: where it listens.
        standing: `joining`, `good`, `quarantined` or `away` by the trainer; `serving`,
            `not serving` or `silent` by itself.
        weight_version: what it serves; None if that is not known.
        weight_epoch: the trainer's life that made these weights, 0 for the checkpoint's; None if
            that is not known.
        since: Unix time since which it stands so; None if that is not known.
        reason: why; empty where nothing is wrong.
    """

    url: str
    standing: str
    weight_version: int | None
    weight_epoch: int | None
    since: float | None
    reason: str

    @property
    def weights(self) -> tuple[int, int]:
        """(epoch, version), by which weights are newer or older; below every other if it is not
        known.
        """
        if self.weight_epoch is None or self.weight_version is None:
            return (-1, -1)
        return (self.weight_epoch, self.weight_version)


@dataclass(frozen=True)
class Fleet:
    """Every server that the trainer, or a record of the run, names.

    Attributes:
        rows: one a server.
        wanted: addresses that shall join and are in no row yet.
        published: Unix time at which the trainer published the table, by the service's clock; None
            if the servers were asked.
        published_at: the same in seconds of this process's `time.monotonic`.
    """

    rows: tuple[FleetRow, ...] = ()
    wanted: tuple[str, ...] = ()
    published: float | None = None
    published_at: float | None = None

    @property
    def good(self) -> bool:
        """The trainer keeps no server out.

        The servers' own answers are in the health of their parts already.
        """
        return self.published is None or all(
            row.standing not in ("quarantined", "away") for row in self.rows
        )

    def row(self, url: str) -> FleetRow | None:
        """The row of one address."""
        return next((row for row in self.rows if row.url == url), None)


def published_fleet(service_url: str, key: str, seconds: float = PROBE_SECONDS) -> Fleet | None:
    """The table that the trainer publishes; None if there is none, or it is out of date.

    Args:
        service_url: the rollout service.
        key: its API key.
        seconds: the deadline.
    """
    try:
        answer = get_json(f"{service_url}/fleet", seconds, key)
        published = answer["published"]
        if published is None or (ago := float(answer["published_ago"])) > STALE_SECONDS:
            return None
        rows = tuple(_row(entry) for entry in answer["servers"])
        known = {row.url for row in rows}
        wanted = tuple(url for url in answer.get("wanted") or () if url not in known)
        return Fleet(rows, wanted, float(published), time.monotonic() - ago)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _row(entry: dict[str, Any]) -> FleetRow:
    since = entry.get("since")
    return FleetRow(
        str(entry["url"]).rstrip("/"),
        str(entry["standing"]),
        _number(entry.get("weight_version")),
        _number(entry.get("weight_epoch")),
        None if since is None else float(since),
        str(entry.get("reason") or ""),
    )


def _number(value: Any) -> int | None:
    return None if value is None or not math.isfinite(value) else int(value)


def ask_server(url: str, seconds: float = PROBE_SECONDS) -> FleetRow:
    """Return what a server answers to GET /weights, which needs no key.

    Never raises: a server that does not answer is `silent`.
    """
    try:
        answer = get_json(f"{url}/weights", seconds)
        version, epoch = _number(answer["weight_version"]), _number(answer["weight_epoch"])
        if answer["serving"] is True:
            return FleetRow(url, SERVING, version, epoch, None, "")
        reason = str(answer.get("trouble") or "")
        return FleetRow(url, REFUSING, version, epoch, None, reason)
    except OSError as error:
        reason = str(getattr(error, "reason", error))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"an answer that cannot be read ({error!r})"
    return FleetRow(url, SILENT, None, None, None, f"GET {url}/weights: {reason}")


def join(service_url: str, key: str, url: str, seconds: float = PROBE_SECONDS) -> None:
    """Let a server join the training (POST /fleet/join); the trainer sends it its weights soon
    after.

    Raises:
        LauncherError: the rollout service does not answer, or refuses.
    """
    try:
        post_json(f"{service_url}/fleet/join", {"url": url}, seconds, key)
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace")
        raise LauncherError(
            f"the rollout service lets {url} not join: {error.code} {said}"
        ) from None
    except OSError as error:
        raise LauncherError(f"{url} cannot join: POST {service_url}/fleet/join: {error}") from None


def look(service_url: str, key: str, urls: Iterable[str]) -> Fleet:
    """The trainer's table; without one, each server's own answer.

    Args:
        service_url: the rollout service; empty if it does not run.
        key: its API key.
        urls: the servers of this run that live.
    """
    published = published_fleet(service_url, key)
    if published is not None and published.rows:
        return published
    return Fleet(tuple(ask_server(url) for url in urls))
