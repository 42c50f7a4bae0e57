"""Turn a finished conversation into tokens and masks, for endpoints that give text only.

Text is tokenised here after the fact, so the tokens need not be those that the model sampled. Where the server gives token
ids, use `self.server.managed_server(...)` instead, which never tokenises a response again.
"""

from collections.abc import Sequence
from typing import Any

from atroposlib.groups import PROMPT_MASK
from atroposlib.type_definitions import Message

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
        finish_reason: "length" when the response was cut off; its end token was then never sampled and is taken away.

    Returns:
        `tokens` and `masks` of the same length (the token id where it is trained, else -100), and `messages` when asked for.
    """
    messages = list(chat)

    def render(count: int, with_opening: bool = False) -> list[int]:
        if count == 0:
            return []
        return list(
            tokenizer.apply_chat_template(
                messages[:count], tokenize=True, return_dict=False, add_generation_prompt=with_opening
            )
        )

    tokens = render(len(messages))
    masks = [PROMPT_MASK] * len(tokens)
    if train_on_all_assistant_turns:
        trained = [index for index, message in enumerate(messages) if message["role"] in UNMASKED_ROLES]
    else:
        trained = [len(messages) - 1]
    for index in trained:
        start, end = len(render(index, with_opening=True)), len(render(index + 1))
        masks[start:end] = tokens[start:end]
    if finish_reason == "length" and tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens, masks = tokens[:-1], masks[:-1]
    return {"tokens": tokens, "masks": masks} | ({"messages": chat} if include_messages else {})
