"""Turn a finished conversation into tokens and masks, for endpoints that give text only.

Text is tokenised here after the fact, so the tokens need not be those that the model sampled. Where
the server gives token ids, use `self.server.managed_server(...)` instead, which never tokenises a
response again.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

from atroposlib.inference.chat_template import ControlTokens, render_messages
from atroposlib.type_definitions import Message
from atroposlib.wire import PROMPT_MASK

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

    Chat templates write a turn in one way while it is the last one and in another way later, and
    they may open the reasoning in the generation prompt alone. So the turn is what differs from the
    same conversation with other words in its place.

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
