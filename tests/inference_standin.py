"""The stand-in for an inference server in tests that do not depend on a model: all of them use
this one. It has the routes of our server and of a stock vLLM over real connections.

    python tests/inference_standin.py --port 9001 [--tokenizer FOLDER] [--control JSON]
    python tests/inference_standin.py --port 9001 --name MODEL --fault FAULT

It runs as a process of its own, in a thread of a test (`with Standin(...)`) or in the test's event
loop (`await serve()`). Its attributes decide its answers. POST /control, or `control` in a test,
changes those in CONTROLLED: {"version": 3, "delay": 0.5, "fail_next": 2, "text": "…"}.

It generates the `text`, or the next of a `cycle`, or the answers of the first of the `rules` found
in the prompt's end. A rule is {"when": a regular expression, "answers": [...]}. The answers of a
rule are handed out in turn for each prompt, so one request for a group and several requests get the
same. Without all these it answers arithmetic questions with `\\boxed{a+b}` or `\\boxed{a-b}`: drawn
at random when sampling, the right one when greedy. Without a tokenizer it answers with the first
token of the prompt. Logprobs are a function of token and place.

As a process it may also have a `fault` of a server that is started and ended. `crashes` ends it
with an error while it loads, `crashes-later` after it was seen to be ready. `never-ready` keeps it
loading, `loads-N` for N seconds. `version-N` answers /weights; `other-program` knows no models;
`ends-slowly` takes five seconds to end. `in-a-child` serves from a child process that does not end with
its parent. Then each start appends the model's name to $STANDIN_STARTS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

MINUS_WORDS = r"gives|lost|takes|sold \d+ of|needs|fewer|minus|take away| - "
LAST = 4000
"""Characters of a prompt's end in which a rule's expression is looked for."""
SAID = ("n", "temperature", "top_p", "max_tokens", "stop", "seed", "tools", "response_format")
"""Fields of a request that GET /asked shows."""
LOADING_SECONDS = 0.2
BRIDGE = {
    "checksums": ["abc"],
    "updates": 3,
    "failures": 0,
    "last_update": {"to_paused": 0.01, "halted": 0.25},
}
"""The first answer to GET /bridge/state, a route of a server with /weights."""
OURS = ("prompt_token_logprobs",)
"""The `generate_options` of a server that scores prompts by our own route."""
CONTROLLED = {
    "version": 0,
    "epoch": None,
    "serving": None,
    "trouble": "quarantined: told to be",
    "instance": "standin",
    "delay": 0.0,
    "fail_next": 0,
    "text": None,
    "cycle": None,
    "rules": None,
    "ignore_n": False,
    "context": 2048,
    "generate_options": None,
}
"""Attributes that may be changed while it runs, with their first values. Like a stock server it
lacks /weights while `serving` is None, and /sampling and /vocabulary without `generate_options`."""
Told = tuple[int, Any]
"""Status and content of an answer."""


def logprob(token: int, place: int, model: int = 7) -> float:
    """Between -0.97 and -0.01, the same in every process."""
    return -((token * 31 + place * model) % 97 + 1) / 100


def expected(tokens: list[int]) -> list[float | None]:
    """Return the logprobs that it answers for a prompt."""
    return [None, *(logprob(token, at, 11) for at, token in enumerate(tokens[1:], 1))]


def prompt_table(token: int, place: int, top: int) -> dict[str, float]:
    """vLLM's table of one position of a prompt: the token itself first, then the `top` likeliest."""
    ids = dict.fromkeys([token, *((place * 13 + k) % 200 for k in range(top))])
    return {str(one): logprob(one, place, model=11) for one in ids}


def words_of(stop: Any) -> list[str]:
    return [
        word for word in ([stop] if isinstance(stop, str) else stop or []) if isinstance(word, str)
    ]


def up_to_stop(text: str, stop: Any) -> str:
    """Up to the end of the first stop string."""
    ends = [text.index(word) + len(word) for word in words_of(stop) if word in text]
    return text[: min(ends)] if ends else text


def readable(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose content is text: of several parts, the text ones, and the kind of the others."""
    said = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(part.get("text") or f"[{part['type']}]" for part in content)
        said.append({"role": message["role"], "content": content})
    return said


def routed(number: int, tokens: int) -> str:
    """Return the experts of a sequence, in two layers: each token's experts name the request."""
    row = bytes([number, 100 + number]) * 2
    return f"2x2x1:{b64encode(row * (tokens - 1)).decode()}"


class Answers:
    """The answers to requests, without HTTP.

    Attributes:
        requests: the bodies of all requests for text.
        at_once, most_at_once: requests for scores under way.
        scores: its answer to a request for scores, where it is not the right one.
        wrong_token: one whose logprob it does not have.
        shift: of every id that /tokenize answers.
    """

    def __init__(self, tokenizer: Any = None, name: str = "the-model") -> None:
        self.tokenizer, self.name = tokenizer, name
        self.root = "/models/first"
        self.vocabulary: dict[str, int] = tokenizer.get_vocab() if tokenizer else {}
        self.shift = self.at_once = self.most_at_once = 0
        self.wrong_token: int | None = None
        self.scores: Any = None
        self.random = random.Random(0)
        self.requests: list[dict[str, Any]] = []
        self.given: Counter[str] = Counter()
        self.control(**CONTROLLED)

    def control(self, **change: Any) -> dict[str, Any]:
        """Change how it answers. Returns how many requests there were; new rules forget them."""
        if unknown := change.keys() - CONTROLLED.keys():
            raise ValueError(f"there is nothing to control by the name of {sorted(unknown)}")
        vars(self).update(change)
        if change.get("rules"):
            self.given.clear()
            self.requests.clear()
        return {"requests": len(self.requests)}

    def prompt_of(self, request: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Return the text and the tokens of a request's prompt."""
        prompt = request.get("prompt")
        if prompt is None:
            prompt = self.tokenizer.apply_chat_template(
                readable(request["messages"]), tokenize=False, add_generation_prompt=True
            )
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        return self.tokenizer.decode(ids) if self.tokenizer else "", ids

    def texts(self, prompt: str, request: Mapping[str, Any]) -> list[str]:
        """As many answers as the request wants; like several real endpoints, it may ignore n."""
        count = 1 if self.ignore_n else request.get("n") or 1
        if self.rules is None:
            return [self.answer(prompt, request.get("temperature") == 0.0) for _ in range(count)]
        end = prompt[-LAST:]
        answers = next(
            rule["answers"] for rule in self.rules if re.search(rule["when"], end, re.DOTALL)
        )
        first = self.given[prompt]
        self.given[prompt] += count
        return [answers[(first + i) % len(answers)] for i in range(count)]

    def answer(self, prompt: str, greedy: bool) -> str:
        """Return the text for a prompt."""
        if self.text is not None:
            return str(self.text)
        if self.cycle:
            self.cycle = [*self.cycle[1:], self.cycle[0]]
            return str(self.cycle[-1])
        # Only the question itself, not what an earlier turn or a system prompt may hold.
        question = prompt.rpartition("<|im_start|>user")[2]
        numbers = [int(n) for n in re.findall(r"\d+", question)] or [0]
        a, b = numbers[0], numbers[-1]
        minus = re.search(MINUS_WORDS, question) is not None
        right, other = (a - b, a + b) if minus else (a + b, a - b)
        return f"\\boxed{{{right if greedy or self.random.random() < 0.5 else other}}}"

    def rows(self, request: Mapping[str, Any]) -> list[tuple[list[int], str, str]]:
        """Return tokens, reason of the end and text of each answer to a request.

        The tokens end with the end token, or as vLLM's do with the stop string's.
        """
        prompt, ids = self.prompt_of(request)
        if self.tokenizer is None:
            return [(ids[:1], "stop", "")]
        most = request.get("max_tokens") or request.get("max_completion_tokens")
        stop = request.get("stop")
        found = []
        for text in self.texts(prompt, request):
            stopped = up_to_stop(text, stop)
            tokens = [*self.tokenizer.encode(stopped, add_special_tokens=False)]
            tokens += [self.tokenizer.eos_token_id] if stopped == text else []
            reason = "stop" if most is None or len(tokens) <= most else "length"
            tokens = tokens[:most]
            said = self.tokenizer.decode(tokens, skip_special_tokens=True)
            ends = (said.removesuffix(word) for word in words_of(stop) if said.endswith(word))
            found.append((tokens, reason, next(ends, said)))
        return found

    async def scored(self, tokens: list[int]) -> list[float | None]:
        """Return the logprobs of a prompt's tokens."""
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        scores = self.scores if self.scores is not None else expected(tokens)
        return [
            0.5 if token == self.wrong_token else score
            for token, score in zip(tokens, scores, strict=False)
        ]

    async def generation(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of /generate."""
        if request.get("prompt_token_logprobs"):
            return {"prompt_token_logprobs": await self.scored(self.prompt_of(request)[1])}
        rows, (_, ids) = self.rows(request), self.prompt_of(request)
        token_ids = [tokens for tokens, _, _ in rows]
        answer = {
            "text": [text for _, _, text in rows],
            "prompt": None,
            "finish_reasons": [reason for _, reason, _ in rows],
            "token_ids": token_ids,
            "prompt_token_ids": ids,
            "weight_versions": [self.version] * len(rows),
            "weight_version_spans": [[[self.version, len(tokens)]] for tokens in token_ids],
        }
        if request.get("routed_experts"):
            number = len(self.requests) % 100
            answer["routed_experts"] = [routed(number, len(ids) + len(row)) for row in token_ids]
        if self.epoch is not None:
            answer["weight_epochs"] = [self.epoch] * len(rows)
        logprobs = [[logprob(token, i) for i, token in enumerate(row)] for row in token_ids]
        if request.get("token_logprobs"):
            answer["token_logprobs"] = logprobs
        else:
            answer["logprobs"] = [
                [[{str(token): value}] for token, value in zip(row, values, strict=True)]
                for row, values in zip(token_ids, logprobs, strict=True)
            ]
        if (top := request.get("prompt_logprobs")) is not None:
            answer["prompt_logprobs"] = [
                None if i == 0 else prompt_table(token, i, top) for i, token in enumerate(ids)
            ]
        return answer

    def completed(self, request: Mapping[str, Any], chat: bool) -> dict[str, Any]:
        """Return the answer of a route of OpenAI's."""
        choices: list[dict[str, Any]] = []
        limit = {} if chat else {"max_tokens": 16}
        for index, (_, reason, text) in enumerate(self.rows({**limit, **request})):
            said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choices.append({"index": index, "finish_reason": reason, "logprobs": None} | said)
        kind = "chat.completion" if chat else "text_completion"
        return {
            "id": kind.partition(".")[0],
            "object": kind,
            "created": 0,
            "model": request.get("model", self.name),
            "choices": choices,
            "usage": None,
        }

    async def prompt_scored(self, request: Mapping[str, Any]) -> Told:
        """Score a prompt as a stock server does."""
        wanted = request["model"] == self.name and request["prompt_logprobs"] == 0
        if not wanted or request["max_tokens"] < 1:
            return 404, {"error": f"no such model or request: {request}"}
        rows = zip(request["prompt"], await self.scored(request["prompt"]), strict=True)
        tables = [
            None if v is None else {str(token): {"logprob": v, "rank": 1}} for token, v in rows
        ]
        return 200, {"choices": [{"text": "x", "prompt_logprobs": tables}]}


class Standin(Answers):
    """Its routes, and the faults of a server.

    Attributes:
        told: path -> the answer there in place of its own.
        paths: of all requests.
        key: it asks for this one, if any.
        status: of its answer to every POST, if not 200.
        bridge: its answer to GET /bridge/state.
        cut: it breaks the connection off in the middle of an answer of /generate.
        hold: while this is not set, nothing is answered.
    """

    def __init__(self, *given: Any, port: int = 0, **named: Any) -> None:
        super().__init__(*given, **named)
        self.port, self.told, self.paths = port, dict[str, Told](), list[str]()
        self.key: str | None = None
        self.bridge = dict(BRIDGE)
        self.status, self.cut = 200, False
        self.hold = asyncio.Event()
        self.hold.set()
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def generated(self) -> int:
        return self.paths.count("/generate")

    # ---- its routes

    async def respond(self, method: str, path: str, key: str, body: bytes) -> Told:
        """Answer one request."""
        self.paths.append(path)
        await self.hold.wait()
        if self.key and key != f"Bearer {self.key}":
            return 401, {"error": "no"}
        request = json.loads(body or b"{}")
        if method == "POST" and path == "/control":
            return 200, self.control(**request)
        if method == "POST" and self.status != 200:
            return self.status, {"error": "asked to fail"}
        if path in self.told:
            return self.told[path]
        return await self._post(path, request) if method == "POST" else self._get(path)

    def _get(self, path: str) -> Told:
        row = {"id": self.name, "object": "model", "root": self.root, "max_model_len": self.context}
        answers: dict[str, Any] = {
            "/health": {},
            "/v1/models": {
                "object": "list",
                "data": [row | {"created": time.time()}],
                "pid": os.getpid(),
            },
            "/requests": self.requests,
            "/asked": [
                {"prompt": self.prompt_of(request)[0]}
                | {name: request[name] for name in SAID if request.get(name) is not None}
                for request in (self.requests if path == "/asked" else ())
            ],
        }
        if self.serving is not None:
            answers |= {"/weights": self._weights(), "/bridge/state": self.bridge}
        if self.generate_options is not None:
            answers["/sampling"] = {"generate_options": self.generate_options}
            answers["/vocabulary"] = {"vocabulary": self.vocabulary}
        return (200, answers[path]) if path in answers else (404, {})

    def _weights(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "weight_version": self.version,
            "weight_epoch": self.epoch or 0,
            "in_flight": 0,
            "serving": self.serving,
            "trouble": "" if self.serving else self.trouble,
        }

    async def _post(self, path: str, request: dict[str, Any]) -> Told:
        if path == "/tokenize":
            ids = self.tokenizer.encode(
                request["prompt"], add_special_tokens=request["add_special_tokens"]
            )
            return 200, {"tokens": [token + self.shift for token in ids]}
        if path == "/v1/completions" and "prompt_logprobs" in request:
            return await self.prompt_scored(request)
        self.requests.append(request)
        if path in ("/v1/completions", "/v1/chat/completions"):
            return 200, self.completed(request, "chat" in path)
        if path != "/generate":
            return 404, {}
        await asyncio.sleep(self.delay)
        if self.serving is False:
            return 503, {"error": self.trouble}
        if self.fail_next > 0:
            self.fail_next -= 1
            return 500, {"error": "asked to fail"}
        return 200, await self.generation(request)

    # ---- its connections

    async def serve(self) -> None:
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def crash(self) -> None:
        """Listen no more, and reset all connections."""
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while await self._answered(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a connection's next request. Returns whether it goes on."""
        if not (line := await reader.readline()):
            return False
        method, path = line.decode().split()[:2]
        headers: dict[str, str] = {}
        while header := (await reader.readline()).decode("latin-1").strip():
            name, _, value = header.partition(":")
            headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        try:
            status, told = await self.respond(
                method, path.partition("?")[0], headers.get("authorization", ""), body
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            traceback.print_exc()
            status, told = 500, {"error": f"the stand-in cannot answer: {error!r}"}
        content = json.dumps(told).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(content)}\r\n\r\n"
        cut = self.cut and path == "/generate"
        writer.write(head.encode() + (content[:10] if cut else content))
        await writer.drain()
        return not cut and headers.get("connection", "").lower() != "close"

    # ---- in a thread

    def start(self) -> None:
        """Serve from a thread."""
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._in_thread(started)), daemon=True
        )
        self._thread.start()
        if not started.wait(60):
            raise RuntimeError("the stand-in did not start")

    async def _in_thread(self, started: threading.Event) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        await self.serve()
        started.set()
        await self._ending.wait()
        await self.crash()

    def stop(self) -> None:
        """Crash, in its thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(60)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Loading(Standin):
    """A server that loads for a moment, in a process of its own, with a fault."""

    def __init__(self, name: str, port: int, fault: str) -> None:
        super().__init__(None, name, port=port)
        self.fault = fault
        seconds = fault.removeprefix("loads-") if fault.startswith("loads-") else LOADING_SECONDS
        self.ready_at = time.monotonic() + float(seconds)
        if fault.startswith("version-"):
            self.control(serving=True, version=int(fault.removeprefix("version-")))

    async def respond(self, method: str, path: str, key: str, body: bytes) -> Told:
        """Answer one request; only /health while it loads."""
        known = path != "/weights" or self.serving is not None
        if self.fault == "other-program" or not known:
            return 404, {}
        loading = self.fault == "never-ready" or time.monotonic() < self.ready_at
        if path != "/health" and loading:
            return 503, {}
        if self.fault == "crashes-later" and path == "/v1/models":
            asyncio.get_running_loop().call_later(0.4, self.crash_process)
        return await super().respond(method, path, key, body)

    def crash_process(self) -> None:
        print("RuntimeError: an illegal memory access", flush=True)
        os._exit(9)


def load(name: str, port: int, fault: str) -> None:
    """Be a server that loads a model."""
    with Path(os.environ["STANDIN_STARTS"]).open("a") as starts:
        starts.write(f"{name}\n")
    if fault == "crashes":
        raise RuntimeError("not enough memory for the model")
    if fault == "in-a-child" and os.fork():
        os.wait()
        return
    if fault == "ends-slowly":
        signal.signal(signal.SIGTERM, lambda *_: threading.Timer(5.0, os._exit, (0,)).start())
    asyncio.run(forever(Loading(name, port, fault)))


def command(port: int, tokenizer: object = None, **change: Any) -> list[str]:
    """The command line of a process; `change` as for Standin.control."""
    words = [sys.executable, __file__, "--port", str(port), "--control", json.dumps(change)]
    return [*words, "--tokenizer", str(tokenizer)] if tokenizer is not None else words


async def forever(standin: Standin) -> None:
    await standin.serve()
    await asyncio.Event().wait()


def main(port: int, tokenizer: str | None, change: dict[str, Any]) -> None:
    """Answer until killed."""
    loaded = None
    if tokenizer is not None:
        from transformers import PreTrainedTokenizerFast

        loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    standin = Standin(loaded, tokenizer or "the-model", port=port)
    standin.control(**change)
    asyncio.run(forever(standin))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer")
    parser.add_argument("--control", type=json.loads, default={})
    parser.add_argument("--name")
    parser.add_argument("--fault", default="")
    arguments = parser.parse_args()
    if arguments.name is not None:
        load(arguments.name, arguments.port, arguments.fault)
    else:
        main(arguments.port, arguments.tokenizer, arguments.control)
