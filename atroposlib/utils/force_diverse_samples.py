"""Completions that differ from their first token on."""

import math
import random
from typing import Any


async def generate_with_diverse_first_tokens(
    self: Any,
    messages: list[dict[str, Any]],
    prefill: str = "",
    n: int = 8,
    max_tokens: int = 4096,
    temperature: float = 1.0,
) -> list[str]:
    """Draw different first tokens, without replacement, and complete each.

    Args:
        self: an environment; its `server` must be an OpenAI-compatible endpoint that gives `top_logprobs`.
        messages: the conversation.
        prefill: how the assistant's turn begins.
        n: completions wanted; as many as there are top tokens (20) at most.
        max_tokens: most tokens per completion, the first one included.
        temperature: of the draw and of the completions.

    Raises:
        ValueError: the endpoint gave no logprobs.
    """
    begun = [*messages, {"role": "assistant", "content": prefill}]
    first = await self.server.chat_completion(
        messages=begun, n=1, max_tokens=1, temperature=0.0, logprobs=True, top_logprobs=20
    )
    logprobs = first.choices[0].logprobs
    if logprobs is None or not logprobs.content:
        raise ValueError("the endpoint gave no top_logprobs, which diverse first tokens are drawn from")
    # The n largest of logprob / T plus Gumbel noise are a draw of n without replacement (Kool et al., 2019).
    top = logprobs.content[0].top_logprobs
    noisy = [(entry.logprob / temperature - math.log(-math.log(random.random() or 1e-300)), entry.token) for entry in top]
    tokens = [token for _, token in sorted(noisy, reverse=True)[:n]]
    completions = []
    for token in tokens:
        rest = await self.server.chat_completion(
            messages=[*messages, {"role": "assistant", "content": prefill + token}],
            n=1,
            max_tokens=max_tokens - 1,
            temperature=temperature,
        )
        completions.append(token + (rest.choices[0].message.content or ""))
    return completions
