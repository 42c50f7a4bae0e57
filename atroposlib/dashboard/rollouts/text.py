"""Text of tokens, by a tokenizer that needs less memory than an inference client's.

The tokenizer is read from its `tokenizer.json` alone. Without that file, the page shows messages and
token ids.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import orjson

from atroposlib.dashboard.rollouts.rollout_stats import entries_of

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 64 << 20
MAX_PROMPT, MAX_BEGINNING, MAX_END = 4096, 8192, 4096
"""Characters of a rollout that the search reads: the end of its prompt, and the beginning and the
end of its sampled text."""
PREVIEW_CHARACTERS = 200
REPLACEMENT = "\ufffd"
MAX_TOKENS_OF_PIECE = 16
"""A character takes at most four tokens; a longer piece is bytes that are not text."""
MAX_PIECES = 100_000
"""Pieces whose text is kept; 200 bytes each."""
LARGEST_ID = 2**32
WORD_BEGINS = "\u2581"
"""Mark that some vocabularies write for a space before a word."""
_SEARCHED_TOKENS = 4096
"""Tokens of each of the three that are decoded; a token may be less than a character."""


def _without_merges(content: bytes) -> bytes:
    """Return a tokenizer of byte pairs without its merges, which decoding does not need.

    Without them it is read in half of the time, and half as large in memory.
    """
    try:
        tokenizer = orjson.loads(content)
        model = tokenizer["model"]
        if model["type"] != "BPE" or not isinstance(model["merges"], list):
            return content
        model["merges"] = []
        return orjson.dumps(tokenizer)
    except (ValueError, KeyError, TypeError):
        return content


_in_use: WeakValueDictionary[bytes, TextOfTokens] = WeakValueDictionary()
_reading = threading.Lock()


class TextOfTokens:
    """Decodes tokens, each distinct piece once.

    Args:
        decode: text of token ids, special ones included; None where there is no tokenizer, and a
            token's text is its id.
        name: of a token in the vocabulary; None for one that is not there.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str] | None = None,
        name: Callable[[int], str | None] | None = None,
    ) -> None:
        self._decode, self._name = decode, name
        self._pieces: dict[tuple[int, ...], str] = {}

    @classmethod
    def of_file(cls, content: bytes) -> TextOfTokens:
        """Return the decoder of a tokenizer.json, which all archives share. The library raises
        errors of many types.

        To read a tokenizer of 150,000 tokens takes a second and many MiB.
        """
        from tokenizers import Tokenizer

        digest = hashlib.sha256(content).digest()
        with _reading:
            decoder = _in_use.get(digest)
            if decoder is None:
                tokenizer = Tokenizer.from_buffer(_without_merges(content))
                decoder = _in_use[digest] = cls(
                    lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=False)),
                    tokenizer.id_to_token,
                )
            return decoder

    @property
    def has_tokenizer(self) -> bool:
        """Return whether there is a tokenizer."""
        return self._decode is not None

    def whole(self, tokens: Sequence[int]) -> str:
        """Return the text of a run of tokens, special ones included."""
        if self._decode is None:
            return " ".join(map(str, tokens))
        try:
            return self._decode(list(tokens))
        except (OverflowError, LookupError, ValueError, TypeError):
            return f"[{', '.join(map(str, tokens))}]"

    def _piece(self, tokens: tuple[int, ...]) -> str:
        if self._decode is None:
            return f"{tokens[0]} "
        text = self.whole(tokens)
        alone = tokens[0]
        if self._name is None or len(tokens) > 1 or type(alone) is not int:
            return text
        # Some decoders remove the space in front of a text's first token, but this piece may stand
        # in the middle.
        name = 0 <= alone < LARGEST_ID and self._name(alone)
        if name and name.startswith(WORD_BEGINS) and not text.startswith(" "):
            return f" {text}"
        return text

    def pieces(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Return the text of each token, with 1. If only several tokens together are a character,
        return their text with their number.
        """
        parts, begin = [], 0
        for end in range(1, len(tokens) + 1):
            some = tuple(tokens[begin:end])
            text = self._pieces.get(some)
            if text is None:
                if len(self._pieces) > MAX_PIECES:
                    self._pieces.clear()
                text = self._pieces[some] = self._piece(some)
            if text.endswith(REPLACEMENT) and len(some) < MAX_TOKENS_OF_PIECE and end < len(tokens):
                continue
            parts.append((text, end - begin))
            begin = end
        return parts


def tokenizer_content(name: str) -> bytes | None:
    """Return the tokenizer.json of a local folder, or of a model in the download cache.

    Nothing is downloaded: the machine that samples has the model. None if there is no such file.
    """
    path = Path(name) / TOKENIZER
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(name, TOKENIZER)
        except HFValidationError:  # a path that is not here
            return None
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            return None
        return path.read_bytes()
    except OSError as error:
        logger.warning("the tokenizer %s cannot be read: %s", path, error)
        return None


def searched_text(
    group: Mapping[str, Any], index: int, text: TextOfTokens, places: npt.NDArray[np.int64]
) -> str:
    """Return the text that the search reads: a rollout's sampled part, then the end of its prompt.

    It is the text of the tokens if they can be decoded, else of the messages.

    Args:
        group: of the rollout.
        index: of the rollout in the group.
        text: decodes tokens.
        places: [sampled] of the rollout; see `sampled_places`.
    """
    tokens = entries_of(group, "tokens")[index]
    if text.has_tokenizer and isinstance(tokens, list):
        prompt = tokens[: int(places[0])] if len(places) else tokens
        first, last = places[: 2 * _SEARCHED_TOKENS].tolist(), places[-_SEARCHED_TOKENS:].tolist()
        answer = text.whole([tokens[place] for place in first])[:MAX_BEGINNING]
        if len(places) > 2 * _SEARCHED_TOKENS:
            answer += "\n" + text.whole([tokens[place] for place in last])[-MAX_END:]
        return f"{answer}\n\n{text.whole(prompt[-_SEARCHED_TOKENS:])[-MAX_PROMPT:]}"
    messages = messages_of(entries_of(group, "messages")[index])
    answers = [content for role, content in messages if role == "assistant"] or [
        content for _, content in messages[-1:]
    ]
    others = [content for role, content in messages if role != "assistant"]
    answer = "\n".join(answers)
    if len(answer) > MAX_BEGINNING + MAX_END:
        answer = f"{answer[:MAX_BEGINNING]}\n{answer[-MAX_END:]}"
    if not messages:
        return ""
    return storable(f"{answer}\n\n{chr(10).join(others)[-MAX_PROMPT:]}")


def messages_of(entry: Any) -> list[tuple[str, str]]:
    """Return role and text of each message of a rollout.

    Environments send the messages as text, or as a list of texts or of messages.
    """
    if not entry:
        return []
    messages = []
    for message in entry if isinstance(entry, list) else [entry]:
        if not isinstance(message, Mapping):
            messages.append(("", str(message)))
            continue
        content = message.get("content")
        if content is None:
            content = ""
        elif not isinstance(content, str):
            content = orjson.dumps(content).decode()
        messages.append((str(message.get("role", "")), content))
    return messages


def storable(text: str) -> str:
    """Replace halves of surrogate pairs, which UTF-8 does not have."""
    return text.encode("utf-8", "replace").decode("utf-8")


def preview(text: str) -> str:
    """Return the first characters of a rollout's text, on one line."""
    return " ".join(text[: 2 * PREVIEW_CHARACTERS].split())[:PREVIEW_CHARACTERS]
