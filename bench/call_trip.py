"""Record which files of this project a call passes through."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRACED = ("atroposlib", "environments", "example_trainer", "vllm_patching")
IMPORT_HOOK = ROOT / "atroposlib" / "compat" / "old_paths.py"
"""Every import of any package calls it, also in the libraries that a trip uses."""


class Trip:
    """Files that calls enter, in all threads that start after it and in this one."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.changes = 0
        self._last: dict[int, str] = {}
        self._lock = threading.Lock()

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call; for `sys.setprofile`."""
        if event != "call" or frame.f_code.co_name in (
            "<module>",
            "<lambda>",
            "<genexpr>",
            "<listcomp>",
            "<dictcomp>",
        ):
            return
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in TRACED:
            return
        if path == IMPORT_HOOK:
            return
        name, thread = str(path.relative_to(ROOT)), threading.get_ident()
        with self._lock:
            self.files.add(name)
            self.changes += self._last.get(thread, name) != name
            self._last[thread] = name

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Trace calls within the block.

        An earlier trip's garbage goes first: a generator that is collected is entered once more.
        """
        gc.collect()
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def row(self) -> dict[str, Any]:
        """Return the figures of the trip."""
        return {"files": len(self.files), "changes": self.changes, "names": sorted(self.files)}
