"""Exact resume, the environment's half: which item comes next. Without I/O.

- Items are numbered in the order of `get_next_item`. With weights, seeds and rewards that repeat,
  item number and weights decide whether an item gives a group.
- The lowest of all unsettled items from `begin` on comes next. No more items are in work than
  groups are missing.
- So a batch holds the first items of the stream that give a group. Neither the order in which they
  finish nor a killed process changes this, and no item behind them is ever begun.
"""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


class ResumeWindow:
    """The items of the batch that is being sampled.

    Example:
        window = ResumeWindow()
        window.update({"life": "a", "begin": 4, "settled": [5], "version": 2})
        window.next_number()  # 4, and after window.begin(4): 6
    """

    def __init__(self) -> None:
        self.life: str | None = None
        self.first = 0
        self.version = 0
        self._settled: frozenset[int] = frozenset()
        self._done: set[int] = set()
        self._in_work: set[int] = set()
        self._refused: set[int] = set()

    def update(self, position: Mapping[str, Any]) -> bool:
        """Take over the service's position in the stream of items.

        Args:
            position: `life`, which changes when the trainer starts again at another step; `begin`,
                the first item that is in no batch yet. Also `settled`, later items whose groups the
                service holds, and `version`, the version of the trainer's weights.

        Returns:
            True if the window has changed. The caller then stops all items in work, and nothing of
            them counts. An item without a group under the old weights may give one under the new
            weights.
        """
        changed = (position["life"], position["begin"]) != (self.life, self.first)
        self.life, self.first, self._settled = (
            position["life"],
            position["begin"],
            frozenset(position["settled"]),
        )
        self.version = position["version"]
        if changed:
            self._done, self._in_work, self._refused = set(), set(), set()
        return changed

    def next_number(self) -> int:
        """Return the lowest item that is neither settled nor in work."""
        number = self.first
        while number in self._settled or number in self._done or number in self._in_work:
            number += 1
        return number

    def begin(self, number: int) -> None:
        """Record that an item is in work."""
        self._in_work.add(number)

    def refuse(self, number: int) -> None:
        """Record that the service dropped the item's group.

        The item is then not settled when its work ends.
        """
        self._refused.add(number)

    def mark_without_group(self, number: int, versions: Iterable[int]) -> None:
        """Record that an item gives no group, sampled with weights of these versions.

        This settles the item, except if a version is older than the trainer's. A restarted server
        samples with old weights until it has received the present ones, and without a group the
        service cannot refuse the item.
        """
        if any(version < self.version for version in versions):
            self.refuse(number)

    def finish(self, number: int, done: bool) -> None:
        """Record that an item is no longer in work.

        Args:
            done: True if its group was posted, or if it gives none. False: it will be worked on
                again.
        """
        self._in_work.discard(number)
        if done and number not in self._refused:
            self._done.add(number)
        self._refused.discard(number)


@dataclass(frozen=True, slots=True)
class ItemPosition:
    """The position of one item in the order of items.

    Attributes:
        stream: the service's name of the order.
        number: the item's number, from 0.
        life: `ResumeWindow.life` at the moment when the item was begun.
        window: the window that records the outcome.
    """

    stream: str
    number: int
    life: str | None
    window: ResumeWindow


current_item: ContextVar[ItemPosition | None] = ContextVar("current_item", default=None)
"""With `exact_resume`: the position of the item that the present task works on."""
