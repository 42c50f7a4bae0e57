"""Servers of a fleet restarted one by one, and the fleet's table: small real processes, a trainer
of stand-ins.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.launcher import rolling
from example_trainer.launcher.command_line import LauncherError
from example_trainer.launcher.control import Starter, stop_parts
from example_trainer.launcher.fleet import Fleet, FleetRow
from example_trainer.launcher.options import last_start
from example_trainer.launcher.records import Records, parts_of
from example_trainer.launcher.rolling import Roller
from example_trainer.launcher.status import collect, fleet_table, table
from tests.example_trainer.launcher.small_stack import TRAINS, SmallStack, small_options

pytestmark = pytest.mark.nightly


class FleetRun:
    """A run of three servers and a trainer of them."""

    def __init__(self, folder: Path, ports: tuple[int, ...]) -> None:
        self.folder, self.ports = folder, (ports[1], *ports[3:])
        self.records = Records(folder)
        self.stack = SmallStack(small_options(folder, ports, parts_of(3)), trainer_code=TRAINS)
        self.said: list[str] = []
        Starter(self.stack, self.said.append).run()
        self.until(
            lambda: self.seen()["fewest"] == 3, "the trainer has not seen three good servers"
        )

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 180
        while not done():
            assert time.monotonic() < deadline, what
            time.sleep(0.05)

    def seen(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder / "seen.json").read_text())
        except FileNotFoundError:
            return {"version": 0, "fewest": None}
        return found

    def pids(self) -> dict[str, int]:
        found = {part: self.records.read(part) for part in self.records.parts()}
        return {
            part: record.keeper.pid
            for part, record in found.items()
            if record and record.keeper.is_alive()
        }

    def roll(self, *parts: str, seconds: float = 180) -> None:
        Roller(self.stack, self.said.append, seconds).run(parts)


@pytest.fixture
def fleet(
    tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FleetRun]:
    monkeypatch.setattr(rolling, "POLL_SECONDS", 0.05)
    try:
        yield FleetRun(tmp_path / "run", tuple(free_port() for _ in range(5)))
    finally:
        stop_parts(tmp_path / "run", Records(tmp_path / "run").parts(), print)


def test_servers_are_restarted_one_by_one_while_the_trainer_goes_on(
    fleet: FleetRun, free_port: Callable[[], int]
) -> None:
    status = collect(fleet.folder)
    assert status.good
    assert [row.standing for row in status.fleet.rows] == ["good"] * 3
    shown = table(status, fleet.folder, time.time())
    assert "the fleet, as the trainer published it at " in shown
    assert f"http://localhost:{fleet.ports[1]}  good" in shown

    before, version = fleet.pids(), fleet.seen()["version"]
    config = fleet.folder / "vllm-2" / "vllm_bridge_config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"port": fleet.ports[1], "trainer": "it"}))
    fleet.roll()
    after = fleet.pids()
    assert {part for part in before if before[part] != after[part]} == {"vllm", "vllm-2", "vllm-3"}
    assert [line.split()[0] for line in fleet.said if "is back" in line] == [
        "vllm",
        "vllm-2",
        "vllm-3",
    ]
    seen = fleet.seen()
    assert seen["fewest"] == 2, "never was more than one server away"
    assert seen["version"] > version
    assert config.exists()

    # A further server joins the training that runs.
    port = free_port()
    options = replace(
        fleet.stack.options, vllm_ports=(*fleet.ports, port), parts=("vllm-4",), joining=("vllm-4",), resume=True
    )  # fmt: skip
    Starter(SmallStack(options), fleet.said.append).run()
    assert json.loads((fleet.folder / "joined.log").read_text()) == {
        "url": f"http://localhost:{port}"
    }
    assert last_start(fleet.folder).parts == parts_of(4)
    after = fleet.pids()

    # End of the others' rest: a server that the trainer keeps out delays the restart of a good one,
    # and comes first itself.
    (fleet.folder / f"quarantine-{fleet.ports[1]}").touch()
    fleet.until(lambda: not collect(fleet.folder).good, "the quarantine does not show")
    with pytest.raises(LauncherError) as caught:
        fleet.roll("vllm", seconds=3.0)
    assert "stopped at vllm; restarted before: none; not touched: none" in str(caught.value)
    assert "before vllm is stopped, vllm-2 must serve within" in str(caught.value)
    assert fleet.pids() == after


def test_a_server_that_does_not_come_back_stops_the_roll(fleet: FleetRun) -> None:
    before = fleet.pids()
    (fleet.folder / f"broken-{fleet.ports[1]}").touch()
    with pytest.raises(LauncherError) as caught:
        fleet.roll()
    lines = str(caught.value).splitlines()
    assert lines[0] == "stopped at vllm-2; restarted before: vllm; not touched: vllm-3"
    assert re.search(r"vllm-2 exited with code 1 after \d+ s; log: ", lines[1])
    assert any("no room for the model" in line for line in lines[2:])
    after = fleet.pids()
    assert after["vllm-3"] == before["vllm-3"]
    assert "vllm-2" not in after
    assert {row.part: row.state for row in collect(fleet.folder).rows}["vllm-2"] == "down"
    # The server that is down comes first now, and the two that are well are waited for.
    (fleet.folder / f"broken-{fleet.ports[1]}").unlink()
    fleet.said.clear()
    fleet.roll("vllm-3", "vllm-2")
    assert [line.split()[0] for line in fleet.said if "is back" in line] == ["vllm-2", "vllm-3"]

    # No trainer could send a restarted server its weights: nothing is touched.
    os.kill(fleet.pids()["trainer"], signal.SIGKILL)
    fleet.until(lambda: "trainer" not in fleet.pids(), "the trainer is still up")
    rest = fleet.pids()
    with pytest.raises(
        LauncherError, match="the trainer has ended, so vllm would never get the present weights"
    ):
        fleet.roll()
    assert fleet.pids() == rest
    with pytest.raises(
        LauncherError, match=r"trainer is not a vLLM server that start\.sh has started"
    ):
        fleet.roll("trainer")


numbers = st.none() | st.integers(0, 2**45)
texts = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), max_size=12)
rows = st.builds(
    FleetRow,
    texts,
    st.sampled_from(["joining", "good", "quarantined", "away"]),
    numbers,
    numbers,
    numbers,
    texts,
)


@given(st.lists(rows, min_size=1, max_size=5), st.none() | st.floats(0, 2e9))
def test_the_table_shows_every_server_and_is_good_only_without_those_that_are_kept_out(
    made: list[FleetRow], published: float | None
) -> None:
    fleet = Fleet(tuple(made), ("http://late:9001",), published)
    lines = fleet_table(fleet, 2e9)
    assert len(lines) == len(made) + 4
    assert all(row.standing in line for row, line in zip(made, lines[3:], strict=False))
    kept_out = {"quarantined", "away"} & {row.standing for row in made}
    assert fleet.good == (published is None or not kept_out)
