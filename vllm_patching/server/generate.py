"""POST /generate: token ids in, token ids with logprobs and weight versions out, so that no text is
ever tokenised twice.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field, model_validator

from vllm_patching.compat.requests import (
    logprobs_mode,
    returns_routed_experts,
    tokens_of,
    vocabulary_size,
)
from vllm_patching.protocol.messages import Message
from vllm_patching.protocol.routed_experts import to_wire
from vllm_patching.server.state import Span, VersionSpans

LARGEST_COUNT = 2**31 - 1
"""Largest number of tokens, and largest token id: the engine keeps both in 32 bits."""
LARGEST_SEED = 2**64 - 1024
"""Each of up to 1,024 samples adds its index to the seed, and a seed has 64 bits."""
TokenId = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class TokenPrompt(Message):
    """A prompt that is tokenised already."""

    prompt_token_ids: list[TokenId] = Field(min_length=1)


class GenerateRequest(Message):
    """The body of POST /generate: the prompt and vLLM's sampling parameters."""

    prompt: TokenPrompt | str
    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int = Field(default=16, ge=1, le=LARGEST_COUNT)
    min_tokens: int = Field(default=0, ge=0, le=LARGEST_COUNT)
    temperature: Finite = Field(default=1.0, ge=0)
    top_p: Finite = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, le=LARGEST_COUNT)
    min_p: Finite = Field(default=0.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=LARGEST_SEED)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: Finite = 0.0
    frequency_penalty: Finite = 0.0
    repetition_penalty: Finite = Field(default=1.0, ge=1e-6, le=1e6)
    """Logits are divided or multiplied by it; further out they overflow float32."""
    logprobs: int = Field(
        default=0,
        ge=0,
        le=20,
        description="alternatives beside each sampled token; 0: the sampled one alone",
    )
    token_logprobs: bool = Field(
        default=False,
        description="answer the sampled tokens' logprobs as numbers in `token_logprobs`, and no tables in `logprobs`",
    )
    return_text: bool = Field(default=True, description="answer the completions as text too")
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=20,
        description="score the prompt's tokens: alternatives beside each; 0: the token itself alone",
    )
    prompt_token_logprobs: bool = Field(
        default=False,
        description="score the prompt's tokens and answer the logprobs as numbers in `prompt_token_logprobs`, and no tables",
    )
    routed_experts: bool = Field(
        default=False,
        description="answer the experts of every token but the last in `routed_experts`; the server needs "
        "--enable-return-routed-experts",
    )

    @model_validator(mode="after")
    def _numbers_or_tables(self) -> GenerateRequest:
        for tables, numbers in (
            ("logprobs", "token_logprobs"),
            ("prompt_logprobs", "prompt_token_logprobs"),
        ):
            if getattr(self, numbers) and getattr(self, tables):
                raise ValueError(
                    f"{tables} {getattr(self, tables)} asks for alternatives, for which {numbers} has no place: leave one out"
                )
        return self

    @property
    def scores_prompt(self) -> bool:
        """Return whether logprobs of the prompt's tokens are requested."""
        return self.prompt_token_logprobs or self.prompt_logprobs is not None

    def sampling_parameters(self, sample: int) -> dict[str, Any]:
        """Keyword arguments of vLLM's SamplingParams for one sample of the group; each sample has a
        seed of its own.
        """
        ours = {
            "prompt",
            "n",
            "seed",
            "token_logprobs",
            "return_text",
            "prompt_logprobs",
            "prompt_token_logprobs",
            "routed_experts",
        }
        values = self.model_dump(exclude=ours, exclude_none=True)
        if self.seed is not None:
            values["seed"] = self.seed + sample
        if (
            self.scores_prompt and sample == 0
        ):  # the samples share the prompt, and its logprobs with it
            values["prompt_logprobs"] = self.prompt_logprobs or 0
        # vLLM would otherwise make an object of each token, and its text twice: for the completion
        # and for the logprob.
        values["flat_logprobs"] = True
        values["detokenize"] = self.return_text or bool(self.stop)
        return values


IMPOSSIBLE = -9999.0
"""The logprob, in nats, that is answered for a token of the prompt that the model holds impossible:
JSON has no infinity. vLLM's own routes answer the same."""


class LogprobNotFinite(RuntimeError):
    """The model gave a logprob that is not a number, which JSON cannot hold and no trainer can
    learn from.
    """


CUT_OFF = ("abort", "error")
"""vLLM's reasons for a sample that ended early; a server that receives SIGTERM answers all that it
has in this way."""


class CutOff(RuntimeError):
    """vLLM broke a sample off: the part that there is is not a sample of the model, and must not be
    scored.
    """


class GenerateResponse(msgspec.Struct, kw_only=True):
    """Every list has one item per completion, but for prompt_token_ids.

    `token_logprobs[completion][position]` is the float32 logprob of the sampled token under the
    distribution that it was sampled from. That is after penalties, temperature, top-k, top-p and
    min-p (at temperature 0, before the choice of the likeliest). With `--logprobs-mode
    raw_logprobs`, and in deterministic mode, it is before all of them.
    `logprobs[completion][position]` maps token ids to such logprobs; it always holds the sampled
    token. An answer has one of the two, and `text` only where it was asked for.
    `weight_version_spans` has [version, number of tokens] in the order in which the weights were
    served, `weight_epoch_spans` the weight epoch of each. `weight_versions` and `weight_epochs`
    belong to the first span: the oldest weights that a token of the completion was sampled with.
    Their version need not be the smallest, for a trainer that resumes goes back.

    `prompt_token_logprobs[position]` or `prompt_logprobs[position]`, where they were asked for, is
    the same of the prompt's tokens given those before each. It is null or {} for the first, which
    nothing predicts. As a number it is never below -9999, which stands for a token that is
    impossible. They come from the model itself, at temperature 1, whatever the sampling parameters
    and `--logprobs-mode` are.

    `routed_experts[completion]`, if the request has `routed_experts`, has the experts of each token
    of prompt and completion. The last token is not among them: the model has not read it. See
    `vllm_patching.protocol.routed_experts`.
    """

    text: list[str] | msgspec.UnsetType = msgspec.UNSET
    prompt: str | None = None
    finish_reasons: list[str | None]
    logprobs: list[list[dict[int, float]]] | msgspec.UnsetType = msgspec.UNSET
    token_logprobs: list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[int, float]] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_logprobs: list[float | None] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: list[str] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[list[int]]
    prompt_token_ids: list[int]
    weight_versions: list[int]
    weight_epochs: list[int]
    weight_version_spans: list[list[tuple[int, int]]]
    weight_epoch_spans: list[list[int]]

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


class Generator:
    """Runs /generate requests on vLLM's engine."""

    def __init__(self, engine: Any, spans: VersionSpans) -> None:
        self._engine = engine
        self._spans = spans

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Sample `n` completions.

        Raises:
            ValueError: the engine refuses the prompt or the sampling parameters; the message is for
                the caller.
            LogprobNotFinite, CutOff: see there.
        """
        token_ids = await self._prompt_of(request)
        self._require_possible(request)
        outputs = await self._sample(token_ids, request)
        completions = [output.outputs[0] for output, _ in outputs]
        reasons = [one.finish_reason for one in completions if one.finish_reason in CUT_OFF]
        if reasons:
            raise CutOff(
                f"{len(reasons)} of {len(completions)} samples were broken off ({reasons[0]}): "
                "this server is ending, or its log has the reason; ask again, or another server"
            )
        served = [spans for _, spans in outputs]
        response = GenerateResponse(
            finish_reasons=[one.finish_reason for one in completions],
            token_ids=[list(one.token_ids) for one in completions],
            prompt_token_ids=token_ids,
            weight_versions=[spans[0].weights.version for spans in served],
            weight_epochs=[spans[0].weights.epoch for spans in served],
            weight_version_spans=[
                [(span.weights.version, span.tokens) for span in spans] for spans in served
            ],
            weight_epoch_spans=[[span.weights.epoch for span in spans] for spans in served],
        )
        if isinstance(request.prompt, str):
            response.prompt = request.prompt
        if request.return_text:
            response.text = [one.text for one in completions]
        _add_logprobs(response, request, completions, outputs[0][0].prompt_logprobs)
        if request.routed_experts:
            tokens = [len(token_ids) + len(one.token_ids) - 1 for one in completions]
            response.routed_experts = [
                _experts_of(one, count) for one, count in zip(completions, tokens, strict=True)
            ]
        return response

    async def _prompt_of(self, request: GenerateRequest) -> list[int]:
        """Return the tokens of a request's prompt. Raises ValueError for an empty text."""
        if not isinstance(request.prompt, str):
            return request.prompt.prompt_token_ids
        token_ids = await tokens_of(self._engine, request.prompt)
        if not token_ids:
            raise ValueError("prompt is empty")
        return token_ids

    def _require_possible(self, request: GenerateRequest) -> None:
        """Raise ValueError for a request that this server's options or model exclude."""
        if request.scores_prompt and (mode := logprobs_mode(self._engine)).endswith("_logits"):
            raise ValueError(
                f"this server runs with --logprobs-mode {mode} and has logits where logprobs are asked for"
            )
        if request.routed_experts and not returns_routed_experts(self._engine):
            raise ValueError(
                "routed_experts is asked for, and this server does not keep the experts of tokens: "
                "start it with --enable-return-routed-experts"
            )
        if not request.stop_token_ids:
            return
        largest, size = max(request.stop_token_ids), vocabulary_size(self._engine)
        if largest >= size:
            # vLLM would index the logits with it, which ends the engine.
            raise ValueError(
                f"stop_token_ids holds {largest}, and the model's ids go from 0 to {size - 1}"
            )

    async def _sample(
        self, token_ids: list[int], request: GenerateRequest
    ) -> list[tuple[Any, list[Span]]]:
        """Return all samples of a request, each with its spans of weight versions."""
        tasks = [
            asyncio.create_task(self._one(token_ids, request.sampling_parameters(i)))
            for i in range(request.n)
        ]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            # One sample failed, or the client has gone: the other samples have no use.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def check(self, timeout: float) -> float:
        """Really sample one token; returns the seconds it took. Raises TimeoutError."""
        started = time.perf_counter()
        request = GenerateRequest(
            prompt=TokenPrompt(prompt_token_ids=[1]), max_tokens=1, temperature=0.0
        )
        await asyncio.wait_for(self.generate(request), timeout)
        return time.perf_counter() - started

    async def _one(
        self, token_ids: list[int], parameters: dict[str, Any]
    ) -> tuple[Any, list[Span]]:
        """vLLM's final RequestOutput, which has one completion, and under which weights its tokens
        were sampled.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(**parameters, output_kind=RequestOutputKind.FINAL_ONLY)
        request_id = f"generate-{uuid.uuid4().hex}"
        self._spans.start(request_id)
        try:
            final = None
            async for output in self._engine.generate(
                {"prompt_token_ids": token_ids}, sampling, request_id
            ):
                final = output
            if final is None:
                raise RuntimeError("the engine ended the request without an output")
            return final, self._spans.finish(request_id, len(final.outputs[0].token_ids))
        finally:
            self._spans.forget(request_id)


def _experts_of(completion: Any, tokens: int) -> str:
    """Return the experts of a sample's tokens for the wire.

    Raises:
        RuntimeError: vLLM has them of other tokens.
    """
    experts = completion.routed_experts
    if experts is None or len(experts) != tokens:
        count = "no" if experts is None else len(experts)
        raise RuntimeError(
            f"vLLM answered the experts of {count} tokens of a sample, where the model has read "
            f"{tokens}; leave routed_experts out"
        )
    return to_wire(experts)


def _add_logprobs(
    response: GenerateResponse, request: GenerateRequest, completions: Sequence[Any], of_prompt: Any
) -> None:
    """Add the logprobs that a request asks for.

    Raises:
        LogprobNotFinite: one of them is NaN or infinite.
    """
    sampled = [_sampled(one.logprobs) for one in completions]
    for one, logprobs in zip(completions, sampled, strict=True):
        _require_finite(one.token_ids, logprobs, "a completion")
    if request.token_logprobs:
        response.token_logprobs = sampled
    else:
        response.logprobs = [_tables(one.logprobs) for one in completions]
    if request.prompt_token_logprobs:
        response.prompt_token_logprobs = _of_prompt(response.prompt_token_ids, of_prompt)
    elif request.scores_prompt:
        response.prompt_logprobs = _tables(of_prompt)


def _sampled(flat: Any) -> list[float]:
    """Logprobs of the sampled tokens, which vLLM puts first at each position of its FlatLogprobs."""
    if len(flat.logprobs) == len(flat.start_indices):
        return flat.logprobs
    return [flat.logprobs[start] for start in flat.start_indices]


def _of_prompt(tokens: Sequence[int], flat: Any) -> list[float | None]:
    """Logprobs of the prompt's tokens, which vLLM puts first at each position of its FlatLogprobs;
    the first token has none.

    Raises:
        RuntimeError: vLLM scored other tokens than the prompt's, or not all of them.
    """
    if [flat.token_ids[start] for start in flat.start_indices[1:]] != list(tokens[1:]):
        raise RuntimeError(
            f"vLLM scored {len(flat.start_indices)} positions of a prompt, which differ from its "
            f"{len(tokens)} tokens"
        )
    # A prompt may hold what the model cannot sample: ids that no token has, or what a mask forbids.
    logprobs = [max(flat.logprobs[start], IMPOSSIBLE) for start in flat.start_indices[1:]]
    _require_finite(tokens[1:], logprobs, "the prompt but for its first token")
    return [None, *logprobs]


def _tables(flat: Any) -> list[dict[int, float]]:
    """For each position of vLLM's FlatLogprobs, the logprobs by token id, but for alternatives of
    probability 0.
    """
    rows = (
        slice(start, end) for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
    )
    return [
        {
            token: logprob
            for token, logprob in zip(flat.token_ids[row], flat.logprobs[row], strict=True)
            if logprob > -math.inf
        }
        for row in rows
    ]


def _require_finite(tokens: Sequence[int], logprobs: list[float], what: str) -> None:
    """
    Raises:
        LogprobNotFinite: names the first token whose logprob is NaN or infinite.
    """
    if math.isfinite(sum(logprobs)):  # quick; logprobs that are numbers do not add up to infinity
        return
    at = next(i for i, logprob in enumerate(logprobs) if not math.isfinite(logprob))
    raise LogprobNotFinite(
        f"the logprob of token {tokens[at]} at position {at} of {what} is {logprobs[at]}: the "
        "weights that are served hold NaN or overflow. See /bridge/state, and have the trainer "
        "send whole ones"
    )


CHECK_SECONDS = 30.0
"""Deadline of a check."""
SHARED_SECONDS = 5.0
"""A check also answers callers within this time after its end, so that there is at most one check
in so many seconds."""


class SharedCheck:
    """Runs a check for all who ask at the same time or shortly afterwards."""

    def __init__(self) -> None:
        self._running: asyncio.Task[float] | None = None
        self._ended = 0.0

    async def result(self, check: Callable[[float], Awaitable[float]]) -> tuple[float, float]:
        """Return how many seconds the latest check took, and how many ago it ended.

        Args:
            check: sample a token within so many seconds.

        Raises:
            whatever the check has raised, such as TimeoutError.
        """
        if self._running is None or (
            self._running.done() and time.monotonic() - self._ended >= SHARED_SECONDS
        ):
            self._running = asyncio.create_task(self._run(check), name="check for /health_generate")
        # A caller that goes away must not cancel the check that others wait for.
        seconds = await asyncio.shield(self._running)
        return seconds, time.monotonic() - self._ended

    async def _run(self, check: Callable[[float], Awaitable[float]]) -> float:
        try:
            return await check(CHECK_SECONDS)
        finally:
            self._ended = time.monotonic()
