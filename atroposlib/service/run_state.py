"""State of the trainer's run besides its groups. Pure: no I/O, no clock.

`Registry` holds the environments and their accounts with the scheduler, and `why_starved` gives the
reasons why they post nothing. `WeightEpochs` decides which run a rollout belongs to. `Streams`
holds the positions of environments that resume exactly, `Evaluations` the newest results, and
`BatchFailures` the batches that end trainers.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atroposlib.service.records import (
    NOBODY,
    Environment,
    Evaluation,
    Group,
    Lease,
    Limits,
    Receipt,
    UnknownEnvironmentError,
    ValidatedGroup,
)
from atroposlib.service.scheduling import MIN_WEIGHT
from atroposlib.service.schemas import Registration
from atroposlib.service.store import Changes
from atroposlib.wire import GROUP_FIELDS, TrainerSession, begin_session, effective_version

MAX_NAMES = 1024
"""Names of environments whose numbers are remembered; names used last, and names of registered
environments, are kept."""


class Registry:
    """Environments by id. The line of groups without one has the id `NOBODY` and weight 1."""

    def __init__(self, limits: Limits, changes: Changes) -> None:
        self.limits, self._changes = limits, changes
        self.by_id: dict[int, Environment] = {NOBODY: Environment(NOBODY, "", "", 1.0, 0, 0)}
        self.last_seen: dict[int, float] = {}
        self.came: dict[int, float] = {}
        """When each registered, or when the service began that knew it from its store."""
        self.posted: dict[int, float] = {}
        """Time of the last group that each has posted to this process of the service, dropped
        groups included."""
        self.processes: dict[int, str] = {}
        """The process of each that names it."""
        self.troubles: dict[int, str] = {}
        """Why an environment gives no group, by its own account; absent if it gives some."""
        self.name_counts: Counter[str] = Counter()
        self.clock = 0.0
        """Fair-queueing time: the clock of the environment that was served last."""
        self.next_id = 0
        """The id of the environment that registers next."""

    def _save(self, env_id: int) -> None:
        self._changes.records["environment", env_id] = self.by_id.get(env_id)

    def restore(
        self,
        records: Iterable[Mapping[str, Any]],
        name_counts: Mapping[str, int],
        clock: float,
        now: float,
        next_id: int = 0,
    ) -> None:
        """Take over what was stored; every environment counts as seen just now."""
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
        self._save(environment.env_id)
        return environment

    def _forget_names(self) -> None:
        if len(self.name_counts) > MAX_NAMES:
            used = {one.desired_name for one in self.by_id.values()}
            unused = [name for name in self.name_counts if name not in used]
            for name in unused[: len(self.name_counts) - MAX_NAMES]:
                del self.name_counts[name]

    def forget(self, env_id: int) -> None:
        """Remove an environment. Its id is not given to another one."""
        for of in (self.by_id, self.last_seen, self.came, self.posted, self.troubles):
            of.pop(env_id, None)
        self._save(env_id)

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
        self._save(env_id)

    def touch(self, env_id: int | None, now: float, process: str = "") -> None:
        """Note that an environment has called, and by which process if it names that."""
        if env_id is not None and env_id in self.last_seen:
            self.last_seen[env_id] = now
            if process:
                self.processes[env_id] = process

    def note_trouble(self, env_id: int, trouble: str) -> bool:
        """Note why an environment gives no group; empty if it does. Return True if that is new."""
        if not trouble:
            self.troubles.pop(env_id, None)
            return False
        is_new = env_id not in self.troubles
        self.troubles[env_id] = trouble
        return is_new

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
            self._save(line)

    def charge(self, served: Mapping[int, int], reservations: Mapping[int, float]) -> None:
        """Book a batch: sequences served per line, and what had been reserved."""
        for env_id, reserved in reservations.items():
            environment = self.by_id[env_id]
            environment.owed = min(
                max(0.0, reserved - served.get(env_id, 0)), float(environment.group_size)
            )
            self._save(env_id)
        for line, sequences in served.items():
            environment = self.by_id[line]
            self.clock = max(self.clock, environment.clock)
            environment.clock += sequences / max(environment.weight, MIN_WEIGHT)
            self._save(line)

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


MAX_WARNINGS = 256
"""Lines about accepted posts in the life of a service: clients choose the names in them."""
SIMILAR = 0.85
"""Likeness of an unknown field's name to a known one, above which the log names the known one."""


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


class PostWarnings:
    """Lines for the log about accepted posts that hold a likely mistake, each once.

    A post of the public Atropos may hold any of these, so none of them is refused.
    """

    def __init__(self) -> None:
        self._given: set[tuple[int, str | int]] = set()

    def about(
        self, group: ValidatedGroup, environment: Environment, trainer: Registration | None
    ) -> list[str]:
        """Return the new lines about one group.

        Args:
            group: a posted group.
            environment: the sender; the one without an id if that is not registered.
            trainer: the registered trainer.
        """
        name, lines = environment.wandb_name or "an environment without a registration", []
        if self._is_new(environment, group.env_id if environment.env_id == NOBODY else None):
            lines.append(
                f"a group names env_id {group.env_id}, which is not registered here. It is accepted, without the weight "
                "and share of an environment. Post with the env_id of POST /register-env, and register again after "
                "a reset of this service"
            )
        for field_name in group.unknown:
            if self._is_new(environment, field_name):
                meant = difflib.get_close_matches(field_name, GROUP_FIELDS, 1, SIMILAR)
                remedy = f": rename it if `{meant[0]}` is meant" if meant else ""
                lines.append(
                    f"{name} posts the field `{field_name[:64]}`, which the service does not know. "
                    f"The trainer gets it unread{remedy}"
                )
        limit = trainer.max_token_len if trainer is not None else 0
        if 0 < limit < group.longest and self._is_new(environment, f"longer than {limit}"):
            lines.append(
                f"{name} posts a sequence of {group.longest} tokens, above the trainer's limit of {limit} "
                "(max_token_len). A trainer leaves such a sequence out: lower the environment's "
                "max_token_length, or raise the trainer's --seq-len"
            )
        return lines

    def _is_new(self, environment: Environment, what: str | int | None) -> bool:
        """Return whether a line about this is due: once, and for a bounded number of things."""
        if what is None or len(self._given) >= MAX_WARNINGS:
            return False
        key = environment.env_id, what
        if key in self._given:
            return False
        self._given.add(key)
        return True


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
        left = [
            _trouble(registry.by_id[env_id], registry)
            for env_id in registry.troubles
            if env_id >= first_of_run
        ]
        return [
            f"no environment is registered: {START_ONE}",
            *left[-MAX_NAMED:],
            *refusals.describe(),
        ]
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
        troubles = [_trouble(one, registry) for one in speaking if one.env_id in registry.troubles]
        remedy = ""
        if quiet > limit and not troubles:
            remedy = ": see its log, and whether its inference server answers"
        sentences += [f"{_list_of(what)}{remedy}", *troubles[:MAX_NAMED]]
    return [*sentences, *refusals.describe()]


def _trouble(one: Environment, registry: Registry) -> str:
    return f"{one.wandb_name} gives no group: {registry.troubles[one.env_id]}"


def _silence(one: Environment, registry: Registry, now: float) -> str:
    where = f" ({registry.processes[one.env_id]})" if one.env_id in registry.processes else ""
    return f"{one.wandb_name} has sent nothing for {registry.seconds_silent(one, now):.0f} s{where}"


def _what_it_does(one: Environment, registry: Registry, now: float) -> str:
    seconds = registry.seconds_without_groups(one, now)
    if one.env_id in registry.posted:
        return f"{one.wandb_name} posted its last group {seconds:.0f} s ago"
    return f"{one.wandb_name} is registered and has posted no group for {seconds:.0f} s"


def _list_of(parts: Sequence[str]) -> str:
    shown = ", ".join(parts[:MAX_NAMED])
    return shown if len(parts) <= MAX_NAMED else f"{shown}, and {len(parts) - MAX_NAMED} more"


MAX_EPOCHS = 1024
"""Epochs that the service remembers of each kind. It forgets the oldest first."""
FIRST_EPOCHS = 2**52
"""Trainers may name epochs up to this one. It is half of the largest that a rollout can carry, and
far above the clock."""
LARGEST_LEAP = 2**20
"""Trainers may also name epochs that exceed the last one by this number, so epochs from the
service are always valid."""


class WeightEpochs:
    """The epochs of one service, and which of them are the present run's.

    A trainer requests an epoch before an inference server gets its weights. The answer is above all
    epochs that this service has seen, so no two trainers have the same one, whatever their clocks
    show. A trainer that registers without a request keeps the epoch that it names, if that is above
    all epochs of its run. If not, the service counts it as a higher one.
    """

    def __init__(self, last: int = 0) -> None:
        self.last = last
        """The highest epoch of any trainer."""
        self.sessions: list[TrainerSession] = []
        """The trainers of the present run that name epochs, the present one last. Empty if the
        present one names none."""
        self.run_epoch = 0
        """For a trainer that names no epoch: lower epochs, except 0, are another run's."""
        self._own: dict[int, None] = {}
        """Epochs of the present run's trainers."""
        self._run_of_epoch: dict[int, str] = {}
        """The name of the run for which the service issued an epoch."""
        self._counted_as: dict[int, int] = {}
        """Epochs that trainers of the present run named, and the higher epochs that replace them."""

    def stored(self) -> dict[str, Any]:
        """Return the state to be stored, as JSON."""
        return {
            "last_epoch": self.last,
            "lives": [[session.epoch, session.start] for session in self.sessions],
            "run_epoch": self.run_epoch,
            "own_epochs": list(self._own),
            "given_epochs": list(self._run_of_epoch.items()),
            "counted_epochs": list(self._counted_as.items()),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> WeightEpochs:
        """Restore what `stored` returned. Stores of earlier versions lack some of it."""
        epochs = cls(state.get("last_epoch", 0))
        epochs.sessions = [TrainerSession(*pair) for pair in state.get("lives", [])]
        epochs.run_epoch = state.get("run_epoch", 0)
        epochs._own = dict.fromkeys(
            state.get("own_epochs", [session.epoch for session in epochs.sessions])
        )
        epochs._run_of_epoch = {epoch: run for epoch, run in state.get("given_epochs", [])}
        epochs._counted_as = {named: epoch for named, epoch in state.get("counted_epochs", [])}
        return epochs

    @property
    def present(self) -> int:
        """Epoch of the present trainer; 0 if it names none."""
        return self.sessions[-1].epoch if self.sessions else 0

    def too_high(self, named: Iterable[int]) -> int | None:
        """Return the first epoch that is too high for a trainer to name; None if all are allowed.

        After a higher epoch the service could soon issue none.
        """
        highest = max(FIRST_EPOCHS, self.last + LARGEST_LEAP)
        return next((epoch for epoch in named if epoch > highest), None)

    def give(self, proposed: int, run: str | None) -> int:
        """Return an epoch for a trainer that starts: the proposed one, or a higher one that no
        trainer has.

        Args:
            proposed: Unix milliseconds, above the epochs in the trainer's checkpoints.
            run: its run's name; None if the run has none.
        """
        self.last = max(proposed, self.last + 1)
        if run is not None:
            _remember(self._run_of_epoch, self.last, run)
        return self.last

    def register(
        self, registration: Registration, sessions: Iterable[TrainerSession], another_run: bool
    ) -> None:
        """Register a trainer, and set the registration's `weight_epoch` to the epoch that counts.

        Args:
            registration: the trainer's.
            sessions: the trainers in its checkpoints, which may include itself.
            another_run: the last registration was another run's.
        """
        named, start = registration.weight_epoch, registration.starting_step
        if another_run:
            self.sessions, self._own, self._counted_as = [], {}, {}
            self.run_epoch = self.last + 1
        if not named:
            self.sessions = []
            return
        starts = {
            self.counted(session.epoch): session.start
            for session in sessions
            if session.epoch != named
        }
        own = next((session.start for session in sessions if session.epoch == named), start)
        present = self.counted(named)
        if present != self.present and present <= max([*self._own, *starts], default=0):
            present = self.last + 1
            self._counted_as.pop(named, None)
            _remember(self._counted_as, named, present)
        for session in self.sessions:
            starts[session.epoch] = min(session.start, starts.get(session.epoch, session.start))
        earlier = [TrainerSession(epoch, starts[epoch]) for epoch in sorted(starts)]
        self.sessions = begin_session(earlier, present, min(start, own))
        if another_run:
            self.run_epoch = present
        self.last = max(self.last, *(session.epoch for session in self.sessions))
        for session in self.sessions:
            _remember(self._own, session.epoch, None)
        registration.weight_epoch = present

    def counted(self, epoch: int) -> int:
        """Return the epoch that replaces an epoch of a rollout or of a trainer."""
        return self._counted_as.get(epoch, epoch)

    def is_foreign(self, epoch: int, version: int, run: str | None) -> bool:
        """Return True if weights are another run's.

        Args:
            epoch, version: of the weights; the epoch comes from `counted`.
            run: the name of the present run.
        """
        if not epoch:
            return effective_version(epoch, version, self.sessions) < 0
        if not self.sessions:
            return epoch < self.run_epoch
        own = epoch in self._own or (run is not None and self._run_of_epoch.get(epoch) == run)
        return not own or effective_version(epoch, version, self.sessions) < 0


def _remember(table: dict[int, Any], epoch: int, value: Any) -> None:
    table[epoch] = value
    while len(table) > MAX_EPOCHS:
        del table[next(iter(table))]


@dataclass(slots=True)
class Stream:
    """Items of one environment."""

    begin: int = 0
    """The first item behind all batches that were handed out."""
    held: dict[int, int] = field(default_factory=dict)
    """Item -> sequence number of its group, for all groups that the service holds or has handed out."""


class Streams:
    """Positions of the environments that can be resumed exactly, by the name of their stream.

    Such an environment numbers its items, and names the item that each group answers. All that is
    sampled for one batch lies in a window that begins where the last batch ended. A trainer's
    checkpoint holds the beginning of the next window. The service holds the items of the window
    whose groups it has. Both together are the position.

    The caller of a method that changes something stores `stored()` with the groups.
    """

    def __init__(self, stored: Mapping[str, Any] | None = None) -> None:
        stored = stored or {}
        self.trainer: int = stored.get("trainer", 0)
        """The uuid of its registration."""
        self.rewinds: int = stored.get("rewinds", 0)
        """Number of times that answered items were lost under one registration."""
        self.by_name = {
            name: Stream(begin, {item: seq for item, seq in held})
            for name, (begin, held) in stored.get("streams", {}).items()
        }

    def stored(self) -> dict[str, Any]:
        """Return the state to be stored, as JSON."""
        streams = {
            name: [stream.begin, sorted(stream.held.items())]
            for name, stream in self.by_name.items()
        }
        return {"trainer": self.trainer, "rewinds": self.rewinds, "streams": streams}

    @property
    def life(self) -> str:
        """Changes whenever the item window is reset. Items started under an old value are dropped."""
        return f"{self.trainer}.{self.rewinds}"

    def open(self, name: str, positions: Mapping[str, int] | None) -> None:
        """Open the stream of an environment that has registered.

        Args:
            name: of the stream.
            positions: first item of each stream, from the trainer's weights. Others begin at 0.
        """
        self.by_name.setdefault(name, Stream((positions or {}).get(name, 0)))

    def rewind(
        self, trainer: int, positions: Mapping[str, int] | None, kept: Iterable[Group]
    ) -> None:
        """Reset the windows for a trainer that has registered.

        Args:
            trainer: the uuid of its registration.
            positions: the first item after the last batch that its weights have learned from, by
                stream. A stream without an entry begins at 0. None leaves all as they are.
            kept: the groups that the service still holds.
        """
        self.trainer = trainer
        seqs = {group.seq for group in kept}
        for name, stream in self.by_name.items():
            stream.held = {item: seq for item, seq in stream.held.items() if seq in seqs}
            if positions is not None:
                stream.begin = positions.get(name, 0)

    def refusal(self, group: ValidatedGroup) -> Receipt | None:
        """Return the answer to a group that is not needed, since its item is answered or in an
        earlier batch. None if the group is needed.
        """
        if group.stream is None or group.item is None:
            return None
        stream = self.by_name.get(group.stream)
        if stream is None:
            return Receipt(
                "dropped",
                reason=f"no environment that serves {group.stream!r} is registered here: register again",
            )
        if group.item in stream.held:
            return Receipt("received")
        if group.life != self.life:
            return Receipt(
                "dropped",
                reason=f"rewound: {group.stream!r} has been set back to item {stream.begin} since",
            )
        if group.item < stream.begin:
            reason = (
                f"repeated: item {group.item} of {group.stream!r} is in an earlier batch; "
                f"the next one begins at {stream.begin}"
            )
            return Receipt("dropped", reason=reason)
        return None

    def add(self, group: ValidatedGroup, seq: int) -> bool:
        """Add an accepted group. Return True if it belongs to a stream."""
        if group.stream is None or group.item is None:
            return False
        self.by_name[group.stream].held[group.item] = seq
        return True

    def in_order(self, groups: Iterable[Group]) -> list[Group]:
        """Return the groups of a batch in the order of their items, which does not depend on time.
        Groups without an item come first, in the order of acceptance.
        """
        places = {
            seq: (name, item)
            for name, stream in self.by_name.items()
            for item, seq in stream.held.items()
        }
        return sorted(groups, key=lambda group: places.get(group.seq, ("", group.seq)))

    def hand_out(self, groups: Iterable[Group]) -> None:
        """Move the windows behind a batch that is handed out."""
        seqs = {group.seq for group in groups}
        for stream in self.by_name.values():
            stream.begin = max(
                [stream.begin, *(item + 1 for item, seq in stream.held.items() if seq in seqs)]
            )

    def after(self, groups: Iterable[Group]) -> dict[str, int]:
        """Return the first item after a batch, by stream."""
        seqs = {group.seq for group in groups}
        return {
            name: max(
                (item + 1 for item, seq in stream.held.items() if seq in seqs),
                default=stream.begin,
            )
            for name, stream in self.by_name.items()
        }

    def put_back(self, groups: Iterable[Group]) -> None:
        """Move the windows back for a dissolved batch, whose groups wait again."""
        seqs = {group.seq for group in groups}
        for stream in self.by_name.values():
            stream.begin = min(
                [stream.begin, *(item for item, seq in stream.held.items() if seq in seqs)]
            )

    def forget(self, groups: Iterable[Group]) -> bool:
        """Forget groups that are gone. Items of the present window must be done again.

        Return True if any group belonged to a stream.
        """
        seqs = {group.seq for group in groups}
        changed = False
        for stream in self.by_name.values():
            gone = [item for item, seq in stream.held.items() if seq in seqs]
            for item in gone:
                del stream.held[item]
            self.rewinds += any(item >= stream.begin for item in gone)
            changed = changed or bool(gone)
        return changed

    def status(self, name: str) -> dict[str, Any] | None:
        """Return the position for the environment's `ResumeWindow`; None for a stream that was
        never opened.
        """
        stream = self.by_name.get(name)
        if stream is None:
            return None
        settled = sorted(item for item in stream.held if item >= stream.begin)
        return {"life": self.life, "begin": stream.begin, "settled": settled}


MAX_KEPT = 1024
"""Evaluations. The oldest are forgotten first."""
MAX_BYTES = 8 << 20
"""Bytes of JSON of all evaluations, since one answer may carry all. The newest is kept whatever its
size."""


class Evaluations:
    """The newest results of evaluations, numbered in the order of their arrival."""

    def __init__(self, changes: Changes, next_id: int = 1) -> None:
        self.next_id, self._changes = next_id, changes
        self._kept: deque[Evaluation] = deque()
        self._bytes = 0

    def restore(self, stored: Iterable[Evaluation], next_id: int) -> None:
        """Restore the stored results, oldest first."""
        for evaluation in stored:
            self._keep(evaluation)
        self.next_id = max([next_id, *(evaluation.id + 1 for evaluation in self._kept)])

    def add(
        self,
        time: float,
        env_id: int | None,
        name: str,
        weight_version: int | None,
        metrics: dict[str, float],
        key: str | None = None,
        weight_epoch: int | None = None,
    ) -> int:
        """Add a result, and return its id.

        A result with the same key as an earlier one is not added; its id is the earlier one's.
        """
        for earlier in self._kept:
            if key is not None and earlier.key == key:
                return earlier.id
        evaluation = Evaluation(
            self.next_id, time, env_id, name, weight_version, metrics, key, weight_epoch
        )
        self.next_id += 1
        self._changes.records["evaluation", evaluation.id] = evaluation
        self._keep(evaluation)
        return evaluation.id

    def _keep(self, evaluation: Evaluation) -> None:
        """Keep a result, and forget the oldest ones beyond the bounds."""
        self._kept.append(evaluation)
        self._bytes += evaluation.size
        while len(self._kept) > MAX_KEPT or (self._bytes > MAX_BYTES and len(self._kept) > 1):
            oldest = self._kept.popleft()
            self._bytes -= oldest.size
            self._changes.records["evaluation", oldest.id] = None

    def after(self, id: int) -> Sequence[Evaluation]:
        """Return the results after the one with this id, oldest first."""
        return [evaluation for evaluation in self._kept if evaluation.id > id]

    def clear(self) -> None:
        """Forget all results, which are another run's. Their ids are not used again."""
        for evaluation in self._kept:
            self._changes.records["evaluation", evaluation.id] = None
        self._kept.clear()
        self._bytes = 0


ERROR_COUNTS, KILL_COUNTS, LIMIT = 3, 1, 5
"""An error in training on a batch counts for three kills. So a batch is set aside after two errors,
or five kills, or an error and two kills. A person who kills a trainer by hand does so a few times
at most, and must not lose the batch by it."""
MAX_SET_ASIDE = 8
"""Batches that are kept for inspection. The oldest are forgotten first."""


@dataclass
class BatchFailures:
    """Batches that end the trainers that train on them: counted, and set aside before they end many.

    A trainer trains on the first batch that it holds. A trainer that ends with it
    reports so (POST /batch/report), with the error if the batch may be the cause. A killed trainer
    reports nothing. Both are counted for the groups of the batch, so that the count lasts if the
    batch is dissolved.
    """

    counts: dict[int, int] = field(default_factory=dict)
    """By the sequence number of a group."""
    reported: set[int] = field(default_factory=set)
    """Batches whose trainers have reported their end."""
    batches: dict[int, tuple[Lease, str]] = field(default_factory=dict)
    """The batches that were set aside, with the reason, by number."""
    total: int = 0
    """Batches that were ever set aside."""
    new: list[int] = field(default_factory=list)
    """Batches that were set aside since the last line of the log about them."""

    def stored(self) -> dict[str, Any]:
        """Return the state to be stored, as JSON. The store keeps the leases and their groups."""
        return {
            "counts": list(self.counts.items()),
            "reported": sorted(self.reported),
            "reasons": [[batch_id, reason] for batch_id, (_, reason) in self.batches.items()],
            "total": self.total,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], leases: dict[int, Lease]) -> BatchFailures:
        """Restore what `stored` returned, and take the batches that were set aside out of `leases`."""
        counts = {seq: count for seq, count in state.get("counts", [])}
        batches = {
            batch_id: (leases.pop(batch_id), reason)
            for batch_id, reason in state.get("reasons", [])
            if batch_id in leases
        }
        return cls(counts, set(state.get("reported", [])), batches, state.get("total", 0))

    def count(self, lease: Lease, weight: int) -> bool:
        """Count a failure for each group of a batch.

        Return True if the batch has reached the limit.
        """
        for group in lease.groups:
            self.counts[group.seq] = self.counts.get(group.seq, 0) + weight
        return max(self.counts[group.seq] for group in lease.groups) >= LIMIT

    def set_aside(self, lease: Lease, reason: str) -> list[Lease]:
        """Keep a batch that has reached the limit. Return the batches that are forgotten for it."""
        self.forget(lease.groups)
        self.batches[lease.batch_id] = (lease, reason)
        self.new.append(lease.batch_id)
        self.total += 1
        forgotten = []
        while len(self.batches) > MAX_SET_ASIDE:
            forgotten.append(self.batches.pop(min(self.batches))[0])
        return forgotten

    def forget(self, groups: Iterable[Group]) -> None:
        """Forget the counts of groups that are gone, or from which the trainer has learned."""
        for group in groups:
            self.counts.pop(group.seq, None)

    def groups(self) -> list[Group]:
        """Return the groups of all batches that were set aside."""
        return [group for lease, _ in self.batches.values() for group in lease.groups]
