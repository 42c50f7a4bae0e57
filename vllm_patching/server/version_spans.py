"""Which weights each token of a running request was sampled with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Weights(NamedTuple):
    """Names one set of weights.

    Attributes:
        epoch: the life of the trainer that made them (Unix milliseconds of its start); 0: the
            checkpoint's, before any trainer.
        version: the number of optimizer steps behind them. A trainer that resumes counts on from
            its checkpoint, so the version may go back where the epoch goes on.
    """

    epoch: int
    version: int


class Span(NamedTuple):
    """Consecutive tokens that were sampled with the same weights."""

    weights: Weights
    tokens: int


class VersionSpans:
    """Follows requests across weight updates.

    An update happens while the engine is paused, so the tokens that left the engine before a
    certain moment are those of the old weights. They may reach their requests much later, on a busy
    server; so a switch waits for the first output that left the engine after that moment, and
    counts then.

    One moment does for all replicas of a server: before the first of them goes on, all have said
    that they stand still, and what a replica sampled until then it sent before it said so. So the
    tokens of the old weights come before any of the new.
    """

    def __init__(self, version: int = 0, epoch: int = 0) -> None:
        """
        Args:
            version, epoch: of the weights that are served at first.
        """
        self.weights = Weights(epoch, version)
        self._switches: dict[str, list[tuple[Weights, int | None]]] = {}
        self._known: set[str] = set()
        self._pending: list[tuple[float, Weights]] = []

    @property
    def version(self) -> int:
        """Of the weights with which tokens are counted now."""
        return self.weights.version

    def start(self, request_id: str) -> None:
        """A request is about to be handed to the engine."""
        self._switches[request_id] = []

    def known(self, request_id: str) -> None:
        """The engine's front end knows the request: from now on it is among those counted, until it
        has ended.
        """
        if request_id in self._switches:
            self._known.add(request_id)

    def switch_at(self, moment: float, new: Weights) -> None:
        """What leaves the engine after `moment` (time.monotonic, seconds) is of the weights `new`."""
        self._pending.append((moment, new))
        if not self._switches:
            self.outputs_of(moment, dict)

    def outputs_of(self, moment: float, tokens_so_far: Callable[[], Mapping[str, int]]) -> None:
        """Outputs that left the engine at `moment` are about to be handed on.

        Args:
            tokens_so_far: counts the output tokens of every request that has not ended; asked only
                if a switch is due.
        """
        while self._pending and self._pending[0][0] <= moment:
            _, new = self._pending.pop(0)
            self.switch(new, tokens_so_far())

    def switch(self, new: Weights, tokens_so_far: Mapping[str, int]) -> None:
        """The weights change to `new`; `tokens_so_far` counts the output tokens of every running
        request.
        """
        old, self.weights = self.weights, new
        for request_id, switches in self._switches.items():
            if request_id in tokens_so_far:
                switches.append((old, tokens_so_far[request_id]))
            elif request_id in self._known:
                switches.append(
                    (old, None)
                )  # it has ended, and nobody has fetched its result yet: all of it is old

    def finish(self, request_id: str, num_tokens: int) -> list[Span]:
        """The spans of a finished request in the order in which they were served; their lengths add
        up to `num_tokens`.
        """
        spans: list[Span] = []
        covered = 0
        self._known.discard(request_id)
        for weights, until in self._switches.pop(request_id, []):
            count = num_tokens if until is None else until
            if count > covered:
                spans.append(Span(weights, count - covered))
                covered = count
        if num_tokens > covered or not spans:
            spans.append(Span(self.weights, num_tokens - covered))
        return spans

    def forget(self, request_id: str) -> None:
        """A request ended without a result."""
        self._known.discard(request_id)
        self._switches.pop(request_id, None)
