"""Which items are worth sampling: by how often the model got them right, measured while it trains.

Where every answer to an item is right, or every one is wrong, there is nothing to learn; most is where the model is right half
of the time. The variance of a right-or-wrong reward at success p is p (1 - p), so an item that comes along is taken with

    P(p) = floor + (1 - floor) · 4 p (1 - p)

and passed over otherwise. `floor` above 0 keeps every item in the stream, so that one which was too hard is found again when it
no longer is. One that was never sampled counts as p = ½ and is always taken.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.errors import EnvironmentFailure
from atroposlib.utils.jsonl import Row, encode_repaired, open_kept_lines, rows_of_lines
from atroposlib.utils.whole_files import KeptLines

logger = logging.getLogger(__name__)

MEMORY = 0.5
"""What earlier answers count when new ones come: the model changes, so what it could do ten batches ago says little."""
PRIOR = 0.5
"""Answers of either kind that an item begins with: one group of eight right ones is not taken for certainty."""


@dataclass(frozen=True)
class Difficulty:
    """What is known of an item.

    Attributes:
        right: answers that were right, those of earlier groups halved each time.
        answers: all answers, likewise.
    """

    right: float = 0.0
    answers: float = 0.0

    @property
    def success(self) -> float:
        """The share that is right, as far as is known: ½ before the first answer."""
        return (self.right + PRIOR) / (self.answers + 2 * PRIOR)

    def after(self, right: int, answers: int) -> "Difficulty":
        """With another group of answers."""
        return Difficulty(MEMORY * self.right + right, MEMORY * self.answers + answers)


def chance(success: float, floor: float) -> float:
    """The probability with which an item of this success is taken: 1 at one half, `floor` at 0 and 1.

    Args:
        success: from 0 to 1.
        floor: from 0 to 1.
    """
    return floor + (1.0 - floor) * 4.0 * success * (1.0 - success)


def item_key(item: Any) -> str:
    """A name for an item that is the same in every run: a hash of its `repr`.

    Raises:
        EnvironmentFailure: the `repr` holds an address, so it is another in every run.
    """
    text = repr(item)
    if " at 0x" in text:
        raise EnvironmentFailure(
            f"--env.curriculum: an item's repr says where in memory it lies ({text:.80}), so it is not known again after a "
            "restart: define item_key(item), or make items of plain values or dataclasses"
        )
    return hashlib.sha256(text.encode("utf-8", errors="backslashreplace")).hexdigest()[:16]


class Curriculum:
    """The measured difficulty of items, and the file that keeps it.

    The file holds a line for each group, appended as a whole, so a kill costs nothing that was written, and environments of the
    same name may share it. A line that the end of a disk cut off is passed over.

    Args:
        floor: see `chance`.
        path: of the file, which is read if it exists; None to keep nothing.
    """

    def __init__(self, floor: float, path: Path | None = None):
        self.floor = floor
        self.known: dict[str, Difficulty] = {}
        self._writer: KeptLines | None = None
        if path is not None:
            unread = sum(not self._read(row.value) for row in rows_of(path))
            if self.known or unread:
                logger.info(
                    "curriculum: %d items are known from %s (%d lines could not be read)", len(self.known), path, unread
                )
            self._writer = open_kept_lines(path)

    def _read(self, group: Any) -> bool:
        try:
            key, right, answers = str(group["item"]), int(group["right"]), int(group["answers"])
        except (ValueError, TypeError, KeyError, OverflowError):
            return False
        if not 0 <= right <= answers:
            return False
        self._add(key, right, answers)
        return True

    def _add(self, key: str, right: int, answers: int) -> None:
        self.known[key] = self.known.get(key, Difficulty()).after(right, answers)

    def note(self, key: str, right: int, answers: int) -> None:
        """A group of answers to an item."""
        self._add(key, right, answers)
        if self._writer is not None:
            self._writer.write(encode_repaired({"item": key, "right": right, "answers": answers}))

    def takes(self, key: str, drawn: float) -> bool:
        """Whether an item that comes along is sampled.

        Args:
            drawn: at random, from 0 to 1.
        """
        return drawn < chance(self.known.get(key, Difficulty()).success, self.floor)

    def metrics(self) -> dict[str, float]:
        """Of the items that are known: how many, and the shares that are next to always right, and next to never."""
        shares = [difficulty.success for difficulty in self.known.values()]
        if not shares:
            return {}
        return {
            "train/curriculum_items": float(len(shares)),
            "train/curriculum_easy": sum(share > 0.9 for share in shares) / len(shares),
            "train/curriculum_hard": sum(share < 0.1 for share in shares) / len(shares),
        }


def rows_of(path: Path) -> Iterator[Row]:
    """Return the rows of a file; none if it does not exist.

    Raises:
        EnvironmentFailure: it cannot be read.
    """
    try:
        return rows_of_lines(path.read_bytes(), path)
    except FileNotFoundError:
        return iter(())
    except OSError as error:
        raise EnvironmentFailure(f"cannot read {path}: {error.strerror}; name another path as --env.curriculum_path") from error
