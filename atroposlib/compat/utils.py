"""Functions of the public SDK's `atroposlib.utils`: advantages, the best of several answers, tokens and
masks of a conversation, and trajectories within a limit of tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, takewhile
from typing import Any

import numpy as np

from atroposlib.inference.chat_template import ControlTokens, render_messages
from atroposlib.inference.responses import read_reasoning
from atroposlib.type_definitions import Message, number
from atroposlib.wire import PROMPT_MASK, ScoredDataGroup

module_logger = logging.getLogger(__name__)

NumpyArrayLike = np.ndarray | Sequence[np.ndarray] | Sequence[Sequence]
BoolVector = np.ndarray


def allclose_to_first(
    values: NumpyArrayLike,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
    return_vector: bool = False,
) -> BoolVector | bool:
    """Return whether every array is close to the first one.

    Args:
        values: shape (n, …), not jagged.
        rtol, atol, equal_nan: as for `numpy.isclose`.
        return_vector: give the answer for each of the n arrays.

    Returns:
        One bool, or with `return_vector` an array of bools of shape (n,).
    """
    array = np.asarray(values)
    each = (
        np.isclose(array, array[0], rtol=rtol, atol=atol, equal_nan=equal_nan)
        .reshape(len(array), -1)
        .all(axis=1)
    )
    if return_vector:
        return np.asarray(each)
    return bool(np.all(each))


def _flatten(data: Any) -> Any:
    if isinstance(data, int | float):
        return [data]
    if isinstance(data, list):
        return chain.from_iterable(map(_flatten, data))
    raise ValueError(f"expected numbers and lists of them, found {type(data).__name__}")


def compute_stats(data: Sequence[number | Sequence]) -> dict[str, float]:
    """`mean` and population variance `var` over all numbers of a nested, possibly jagged list.

    Raises:
        ValueError: there is no number, or something that is neither a number nor a list.
    """
    values = np.fromiter(_flatten(data), dtype=float)
    if values.size == 0:
        raise ValueError("no numbers to compute statistics of")
    return {"mean": float(values.mean()), "var": float(values.var())}


def compute_discounted_returns(rewards: np.ndarray | Sequence[float], gamma: float) -> np.ndarray:
    """Discounted returns G_t = r_t + gamma * G_(t+1).

    Args:
        rewards: shape (steps,).
        gamma: discount, 0 to 1.

    Returns:
        Shape (steps,); float32 unless the rewards are an array.
    """
    steps = rewards if isinstance(rewards, np.ndarray) else np.asarray(rewards, dtype=np.float32)
    returns = np.empty_like(steps)
    following = 0.0
    for t in range(len(steps) - 1, -1, -1):
        following = steps[t] + gamma * following
        returns[t] = following
    return returns


def compute_grpo_process_supervision_advantages(
    rewards: Sequence[Sequence[number]], gamma: float | None = None, std_tol: float = 1e-8
) -> list[np.ndarray]:
    """Advantages per step, from rewards normalised over all steps of the group (DeepSeekMath,
    4.1.3: process supervision).

    Args:
        rewards: [trajectory][step], may be jagged.
        gamma: discount of the sum over the steps that follow; None for 1, the paper's.
        std_tol: least standard deviation.

    Returns:
        One array per trajectory: at each step the sum of the normalised rewards from there on.

    Raises:
        ValueError: the rewards are (nearly) all equal, or there are none.
    """
    stats = compute_stats([list(row) for row in rewards])
    deviation = stats["var"] ** 0.5
    if deviation < std_tol:
        raise ValueError(
            f"the rewards' standard deviation {deviation:g} is below {std_tol:g}: all steps are worth the same"
        )
    normalised = [(np.asarray(row, dtype=float) - stats["mean"]) / deviation for row in rewards]
    if gamma is None:
        gamma = 1.0
    return [compute_discounted_returns(row, gamma) for row in normalised]


def select_best_index(
    primary_scores: Sequence[float],
    secondary_scores: Sequence[float],
    primary_higher_is_better: bool = True,
    secondary_lower_is_better: bool = True,
) -> int:
    """The index of the best alternative; the secondary scores decide between equals, then the
    order.

    Raises:
        ValueError: no scores, or lists of different lengths.
    """
    if not primary_scores or len(primary_scores) != len(secondary_scores):
        raise ValueError(
            f"{len(primary_scores)} primary and {len(secondary_scores)} secondary scores: give as many of each, and some"
        )
    if not primary_higher_is_better:
        primary_scores = [-score for score in primary_scores]
    if secondary_lower_is_better:
        secondary_scores = [-score for score in secondary_scores]
    scores = list(zip(primary_scores, secondary_scores, strict=True))
    return scores.index(max(scores))


async def parse_http_response(resp: Any, logger: logging.Logger | None = None) -> Any:
    """The JSON of an aiohttp response.

    Raises:
        Exception: the response's own, for a status of 400 or above or a body that is not JSON; its
            text is logged first.
    """
    try:
        resp.raise_for_status()
        return await resp.json()
    except Exception as error:
        text = await resp.text()
        (logger or module_logger).error(
            "%s answered %s: %s",
            getattr(resp, "url", "?"),
            getattr(resp, "status", error),
            text[:500],
        )
        raise


UNMASKED_ROLES = ["assistant", "agent"]


def tokenize_for_trainer(
    tokenizer: Any,
    chat: Sequence[Message],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """Render and tokenise a conversation.

    Args:
        tokenizer: one with a chat template.
        chat: the conversation; its last message is the response.
        include_messages: give the messages back too.
        train_on_all_assistant_turns: train every assistant turn, rather than the last message only.
        finish_reason: "length" when the response was cut off; its end token was then never sampled
            and is taken away.

    Returns:
        `tokens` and `masks` of the same length (the token id where it is trained, else -100), and
        `messages` when asked for.
    """
    messages, control = list(chat), ControlTokens(tokenizer)

    def render(conversation: Sequence[Message], with_opening: bool = False) -> list[int]:
        if not conversation:
            return []
        if control.guard_messages(conversation) != conversation:
            return render_messages(tokenizer, conversation, add_generation_prompt=with_opening)[1]
        return list(
            tokenizer.apply_chat_template(
                conversation, tokenize=True, return_dict=False, add_generation_prompt=with_opening
            )
        )

    tokens = render(messages)
    masks = [PROMPT_MASK] * len(tokens)
    if train_on_all_assistant_turns:
        trained = [
            index for index, message in enumerate(messages) if message["role"] in UNMASKED_ROLES
        ]
    else:
        trained = [len(messages) - 1]
    for index in trained:
        if messages[index]["role"] in UNMASKED_ROLES:
            start, end = span_of_turn(render, messages, index, tokens)
        else:  # the public SDK trains a last message of another role from here on
            start, end = len(render(messages[:index], with_opening=True)), len(tokens)
        masks[start:end] = tokens[start:end]
    if finish_reason == "length" and tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens, masks = tokens[:-1], masks[:-1]
    return {"tokens": tokens, "masks": masks} | ({"messages": chat} if include_messages else {})


def span_of_turn(
    render: Callable[..., list[int]], messages: Sequence[Message], index: int, tokens: Sequence[int]
) -> tuple[int, int]:
    """Return where a turn of the assistant begins in the tokens of its conversation, and where it
    ends.

    Chat templates write a turn in one way while it is the last one and in another way later. They
    may open the reasoning in the generation prompt alone. So the turn is what differs from the same
    conversation with other words in its place.

    Args:
        render: from messages and `with_opening` to token ids.
        messages: the conversation.
        index: of the turn.
        tokens: of the whole conversation.
    """
    start = shared(render(messages[:index], with_opening=True), tokens)
    swapped = [[*messages[:index], {**messages[index], "content": word}] for word in ("x", "y")]
    behind = min(
        shared(reversed(render([*other, *messages[index + 1 :]])), reversed(tokens))
        for other in swapped
    )
    ends = shared(*(reversed(render(other)) for other in swapped))
    # The end of the turn belongs to it: the model samples it.
    return start, max(start, len(tokens) - max(0, behind - ends))


def shared(one: Iterable[int], other: Iterable[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


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
            module_logger.warning("step %d has no messages, tokens or masks: left out", index)
            continue
        fitted = fit_step(step, tokenizer, max_trajectory_tokens)
        if fitted is None:
            module_logger.warning(
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
