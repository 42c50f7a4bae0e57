"""The servers that receive an update at the same time, as rank 0 sends them to the other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from example_trainer.weight_bridge.members import Member
from example_trainer.weight_bridge.send_plan import sent_together
from vllm_patching.protocol.messages import Route


class GroupMember(BaseModel):
    """One server of a group: a restarted server, or one that joined again, is another member."""

    model_config = ConfigDict(frozen=True)

    url: str
    epoch: int
    replicas: int
    instance: str


class UpdateGroup(BaseModel):
    """Servers that share one broadcast.

    Attributes:
        layout: names the layout of their weights, and which group of that layout this is.
        key: name of their cohort.
        route: the way that the weights take.
        members: in the order of their places in the cohort.
        manifests: of the layout's ranks; empty if the other ranks know the layout already.
    """

    model_config = ConfigDict(frozen=True)

    layout: str
    key: str
    route: Route
    members: tuple[GroupMember, ...]
    manifests: tuple[dict[str, Any], ...]

    @property
    def urls(self) -> list[str]:
        """Addresses of the members."""
        return [member.url for member in self.members]

    @property
    def receivers(self) -> int:
        """Number of engine cores that receive, in all members."""
        return sum(member.replicas for member in self.members)

    def at(self, numbers: Iterable[int]) -> set[str]:
        """Return the addresses of the receivers at these places of the cohort, from 1."""
        places = [member.url for member in self.members for _ in range(member.replicas)]
        return {places[number - 1] for number in numbers if 0 < number <= len(places)}


class Groups:
    """Makes groups. Remembers the layouts that the other ranks have received."""

    def __init__(self) -> None:
        self._keys, self._known_layouts = 0, set[str]()

    def of(self, members: Sequence[Member], alone: Collection[str]) -> list[UpdateGroup]:
        """Put the members of one layout together, except those that share a GPU.

        Args:
            alone: addresses of members that get a group of their own, after the others.
        """
        ordered = sorted(members, key=lambda member: member.url in alone)
        kinds = []
        for member in ordered:
            kind = (member.layout, member.url in alone and member.url)
            kinds.append((kind, member.route, member.info["gpu_uuids"]))
        return [
            self._group([ordered[place] for place in places], number)
            for number, places in sent_together(kinds)
        ]

    def _group(self, members: Sequence[Member], number: int) -> UpdateGroup:
        layout = f"{members[0].layout} {number}"
        self._keys += 1
        manifests: tuple[dict[str, Any], ...] = ()
        if layout not in self._known_layouts:
            self._known_layouts.add(layout)
            manifests = tuple(manifest.to_json() for manifest in members[0].manifests)
        return UpdateGroup(
            layout=hashlib.sha256(layout.encode()).hexdigest(),
            key=f"cohort{self._keys}",
            route=members[0].route,
            members=tuple(
                GroupMember(url=m.url, epoch=m.epoch, replicas=m.replicas, instance=m.instance)
                for m in members
            ),
            manifests=manifests,
        )
