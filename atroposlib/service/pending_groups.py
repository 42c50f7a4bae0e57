"""Accepted groups that are not handed out yet, and the search for groups that no batch can hold.
Pure: no I/O, no clock of its own.

`PendingGroups` holds one first-in-first-out line per environment. If the trainer wants reference
logprobs, groups first wait in the `ReferenceQueue`, which lends them to reference workers.

A group is lent to a worker for a time, and after that to the next worker. The queue takes the first
answer. The reference has frozen weights, so both answers are the same. Loans are not stored: after
a restart the queue lends all groups again, and still takes the answers of earlier loans.

A batch has exactly batch_size sequences in whole groups. Groups of another size than their
environment's group_size must first add up to a multiple of it. A group is unfillable if no choice
of groups that includes it does so. A choice may use the groups that wait, and any number of each
size that may still come. These sizes are the group_size of every connected environment and every
size among its last REMEMBERED_SIZES groups. Sizes of groups at reference workers and in batches
that are handed out may still come too.

The queue keeps unfillable groups as long as there is space, since another trainer or environment
may make them useful. They do not count as groups that wait for a batch, and reserve no share. A
post that would exceed the queue's bounds replaces them, the oldest first; no other group is dropped
for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from atroposlib.service.records import NOBODY, Environment, Group

IDLE_SECONDS = 30.0
"""A worker without a call for this long counts as silent. If no worker requests waiting groups for
this long, the trainer gets the command that starts one."""
MAX_NAMED = 3
"""Workers that the text for the trainer names."""
MAX_WORKERS = 1024
"""Workers that are remembered; the worker with the longest silence is forgotten first."""
FORGET_SECONDS = 86_400.0
"""Silence after which a worker is forgotten."""
MAX_ANSWERED = 65_536
"""Answered groups that are remembered, so that a worker may send an answer again."""


class WaitingGroups(ABC):
    """Groups that wait, with their numbers by line and size."""

    def __init__(self) -> None:
        self.sequences: Counter[int] = Counter()
        """Sequences that wait, by line."""
        self.sizes: Counter[int] = Counter()
        """Groups that wait, by size."""

    @abstractmethod
    def __iter__(self) -> Iterator[Group]: ...

    @abstractmethod
    def remove(self, group: Group) -> None:
        """Take a group out."""

    def remove_where(self, unwanted: Callable[[Group], bool]) -> list[Group]:
        """Take out all groups that are unwanted, and return them."""
        gone = [group for group in self if unwanted(group)]
        for group in gone:
            self.remove(group)
        return gone

    def _count(self, group: Group, sign: int) -> None:
        """Count a group that comes (1) or goes (-1)."""
        self.sequences[group.line] += sign * group.size
        self.sizes[group.size] += sign
        if not self.sizes[group.size]:
            del self.sizes[group.size]


class PendingGroups(WaitingGroups):
    """Groups that wait for a batch. Adding and removing take the same time for any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.by_line: dict[int, dict[int, Group]] = {NOBODY: {}}
        self.groups = 0
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
        self._count(group, 1)
        return len(line) == 1

    def remove(self, group: Group) -> None:
        """Take a group out of its line."""
        del self.by_line[group.line][group.seq]
        self._count(group, -1)

    def _count(self, group: Group, sign: int) -> None:
        super()._count(group, sign)
        self.groups += sign
        if group.uses:
            self.used_groups += sign
            self.used_bytes += sign * group.n_bytes
        else:
            self.fresh[group.line] += sign * group.size

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


class ReferenceQueue(WaitingGroups):
    """Groups between acceptance and queue."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, Group] = {}
        """By number, in the order of acceptance; those at workers included."""
        self.loans: dict[int, Loan] = {}
        self.workers: OrderedDict[str, Worker] = OrderedDict()
        """The worker that called last is last."""
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
            self._count(group, 1)
            if not in_order:
                self.waiting = dict(sorted(self.waiting.items()))

    def remove(self, group: Group) -> None:
        """Remove a group."""
        del self.waiting[group.seq]
        self.loans.pop(group.seq, None)
        self._count(group, -1)
        if not self.waiting:
            self.idle_since = None

    def __iter__(self) -> Iterator[Group]:
        return iter(self.waiting.values())

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


REMEMBERED_SIZES = 256
"""Groups of an environment whose sizes count as sizes that may still come."""
MAX_SIZES = 32
"""Different sizes that are searched; with more of them, no group counts as unfillable."""
REASON = "fills_no_batch"
"""Under which the queue counts dropped unfillable groups."""


def fillable_sizes(
    waiting: Mapping[int, int], supply: Collection[int], targets: Collection[int]
) -> set[int]:
    """Return the sizes that are part of some sum which is exactly one of the targets.

    Args:
        waiting: how many groups of each size there are.
        supply: sizes with any number of groups.
        targets: sums, all >= 1.
    """
    largest = max(targets, default=0)
    sizes = sorted(
        {size for size, count in waiting.items() if count and size <= largest}
        | {size for size in supply if size <= largest}
    )
    if len(sizes) > MAX_SIZES:
        return set(sizes)
    all_sums = (1 << (largest + 1)) - 1
    target_bits = sum(1 << target for target in set(targets))

    def count_of(size: int) -> int:
        return largest // size if size in supply else min(waiting[size], largest // size)

    def with_copies(sums: int, size: int, count: int) -> int:
        """Set bit s if one of the sums and up to `count` copies of the size add up to s."""
        step = 1
        while count > 0:
            copies = min(step, count)
            sums = (sums | sums << copies * size) & all_sums
            count, step = count - copies, 2 * step
        return sums

    fillable = set()
    for size in sizes:
        sums = 1
        for other in sizes:
            if other != size:
                sums = with_copies(sums, other, count_of(other))
        # At least one copy is part of the sum, so shift by one copy.
        if (with_copies(sums, size, count_of(size) - 1) << size) & target_bits:
            fillable.add(size)
    return fillable


class LastSizes:
    """The sizes of the last groups of an environment."""

    def __init__(self) -> None:
        self._last: deque[int] = deque()
        self._counts: Counter[int] = Counter()

    def note(self, size: int) -> None:
        """Add the size of one more group."""
        self._last.append(size)
        self._counts[size] += 1
        if len(self._last) > REMEMBERED_SIZES:
            oldest = self._last.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def sizes(self) -> set[int]:
        """Return the different sizes."""
        return set(self._counts)


@dataclass(frozen=True, slots=True)
class Unfillable:
    """The unfillable groups of a queue: for each environment, how many there are of each size."""

    in_lines: dict[int, Counter[int]] = field(default_factory=dict)
    in_buffers: dict[int, Counter[int]] = field(default_factory=dict)

    def sizes(self, line: int) -> Counter[int]:
        """Return how many unfillable groups of each size an environment has."""
        return self.in_lines.get(line, Counter()) + self.in_buffers.get(line, Counter())

    def lines(self) -> list[int]:
        """Return the environments that have such groups."""
        return sorted(self.in_lines.keys() | self.in_buffers.keys())

    def sequences(self, line: int) -> int:
        """Return the sequences of an environment's unfillable groups that were never learned from."""
        return sum(size * count for size, count in self.sizes(line).items())


class PostedSizes:
    """The sizes that environments have posted, and the search for groups that these sizes cannot
    fill a batch with.
    """

    def __init__(self) -> None:
        self._by_line: dict[int, LastSizes] = {}
        self._fillable: tuple[Any, set[int]] | None = None

    def add(self, line: int, size: int) -> bool:
        """Add the size of an accepted group.

        Return True if it is new among the environment's last groups.
        """
        last = self._by_line.setdefault(line, LastSizes())
        is_new = size not in last.sizes()
        last.note(size)
        return is_new

    def forget(self, line: int) -> None:
        """Forget the sizes of an environment."""
        self._by_line.pop(line, None)

    def stored(self) -> list[Any]:
        """Return the state to be stored, as JSON."""
        return [[line, sorted(last.sizes())] for line, last in sorted(self._by_line.items())]

    def restore(self, stored: Iterable[Any], held: Iterable[Group]) -> None:
        """Restore what `stored` returned, and add the sizes of the held groups."""
        for line, sizes in stored:
            for size in sizes:
                self.add(line, size)
        for group in held:
            self.add(group.line, group.size)

    def _sizes_to_come(self, environment: Environment) -> set[int]:
        """Return the sizes of groups that an environment may still post in any number."""
        line = environment.env_id
        sizes = self._by_line[line].sizes() if line in self._by_line else set()
        if line == NOBODY:
            return sizes
        return sizes | {environment.group_size} if environment.connected else set()

    def unfillable(
        self,
        batch_size: int,
        environments: Mapping[int, Environment],
        lines: PendingGroups,
        buffers: Mapping[int, Collection[Group]],
        elsewhere: Collection[int],
    ) -> Unfillable:
        """Return the groups that no batch can hold as things are.

        Args:
            batch_size: sequences in a batch.
            environments: by id.
            lines: the groups in the lines of the environments.
            buffers: by environment, the groups that wait until they add up to its group_size.
            elsewhere: sizes of the groups that wait elsewhere and may join a line.
        """
        to_come = {
            line: self._sizes_to_come(environment) for line, environment in environments.items()
        }
        buffered = {group.size for buffer in buffers.values() for group in buffer}
        supply = frozenset(buffered.union(elsewhere, *to_come.values()))
        key = (
            batch_size,
            supply,
            frozenset((size, min(count, batch_size)) for size, count in lines.sizes.items()),
        )
        if self._fillable is None or self._fillable[0] != key:
            self._fillable = (key, fillable_sizes(lines.sizes, supply, [batch_size]))
        fillable = self._fillable[1]
        unfillable = Unfillable()
        if not lines.sizes.keys() <= fillable:
            for line, groups in lines.by_line.items():
                sizes = Counter(
                    group.size for group in groups.values() if group.size not in fillable
                )
                if sizes:
                    unfillable.in_lines[line] = sizes
        for line, buffer in buffers.items():
            sizes = Counter(group.size for group in buffer)
            unit = environments[line].group_size
            targets = range(unit, max(unit, batch_size) + 1, unit)
            useful = (
                fillable_sizes(sizes, to_come[line] - {unit}, targets) & fillable
                if sizes
                else set()
            )
            stuck = Counter({size: count for size, count in sizes.items() if size not in useful})
            if stuck:
                unfillable.in_buffers[line] = stuck
        return unfillable


def describe_unfillable(environment: Environment, sizes: Mapping[int, int], batch_size: int) -> str:
    """Describe the unfillable groups of an environment, with the remedy.

    Args:
        environment: whose groups they are.
        sizes: how many there are of each size.
        batch_size: the trainer's.
    """
    listed = ", ".join(f"{count} of {size} sequences" for size, count in sorted(sizes.items())[:5])
    registered = environment.env_id != NOBODY
    whose = (
        f"{environment.wandb_name} (group_size {environment.group_size})"
        if registered
        else "no environment"
    )
    return (
        f"{sum(sizes.values())} groups of {whose} can be part of no batch of {batch_size} "
        f"({listed}). Let group_size divide the trainer's batch_size, and post whole groups. "
        "They are dropped when others need their space in the queue"
    )
