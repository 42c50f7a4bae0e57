"""Are groups handed out in the order in which they were posted, and where does the disorder come
from that a load counts?

The load's clients draw an id each and then race to the socket, so ids may arrive out of order
before any server has a say. Three measurements tell the two apart, all with
bench/arrival_recorder.py and the same load:

- the recorder by itself, which does nothing but note arrivals: what it counts is the clients' own
  disorder;
- the recorder in front of a server: the order of hand-out against that of arrival, which no server
  promises to keep for posts that are under way at the same moment;
- there too, pairs (a, b) where b was handed out before a although a had been answered before the
  first byte of b was sent. That is what a client can rely on, and must be none.
"""

from __future__ import annotations

import http.client
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

Start = Callable[[Sequence[str], int, Path], AbstractContextManager[int]]
"""Starts a server: command, port, working directory."""
Load = Callable[[int], dict[str, float]]
"""Puts the load on a port and returns what it printed."""

RECORDER = Path(__file__).resolve().with_name("arrival_recorder.py")


def descents(order: Sequence[int]) -> int:
    """Neighbours in the wrong order: what the load counts as inversions."""
    return sum(before > after for before, after in pairwise(order))


def broken_promises(posts: dict[int, Sequence[float]], handed_out: Sequence[int]) -> int:
    """Pairs (a, b) with b handed out before a although a was answered before b was sent.

    Args:
        posts: id to [first byte sent, last byte sent, answered], in seconds of one clock.
        handed_out: ids in the order in which they were handed out.
    """
    count = 0
    for place, later in enumerate(handed_out):
        answered = posts[later][2]
        count += sum(answered < posts[earlier][0] for earlier in handed_out[:place])
    return count


def analyse(recording: dict[str, Any], count: float) -> dict[str, float]:
    """The figures of one run; `count` is the load's own."""
    posts = {int(number): times for number, times in recording["posts"].items()}
    handed_out: list[int] = recording["handed_out"]
    by_first, by_last = (sorted(posts, key=lambda number: posts[number][which]) for which in (0, 1))
    place = {number: index for index, number in enumerate(by_first)}
    return {
        "load's own count": count,
        "in the arrival of first bytes": descents(by_first),
        "in the arrival of last bytes": descents(by_last),
        "hand-out against first bytes": descents([place[number] for number in handed_out]),
        "answered before the other was sent": broken_promises(posts, handed_out),
    }


def recorded(port: int) -> dict[str, Any]:
    """What a recorder has noted."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/recorded")
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    return found


def run(
    python: str, start: Start, load: Load, port: int, folder: Path, *flags: str
) -> dict[str, float]:
    """One load on a recorder."""
    with start([python, RECORDER, "--port", str(port), *flags], port, folder):
        printed = load(port)
        return analyse(recorded(port), printed["inversions"])


def table(runs: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians, one column for each server."""
    print(f"\n{'inversions, median of the rounds':38}" + "".join(f"{name:>18}" for name in runs))
    for figure in next(iter(runs.values()))[0]:
        cells = (statistics.median(entry[figure] for entry in found) for found in runs.values())
        print(f"{figure:38}" + "".join(f"{cell:18g}" for cell in cells))
