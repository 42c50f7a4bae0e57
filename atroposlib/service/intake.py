"""How groups get into the queue: checked, counted, and put where they wait. See `rollout_queue`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from atroposlib.service.records import (
    BUFFERED,
    COMPUTED,
    GIVEN,
    MISSING,
    QUEUED,
    REFERENCE,
    BatchTooSmallError,
    Draft,
    Group,
    OtherModelError,
    QueueFullError,
    Receipt,
)
from atroposlib.service.unfillable import FillingBatches
from atroposlib.wire.weight_lineage import oldest


class Intake(FillingBatches):
    """What happens to a group before it is in its line."""

    def check(self, drafts: Sequence[Draft]) -> None:
        """Refuse what cannot be accepted, before anything of it is.

        Raises:
            BatchTooSmallError: a group holds more sequences than a batch.
            QueueFullError: the queue is at its bound.
        """
        batch_size = self.registration.batch_size if self.registration else None
        new = [(index, draft) for index, draft in enumerate(drafts) if draft.key is None or draft.key not in self.keys]
        for index, draft in new:
            if batch_size is not None and draft.size > batch_size:
                raise BatchTooSmallError(index, draft.size, batch_size)
        drafts = [draft for _, draft in new]
        groups = self.held_groups - self.lines.used_groups + len(drafts)
        size = self.held_bytes - self.lines.used_bytes + sum(len(draft.body) for draft in drafts)
        if groups <= self.limits.max_groups and size <= self.limits.max_bytes:
            return
        unfillable = list(self._unfillable_groups())  # they give way
        groups, size = groups - len(unfillable), size - sum(group.n_bytes for group in unfillable)
        if groups <= self.limits.max_groups and size <= self.limits.max_bytes:
            return
        waiting = self.lines.fresh.total() + self.reference.sequences.total() - sum(group.size for group in unfillable)
        if waiting < 2 * (batch_size or 0) and not any(
            self._is_mis_sized(self.registry.line_of(draft.env_id), draft.size) for draft in drafts
        ):
            return  # what is held cannot fill two batches: a bound that small must not starve the trainer
        raise QueueFullError(
            f"the queue holds {self.held_groups} groups in {self.held_bytes} bytes; its bounds are {self.limits.max_groups} "
            f"groups and {self.limits.max_bytes} bytes: post again when the trainer has taken some"
        )

    def add(self, draft: Draft, now: float) -> Receipt:
        """Accept one group, which has passed `check`. The same idempotency key again gives the first answer again."""
        if draft.key is not None and draft.key in self.keys:
            return self.keys[draft.key]
        self.registry.note_post(draft.env_id, now)
        present = self.epochs.present
        said = [(None if epoch is None else self.epochs.counted(epoch), version) for epoch, version in draft.weights]
        weights = tuple((present if epoch is None else epoch, version) for epoch, version in said)
        weights = weights or ((present, self.sampling_version()),)
        counts_as, bound = oldest(weights, self.epochs.lives), self.oldest_allowed()
        foreign = [(version, epoch) for epoch, version in said if self._is_of_another_run(epoch, version)]
        if foreign:
            self._count_drop("another_run", draft.longest)
            receipt = Receipt("dropped", reason=self._why_foreign(*foreign[-1]))
        elif bound is not None and counts_as < bound:
            self._count_drop("stale", draft.longest)
            reached = f"{counts_as}" if (counts_as in (v for _, v in weights)) else f"{counts_as} (an earlier trainer's)"
            reason = f"stale: sampled at weight version {reached}, but the trainer takes none below {bound} now"
            receipt = Receipt("dropped", reason=reason)
        else:
            receipt = self.streams.refusal(draft) or self._accept(draft, weights, counts_as)
        if receipt.status == "dropped":
            self.refusals.note_drop(receipt.reason or "")
        if draft.key is not None:
            self.keys[draft.key] = receipt
            self.changes.keys_added.append((draft.key, receipt))
            if len(self.keys) > self.limits.max_keys:
                self.changes.keys_removed.append(self.keys.popitem(last=False)[0])
        return receipt

    def _why_foreign(self, version: int, epoch: int | None) -> str:
        whose = "which an earlier trainer had reached" if epoch is None else f"of weight epoch {epoch}, not of this run"
        return (
            f"another run: sampled at weight version {version}, {whose}; this one is at {self.sampling_version()}. "
            "Does the inference server have its weights?"
        )

    def _accept(self, draft: Draft, weights: tuple[tuple[int, int], ...], version: int) -> Receipt:
        line = self.registry.line_of(draft.env_id)
        group = Group(
            self.next_seq,
            line,
            draft.size,
            draft.longest,
            len(draft.body),
            weights,
            stated=bool(draft.weights),
            version=version,
            tokens=draft.tokens,
            reference=GIVEN if draft.referenced else MISSING,
        )
        self._state_changed |= self.streams.add(draft, group.seq)
        self.next_seq += 1
        self.held_groups += 1
        self.held_bytes += group.n_bytes
        self.registry.accepted(line)
        self._note_size(line, draft.size)
        place = self._place_of(group)
        self.changes.added.append((group, draft.body, place))
        self._enter(group, place)
        self._make_room()
        if place != BUFFERED:
            return Receipt("received")
        return Receipt("buffered", buffer_size=sum(group.size for group in self.buffers[line]))

    def _make_room(self) -> None:
        """Beyond the bounds, new groups take the place of unfillable ones, and then of those that were learned from: first of
        those that were most often."""
        used_groups, used_bytes = self.lines.used_groups, self.lines.used_bytes
        self._drop_unfillable(
            self.held_groups - used_groups - self.limits.max_groups, self.held_bytes - used_bytes - self.limits.max_bytes
        )
        groups, size = self.held_groups - self.limits.max_groups, self.held_bytes - self.limits.max_bytes
        if not self.lines.used_groups or (groups <= 0 and size <= 0):
            return
        replaced = set()
        for group in sorted((group for group in self.lines if group.uses), key=lambda group: (-group.uses, group.seq)):
            if groups <= 0 and size <= 0:
                break
            replaced.add(group.seq)
            groups, size = groups - 1, size - group.n_bytes
        self._drop_where(lambda group: group.seq in replaced, "replaced")

    def _place_of(self, group: Group) -> int:
        """Where a group has to wait that is in no batch."""
        if self._wants_reference(group):
            return REFERENCE
        return BUFFERED if self._is_mis_sized(group.line, group.size) else QUEUED

    def _enter(self, group: Group, place: int) -> None:
        if place == QUEUED:
            self._queue(group)
            return
        self._note_waiting(group)
        if place == REFERENCE:
            self.reference.add([group])
            return
        self.buffers.setdefault(group.line, []).append(group)
        self._recombine(group.line)

    # ---- the reference stage ----

    def lend_references(self, worker: str, model: str, max_tokens: int, seconds: float, now: float) -> list[Group]:
        """Groups for a reference worker, none if there are none for it now.

        Args:
            worker: its name.
            model: whose logprobs it computes.
            max_tokens: tokens of all sequences of all groups; a group that has more comes alone.
            seconds: after which they may go to another worker.
            now: see the module `rollout_queue`.

        Raises:
            OtherModelError: the trainer's reference is another model.
        """
        if self.registration is None or not self.takes_references():
            self.reference.heard_of(worker, now).model = model
            return []
        if model != self.registration.reference_model:
            raise OtherModelError(worker, model, self.registration.reference_model)
        self._drop_stale()
        return self.reference.lend(worker, model, max_tokens, seconds, now)

    def take_references(self, worker: str, answers: Mapping[int, bytes | None], now: float) -> None:
        """A reference worker has answered, and the groups go on to the queue. Those that wait for no answer stay as they are.

        Args:
            worker: whose answers they are. It need not have the groups on loan: the first answer is taken.
            answers: by number, the group's body, now with ref_logprobs; None if there can be none for it.
            now: see the module `rollout_queue`.
        """
        lines = set()
        for seq, body in answers.items():
            group = self.reference.waiting.get(seq)
            if group is None:
                continue
            self.reference.answer(worker, group, body is not None, now)
            group.reference = GIVEN if body is None else COMPUTED
            self.changes.reference.append((seq, group.reference))
            if body is not None:
                self.held_bytes += len(body) - group.n_bytes
                group.n_bytes = len(body)
                self.changes.referenced.append((seq, body))
            lines.add(group.line)
            self._move(group)
        for line in lines:
            self._sort_line(line)

    def drop_unreadable(self, seqs: Collection[int]) -> int:
        """The store cannot read the bodies of some groups that wait for a reference: those are gone. Returns how many."""
        return self._drop_where(lambda group: group.seq in seqs, "damaged")

    def _forget_references(self) -> None:
        """What workers have computed is of another reference than this trainer's."""
        for group in self._held():
            if group.reference == COMPUTED:
                group.reference = MISSING
                self.changes.reference.append((group.seq, MISSING))

    def _move_by_reference(self) -> None:
        """A trainer has registered, who wants references or wants none: groups move to where they now wait."""
        if not self.takes_references():
            moving = self.reference.remove_where(lambda group: True)
        else:
            moving = self.lines.remove_where(self._wants_reference)
            for env_id, buffer in self.buffers.items():
                moving += [group for group in buffer if self._wants_reference(group)]
                self.buffers[env_id] = [group for group in buffer if not self._wants_reference(group)]
        for group in moving:
            self._move(group)
        for line in {group.line for group in moving}:
            self._sort_line(line)

    def _move(self, group: Group) -> None:
        place = self._place_of(group)
        self.changes.moved.append((group.seq, place))
        self._enter(group, place)
