"""Special tokens that a message spells out, which must stay text.

A template's own special tokens are control tokens: they end turns and name roles. The same
characters in a question, an answer or a tool's output are text. So `ControlTokens.guard` marks them
before the template is rendered, and `ControlTokens.encode` tokenises marked text without looking
for special tokens.
"""

import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from atroposlib.utils.thinking import SPECIAL_MARKS

GUARD = str(secrets.randbelow(9 * 10**23) + 10**23)
"""The mark, behind the first character of a spelled-out token. Digits pass through JSON, trimming
and changes of case."""
SPELLED = re.compile(
    r"<(?=[|\uff5c][^<>|\uff5c\s]{1,64}[|\uff5c]>|/?s>|(?:bos|eos|pad|unk|mask|sep|cls)>|(?:start|end|begin)_of_\w{1,32}>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|AVAILABLE_TOOLS|ARGS|CALL_ID|IMG|IMG_BREAK|IMG_END)\])"
)
"""The first character of what special tokens of current models look like."""
OF_CALLS = re.compile("tool|function|python_tag", re.IGNORECASE)
"""Special tokens that models write around calls of tools."""


def plain(text: str) -> str:
    """Return rendered text without marks."""
    return text.replace(GUARD, "")


def behind(text: str, length: int) -> str:
    """Return rendered text, marks included, without the beginning that has `length` characters of
    plain text.
    """
    first, *rest = text.split(GUARD)
    if length <= len(first):
        return text[length:]
    place = len(first)
    for index, part in enumerate(rest):
        if length < place + len(part):
            return GUARD.join([part[length - place :], *rest[index + 1 :]])
        place += len(part)
    return ""


def harmless(text: str, special: Iterable[str] = ()) -> str:
    """Return text for a server that tokenises by itself: a space keeps spelled-out special tokens
    from being found.

    Args:
        text: what a model or a data set wrote.
        special: further special tokens, if the server's tokenizer is known.
    """
    text = SPELLED.sub(lambda token: f"{token[0]} ", text)
    pattern = _anywhere(special)
    return pattern.sub(lambda token: f"{token[0]} ", text) if pattern else text


class ControlTokens:
    """The special tokens of a tokenizer, in text that a chat template renders.

    Args:
        tokenizer: a Hugging Face tokenizer. Without `added_tokens_decoder` it has no special tokens
            here.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        # A token of one character cannot be broken by a mark behind it.
        tokens = {
            token.content: token
            for token in added.values()
            if token.special and len(token.content) > 1
        }
        self.special = frozenset(tokens)
        self._spelled = _anywhere(tokens)
        marks = frozenset(
            mark for marks in SPECIAL_MARKS if marks <= self.special for mark in marks
        )
        self._of_answers = marks | {token for token in tokens if OF_CALLS.search(token)}
        # Some control tokens take the white space beside them.
        forms = [
            (r"\s*" if tokens[text].lstrip else "")
            + re.escape(text)
            + (r"\s*" if tokens[text].rstrip else "")
            for text in sorted(tokens, key=len, reverse=True)
        ]
        self._control = re.compile(f"({'|'.join(forms)})") if forms else None

    def guard(self, value: Any, kept: Iterable[str] = ()) -> Any:
        """Return a text, or a structure of texts, with a mark in every spelled-out special token.

        Args:
            value: a text, or dicts and lists of texts; anything else stays as it is.
            kept: special tokens that stay control tokens.
        """
        pattern = self._spelled
        if kept:
            pattern = _anywhere(self.special - set(kept))
        if pattern is None:
            return value
        return _mapped(value, lambda text: pattern.sub(lambda token: token[0] + GUARD, text))

    def guard_messages(self, messages: Iterable[Any]) -> list[Any]:
        """Return messages with marks.

        Reasoning and calls of tools in answers keep the special tokens that they are made of.
        """
        guarded = []
        for message in messages:
            is_answer = isinstance(message, dict) and message.get("role") == "assistant"
            guarded.append(self.guard(message, self._of_answers if is_answer else ()))
        return guarded

    def encode(self, text: str) -> list[int]:
        """Return the ids of rendered text.

        Only special tokens without a mark become control tokens.
        """
        if GUARD not in text or self._control is None:
            return self._encode_rendered(plain(text))
        ids: list[int] = []
        run = ""  # of control tokens, and of text without marks
        for piece in self._control.split(text):
            if GUARD not in piece:
                run += piece
                continue
            ids += self._encode_rendered(run)
            ids += self._encode_text(plain(piece), first=not ids)
            run = ""
        return ids + self._encode_rendered(run)

    def _encode_rendered(self, text: str) -> list[int]:
        """Encode text with its special tokens."""
        if not text:
            return []
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _encode_text(self, text: str, first: bool) -> list[int]:
        """Encode text without looking for special tokens."""
        encode = self.tokenizer.encode
        ids = list(encode(text, add_special_tokens=False, split_special_tokens=True))
        if first or text[:1].isspace():
            return ids
        # SentencePiece's tokenizers put a space before the first word of all that they encode.
        behind_break = list(
            encode(f"\n{text}", add_special_tokens=False, split_special_tokens=True)
        )
        lead = list(encode("\n", add_special_tokens=False))
        rest = behind_break[len(lead) :]
        added_space = self.tokenizer.decode(ids)[:1].isspace() or len(ids) > len(rest)
        is_break_apart = behind_break[: len(lead)] == lead
        if added_space and is_break_apart and self.tokenizer.decode(rest) == text:
            return rest
        return ids


def render_messages(
    tokenizer: Any, messages: Iterable[Any], **options: Any
) -> tuple[str, list[int]]:
    """Return the text of messages under the chat template, and its ids. Special tokens that
    messages spell out stay text.

    Args:
        tokenizer: has the template.
        messages: as dicts.
        options: of `apply_chat_template`, such as `add_generation_prompt`.
    """
    control = ControlTokens(tokenizer)
    text = str(
        tokenizer.apply_chat_template(control.guard_messages(messages), tokenize=False, **options)
    )
    return plain(text), control.encode(text)


def _anywhere(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern of the first character of every token, also where tokens overlap."""
    first: dict[str, list[str]] = {}
    for token in tokens:
        if len(token) > 1:
            first.setdefault(token[0], []).append(re.escape(token[1:]))
    forms = [f"{re.escape(letter)}(?={'|'.join(rests)})" for letter, rests in first.items()]
    return re.compile("|".join(forms)) if forms else None


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(entry, change) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(entry, change) for entry in value)
    return value
