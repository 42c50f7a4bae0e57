"""A server of deterministic answers that speaks `/generate` and `/v1`: what an environment gets
depends on what it asks.

    python model_standin.py --port 9001 --tokenizer FOLDER

POST /control sets the rules, [{"when": a regular expression, "answers": [...]}, …], and forgets
what was asked. The first rule whose expression is found in the prompt's end answers; the answers of
one prompt are handed out in turn, so a group asked with one request and a group asked with several
get the same. Logprobs are a function of token and place.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from transformers import PreTrainedTokenizerFast

CONTEXT = 60_000
"""The model's vocabulary: bytes, with this tokenizer."""
LAST = 4000
"""Characters of a prompt's end in which a rule's expression is looked for."""


def logprob(token: int, place: int, model: int = 7) -> float:
    """Between -0.97 and -0.01, the same in every process."""
    return -((token * 31 + place * model) % 97 + 1) / 100


class Model:
    """The rules, and what was asked since they were set."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.set([{"when": "", "answers": ["\\boxed{4}", "\\boxed{5}"]}])

    def set(self, rules: list[dict[str, Any]]) -> None:
        self.rules = [(re.compile(rule["when"], re.DOTALL), rule["answers"]) for rule in rules]
        self.given: Counter[str] = Counter()
        self.asked: list[dict[str, Any]] = []

    def texts(self, prompt: str, request: dict[str, Any]) -> list[str]:
        """As many answers as the request wants."""
        n = request.get("n") or 1
        answers = next(answers for when, answers in self.rules if when.search(prompt[-LAST:]))
        first = self.given[prompt]
        self.given[prompt] += n
        said = (
            "n",
            "temperature",
            "top_p",
            "max_tokens",
            "stop",
            "seed",
            "tools",
            "response_format",
        )
        self.asked.append(
            {"prompt": prompt}
            | {name: request[name] for name in said if request.get(name) is not None}
        )
        return [answers[(first + i) % len(answers)] for i in range(n)]

    def sampled(self, text: str, room: int | None, stop: Any = None) -> tuple[list[int], str]:
        """Token ids and the finish reason.

        They end with the end token, or as vLLM's do with the stop string's.
        """
        stopped = up_to_stop(text, stop)
        tokens = [*self.tokenizer.encode(stopped, add_special_tokens=False)]
        tokens += [self.tokenizer.eos_token_id] if stopped == text else []
        return (
            (tokens, "stop") if room is None or len(tokens) <= room else (tokens[:room], "length")
        )

    def decoded(self, tokens: list[int], stop: Any = None) -> str:
        """The text, without a stop string at its end."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return next(
            (text.removesuffix(word) for word in words_of(stop) if text.endswith(word)), text
        )


def words_of(stop: Any) -> list[str]:
    return [
        word for word in ([stop] if isinstance(stop, str) else stop or []) if isinstance(word, str)
    ]


def up_to_stop(text: str, stop: Any) -> str:
    """Up to the end of the first stop string."""
    ends = [text.index(word) + len(word) for word in words_of(stop) if word in text]
    return text[: min(ends)] if ends else text


def build_app(model: Model, name: str) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> Response:
        return Response(status_code=200)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "max_model_len": CONTEXT}],
        }

    @app.post("/control")
    def control(rules: list[dict[str, Any]]) -> None:
        model.set(rules)

    @app.get("/asked")
    def asked() -> list[dict[str, Any]]:
        return model.asked

    @app.post("/generate")
    async def generate(request: dict[str, Any]) -> dict[str, Any]:
        prompt = request["prompt"]
        ids = (
            prompt["prompt_token_ids"]
            if isinstance(prompt, dict)
            else model.tokenizer.encode(prompt)
        )
        rows = [
            model.sampled(text, request.get("max_tokens"), request.get("stop"))
            for text in model.texts(model.tokenizer.decode(ids), request)
        ]
        tables = [
            [[{str(token): logprob(token, place)}] for place, token in enumerate(tokens)]
            for tokens, _ in rows
        ]
        answer = {
            "text": [model.decoded(tokens, request.get("stop")) for tokens, _ in rows],
            "prompt": None,
            "finish_reasons": [reason for _, reason in rows],
            "logprobs": tables,
            "token_ids": [tokens for tokens, _ in rows],
            "prompt_token_ids": ids,
        }
        if (top := request.get("prompt_logprobs")) is not None:
            answer["prompt_logprobs"] = [
                None if i == 0 else prompt_table(token, i, top) for i, token in enumerate(ids)
            ]
        return answer

    @app.post("/v1/chat/completions")
    async def chat(request: dict[str, Any]) -> dict[str, Any]:
        prompt = model.tokenizer.apply_chat_template(
            readable(request["messages"]), tokenize=False, add_generation_prompt=True
        )
        room = request.get("max_tokens") or request.get("max_completion_tokens")
        rows = [
            model.sampled(text, room, request.get("stop")) for text in model.texts(prompt, request)
        ]
        choices = [
            {
                "index": i,
                "finish_reason": reason,
                "message": {
                    "role": "assistant",
                    "content": model.decoded(tokens, request.get("stop")),
                },
            }
            for i, (tokens, reason) in enumerate(rows)
        ]
        return {
            "id": "chat",
            "object": "chat.completion",
            "created": 0,
            "model": name,
            "choices": choices,
            "usage": None,
        }

    @app.post("/v1/completions")
    async def completions(request: dict[str, Any]) -> dict[str, Any]:
        prompt = request["prompt"]
        prompt = prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)
        rows = [
            model.sampled(text, request.get("max_tokens") or 16, request.get("stop"))
            for text in model.texts(prompt, request)
        ]
        choices = [
            {
                "index": i,
                "finish_reason": reason,
                "text": model.decoded(tokens, request.get("stop")),
                "logprobs": None,
            }
            for i, (tokens, reason) in enumerate(rows)
        ]
        return {
            "id": "text",
            "object": "text_completion",
            "created": 0,
            "model": name,
            "choices": choices,
            "usage": None,
        }

    return app


def prompt_table(token: int, place: int, top: int) -> dict[str, float]:
    """vLLM's table of one position of a prompt: the token itself first, then the `top` likeliest."""
    ids = dict.fromkeys([token, *((place * 13 + k) % 200 for k in range(top))])
    return {str(one): logprob(one, place, model=11) for one in ids}


def readable(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose content is text: of several parts, the text ones, and the kind of the others."""
    said = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(part.get("text") or f"[{part['type']}]" for part in content)
        said.append({"role": message["role"], "content": content})
    return said


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", required=True)
    arguments = parser.parse_args()
    loaded = PreTrainedTokenizerFast.from_pretrained(arguments.tokenizer)
    uvicorn.run(
        build_app(Model(loaded), arguments.tokenizer),
        host="127.0.0.1",
        port=arguments.port,
        log_level="warning",
    )
