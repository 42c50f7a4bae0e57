"""Files of the store: private, and still used when they lose their names."""

from __future__ import annotations

import os
import signal
import stat
from contextlib import closing
from pathlib import Path

import pytest

from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import ValidatedGroup
from atroposlib.service.sqlite_store import SqliteStore
from atroposlib.service.store import StoreError
from atroposlib.utils.files import use_private_files
from example_trainer.child_processes.files import private_files
from tests.atroposlib.service.conftest import Service, group
from tests.atroposlib.service.trainers import registered

KEY = "correct-horse-battery-staple"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("is_keyed", [True, False])
def test_a_service_with_a_key_writes_private_files(tmp_path: Path, is_keyed: bool) -> None:
    run = tmp_path / "run"
    run.mkdir()
    store = run / "rollouts.db"
    flags = ("--store", str(store), "--run-folder", str(run), "--host", "127.0.0.1")
    before = os.umask(0o022)
    try:
        for environ in ({}, {"ROLLOUT_API_KEY": KEY} if is_keyed else {}):
            service = Service(tmp_path, *flags, environ=environ).start()
            service.http.headers["authorization"] = f"Bearer {KEY}"
            service.begin()
            service.post("/scored_data", group())
            assert service.signal(signal.SIGTERM) == 0
    finally:
        os.umask(before)
    written = [store, *(run / "observed").rglob("*"), run / "observed"]
    assert len(written) > 3
    open_to_others = {path.name for path in written if mode(path) & 0o077}
    assert bool(open_to_others) != is_keyed, open_to_others


def test_files_of_before_are_closed_and_links_are_left_alone(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "observed"
    elsewhere.write_text("")
    elsewhere.chmod(0o644)
    folder.mkdir(mode=0o755)
    (folder / "old.jsonl").write_text("")
    (folder / "old.jsonl").chmod(0o664)
    (folder / "link").symlink_to(elsewhere)
    before = os.umask(0o022)
    try:
        use_private_files([folder, tmp_path / "missing"])
        (folder / "new").write_text("")
    finally:
        os.umask(before)
    assert mode(folder) == 0o700
    assert mode(folder / "old.jsonl") == mode(folder / "new") == 0o600
    assert mode(elsewhere) == 0o644


def test_the_umask_is_put_back(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with private_files():
            (tmp_path / "private").write_text("")
        with private_files(wanted=False):
            (tmp_path / "open").write_text("")
    finally:
        os.umask(before)
    assert (mode(tmp_path / "private"), mode(tmp_path / "open")) == (0o600, 0o644)


@pytest.mark.parametrize("suffix", ["", "-wal"])
@pytest.mark.parametrize("then", ["nothing", "another file", "a folder"])
def test_nothing_is_accepted_into_a_file_that_lost_its_name(
    tmp_path: Path, suffix: str, then: str
) -> None:
    path = tmp_path / "rollouts.db"
    store, queue = SqliteStore(path), RolloutQueue()
    queue.register(registered(1, "g", "p", 8, 128, "c", 5, 0, 100, max_staleness=None))
    queue.add(ValidatedGroup(b"{}", 4, 10, None, (), None), 0.0)
    store.commit([queue.take_changes()])
    file, moved = Path(f"{path}{suffix}"), path.with_name("moved")
    file.rename(moved)
    if then == "another file":
        file.write_bytes(b"")
    elif then == "a folder":
        file.mkdir()
    queue.add(ValidatedGroup(b"{}", 4, 10, None, (), None), 0.0)
    changes = queue.take_changes()
    with pytest.raises(
        StoreError, match=f"{file.name} (is not in its place|was replaced).*Put the old file back"
    ):
        store.commit([changes])
    if then == "a folder":
        file.rmdir()
    moved.replace(file)
    store.commit([changes])
    assert len(store.load().groups()) == 2
    store.close()
    with closing(SqliteStore(path)) as again:
        assert len(again.load().groups()) == 2
