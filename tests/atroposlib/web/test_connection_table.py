"""Which connection gives way when there are too many: compared with a list that is searched from
one end to the other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from atroposlib.web.bounded_protocol import ConnectionTable
from atroposlib.web.connections import MAX_CONNECTIONS, connections_under

MOST = 6


@dataclass
class Known:
    """A connection as the test sees it; `since` orders connections of one kind."""

    number: int
    address: str
    is_proven: bool = False
    is_served: bool = False
    is_speaking: bool = False
    since: int = 0


class Tables(RuleBasedStateMachine):
    """Connections come, ask, are let in, are answered and go."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Known] = {}
        self.steps = 0
        self.table: ConnectionTable[int] = ConnectionTable(
            MOST, lambda number: self.known[number].is_speaking
        )

    def step(self) -> int:
        self.steps += 1
        return self.steps

    @rule(address=st.sampled_from("abc"), is_speaking=st.booleans())
    def come(self, address: str, is_speaking: bool) -> None:
        number = self.step()
        before = list(self.known.values())
        self.known[number] = Known(number, address, since=number)
        victim = self.table.add(number, address)
        unproven = sum(not one.is_proven for one in before if one.address == address) + 1
        if unproven > MOST // 2:
            assert victim is not None
            assert victim == number or (
                self.known[victim].address == address and not self.known[victim].is_proven
            )
        elif len(before) < MOST:
            assert victim is None
        else:
            assert victim is not None
            self.check(victim, number, before)
        if victim is not None:
            assert not self.known[victim].is_speaking
            self.table.remove(victim)
            del self.known[victim]
        if number in self.known:
            self.known[number].is_speaking = is_speaking

    def check(self, victim: int, new: int, before: list[Known]) -> None:
        for is_proven, is_served in ((False, False), (False, True), (True, False)):
            kind = [
                one for one in before if (one.is_proven, one.is_served) == (is_proven, is_served)
            ]
            silent = [one for one in kind if not one.is_speaking]
            if not silent:
                continue
            chosen = self.known[victim]
            assert chosen in silent
            same = [one for one in silent if one.address == chosen.address]
            assert chosen.since == min(one.since for one in same), "the oldest of its address"
            counts = Counter(one.address for one in kind)
            if not is_proven and not is_served:
                counts[self.known[new].address] += 1
            largest = [
                address for address, count in counts.items() if count == max(counts.values())
            ]
            if all(any(one.address == address for one in silent) for address in largest):
                assert chosen.address in largest
            return
        assert victim == new, (
            "all others have a request of a proven client under way, or are speaking"
        )

    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        if not self.known:
            return
        one = self.known[data.draw(st.sampled_from(sorted(self.known)))]
        before = (one.is_proven, one.is_served)
        what = data.draw(st.sampled_from(["prove", "serve", "answer", "speak", "silent"]))
        if what == "prove":
            one.is_proven = True
            self.table.prove(one.number)
        elif what in ("serve", "answer"):
            one.is_served = what == "serve"
            self.table.serve(one.number, one.is_served)
        else:
            one.is_speaking = what == "speak"
        if (one.is_proven, one.is_served) != before:
            one.since = self.step()

    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        if self.known:
            number = data.draw(st.sampled_from(sorted(self.known)))
            del self.known[number]
            self.table.remove(number)
            self.table.remove(number)

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.table) == len(self.known) <= MOST
        assert self.table.counts() == {
            "open": len(self.known),
            "unproven": sum(not one.is_proven for one in self.known.values()),
            "served": sum(one.is_served for one in self.known.values()),
        }
        assert all(self.table.most_unproven_of_address >= sum(
            not one.is_proven for one in self.known.values() if one.address == address
        ) for address in "abc")  # fmt: skip


TestTables = Tables.TestCase


def test_connections_leave_a_quarter_of_the_files() -> None:
    assert [connections_under(files) for files in (1, 256, 1024, 4096, 65_536)] == [
        16,
        64,
        768,
        3072,
        MAX_CONNECTIONS,
    ]
