"""A rollout service with scripted answers."""

from __future__ import annotations

from typing import Any

from tests.http_server import Answer, HttpServer, Request


class Scripted(HttpServer):
    """Answers each path from a list, and repeats the last entry.

    An int is a status, None a cut connection. Paths without a list get 404.
    """

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self.scripts = answers
        super().__init__(self.answer_of)

    def answer_of(self, request: Request) -> Answer:
        script = self.scripts.get(request.path.split("?")[0], [404])
        answer = script[0]
        if len(script) > 1:
            script.pop(0)
        if answer is None:
            return None
        if isinstance(answer, int):
            return answer, answer
        if isinstance(answer, str):
            return 200, answer.encode()
        return 200, answer

    @property
    def seen(self) -> list[tuple[str, Any]]:
        return [(request.path, request.json) for request in self.requests]

    def paths(self) -> list[str]:
        return [request.path for request in self.requests]
