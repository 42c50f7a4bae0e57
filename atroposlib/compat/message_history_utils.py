"""Keep the history of long episodes within a number of tokens."""

import logging
from typing import Any

from atroposlib.compat.tokenize_for_trainer import UNMASKED_ROLES, tokenize_for_trainer
from atroposlib.inference.responses import read_reasoning
from atroposlib.wire import ScoredDataGroup

logger = logging.getLogger(__name__)


def strip_thinking(response_text: str) -> str:
    """Remove the first block of reasoning, also one that the prompt opened.

    Without a closed block, nothing changes.
    """
    parts = read_reasoning(response_text)
    if not parts.spans or (not parts.closed and len(parts.spans) == 1):
        return response_text
    begin, end = parts.spans[0]
    return response_text[:begin] + response_text[end:]


def truncate_thinking(response_text: str, tokenizer: Any, max_think_tokens: int) -> str:
    """Shorten the first block of reasoning to its end: the last paragraph if that fits, else the
    last tokens, after `... `.

    Args:
        response_text: text with at most one block; without a whole block it is given back as it is.
        tokenizer: counts.
        max_think_tokens: most tokens that the block may keep.
    """
    parts = read_reasoning(response_text)
    if not parts.spans or (not parts.closed and len(parts.spans) == 1):
        return response_text
    (begin, end), (inner, inner_end) = parts.spans[0], parts.insides[0]
    before, after = response_text[:begin], response_text[end:]
    tags = response_text[begin:inner], response_text[inner_end:end]
    thought = response_text[inner:inner_end].strip()
    tokens = tokenizer.encode(thought, add_special_tokens=False)
    if len(tokens) > max_think_tokens:
        last_paragraph = thought.split("\n\n")[-1].strip()
        fits = len(tokenizer.encode(last_paragraph, add_special_tokens=False)) <= max_think_tokens
        kept = tokens[len(tokens) - max(0, max_think_tokens) :]
        shortened = (
            last_paragraph if fits else tokenizer.decode(kept, skip_special_tokens=True).strip()
        )
        thought = f"... {shortened}" if shortened else ""
    if not thought:
        return f"{before}{tags[0]}{tags[1]}{after}"
    # Where the prompt opened the block, the line break after the tag stands in the prompt, too.
    line_break = "\n" if tags[0] else ""
    return f"{before}{tags[0]}{line_break}{thought}\n{tags[1]}{after}"


def ensure_trajectory_token_limit(
    trajectory: list[ScoredDataGroup], tokenizer: Any, max_trajectory_tokens: int
) -> list[ScoredDataGroup]:
    """Drop the oldest turns of each step until all its alternatives fit; a step that cannot be made
    to fit is left out.

    The system message, the last observation and the response to it always stay. The alternatives of
    a step lose the same turns, so that they still answer the same history.

    Args:
        trajectory: one group per step; a group has `messages`, `tokens` and `masks`.
        max_trajectory_tokens: most tokens of a sequence.
    """
    kept: list[ScoredDataGroup] = []
    for index, step in enumerate(trajectory):
        if not (step.get("messages") and step.get("tokens") and step.get("masks")):
            logger.warning("step %d has no messages, tokens or masks: left out", index)
            continue
        fitted = fit_step(step, tokenizer, max_trajectory_tokens)
        if fitted is None:
            logger.warning(
                "step %d does not fit into %d tokens, however short: left out",
                index,
                max_trajectory_tokens,
            )
        else:
            kept.append(fitted)
    return kept


def fit_step(step: ScoredDataGroup, tokenizer: Any, limit: int) -> ScoredDataGroup | None:
    """The step as it is when it fits, a shortened copy of it, or None."""
    if max(map(len, step["tokens"])) <= limit:
        return step
    alternatives = [list(messages) for messages in step["messages"] or []]
    while all(len(messages) > least_length(messages) for messages in alternatives):
        for messages in alternatives:
            start = first_droppable(messages)
            # An observation goes together with the response to it.
            pair = messages[start + 1]["role"] in UNMASKED_ROLES and len(
                messages
            ) - 2 >= least_length(messages)
            del messages[start : start + (2 if pair else 1)]
        rendered = [tokenize_for_trainer(tokenizer, messages) for messages in alternatives]
        if max(len(row["tokens"]) for row in rendered) <= limit:
            shortened: Any = dict(step)
            shortened["messages"] = alternatives
            shortened["tokens"] = [row["tokens"] for row in rendered]
            shortened["masks"] = [row["masks"] for row in rendered]
            # Logprobs and the like belong to the tokens as they were.
            for field in ("inference_logprobs", "ref_logprobs", "advantages"):
                shortened.pop(field, None)
            return shortened
    return None


def first_droppable(messages: list[Any]) -> int:
    return 1 if messages and messages[0]["role"] == "system" else 0


def least_length(messages: list[Any]) -> int:
    """The system message if there is one, the last observation and the last response."""
    return first_droppable(messages) + 2
