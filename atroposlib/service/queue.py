"""The state of the rollout service and every rule about it. Pure: no I/O, no clock of its own, no
threads.

Groups come in with `add`, wait in one first-in-first-out line per environment, and leave in batches
with `next_batch`. Each method changes the state and records the change; `take_changes` returns the
records, so that the caller stores them in one transaction. `RolloutQueue(limits, snapshot)` builds
the same state from a store. Sizes and shares are in sequences unless a name has `groups`. Versions
are weight versions (numbers of optimizer steps). `now` is in seconds of a clock that never goes
back.

`scheduling` chooses the groups of a batch, and `pending_groups` finds groups that no batch can
hold. `run_state` holds the rest of a run's state, and explains an empty batch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from atroposlib.service import scheduling
from atroposlib.service.fleet import FleetRequests
from atroposlib.service.pending_groups import (
    REASON,
    PendingGroups,
    PostedSizes,
    ReferenceQueue,
    Unfillable,
    describe_unfillable,
)
from atroposlib.service.records import (
    BUFFERED,
    COMPUTED,
    FINAL,
    MISSING,
    NOBODY,
    QUEUED,
    REFERENCE,
    BatchTooSmallError,
    Environment,
    Evaluation,
    Group,
    Lease,
    Limits,
    NotRegisteredError,
    OlderWorkerError,
    OtherModelError,
    QueueFullError,
    Receipt,
    RegistryFullError,
    SupersededError,
    UnknownBatchError,
    ValidatedGroup,
    length_bucket,
)
from atroposlib.service.run_state import (
    ERROR_COUNTS,
    KILL_COUNTS,
    BatchFailures,
    Evaluations,
    PostWarnings,
    Refusals,
    Registry,
    Streams,
    WeightEpochs,
    why_starved,
)
from atroposlib.service.scheduling import choose_multiple, in_order_of_use, is_plain
from atroposlib.service.schemas import NEW_ENTRIES, Registration, ReplayOptions
from atroposlib.service.store import Changes, Snapshot
from atroposlib.wire import TrainerSession, oldest

MAX_ENVIRONMENTS = 1024
"""Registered environments, disconnected ones included."""
FORGET_SECONDS = 86_400.0
"""The queue forgets an environment that is silent for longer. If MAX_ENVIRONMENTS are registered,
`Limits.silent_after` is enough."""
MAX_STREAMS = 1024
"""Streams of items of one run. The queue remembers each, since a forgotten stream would begin
again."""
DROPPED_AT_ONCE = 100
"""The bound on groups divided by this is the smallest number of unfillable groups dropped at a
time."""
MAX_NEWS = 64
"""Lines for the log about unfillable groups."""
STORED = (
    "started",
    "current_step",
    "acked_version",
    "acks",
    "former_version",
    "ended",
    "first_env_of_run",
    "learned_up_to",
    "uses",
    "groups_used",
    "batches_skipped",
    "next_batch_id",
)
"""Attributes of the queue that the store holds as they are."""


class RolloutQueue:
    """Queue, buffers, leases and registrations of one rollout service."""

    def __init__(
        self, limits: Limits | None = None, snapshot: Snapshot | None = None, now: float = 0.0
    ) -> None:
        self.limits = limits or Limits()
        self._clear()
        if snapshot is not None:
            self._restore(snapshot, now)

    def _clear(self) -> None:
        self.changes = Changes()
        self.news: list[str] = []  # lines for the log of the service
        # The trainer.
        self.registration: Registration | None = None
        self.started = False  # the trainer has asked for its first batch: environments may start
        self.ended = False  # the trainer has ended its run
        self.current_step = 0
        self.acks = False  # the trainer acknowledges its batches
        self.acked_version: int | None = None
        self.former_version: int | None = (
            None  # an earlier trainer's, if the present one began below that
        )
        self.learned_up_to = (
            0  # the highest id of a batch that is learned from but kept for the next trainer
        )
        self.epochs = WeightEpochs()
        # Environments.
        self.registry = Registry(self.limits, self.changes)
        self.first_env_of_run = 0  # environments with a lower id belong to a run that has ended
        self.evaluations = Evaluations(self.changes)
        self.fleet = FleetRequests()
        self.streams = Streams()
        # Groups.
        self.lines = PendingGroups()
        self.buffers: dict[int, list[Group]] = {}
        self.reference = ReferenceQueue()
        self.leases: dict[int, Lease] = {}
        self.keys: OrderedDict[str, Receipt] = OrderedDict()
        self.posted_sizes = PostedSizes()
        self.failures = BatchFailures()
        self.next_seq = 0
        self.next_batch_id = 1
        self.held_groups = 0
        self.held_bytes = 0
        # Counts and reasons.
        self.uses = 0  # groups in batches that a trainer has learned from, once per use
        self.groups_used = 0  # groups that a trainer has learned from at least once
        self.batches_skipped = 0  # batches that the trainer acknowledged without learning from them
        self.drops: Counter[tuple[str, int]] = Counter()
        self.waiting: str | None = None  # why the last /batch was empty
        self.refusals = Refusals()
        self.post_warnings = PostWarnings()
        self._pruned_below: int | None = None  # no waiting group counts as older than this version
        self._named_unfillable: set[tuple[int, int, int]] = set()
        self._state_changed = False

    # ---- changes for the store, and the state from a store ----

    def take_changes(self) -> Changes:
        """Return the changes since the last call."""
        if self._state_changed:
            self._state_changed = False
            self.changes.records["state", 0] = {
                **{name: getattr(self, name) for name in STORED},
                **self.epochs.stored(),
                "registration": self.registration and self.registration.model_dump(),
                "failures": self.failures.stored(),
                "clock": self.registry.clock,
                "name_counts": dict(self.registry.name_counts),
                "next_env_id": self.registry.next_id,
                "next_seq": self.next_seq,
                "next_evaluation": self.evaluations.next_id,
                "fleet": asdict(self.fleet),
                "streams": self.streams.stored(),
                "drops": [
                    [reason, bucket, count]
                    for (reason, bucket), count in sorted(self.drops.items())
                ],
                "sizes_posted": self.posted_sizes.stored(),
            }
        return self.changes.take()

    def _restore(self, snapshot: Snapshot, now: float) -> None:
        state = snapshot.state
        if state.get("registration"):
            self.registration = Registration(**state["registration"])
        for name in STORED:
            setattr(self, name, state.get(name, getattr(self, name)))
        self.epochs = WeightEpochs.restored(state)
        self.drops.update(
            {(reason, bucket): count for reason, bucket, count in state.get("drops", [])}
        )
        names, clock = state.get("name_counts", {}), state.get("clock", 0.0)
        environments = [record for _, record in sorted(snapshot.of("environment").items())]
        self.registry.restore(environments, names, clock, now, state.get("next_env_id", 0))
        self.keys.update({key: Receipt(**record) for key, record in snapshot.of("key").items()})
        results = [Evaluation(**record) for _, record in sorted(snapshot.of("evaluation").items())]
        self.evaluations.restore(results, state.get("next_evaluation", 1))
        self.fleet = FleetRequests(**state.get("fleet", {}))
        self.streams = Streams(state.get("streams"))
        self._restore_groups(snapshot)

    def _restore_groups(self, snapshot: Snapshot) -> None:
        for env_id in self.registry.by_id:
            self.lines.open(env_id)
        self.leases = {
            batch_id: Lease(batch_id, [], **record)
            for batch_id, record in sorted(snapshot.of("lease").items())
        }
        for group in snapshot.groups():
            if group.place == QUEUED:
                self.lines.add(group)
            elif group.place == BUFFERED:
                self.buffers.setdefault(group.line, []).append(group)
            elif group.place == REFERENCE:
                self.reference.add([group])
            else:
                self.leases[group.place].groups.append(group)
        self.failures = BatchFailures.restored(snapshot.state.get("failures", {}), self.leases)
        held = sorted(self._held(), key=lambda group: group.seq)
        self.held_groups, self.held_bytes = len(held), sum(group.n_bytes for group in held)
        self.next_seq = max([snapshot.state.get("next_seq", 0), *(group.seq + 1 for group in held)])
        self._update_versions()
        self.posted_sizes.restore(snapshot.state.get("sizes_posted", []), held)

    def _held(self) -> Iterator[Group]:
        yield from self.lines
        for buffer in self.buffers.values():
            yield from buffer
        yield from self.reference.waiting.values()
        for lease in self.leases.values():
            yield from lease.groups

    def reset(self) -> None:
        """Forget everything, registrations included."""
        next_evaluation, last_epoch = self.evaluations.next_id, self.epochs.last
        self._clear()
        self.epochs = WeightEpochs(last_epoch)
        self.evaluations = Evaluations(self.changes, next_evaluation)
        self.changes.wipe = True
        self._state_changed = True

    # ---- registration of the trainer ----

    def require_trainer(self, uuid: int | None) -> Registration:
        """Return the registration that is in force.

        Raises:
            NotRegisteredError: no trainer has registered.
            SupersededError: `uuid` is not the current registration's.
        """
        if self.registration is None:
            raise NotRegisteredError("Trainer not registered. Call /register first.")
        if uuid is not None and uuid != self.registration.uuid:
            raise SupersededError(
                f"another trainer has registered since (its uuid is {self.registration.uuid}, "
                f"yours is {uuid}); "
                "register again to take over"
            )
        return self.registration

    def give_epoch(self, proposed: int, run: str | None) -> int:
        """Give a weight epoch to a trainer that starts; see `WeightEpochs.give`."""
        self._state_changed = True
        return self.epochs.give(proposed, run)

    def last_run(self) -> dict[str, Any] | None:
        """Return the run that has not ended, its folder, and a step that it has saved there; None
        if it has surely saved none.

        A trainer acknowledges a batch only after the checkpoints that are due by then.
        """
        trainer = self.registration
        if trainer is None or self.ended:
            return None
        interval, acknowledged = trainer.save_checkpoint_interval, self.acked_version or 0
        due = acknowledged // interval * interval if interval else 0
        saved = max([due, *(session.start for session in self.epochs.sessions)])
        if not saved:
            return None
        return {"run": trainer.run, "checkpoint_dir": trainer.checkpoint_dir, "saved_step": saved}

    def register(self, registration: Registration, sessions: Sequence[TrainerSession] = ()) -> int:
        """Register a trainer, for the first time or again. It takes over; leased batches wait for
        it.

        Groups that another run has sampled are dropped. These are all groups if the registration is
        another run's. If the trainer names its weight epoch, they are the groups of other runs'
        epochs. Groups that count as older than version 0 belong to them too (see `WeightEpochs`).
        If it does not, they are the groups sampled at a version that it has not reached. For the
        groups of a leased batch, only stated weights count.

        Args:
            registration: the trainer's. Its `weight_epoch` is replaced by the service's count.
            sessions: the trainers of its run, as it knows them.

        Returns:
            Number of groups that another run had sampled.
        """
        old, reached = self.registration, self.trainer_version()
        another_run = old is not None and old.is_another_run(registration)
        if old is not None and registration.starting_step < reached:
            self.former_version = max(reached, self.former_version or 0)
        elif another_run:
            self.former_version = None
        self._count_unreported_end(counts=not another_run)
        self.epochs.register(registration, sessions, another_run)
        self._update_versions()
        self._begin_session(registration)
        if old is not None and old.reference != registration.reference:
            self._forget_references()
        self._return_leases(old, another_run)
        if another_run or (
            old is None and registration.run is not None and not registration.starting_step
        ):
            self.evaluations.clear()  # a run that begins has measured nothing yet
        dropped = self._drop_for_registration(another_run)
        self._move_by_reference()
        for env_id in list(self.buffers):
            self._recombine(env_id)
        self.streams.rewind(
            registration.uuid, registration.positions, [*self._held(), *self.failures.groups()]
        )
        return dropped

    def _begin_session(self, registration: Registration) -> None:
        self.registration = registration
        if self.ended:  # posts of the ended run do not count for this one
            self.registry.posted.clear()
        self.ended = False
        self.current_step = registration.starting_step
        self.started = False
        self.acked_version = None
        self.acks = registration.ack_batches
        self.learned_up_to = 0
        self.waiting, self.refusals = None, Refusals()
        self._pruned_below = None
        self._state_changed = True

    def _return_leases(self, old: Registration | None, another_run: bool) -> None:
        """Keep leased batches that the new trainer can use as they are, and dissolve the others."""
        registration = self.require_trainer(None)
        same_size = old is not None and old.batch_size == registration.batch_size

        def unusable(group: Group) -> bool:
            ahead = group.stated and self._is_ahead(group)
            return ahead or self._wants_reference(group) or self._is_used_up(group)

        for lease in list(self.leases.values()):
            if another_run or not same_size or any(unusable(group) for group in lease.groups):
                self._dissolve(lease)
                continue
            # A new object: an answer that is still on its way to the old trainer cannot mark it as
            # sent.
            self.leases[lease.batch_id] = Lease(lease.batch_id, lease.groups, returned=True)
            self._record_lease(self.leases[lease.batch_id])

    def _drop_for_registration(self, another_run: bool) -> int:
        """Drop what the new trainer cannot use. Return how many groups another run had sampled."""
        batch_size = self.require_trainer(None).batch_size
        dropped = self._drop_where(lambda group: True, "another_run") if another_run else 0
        dropped += self._drop_where(self._is_ahead, "ahead_of_trainer")
        self._drop_where(lambda group: group.size > batch_size, "larger_than_batch")
        self._drop_where(self._is_used_up, "used_up")
        self._drop_stale()
        return dropped

    def _is_ahead(self, group: Group) -> bool:
        """Return True if the weights of a group are not the present trainer's or an earlier one's
        of its run.
        """
        if not self.epochs.sessions:
            return group.version > self.require_trainer(None).starting_step
        return group.version < 0 or (
            group.stated and any(self._is_of_another_run(*weights) for weights in group.weights)
        )

    def _is_used_up(self, group: Group) -> bool:
        return group.uses >= self.replay.max_reuse

    def end(self, uuid: int) -> None:
        """End the trainer's run, for it and for all environments that are registered.

        The next start of a service begins another run. Environments that register from now on wait
        for the next trainer.

        Raises:
            NotRegisteredError: no trainer has registered.
            SupersededError: `uuid` is not the current registration's.
        """
        self.require_trainer(uuid)
        self.ended = self._state_changed = True
        self.first_env_of_run = self.registry.next_id
        self.waiting = None

    # ---- environments ----

    def register_env(
        self,
        desired_name: str,
        weight: float,
        group_size: int,
        max_token_length: int,
        allocation: float | None,
        now: float,
        stream: str | None = None,
    ) -> Environment | None:
        """Register a new environment; None while no trainer takes batches.

        A trainer takes batches from its first request for one until the end of its run. Among
        environments that serve one stream of items, a new one replaces the one before.

        Raises:
            RegistryFullError: too many environments or streams are in use.
        """
        if self.registration is None or not self.started or self.ended:
            return None
        self._make_space_for_environment(now)
        if (
            stream is not None
            and stream not in self.streams.by_name
            and len(self.streams.by_name) >= MAX_STREAMS
        ):
            raise RegistryFullError(
                f"{MAX_STREAMS} streams of items are open, as many as may be: end this run (GET /reset_data) to begin others"
            )
        if stream is not None:
            for former in self.registry.serving(stream):
                self.disconnect_env(former)
            self.streams.open(stream, self.registration.positions)
        environment = self.registry.add(
            desired_name, weight, group_size, max_token_length, allocation, now
        )
        environment.stream = stream
        self.lines.open(environment.env_id)
        self._state_changed = True
        return environment

    def _make_space_for_environment(self, now: float) -> None:
        """Forget environments that have been silent for long, and more of them if one more would be
        too many.

        The queue keeps an environment while any group of it waits or is leased. A forgotten
        environment gets 404 at its next call, as after `/reset_data`, and registers again. Its
        number is not given to another one.

        Raises:
            RegistryFullError: as many environments as may be are in use.
        """
        idle = self._idle_environments()
        silence = {env_id: now - self.registry.last_seen[env_id] for env_id in idle}
        self._forget_environments([env_id for env_id in idle if silence[env_id] > FORGET_SECONDS])
        excess = len(self.registry.last_seen) + 1 - MAX_ENVIRONMENTS
        if excess <= 0:
            return
        removable = [
            env_id
            for env_id in idle
            if env_id in self.registry.by_id
            and (
                silence[env_id] > self.limits.silent_after
                or not self.registry.by_id[env_id].connected
            )
        ]
        if len(removable) < excess:
            raise RegistryFullError(
                f"{MAX_ENVIRONMENTS} environments are registered, as many as may be, and only "
                f"{len(removable)} of them are silent with nothing waiting. Stop some of them, "
                "and try again"
            )
        removable.sort(key=lambda env_id: -silence[env_id])
        self._forget_environments(removable[:excess])

    def _idle_environments(self) -> list[int]:
        """Return the environments without a waiting or leased group, in the order of their
        registration.
        """
        busy = {group.line for group in self._held()} | {
            group.line for group in self.failures.groups()
        }
        return [env_id for env_id in self.registry.by_id if env_id not in busy and env_id != NOBODY]

    def _forget_environments(self, env_ids: list[int]) -> None:
        for env_id in env_ids:
            self.lines.close(env_id)
            self.buffers.pop(env_id, None)
            self.registry.forget(env_id)
            self.posted_sizes.forget(env_id)
        self._state_changed |= bool(env_ids)

    def disconnect_env(self, env_id: int) -> None:
        """Disconnect an environment. Its groups stay; those in its buffer join the queue."""
        self.registry.disconnect(env_id)
        self._release(env_id, range(len(self.buffers.get(env_id, []))))

    def status_env(
        self, env_id: int, now: float, process: str = "", trouble: str = ""
    ) -> dict[str, Any]:
        """Return the state of the queue by which an environment paces itself.

        Both queue sizes are in groups of the environment's own group_size, rounded down. The
        environment counts its work in that unit, whatever the size of the groups that others post.
        The sizes include groups that wait for a reference and groups that the trainer has fetched
        ahead. Without the latter, an environment that bounds how many batches are ahead of it would
        be trained on one version later.

        Raises:
            UnknownEnvironmentError: not registered here (any more); the environment should register
                again.
        """
        environment = self.registry.get(env_id)
        unit = environment.group_size
        run_ended = env_id < self.first_env_of_run
        if (
            not run_ended
        ):  # an environment that leaves now must not count as one that fills the next run's batches
            self.registry.touch(env_id, now, process)
            if self.registry.note_trouble(env_id, trouble):
                self.news.append(f"{environment.wandb_name} gives no group: {trouble}")
        waiting = self.lines.fresh + self.reference.sequences + self.held_ahead()
        return {
            "current_step": self.current_step,
            "queue_size": waiting.total() // unit,
            "self_queue_size": waiting[env_id] // unit,
            "max_group_size": max(self.lines.sizes, default=1),
            **self.registry.shares(env_id, now),
            "groups_wanted": self.groups_wanted(env_id, now),
            "max_staleness": self.registration.max_staleness if self.registration else None,
            "run_ended": run_ended,
            **(
                {"stream": self._stream_status(environment)}
                if environment.stream is not None
                else {}
            ),
        }

    def _stream_status(self, environment: Environment) -> dict[str, Any] | None:
        """Return the position of an environment's stream, with `inexact`, the reason if the run
        cannot be resumed exactly.
        """
        status = self.streams.status(environment.stream or "")
        if status is None:
            return None
        status["version"] = self.trainer_version()
        if not is_plain(self.replay):
            replay = f"{self.replay.policy}, each group in up to {self.replay.max_reuse} batches"
            status["inexact"] = (
                f"the trainer replays ({replay}): start it without --replay and --max-reuse"
            )
        elif others := self.registry.beside(environment.env_id):
            names = ", ".join(other.wandb_name for other in others)
            status["inexact"] = (
                f"{names} fills batches too, and time decides how much of them: let one environment run alone"
            )
        return status

    def groups_wanted(self, env_id: int, now: float) -> int:
        """Return how many more groups of its group_size this environment should sample, those under
        way included.

        With a staleness bound: as many as can still be handed out before they are too old, shared
        by weight. Without: as many as the queue has space for. Groups that a trainer has learned
        from do not count, since new groups replace them.
        """
        unfillable = self.unfillable()
        replaceable = self.lines.used_groups + sum(
            sum(unfillable.sizes(line).values()) for line in unfillable.lines()
        )
        space = max(0, self.limits.max_groups - self.held_groups + replaceable)
        if self.registration is None or self.registration.max_staleness is None:
            return space
        batches = (
            self.registration.max_staleness + 1 - (self.trainer_version() - self.sampling_version())
        )
        waiting = self.lines.fresh + self.reference.sequences
        for line, buffer in self.buffers.items():
            waiting[line] += sum(group.size for group in buffer)
        for line in unfillable.lines():
            waiting[line] -= min(waiting[line], unfillable.sequences(line))
        for group in [
            group
            for lease in self.leases.values()
            if lease.returned
            for group in lease.groups
            if not group.uses
        ]:
            waiting[group.line] += group.size
        shares = scheduling.apportion(
            max(0, batches) * self.registration.batch_size,
            waiting,
            self.registry.active(now),
            self.limits.max_groups,
        )
        return min(space, shares.get(env_id, 0))

    def join_fleet(self, url: str, keyed: bool) -> None:
        """Request that the trainer bring in an inference server; see `FleetRequests.join`."""
        self._state_changed |= self.fleet.join(url, keyed)

    def leave_fleet(self, url: str, published: Collection[str] | None) -> None:
        """Request that the trainer let a server go; see `FleetRequests.leave`."""
        self._state_changed |= self.fleet.leave(url, published)

    def evaluated(self, now: float, **result: Any) -> int:
        """Keep an environment's evaluation; see `Evaluations.add`. Return the evaluation's id."""
        self.registry.touch(result["env_id"], now)
        self._state_changed = True  # ids go on, also when all of them are gone
        return self.evaluations.add(**result)

    # ---- intake of groups ----

    def check(self, groups: Sequence[ValidatedGroup]) -> None:
        """Refuse a post that cannot be accepted as a whole.

        Raises:
            BatchTooSmallError: a group holds more sequences than a batch.
            QueueFullError: the queue is at its bound.
        """
        batch_size = self.registration.batch_size if self.registration else None
        new = [
            (index, group)
            for index, group in enumerate(groups)
            if group.key is None or group.key not in self.keys
        ]
        for index, group in new:
            if batch_size is not None and group.size > batch_size:
                raise BatchTooSmallError(index, group.size, batch_size)
        n_groups = self.held_groups - self.lines.used_groups + len(new)
        n_bytes = self.held_bytes - self.lines.used_bytes + sum(len(group.body) for _, group in new)
        if n_groups <= self.limits.max_groups and n_bytes <= self.limits.max_bytes:
            return
        unfillable = self._unfillable_groups()  # new groups replace them
        n_groups, n_bytes = (
            n_groups - len(unfillable),
            n_bytes - sum(group.n_bytes for group in unfillable),
        )
        if n_groups <= self.limits.max_groups and n_bytes <= self.limits.max_bytes:
            return
        waiting = (
            self.lines.fresh.total()
            + self.reference.sequences.total()
            - sum(group.size for group in unfillable)
        )
        if waiting < 2 * (batch_size or 0) and not any(
            self._is_mis_sized(self.registry.line_of(group.env_id), group.size) for _, group in new
        ):
            # the held groups cannot fill two batches: a bound that small must not starve the
            # trainer
            return
        raise QueueFullError(
            f"the queue holds {self.held_groups} groups in {self.held_bytes} bytes; its bounds are {self.limits.max_groups} "
            f"groups and {self.limits.max_bytes} bytes: post again when the trainer has taken some"
        )

    def add(self, group: ValidatedGroup, now: float) -> Receipt:
        """Accept one group that has passed `check`.

        A repeated idempotency key gets the first answer again.
        """
        if group.key is not None and group.key in self.keys:
            return self.keys[group.key]
        self.registry.note_post(group.env_id, now)
        sender = self.registry.by_id[self.registry.line_of(group.env_id)]
        self.news += self.post_warnings.about(group, sender, self.registration)
        receipt = self._receive(group)
        if receipt.status == "dropped":
            self.refusals.note_drop(receipt.reason or "")
        if group.key is not None:
            self.keys[group.key] = receipt
            self.changes.records["key", group.key] = receipt
            if len(self.keys) > self.limits.max_keys:
                oldest_key, _ = self.keys.popitem(last=False)
                self.changes.records["key", oldest_key] = None
        return receipt

    def _receive(self, group: ValidatedGroup) -> Receipt:
        """Drop a group of another run, a stale one or one that its stream does not need; accept any
        other.
        """
        present = self.epochs.present
        stated = [
            (None if epoch is None else self.epochs.counted(epoch), version)
            for epoch, version in group.weights
        ]
        weights = tuple((present if epoch is None else epoch, version) for epoch, version in stated)
        weights = weights or ((present, self.sampling_version()),)
        foreign = [
            (version, epoch) for epoch, version in stated if self._is_of_another_run(epoch, version)
        ]
        if foreign:
            self._count_drop("another_run", group.longest)
            return Receipt("dropped", reason=self._why_foreign(*foreign[-1]))
        counts_as, bound = oldest(weights, self.epochs.sessions), self.oldest_allowed()
        if bound is not None and counts_as < bound:
            self._count_drop("stale", group.longest)
            version = (
                f"{counts_as}"
                if (counts_as in (v for _, v in weights))
                else f"{counts_as} (an earlier trainer's)"
            )
            reason = f"stale: sampled at weight version {version}, but the trainer takes none below {bound} now"
            return Receipt("dropped", reason=reason)
        return self.streams.refusal(group) or self._accept(group, weights, counts_as)

    def _why_foreign(self, version: int, epoch: int | None) -> str:
        whose = (
            "which an earlier trainer had reached"
            if epoch is None
            else f"of weight epoch {epoch}, not of this run"
        )
        return (
            f"another run: sampled at weight version {version}, {whose}; this one is at {self.sampling_version()}. "
            "Does the inference server have its weights?"
        )

    def _accept(
        self, posted: ValidatedGroup, weights: tuple[tuple[int, int], ...], version: int
    ) -> Receipt:
        line = self.registry.line_of(posted.env_id)
        group = Group(
            self.next_seq,
            line,
            posted.size,
            posted.longest,
            len(posted.body),
            weights,
            stated=bool(posted.weights),
            version=version,
            tokens=posted.tokens,
            reference=FINAL if posted.referenced else MISSING,
        )
        self._state_changed |= self.streams.add(posted, group.seq)
        self.next_seq += 1
        self.held_groups += 1
        self.held_bytes += group.n_bytes
        self.registry.by_id[line].accepted += 1
        self._state_changed |= self.posted_sizes.add(line, group.size)
        place = self._place_of(group)
        self.changes.add(group, posted.body)
        self._enter(group, place)
        self._make_room()
        if place != BUFFERED:
            return Receipt("received")
        return Receipt("buffered", buffer_size=sum(group.size for group in self.buffers[line]))

    def _make_room(self) -> None:
        """Beyond the bounds, drop unfillable groups, and then used ones, the most often used first."""
        used_groups, used_bytes = self.lines.used_groups, self.lines.used_bytes
        self._drop_unfillable(
            self.held_groups - used_groups - self.limits.max_groups,
            self.held_bytes - used_bytes - self.limits.max_bytes,
        )
        n_groups, n_bytes = (
            self.held_groups - self.limits.max_groups,
            self.held_bytes - self.limits.max_bytes,
        )
        if not self.lines.used_groups or (n_groups <= 0 and n_bytes <= 0):
            return
        used = sorted(
            (group for group in self.lines if group.uses),
            key=lambda group: (-group.uses, group.seq),
        )
        self._drop_first(used, n_groups, n_bytes, "replaced")

    def _drop_first(
        self, groups: Sequence[Group], n_groups: int, n_bytes: int, reason: str
    ) -> None:
        """Drop groups from the front, until they are `n_groups` and have `n_bytes`, or all are
        gone.
        """
        dropped = set()
        for group in groups:
            if n_groups <= 0 and n_bytes <= 0:
                break
            dropped.add(group.seq)
            n_groups, n_bytes = n_groups - 1, n_bytes - group.n_bytes
        if dropped:
            self._drop_where(lambda group: group.seq in dropped, reason)

    # ---- places where groups wait ----

    def _place_of(self, group: Group) -> int:
        """Return the place where a group waits that is in no batch."""
        if self._wants_reference(group):
            return REFERENCE
        return BUFFERED if self._is_mis_sized(group.line, group.size) else QUEUED

    def _wants_reference(self, group: Group) -> bool:
        """Return True if a group has to wait for a reference worker."""
        return group.reference == MISSING and self.takes_references()

    def _is_mis_sized(self, line: int, size: int) -> bool:
        """Return True if a group has another size than its environment, and waits in its buffer
        until some add up.
        """
        environment = self.registry.by_id[line]
        return line != NOBODY and environment.connected and size != environment.group_size

    def _enter(self, group: Group, place: int) -> None:
        """Put a group where it waits."""
        self._note_place(group, place)
        if (
            self._pruned_below is not None
        ):  # the bound falls when a batch is skipped, so the group may be older
            self._pruned_below = min(self._pruned_below, group.version)
        if place == QUEUED:
            if self.lines.add(group):
                self.registry.wake(group.line)
        elif place == REFERENCE:
            self.reference.add([group])
        else:
            self.buffers.setdefault(group.line, []).append(group)
            self._recombine(group.line)

    def _note_place(self, group: Group, place: int) -> None:
        if group.place != place:
            group.place = place
            self.changes.records["group", group.seq] = group

    def _move(self, groups: Collection[Group], place_of: Callable[[Group], int]) -> None:
        """Move groups to where they wait now, and put the lines that they join back in order."""
        for group in groups:
            self._enter(group, place_of(group))
        for line in {group.line for group in groups}:
            self.lines.sort(line)
            if line in self.buffers:
                self.buffers[line].sort(key=lambda group: group.seq)

    def _recombine(self, env_id: int) -> None:
        """Move groups out of a buffer that add up to a multiple of the environment's group_size and
        fit into a batch.
        """
        unit = self.registry.by_id[env_id].group_size
        limit = max(unit, self.registration.batch_size) if self.registration else unit
        if (
            self.registration and unit > self.registration.batch_size
        ):  # no multiple will ever fit: leave it to the packing
            self._release(env_id, range(len(self.buffers[env_id])))
        while (
            chosen := choose_multiple([group.size for group in self.buffers[env_id]], unit, limit)
        ) is not None:
            self._release(env_id, chosen)

    def _release(self, env_id: int, positions: Sequence[int]) -> None:
        """Move groups from a buffer into the line."""
        buffer = self.buffers.get(env_id, [])
        chosen = {buffer[position].seq for position in positions}
        self.buffers[env_id] = [group for group in buffer if group.seq not in chosen]
        for group in buffer:
            if group.seq in chosen:
                self._enter(group, QUEUED)

    # ---- reference logprobs ----

    def takes_references(self) -> bool:
        """Return True if groups without ref_logprobs wait for a reference worker."""
        return self.registration is not None and self.registration.ref_logprobs_from_workers

    def lend_references(
        self,
        worker: str,
        model: str,
        max_tokens: int,
        seconds: float,
        now: float,
        follows: Collection[str] = (),
    ) -> list[Group]:
        """Return groups for a reference worker, none if there are none for it now.

        Args:
            worker: its name.
            model: whose logprobs it computes.
            max_tokens: tokens of all sequences of all groups; a group that has more comes alone.
            seconds: after which they may go to another worker.
            now: see the module's docstring.
            follows: entries of the trainer's reference that it takes over.

        Raises:
            OtherModelError: the trainer's reference is another model.
            OlderWorkerError: the reference has an entry that the worker does not know.
        """
        if self.registration is None or not self.takes_references():
            self.reference.note_call(worker, now).model = model
            return []
        if model != self.registration.reference_model:
            raise OtherModelError(worker, model, self.registration.reference_model)
        if missing := self.registration.not_followed(follows):
            raise OlderWorkerError(worker, missing, NEW_ENTRIES)
        self._drop_stale()
        return self.reference.lend(worker, model, max_tokens, seconds, now)

    def take_references(self, worker: str, answers: Mapping[int, bytes | None], now: float) -> None:
        """Move the groups that a reference worker has answered to the queue. Groups that do not
        wait stay as they are.

        Args:
            worker: whose answers they are. It need not have the groups on loan: the first answer is
                taken.
            answers: by number, the group's body with ref_logprobs; None if there can be none for
                it.
            now: see the module's docstring.
        """
        answered = [self.reference.waiting[seq] for seq in answers if seq in self.reference.waiting]
        for group in answered:
            body = answers[group.seq]
            self.reference.answer(worker, group, body is not None, now)
            group.reference = FINAL if body is None else COMPUTED
            self.changes.records["group", group.seq] = group
            if body is not None:
                self.held_bytes += len(body) - group.n_bytes
                group.n_bytes = len(body)
                self.changes.bodies[group.seq] = body
        self._move(answered, self._place_of)

    def drop_unreadable(self, seqs: Collection[int]) -> int:
        """Drop groups that wait for a reference and whose bodies the store cannot read.

        Return how many.
        """
        return self._drop_where(lambda group: group.seq in seqs, "damaged")

    def _forget_references(self) -> None:
        """Mark computed references as missing: they are of another reference than this trainer's."""
        for group in self._held():
            if group.reference == COMPUTED:
                group.reference = MISSING
                self.changes.records["group", group.seq] = group

    def _move_by_reference(self) -> None:
        """Move groups into or out of the reference queue, as a trainer that has just registered
        needs it.
        """
        moving = self._take_where(self._wants_reference)
        if not self.takes_references():
            moving = self.reference.remove_where(lambda group: True)
        self._move(moving, self._place_of)

    # ---- groups that no batch can hold ----

    def unfillable(self) -> Unfillable:
        """Return the groups that no batch can hold as things are; none while no trainer is
        registered.
        """
        if self.registration is None or not (self.lines.groups or any(self.buffers.values())):
            return Unfillable()
        batch_size = self.registration.batch_size
        elsewhere = {
            group.size for lease in self.leases.values() for group in lease.groups
        } | self.reference.sizes.keys()
        unfillable = self.posted_sizes.unfillable(
            batch_size, self.registry.by_id, self.lines, self.buffers, elsewhere
        )
        for line in unfillable.lines():
            sizes = unfillable.sizes(line)
            unnamed = {(line, size, batch_size) for size in sizes} - self._named_unfillable
            if unnamed and len(self._named_unfillable) < MAX_NEWS:
                self._named_unfillable |= unnamed
                text = describe_unfillable(self.registry.by_id[line], sizes, batch_size)
                self.news.append(text)
        return unfillable

    def _unfillable_groups(self) -> list[Group]:
        """Return the unfillable groups, the oldest first."""
        unfillable = self.unfillable()
        groups: list[Group] = []
        for line, sizes in unfillable.in_lines.items():
            groups += [group for group in self.lines.by_line[line].values() if group.size in sizes]
        for line, sizes in unfillable.in_buffers.items():
            groups += [group for group in self.buffers[line] if group.size in sizes]
        return sorted(groups, key=lambda group: group.seq)

    def _drop_unfillable(self, n_groups: int, n_bytes: int) -> None:
        if n_groups > 0 or n_bytes > 0:
            n_groups = max(n_groups, self.limits.max_groups // DROPPED_AT_ONCE)
            self._drop_first(self._unfillable_groups(), n_groups, n_bytes, REASON)

    def _useless_reservations(self) -> set[int]:
        """Return the environments whose waiting groups are all unfillable.

        No batch waits for their reserved share.
        """
        unfillable = self.unfillable()
        return {
            line
            for line in unfillable.lines()
            if len(self.lines.by_line.get(line, {}))
            == sum(unfillable.in_lines.get(line, Counter()).values())
        }

    # ---- batches ----

    def next_batch(
        self, now: float, received: int | None = None, uuid: int | None = None
    ) -> Lease | None:
        """Return the next batch for the trainer, or None if none can be made yet.

        A trainer that acknowledges gets the same batch until it has acknowledged it, or passes as
        `received` the highest batch id that it holds. For a trainer that never acknowledges, a
        request for the next batch ends all batches that were sent.

        Raises:
            NotRegisteredError: no trainer has registered.
            SupersededError: `uuid` is not the current registration's.
        """
        registration = self.require_trainer(uuid)
        if not self.started:
            self.started = self._state_changed = True
        if received is not None and not self.acks:
            self.acks = self._state_changed = True
        if (unreceived := self._unreceived_lease(received)) is not None:
            return unreceived
        self._drop_stale()
        for lease in [lease for lease in self.leases.values() if lease.returned]:
            if not any(self._is_stale(group) for group in lease.groups):
                lease.returned = False
                return self._hand_out(lease)
            self._dissolve(lease)
            self._drop_where(self._is_stale, "stale")
        return self._form_batch(registration, now)

    def _unreceived_lease(self, received: int | None) -> Lease | None:
        """Return a lease that the trainer has not got yet, or None.

        Finish the leases that it is done with.
        """
        for lease in [lease for lease in self.leases.values() if not lease.returned]:
            if self.acks:
                if lease.batch_id > (received or 0):
                    return lease
            elif lease.sent:
                self._finish(lease)
            elif not lease.sending:
                return lease  # its answer was never sent in full
        return None

    def _form_batch(self, registration: Registration, now: float) -> Lease | None:
        """Return a new batch of waiting groups.

        Without enough of them, keep the reason in `waiting`.
        """
        useless = self._useless_reservations()
        reservations = {
            env_id: reserved
            for env_id, reserved in self.registry.reservations(registration.batch_size, now).items()
            if env_id not in useless
        }
        groups, reason = self._choose(registration, reservations)
        if groups is None:
            unfillable = self.unfillable()
            stuck = [
                describe_unfillable(
                    self.registry.by_id[line], unfillable.sizes(line), registration.batch_size
                )
                for line in unfillable.lines()
            ]
            reasons = [reason, *stuck, *self._why_empty(registration, now)]
            self.waiting = "; ".join(filter(None, reasons))
            return None
        self.waiting, self.refusals = None, Refusals()
        served: Counter[int] = Counter()
        for group in groups:
            self.lines.remove(group)
            served[group.line] += group.size
        self.registry.charge(served, reservations)
        lease = Lease(self.next_batch_id, sorted(groups, key=lambda group: group.seq))
        self.next_batch_id += 1
        self.leases[lease.batch_id] = lease
        return self._hand_out(lease)

    def _choose(
        self, registration: Registration, reservations: Mapping[int, float]
    ) -> tuple[list[Group] | None, str | None]:
        """Return the groups of a new batch, or None and the reason."""
        if self.lines.total_sequences() < registration.batch_size:
            return (
                None,
                f"{self.lines.total_sequences()} of {registration.batch_size} sequences are queued",
            )
        lines: Mapping[int, Mapping[int, Group]] = self.lines.by_line
        replay, staleness = self.replay, registration.max_staleness
        if not is_plain(replay):
            lines = {
                line: {
                    group.seq: group
                    for group in in_order_of_use(replay, groups.values(), self.next_batch_id)
                }
                for line, groups in lines.items()
            }
        return scheduling.form_batch(
            registration.batch_size,
            lines,
            self.registry.by_id,
            reservations,
            None
            if staleness is None or replay.policy != "fifo"
            else (staleness + 1) * registration.batch_size,
        )

    def _why_empty(self, registration: Registration, now: float) -> list[str | None]:
        """Describe the processes that delay the next batch."""
        at_workers = self.reference.sequences.total()
        if at_workers and self.lines.total_sequences() + at_workers >= registration.batch_size:
            return [
                self.reference.why_waiting(now),
                *self.refusals.describe(),
            ]  # environments have posted a whole batch
        starved = why_starved(self.registry, self.first_env_of_run, self.refusals, now)
        return [self.reference.why_waiting(now), *starved]

    def _hand_out(self, lease: Lease) -> Lease:
        self.current_step += 1
        self._state_changed = True
        self.streams.hand_out(lease.groups)
        self._record_lease(lease)
        return lease

    def sending(self, lease: Lease) -> None:
        """Count an answer that carries the lease and is on its way."""
        lease.sending += 1

    def sent(self, lease: Lease, complete: bool) -> None:
        """Count that answer as over. If it is `complete`, the trainer has the batch."""
        lease.sending = max(0, lease.sending - 1)
        if complete and not lease.sent and self.leases.get(lease.batch_id) is lease:
            lease.sent = True
            self._record_lease(lease)

    def drop_damaged(self, lease: Lease, seqs: Collection[int]) -> int:
        """Drop the groups of a batch whose bodies the store cannot read. The others return to the
        front of their lines.

        Returns:
            Number of dropped groups; 0 if the trainer has acknowledged the batch in the meantime.
        """
        if self.leases.get(lease.batch_id) is not lease:
            return 0
        self.current_step -= 1  # it was never handed out after all
        self._state_changed = True
        self._dissolve(lease)
        return self._drop_where(lambda group: group.seq in seqs, "damaged")

    def _record_lease(self, lease: Lease) -> None:
        record = {"sent": lease.sent, "returned": lease.returned}
        self.changes.records["lease", lease.batch_id] = record
        for group in lease.groups:
            self._note_place(group, lease.batch_id)

    def _remove_lease(self, lease: Lease) -> None:
        del self.leases[lease.batch_id]
        self.changes.records["lease", lease.batch_id] = None

    def _dissolve(self, lease: Lease) -> None:
        """Put the groups of a lease back at the front of their lines, or into the reference queue."""
        self._remove_lease(lease)
        self.streams.put_back(lease.groups)
        self._move(
            lease.groups, lambda group: REFERENCE if self._wants_reference(group) else QUEUED
        )

    # ---- acknowledgements ----

    def ack(
        self,
        batch_id: int | None,
        version: int | None = None,
        uuid: int | None = None,
        skipped: str | None = None,
        keep: bool = False,
    ) -> int:
        """Acknowledge a batch (None: all that the trainer holds). The trainer has learned from it
        and is now at `version`.

        Without a version, each batch counts as one optimizer step. With `skipped`, the reason, the
        trainer could not learn from the batch, and it counts as none. Acknowledging twice does
        nothing more.

        With `keep`, the trainer has not saved what it learned. The batch and those handed out
        before it no longer count as held. They stay for the trainer that registers next, until they
        are acknowledged without `keep`.

        Returns:
            Number of groups that were acknowledged for good.

        Raises:
            NotRegisteredError: no trainer has registered.
            UnknownBatchError: no such batch was ever handed out.
            SupersededError: `uuid` is not the current registration's.
        """
        self.require_trainer(uuid)
        if batch_id is not None:
            self._require_handed_out(batch_id, "acknowledge")
        done = [
            lease
            for lease in self.leases.values()
            if lease.batch_id == batch_id or (batch_id is None and not lease.returned)
        ]
        reached = self.sampling_version()
        new = [
            lease for lease in done if not lease.returned and lease.batch_id > self.learned_up_to
        ]
        steps = 0 if skipped is not None else len(new)
        self.acked_version = max(reached, version if version is not None else reached + steps)
        self.acks = self._state_changed = True
        if keep:
            self.learned_up_to = max([self.learned_up_to, *(lease.batch_id for lease in new)])
            self._drop_stale()
            return 0
        self.batches_skipped += len(done) if skipped is not None else 0
        for lease in done:
            self._finish(lease, learned=skipped is None)
        self._drop_stale()
        return sum(len(lease.groups) for lease in done)

    def _require_handed_out(self, batch_id: int, action: str) -> None:
        if not 1 <= batch_id < self.next_batch_id:
            last = self.next_batch_id - 1
            handed_out = f"the last one was {last}" if last else "no batch was"
            raise UnknownBatchError(
                f"batch {batch_id} was never handed out ({handed_out}); "
                f"{action} the batch_id that came with GET /batch"
            )

    def _finish(self, lease: Lease, learned: bool = True) -> None:
        """End a lease.

        Its groups may be used again if the trainer has learned from them, and are gone if it could
        not.
        """
        self._remove_lease(lease)
        if not learned:
            self._forget(lease.groups)
            return
        self._state_changed = True
        for group in lease.groups:
            self.groups_used += not group.uses
            self.uses += 1
            group.uses += 1
        self._forget([group for group in lease.groups if self._is_used_up(group)])
        again = [group for group in lease.groups if not self._is_used_up(group)]
        self.failures.forget(again)
        self.changes.records |= {("group", group.seq): group for group in again}
        self._move(again, lambda group: QUEUED)

    @property
    def replay(self) -> ReplayOptions:
        """Order and number of uses of each group."""
        return (self.registration and self.registration.replay) or ReplayOptions()

    # ---- batches that end their trainers: see `BatchFailures` ----

    def report_end(self, batch_id: int, error: str | None) -> None:
        """Count a trainer that ends with a batch that it has not acknowledged.

        Args:
            batch_id: of the batch that it trained on.
            error: the error of training on it; None if something else ended the trainer.

        Raises:
            UnknownBatchError: no such batch was ever handed out.
        """
        self._require_handed_out(batch_id, "report")
        lease = self.leases.get(batch_id)
        if lease is None or lease.returned or batch_id in self.failures.reported:
            return
        self.failures.reported.add(batch_id)
        self._state_changed = True
        if error is not None and self._count_failure(lease, ERROR_COUNTS, error):
            self.current_step -= (
                1  # it counts as never handed out, as an answer that did not arrive
            )

    def _count_unreported_end(self, counts: bool) -> None:
        """At a registration, count the batch that the trainer before had in training if that did
        not report its end.
        """
        out = self._out() if counts else []
        if out and out[0].sent and out[0].batch_id not in self.failures.reported:
            reason = "a trainer ended without a report, as by a kill or for want of memory"
            self._count_failure(out[0], KILL_COUNTS, reason)
        self.failures.reported.clear()

    def _count_failure(self, lease: Lease, weight: int, reason: str) -> bool:
        """Count a failure for each group of a batch. Return True if that sets the batch aside."""
        self._state_changed = True
        if not self.failures.count(lease, weight):
            return False
        del self.leases[lease.batch_id]
        lease.returned = True
        self._record_lease(lease)
        self.held_groups -= len(lease.groups)
        self.held_bytes -= sum(group.n_bytes for group in lease.groups)
        for oldest_lease in self.failures.set_aside(lease, reason):
            self.changes.records["lease", oldest_lease.batch_id] = None
            for group in oldest_lease.groups:
                self.changes.remove(group)
            self.streams.forget(oldest_lease.groups)
        return True

    def take_set_aside(self) -> list[str]:
        """Describe the batches that were set aside since the last call, one line each."""
        new, self.failures.new = self.failures.new, []
        batches = [
            self.failures.batches[batch_id] for batch_id in new if batch_id in self.failures.batches
        ]
        lines = []
        for lease, reason in batches:
            names = ", ".join(sorted({self._name_of(group) for group in lease.groups}))
            seqs = ", ".join(str(group.seq) for group in lease.groups)
            lines.append(
                f"batch {lease.batch_id} is set aside, because trainers ended while they trained on it; "
                f"the last time: {reason}. Its groups {seqs} of {names} are handed out no more; "
                f"GET /batch/set-aside?batch_id={lease.batch_id} returns them"
            )
        return lines

    def set_aside(self) -> list[dict[str, Any]]:
        """Return the batches that were set aside, the oldest first."""
        return [
            {
                "batch_id": batch_id,
                "reason": reason,
                "groups": [
                    {
                        "id": group.seq,
                        "environment": self._name_of(group),
                        "sequences": group.size,
                        "longest": group.longest,
                    }
                    for group in lease.groups
                ],
            }
            for batch_id, (lease, reason) in sorted(self.failures.batches.items())
        ]

    def _name_of(self, group: Group) -> str:
        return self.registry.by_id[group.line].wandb_name or "clients that did not register"

    # ---- weight versions ----

    def _out(self) -> list[Lease]:
        """Return the batches that the trainer holds and has not learned from.

        It trains on the first.
        """
        out = [
            lease
            for lease in self.leases.values()
            if not lease.returned and lease.batch_id > self.learned_up_to
        ]
        return sorted(out, key=lambda lease: lease.batch_id)

    def held_ahead(self) -> Counter[int]:
        """Return the sequences, by line, that the trainer has fetched ahead.

        They count as waiting.
        """
        held: Counter[int] = Counter()
        for lease in self._out()[1:]:
            for group in lease.groups:
                held[group.line] += group.size
        return held

    def trainer_version(self) -> int:
        """Return the weight version at which the trainer trains on the next batch."""
        if self.acked_version is None:
            return self.current_step
        return self.acked_version + len(self._out())

    def sampling_version(self) -> int:
        """Return the inference server's weight version, which excludes the batches that the trainer
        still holds.
        """
        if self.acked_version is None:
            return self.current_step - len(self._out())
        return self.acked_version

    def oldest_allowed(self) -> int | None:
        """Return the lowest weight version that may still be handed out; None without a bound."""
        if self.registration is None or self.registration.max_staleness is None:
            return None
        return self.trainer_version() - self.registration.max_staleness

    def _is_stale(self, group: Group) -> bool:
        bound = self.oldest_allowed()
        return bound is not None and group.version < bound

    def _is_of_another_run(self, epoch: int | None, version: int) -> bool:
        """Return True if weights cannot be this run's.

        Without an epoch, these are versions that an earlier trainer had reached and the present one
        has not. The present trainer may be sending one version more than it has acknowledged.
        """
        if epoch is not None:
            return self.epochs.is_foreign(
                epoch, version, self.registration.run if self.registration else None
            )
        return (
            self.former_version is not None
            and self.trainer_version() + 1 < version <= self.former_version
        )

    def _update_versions(self) -> None:
        """Compute the version of every group again, after the weight lineage has changed."""
        for group in self._held():
            group.version = oldest(group.weights, self.epochs.sessions)

    # ---- groups that leave without being learned from ----

    def _drop_stale(self) -> None:
        bound = self.oldest_allowed()
        if bound is not None and (self._pruned_below is None or bound > self._pruned_below):
            self._pruned_below = bound
            self._drop_where(lambda group: group.version < bound, "stale")

    def _drop_where(self, unwanted: Callable[[Group], bool], reason: str) -> int:
        """Drop the unwanted groups among the waiting ones. Return how many."""
        gone = self._take_where(unwanted) + self.reference.remove_where(unwanted)
        self._forget(gone)
        for group in gone:
            self._count_drop(
                "stale_after_use" if group.uses and reason == "stale" else reason, group.longest
            )
        return len(gone)

    def _take_where(self, unwanted: Callable[[Group], bool]) -> list[Group]:
        """Take the unwanted groups out of lines and buffers, and return them."""
        gone = self.lines.remove_where(unwanted)
        for env_id, buffer in self.buffers.items():
            gone += [group for group in buffer if unwanted(group)]
            self.buffers[env_id] = [group for group in buffer if not unwanted(group)]
        return gone

    def _count_drop(self, reason: str, longest: int) -> None:
        self.drops[reason, length_bucket(longest)] += 1
        self._state_changed = True

    def _forget(self, groups: Sequence[Group]) -> None:
        self._state_changed |= self.streams.forget(groups)
        self.failures.forget(groups)
        for group in groups:
            self.changes.remove(group)
            self.held_groups -= 1
            self.held_bytes -= group.n_bytes
