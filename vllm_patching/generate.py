"""POST /generate: token ids in, token ids with logprobs and weight versions out, so that no text is ever tokenised twice."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_patching.compat import tokenizer_of
from vllm_patching.version_spans import Span, VersionSpans


class TokenPrompt(BaseModel):
    """A prompt that is tokenised already."""

    model_config = ConfigDict(extra="forbid")
    prompt_token_ids: list[int] = Field(min_length=1)


class GenerateRequest(BaseModel):
    """The body of POST /generate: the prompt and vLLM's sampling parameters."""

    model_config = ConfigDict(extra="forbid")

    prompt: TokenPrompt | str
    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int = Field(default=16, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = Field(default=1.0, gt=0)
    logprobs: int = Field(
        default=0, ge=0, le=20, description="alternatives beside each sampled token; 0: the sampled one alone"
    )

    def sampling_parameters(self, sample: int) -> dict[str, Any]:
        """Keyword arguments of vLLM's SamplingParams for one sample of the group; each sample has a seed of its own."""
        values = self.model_dump(exclude={"prompt", "n", "seed"}, exclude_none=True)
        if self.seed is not None:
            values["seed"] = self.seed + sample
        return values


class GenerateResponse(BaseModel):
    """Every list has one item per completion, but for prompt_token_ids.

    `logprobs[completion][position]` maps token ids to float32 logprobs, before temperature unless the server runs with
    `--logprobs-mode processed_logprobs`; it always holds the sampled token.
    `weight_version_spans` has [version, number of tokens] in the order in which the weights were served, `weight_epoch_spans`
    the weight epoch of each. `weight_versions` and `weight_epochs` are those of the first span: the oldest weights that a token
    of the completion was sampled with. Their version need not be the smallest, for a trainer that resumes goes back.
    """

    text: list[str]
    prompt: str | None
    finish_reasons: list[str | None]
    logprobs: list[list[dict[int, float]]]
    token_ids: list[list[int]]
    prompt_token_ids: list[int]
    weight_versions: list[int]
    weight_epochs: list[int]
    weight_version_spans: list[list[tuple[int, int]]]
    weight_epoch_spans: list[list[int]]


class Generator:
    """Runs /generate requests on vLLM's engine."""

    def __init__(self, engine: Any, spans: VersionSpans) -> None:
        self._engine = engine
        self._spans = spans

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Sample `n` completions.

        Raises:
            ValueError: the engine refuses the prompt or the sampling parameters; the message is for the caller.
        """
        text = request.prompt if isinstance(request.prompt, str) else None
        if isinstance(request.prompt, str):
            token_ids = list((await tokenizer_of(self._engine)).encode(request.prompt))
            if not token_ids:
                raise ValueError("prompt is empty")
        else:
            token_ids = request.prompt.prompt_token_ids
        tasks = [asyncio.create_task(self._one(token_ids, request.sampling_parameters(i))) for i in range(request.n)]
        try:
            outputs = await asyncio.gather(*tasks)
        except BaseException:
            # One sample failed or the client has gone: the rest of the group would be work for nobody.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return GenerateResponse(
            text=[o.text for o, _ in outputs],
            prompt=text,
            finish_reasons=[o.finish_reason for o, _ in outputs],
            logprobs=[
                [{token: entry.logprob for token, entry in position.items()} for position in (o.logprobs or [])]
                for o, _ in outputs
            ],
            token_ids=[list(o.token_ids) for o, _ in outputs],
            prompt_token_ids=token_ids,
            weight_versions=[spans[0].weights.version for _, spans in outputs],
            weight_epochs=[spans[0].weights.epoch for _, spans in outputs],
            weight_version_spans=[[(span.weights.version, span.tokens) for span in spans] for _, spans in outputs],
            weight_epoch_spans=[[span.weights.epoch for span in spans] for _, spans in outputs],
        )

    async def check(self, timeout: float) -> float:
        """Really sample one token; returns the seconds it took. Raises TimeoutError."""
        started = time.perf_counter()
        request = GenerateRequest(prompt=TokenPrompt(prompt_token_ids=[1]), max_tokens=1, temperature=0.0)
        await asyncio.wait_for(self.generate(request), timeout)
        return time.perf_counter() - started

    async def _one(self, token_ids: list[int], parameters: dict[str, Any]) -> tuple[Any, list[Span]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(**parameters, output_kind=RequestOutputKind.FINAL_ONLY)
        request_id = f"generate-{uuid.uuid4().hex}"
        self._spans.start(request_id)
        try:
            final = None
            async for output in self._engine.generate({"prompt_token_ids": token_ids}, sampling, request_id):
                final = output
            if final is None:
                raise RuntimeError("the engine ended the request without an output")
            completion = final.outputs[0]
            return completion, self._spans.finish(request_id, len(completion.token_ids))
        finally:
            self._spans.forget(request_id)
