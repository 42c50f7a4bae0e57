"""Find the groups that no batch can hold as things are. Pure: no I/O, no clock.

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

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from atroposlib.service.pending_groups import PendingGroups
from atroposlib.service.records import NOBODY, Environment, Group

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
        supply: sizes of which there is any number.
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

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield each environment with each size of its unfillable groups."""
        for line in self.lines():
            for size in self.sizes(line):
                yield line, size


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
        """Return the sizes of which an environment may post any number."""
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
        f"{sum(sizes.values())} groups of {whose} can be part of no batch of {batch_size} ({listed}): let group_size "
        "divide the trainer's batch_size, and post whole groups; they are dropped when others need their space in the queue"
    )
