"""Choice of items by difficulty: the share of right answers, measured while the model trains.

If every answer to an item is right, or every one is wrong, there is nothing to learn. There is most
to learn if half of them are right. The variance of a right-or-wrong reward at success p is p (1 -
p), so the next item is taken with probability

    P(p) = floor + (1 - floor) · 4 p (1 - p)

and skipped otherwise. A `floor` above 0 keeps every item in the stream, so that an item which was
too hard comes back later. An item that was never sampled counts as p = ½ and is always taken.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.errors import EnvironmentFailure
from atroposlib.utils.files import KeptLines
from atroposlib.utils.jsonl import Row, encode_repaired, open_kept_lines, rows_of_lines

logger = logging.getLogger(__name__)

MEMORY = 0.5
"""Weight of earlier answers when new ones come. The model changes, so old answers become less
informative."""
PRIOR = 0.5
"""Right and wrong answers that an item begins with, so that one group of eight right answers is not
certainty."""


@dataclass(frozen=True)
class Difficulty:
    """The answers to an item so far.

    Attributes:
        right: right answers. Each new group halves the count of the earlier ones.
        answers: all answers, counted in the same way.
    """

    right: float = 0.0
    answers: float = 0.0

    @property
    def success(self) -> float:
        """Return the estimated share of right answers: ½ before the first answer."""
        return (self.right + PRIOR) / (self.answers + 2 * PRIOR)

    def after(self, right: int, answers: int) -> "Difficulty":
        """Return the difficulty after another group of answers."""
        return Difficulty(MEMORY * self.right + right, MEMORY * self.answers + answers)


def chance(success: float, floor: float) -> float:
    """Return the probability of taking an item of this success: 1 at one half, `floor` at 0 and 1.

    Args:
        success: from 0 to 1.
        floor: from 0 to 1.
    """
    return floor + (1.0 - floor) * 4.0 * success * (1.0 - success)


def item_key(item: Any) -> str:
    """Return a name for an item that is the same in every run: a hash of its `repr`.

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

    The file holds a line for each group. A line is appended as a whole: a kill loses no earlier
    line, and environments of the same name may share the file. A line that a full disk cut off is
    skipped.

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
                    "curriculum: %d items are known from %s (%d lines could not be read)",
                    len(self.known),
                    path,
                    unread,
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
        """Add a group of answers to an item."""
        self._add(key, right, answers)
        if self._writer is not None:
            self._writer.write(encode_repaired({"item": key, "right": right, "answers": answers}))

    def takes(self, key: str, drawn: float) -> bool:
        """Return whether an item that comes along is sampled.

        Args:
            drawn: at random, from 0 to 1.
        """
        return drawn < chance(self.known.get(key, Difficulty()).success, self.floor)

    def metrics(self) -> dict[str, float]:
        """Return the number of known items, and the shares that are almost always or almost never
        right.
        """
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
        raise EnvironmentFailure(
            f"cannot read {path}: {error.strerror}; name another path as --env.curriculum_path"
        ) from error
