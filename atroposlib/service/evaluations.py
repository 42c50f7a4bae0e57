"""The newest results of evaluations, numbered in the order of their arrival. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from atroposlib.service.records import Evaluation

MAX_KEPT = 1024
"""Evaluations; the oldest are forgotten first."""
MAX_BYTES = 8 << 20
"""Of JSON that all of them are together, for all may be asked for at once. The newest is kept
whatever its size."""


class Evaluations:
    """The newest results, and their changes until `take_changed`."""

    def __init__(self, next_id: int = 1) -> None:
        self.next_id = next_id
        self._kept: deque[Evaluation] = deque()
        self._bytes = 0
        self._added: list[Evaluation] = []
        self._removed: list[int] = []

    def restore(self, stored: Iterable[Evaluation], next_id: int) -> None:
        """Take over what was stored, oldest first."""
        for evaluation in stored:
            self._keep(evaluation)
        self.next_id = max([next_id, *(known.id + 1 for known in self._kept)])

    def take_changed(self) -> tuple[list[Evaluation], list[int]]:
        """(results that are new, ids of those that are gone) since the last call."""
        changed = self._added, self._removed
        self._added, self._removed = [], []
        return changed

    def add(
        self,
        time: float,
        env_id: int | None,
        name: str,
        weight_version: int | None,
        metrics: dict[str, float],
        key: str | None = None,
        weight_epoch: int | None = None,
    ) -> int:
        """Note a result.

        Returns its id; that of the first one, if a result of the same key is kept.
        """
        for known in self._kept if key is not None else ():
            if known.key == key:
                return known.id
        evaluation = Evaluation(
            self.next_id, time, env_id, name, weight_version, metrics, key, weight_epoch
        )
        self.next_id += 1
        self._added.append(evaluation)
        self._keep(evaluation)
        return evaluation.id

    def _keep(self, evaluation: Evaluation) -> None:
        """Keep it, and forget the oldest beyond the bounds."""
        self._kept.append(evaluation)
        self._bytes += evaluation.size
        while len(self._kept) > MAX_KEPT or (self._bytes > MAX_BYTES and len(self._kept) > 1):
            oldest = self._kept.popleft()
            self._bytes -= oldest.size
            self._removed.append(oldest.id)

    def after(self, id: int) -> Sequence[Evaluation]:
        """Return the results after the one with this id, oldest first."""
        return [known for known in self._kept if known.id > id]

    def clear(self) -> None:
        """Forget all results, which are another run's. Their ids are not given again."""
        self._removed.extend(known.id for known in self._kept)
        self._kept.clear()
        self._bytes = 0
