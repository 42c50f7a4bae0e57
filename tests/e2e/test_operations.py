"""scripts/start.sh, status.sh, logs.sh and stop.sh with the real stack on the starter model, kill
-9 of everything included.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from example_trainer.child_processes.guard import descendants
from example_trainer.child_processes.ports import is_free
from example_trainer.launcher.records import KEYS_FILE, identify, read_keys
from tests.conftest import ROOT
from tests.e2e.conftest import FORKED_ENGINES
from tests.e2e.typed_commands import Operations, eventually
from tests.listening import Listener, listeners
from tests.still_running import command_line

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(540)]

PKILL = re.compile("vllm|grpo|python|run-api")
"""The command of users: pkill -9 -u $USER -f "vllm|grpo|python|run-api"."""

TWO_SERVERS = ("--vllm-servers", "2")


@pytest.fixture
def operations(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Operations]:
    ports: dict[str, int | str] = {name: free_port() for name in ("SERVICE", "MASTER", "METRICS")}
    made = Operations(tmp_path, ports | {"VLLM": f"{free_port()},{free_port()}"})
    made.environment |= FORKED_ENGINES
    yield made
    made.type("stop")


def documented_listeners() -> dict[str, str]:
    """The table of docs/operations.md: listener -> its address in a run."""
    text = (
        (ROOT / "docs/operations.md")
        .read_text(encoding="utf-8")
        .partition("| listener | port |")[2]
    )
    rows = [line.split("|") for line in text.split("\n\n")[0].splitlines()[2:]]
    return {row[1].strip(): row[4].strip() for row in rows}


def undocumented(operations: Operations) -> list[Listener]:
    """Sockets of the run that listen elsewhere than the table has it."""
    table = documented_listeners()
    named = {int(port): "vLLM server" for port in str(operations.ports["VLLM"]).split(",")}
    for name, listener in (
        ("SERVICE", "rollout service and its page"),
        ("METRICS", "trainer's figures"),
    ):
        named[int(operations.ports[name])] = listener
    named[int(operations.ports["MASTER"])] = "trainer's rendezvous"
    found = listeners(operations.pids())
    assert named.keys() <= {listener.port for listener in found}
    others = table["groups of trainer and vLLM ranks (Gloo)"]
    assert table["groups of vLLM's workers (Gloo, NCCL)"] == "as by hand", (
        "on the address of the machine's name"
    )
    places = {one: {table[named[one.port]] if one.port in named else others} for one in found}
    for one, addresses in places.items():
        if command_line(one.pid).startswith("VLLM::"):
            addresses.add(socket.gethostbyname(socket.gethostname()))
    return [one for one, addresses in places.items() if one.address not in addresses]


def places_of_keys(operations: Operations, keys: set[str]) -> list[str]:
    """Where a key stands: in a command line of any process, or in a file of the run besides the one
    for it.
    """
    assert len(keys) == 2
    assert all(len(key) >= 32 for key in keys)
    wanted = [key.encode() for key in keys]
    found = []
    for place in [*Path("/proc").glob("[0-9]*/cmdline"), *operations.folder.rglob("*")]:
        if not place.is_file() or place.name == KEYS_FILE:
            continue
        with contextlib.suppress(
            OSError
        ):  # a process that has just ended, or a file that is being replaced
            if any(key in place.read_bytes() for key in wanted):
                found.append(str(place))
    return found


def shows_the_page(said: str) -> bool:
    """Check that the run's page is at the printed address, and takes the key from the printed
    place.
    """
    address, variable, place = re.findall(
        r"see the run at (\S+/ui)\b.* (ROLLOUT_API_KEY) \w+ (\S+/keys\.env)", said
    )[0]
    with httpx.Client(trust_env=False, timeout=60, follow_redirects=True) as browser:
        assert "Sign in" in browser.get(address).text
        key = read_keys(Path(place).parent)[variable]
        page = browser.post(
            f"{address}/sign-in", data={"key": key}, headers={"Origin": address.removesuffix("/ui")}
        )
    return (page.status_code, "The stack" in page.text) == (200, True) and str(page.url) == address


def test_the_stack_is_started_watched_killed_and_cleaned_up(operations: Operations) -> None:
    started = operations.type(
        "start", "--cpu", *TWO_SERVERS, "--steps", "1000", "--batch-size", "16"
    )
    assert started.returncode == 0, started.stderr
    # Asked first: each question to status.sh is a process that computes for a second.
    log = operations.folder / "trainer.log"
    eventually(
        lambda: "Step 2/1000" in log.read_text(),
        lambda: operations.type("status").stdout,
        seconds=180,
    )
    eventually(
        lambda: (operations.status()["step"] or 0) >= 2,
        lambda: operations.type("status").stdout,
        seconds=120,
    )
    status = operations.status()
    assert status["good"]
    assert {row["part"]: row["detail"] for row in status["rows"]} == {
        "service": "healthy", "vllm": "healthy", "vllm-2": "healthy", "environment": "", "trainer": ""
    }  # fmt: skip
    assert status["served"] >= 2
    assert [server["standing"] for server in status["fleet"]["rows"]] == ["good", "good"]
    # Until all is killed nothing is sampled any more: training would take what the machine has.
    for pid in descendants(
        next(row["pid"] for row in status["rows"] if row["part"] == "environment")
    ):
        os.kill(pid, signal.SIGSTOP)
    for said in started.stdout, operations.type("status").stdout:
        assert shows_the_page(said), said
    expect_habits_of_the_launch_sequence_to_work(operations)
    expect_keys_to_be_kept(operations)
    assert step_shown(operations) >= 2

    twice = operations.type("start", *TWO_SERVERS)
    assert twice.returncode == 1
    assert "service runs already" in twice.stderr

    pids = operations.pids()
    expect_all_to_end_with_what_matches(operations, pids)
    down = operations.type("status")
    assert down.returncode == 1
    assert down.stdout.count("was killed, or the machine was restarted") == 5

    again = operations.type("start", "service", *TWO_SERVERS)
    assert again.returncode == 0, again.stderr
    assert "outlived" not in again.stdout
    assert not any(identify(pid) for pid in pids)
    assert not (operations.run_folder / "vllm_bridge_config.json").exists()

    ended = operations.type("stop")
    assert (ended.returncode, ended.stdout.split()[:4]) == (
        0,
        ["service", "exited", "with", "code"],
    )
    assert all(
        is_free(int(port)) for ports in operations.ports.values() for port in str(ports).split(",")
    )


def expect_habits_of_the_launch_sequence_to_work(operations: Operations) -> None:
    # The habits of the launch sequence work in the folder where start.sh was typed.
    assert "Step 2/1000" in (operations.folder / "trainer.log").read_text()
    assert "Shared memory setup complete!" in (operations.folder / "vllm.log").read_text(
        errors="replace"
    )
    assert "param_mappings" in (operations.folder / "vllm_bridge_config.json").read_text()
    assert re.search(
        r"trainer     \| .*Step \d+/1000", operations.type("logs", "--no-follow", "trainer").stdout
    )


def expect_all_to_end_with_what_matches(operations: Operations, pids: Iterable[int]) -> None:
    """Kill the processes that the guide's pattern matches."""
    # Read first: a process whose keeper has been killed dies too, and then has no command line. One
    # that had none before is gone: a part asks another program for something now and then.
    commands = {pid: command for pid in pids if (command := command_line(pid))}
    matched = {pid for pid, command in commands.items() if PKILL.search(command)}
    spared = commands.keys() - matched
    assert {commands[pid] for pid in spared} == {"VLLM::EngineCore"}, (
        "the pattern matches all but what has renamed itself"
    )
    for pid in matched:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(map(command_line, matched)), lambda: "not all ended", seconds=120)
    # The pattern does not match vLLM's engines. Each ends with the server that started it.
    eventually(
        lambda: not any(map(command_line, spared)),
        lambda: f"{spared} outlived their servers",
        seconds=120,
    )
    eventually(
        lambda: not any(row["pid"] for row in operations.status()["rows"]),
        lambda: "not all ended",
        seconds=120,
    )


def step_shown(operations: Operations) -> float:
    """Return the trainer's step by its metrics."""
    metrics = f"http://localhost:{operations.ports['METRICS']}/metrics"
    shown = httpx.get(metrics, timeout=60, trust_env=False).text
    (step,) = re.findall(r"^lockstep_trainer_step (\S+)", shown, re.MULTILINE)
    return float(step)


def expect_keys_to_be_kept(operations: Operations) -> None:
    """Expect only the holder of a key to be answered, and the key to stand in its file only."""
    # Other machines do not reach it, other users of this one have no key, and the key stands
    # nowhere but in its file.
    keys = read_keys(operations.run_folder)
    assert stat.S_IMODE((operations.run_folder / KEYS_FILE).stat().st_mode) == 0o600
    assert undocumented(operations) == []
    servers = [int(port) for port in str(operations.ports["VLLM"]).split(",")]
    guarded = [(port, path) for port in servers for path in ("/bridge/state", "/tokenize")]
    for port, path in [
        *guarded,
        *((int(operations.ports["SERVICE"]), path) for path in ("/status", "/batch")),
    ]:
        answer = httpx.get(f"http://localhost:{port}{path}", timeout=60, trust_env=False)
        assert answer.status_code == 401, (path, answer.text)
    bearer = {"Authorization": f"Bearer {keys['VLLM_API_KEY']}"}
    for port in servers:
        state = httpx.get(
            f"http://localhost:{port}/bridge/state", headers=bearer, timeout=60, trust_env=False
        ).json()
        assert state["healthy"] is True
    assert places_of_keys(operations, set(keys.values())) == []
