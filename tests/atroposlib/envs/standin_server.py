"""A small real HTTP server in the place of vLLM, for what does not depend on a model: `/generate`, `/health`, `/v1/models`.

Run as a process: `python standin_server.py --port P --tokenizer DIR [--version N]`. It answers arithmetic questions with
`\\boxed{a+b}` or `\\boxed{a-b}`, drawn at random when sampling and always the right one when greedy. Control it over HTTP:
POST /control {"version": 3, "delay": 0.5, "fail_next": 2, "text": "…", "generate_options": ["token_logprobs"]}.
"""

import argparse
import asyncio
import random
import re
from base64 import b64encode
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from transformers import PreTrainedTokenizerFast

MINUS_WORDS = r"gives|lost|takes|sold \d+ of|needs|fewer|minus|take away| - "


class Standin:
    """The state of the server, and its answers."""

    def __init__(self, tokenizer_dir: str, version: int, max_model_len: int) -> None:
        self.name, self.max_model_len = tokenizer_dir, max_model_len
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
        self.state: dict[str, Any] = {
            "version": version,
            "delay": 0.0,
            "fail_next": 0,
            "text": None,
            "requests": [],
            "epoch": None,
        }
        self.random = random.Random(0)

    def answer(self, prompt: str, greedy: bool) -> str:
        """Return the text for a prompt."""
        state = self.state
        if state["text"] is not None:
            return state["text"]
        if state.get("cycle"):
            state["cycle"] = [*state["cycle"][1:], state["cycle"][0]]
            return state["cycle"][-1]
        # Only the question itself, not what an earlier turn or a system prompt may hold.
        question = prompt.rpartition("<|im_start|>user")[2]
        numbers = [int(n) for n in re.findall(r"\d+", question)] or [0]
        a, b = numbers[0], numbers[-1]
        minus = re.search(MINUS_WORDS, question) is not None
        right, other = (a - b, a + b) if minus else (a + b, a - b)
        return f"\\boxed{{{right if greedy or self.random.random() < 0.5 else other}}}"

    def weights(self, response: Response) -> dict[str, Any]:
        """Answer as our server does, if `serving` is set; otherwise, like a stock server, without
        such a route.
        """
        state = self.state
        if state.get("serving") is None:
            response.status_code = 404
            return {}
        return {
            "instance": "standin",
            "weight_version": state["version"],
            "weight_epoch": state["epoch"] or 0,
            "in_flight": 0,
            "serving": state["serving"],
            "trouble": "" if state["serving"] else "quarantined: told to be",
        }

    def models(self) -> dict[str, Any]:
        row = {"id": self.name, "object": "model", "max_model_len": self.max_model_len}
        return {"object": "list", "data": [row]}

    def sampling(self, response: Response) -> dict[str, Any]:
        if self.state.get("generate_options") is None:
            response.status_code = 404
        return {"generate_options": self.state.get("generate_options")}

    def control(self, change: dict[str, Any]) -> dict[str, Any]:
        self.state.update(change)
        return {"requests": len(self.state["requests"])}

    def requests(self) -> list[Any]:
        return self.state["requests"]

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        self.state["requests"].append(request)
        prompt = self.tokenizer.apply_chat_template(
            request["messages"], tokenize=False, add_generation_prompt=True
        )
        # Like several real endpoints, it may ignore n.
        count = 1 if self.state.get("ignore_n") else request.get("n") or 1
        texts = [self.answer(prompt, request.get("temperature") == 0.0) for _ in range(count)]
        return {
            "id": "chat-1",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": [
                {
                    "index": i,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": text},
                }
                for i, text in enumerate(texts)
            ],
        }

    async def generate(self, request: dict[str, Any], response: Response) -> dict[str, Any]:
        state = self.state
        state["requests"].append(request)
        await asyncio.sleep(state["delay"])
        if state.get("serving") is False:
            response.status_code = 503
            return {"error": "quarantined: told to be"}
        if state["fail_next"] > 0:
            state["fail_next"] -= 1
            response.status_code = 500
            return {"error": "asked to fail"}
        return self.generated(request)

    def generated(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of /generate."""
        ids, most, version = (
            request["prompt"]["prompt_token_ids"],
            request["max_tokens"],
            self.state["version"],
        )
        greedy = request.get("temperature", 1.0) == 0.0
        texts = [
            self.answer(self.tokenizer.decode(ids), greedy) for _ in range(request.get("n", 1))
        ]
        whole = [
            [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
            for text in texts
        ]
        token_ids = [tokens[:most] for tokens in whole]
        answer = {
            "text": texts,
            "prompt": None,
            "finish_reasons": ["stop" if len(tokens) <= most else "length" for tokens in whole],
            "token_ids": token_ids,
            "prompt_token_ids": ids,
            "weight_versions": [version] * len(texts),
            "weight_version_spans": [[[version, len(row)]] for row in token_ids],
        }
        if request.get("routed_experts"):
            number = len(self.state["requests"]) % 100
            answer["routed_experts"] = [routed(number, len(ids) + len(row)) for row in token_ids]
        if self.state["epoch"] is not None:
            answer["weight_epochs"] = [self.state["epoch"]] * len(texts)
        if request.get("token_logprobs"):
            answer["token_logprobs"] = [
                [-0.25 - 0.001 * i for i in range(len(row))] for row in token_ids
            ]
        else:
            answer["logprobs"] = [
                [[{str(t): -0.25 - 0.001 * i}] for i, t in enumerate(row)] for row in token_ids
            ]
        return answer


def routed(number: int, tokens: int) -> str:
    """Return the experts of a sequence, in two layers: each token's experts name the request."""
    row = bytes([number, 100 + number]) * 2
    return f"2x2x1:{b64encode(row * (tokens - 1)).decode()}"


def health() -> Response:
    return Response(status_code=200)


def build_app(tokenizer_dir: str, version: int, max_model_len: int) -> FastAPI:
    app, standin = FastAPI(), Standin(tokenizer_dir, version, max_model_len)
    app.get("/health")(health)
    app.get("/weights")(standin.weights)
    app.get("/v1/models")(standin.models)
    app.get("/sampling")(standin.sampling)
    app.post("/control")(standin.control)
    app.get("/requests")(standin.requests)
    app.post("/v1/chat/completions")(standin.chat)
    app.post("/generate")(standin.generate)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--version", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, default=2048)
    arguments = parser.parse_args()
    uvicorn.run(
        build_app(arguments.tokenizer, arguments.version, arguments.max_model_len),
        host="127.0.0.1",
        port=arguments.port,
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
