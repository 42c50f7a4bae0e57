"""Which servers of a fleet are sent to at the same time, as rank 0 tells the other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from example_trainer.weight_bridge.members import Member
from example_trainer.weight_bridge.send_plan import sent_together

Group = Mapping[str, Any]
"""Servers that are sent to at the same time: `layout`, theirs, and which group of it this is;
`members` in the order of their places, each [address, epoch, replicas, instance]; `key`, their
cohort's name; `route`; `manifests`, where the layout is new."""


class Groups:
    """Makes groups, and knows which layouts the other ranks have been told."""

    def __init__(self) -> None:
        self._keys, self._told = 0, set[str]()

    def of(self, members: Sequence[Member], alone: Collection[str]) -> list[dict[str, Any]]:
        """Those of one layout together, but for those that share a GPU, and for those that are to
        be seen alone: they come last, when it is known how long the others take.

        Args:
            alone: addresses.
        """
        own = sorted(members, key=lambda member: member.url in alone)
        kinds = [
            ((m.layout, m.url if m.url in alone else ""), m.route, m.info["gpu_uuids"]) for m in own
        ]
        groups = []
        for number, places in sent_together(kinds):
            chosen = [own[place] for place in places]
            layout = f"{chosen[0].layout} {number}"
            self._keys += 1
            groups.append(
                {
                    "layout": hashlib.sha256(layout.encode()).hexdigest(),
                    "members": [[m.url, m.epoch, m.replicas, m.instance] for m in chosen],
                    "manifests": [manifest.to_json() for manifest in chosen[0].manifests]
                    if layout not in self._told
                    else [],
                    "route": str(chosen[0].route),
                    "key": f"cohort{self._keys}",
                }
            )
            self._told.add(layout)
        return groups


def at_places(group: Group, numbers: Iterable[int]) -> list[str]:
    """The servers at these places in a group's cohort, counted from 1."""
    of_place = [url for url, _, replicas, _ in group["members"] for _ in range(replicas)]
    return list(
        dict.fromkeys(of_place[number - 1] for number in numbers if 0 < number <= len(of_place))
    )
