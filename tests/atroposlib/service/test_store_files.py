"""Files that lose their names while a service has them open."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from atroposlib.service.queue import RolloutQueue
from atroposlib.service.records import ValidatedGroup
from atroposlib.service.sqlite_store import SqliteStore
from atroposlib.service.store import StoreError
from tests.atroposlib.service.trainers import registered


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
        StoreError, match=f"{file.name} (is not in its place|was replaced).*put the old file back"
    ):
        store.commit([changes])
    if then == "a folder":
        file.rmdir()
    moved.replace(file)
    store.commit([changes])
    assert len(store.load().queued) == 2
    store.close()
    with closing(SqliteStore(path)) as again:
        assert len(again.load().queued) == 2
