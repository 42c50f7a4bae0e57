"""Groups that no batch can hold as things are: which they are, how they are named, and when they are dropped. Pure.

A batch has exactly batch_size sequences in whole groups, and groups of another size than their environment's first have to
add up to a multiple of that (`queue_state`). A group is unfillable if no choice of groups does so with it: of those that wait,
and of any number of each size that may still come. These are the group_size of every connected environment and every size
among its last REMEMBERED_SIZES groups. Groups at reference workers and in batches that are handed out count as sizes that may
still come.

Unfillable groups are kept as long as there is space, since another trainer or environment may make them useful. They do not
count as groups that wait for a batch, and reserve no share. A post that would exceed the queue's bounds takes their place, the
oldest's first; no other group is dropped for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from atroposlib.service.queue_state import QueueState
from atroposlib.service.records import NOBODY, Changes, Group, Snapshot

REMEMBERED_SIZES = 256
"""Groups of an environment whose sizes count as sizes that may still come."""
MOST_SIZES = 32
"""Different sizes up to which groups are looked at; with more of them, none counts as unfillable."""
MOST_NEWS = 64
"""Lines for the log about one trainer's batches."""
DROPPED_AT_ONCE = 100
"""The queue's bound divided by this is the least number of unfillable groups that are dropped at a time."""
REASON = "fills_no_batch"


def fillable_sizes(waiting: Mapping[int, int], supply: Collection[int], targets: Collection[int]) -> set[int]:
    """Return the sizes that are part of some sum which is exactly one of the targets.

    Args:
        waiting: how many groups of each size there are.
        supply: sizes of which there is any number.
        targets: sums, all >= 1.
    """
    most = max(targets, default=0)
    sizes = sorted(
        {size for size, count in waiting.items() if count and size <= most} | {size for size in supply if size <= most}
    )
    if len(sizes) > MOST_SIZES:
        return set(sizes)
    everything = (1 << (most + 1)) - 1
    wanted = sum(1 << target for target in set(targets))

    def count_of(size: int) -> int:
        return most // size if size in supply else min(waiting[size], most // size)

    def with_copies(sums: int, size: int, count: int) -> int:
        """Bit s of the result: some of the sums and up to so many copies of the size add up to s."""
        step = 1
        while count > 0:
            copies = min(step, count)
            sums = (sums | sums << copies * size) & everything
            count, step = count - copies, 2 * step
        return sums

    found = set()
    for size in sizes:
        sums = 1
        for other in sizes:
            if other != size:
                sums = with_copies(sums, other, count_of(other))
        # One copy at least: the sums with it begin one copy further up.
        if (with_copies(sums, size, count_of(size) - 1) << size) & wanted:
            found.add(size)
    return found


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


class FillingBatches(QueueState):
    """Finds unfillable groups."""

    def _clear(self) -> None:
        super()._clear()
        self.sizes_posted: dict[int, LastSizes] = {}
        self.news: list[str] = []  # lines for the log of the service
        self._named_unfillable: set[tuple[int, int, int]] = set()
        self._fillable: tuple[Any, set[int]] | None = None

    def take_changes(self) -> Changes:
        """Take the changes since the last call, the sizes that may still come among them."""
        changes = super().take_changes()
        if changes.state is not None:
            changes.state["sizes_posted"] = [[line, sorted(last.sizes())] for line, last in sorted(self.sizes_posted.items())]
        return changes

    def _restore(self, snapshot: Snapshot, now: float) -> None:
        super()._restore(snapshot, now)
        for line, sizes in snapshot.state.get("sizes_posted", []):
            for size in sizes:
                self._note_size(line, size)
        for group in sorted(self._held(), key=lambda group: group.seq):  # a store of an earlier version does not hold the sizes
            self._note_size(group.line, group.size)
        self._state_changed = False

    def _note_size(self, line: int, size: int) -> None:
        """Note the size of a group that was accepted."""
        last = self.sizes_posted.setdefault(line, LastSizes())
        self._state_changed |= size not in last.sizes()
        last.note(size)

    def _sizes_to_come(self, line: int) -> set[int]:
        """Sizes of which an environment may post any number."""
        environment = self.registry.by_id[line]
        sizes = self.sizes_posted[line].sizes() if line in self.sizes_posted else set()
        if line == NOBODY:
            return sizes
        return sizes | {environment.group_size} if environment.connected else set()

    def unfillable(self) -> Unfillable:
        """Return the groups that no batch can hold as things are; none while no trainer is registered."""
        if self.registration is None or not (self.lines.groups or any(self.buffers.values())):
            return Unfillable()
        batch_size = self.registration.batch_size
        for line in self.sizes_posted.keys() - self.registry.by_id.keys():  # of environments that were forgotten
            del self.sizes_posted[line]
        to_come = {line: self._sizes_to_come(line) for line in self.registry.by_id}
        elsewhere = {group.size for lease in self.leases.values() for group in lease.groups}
        elsewhere |= self.reference.sizes.keys()
        elsewhere |= {group.size for buffer in self.buffers.values() for group in buffer}
        supply = frozenset(set[int]().union(elsewhere, *to_come.values()))
        key = (batch_size, supply, frozenset((size, min(count, batch_size)) for size, count in self.lines.sizes.items()))
        if self._fillable is None or self._fillable[0] != key:
            self._fillable = (key, fillable_sizes(self.lines.sizes, supply, [batch_size]))
        fillable = self._fillable[1]
        found = Unfillable()
        if not self.lines.sizes.keys() <= fillable:
            for line, groups in self.lines.by_line.items():
                sizes = Counter(group.size for group in groups.values() if group.size not in fillable)
                if sizes:
                    found.in_lines[line] = sizes
        for line, buffer in self.buffers.items():
            sizes = Counter(group.size for group in buffer)
            unit = self.registry.by_id[line].group_size
            targets = range(unit, max(unit, batch_size) + 1, unit)
            useful = fillable_sizes(sizes, to_come[line] - {unit}, targets) & fillable if sizes else set()
            stuck = Counter({size: count for size, count in sizes.items() if size not in useful})
            if stuck:
                found.in_buffers[line] = stuck
        self._note_news(found, batch_size)
        return found

    def _note_news(self, found: Unfillable, batch_size: int) -> None:
        for line in found.lines():
            for size in found.sizes(line):
                if (line, size, batch_size) not in self._named_unfillable and len(self._named_unfillable) < MOST_NEWS:
                    self._named_unfillable.add((line, size, batch_size))
                    self.news.append(self._describe_unfillable(line, found))

    def why_unfillable(self) -> list[str]:
        """Return a sentence for each environment, for the trainer that gets no batch."""
        found = self.unfillable()
        return [self._describe_unfillable(line, found) for line in found.lines()]

    def _describe_unfillable(self, line: int, found: Unfillable) -> str:
        environment, batch_size = self.registry.by_id[line], self.registration.batch_size if self.registration else 0
        sizes = found.sizes(line)
        listed = ", ".join(f"{count} of {size} sequences" for size, count in sorted(sizes.items())[:5])
        whose = f"{environment.wandb_name} (group_size {environment.group_size})" if line != NOBODY else "no environment"
        return (
            f"{sum(sizes.values())} groups of {whose} can be part of no batch of {batch_size} ({listed}): let group_size "
            "divide the trainer's batch_size, and post whole groups; they are dropped when others need their space in the queue"
        )

    def useless_reservations(self) -> set[int]:
        """Return the environments whose groups that wait are all unfillable: no batch waits for their reserved share."""
        found = self.unfillable()
        return {
            line
            for line in found.lines()
            if len(self.lines.by_line.get(line, {})) == sum(found.in_lines.get(line, Counter()).values())
        }

    def _unfillable_groups(self) -> Iterator[Group]:
        """The unfillable groups, the oldest first."""
        found = self.unfillable()
        groups: list[Group] = []
        for line, sizes in found.in_lines.items():
            groups += [group for group in self.lines.by_line[line].values() if group.size in sizes]
        for line, sizes in found.in_buffers.items():
            groups += [group for group in self.buffers[line] if group.size in sizes]
        yield from sorted(groups, key=lambda group: group.seq)

    def _drop_unfillable(self, groups: int, size: int) -> None:
        """Drop unfillable groups, so many or of so many bytes if there are as many."""
        if groups <= 0 and size <= 0:
            return
        groups = max(groups, self.limits.max_groups // DROPPED_AT_ONCE)
        dropped: set[int] = set()
        for group in self._unfillable_groups():
            if groups <= 0 and size <= 0:
                break
            dropped.add(group.seq)
            groups, size = groups - 1, size - group.n_bytes
        if dropped:
            self._drop_where(lambda group: group.seq in dropped, REASON)
