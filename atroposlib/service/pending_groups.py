"""Accepted groups that are not handed out yet. Pure: no I/O, no clock of its own.

`PendingGroups` holds one first-in-first-out line per environment. If the trainer wants reference
logprobs, groups first wait in the `ReferenceQueue`, which lends them to reference workers.

A group is lent to a worker for a time, and after that to the next worker. The queue takes the first
answer. The reference has frozen weights, so both answers are the same. Loans are not stored: after
a restart the queue lends all groups again, and still takes the answers of earlier loans.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from atroposlib.service.records import NOBODY, Group

IDLE_SECONDS = 30.0
"""A worker without a call for this long counts as silent. If no worker requests waiting groups for
this long, the trainer gets the command that starts one."""
MAX_NAMED = 3
"""Workers that the text for the trainer names."""
MAX_WORKERS = 1024
"""Workers that are remembered; the one that was silent for longest is forgotten first."""
FORGET_SECONDS = 86_400.0
"""Silence after which a worker is forgotten."""
MAX_ANSWERED = 65_536
"""Answered groups that are remembered, so that a worker may send an answer again."""


class PendingGroups:
    """Waiting groups. Adding and removing take the same time for any number of them."""

    def __init__(self) -> None:
        self.by_line: dict[int, dict[int, Group]] = {NOBODY: {}}
        self.groups = 0
        self.sequences: Counter[int] = Counter()
        """Sequences that wait in each line."""
        self.sizes: Counter[int] = Counter()
        """How many groups of each size wait."""
        self.fresh: Counter[int] = Counter()
        """Sequences of groups that were never learned from, by line."""
        self.used_groups = 0
        self.used_bytes = 0

    def __iter__(self) -> Iterator[Group]:
        for line in self.by_line.values():
            yield from line.values()

    def total_sequences(self) -> int:
        """Sequences that wait in all lines."""
        return self.sequences.total()

    def open(self, line: int) -> None:
        """Make a line for an environment."""
        self.by_line.setdefault(line, {})

    def close(self, line: int) -> None:
        """Remove the line of an environment, in which nothing waits."""
        self.by_line.pop(line, None)
        for counter in (self.sequences, self.fresh):
            counter.pop(line, None)

    def add(self, group: Group) -> bool:
        """Put a group at the end of its line. Return True if the line was empty."""
        line = self.by_line.setdefault(group.line, {})
        line[group.seq] = group
        self.groups += 1
        self.sequences[group.line] += group.size
        self.sizes[group.size] += 1
        self._count(group, 1)
        return len(line) == 1

    def remove(self, group: Group) -> None:
        """Take a group out of its line."""
        del self.by_line[group.line][group.seq]
        self.groups -= 1
        self.sequences[group.line] -= group.size
        self.sizes[group.size] -= 1
        if not self.sizes[group.size]:
            del self.sizes[group.size]
        self._count(group, -1)

    def _count(self, group: Group, sign: int) -> None:
        if group.uses:
            self.used_groups += sign
            self.used_bytes += sign * group.n_bytes
        else:
            self.fresh[group.line] += sign * group.size

    def remove_where(self, unwanted: Callable[[Group], bool]) -> list[Group]:
        """Take out all groups that are unwanted, and return them."""
        gone = [group for group in self if unwanted(group)]
        for group in gone:
            self.remove(group)
        return gone

    def sort(self, line: int) -> None:
        """Put a line back into the order of acceptance, after older groups have returned to it."""
        self.by_line[line] = dict(sorted(self.by_line[line].items()))


@dataclass(slots=True)
class Worker:
    """A reference worker that has called."""

    name: str
    model: str = ""
    """The model of its last request; empty if it has requested none since the service started."""
    seen: float = 0.0
    answered: int = 0
    """Groups for which its answer was taken."""


@dataclass(slots=True)
class Loan:
    """A group at a worker."""

    worker: str
    until: float
    lengths: list[int] = field(default_factory=list)
    """Tokens of each sequence, once the body was read."""


class ReferenceQueue:
    """Groups between acceptance and queue."""

    def __init__(self) -> None:
        self.waiting: dict[int, Group] = {}
        """By number, in the order of acceptance; those at workers included."""
        self.loans: dict[int, Loan] = {}
        self.workers: OrderedDict[str, Worker] = OrderedDict()
        """The worker that called last is last."""
        self.sequences: Counter[int] = Counter()
        """Sequences that wait, by line."""
        self.sizes: Counter[int] = Counter()
        """Groups that wait, by size."""
        self.answered = 0
        """Groups that got their reference since the service started."""
        self.unusable = 0
        """Groups for which a worker could compute none, in that time."""
        self.expired = 0
        """Loans that ran out, in that time."""
        self.idle_since: float | None = None
        """Time of the last request of a worker, or of the first check without one. None while
        nothing waits."""
        self._recently: OrderedDict[int, None] = OrderedDict()

    def add(self, groups: Iterable[Group]) -> None:
        """Add groups. They may be older than groups that wait already."""
        for group in groups:
            in_order = not self.waiting or group.seq > next(reversed(self.waiting))
            self.waiting[group.seq] = group
            self.sequences[group.line] += group.size
            self.sizes[group.size] += 1
            if not in_order:
                self.waiting = dict(sorted(self.waiting.items()))

    def remove(self, group: Group) -> None:
        """Remove a group."""
        del self.waiting[group.seq]
        self.loans.pop(group.seq, None)
        self.sequences[group.line] -= group.size
        self.sizes[group.size] -= 1
        if not self.sizes[group.size]:
            del self.sizes[group.size]
        if not self.waiting:
            self.idle_since = None

    def remove_where(self, unwanted: Callable[[Group], bool]) -> list[Group]:
        """Take out all groups that are unwanted, and return them."""
        gone = [group for group in self.waiting.values() if unwanted(group)]
        for group in gone:
            self.remove(group)
        return gone

    def lend(
        self, name: str, model: str, max_tokens: int, seconds: float, now: float
    ) -> list[Group]:
        """Lend a worker the oldest free groups, with at most `max_tokens` tokens together, but at
        least one group.
        """
        self.note_call(name, now).model = model
        self.idle_since = now if self.waiting else None
        chosen: list[Group] = []
        for seq, group in self.waiting.items():
            loan = self.loans.get(seq)
            if loan is not None and now < loan.until:
                continue
            if chosen and group.tokens > max_tokens:
                break
            self.expired += loan is not None
            self.loans[seq] = Loan(name, now + seconds)
            chosen.append(group)
            max_tokens -= group.tokens
            if max_tokens <= 0:
                break
        return chosen

    def take_back(self, seq: int) -> None:
        """End the loan of a group, so that the next worker can have it."""
        self.loans.pop(seq, None)

    def answer(self, name: str, group: Group, computed: bool, now: float) -> None:
        """Take a worker's answer for a group. `computed` is False if there can be no reference."""
        self.remove(group)
        self.note_call(name, now).answered += 1
        self.answered += computed
        self.unusable += not computed
        self._recently[group.seq] = None
        if len(self._recently) > MAX_ANSWERED:
            self._recently.popitem(last=False)

    def was_answered(self, seq: int) -> bool:
        """Return True if an answer for this group is among the remembered ones."""
        return seq in self._recently

    def note_call(self, name: str, now: float) -> Worker:
        """Remember a worker and the time of its call."""
        worker = self.workers.setdefault(name, Worker(name))
        worker.seen = now
        self.workers.move_to_end(name)
        while (
            len(self.workers) > MAX_WORKERS
            or now - next(iter(self.workers.values())).seen > FORGET_SECONDS
        ):
            self.workers.popitem(last=False)
        return worker

    def lent(self, now: float) -> int:
        """Return the number of groups on loans that have not run out."""
        return sum(now < loan.until for loan in self.loans.values())

    def why_waiting(self, now: float) -> str | None:
        """Return the reason why groups wait here, for a trainer without a batch; None if none wait."""
        if not self.waiting:
            return None
        if self.idle_since is None:
            self.idle_since = now
        text = f"{len(self.waiting)} groups wait for ref_logprobs"
        idle = now - self.idle_since
        if lent := self._holders(now):
            more = (
                "" if len(lent) <= MAX_NAMED else f", and at {len(lent) - MAX_NAMED} more workers"
            )
            return f"{text}; {', '.join(lent[:MAX_NAMED])}{more}"
        if idle < IDLE_SECONDS:
            return text
        last = f" ({next(reversed(self.workers))} was the last one)" if self.workers else ""
        return (
            f"{text}, and no reference worker has asked for any for {idle:.0f} s{last}: start one "
            "(python -m example_trainer.reference_worker), or train without --ref-logprobs-from-workers"
        )

    def _holders(self, now: float) -> list[str]:
        """Describe the workers that have groups, the longest silent one first."""
        loans: dict[str, list[Loan]] = {}
        for loan in self.loans.values():
            if now < loan.until:
                loans.setdefault(loan.worker, []).append(loan)
        sentences = []
        for worker in self.workers.values():
            if worker.name not in loans:
                continue
            text = f"{len(loans[worker.name])} are at worker {worker.name}"
            if (silent := now - worker.seen) >= IDLE_SECONDS:
                left = max(loan.until for loan in loans[worker.name]) - now
                text += f", which has sent nothing for {silent:.0f} s; they go to another worker in {left:.0f} s"
            sentences.append(text)
        return sentences
