"""Where environments stand that can be resumed exactly: which item each serves next. Pure: no I/O,
no clock.

Such an environment numbers its items, and says of each group which item it answers. All that is
sampled for one batch lies in a window that begins where the batch before ended. A trainer's
checkpoint holds the beginning of the window that comes after it, the service holds which items of
the window are answered by groups that it has, and both together are the position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atroposlib.service.records import Group, Receipt, ValidatedGroup


@dataclass(slots=True)
class Stream:
    """The items of one environment."""

    begin: int = 0
    """The first item that is in no batch yet which was handed out."""
    held: dict[int, int] = field(default_factory=dict)
    """Items whose groups are here, handed out ones included -> sequence number of the group."""


class Streams:
    """The streams of one service, by name.

    Whoever calls a method that changes something stores `stored()` with the groups.
    """

    def __init__(self, stored: Mapping[str, Any] | None = None) -> None:
        stored = stored or {}
        self.trainer: int = stored.get("trainer", 0)
        """The uuid of its registration."""
        self.rewinds: int = stored.get("rewinds", 0)
        """How often what was answered had to be done again under one registration."""
        self.by_name = {
            name: Stream(begin, {item: seq for item, seq in held})
            for name, (begin, held) in stored.get("streams", {}).items()
        }

    def stored(self) -> dict[str, Any]:
        """What the next life of the service begins with."""
        streams = {
            name: [stream.begin, sorted(stream.held.items())]
            for name, stream in self.by_name.items()
        }
        return {"trainer": self.trainer, "rewinds": self.rewinds, "streams": streams}

    @property
    def life(self) -> str:
        """Changes whenever a window begins anew: what was begun in another life was begun in
        ignorance of it.
        """
        return f"{self.trainer}.{self.rewinds}"

    def open(self, name: str, positions: Mapping[str, int] | None) -> None:
        """An environment that serves this stream has come.

        Args:
            positions: where the trainer's weights say that streams stand; one that they do not name
                begins at 0.
        """
        self.by_name.setdefault(name, Stream((positions or {}).get(name, 0)))

    def rewind(
        self, trainer: int, positions: Mapping[str, int] | None, kept: Iterable[Group]
    ) -> None:
        """A trainer has registered.

        Args:
            trainer: the uuid of its registration.
            positions: the first item after the last batch that its weights have learned from, by
                stream; a stream that is not named begins at 0. None if the trainer does not say:
                then all stay where they are.
            kept: the groups that are still held.
        """
        self.trainer = trainer
        seqs = {group.seq for group in kept}
        for name, stream in self.by_name.items():
            stream.held = {item: seq for item, seq in stream.held.items() if seq in seqs}
            if positions is not None:
                stream.begin = positions.get(name, 0)

    def refusal(self, draft: ValidatedGroup) -> Receipt | None:
        """The answer to a group that is not needed: its item is answered already, or in a batch of
        before. None if it is.
        """
        if draft.stream is None or draft.item is None:
            return None
        stream = self.by_name.get(draft.stream)
        if stream is None:
            return Receipt(
                "dropped",
                reason=f"no environment that serves {draft.stream!r} is registered here: register again",
            )
        if draft.item in stream.held:
            return Receipt("received")
        if draft.life != self.life:
            return Receipt(
                "dropped",
                reason=f"rewound: {draft.stream!r} has begun anew at item {stream.begin} meanwhile",
            )
        if draft.item < stream.begin:
            reason = (
                f"repeated: item {draft.item} of {draft.stream!r} is in an earlier batch; "
                f"the next one begins at {stream.begin}"
            )
            return Receipt("dropped", reason=reason)
        return None

    def add(self, draft: ValidatedGroup, seq: int) -> bool:
        """A group is accepted. Returns whether that changed anything."""
        if draft.stream is None or draft.item is None:
            return False
        self.by_name[draft.stream].held[draft.item] = seq
        return True

    def in_order(self, groups: Iterable[Group]) -> list[Group]:
        """The groups of a batch: in the order of their items, which does not depend on time, and
        else of acceptance.
        """
        places = {
            seq: (name, item)
            for name, stream in self.by_name.items()
            for item, seq in stream.held.items()
        }
        return sorted(groups, key=lambda group: places.get(group.seq, ("", group.seq)))

    def hand_out(self, groups: Iterable[Group]) -> None:
        """A batch is handed out: the next one begins behind it."""
        seqs = {group.seq for group in groups}
        for stream in self.by_name.values():
            stream.begin = max(
                [stream.begin, *(item + 1 for item, seq in stream.held.items() if seq in seqs)]
            )

    def after(self, groups: Iterable[Group]) -> dict[str, int]:
        """The first item after a batch, by stream."""
        seqs = {group.seq for group in groups}
        last = {
            name: [item for item, seq in stream.held.items() if seq in seqs]
            for name, stream in self.by_name.items()
        }
        return {
            name: max(items) + 1 if items else self.by_name[name].begin
            for name, items in last.items()
        }

    def put_back(self, groups: Iterable[Group]) -> None:
        """A batch that was handed out is taken apart: its groups wait again."""
        seqs = {group.seq for group in groups}
        for stream in self.by_name.values():
            stream.begin = min(
                [stream.begin, *(item for item, seq in stream.held.items() if seq in seqs)]
            )

    def forget(self, groups: Iterable[Group]) -> bool:
        """Groups are gone. Where they were in no batch yet, their items are to be done again.
        Returns whether that changed anything."""
        seqs = {group.seq for group in groups}
        changed = False
        for stream in self.by_name.values():
            gone = [item for item, seq in stream.held.items() if seq in seqs]
            for item in gone:
                del stream.held[item]
            self.rewinds += any(item >= stream.begin for item in gone)
            changed = changed or bool(gone)
        return changed

    def status(self, name: str) -> dict[str, Any] | None:
        """Return the position for the environment's `ResumeWindow`; None for a stream that was
        never opened.
        """
        stream = self.by_name.get(name)
        if stream is None:
            return None
        settled = sorted(item for item in stream.held if item >= stream.begin)
        return {"life": self.life, "begin": stream.begin, "settled": settled}
