"""Other users of the machine cannot read what a service with a key writes."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from atroposlib.utils.files import use_private_files
from example_trainer.child_processes.files import private_files
from tests.atroposlib.service.conftest import Service, group

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
