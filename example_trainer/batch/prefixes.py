"""What rollouts have in common at their beginning, as a tree of spans of which each is forwarded
once. Pure.

Rollouts of a group begin with the same prompt, and those of several turns may part later than that:

    prompt ─┬─ answer 1
            └─ turn 1 ─┬─ answer 2          four spans in place of three sequences
                       └─ answer 3

A span is split off for those that share it only if it spares them at least LEAST_SAVING tokens
each: every further span is one more run of keys that attention has to gather, and one more ragged
end among its tiles, for all that continue it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from example_trainer.models.packing import NO_PARENT

LEAST_SAVING = 16

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """The tokens from `begin` to `end` of a sequence, and of all that share them.

    Attributes:
        sequence: number of one that holds them.
        begin, end: positions in it.
        parent: number of the span that ends at `begin`, NO_PARENT for a first one.
    """

    sequence: int
    begin: int
    end: int
    parent: int


@dataclass(frozen=True)
class PrefixTree:
    """Sequences as spans. A sequence is the span that it ends in, with all that this one continues.

    Attributes:
        spans: each behind its parent.
        ends: for each sequence, the span that it ends with.
    """

    spans: tuple[Span, ...]
    ends: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens to forward."""
        return sum(span.end - span.begin for span in self.spans)

    @property
    def keys(self) -> int:
        """Keys that the spans see, each its own and those of all that it continues."""
        return sum(span.end for span in self.spans)

    @property
    def pairs(self) -> int:
        """Pairs of a token and one that it attends to."""
        lengths = ((span.begin, span.end - span.begin) for span in self.spans)
        return sum(length * begin + length * (length + 1) // 2 for begin, length in lengths)


def reading_order(tokens: Tokens) -> bytes:
    """Sorts sequences like words in a dictionary, so that what begins alike stands together."""
    return tokens.astype(">u4").tobytes()


def separate(rows: Sequence[Tokens]) -> PrefixTree:
    """Each sequence as a span of its own."""
    return PrefixTree(
        tuple(Span(i, 0, len(row), NO_PARENT) for i, row in enumerate(rows)),
        tuple(range(len(rows))),
    )


def prefix_tree(rows: Sequence[Tokens]) -> PrefixTree:
    """Find what sequences have in common.

    Args:
        rows: [length] each, of at least one token, sorted by `reading_order`.
    """
    common = [_common(one, two) for one, two in pairwise(rows)]
    spans: list[Span] = []
    ends = [NO_PARENT] * len(rows)
    # Sequences first to last - 1 have their first `depth` tokens in `parent` and what it continues.
    # A stack and no recursion: a tree may be as deep as the group is large.
    todo = [(0, len(rows), 0, NO_PARENT)]
    while todo:
        first, last, depth, parent = todo.pop()
        sharers = last - first
        end = min(common[first : last - 1], default=len(rows[first]))
        if sharers == 1 or (end - depth) * (sharers - 1) >= LEAST_SAVING * sharers:
            if end > depth:
                spans.append(Span(first, depth, end, parent))
                depth, parent = end, len(spans) - 1
            while (
                first < last and len(rows[first]) == depth
            ):  # in reading order, what ends here comes first
                ends[first] = parent
                first += 1
        cuts = [first, *(i + 1 for i in range(first, last - 1) if common[i] <= end), last]
        todo += [(a, b, depth, parent) for a, b in reversed(list(pairwise(cuts))) if a < b]
    return PrefixTree(tuple(spans), tuple(ends))


def _common(one: Tokens, two: Tokens) -> int:
    """How many tokens two sequences have in common at their beginning."""
    shorter = min(len(one), len(two))
    different = np.flatnonzero(one[:shorter] != two[:shorter])
    return int(different[0]) if len(different) else shorter
