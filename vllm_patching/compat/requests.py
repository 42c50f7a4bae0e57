"""The engine's inputs: requests, before they are accepted, and what they ask for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from vllm_patching.compat.versions import seam


def check_requests(engine: Any, check: Callable[[Any], None]) -> None:
    """Call `check(sampling parameters)` for every request before it is accepted; its ValueError
    becomes the caller's answer.
    """
    processor = engine.input_processor
    process = seam(processor, "process_inputs")

    def check_and_process(
        request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        check(params)
        return process(request_id, prompt, params, *args, **kwargs)

    processor.process_inputs = check_and_process


def salt_prefix_cache(engine: Any, salt: Callable[[], str]) -> None:
    """Have every request accepted from now on share cached prefixes only with requests of the same
    salt.
    """
    processor = engine.input_processor
    assign = seam(processor, "assign_request_id")

    def assign_and_salt(request: Any) -> None:
        assign(request)
        request.cache_salt = f"{salt()}{request.cache_salt or ''}"

    processor.assign_request_id = assign_and_salt


async def tokenizer_of(engine: Any) -> Any:
    """The engine's tokenizer; a coroutine in some versions."""
    tokenizer = engine.get_tokenizer()
    return await tokenizer if inspect.isawaitable(tokenizer) else tokenizer


async def tokens_of(engine: Any, text: str) -> list[int]:
    """Return the tokens of a prompt, computed in vLLM's own thread.

    Raises:
        one of `caller_errors`: the model's context cannot hold a text of this length.
    """
    renderer = engine.renderer
    prompt = await renderer.tokenize_prompt_async(
        {"prompt": text}, renderer.default_cmpl_tok_params
    )
    return list(prompt["prompt_token_ids"])


def logprobs_mode(engine: Any) -> str:
    """Which logprobs the engine hands out (`--logprobs-mode`): `processed_logprobs`, of the
    distribution that is sampled from, or `raw_logprobs`, before temperature and penalties. Logits
    of either kind are possible too.
    """
    return str(engine.model_config.logprobs_mode)


def returns_routed_experts(engine: Any) -> bool:
    """Return whether outputs have the experts of each token (`--enable-return-routed-experts`)."""
    later = getattr(getattr(engine, "vllm_config", None), "aux_output_config", None)
    return any(
        getattr(config, "enable_return_routed_experts", False)
        for config in (later, engine.model_config)
    )


def vocabulary_size(engine: Any) -> int:
    """The number of token ids that the model has logits for."""
    return int(engine.model_config.get_vocab_size())


def caller_errors() -> tuple[type[Exception], ...]:
    """Return the errors that vLLM raises for a request that it does not accept.

    Versions from 0.32 on do not derive all of it from ValueError.
    """
    try:
        from vllm import exceptions
    except ImportError:
        return (ValueError,)
    return (ValueError, getattr(exceptions, "VLLMClientError", ValueError))
