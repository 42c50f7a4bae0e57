"""The environments that have registered, their accounts with the scheduler, and the reasons why they
post nothing. Pure: no I/O, no clock of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from atroposlib.service.records import NOBODY, Environment, Limits, UnknownEnvironmentError
from atroposlib.service.scheduling import MIN_WEIGHT

MAX_NAMES = 1024
"""Names of environments whose numbers are remembered; those used last, and those of registered
environments, are kept."""


class Registry:
    """Environments by id. The line of groups that belong to none has the id NOBODY and weight 1."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.by_id: dict[int, Environment] = {NOBODY: Environment(NOBODY, "", "", 1.0, 0, 0)}
        self.last_seen: dict[int, float] = {}
        self.came: dict[int, float] = {}
        """When each registered, or when the service began that knew it from its store."""
        self.posted: dict[int, float] = {}
        """Time of the last group that each has posted to this process of the service, dropped
        groups included."""
        self.processes: dict[int, str] = {}
        """The process of each that names it."""
        self.name_counts: Counter[str] = Counter()
        self.clock = 0.0
        """Fair-queueing time: the clock of the environment that was served last."""
        self.next_id = 0
        """The id of the environment that registers next."""
        self._dirty: set[int] = set()
        self._forgotten: list[int] = []

    def take_changed(self) -> list[dict[str, Any]]:
        """Return the records that changed since the last call."""
        records = [asdict(self.by_id[env_id]) for env_id in sorted(self._dirty)]
        self._dirty.clear()
        return records

    def take_forgotten(self) -> list[int]:
        """Return the environments that were forgotten since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def restore(
        self,
        records: list[dict[str, Any]],
        name_counts: Mapping[str, int],
        clock: float,
        now: float,
        next_id: int = 0,
    ) -> None:
        """Take over what was stored; every environment counts as heard from just now."""
        for stored in records:
            environment = Environment(**stored)
            self.by_id[environment.env_id] = environment
            if environment.env_id != NOBODY:
                self.last_seen[environment.env_id] = self.came[environment.env_id] = now
        self.name_counts.update(name_counts)
        self.clock = clock
        self.next_id = max(next_id, max(self.by_id) + 1)

    def add(
        self,
        desired_name: str,
        weight: float,
        group_size: int,
        max_token_length: int,
        allocation: float | None,
        now: float,
    ) -> Environment:
        """Register a new environment, named after what it wished for and how many did so before it."""
        environment = Environment(
            env_id=self.next_id,
            wandb_name=f"{desired_name}_{self.name_counts[desired_name]}",
            desired_name=desired_name,
            weight=weight,
            group_size=group_size,
            max_token_length=max_token_length,
            min_batch_allocation=allocation,
            clock=self.clock,
        )
        self.next_id += 1
        self.name_counts[desired_name] = (
            self.name_counts.pop(desired_name, 0) + 1
        )  # the newest is last
        self._forget_names()
        self.by_id[environment.env_id] = environment
        self.last_seen[environment.env_id] = self.came[environment.env_id] = now
        self._dirty.add(environment.env_id)
        return environment

    def _forget_names(self) -> None:
        if len(self.name_counts) > MAX_NAMES:
            used = {one.desired_name for one in self.by_id.values()}
            unused = [name for name in self.name_counts if name not in used]
            for name in unused[: len(self.name_counts) - MAX_NAMES]:
                del self.name_counts[name]

    def forget(self, env_id: int) -> None:
        """Remove an environment. Its id is not given to another one."""
        for of in (self.by_id, self.last_seen, self.came, self.posted):
            of.pop(env_id, None)
        self._dirty.discard(env_id)
        self._forgotten.append(env_id)

    def get(self, env_id: int) -> Environment:
        """The environment of that id.

        Raises:
            UnknownEnvironmentError: not registered here (any more); the environment should register
                again.
        """
        if env_id == NOBODY or env_id not in self.by_id:
            raise UnknownEnvironmentError(env_id)
        return self.by_id[env_id]

    def serving(self, stream: str) -> list[int]:
        """The connected environments that serve a stream of items."""
        return [
            env_id for env_id, one in self.by_id.items() if one.connected and one.stream == stream
        ]

    def beside(self, env_id: int) -> list[Environment]:
        """The other connected environments that have spoken since this one registered."""
        came = self.came[env_id]
        return [
            self.by_id[other]
            for other, seen in self.last_seen.items()
            if seen > came and other != env_id and self.by_id[other].connected
        ]

    def line_of(self, env_id: int | None) -> int:
        """The line in which groups of this environment wait."""
        return env_id if env_id is not None and env_id in self.by_id else NOBODY

    def disconnect(self, env_id: int) -> None:
        """Mark an environment as gone."""
        self.get(env_id).connected = False
        self._dirty.add(env_id)

    def touch(self, env_id: int | None, now: float, process: str = "") -> None:
        """Note that an environment has called, and by which process if it names that."""
        if env_id is not None and env_id in self.last_seen:
            self.last_seen[env_id] = now
            if process:
                self.processes[env_id] = process

    def note_post(self, env_id: int | None, now: float) -> None:
        """Note that an environment has posted a group."""
        self.touch(env_id, now)
        if env_id is not None and env_id in self.last_seen:
            self.posted[env_id] = now

    def connected(self, now: float, first_of_run: int) -> list[Environment]:
        """Connected environments of the present run.

        An environment of an ended run counts while it still posts: environments of the public
        Atropos stay for the next run.

        Args:
            now: seconds of the queue's clock.
            first_of_run: environments with a lower id belong to a run that has ended.
        """
        connected = [
            self.by_id[env_id] for env_id in self.last_seen if self.by_id[env_id].connected
        ]
        return [
            one
            for one in connected
            if one.env_id >= first_of_run
            or now - self.posted.get(one.env_id, -math.inf) <= self.limits.silent_after
        ]

    def seconds_silent(self, environment: Environment, now: float) -> float:
        """Seconds since the environment called the service."""
        return now - self.last_seen[environment.env_id]

    def follows(self, later: Environment, earlier: Environment) -> bool:
        """Return whether `later` was started in the place of `earlier`: same name, registered after
        its last call.
        """
        same = later.desired_name == earlier.desired_name
        return same and self.came[later.env_id] > self.last_seen[earlier.env_id]

    def seconds_without_groups(self, environment: Environment, now: float) -> float:
        """Seconds since the environment posted a group, or since it registered if it has posted
        none.
        """
        return now - self.posted.get(environment.env_id, self.came[environment.env_id])

    def active(self, now: float) -> list[Environment]:
        """Connected environments that have spoken within the limit `silent_after`."""
        return [
            self.by_id[env_id]
            for env_id, seen in self.last_seen.items()
            if self.by_id[env_id].connected and now - seen <= self.limits.silent_after
        ]

    def reservations(self, batch_size: int, now: float) -> dict[int, float]:
        """Sequences of the next batch that are kept for each environment, what earlier batches owe
        it included.
        """
        reserving = [e for e in self.active(now) if e.min_batch_allocation]
        scale = max(1.0, sum(e.min_batch_allocation or 0.0 for e in reserving))
        return {
            e.env_id: (e.min_batch_allocation or 0.0) / scale * batch_size + e.owed
            for e in reserving
        }

    def wake(self, line: int) -> None:
        """A line that was empty has groups again: it may not claim the turns that it did not need."""
        environment = self.by_id[line]
        if environment.clock < self.clock:
            environment.clock = self.clock
            self._dirty.add(line)

    def charge(self, served: Mapping[int, int], reservations: Mapping[int, float]) -> None:
        """Book a batch: sequences served per line, and what had been reserved."""
        for env_id, reserved in reservations.items():
            environment = self.by_id[env_id]
            environment.owed = min(
                max(0.0, reserved - served.get(env_id, 0)), float(environment.group_size)
            )
            self._dirty.add(env_id)
        for line, sequences in served.items():
            environment = self.by_id[line]
            self.clock = max(self.clock, environment.clock)
            environment.clock += sequences / max(environment.weight, MIN_WEIGHT)
            self._dirty.add(line)

    def shares(self, env_id: int, now: float) -> dict[str, float]:
        """The wire's `unallocated_fraction` of a batch and `env_weight` (share of all weights, at
        least 0.01).
        """
        active = self.active(now)
        weights = sum(e.weight for e in active)
        return {
            "unallocated_fraction": max(
                0.0, 1.0 - sum(e.min_batch_allocation or 0.0 for e in active)
            ),
            "env_weight": max(0.01, self.by_id[env_id].weight / weights if weights else 1.0),
        }


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
    formed. They are not stored: a restarted service begins at zero.
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
