"""Servers with a native `/generate`, vLLM's and SGLang's: token ids in, token ids and logprobs out,
and weight versions from vLLM."""

from typing import Any

import httpx
import orjson

from atroposlib.errors import NoRoom
from atroposlib.inference.generation import Generation, Weights, spans_of
from atroposlib.inference.openai_client import (
    MAX_TEMPERATURE,
    PROBE_TIMEOUT,
    OpenAIRoutes,
)
from atroposlib.inference.pool import HealthReport
from atroposlib.inference.sampling_record import sampling_of
from atroposlib.inference.tokenizers import encode_plain
from atroposlib.web.keys import VLLM_KEY

# Names of max_tokens in other interfaces.
MAX_TOKENS_NAMES = ("max_tokens", "max_new_tokens", "max_completion_tokens")

POLL_TIMEOUT = 5.0
"""Longest time in seconds for an answer to GET /weights."""
MIN_TEMPERATURE = 0.01
"""vLLM raises a temperature between 0 and this one to it, which only its log shows."""


class VLLMServer(OpenAIRoutes):
    """Requests for training go to `/generate`, so that no text is ever tokenised twice; the OpenAI
    routes work too.
    """

    key_variable: str | None = VLLM_KEY
    highest_temperature: float | None = MAX_TEMPERATURE
    tokenizer: Any = None
    """Encodes prompts given as text; set by the environment. Prompts given as token ids need
    none."""
    _options: list[str] | None = None
    polled_always = True
    reports_weights = True
    """The client polls GET /weights. Cleared once the server has answered that it lacks the route."""

    async def health(self) -> HealthReport:
        """Poll GET /weights, or GET /health on servers without that route."""
        if not (self.reports_weights and self.config.health_check):
            return await super().health()
        try:
            response = await self.http.get("/weights", timeout=POLL_TIMEOUT)
        except httpx.TimeoutException:
            return HealthReport(wrong=f"silent for {POLL_TIMEOUT:g} s")
        except httpx.HTTPError as error:
            return HealthReport(wrong=f"no answer ({type(error).__name__})")
        if response.status_code == 200:
            return read_health(orjson.loads(response.content))
        if response.status_code >= 500:
            return HealthReport(wrong=f"/weights answered {response.status_code}")
        self.reports_weights = False
        return await super().health()

    async def probe(self) -> str | None:
        return await self._fault_of("/health", good=range(200, 201))

    async def _generate_wrapper(self, **kwargs: Any) -> Generation:
        prompt_tokens = self._prompt_tokens(kwargs)
        kwargs.pop("model", None)
        for name in MAX_TOKENS_NAMES[1:]:
            if name in kwargs:
                kwargs["max_tokens"] = kwargs.pop(name)
        kwargs["max_tokens"] = await self._room_for(prompt_tokens, kwargs.get("max_tokens"))
        if 0 < (kwargs.get("temperature") or 0) < MIN_TEMPERATURE:
            kwargs["temperature"] = MIN_TEMPERATURE
        body = {
            **await self._shortest_answer(kwargs),
            **kwargs,
            "prompt": {"prompt_token_ids": prompt_tokens},
        }
        answer = await self._post(body)
        generation = parse_generation(prompt_tokens, answer)
        generation.sampling = sampling_of(kwargs, len(generation.output_tokens), temperature=1.0)
        return generation

    async def _shortest_answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return fields of a request for ids and logprobs only, as far as the server has them."""
        options = {"return_text": False}
        if not request.get("logprobs"):
            options["token_logprobs"] = True
        return {
            name: value for name, value in options.items() if name in await self._generate_options()
        } or {"logprobs": 0}

    async def _generate_options(self) -> list[str]:
        """Return the options of /generate that GET /sampling lists; none on servers without that
        route. Asked once.
        """
        if self._options is None:
            response = await self.http.get("/sampling", timeout=PROBE_TIMEOUT)
            if response.status_code >= 500:
                response.raise_for_status()
            self._options = []
            if response.status_code == 200 and isinstance(options := response.json(), dict):
                self._options = options.get("generate_options", [])
        return self._options

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        response = await self.http.post(
            "/generate", content=orjson.dumps(body), headers={"Content-Type": "application/json"}
        )
        response.raise_for_status()
        return orjson.loads(response.content)

    def _prompt_tokens(self, kwargs: dict[str, Any]) -> list[int]:
        """Take the prompt out of the request: `input_ids`, else `prompt` encoded, without a second
        start token.
        """
        text = kwargs.pop("prompt", None)
        ids = kwargs.pop("input_ids", None)
        if ids is not None:
            return [int(token) for token in ids]
        if text is None:
            raise ValueError("a request for tokens needs `input_ids` or `prompt`")
        if isinstance(text, list):
            return [int(token) for token in text]
        if self.tokenizer is None:
            raise ValueError(
                "a prompt given as text needs a tokenizer: set `server.tokenizer`, or pass `input_ids`"
            )
        return encode_plain(self.tokenizer, text)

    async def _room_for(self, prompt_tokens: list[int], max_tokens: int | None) -> int:
        """Return the `max_tokens` that the model's context and the trainer's longest sequence leave after the
        prompt.
        """
        limits = [
            limit for limit in (await self._context_length(), self.max_sequence_length) if limit
        ]
        if not limits:
            return max_tokens or 1024
        room = min(limits) - len(prompt_tokens)
        if room < 1:
            raise NoRoom(
                f"a prompt of {len(prompt_tokens)} tokens leaves no room within {min(limits)} tokens"
            )
        return min(max_tokens or room, room)

    async def _context_length(self) -> int | None:
        return (await self.served_model()).get("max_model_len")

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        top_k = max(1, int(kwargs.pop("top_k", kwargs.pop("top_logprobs", 1))))
        prompt_tokens = self._prompt_tokens(kwargs)
        body = {
            "prompt": {"prompt_token_ids": prompt_tokens},
            "prompt_logprobs": top_k,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        rows = (await self._post(body)).get("prompt_logprobs")
        if rows is None:
            raise ValueError(f"{self.root_url}/generate gave no prompt_logprobs")
        tables = [merge_logprob_row(row) for row in rows]
        return {
            "prompt_tokens": prompt_tokens,
            "prompt_topk_token_ids": [list(table) for table in tables],
            "prompt_topk_logprobs": [list(table.values()) for table in tables],
        }


class SGLangServer(VLLMServer):
    """An SGLang server. It does not report weight versions."""

    key_variable = None
    highest_temperature = None
    reports_weights = False

    async def _generate_wrapper(self, **kwargs: Any) -> Generation:
        prompt_tokens = self._prompt_tokens(kwargs)
        kwargs.pop("model", None)
        max_tokens = next((kwargs.pop(name) for name in MAX_TOKENS_NAMES if name in kwargs), None)
        room = await self._room_for(prompt_tokens, max_tokens)
        sampling = kwargs | {"max_new_tokens": room}
        answer = await self._post(
            {"input_ids": prompt_tokens, "sampling_params": sampling, "return_logprob": True}
        )
        completions: list[dict[str, Any]] = answer if isinstance(answer, list) else [answer]
        # Each entry of output_token_logprobs is (logprob, token id, text or None).
        rows = [completion["meta_info"]["output_token_logprobs"] for completion in completions]
        return Generation(
            prompt_tokens=prompt_tokens,
            output_tokens=[[int(token) for _, token, *_ in row] for row in rows],
            output_logprobs=[[float(logprob) for logprob, *_ in row] for row in rows],
            finish_reasons=[
                completion["meta_info"]["finish_reason"]["type"] for completion in completions
            ],
            texts=[completion.get("text", "") for completion in completions],
            # A server may have sampling parameters of its own for requests that name none.
            sampling=sampling_of({**kwargs, "max_tokens": room}, len(rows)),
        )

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("SGLangServer cannot give the logprobs of a prompt")


def read_health(answer: Any) -> HealthReport:
    """Read the answer of GET /weights. Missing fields and fields that are not numbers become None.

    Raises:
        ValueError: the answer is not an object.
    """
    if not isinstance(answer, dict):
        raise ValueError(f"/weights answered {answer!r:.80}")
    version, epoch, in_flight = (
        value
        if isinstance(value := answer.get(name), int) and not isinstance(value, bool)
        else None
        for name in ("weight_version", "weight_epoch", "in_flight")
    )
    wrong = ""
    if not answer.get("serving", True):
        wrong = str(answer.get("trouble") or "it does not serve")[:300]
    return HealthReport(
        wrong=wrong,
        weights=None if version is None else Weights(epoch or 0, version),
        in_flight=in_flight,
    )


def merge_logprob_row(row: Any) -> dict[int, float]:
    """One position's logprobs, `{id: logprob}` or `[{id: logprob}, …]`, as one table; empty for the
    first position.
    """
    table: dict[int, float] = {}
    for part in row if isinstance(row, list) else [row or {}]:
        table.update({int(token): float(logprob) for token, logprob in (part or {}).items()})
    return table


def parse_generation(prompt_tokens: list[int], answer: dict[str, Any]) -> Generation:
    """Read `/generate`'s answer.

    `token_logprobs[completion][position]` is the logprob of the token at that place in `token_ids`.
    Where there is none, `logprobs[completion][position]` is a table whose first entry is
    `{token_id: logprob}` of the sampled token, or a list that begins with one; servers without
    `token_ids` are read through these alone.

    Raises:
        ValueError: ids and logprobs do not line up, so they are not the tokens that were sampled.
    """
    tokens, logprobs = answer.get("token_ids"), answer.get("token_logprobs")
    if tokens is None or logprobs is None:
        sampled, logprobs = read_tables(answer["logprobs"])
        if tokens is not None and tokens != sampled:
            raise ValueError(
                "/generate answered token_ids that differ from the ids of its logprobs"
            )
        tokens = sampled
    elif list(map(len, tokens)) != list(map(len, logprobs)):
        raise ValueError("/generate answered token_ids and token_logprobs of different lengths")
    if (prompt := answer.get("prompt_token_ids")) is not None and prompt != prompt_tokens:
        raise ValueError("/generate answered a prompt_token_ids other than it was sent")
    return Generation(
        prompt_tokens=prompt_tokens,
        output_tokens=tokens,
        output_logprobs=logprobs,
        finish_reasons=list(answer["finish_reasons"]),
        texts=answer.get("text"),
        weight_versions=answer.get("weight_versions"),
        weight_epochs=answer.get("weight_epochs"),
        weight_spans=spans_of(answer.get("weight_version_spans"), answer.get("weight_epoch_spans")),
    )


def read_tables(rows: list[list[Any]]) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and logprobs of the sampled tokens, which come first in the table of each position."""
    tokens: list[list[int]] = []
    logprobs: list[list[float]] = []
    for completion in rows:
        pairs = [
            next(iter((position[0] if isinstance(position, list) else position).items()))
            for position in completion
        ]
        tokens.append([int(token) for token, _ in pairs])
        logprobs.append([float(logprob) for _, logprob in pairs])
    return tokens, logprobs
