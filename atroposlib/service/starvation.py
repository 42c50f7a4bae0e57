"""Explain to a trainer without a batch what its environments do, or that there are none. Pure: no
I/O, no clock of its own.

The counts cover the time since the last batch was formed. They are not stored: a restarted service
begins at zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from atroposlib.service.environments import Registry
from atroposlib.service.records import Environment

MAX_NAMED = 3
"""Environments that the text names one by one."""
MAX_REASON = 300
"""Characters of the reason of a refusal."""
START_ONE = (
    "start one, for example `python environments/gsm8k_server.py` "
    "(--env.rollout_server_url names this service), and see its log if it has already been started"
)


class Refusals:
    """Posts that were refused, and groups that were dropped on arrival, since the last batch was
    formed.
    """

    def __init__(self) -> None:
        self.refused = 0
        """Posts that were answered with 422 or 429."""
        self.dropped = 0
        """Groups that were accepted as well-formed but answered with the status `dropped`."""
        self.last_refusal = ""
        self.last_drop = ""

    def note_refusal(self, reason: str) -> None:
        """Count a refused post."""
        self.refused += 1
        self.last_refusal = reason[:MAX_REASON]

    def note_drop(self, reason: str) -> None:
        """Count a dropped group."""
        self.dropped += 1
        self.last_drop = reason[:MAX_REASON]

    def describe(self) -> list[str]:
        """Sentences for the trainer; empty if nothing was refused or dropped."""
        sentences = []
        if self.refused:
            posts = "post was" if self.refused == 1 else "posts were"
            sentences.append(
                f"{self.refused} {posts} refused since the last batch, the last one because: {self.last_refusal}"
            )
        if self.dropped:
            groups = "group was" if self.dropped == 1 else "groups were"
            sentences.append(
                f"{self.dropped} {groups} dropped since the last batch, the last one because: {self.last_drop}"
            )
        return sentences


def why_starved(registry: Registry, first_of_run: int, refusals: Refusals, now: float) -> list[str]:
    """Sentences that name what keeps groups from arriving, with the remedy.

    Args:
        registry: the environments of this service.
        first_of_run: environments with a lower id belong to a run that has ended.
        refusals: what was refused since the last batch.
        now: seconds of the queue's clock.
    """
    connected = registry.connected(now, first_of_run)
    if not connected:
        return [f"no environment is registered: {START_ONE}", *refusals.describe()]
    limit = registry.limits.silent_after
    silent = [one for one in connected if registry.seconds_silent(one, now) > limit]
    speaking = [one for one in connected if one not in silent]
    silent = [one for one in silent if not any(registry.follows(other, one) for other in speaking)]
    sentences = []
    if silent:
        what = [_silence(one, registry, now) for one in silent]
        sentences.append(
            f"{_list_of(what)}: see its log, and start it again if its process is gone or stands still"
        )
    if speaking:
        what = [_what_it_does(one, registry, now) for one in speaking]
        quiet = min(registry.seconds_without_groups(one, now) for one in speaking)
        remedy = ": see its log, and whether its inference server answers" if quiet > limit else ""
        sentences.append(f"{_list_of(what)}{remedy}")
    return [*sentences, *refusals.describe()]


def _silence(one: Environment, registry: Registry, now: float) -> str:
    process = registry.processes.get(one.env_id)
    where = f" ({process})" if process else ""
    return f"{one.wandb_name} has sent nothing for {registry.seconds_silent(one, now):.0f} s{where}"


def _what_it_does(one: Environment, registry: Registry, now: float) -> str:
    seconds = registry.seconds_without_groups(one, now)
    if one.env_id in registry.posted:
        return f"{one.wandb_name} posted its last group {seconds:.0f} s ago"
    return f"{one.wandb_name} is registered and has posted no group for {seconds:.0f} s"


def _list_of(parts: Sequence[str]) -> str:
    shown = ", ".join(parts[:MAX_NAMED])
    return shown if len(parts) <= MAX_NAMED else f"{shown}, and {len(parts) - MAX_NAMED} more"
