"""Leases: one at a time, shown by their id, ended by their holders or with them, and never by the
clock alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_patching.protocol import messages
from vllm_patching.protocol.messages import Writer
from vllm_patching.server.state import Lease, LeaseLost, Leases


def granted(**more: object) -> tuple[Leases, Lease]:
    leases = Leases()
    return leases, leases.grant(
        1, 7, "trainer here:12", deadline=100.0, writers=(Writer("here", 12, 5),), **more
    )  # type: ignore[arg-type]


def test_a_lease_counts_until_its_deadline() -> None:
    leases, lease = granted()
    assert leases.require(lease.id, 100.0) is lease
    with pytest.raises(
        LeaseLost, match=r"the lease for version 7 ran out 1.5 s ago: trainer here:12 is late"
    ):
        leases.require(lease.id, 101.5)
    assert leases.out is lease, "its holder may still write"
    for other in ("another", None):
        with pytest.raises(
            LeaseLost, match=r"does not count .*: trainer here:12 holds one for version 7"
        ):
            leases.require(other, 50.0)


def test_two_leases_are_never_out() -> None:
    leases, _ = granted()
    with pytest.raises(RuntimeError, match="a lease is out already"):
        leases.grant(1, 8, "another", 200.0)


@pytest.mark.parametrize(
    ("epoch", "shown", "ended"),
    [(1, "its id", True), (1, None, True), (2, "its id", False), (1, "x", False)],
)
def test_who_gives_it_back_shows_it_or_was_never_told(
    epoch: int, shown: str | None, ended: bool
) -> None:
    leases, lease = granted()
    assert leases.give_back(epoch, lease.id if shown == "its id" else shown) is ended
    assert (leases.out is None) is ended


def test_the_workers_lease_is_not_given_back_by_a_trainer() -> None:
    leases = Leases()
    lease = leases.grant(1, 7, "the workers' updater threads", 100.0)
    assert not leases.give_back(1, lease.id)
    assert not lease.has_ended
    assert "it ends with the transfer's time limit" in lease.remedy
    leases.end()
    assert leases.out is None


def test_a_process_that_cannot_be_seen_is_never_known_to_have_ended() -> None:
    elsewhere = Writer("elsewhere", 3, 9)
    assert not elsewhere.is_here()
    _, lease = granted(unseen=(elsewhere,))
    assert not lease.has_ended
    assert "end here:12 and restart the server, which cannot see elsewhere:3 end" in lease.remedy


# -- the operating system's facts about a process


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(messages, "_PROC", tmp_path)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/stat").write_text("1 (server) S")
    return tmp_path


def put(proc: Path, pid: int, started: int, threads: dict[int, str]) -> None:
    """A process; `threads` are its threads' states, the first one's is its own."""
    fields = [*"0" * 18, str(started)]
    for thread, state in threads.items():
        place = proc / f"{pid}/task/{thread}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "stat").write_text(f"{thread} (a) b) {state} {' '.join(fields)} 0 0")
    (proc / f"{pid}/stat").write_text(
        f"{pid} (a) b) {next(iter(threads.values()))} {' '.join(fields)} 0 0"
    )


def test_a_running_process_and_its_end(proc: Path) -> None:
    writer = Writer(messages.this_process().host, 12, 500)
    put(proc, 12, 500, {12: "S", 13: "R"})
    assert writer.is_here()
    assert not writer.has_ended()
    put(proc, 12, 500, {12: "Z", 13: "R"})
    assert not writer.has_ended(), "a thread of it still runs"
    put(proc, 12, 500, {12: "Z", 13: "X"})
    assert writer.has_ended()
    put(proc, 12, 777, {12: "R"})
    assert writer.has_ended(), "its number belongs to another process now"
    assert not writer.is_here()


def test_without_proc_nothing_is_known(proc: Path) -> None:
    writer = Writer("here", 12, 500)
    assert writer.has_ended()
    (proc / "self/stat").unlink()
    assert not writer.has_ended()


def test_a_process_that_cannot_be_looked_up_counts_as_living(
    proc: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (proc / "12/stat").mkdir(parents=True)  # reading it fails, though it is there
    assert not Writer("here", 12, 500).has_ended()


def test_this_process_is_here_and_lives() -> None:
    mine = messages.this_process()
    assert mine.is_here()
    assert not mine.has_ended()
    assert Writer.from_json(mine.to_json()) == mine


@given(st.lists(st.sampled_from(["grant", "back", "end", "commit late", "commit"]), max_size=30))
def test_whatever_happens_nobody_commits_without_the_lease_that_is_out(steps: list[str]) -> None:
    leases, mine = Leases(), None
    for step in steps:
        if step == "grant" and leases.out is None:
            mine = leases.grant(1, 1, "t", 10.0, (Writer("h", 1, 1),))
        elif step == "back" and mine is not None:
            leases.give_back(1, mine.id)
        elif step == "end":
            leases.end()
        elif step.startswith("commit"):
            allowed = leases.out is not None and leases.out is mine and step == "commit"
            try:
                leases.require(mine.id if mine else None, 5.0 if step == "commit" else 11.0)
            except LeaseLost:
                assert not allowed
            else:
                assert allowed
