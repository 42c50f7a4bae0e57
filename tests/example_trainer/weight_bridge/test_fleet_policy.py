"""example_trainer/weight_bridge/fleet.py against simulated servers that die, hang, lie, restart and
change hands.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from example_trainer.weight_bridge import fleet_updates
from example_trainer.weight_bridge.fleet import (
    LONGEST_PAUSE_SECONDS,
    Fleet,
    Sight,
    Standing,
    Verdict,
)

URLS = [f"http://server{number}:9001" for number in range(4)]
PATIENCE, LIMIT = 10.0, 300.0
WHICH = st.integers(0, 3)


@dataclass
class Simulated:
    """One server as it really is."""

    life: int = 1
    alive: bool = True
    spoils: bool = False
    """Its checksum will differ."""
    taken_by: str = ""
    hangs: bool = False
    """Its engine makes no progress, and it reports that."""
    version: int = 0
    epoch: int = 0

    def sight(self) -> Sight | None:
        trouble = "the engine does not answer" if self.hangs else ""
        told = Sight(
            f"life {self.life}", self.version, self.epoch, trouble, self.taken_by, self.hangs
        )
        return told if self.alive else None


class FleetModel(RuleBasedStateMachine):
    """A trainer that looks and updates by the policy alone."""

    @initialize(count=st.integers(1, 3), least=st.integers(1, 2))
    def begin(self, count: int, least: int) -> None:
        self.now, self.version = 1000.0, 0
        self.fleet = Fleet(URLS[:count], min(least, count), PATIENCE, self.now)
        self.servers = {url: Simulated() for url in URLS}
        self.named, self.wanted, self.left = URLS[:count], set[str](), set[str]()
        self.standings = {url: Standing.JOINING for url in self.named}

    def server(self, which: int) -> Simulated:
        return self.servers[URLS[which]]

    @rule(which=WHICH)
    def dies(self, which: int) -> None:
        self.server(which).alive = False

    @rule(which=WHICH)
    def answers_again(self, which: int) -> None:
        self.server(which).alive = True

    @rule(which=WHICH, spoils=st.booleans())
    def restarts(self, which: int, spoils: bool) -> None:
        server = self.server(which)
        self.servers[URLS[which]] = Simulated(server.life + 1, spoils=spoils)

    @rule(which=WHICH, hangs=st.booleans())
    def hangs_or_goes_on(self, which: int, hangs: bool) -> None:
        self.server(which).hangs = hangs

    @rule(which=WHICH)
    def spoils(self, which: int) -> None:
        self.server(which).spoils = True

    @rule(which=WHICH)
    def another_trainer_comes(self, which: int) -> None:
        self.server(which).taken_by = "trainer elsewhere:1"

    @rule(which=WHICH)
    def gets_other_weights(self, which: int) -> None:
        self.server(which).version, self.server(which).epoch = 77, 1

    @rule(wanted=st.sets(WHICH), left=st.sets(WHICH))
    def wishes_change(self, wanted: set[int], left: set[int]) -> None:
        self.wanted, self.left = {URLS[n] for n in wanted}, {URLS[n] for n in left}
        before = set(self.fleet.places)
        came, went = self.fleet.change_members(sorted(self.wanted), self.left, self.now)
        for url in went:
            self.standings.pop(url, None)
        assert (
            set(self.fleet.places)
            == ({*self.named} | self.wanted) - self.left
            == (before | {*came}) - {*went}
        )

    @rule(seconds=st.sampled_from([0.5, 5.0, 11.0, 60.0, LONGEST_PAUSE_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for url in self.fleet.places:
            self.fleet.saw(url, self.servers[url].sight(), self.now)

    @rule()
    def trains_a_step(self) -> None:
        self.now += 0.1
        if self.fleet.verdict(0.0, LIMIT, self.now) is not Verdict.GO:
            assert len(self.fleet.takes_part(self.now)) < self.fleet.least
            return
        self.version += 1
        self.update(self.fleet.takes_part(self.now))
        for url in self.fleet.good:
            server = self.servers[url]
            assert (server.version, server.epoch, server.alive) == (self.version, 5, True), (
                "a good server serves other weights"
            )

    @rule()
    def training_waits(self) -> None:
        self.now += 0.1
        self.update(self.fleet.due(self.now))

    def update(self, urls: list[str]) -> None:
        for url in urls:
            server = self.servers[url]
            assert not self.fleet.places[url].hopeless
            if not server.alive:
                self.fleet.failed(url, "did not answer /bridge/begin", self.now, away=True)
            elif server.taken_by:
                self.fleet.failed(
                    url, f"{server.taken_by} has taken it over", self.now, hopeless=True
                )
            elif server.hangs:
                self.fleet.failed(url, "refused /bridge/begin", self.now)
            elif server.spoils:
                self.fleet.failed(url, "another checksum", self.now)
            else:
                self.fleet.joined(url, f"life {server.life}")
                server.version, server.epoch = self.version, 5
                self.fleet.served(url, self.version, 5, self.now)

    @invariant()
    def the_table_is_sound(self) -> None:
        if not hasattr(self, "fleet"):
            return
        for place in self.fleet.places.values():
            assert (place.reason == "") == (place.standing is Standing.GOOD), place
            assert place.since <= self.now
        assert not set(self.fleet.good) & set(self.fleet.due(self.now))
        assert not any(self.fleet.places[url].hangs for url in self.fleet.due(self.now)), (
            "an update of it would only fail"
        )
        assert (
            sum(n for name, n in self.fleet.counts().items() if name != "size")
            == self.fleet.counts()["size"]
        )
        for change in self.fleet.take_changes():
            assert self.standings.get(change.url, Standing.JOINING) is change.before
            self.standings[change.url] = change.now
            assert change.absence is None or change.absence >= 0

    def teardown(self) -> None:
        """Once all faults are gone, every server that can be helped is good after one look and one
        update.
        """
        if not hasattr(self, "fleet"):
            return
        for url, server in self.servers.items():
            self.servers[url] = Simulated(
                server.life, taken_by=server.taken_by, version=server.version, epoch=server.epoch
            )
        self.now += LONGEST_PAUSE_SECONDS
        for url in self.fleet.places:
            self.fleet.saw(url, self.servers[url].sight(), self.now)
        self.update(self.fleet.takes_part(self.now))
        helped = {url for url in self.fleet.places if not self.servers[url].taken_by}
        stuck = {
            url for url in helped if self.fleet.places[url].hopeless
        }  # its trainer is gone, but has not been restarted
        assert set(self.fleet.good) == helped - stuck


FleetModel.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestFleet = FleetModel.TestCase


def good_fleet(count: int = 3, least: int = 1) -> Fleet:
    fleet = Fleet(URLS[:count], least, PATIENCE, now=0.0)
    for url in fleet.places:
        fleet.joined(url, "life 1")
        fleet.served(url, 1, 5, 0.0)
    return fleet


def test_a_server_that_is_back_is_due_at_the_first_look() -> None:
    fleet = good_fleet()
    fleet.failed(URLS[1], "did not answer", 1.0, away=True)
    assert fleet.takes_part(1.0) == [URLS[0], URLS[2]]
    fleet.saw(URLS[1], Sight("life 2", 0, 0), 2.0)
    assert fleet.due(2.0) == [URLS[1]]
    assert fleet.places[URLS[1]].reason == "was restarted"


def test_a_server_whose_engine_hangs_is_not_tried_until_it_goes_on() -> None:
    fleet, hangs = good_fleet(), Sight("life 1", 1, 5, "the engine does not answer", hangs=True)
    for now in range(100):
        fleet.saw(URLS[1], hangs, float(now))
        assert fleet.takes_part(now) == [URLS[0], URLS[2]]
    place = fleet.places[URLS[1]]
    assert (place.standing, place.reason) == (Standing.QUARANTINED, "the engine does not answer")
    fleet.saw(URLS[1], Sight("life 1", 1, 5), 100.0)
    assert fleet.due(100.0) == [URLS[1]], "it may have missed an update"


def test_a_server_that_failed_before_its_engine_was_known_to_hang_gets_that_reason() -> None:
    fleet = good_fleet()
    fleet.failed(URLS[1], "is 10 s behind the others", 1.0)
    fleet.saw(URLS[1], Sight("life 1", 1, 5, "the engine does not answer", hangs=True), 2.0)
    assert fleet.places[URLS[1]].reason == "the engine does not answer"
    assert fleet.due(500.0) == []


def test_one_silent_look_is_no_absence_and_ten_seconds_are() -> None:
    fleet = good_fleet()
    fleet.saw(URLS[0], None, 1.0)
    assert URLS[0] in fleet.good
    fleet.saw(URLS[0], None, 11.0)
    assert fleet.places[URLS[0]].standing is Standing.AWAY


def test_a_server_that_fails_always_is_tried_more_and_more_seldom() -> None:
    fleet, tried, now = good_fleet(), [], 0.0
    while now < 200:
        fleet.saw(URLS[0], Sight("life 1", 1, 5), now)
        if URLS[0] in fleet.takes_part(now):
            tried.append(now)
            fleet.failed(URLS[0], "another checksum", now)
        now += 1.0
    assert tried == [0, 1, 11, 31, 71, 151]


def test_it_waits_for_enough_servers_until_the_limit_and_gives_up_at_once_where_hope_is_gone() -> (
    None
):
    fleet = good_fleet(count=2, least=2)
    fleet.failed(URLS[0], "did not answer", 1.0, away=True)
    assert fleet.verdict(0.0, LIMIT, 1.0) is Verdict.WAIT
    assert fleet.verdict(LIMIT, LIMIT, 1.0) is Verdict.GIVE_UP
    fleet.failed(URLS[0], "serves another model", 2.0, hopeless=True)
    assert fleet.verdict(0.0, LIMIT, 2.0) is Verdict.GIVE_UP
    fleet.saw(URLS[0], Sight("life 2", 0, 0), 3.0)
    assert fleet.verdict(0.0, LIMIT, 3.0) is Verdict.GO


def test_no_server_is_blamed_for_the_time_in_which_the_trainer_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = threading.Event()
    stopped = 0.0

    def clock() -> float:
        return time.perf_counter() + stopped

    monkeypatch.setattr(fleet_updates, "time", SimpleNamespace(monotonic=clock))

    def answer() -> str:
        nonlocal stopped
        stopped = 1000.0
        assert passed.wait(120)
        return "here"

    threading.Timer(0.5, passed.set).start()
    answers = fleet_updates.call_all({URLS[0]: lambda: "here", URLS[1]: answer}, LIMIT, PATIENCE)
    assert (answers.failed, len(answers.ok)) == ({}, 2)
