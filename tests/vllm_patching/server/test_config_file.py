"""Each server's own file in a folder, and the next server on the port of a killed one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vllm_patching.protocol.manifest import Manifest
from vllm_patching.server.config_file import CONFIG_NAME, ConfigFile, ConfigFileError, runs_here

MANIFESTS = [Manifest(tp_rank=0, tp_size=1, entries=())]
ELSEWHERE = "trainer elsewhere:1"
"""It cannot be looked up, so it may live."""


def name_of(pid: int) -> str:
    return f"trainer {os.uname().nodename}:{pid}"


def leave(path: Path, **facts: object) -> None:
    """Files that a server of this or an older version leaves when it is killed."""
    path.write_text(json.dumps(facts))


def started(folder: Path, port: int = 9001) -> ConfigFile:
    """A server's file as it is when the server begins to answer."""
    file = ConfigFile(folder, port)
    file.claim()
    serve(file)
    return file


def serve(file: ConfigFile, trainer: str = "") -> None:
    """Publish it; with a trainer, as when that joins."""
    file.publish(
        {"instance": "i", "epoch": int(bool(trainer)), "trainer": trainer}, MANIFESTS, [None]
    )


def kill(file: ConfigFile) -> None:
    """The kernel's work on the file of a server that is killed."""
    assert file._descriptor is not None
    os.close(file._descriptor)
    file._descriptor = None


def read(path: Path) -> dict[str, object]:
    facts: dict[str, object] = json.loads(path.read_text())
    return facts


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def ended() -> str:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return name_of(process.pid)


def test_one_server_has_the_documented_name_and_takes_it_back(tmp_path: Path) -> None:
    file = started(tmp_path / "made")
    assert file.path == tmp_path / "made" / "vllm_bridge_config.json"
    assert file.path.stat().st_mode & 0o777 == 0o600
    facts = read(file.path)
    assert (facts["port"], facts["pid"], facts["config_path"]) == (
        9001,
        os.getpid(),
        str(file.path),
    )
    assert {"param_mappings", "ranks", "rendezvous"} < facts.keys()
    file.remove()
    assert names(file.path.parent) == []


def test_two_servers_have_a_file_each_and_neither_touches_the_others(tmp_path: Path) -> None:
    first, second = started(tmp_path, 9001), started(tmp_path, 9002)
    assert (first.path.name, second.path.name) == (CONFIG_NAME, "vllm_bridge_config-9002.json")
    assert (second.awaited, read(first.path)["port"], read(second.path)["port"]) == ("", 9001, 9002)
    serve(first, name_of(os.getpid()))
    second.remove()
    assert (names(tmp_path), read(first.path)["port"]) == ([CONFIG_NAME], 9001)
    third = started(tmp_path, 9003)
    assert third.awaited == "", "the first one's trainer is not this server's"
    first.remove()
    assert names(tmp_path) == ["vllm_bridge_config-9003.json"]


def test_the_same_port_at_another_address_has_a_name_too(tmp_path: Path) -> None:
    files = [started(tmp_path) for _ in range(3)]
    assert len({file.path for file in files}) == 3
    assert [file.awaited for file in files] == [""] * 3


def test_servers_that_start_at_once_have_a_file_each(tmp_path: Path) -> None:
    barrier = threading.Barrier(16)
    files: list[ConfigFile] = []

    def start(port: int) -> None:
        barrier.wait(120)
        files.append(started(tmp_path, port))

    threads = [threading.Thread(target=start, args=(port,)) for port in range(9001, 9017)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(read(file.path)["port"] for file in files) == list(range(9001, 9017))  # type: ignore[type-var]
    assert [file.path.name for file in files].count(CONFIG_NAME) == 1
    for file in files:
        file.remove()
    assert names(tmp_path) == []


SERVER = """
import sys, time
from pathlib import Path
from vllm_patching.server.config_file import ConfigFile
file = ConfigFile(Path(sys.argv[1]), 9001)
file.claim()
print(file.path, flush=True)
time.sleep(600)
"""


def test_a_process_that_was_killed_has_let_go(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, tmp_path], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == str(tmp_path / CONFIG_NAME)
        beside = started(tmp_path, 9002)
        assert beside.path.name == "vllm_bridge_config-9002.json"
        process.send_signal(signal.SIGKILL)
        process.wait()
    again = started(tmp_path, 9001)
    assert again.path.name == CONFIG_NAME


def test_a_living_trainer_is_waited_for_by_the_server_of_its_port(tmp_path: Path) -> None:
    killed = started(tmp_path)
    serve(killed, name_of(os.getpid()))
    kill(killed)
    other = started(tmp_path, 9002)
    assert (other.awaited, other.path.name) == ("", "vllm_bridge_config-9002.json")
    again = started(tmp_path)
    assert name_of(os.getpid()) in again.awaited
    assert str(tmp_path / CONFIG_NAME) in again.awaited, "it says what to delete"


def test_it_is_still_waited_for_when_the_server_is_killed_before_it_has_come(
    tmp_path: Path,
) -> None:
    file = started(tmp_path)
    serve(file, ELSEWHERE)
    for _ in range(3):
        kill(file)
        file = started(tmp_path)
        assert ELSEWHERE in file.awaited
    serve(file, name_of(os.getpid()))
    kill(file)
    assert name_of(os.getpid()) in started(tmp_path).awaited


def test_a_trainer_that_has_ended_is_not_waited_for(tmp_path: Path, ended: str) -> None:
    assert runs_here(ended) is False
    file = started(tmp_path)
    serve(file, ended)
    kill(file)
    assert started(tmp_path).awaited == ""


def test_a_dead_servers_file_under_another_port_gives_the_name_back_once_nobody_waits(
    tmp_path: Path, ended: str
) -> None:
    for trainer in ("", ended):
        file = started(tmp_path, 9001)
        serve(file, trainer)
        kill(file)
        next_one = started(tmp_path, 9002)
        assert (next_one.path.name, next_one.awaited) == (CONFIG_NAME, "")
        next_one.remove()


def test_a_second_server_that_was_killed_finds_its_file_when_the_first_has_gone(
    tmp_path: Path,
) -> None:
    first, second = started(tmp_path, 9001), started(tmp_path, 9002)
    serve(second, ELSEWHERE)
    kill(second)
    first.remove()
    again = started(tmp_path, 9002)
    assert ELSEWHERE in again.awaited
    assert names(tmp_path) == [CONFIG_NAME]


def test_a_file_of_a_version_that_named_no_port_counts(tmp_path: Path) -> None:
    leave(tmp_path / CONFIG_NAME, trainer=ELSEWHERE, epoch=2)
    assert ELSEWHERE in started(tmp_path).awaited


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"trainer": 1}', '{"trainer": "trainer a:1", "epoch": 0}']
)
def test_a_file_that_says_nothing_of_a_trainer_keeps_nobody_waiting(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / CONFIG_NAME).write_text(content)
    file = started(tmp_path)
    assert (file.awaited, file.path.name) == ("", CONFIG_NAME)


def test_whoever_deletes_the_file_of_a_living_server_finds_it_again_when_a_trainer_joins(
    tmp_path: Path,
) -> None:
    file = started(tmp_path, 9001)
    file.path.unlink()
    serve(file, ELSEWHERE)
    assert (read(file.path)["trainer"], file.path.name) == (ELSEWHERE, CONFIG_NAME)
    file.path.unlink()
    other = started(tmp_path, 9002)
    assert other.path.name == CONFIG_NAME
    serve(file, ELSEWHERE)
    assert (file.path.name, read(other.path)["port"]) == ("vllm_bridge_config-9001.json", 9002)
    other.path.unlink()
    leave(other.path, port=9003)
    other.remove()
    assert read(tmp_path / CONFIG_NAME)["port"] == 9003, "it was not this server's any more"


def test_links_are_followed_to_see_whose_they_are_and_never_written_through(tmp_path: Path) -> None:
    here, run = tmp_path / "here", tmp_path / "run"
    here.mkdir()
    of_the_run = started(run, 9001)
    (here / CONFIG_NAME).symlink_to(of_the_run.path)
    beside = started(here, 9002)
    assert beside.path.name == "vllm_bridge_config-9002.json"
    beside.remove()
    of_the_run.remove()
    alone = started(here, 9002)
    assert (alone.path.name, alone.path.is_symlink(), names(run)) == (CONFIG_NAME, False, [])


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigFileError, match=r"cannot write .*/file/vllm_bridge_config.json .*set LOGDIR"
    ):
        ConfigFile(tmp_path / "file", 9001).claim()


def test_a_full_disk_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = started(tmp_path)
    before = file.path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("vllm_patching.server.config_file.json.dump", full)
        with pytest.raises(ConfigFileError, match=r"No space left on device.*make room"):
            serve(file, ELSEWHERE)
    assert (file.path.read_bytes(), names(tmp_path)) == (before, [CONFIG_NAME])
    file.remove()


def test_without_locks_the_process_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    host, _, pid = ended.removeprefix("trainer ").rpartition(":")
    leave(
        tmp_path / CONFIG_NAME, hostname=host, pid=int(pid), port=9001, epoch=1, trainer=ELSEWHERE
    )
    first = started(tmp_path, 9001)
    assert ELSEWHERE in first.awaited
    assert started(tmp_path, 9002).path.name == "vllm_bridge_config-9002.json"


def test_a_claim_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_patching.server.config_file._CLAIM_SECONDS", 0.1)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConfigFileError, match="another process has held a lock on the folder"):
            ConfigFile(tmp_path, 9001).claim()
    finally:
        os.close(descriptor)


class Folder(RuleBasedStateMachine):
    """Servers of four ports come, go and are killed in one folder, in any order."""

    folders: Iterator[Path]
    ports = st.integers(9001, 9004)

    def __init__(self) -> None:
        super().__init__()
        self.folder = next(self.folders)
        self.living: dict[int, ConfigFile] = {}
        self.awaits: dict[int, str] = {}
        """By port, the trainer that a server which starts there must wait for."""
        self.killed: set[int] = set()

    @rule(port=ports)
    def start(self, port: int) -> None:
        if port not in self.living:
            file = self.living[port] = started(self.folder, port)
            trainer = self.awaits.get(port, "")
            assert (trainer in file.awaited, bool(file.awaited)) == (True, bool(trainer))

    @precondition(lambda self: self.living)
    @rule(port=ports, trainer=st.sampled_from([ELSEWHERE, name_of(os.getpid())]))
    def join(self, port: int, trainer: str) -> None:
        if port in self.living:
            serve(self.living[port], trainer)
            self.awaits[port] = trainer

    @rule(port=ports)
    def stop(self, port: int) -> None:
        if port in self.living:
            self.living.pop(port).remove()
            self.awaits.pop(port, None)
            self.killed.discard(port)

    @rule(port=ports)
    def kill(self, port: int) -> None:
        if port in self.living:
            kill(self.living.pop(port))
            self.killed.add(port)

    @invariant()
    def every_living_server_has_a_file_of_its_own(self) -> None:
        assert {port: read(file.path)["port"] for port, file in self.living.items()} == {
            port: port for port in self.living
        }

    @invariant()
    def nothing_else_lies_about(self) -> None:
        assert len(names(self.folder)) <= len(self.living.keys() | self.killed)

    def teardown(self) -> None:
        for file in self.living.values():
            file.remove()


def test_any_order_of_starts_and_ends(tmp_path_factory: pytest.TempPathFactory) -> None:
    Folder.folders = iter(lambda: tmp_path_factory.mktemp("folder"), None)
    run_state_machine_as_test(
        Folder, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )


def test_a_trainer_whose_end_nobody_has_asked_for_has_ended() -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 60
    while runs_here(name_of(zombie.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Path(f"/proc/{zombie.pid}").exists()
    zombie.wait()


def test_a_trainer_elsewhere_cannot_be_looked_up() -> None:
    assert runs_here(ELSEWHERE) is None
