"""What the queue holds, how it is stored and restored, and what makes a group too old. See `rollout_queue`."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from atroposlib.service.batch_failures import Failures
from atroposlib.service.environments import Registry
from atroposlib.service.evaluations import Evaluations
from atroposlib.service.fleet import Wishes
from atroposlib.service.pending_groups import Lines, ReferenceStage
from atroposlib.service.records import (
    MISSING,
    NOBODY,
    QUEUED,
    REFERENCE,
    Changes,
    Group,
    Lease,
    Limits,
    NotRegisteredError,
    Receipt,
    Registration,
    Snapshot,
    SupersededError,
    length_bucket,
)
from atroposlib.service.resume_streams import Streams
from atroposlib.service.scheduling import Replay, choose_multiple
from atroposlib.service.starvation import Refusals
from atroposlib.service.weight_epochs import WeightEpochs
from atroposlib.wire.weight_lineage import oldest


class QueueState:
    """The state of one rollout service. Every change to what must be stored is noted in `changes`."""

    def __init__(self, limits: Limits | None = None, snapshot: Snapshot | None = None, now: float = 0.0) -> None:
        self.limits = limits or Limits()
        self._clear()
        if snapshot is not None:
            self._restore(snapshot, now)

    def _clear(self) -> None:
        self.changes = Changes()
        self.registration: Registration | None = None
        self.started = False  # the trainer has asked for its first batch: environments may start
        self.current_step = 0
        self.acked_version: int | None = None
        self.acks = False  # the trainer acknowledges its batches
        self.former_version: int | None = None  # how far an earlier trainer came, if the present one began below that
        self.epochs = WeightEpochs()
        self.ended = False  # the trainer has said that its run is over
        self.first_env_of_run = 0  # environments with a lower id belong to a run that has ended
        self.learned_up_to = 0  # the highest id of a batch that is learned from and kept for the next trainer
        self.uses = 0  # groups in batches that were learned from, each time that one was
        self.groups_used = 0  # those that were learned from at all
        self.batches_skipped = 0  # acknowledged by a trainer that could not learn from them
        self.failures = Failures()
        self.registry = Registry(self.limits)
        self.evaluations = Evaluations()
        self.fleet = Wishes()
        self.streams = Streams()
        self.lines = Lines()
        self.buffers: dict[int, list[Group]] = {}
        self.reference = ReferenceStage()
        self.leases: dict[int, Lease] = {}
        self.keys: OrderedDict[str, Receipt] = OrderedDict()
        self.drops: Counter[tuple[str, int]] = Counter()
        self.next_seq = 0
        self.next_batch_id = 1
        self.held_groups = 0
        self.held_bytes = 0
        self.waiting: str | None = None  # why the last /batch was empty
        self.refusals = Refusals()
        self._pruned_below: int | None = None  # nothing that waits counts as older than this version
        self._state_changed = False

    # ---- what changed, and the way back ----

    def take_changes(self) -> Changes:
        """What changed since the last call."""
        changes, self.changes = self.changes, Changes()
        changes.environments = self.registry.take_changed()
        changes.environments_removed = self.registry.take_forgotten()
        changes.evaluations, changes.evaluations_removed = self.evaluations.take_changed()
        if self.fleet.take_changed() or self._state_changed:
            self._state_changed = False
            changes.state = {
                "registration": asdict(self.registration) if self.registration else None,
                "started": self.started,
                "current_step": self.current_step,
                "acked_version": self.acked_version,
                "acks": self.acks,
                "former_version": self.former_version,
                **self.epochs.stored(),
                "ended": self.ended,
                "first_env_of_run": self.first_env_of_run,
                "learned_up_to": self.learned_up_to,
                "uses": self.uses,
                "groups_used": self.groups_used,
                "batches_skipped": self.batches_skipped,
                "failures": self.failures.stored(),
                "clock": self.registry.clock,
                "name_counts": dict(self.registry.name_counts),
                "next_env_id": self.registry.next_id(),
                "next_seq": self.next_seq,
                "next_batch_id": self.next_batch_id,
                "next_evaluation": self.evaluations.next_id,
                "fleet": self.fleet.stored(),
                "streams": self.streams.stored(),
                "drops": [[reason, bucket, count] for (reason, bucket), count in sorted(self.drops.items())],
            }
        return changes

    def _restore(self, snapshot: Snapshot, now: float) -> None:
        state = snapshot.state
        if state.get("registration"):
            self.registration = Registration(**state["registration"])
        self.started = state.get("started", False)
        self.current_step = state.get("current_step", 0)
        self.acked_version = state.get("acked_version")
        self.acks = state.get("acks", False)
        self.former_version = state.get("former_version")
        self.epochs = WeightEpochs.restored(state)
        self.ended = state.get("ended", False)
        self.learned_up_to = state.get("learned_up_to", 0)
        self.uses = state.get("uses", 0)
        self.groups_used = state.get("groups_used", 0)
        self.batches_skipped = state.get("batches_skipped", 0)
        self.next_batch_id = state.get("next_batch_id", 1)
        self.drops.update({(reason, bucket): count for reason, bucket, count in state.get("drops", [])})
        names, clock = state.get("name_counts", {}), state.get("clock", 0.0)
        self.registry.restore(snapshot.environments, names, clock, now, state.get("next_env_id", 0))
        # A store of an earlier version does not say which run its environments belong to.
        self.first_env_of_run = state.get("first_env_of_run", self.registry.next_id() if self.ended else 0)
        for env_id in self.registry.by_id:
            self.lines.open(env_id)
        for group in snapshot.queued:
            self.lines.add(group)
        for group in snapshot.buffered:
            self.buffers.setdefault(group.line, []).append(group)
        self.reference.add(snapshot.for_reference)
        self.leases = {lease.batch_id: lease for lease in sorted(snapshot.leases, key=lambda lease: lease.batch_id)}
        self.failures = Failures.restored(state.get("failures", {}), self.leases)
        self.keys.update(snapshot.keys)
        self.evaluations.restore(snapshot.evaluations, state.get("next_evaluation", 1))
        self.fleet = Wishes(**state.get("fleet", {}))
        self.streams = Streams(state.get("streams"))
        held = list(self._held())
        self.held_groups, self.held_bytes = len(held), sum(group.n_bytes for group in held)
        self._tell_versions()
        self.next_seq = max([state.get("next_seq", 0), *(group.seq + 1 for group in held)])

    def _held(self) -> Iterator[Group]:
        yield from self.lines
        for buffer in self.buffers.values():
            yield from buffer
        yield from self.reference.waiting.values()
        for lease in self.leases.values():
            yield from lease.groups

    # ---- the trainer ----

    def require_trainer(self, uuid: int | None) -> Registration:
        """The registration that is in force.

        Raises:
            NotRegisteredError: no trainer has registered.
            SupersededError: `uuid` is not the current registration's.
        """
        if self.registration is None:
            raise NotRegisteredError("Trainer not registered. Call /register first.")
        if uuid is not None and uuid != self.registration.uuid:
            raise SupersededError(
                f"another trainer has registered since (its uuid is {self.registration.uuid}, you said {uuid}); "
                "register again to take over"
            )
        return self.registration

    # ---- age ----

    def _out(self) -> list[Lease]:
        """The batches that the trainer holds and has not learned from, the one that it trains on first."""
        out = [lease for lease in self.leases.values() if not lease.returned and lease.batch_id > self.learned_up_to]
        return sorted(out, key=lambda lease: lease.batch_id)

    def trainer_version(self) -> int:
        """The weight version at which the next batch will be trained on."""
        return self.current_step if self.acked_version is None else self.acked_version + len(self._out())

    def held_ahead(self) -> Counter[int]:
        """Sequences by line that the trainer has fetched and does not train on yet: they wait as much as those in the queue."""
        held: Counter[int] = Counter()
        for lease in self._out()[1:]:
            for group in lease.groups:
                held[group.line] += group.size
        return held

    def sampling_version(self) -> int:
        """The weight version that the inference server can be at now: without the batches that the trainer still holds."""
        return self.current_step - len(self._out()) if self.acked_version is None else self.acked_version

    def _tell_versions(self) -> None:
        """The trainer's lives have changed: tell anew what the weights of every group count as."""
        for group in self._held():
            group.version = oldest(group.weights, self.epochs.lives)

    def oldest_allowed(self) -> int | None:
        """The lowest weight version that may still be handed out; None without a bound."""
        if self.registration is None or self.registration.max_staleness is None:
            return None
        return self.trainer_version() - self.registration.max_staleness

    def _is_stale(self, group: Group) -> bool:
        oldest = self.oldest_allowed()
        return oldest is not None and group.version < oldest

    def _any_stale(self, groups: Iterable[Group]) -> bool:
        return any(self._is_stale(group) for group in groups)

    def _drop_stale(self) -> None:
        oldest = self.oldest_allowed()
        if oldest is not None and (self._pruned_below is None or oldest > self._pruned_below):
            self._pruned_below = oldest
            self._drop_where(lambda group: group.version < oldest, "stale")

    def _is_of_another_run(self, epoch: int | None, version: int) -> bool:
        """Whether no weights of this run can be these. Without an epoch: the present trainer has not come so far (by more
        than the one version that it may be sending just now), and an earlier one had."""
        if epoch is not None:
            return self.epochs.is_foreign(epoch, version, self.registration.run if self.registration else None)
        return self.former_version is not None and self.trainer_version() + 1 < version <= self.former_version

    def _drop_where(self, unwanted: Callable[[Group], bool], reason: str) -> int:
        gone = self.lines.remove_where(unwanted) + self.reference.remove_where(unwanted)
        for env_id, buffer in self.buffers.items():
            gone += [group for group in buffer if unwanted(group)]
            self.buffers[env_id] = [group for group in buffer if not unwanted(group)]
        self._forget(gone)
        for group in gone:
            self._count_drop("stale_after_use" if group.uses and reason == "stale" else reason, group.longest)
        return len(gone)

    def _count_drop(self, reason: str, longest: int) -> None:
        self.drops[reason, length_bucket(longest)] += 1
        self._state_changed = True

    def _forget(self, groups: Sequence[Group]) -> None:
        self._state_changed |= self.streams.forget(groups)
        self.failures.forget(groups)
        for group in groups:
            self.changes.removed.append(group.seq)
            self.held_groups -= 1
            self.held_bytes -= group.n_bytes

    def _note_waiting(self, group: Group) -> None:
        """A group joins those that wait. The bound may have been higher before: it falls when a batch is skipped."""
        if self._pruned_below is not None:
            self._pruned_below = min(self._pruned_below, group.version)

    def _queue(self, group: Group) -> None:
        self._note_waiting(group)
        if self.lines.add(group):
            self.registry.wake(group.line)

    def _sort_line(self, line: int) -> None:
        """Older groups have joined a line, or a buffer."""
        self.lines.sort(line)
        if line in self.buffers:
            self.buffers[line].sort(key=lambda group: group.seq)

    def _wants_reference(self, group: Group) -> bool:
        """Return True if a group has to wait for a reference worker."""
        return group.reference == MISSING and self.takes_references()

    def takes_references(self) -> bool:
        """Return True if groups without ref_logprobs wait for a reference worker."""
        return self.registration is not None and self.registration.ref_logprobs_from_workers

    def _is_mis_sized(self, line: int, size: int) -> bool:
        """Return True if a group has another size than its environment, and waits in its buffer until some add up."""
        environment = self.registry.by_id[line]
        return line != NOBODY and environment.connected and size != environment.group_size

    # ---- buffers ----

    def _recombine(self, env_id: int) -> None:
        """Move out of a buffer what adds up to a multiple of the environment's group_size that fits into a batch."""
        unit = self.registry.by_id[env_id].group_size
        limit = max(unit, self.registration.batch_size) if self.registration else unit
        if self.registration and unit > self.registration.batch_size:  # no multiple will ever fit: leave it to the packing
            self._release(env_id, range(len(self.buffers[env_id])))
        while (chosen := choose_multiple([group.size for group in self.buffers[env_id]], unit, limit)) is not None:
            self._release(env_id, chosen)

    def _release(self, env_id: int, positions: Sequence[int]) -> None:
        chosen = set(positions)
        for position, group in enumerate(self.buffers.get(env_id, [])):
            if position in chosen:
                self._queue(group)
                self.changes.moved.append((group.seq, QUEUED))
        self.buffers[env_id] = [group for position, group in enumerate(self.buffers.get(env_id, [])) if position not in chosen]

    # ---- leases ----

    def _note_lease(self, lease: Lease) -> None:
        self.changes.leases.append((lease.batch_id, lease.sent, lease.returned, [group.seq for group in lease.groups]))

    def _finish(self, lease: Lease, learned: bool = True) -> None:
        """A batch is done with. What was learned from it may be used again; what could not be learned from is gone."""
        del self.leases[lease.batch_id]
        self.changes.leases_removed.append(lease.batch_id)
        if not learned:
            self._forget(lease.groups)
            return
        self._state_changed = True
        most = self.replay.max_reuse
        for group in lease.groups:
            self.groups_used += not group.uses
            self.uses += 1
            group.uses += 1
        self._forget([group for group in lease.groups if group.uses >= most])
        again = [group for group in lease.groups if group.uses < most]
        self.failures.forget(again)
        for group in again:
            self._queue(group)
            self.changes.uses.append((group.seq, group.uses))
            self.changes.moved.append((group.seq, QUEUED))
        for line in {group.line for group in again}:
            self._sort_line(line)

    @property
    def replay(self) -> Replay:
        """In which order and how often groups are used."""
        wanted = self.registration.replay if self.registration else None
        return Replay(**(wanted or {}))

    def _dissolve(self, lease: Lease) -> None:
        """Put the groups of a lease back at the front of their lines, or where they wait for a reference."""
        del self.leases[lease.batch_id]
        self.changes.leases_removed.append(lease.batch_id)
        self.streams.put_back(lease.groups)
        for group in lease.groups:
            place = REFERENCE if self._wants_reference(group) else QUEUED
            if place == QUEUED:
                self._queue(group)
            else:
                self._note_waiting(group)
                self.reference.add([group])
            self.changes.moved.append((group.seq, place))
        for line in {group.line for group in lease.groups}:
            self._sort_line(line)
