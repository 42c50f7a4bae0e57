"""A small real HTTP server in the place of a model that judges."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.http_server import Answer, HttpServer, Request


class Judge:
    """Answers with the next entry of `says`, the last one for ever. An entry is a text, a status to
    refuse with, bytes in place of JSON, or seconds to wait before the connection ends. With
    `cut_off`, the texts end by their limit of tokens.
    """

    def __init__(self) -> None:
        self.says: list[str | int | bytes | float] = ["Score: 5"]
        self.asked: list[dict[str, Any]] = []
        self.reason = "stop"
        self.lock, self.released = threading.Lock(), threading.Event()
        self.url = ""

    def answer(self, request: Request) -> Answer:
        if request.method == "GET":
            return 200, {"object": "list", "data": [{"id": "the-judge", "object": "model"}]}
        with self.lock:
            self.asked.append(request.json | {"authorization": request.headers["Authorization"]})
            text, *rest = self.says
            self.says = rest or [text]
        if isinstance(text, float):
            self.released.wait(text)
            return None
        if isinstance(text, bytes):
            return 200, text
        if isinstance(text, int):
            return text, {"error": {"message": f"refused with {text}"}}
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": self.reason, "message": message}
        completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        return 200, {**completion, "choices": [choice]}


@contextmanager
def judging() -> Iterator[Judge]:
    """A judge that answers until the block ends."""
    judge = Judge()
    with HttpServer(judge.answer) as server:
        judge.url = f"{server.url}/v1"
        yield judge
        judge.released.set()
