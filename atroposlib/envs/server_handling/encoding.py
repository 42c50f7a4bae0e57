"""Text to token ids, in the two ways in which prompts come: as plain text, and as a chat template rendered it."""

from typing import Any


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Ids of a prompt as a person wrote it: with the start token that the model was trained to see first, exactly once."""
    tokens = list(tokenizer.encode(text))
    bos = getattr(tokenizer, "bos_token_id", None)
    # Text that a chat template made begins with the start token already, and encoding adds it again.
    return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Ids of text that holds its special tokens as text, such as a rendered chat template, or of what follows other text."""
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []
