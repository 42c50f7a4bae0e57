"""A small real HTTP server in the place of a teacher, for what does not depend on a model. It runs
in a thread of the test.

As `ours` it has /generate with `prompt_token_logprobs`, /sampling and /vocabulary; as `stock` only
what any vLLM has.
"""

import asyncio
import threading
import time
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from example_trainer.child_processes.ports import PortReservations

_PORTS = PortReservations()
"""No other environment takes one while its teacher is away."""


def expected(tokens: list[int]) -> list[float | None]:
    """The logprobs that it answers for a sequence."""
    return [None, *(-(token + 1) / 1024 - at for at, token in enumerate(tokens[1:]))]


class StandinTeacher:
    """Start it with `with`; `stop` and `start` are a crash and a restart on the same port."""

    def __init__(self, tokenizer: Any, kind: str = "ours"):
        self.tokenizer, self.kind = tokenizer, kind
        self.vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.shift = 0  # of every id that /tokenize answers
        self.context = 512
        self.root = "/models/first"
        self.wrong_token: int | None = None  # whose logprob it does not have
        self.key: str | None = None
        self.status = 200
        self.answer: Any = None
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0
        self.port = _PORTS.pick()
        self.url = f"http://127.0.0.1:{self.port}"

    def app(self) -> FastAPI:
        app = FastAPI()
        app.middleware("http")(self.watch)
        app.get("/health")(lambda: {})
        app.get("/v1/models")(self.models)
        app.post("/v1/completions")(self.completions)
        app.post("/tokenize")(self.tokenize)
        if self.kind == "ours":
            app.get("/sampling")(lambda: {"generate_options": ["prompt_token_logprobs"]})
            app.get("/vocabulary")(lambda: {"vocabulary": self.vocabulary})
            app.post("/generate")(self.generate)
        return app

    async def watch(self, request: Request, call_next: Any) -> Any:
        self.paths.append(request.url.path)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "no"}, 401)
        if self.status != 200 and request.method == "POST":
            return JSONResponse({"error": "asked to fail"}, self.status)
        return await call_next(request)

    async def models(self) -> dict[str, Any]:
        row = {"id": "the-teacher", "root": self.root, "created": time.time()}
        return {"data": [row | {"max_model_len": self.context}]}

    async def score(self, tokens: list[int]) -> list[float | None]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        scores = self.answer if self.answer is not None else expected(tokens)
        return [
            0.5 if token == self.wrong_token else score
            for token, score in zip(tokens, scores, strict=False)
        ]

    async def completions(self, body: dict[str, Any]) -> JSONResponse:
        wanted = body["model"] == "the-teacher" and body["prompt_logprobs"] == 0
        if not wanted or body["max_tokens"] < 1:
            return JSONResponse({"error": f"no such model or request: {body}"}, 404)
        rows = zip(body["prompt"], await self.score(body["prompt"]), strict=True)
        tables = [
            None if v is None else {str(token): {"logprob": v, "rank": 1}} for token, v in rows
        ]
        return JSONResponse({"choices": [{"text": "x", "prompt_logprobs": tables}]})

    async def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        return {"tokens": [token + self.shift for token in ids]}

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_token_logprobs": await self.score(body["prompt"]["prompt_token_ids"])}

    def start(self) -> None:
        self.server = uvicorn.Server(
            uvicorn.Config(self.app(), "127.0.0.1", self.port, log_level="error", lifespan="off")
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            if not self.thread.is_alive():
                raise RuntimeError("the stand-in for a teacher did not start")
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(30)

    def __enter__(self) -> "StandinTeacher":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
