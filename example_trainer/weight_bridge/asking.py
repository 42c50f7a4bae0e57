"""Asking several servers at the same time, so that none keeps another one waiting.

`at_once` asks each in a thread of its own, and goes on without those that are late. An answer that
comes later is dropped; the thread ends with its request, whose own deadline is that of the server's
client.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from example_trainer.errors import BridgeError

T = TypeVar("T")

_POLL_SECONDS = 0.1
_TICK_SECONDS = 1.5


class Late(BridgeError):
    """A server that the others did not wait for any longer."""


class RunningClock:
    """Seconds for which this process has run. What passes while it is stopped, or its machine
    sleeps, is held against nobody.

    Whoever asks it does so again and again, and is never longer between two looks than
    `_TICK_SECONDS`. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._now = 0.0

    def now(self) -> float:
        """Never goes back."""
        with self._lock:
            looked, self._looked = self._looked, time.monotonic()
            self._now += min(self._looked - looked, _TICK_SECONDS)
            return self._now


@dataclass
class Answers(Generic[T]):
    """What came back from servers that were asked at the same time, by their addresses."""

    ok: dict[str, T] = field(default_factory=dict)
    failed: dict[str, BridgeError] = field(default_factory=dict)


def at_once(
    calls: Mapping[str, Callable[[], T]],
    limit: float,
    patience: float | None = None,
    enough: Callable[[Mapping[str, T]], bool] = bool,
    lost: Callable[[], Mapping[str, str]] = dict,
    clock: RunningClock | None = None,
) -> Answers[T]:
    """Do all calls at the same time, each in a thread.

    Args:
        calls: by a server's address.
        limit: seconds after which nobody is waited for.
        patience: seconds for which the rest is waited for, after the last answer that came; None:
            until `limit`.
        enough: whether the answers so far suffice to go on without the rest, once they are late.
        lost: those that are known not to answer any more, with the reason.
        clock: the caller's, if it has one.

    Raises:
        Exception: what a call raised that is no BridgeError.
    """
    results: queue.SimpleQueue[tuple[str, T | None, BaseException | None]] = queue.SimpleQueue()

    def work(url: str, call: Callable[[], T]) -> None:
        try:
            results.put((url, call(), None))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            results.put((url, None, error))

    for url, call in calls.items():
        threading.Thread(target=work, args=(url, call), name=f"asks {url}", daemon=True).start()
    answers: Answers[T] = Answers()
    waiting = set(calls)
    clock = clock or RunningClock()
    now = last = clock.now()
    end = now + limit
    while waiting:
        try:
            url, value, error = results.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            now = clock.now()
            answers.failed |= {
                url: Late(f"{url} {reason}") for url, reason in lost().items() if url in waiting
            }
            waiting -= answers.failed.keys()
            if now >= end:
                answers.failed |= {
                    url: Late(f"{url} did not answer within {limit:g} s") for url in waiting
                }
            elif patience is not None and now - last >= patience and enough(answers.ok):
                answers.failed |= {
                    url: Late(f"{url} is {now - last:.0f} s behind the others") for url in waiting
                }
            waiting -= answers.failed.keys()
            continue
        if url not in waiting:
            continue
        waiting.discard(url)
        last = clock.now()
        if error is None:
            answers.ok[url] = value  # type: ignore[assignment]
        elif isinstance(error, BridgeError):
            answers.failed[url] = error
        else:
            raise error
    return answers
