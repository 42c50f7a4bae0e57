"""Weights in shared memory: the same bytes for two processes, readable by no other user."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from vllm_patching.transport.shared_memory import (
    SharedMemoryError,
    export_to_shared_memory,
    open_handles,
    remove_leftovers,
)

ROOT = Path(__file__).resolve().parents[3]
NAMESPACE = os.stat("/proc/self/ns/pid").st_ino


@pytest.fixture
def exported() -> Iterator[tuple[dict[str, torch.nn.Parameter], dict[str, object]]]:
    torch.manual_seed(0)
    parameters = {
        "a.weight": torch.nn.Parameter(torch.randn(3, 5)),
        "b.weight": torch.nn.Parameter(torch.randn(7).to(torch.bfloat16)),
        "c.weight": torch.nn.Parameter(torch.randn(2, 2)),
    }
    handles = export_to_shared_memory(parameters, "test")
    yield parameters, handles
    os.unlink(str(handles["path"]))


def test_values_and_identity_survive_the_move(
    exported: tuple[dict[str, torch.nn.Parameter], dict[str, object]],
) -> None:
    parameters, handles = exported
    torch.manual_seed(0)
    assert torch.equal(parameters["a.weight"].data, torch.randn(3, 5))
    opened = open_handles(json.loads(json.dumps(handles)))
    for name, parameter in parameters.items():
        assert torch.equal(opened[name], parameter.data)
        assert opened[name].dtype == parameter.dtype


def test_another_process_writes_and_this_one_sees_it(
    exported: tuple[dict[str, torch.nn.Parameter], dict[str, object]],
) -> None:
    parameters, handles = exported
    code = (
        "import json, sys, torch\n"
        "from vllm_patching.transport.shared_memory import open_handles\n"
        "opened = open_handles(json.loads(sys.argv[1]))\n"
        "opened['a.weight'].mul_(2)\n"
    )
    before = {name: parameter.data.clone() for name, parameter in parameters.items()}
    subprocess.run(
        [sys.executable, "-c", code, json.dumps(handles)], check=True, timeout=120, cwd=ROOT
    )
    assert torch.equal(parameters["a.weight"].data, before["a.weight"] * 2)
    assert torch.equal(parameters["b.weight"].data, before["b.weight"])
    assert torch.equal(parameters["c.weight"].data, before["c.weight"])


def test_only_the_owner_can_open_it(
    exported: tuple[dict[str, torch.nn.Parameter], dict[str, object]],
) -> None:
    _, handles = exported
    assert stat.S_IMODE(os.stat(str(handles["path"])).st_mode) == 0o600


def test_a_server_that_has_gone_is_named() -> None:
    with pytest.raises(SharedMemoryError, match="/nowhere/x is not on this machine"):
        open_handles({"kind": "shm", "path": "/nowhere/x", "num_bytes": 1, "params": {}})
    with pytest.raises(SharedMemoryError, match="pickle"):
        open_handles({"kind": "pickle"})


def test_the_file_of_a_killed_server_is_removed_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead, living = (
        tmp_path / f"lockstep-{NAMESPACE}-{gone.pid}-tp0-x.weights",
        tmp_path / f"lockstep-{NAMESPACE}-{os.getpid()}-tp0-x.weights",
    )
    others = [
        tmp_path / "something.weights",
        tmp_path / "psm_12345678",
        # of another container, whose process has this number there
        tmp_path / f"lockstep-{NAMESPACE + 1}-{gone.pid}-tp0-x.weights",
        tmp_path / f"lockstep-0-{gone.pid}-x.memory",
        tmp_path / f"lockstep-{gone.pid}-tp0-x.weights",
        tmp_path / f"lockstep-{NAMESPACE}-{2**70}-x.memory",
    ]
    for path in (dead, living, *others):
        path.write_bytes(b"")
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living, *others])


def test_without_a_namespace_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr("vllm_patching.transport.shared_memory._process_namespace", lambda: 0)
    (tmp_path / f"lockstep-0-{gone.pid}-tp0-x.weights").write_bytes(b"")
    remove_leftovers(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_ranks_that_start_at_once_clear_up_together(tmp_path: Path) -> None:
    """Each finds files that another has removed by the time it looks at them."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for index in range(200):
        (tmp_path / f"lockstep-{NAMESPACE}-{gone.pid}-tp{index}-x.weights").write_bytes(b"")
    ranks, together = 4, threading.Barrier(4)

    def start() -> None:
        together.wait(120)
        remove_leftovers(tmp_path)

    with ThreadPoolExecutor(ranks) as pool:
        for rank in [pool.submit(start) for _ in range(ranks)]:
            rank.result(120)
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_an_error_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real full disk needs privileges; the kernel's answer to posix_fallocate is what is replaced
    here.
    """
    monkeypatch.setattr("vllm_patching.transport.shared_memory.SHM_DIR", tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryError, match="no room") as caught:
        export_to_shared_memory({"a": torch.nn.Parameter(torch.zeros(4))}, "test")
    shown = "".join(traceback.format_exception(caught.value))
    assert "OSError" not in shown, "start.sh would show that one, without a remedy"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file such as a server makes."""
    path = tmp_path / "lockstep-1-t.weights"
    path.write_bytes(bytes(64))
    path.chmod(0o600)
    return path


def handles_of(path: Path, num_bytes: int = 64) -> dict[str, object]:
    return {"kind": "shm", "path": str(path), "num_bytes": num_bytes, "params": {}}


def test_a_link_and_a_file_that_others_may_write_are_refused(weights: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(weights)
    assert open_handles(handles_of(weights)) == {}
    with pytest.raises(SharedMemoryError, match="link cannot be opened"):
        open_handles(handles_of(link))
    with pytest.raises(SharedMemoryError, match="64 of 65 bytes"):
        open_handles(handles_of(weights, 65))
    weights.chmod(0o620)
    with pytest.raises(SharedMemoryError, match=r"not a file of this user alone.*0620"):
        open_handles(handles_of(weights))


def test_the_file_of_another_user_is_refused(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: weights.stat().st_uid + 1)
    with pytest.raises(SharedMemoryError, match="not a file of this user alone"):
        open_handles(handles_of(weights))


def test_links_among_the_files_of_killed_servers_are_left_alone(tmp_path: Path) -> None:
    """Another user may have put them there, and then only that user can remove them."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    target, link = tmp_path / "mine", tmp_path / f"lockstep-{NAMESPACE}-{ended.pid}-x.weights"
    target.write_text("kept")
    link.symlink_to(target)
    remove_leftovers(tmp_path)
    assert link.is_symlink()
    assert target.read_text() == "kept"
