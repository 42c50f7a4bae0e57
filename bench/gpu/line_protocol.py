"""The worker's half of processes.Worker: commands come in on stdin, answers go out on what was stdout."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


class Answers:
    """Takes stdout for itself: whatever else this process prints goes to the log (stderr)."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def write(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def serve(answers: Answers, commands: dict[str, Callable[..., Any]]) -> None:
    """Carry out commands until stdin ends. An exception is an answer, and its trace goes to the log."""
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            answers.write({"ok": commands[name](**request)})
        except Exception as error:  # noqa: BLE001 - told to the parent, which decides
            traceback.print_exc()
            answers.write({"error": str(error), "type": type(error).__name__})
