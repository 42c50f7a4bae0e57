"""Weight epochs: the service gives them, and decides by them which run a rollout belongs to. Pure:
no I/O, no clock.

A trainer asks for an epoch before an inference server gets its weights. The answer is above all
epochs that this service has seen, so no two trainers have the same one, whatever their clocks show.
A trainer that registers without asking keeps the epoch that it names, if that is above those of its
run. If not, the service counts it as a higher one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atroposlib.service.records import Registration
from atroposlib.wire.weight_lineage import Life, begin_life, line_version

MAX_EPOCHS = 1024
"""Epochs that are remembered of each kind; the oldest are forgotten first."""
FIRST_EPOCHS = 2**52
"""Trainers may name epochs up to this one. It is half of the largest that a rollout can carry, and
far above the clock."""
LARGEST_LEAP = 2**20
"""Trainers may also name epochs that exceed the last one by this number, so epochs that the service
gave are always valid."""


class WeightEpochs:
    """The epochs of one service, and which of them are the present run's."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        """The highest epoch that was given to a trainer, or named by one."""
        self.lives: list[Life] = []
        """The trainers of the present run that name epochs, the present one last. Empty if the
        present one names none."""
        self.run_epoch = 0
        """For a trainer that names no epoch: lower epochs, but for 0, are another run's."""
        self._own: dict[int, None] = {}
        """Epochs of the present run's trainers."""
        self._given: dict[int, str] = {}
        """Epochs that were given to a run, by its name."""
        self._counted_as: dict[int, int] = {}
        """Epochs that trainers of the present run named, and the higher ones that they count as."""

    def stored(self) -> dict[str, Any]:
        """The state to be stored, as JSON."""
        return {
            "last_epoch": self.last,
            "lives": [[life.epoch, life.start] for life in self.lives],
            "run_epoch": self.run_epoch,
            "own_epochs": list(self._own),
            "given_epochs": list(self._given.items()),
            "counted_epochs": list(self._counted_as.items()),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> WeightEpochs:
        """Restore what `stored` returned. Stores of earlier versions lack some of it."""
        epochs = cls(state.get("last_epoch", 0))
        epochs.lives = [Life(*life) for life in state.get("lives", [])]
        epochs.run_epoch = state.get("run_epoch", 0)
        epochs._own = dict.fromkeys(state.get("own_epochs", [life.epoch for life in epochs.lives]))
        epochs._given = {epoch: run for epoch, run in state.get("given_epochs", [])}
        epochs._counted_as = {named: epoch for named, epoch in state.get("counted_epochs", [])}
        return epochs

    @property
    def present(self) -> int:
        """The present trainer's epoch; 0 if it names none."""
        return self.lives[-1].epoch if self.lives else 0

    def too_high(self, named: Iterable[int]) -> int | None:
        """Return the first epoch that no trainer may name yet; None if there is none.

        After a higher one, the service would soon have none left to give.
        """
        highest = max(FIRST_EPOCHS, self.last + LARGEST_LEAP)
        return next((epoch for epoch in named if epoch > highest), None)

    def give(self, proposed: int, run: str | None) -> int:
        """Return an epoch for a trainer that starts: the one that it asks for, or a higher one that
        no trainer has.

        Args:
            proposed: Unix milliseconds, and more than the epochs that the trainer knows of its run.
            run: its run's name; None if the run has none.
        """
        self.last = max(proposed, self.last + 1)
        if run is not None:
            _remember(self._given, self.last, run)
        return self.last

    def register(
        self, registration: Registration, lives: Iterable[Life], another_run: bool
    ) -> None:
        """A trainer registers. Its `weight_epoch` becomes the one that it counts as.

        Args:
            registration: the trainer's.
            lives: earlier trainers of its run, and perhaps itself, as it knows them.
            another_run: the registration before was another run's.
        """
        named, start = registration.weight_epoch, registration.starting_step
        if another_run:
            self.lives, self._own, self._counted_as = [], {}, {}
            self.run_epoch = self.last + 1
        if not named:
            self.lives = []
            return
        known = {self.counted(life.epoch): life.start for life in lives if life.epoch != named}
        own = next((life.start for life in lives if life.epoch == named), start)
        present = self.counted(named)
        if present != self.present and present <= max([*self._own, *known], default=0):
            present = self.last + 1
            self._counted_as.pop(named, None)
            _remember(self._counted_as, named, present)
        for life in self.lives:
            known[life.epoch] = min(life.start, known.get(life.epoch, life.start))
        earlier = [Life(epoch, known[epoch]) for epoch in sorted(known)]
        self.lives = begin_life(earlier, present, min(start, own))
        if another_run:
            self.run_epoch = present
        self.last = max(self.last, *(life.epoch for life in self.lives))
        for life in self.lives:
            _remember(self._own, life.epoch, None)
        registration.weight_epoch = present

    def counted(self, epoch: int) -> int:
        """The epoch that an epoch of a rollout or of a trainer counts as."""
        return self._counted_as.get(epoch, epoch)

    def is_foreign(self, epoch: int, version: int, run: str | None) -> bool:
        """Return True if weights are another run's.

        Args:
            epoch, version: of the weights; the epoch is one that `counted` returned.
            run: the name of the present run.
        """
        if not epoch:
            return line_version(epoch, version, self.lives) < 0
        if not self.lives:
            return epoch < self.run_epoch
        own = epoch in self._own or (run is not None and self._given.get(epoch) == run)
        return not own or line_version(epoch, version, self.lives) < 0


def _remember(known: dict[int, Any], epoch: int, value: Any) -> None:
    known[epoch] = value
    while len(known) > MAX_EPOCHS:
        del known[next(iter(known))]


def read_lives(pairs: Sequence[Sequence[int]] | None) -> list[Life]:
    """Lives from JSON: [epoch, starting step] of each."""
    return [Life(epoch, start) for epoch, start in pairs or ()]
