"""Which weight version each token of a running request was sampled under."""

from __future__ import annotations

from collections.abc import Mapping

Span = tuple[int, int]
"""(weight version, number of consecutive tokens sampled under it)."""


class VersionSpans:
    """Follows requests across weight updates.

    An update happens while the engine is paused, so at that moment the number of tokens a request has is exactly the number
    sampled under the old version.
    """

    def __init__(self, version: int = 0) -> None:
        """
        Args:
            version: the one served at first.
        """
        self.version = version
        self._switches: dict[str, list[tuple[int, int]]] = {}

    def start(self, request_id: str) -> None:
        self._switches[request_id] = []

    def switch(self, old: int, new: int, tokens_so_far: Mapping[str, int]) -> None:
        """The weights change from `old` to `new`; `tokens_so_far` counts the output tokens of every running request."""
        self.version = new
        for request_id, switches in self._switches.items():
            if request_id in tokens_so_far:
                switches.append((old, tokens_so_far[request_id]))

    def finish(self, request_id: str, num_tokens: int) -> list[Span]:
        """The spans of a finished request, oldest first; their lengths add up to `num_tokens`."""
        spans: list[Span] = []
        covered = 0
        for version, count in self._switches.pop(request_id, []):
            if count > covered:
                spans.append((version, count - covered))
                covered = count
        if num_tokens > covered or not spans:
            spans.append((self.version, num_tokens - covered))
        return spans

    def forget(self, request_id: str) -> None:
        """A request ended without a result."""
        self._switches.pop(request_id, None)
