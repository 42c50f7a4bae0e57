"""The rollout service's state and every rule about it. Pure: no I/O, no clock of its own, no threads.

Groups come in with `add`, wait in one first-in-first-out line per environment, and leave in batches with `next_batch`.
Each method changes the state and notes what it changed; `take_changes` hands those notes over, to be stored in one
transaction. `RolloutQueue(limits, snapshot)` builds the same state from what was stored. Sizes and shares are in
sequences unless a name says groups; versions are weight versions (numbers of optimizer steps); `now` is in seconds of a
clock that never goes back.

Which groups make a batch is decided in `scheduling`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from atroposlib.service import scheduling
from atroposlib.service.evaluations import Evaluations
from atroposlib.service.forgetting import Forgetting
from atroposlib.service.intake import Intake
from atroposlib.service.records import Environment, Group, Lease, Registration, UnknownBatchError
from atroposlib.service.set_aside import SettingAside
from atroposlib.service.starvation import Refusals, why_starved
from atroposlib.service.weight_epochs import WeightEpochs
from atroposlib.wire.weight_lineage import Life


class RolloutQueue(Intake, SettingAside, Forgetting):
    """Queue, buffers, leases and registrations of one rollout service."""

    # ---- the trainer ----

    def give_epoch(self, asked: int, run: str | None) -> int:
        """Give a weight epoch to a trainer that starts; see `WeightEpochs.give`."""
        self._state_changed = True
        return self.epochs.give(asked, run)

    def register(self, registration: Registration, lives: Sequence[Life] = ()) -> int:
        """A trainer registers, for the first time or again: it takes over, and batches that were leased wait for it.

        What another run has sampled is dropped: all groups, if the registration is another run's. If the trainer names its
        weight epoch: groups of epochs that are not its run's, and groups that count as older than version 0 (see `lives`).
        If it does not: groups sampled at a version that it has not reached. Of a batch that was out, only stated weights
        count.

        Args:
            registration: the trainer's. Its `weight_epoch` becomes the one that the service counts it as.
            lives: the trainers of its run, as it knows them.

        Returns:
            How many groups were dropped for that.
        """
        old, reached = self.registration, self.trainer_version()
        another_run = old is not None and old.is_another_run(registration)
        if old is not None and registration.starting_step < reached:
            self.former_version = max(reached, self.former_version or 0)
        elif another_run:
            self.former_version = None
        self._session_ended(counts=not another_run)
        self.epochs.register(registration, lives, another_run)
        self._tell_versions()
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

        def ahead(group: Group) -> bool:
            if not self.epochs.lives:
                return group.version > registration.starting_step
            return group.version < 0 or (group.stated and any(self._is_of_another_run(*weights) for weights in group.weights))

        def used_up(group: Group) -> bool:
            return group.uses >= self.replay.max_reuse

        other_reference = old is not None and old.reference != registration.reference
        if other_reference:
            self._forget_references()
        for lease in list(self.leases.values()):
            foreign = (
                another_run
                or any(self._wants_reference(group) or used_up(group) for group in lease.groups)
                or any(group.stated and ahead(group) for group in lease.groups)
            )
            if foreign or old is None or old.batch_size != registration.batch_size:
                self._dissolve(lease)
            else:  # a new record, so that an answer that is still on its way to the old trainer cannot mark it
                self.leases[lease.batch_id] = Lease(lease.batch_id, lease.groups, returned=True)
                self._note_lease(self.leases[lease.batch_id])
        held = self.held_groups
        if another_run:
            self._drop_where(lambda group: True, "another_run")
        if another_run or (old is None and registration.run is not None and not registration.starting_step):
            self.evaluations.clear()  # a run that begins has measured nothing yet
        self._drop_where(ahead, "ahead_of_trainer")
        dropped = held - self.held_groups
        self._drop_where(lambda group: group.size > registration.batch_size, "larger_than_batch")
        self._drop_where(used_up, "used_up")
        self._drop_stale()
        self._move_by_reference()
        for env_id in list(self.buffers):
            self._recombine(env_id)
        self.streams.rewind(registration.uuid, registration.positions, [*self._held(), *self.failures.groups()])
        return dropped

    def next_batch(self, now: float, received: int | None = None, uuid: int | None = None) -> Lease | None:
        """The next batch for the trainer, or None if none can be made yet.

        A trainer that acknowledges gets the same batch until it has, or passes as `received` the highest batch id that
        it holds. A trainer that never acknowledges is taken to be done with all that was sent when it asks again.

        Raises:
            NotRegisteredError: no trainer has registered.
            SupersededError: `uuid` is not the current registration's.
        """
        registration = self.require_trainer(uuid)
        if not self.started:
            self.started = self._state_changed = True
        if received is not None and not self.acks:
            self.acks = self._state_changed = True
        for lease in [lease for lease in self.leases.values() if not lease.returned]:
            if self.acks:
                if lease.batch_id > (received or 0):
                    return lease
            elif lease.sent:
                self._finish(lease)
            elif not lease.sending:
                return lease  # the answer that carried it never got out
        self._drop_stale()
        for lease in [lease for lease in self.leases.values() if lease.returned]:
            if not self._any_stale(lease.groups):
                lease.returned = False
                return self._hand_out(lease)
            self._dissolve(lease)
            self._drop_where(self._is_stale, "stale")
        useless = self.useless_reservations()
        reservations = {
            env_id: reserved
            for env_id, reserved in self.registry.reservations(registration.batch_size, now).items()
            if env_id not in useless
        }
        groups, reason = self._choose(registration, reservations)
        if groups is None:
            self.waiting = "; ".join(filter(None, [reason, *self.why_unfillable(), *self._why_empty(registration, now)]))
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

    def _why_empty(self, registration: Registration, now: float) -> list[str | None]:
        """Describe who is to bring the groups of the next batch."""
        at_workers = self.reference.sequences.total()
        if at_workers and self.lines.total_sequences() + at_workers >= registration.batch_size:
            return [self.reference.why_waiting(now), *self.refusals.describe()]  # environments have posted a whole batch
        starved = why_starved(self.registry, self.first_env_of_run, self.refusals, now)
        return [self.reference.why_waiting(now), *starved]

    def _choose(self, registration: Registration, reservations: Mapping[int, float]) -> tuple[list[Group] | None, str | None]:
        """Return the groups of a new batch, or None and the reason."""
        if self.lines.total_sequences() < registration.batch_size:
            return None, f"{self.lines.total_sequences()} of {registration.batch_size} sequences are queued"
        lines: Mapping[int, Mapping[int, Group]] = self.lines.by_line
        replay, staleness = self.replay, registration.max_staleness
        if not replay.is_plain:
            lines = {
                line: {group.seq: group for group in replay.ordered(groups.values(), self.next_batch_id)}
                for line, groups in lines.items()
            }
        return scheduling.form_batch(
            registration.batch_size,
            lines,
            self.registry.by_id,
            reservations,
            None if staleness is None or replay.policy != "fifo" else (staleness + 1) * registration.batch_size,
        )

    def _hand_out(self, lease: Lease) -> Lease:
        self.current_step += 1
        self._state_changed = True
        self.streams.hand_out(lease.groups)
        self._note_lease(lease)
        return lease

    def sending(self, lease: Lease) -> None:
        """An answer that carries the lease is on its way."""
        lease.sending += 1

    def sent(self, lease: Lease, complete: bool) -> None:
        """That answer is over; `complete` says whether all of it went out."""
        lease.sending = max(0, lease.sending - 1)
        if complete and not lease.sent and self.leases.get(lease.batch_id) is lease:
            lease.sent = True
            self._note_lease(lease)

    def drop_damaged(self, lease: Lease, seqs: Collection[int]) -> int:
        """The store cannot read the bodies of some of a batch's groups any more: those are gone, and the others go back to
        the front of their lines. Returns how many are gone; none, if somebody has acknowledged the batch meanwhile."""
        if self.leases.get(lease.batch_id) is not lease:
            return 0
        self.current_step -= 1  # it was never handed out after all
        self._state_changed = True
        self._dissolve(lease)
        return self._drop_where(lambda group: group.seq in seqs, "damaged")

    def ack(
        self,
        batch_id: int | None,
        version: int | None = None,
        uuid: int | None = None,
        skipped: str | None = None,
        keep: bool = False,
    ) -> int:
        """The trainer has learned from a batch (None: from all that it holds) and is now at `version`.

        Without a version, each batch counts as one optimizer step. With `skipped`, the reason, the trainer could not learn
        from it, and it counts as none. Acknowledging twice does nothing more.

        With `keep` it is so too, but what was learned is not saved yet: the batch, and those handed out before it, no longer
        count as held, and stay for the trainer that registers next, until they are acknowledged without.

        Returns:
            How many groups that was.

        Raises:
            NotRegisteredError: no trainer has registered.
            UnknownBatchError: no such batch was ever handed out.
            SupersededError: `uuid` is not the current registration's.
        """
        self.require_trainer(uuid)
        if batch_id is not None and not 1 <= batch_id < self.next_batch_id:
            raise UnknownBatchError(
                f"batch {batch_id} was never handed out (the last one was {self.next_batch_id - 1}); "
                "acknowledge the batch_id that came with GET /batch"
            )
        if batch_id is None:
            done = [lease for lease in self.leases.values() if not lease.returned]
        else:
            done = [self.leases[batch_id]] if batch_id in self.leases else []
        reached = self.sampling_version()
        new = [lease for lease in done if not lease.returned and lease.batch_id > self.learned_up_to]
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

    def end(self, uuid: int) -> None:
        """End the trainer's run, for it and for all environments that are registered.

        The next start of a service begins another run. Environments that register from now on wait for the next trainer.

        Raises:
            NotRegisteredError: no trainer has registered.
            SupersededError: `uuid` is not the current registration's.
        """
        self.require_trainer(uuid)
        self.ended = self._state_changed = True
        self.first_env_of_run = self.registry.next_id()
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
        """Register a new environment; None while there is no trainer that takes batches.

        That is so before a trainer has asked for its first batch, and between the end of a run and the next trainer.
        Among environments that serve one stream of items, a new one replaces the one before.
        """
        if self.registration is None or not self.started or self.ended:
            return None
        self.make_space_for_environment(now, stream)
        if stream is not None:
            for former in self.registry.serving(stream):
                self.disconnect_env(former)
            self.streams.open(stream, self.registration.positions)
        environment = self.registry.add(desired_name, weight, group_size, max_token_length, allocation, now)
        environment.stream = stream
        self.lines.open(environment.env_id)
        self._state_changed = True
        return environment

    def disconnect_env(self, env_id: int) -> None:
        """An environment leaves; what it posted stays, and what waited in its buffer joins the queue."""
        self.registry.disconnect(env_id)
        self._release(env_id, range(len(self.buffers.get(env_id, []))))

    def status_env(self, env_id: int, now: float, process: str = "") -> dict[str, Any]:
        """What an environment needs to know to pace itself.

        Both queue sizes are in groups of the environment's own group_size, rounded down: that is the unit in which it
        counts its work, whatever the size of the groups that others post. What waits for a reference is among them, and so is
        what the trainer has fetched ahead, or an environment that bounds how many batches are ahead of it would be trained on
        one version later.

        Raises:
            UnknownEnvironmentError: not registered here (any more); the environment should register again.
        """
        environment = self.registry.get(env_id)
        unit = environment.group_size
        run_ended = env_id < self.first_env_of_run
        if not run_ended:  # an environment that leaves now must not count as one that fills the next run's batches
            self.registry.touch(env_id, now, process)
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
            **({"stream": self._stream_of(environment)} if environment.stream is not None else {}),
        }

    def _stream_of(self, environment: Environment) -> dict[str, Any] | None:
        """Where its stream of items stands; and `inexact`, why the run cannot be resumed exactly, where that is so."""
        told = self.streams.told(environment.stream or "")
        if told is not None:
            told["version"] = self.trainer_version()
        if told is not None and not self.replay.is_plain:
            replay = f"{self.replay.policy}, each group in up to {self.replay.max_reuse} batches"
            told["inexact"] = f"the trainer replays ({replay}): start it without --replay and --max-reuse"
        elif told is not None and (others := self.registry.beside(environment.env_id)):
            names = ", ".join(other.wandb_name for other in others)
            told["inexact"] = f"{names} fills batches too, and time decides how much of them: let one environment run alone"
        return told

    def groups_wanted(self, env_id: int, now: float) -> int:
        """How many more groups of its group_size this environment should have under way, those being sampled included.

        With a staleness bound: as many as can still be handed out before they are too old, shared by weight. Without:
        as many as the queue has room for. What was learned from already does not count: new groups take its place.
        """
        unfillable = self.unfillable()
        giving_way = self.lines.used_groups + sum(sum(unfillable.sizes(line).values()) for line in unfillable.lines())
        room = max(0, self.limits.max_groups - self.held_groups + giving_way)
        if self.registration is None or self.registration.max_staleness is None:
            return room
        batches = self.registration.max_staleness + 1 - (self.trainer_version() - self.sampling_version())
        waiting = self.lines.fresh + self.reference.sequences
        for line, buffer in self.buffers.items():
            waiting[line] += sum(group.size for group in buffer)
        for line in unfillable.lines():
            waiting[line] -= min(waiting[line], unfillable.sequences(line))
        for group in [group for lease in self.leases.values() if lease.returned for group in lease.groups if not group.uses]:
            waiting[group.line] += group.size
        wanted = scheduling.apportion(
            max(0, batches) * self.registration.batch_size, waiting, self.registry.active(now), self.limits.max_groups
        )
        return min(room, wanted.get(env_id, 0))

    def evaluated(self, now: float, **result: Any) -> int:
        """An environment has measured something; see `Evaluations.add`. Returns the evaluation's id."""
        self.registry.touch(result["env_id"], now)
        self._state_changed = True  # ids go on, also when all of them are gone
        return self.evaluations.add(**result)

    def reset(self) -> None:
        """Forget everything, registrations included."""
        next_evaluation, last_epoch = self.evaluations.next_id, self.epochs.last
        self._clear()
        self.epochs = WeightEpochs(last_epoch)
        self.evaluations = Evaluations(next_evaluation)
        self.changes.wipe = True
        self._state_changed = True
