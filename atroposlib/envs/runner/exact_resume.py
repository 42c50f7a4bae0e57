"""Exact resume, the environment's half: which item comes next. Pure.

Items are numbered in the order of `get_next_item`. With weights, seeds and rewards that repeat, whether an item gives a group
is a function of its number and the weights. The rule is that of all items from `begin` on that are not settled, the lowest
comes next, and that no more are in work than groups are missing. Then a batch is made of the first items of the stream that
give a group, whichever was ready first and however often somebody was killed: an item behind those is never begun.
"""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


class ItemWindow:
    """The items of the batch that is being sampled.

    Example:
        window = ItemWindow()
        window.heed({"life": "a", "begin": 4, "settled": [5], "version": 2})
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

    def heed(self, told: Mapping[str, Any]) -> bool:
        """Take over where the service stands.

        Args:
            told: its `life`, which changes when the trainer begins anew somewhere; `begin`, the first item that is in no batch
                yet; `settled`, those from there on whose groups it holds; and `version`, of the trainer's weights.

        Returns:
            Whether this is another window: then what is in work is to be stopped, and nothing of it counts. What gave no group
            with the weights of one window may give one with those of the next.
        """
        anew = (told["life"], told["begin"]) != (self.life, self.first)
        self.life, self.first, self._settled = told["life"], told["begin"], frozenset(told["settled"])
        self.version = told["version"]
        if anew:
            self._done, self._in_work, self._refused = set(), set(), set()
        return anew

    def next_number(self) -> int:
        """The lowest item that is neither settled nor in work."""
        number = self.first
        while number in self._settled or number in self._done or number in self._in_work:
            number += 1
        return number

    def begin(self, number: int) -> None:
        """An item is in work."""
        self._in_work.add(number)

    def refuse(self, number: int) -> None:
        """The service has dropped the item's group, so that the item is not settled when its work ends."""
        self._refused.add(number)

    def give_none(self, number: int, versions: Iterable[int]) -> None:
        """The item gives no group with the weights of these versions. That settles it unless they are older than the trainer's:
        a server that was restarted samples with such until it has those, and no service is asked that would refuse the group.
        """
        if any(version < self.version for version in versions):
            self.refuse(number)

    def finish(self, number: int, done: bool) -> None:
        """An item is in work no longer.

        Args:
            done: it came to its end: its group was posted, or it gives none. If not, it is worked on again.
        """
        self._in_work.discard(number)
        if done and number not in self._refused:
            self._done.add(number)
        self._refused.discard(number)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the order of items the one stands that a task works on.

    Attributes:
        stream: what the service calls the order.
        number: the item's, counted from 0.
        life: of the window in which it was begun.
        window: knows what becomes of it.
    """

    stream: str
    number: int
    life: str | None
    window: ItemWindow


exact_place: ContextVar[Place | None] = ContextVar("exact_place", default=None)
"""With `exact_resume`: the place of the item that the present task works on."""
