"""A small real HTTP server in the place of vLLM, for what does not depend on a model: `/generate`, `/health`, `/v1/models`.

Run as a process: `python standin_server.py --port P --tokenizer DIR [--version N]`. It answers arithmetic questions with
`\\boxed{a+b}` or `\\boxed{a-b}`, drawn at random when sampling and always the right one when greedy. Control it over HTTP:
POST /control {"version": 3, "delay": 0.5, "fail_next": 2, "text": "…", "generate_options": ["token_logprobs"]}.
"""

import argparse
import asyncio
import random
import re
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from transformers import PreTrainedTokenizerFast

MINUS_WORDS = r"gives|lost|takes|sold \d+ of|needs|fewer|minus|take away| - "


def build_app(tokenizer_dir: str, version: int, max_model_len: int) -> FastAPI:
    app = FastAPI()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    state: dict[str, Any] = {
        "version": version,
        "delay": 0.0,
        "fail_next": 0,
        "text": None,
        "requests": [],
        "epoch": None,
    }
    rng = random.Random(0)

    def answer(prompt: str, greedy: bool) -> str:
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
        return f"\\boxed{{{right if greedy or rng.random() < 0.5 else other}}}"

    @app.get("/health")
    def health() -> Response:
        return Response(status_code=200)

    @app.get("/weights")
    def weights(response: Response) -> dict[str, Any]:
        """Answer as our server does, if `serving` is set; otherwise, like a stock server, without
        such a route.
        """
        if state.get("serving") is None:
            response.status_code = 404
            return {}
        told = {
            "instance": "standin",
            "weight_version": state["version"],
            "weight_epoch": state["epoch"] or 0,
            "in_flight": 0,
        }
        return told | {
            "serving": state["serving"],
            "trouble": "" if state["serving"] else "quarantined: told to be",
        }

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": tokenizer_dir, "object": "model", "max_model_len": max_model_len}],
        }

    @app.get("/sampling")
    def sampling(response: Response) -> dict[str, Any]:
        if state.get("generate_options") is None:
            response.status_code = 404
        return {"generate_options": state.get("generate_options")}

    @app.post("/control")
    def control(change: dict[str, Any]) -> dict[str, Any]:
        state.update(change)
        return {"requests": len(state["requests"])}

    @app.get("/requests")
    def requests() -> list[Any]:
        return state["requests"]

    @app.post("/v1/chat/completions")
    async def chat(request: dict[str, Any]) -> dict[str, Any]:
        state["requests"].append(request)
        prompt = tokenizer.apply_chat_template(
            request["messages"], tokenize=False, add_generation_prompt=True
        )
        # Like several real endpoints, it may ignore n.
        count = 1 if state.get("ignore_n") else request.get("n") or 1
        texts = [answer(prompt, request.get("temperature") == 0.0) for _ in range(count)]
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

    @app.post("/generate")
    async def generate(request: dict[str, Any], response: Response) -> dict[str, Any]:
        state["requests"].append(request)
        await asyncio.sleep(state["delay"])
        if state.get("serving") is False:
            response.status_code = 503
            return {"error": "quarantined: told to be"}
        if state["fail_next"] > 0:
            state["fail_next"] -= 1
            response.status_code = 500
            return {"error": "asked to fail"}
        ids = request["prompt"]["prompt_token_ids"]
        texts = [
            answer(tokenizer.decode(ids), request.get("temperature", 1.0) == 0.0)
            for _ in range(request.get("n", 1))
        ]
        token_ids, reasons = [], []
        for text in texts:
            tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            reasons.append("stop" if len(tokens) <= request["max_tokens"] else "length")
            token_ids.append(tokens[: request["max_tokens"]])
        epochs = {} if state["epoch"] is None else {"weight_epochs": [state["epoch"]] * len(texts)}
        if request.get("token_logprobs"):
            logprobs: dict[str, Any] = {
                "token_logprobs": [
                    [-0.25 - 0.001 * i for i in range(len(row))] for row in token_ids
                ]
            }
        else:
            tables = [
                [[{str(t): -0.25 - 0.001 * i}][0:1] for i, t in enumerate(row)] for row in token_ids
            ]
            logprobs = {"logprobs": tables}
        return (
            epochs
            | logprobs
            | {
                "text": texts,
                "prompt": None,
                "finish_reasons": reasons,
                "token_ids": token_ids,
                "prompt_token_ids": ids,
                "weight_versions": [state["version"]] * len(texts),
                "weight_version_spans": [[[state["version"], len(row)]] for row in token_ids],
            }
        )

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
