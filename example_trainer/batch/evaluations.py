"""Results of evaluations, as environments report them to the rollout service.

    training ── ask ──► thread: GET /evaluations?after=… ──► take ── training writes them into its logs

No step waits for them: what has not come when one ends is taken at the end of another.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
from httpx import codes

from atroposlib.web.connections import direct_client

logger = logging.getLogger(__name__)

_REQUEST_SECONDS = 10.0
_CLOSE_SECONDS = 12.0
_NOT_OFFERED = (codes.NOT_FOUND, codes.METHOD_NOT_ALLOWED)


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation that an environment made.

    Attributes:
        id: the rollout service's number for it; later ones have higher ones.
        time: when the service got it, in Unix seconds; with `id` it identifies evaluations across
            services.
        env_id: the service's number for the environment; None if unknown.
        name: of the environment or its evaluation.
        weight_version: of the weights that were evaluated; None if unknown.
        metrics: finite numbers by name.
        weight_epoch: which life of the trainer made those weights, for after a resume the same
            versions come again; None if unknown.
    """

    id: int
    time: float
    env_id: int | None
    name: str
    weight_version: int | None
    metrics: Mapping[str, float]
    weight_epoch: int | None = None

    @property
    def key(self) -> tuple[int, float]:
        """A pair that identifies the evaluation, also across services."""
        return self.id, self.time

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> Evaluation:
        """Read an entry of the service's answer.

        Raises:
            KeyError, TypeError, ValueError, AttributeError, OverflowError: it is something else.
        """
        env_id, version, epoch = (
            None if entry.get(name) is None else int(entry[name])
            for name in ("env_id", "weight_version", "weight_epoch")
        )
        return cls(
            int(entry["id"]),
            float(entry["time"]),
            env_id,
            str(entry["name"]),
            version,
            {str(name): value for name, value in entry["metrics"].items() if _is_number(value)},
            epoch,
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class EvaluationFeed:
    """Asks the rollout service for new results, in a thread of its own.

    A service without the route (the original wire) is asked once. One that is away, or answers
    something else, is asked again with the next step; each kind of failure is logged once.

    Args:
        url: of the service.
        api_key: bearer token, if it asks for one.
        seen: keys of the evaluations that the run has written down, in their order.
        first_epoch: the weight epoch of the run's first trainer. Results of weights with a lower
            one are another run's.
        only_new: the run begins now, and what the service has already is another run's.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        seen: Sequence[tuple[int, float]] = (),
        first_epoch: int = 0,
        only_new: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self._http = direct_client(self.url, _REQUEST_SECONDS, api_key)
        self._seen = set(seen)
        self._first_epoch = first_epoch
        self._last = next(reversed(seen), None)  # key of the last one in the service's answers
        self._arrived: queue.SimpleQueue[Evaluation] = queue.SimpleQueue()
        self._told: set[str] = set()  # kinds of failures that the log names
        self._changed = threading.Condition()
        """Guards what follows."""
        self._asked = self._answered = 0
        self._over = False  # closed, or there is nothing to be had
        if only_new:
            self._read()
            self.take()
        self._thread = threading.Thread(target=self._run, name="evaluations", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Look for new results; returns at once."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def take(self, seconds: float = 0.0) -> list[Evaluation]:
        """Return the evaluations that came since the last call, oldest first.

        Args:
            seconds: how long to wait for the answer to the last `ask`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._answered >= self._asked, seconds)
        arrived = []
        while not self._arrived.empty():
            arrived.append(self._arrived.get())
        return arrived

    def close(self) -> None:
        """End the thread and the connection."""
        self._end()
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():  # else its request would end in an error of its own
            self._http.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._over and self._answered >= self._asked:
                    self._changed.wait(_CLOSE_SECONDS)
                if self._over:
                    return
                number = self._asked
            self._read()
            with self._changed:
                self._answered = number
                self._changed.notify_all()

    def _read(self) -> None:
        """Ask once, and again from the beginning if the service no longer has its last entry: it
        was restarted empty, and numbers from the beginning.
        """
        last = self._last
        try:
            keys = self._request(0 if last is None else last[0] - 1)
            if keys is not None and last is not None and last not in keys:
                self._request(0)
        except Exception as error:  # noqa: BLE001 - named in the log; the thread and the training go on
            self._warn(_kind(error), f"{type(error).__name__}: {error}")

    def _request(self, after: int) -> set[tuple[int, float]] | None:
        """Put what is new among the evaluations behind this id where `take` finds it. The keys of
        all entries; None if the service has no evaluations."""
        response = self._http.get("/evaluations", params={"after": after})
        if response.status_code in _NOT_OFFERED:
            logger.info("The rollout service at %s has no route for evaluations", self.url)
            self._end()
            return None
        response.raise_for_status()
        entries = list(orjson.loads(response.content)["evaluations"])
        keys = set()
        for entry in entries:
            try:
                evaluation = Evaluation.parse(entry)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                self._warn("entry", f"this is none: {entry}")
                continue
            keys.add(evaluation.key)
            self._last = evaluation.key
            if (
                evaluation.key not in self._seen
                and not 0 < (evaluation.weight_epoch or 0) < self._first_epoch
            ):
                self._seen.add(evaluation.key)
                self._arrived.put(evaluation)
        return keys

    def _warn(self, kind: str, reason: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            logger.warning(
                "Evaluations from %s could not be read: %s",
                self.url,
                " ".join(reason.split())[:200],
            )

    def _end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()


def _kind(error: Exception) -> str:
    """Return the kind of a failure: failures of one kind differ in words alone."""
    status = f" {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else ""
    return type(error).__name__ + status
