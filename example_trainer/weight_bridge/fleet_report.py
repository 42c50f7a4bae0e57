"""What is said of a fleet: lines in the log, the table that the rollout service shows, figures for
the metrics.
"""

from __future__ import annotations

import time
from typing import Any

from example_trainer.weight_bridge.fleet import Change, Fleet, Standing


def line_of(change: Change, fleet: Fleet) -> str:
    """One line for people about a server whose standing is another now; empty if there is nothing
    to say.
    """
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
    """Those that are not good, each with the reason; empty if all are."""
    missing = [place for place in fleet.places.values() if place.standing is not Standing.GOOD]
    return " ".join(f"{place.url} ({place.reason})" for place in missing)


def missing_servers(fleet: Fleet) -> str:
    """As `not_good`, for a sentence that needs some words."""
    return not_good(fleet) or "no others are known"


def waiting_line(fleet: Fleet, left: float) -> str:
    """Name the servers that training waits for. `left`: seconds until it gives up."""
    clock = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
    told = f"{len(fleet.good)} good, --min-servers {fleet.least}: {missing_servers(fleet)}"
    return f"[Fleet] waiting for servers: {told}; until {clock}"


def given_up(fleet: Fleet, waited: float) -> str:
    """Why training ends."""
    return (
        f"{len(fleet.good)} of {len(fleet.places)} vLLM servers are good after {waited:.0f} s of waiting, --min-servers "
        f"{fleet.least}: {missing_servers(fleet)}; restart them, then start the trainer again with --resume auto"
    )


def table(fleet: Fleet) -> list[dict[str, Any]]:
    """The rows that the rollout service's /fleet shows."""
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
