"""Keeps every sequence of a conversation token for token: what was sampled, under which logprob, and what was given.

Pure bookkeeping, no I/O. A later turn whose prompt begins with the whole text of an earlier sequence continues that
sequence's tokens: only what was added in between is tokenised, so what the model sampled is never tokenised again.
"""

from typing import Any

from pydantic import BaseModel, Field

from atroposlib.envs.groups import PROMPT_LOGPROB, PROMPT_MASK
from atroposlib.envs.server_handling.generation import Generation


class SequenceNode(BaseModel):
    """One sequence, ready to be trained on.

    Attributes:
        full_text: the text of all tokens, special tokens included.
        tokens: token ids, prompt and completions.
        masked_tokens: the token id where it was sampled, -100 where it was given.
        logprobs: logprob where it was sampled, 1.0 where it was given.
        weight_version: the oldest version of the weights that a token was sampled under, if known.
        metadata: `finish_reason` of the last completion.
    """

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    weight_version: int | None = None
    metadata: dict[str, Any] | None = Field(default=None)


class SequenceTracker:
    """The sequences of one conversation and its branches.

    Args:
        tokenizer: encodes and decodes; `encode(text, add_special_tokens=False)` and `decode(ids)` are used.
        keep_all: keep every sequence by its text (a tree), instead of replacing a sequence by what continues it.
    """

    def __init__(self, tokenizer: Any, keep_all: bool = False):
        self.tokenizer = tokenizer
        self.keep_all = keep_all
        self.nodes: list[SequenceNode] = []

    def prompt(self, text: str) -> tuple[list[int], SequenceNode | None]:
        """Token ids of a prompt, and the sequence that it continues (the longest one whose text it begins with)."""
        candidates = [node for node in self.nodes if node.full_text and text.startswith(node.full_text)]
        if not candidates:
            return self._encode(text), None
        parent = max(candidates, key=lambda node: len(node.full_text))
        return parent.tokens + self._encode(text[len(parent.full_text) :]), parent

    def add(self, prompt_text: str, parent: SequenceNode | None, generation: Generation) -> list[SequenceNode]:
        """Note the completions of a prompt, one sequence each, in their order."""
        prompt = generation.prompt_tokens
        masks, logprobs = [PROMPT_MASK] * len(prompt), [PROMPT_LOGPROB] * len(prompt)
        if parent is not None and prompt[: len(parent.tokens)] == parent.tokens:
            masks[: len(parent.tokens)] = parent.masked_tokens
            logprobs[: len(parent.tokens)] = parent.logprobs
        added = []
        for index, (tokens, sampled) in enumerate(zip(generation.output_tokens, generation.output_logprobs, strict=True)):
            if len(tokens) != len(sampled):
                raise ValueError(f"completion {index} has {len(tokens)} tokens but {len(sampled)} logprobs")
            versions = [generation.weight_versions[index]] if generation.weight_versions is not None else []
            if parent is not None and parent.weight_version is not None:
                versions.append(parent.weight_version)
            node = SequenceNode(
                full_text=prompt_text + self.tokenizer.decode(tokens, skip_special_tokens=False),
                tokens=prompt + tokens,
                masked_tokens=masks + tokens,
                logprobs=logprobs + sampled,
                weight_version=min(versions, default=None),
                metadata={"finish_reason": generation.finish_reasons[index]},
            )
            added.append(node)
        if parent is not None and not self.keep_all:
            # Only the first continuation takes the parent's place; other branches hold its tokens too.
            self.nodes = [node for node in self.nodes if node is not parent]
        self.nodes.extend(added)
        return added

    def _encode(self, text: str) -> list[int]:
        # A rendered chat template holds its special tokens as text already.
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []
