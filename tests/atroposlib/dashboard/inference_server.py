"""A process that answers what the page asks an inference server, and is killed:
`python inference_server.py PORT [INSTANCE]`.

Tests of the page's text about a server that is gone need a process that can go, not a model.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.http_server import Answer, HttpServer, Request

BRIDGE = {
    "checksums": ["abc"],
    "updates": 3,
    "failures": 0,
    "last_update": {"to_paused": 0.01, "halted": 0.25},
}


def answers_at(answers: Callable[[], Mapping[str, Any]]) -> Callable[[Request], Answer]:
    """Return a function that answers paths with their JSON of the moment, and others with 404."""

    def answer(request: Request) -> Answer:
        found = answers().get(request.path)
        if found is None:
            return 404, None
        return 200, found

    return answer


def main(port: int, instance: str) -> None:
    """Answer until killed."""
    weights = {"instance": instance, "weight_version": 3, "weight_epoch": 7, "in_flight": 0}
    weights["serving"] = True
    answers = {"/weights": weights, "/bridge/state": BRIDGE}
    with HttpServer(answers_at(lambda: answers), port):
        threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
