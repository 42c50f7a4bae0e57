"""Which weight version each token of a running request was sampled under."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Span = tuple[int, int]
"""(weight version, number of consecutive tokens sampled under it)."""


class VersionSpans:
    """Follows requests across weight updates.

    An update happens while the engine is paused, so the tokens that left the engine before a certain moment are those of the
    old version. They may reach their requests much later, on a busy server; so a switch waits for the first output that left
    the engine after that moment, and counts then.
    """

    def __init__(self, version: int = 0) -> None:
        """
        Args:
            version: the one served at first.
        """
        self.version = version
        self._switches: dict[str, list[tuple[int, int | None]]] = {}
        self._known: set[str] = set()
        self._pending: list[tuple[float, int, int]] = []

    def start(self, request_id: str) -> None:
        """A request is about to be handed to the engine."""
        self._switches[request_id] = []

    def known(self, request_id: str) -> None:
        """The engine's front end knows the request: from now on it is among those counted, until it has ended."""
        if request_id in self._switches:
            self._known.add(request_id)

    def switch_at(self, moment: float, old: int, new: int) -> None:
        """What leaves the engine after `moment` (time.monotonic, seconds) is of version `new`, what left before, of `old`."""
        self._pending.append((moment, old, new))
        if not self._switches:
            self.outputs_of(moment, dict)

    def outputs_of(self, moment: float, tokens_so_far: Callable[[], Mapping[str, int]]) -> None:
        """Outputs that left the engine at `moment` are about to be handed on.

        Args:
            tokens_so_far: counts the output tokens of every request that has not ended; asked only if a switch is due.
        """
        while self._pending and self._pending[0][0] <= moment:
            _, old, new = self._pending.pop(0)
            self.switch(old, new, tokens_so_far())

    def switch(self, old: int, new: int, tokens_so_far: Mapping[str, int]) -> None:
        """The weights change from `old` to `new`; `tokens_so_far` counts the output tokens of every running request."""
        self.version = new
        for request_id, switches in self._switches.items():
            if request_id in tokens_so_far:
                switches.append((old, tokens_so_far[request_id]))
            elif request_id in self._known:
                switches.append((old, None))  # it has ended, and nobody has fetched its result yet: all of it is old

    def finish(self, request_id: str, num_tokens: int) -> list[Span]:
        """The spans of a finished request, oldest first; their lengths add up to `num_tokens`."""
        spans: list[Span] = []
        covered = 0
        self._known.discard(request_id)
        for version, until in self._switches.pop(request_id, []):
            count = num_tokens if until is None else until
            if count > covered:
                spans.append((version, count - covered))
                covered = count
        if num_tokens > covered or not spans:
            spans.append((self.version, num_tokens - covered))
        return spans

    def forget(self, request_id: str) -> None:
        """A request ended without a result."""
        self._known.discard(request_id)
        self._switches.pop(request_id, None)
