"""The groups that wait to be handed out, in one first-in-first-out line per environment, with their running totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from atroposlib.api.state import NOBODY, Group


class Lines:
    """Waiting groups. Adding and removing costs the same however many wait."""

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

    def add(self, group: Group) -> bool:
        """Put a group at the end of its line. Returns whether the line was empty."""
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
