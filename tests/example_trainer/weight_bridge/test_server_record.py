"""Records of started servers lie in the temporary folder, where another user may have put something
first.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from example_trainer.weight_bridge.server_record import read_record, record_file, write_record


def test_a_record_follows_no_link_and_is_private(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep this")
    folder = tmp_path / "servers"
    folder.mkdir()
    record_file(9001, folder).symlink_to(precious)
    (folder / f"9001.{os.getpid()}").symlink_to(precious)
    write_record(9001, os.getpid(), tmp_path / "log", folder)
    assert precious.read_text() == "keep this"
    written = record_file(9001, folder)
    assert not written.is_symlink()
    assert written.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert read_record(9001, folder) is not None
    assert [path.name for path in folder.iterdir()] == ["9001.json"]


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "servers"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="it is a link; remove it, or set TMPDIR"):
        write_record(9001, os.getpid(), tmp_path / "log", link)
    assert list((tmp_path / "elsewhere").iterdir()) == []
