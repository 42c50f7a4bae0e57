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


class Routes:
    """The answers of a model over HTTP."""

    def __init__(self, model: Model, name: str) -> None:
        self.model, self.name = model, name

    def models(self) -> dict[str, Any]:
        row = {"id": self.name, "object": "model", "max_model_len": CONTEXT}
        return {"object": "list", "data": [row]}

    def control(self, rules: list[dict[str, Any]]) -> None:
        self.model.set(rules)

    def asked(self) -> list[dict[str, Any]]:
        return self.model.asked

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        ids = request["prompt"]
        if isinstance(ids, dict):
            ids = ids["prompt_token_ids"]
        else:
            ids = self.model.tokenizer.encode(ids)
        rows = self._rows(self.model.tokenizer.decode(ids), request, request.get("max_tokens"))
        tables = [
            [[{str(token): logprob(token, place)}] for place, token in enumerate(tokens)]
            for tokens, _, _ in rows
        ]
        answer = {
            "text": [text for _, _, text in rows],
            "prompt": None,
            "finish_reasons": [reason for _, reason, _ in rows],
            "logprobs": tables,
            "token_ids": [tokens for tokens, _, _ in rows],
            "prompt_token_ids": ids,
        }
        if (top := request.get("prompt_logprobs")) is not None:
            answer["prompt_logprobs"] = [
                None if i == 0 else prompt_table(token, i, top) for i, token in enumerate(ids)
            ]
        return answer

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt = self.model.tokenizer.apply_chat_template(
            readable(request["messages"]), tokenize=False, add_generation_prompt=True
        )
        most = request.get("max_tokens") or request.get("max_completion_tokens")
        choices = [
            {"finish_reason": reason, "message": {"role": "assistant", "content": text}}
            for _, reason, text in self._rows(prompt, request, most)
        ]
        return self._completion("chat", "chat.completion", choices)

    async def completions(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt = request["prompt"]
        if not isinstance(prompt, str):
            prompt = self.model.tokenizer.decode(prompt)
        choices = [
            {"finish_reason": reason, "text": text, "logprobs": None}
            for _, reason, text in self._rows(prompt, request, request.get("max_tokens") or 16)
        ]
        return self._completion("text", "text_completion", choices)

    def _rows(
        self, prompt: str, request: dict[str, Any], most: int | None
    ) -> list[tuple[list[int], str, str]]:
        """Return tokens, reason of the end and text of each answer."""
        stop = request.get("stop")
        sampled = [
            self.model.sampled(text, most, stop) for text in self.model.texts(prompt, request)
        ]
        return [(tokens, reason, self.model.decoded(tokens, stop)) for tokens, reason in sampled]

    def _completion(self, name: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": name,
            "object": kind,
            "created": 0,
            "model": self.name,
            "choices": [{"index": i, **choice} for i, choice in enumerate(choices)],
            "usage": None,
        }


def health() -> Response:
    return Response(status_code=200)


def build_app(model: Model, name: str) -> FastAPI:
    app, routes = FastAPI(), Routes(model, name)
    app.get("/health")(health)
    app.get("/v1/models")(routes.models)
    app.post("/control")(routes.control)
    app.get("/asked")(routes.asked)
    app.post("/generate")(routes.generate)
    app.post("/v1/chat/completions")(routes.chat)
    app.post("/v1/completions")(routes.completions)
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
