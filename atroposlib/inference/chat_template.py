"""Prompts: from messages to token ids, under a tokenizer and its chat template.

Templates rewrite the answers of earlier turns. They remove reasoning or trim white space. They
write calls of tools in their own way, or put an empty block of reasoning in front. So the template
renders a stand-in in place of the answer, and only the text around it is used.

A template's own special tokens are control tokens: they end turns and name roles. The same
characters in a question, an answer or a tool's output are text. So rendered text holds marks
(`GUARD`) in special tokens that messages spell out, and `ControlTokens.encode` tokenises marked
text without looking for special tokens.

- `checked_messages` brings the messages of a request into one form.
- `load_tokenizer`, `encode_plain` and `encode_rendered` load a tokenizer and turn text into ids.
- `ChatTemplate` renders a conversation, `Continuation` encodes what follows sampled tokens.
"""

import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.errors import EnvironmentFailure, InferenceUnavailable, UsageError
from atroposlib.inference.responses import (
    HARMONY_CHANNEL,
    SPECIAL_MARKS,
    TAGS,
    CallFormat,
    CallSpans,
    ToolCallTranslator,
    as_dict,
    decoded,
    read_reasoning,
)

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


PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that tokenizer.json describes fully."""
TEXTS = (
    "Hello, world! It's 3.14159 and 2,024.",
    "def f(x):\n\treturn [x ** 2 for x in range(10)]  # \u2713\n\n",
    "Über naïve cafés, 日本語, 한국어, Русский, عربي, 😀",
    "\\boxed{42} <think>\n  123 + 456 = 579\n</think>",
)
"""Several scripts, numbers, code and white space."""
SAMPLED_IDS = 512
IDS_PER_TEXT = 64


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer by name or path.

    Raises:
        InferenceUnavailable: it cannot be had; the message has the flag that names another.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        if is_plain_tokenizer(Path(name)):
            return PreTrainedTokenizerFast.from_pretrained(name)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InferenceUnavailable(
            f"no tokenizer for {name!r}: {reason}; pass a local folder or a model name as --env.tokenizer_name"
        ) from error


def is_plain_tokenizer(folder: Path) -> bool:
    """Return whether a local tokenizer is fully described by its tokenizer.json, so that its class
    need not be looked up.

    `AutoTokenizer` imports PyTorch where it is installed: seconds and hundreds of megabytes that an
    environment has no use for.
    """
    try:
        named = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError):
        return False
    return named in PLAIN_TOKENIZERS and (folder / "tokenizer.json").exists()


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Ids of a prompt as a person wrote it: with the start token that the model was trained to see
    first, exactly once.
    """
    tokens = list(tokenizer.encode(text))
    bos = getattr(tokenizer, "bos_token_id", None)
    # Text that a chat template made begins with the start token already, and encoding adds it
    # again.
    return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Ids of text that a chat template rendered, marks of `ControlTokens.guard` included, or of
    what follows other text.
    """
    if GUARD in text:
        return ControlTokens(tokenizer).encode(text)
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


class Continuation:
    """An encoder of text that follows other tokens.

    Some tokenizers put a space before the first word of whatever they encode. So the text is
    encoded behind the end token, which nothing merges with.

    Attributes:
        atomic: ids of tokens that no text is merged with, such as a turn's end tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        end, number = (
            getattr(tokenizer, "eos_token", None),
            getattr(tokenizer, "eos_token_id", None),
        )
        self.atomic = frozenset([*added, *getattr(tokenizer, "all_special_ids", ()), number])
        takes_space = number not in added or added[number].rstrip
        self._end, self._end_id = ("" if takes_space or not isinstance(end, str) else end), number

    def __call__(self, text: str) -> list[int]:
        """Return the ids of the text alone."""
        if text and self._end:
            tokens = encode_rendered(self.tokenizer, self._end + text)
            if tokens[0] == self._end_id:
                return tokens[1:]
        return encode_rendered(self.tokenizer, text)


def first_difference(there: Mapping[str, int], here: Mapping[str, int]) -> str | None:
    """The lowest id that is not the same token in both vocabularies (token -> id), in words; None
    where there is none.
    """
    differing = there.items() ^ here.items()
    if not differing:
        return None
    lowest = min(token_id for _, token_id in differing)
    theirs, ours = (
        [token for token, token_id in table.items() if token_id == lowest]
        for table in (there, here)
    )
    return f"id {lowest} is {_named(theirs)} there and {_named(ours)} here ({len(there)} and {len(here)} entries)"


def _named(tokens: list[str]) -> str:
    return " or ".join(sorted(map(repr, tokens))) or "nothing"


def probe_texts(tokenizer: Any) -> Iterator[str]:
    """Texts whose ids differ between vocabularies: of several kinds, and of tokens from all over
    the tokenizer's own vocabulary.
    """
    yield from TEXTS
    ids = sorted(tokenizer.get_vocab().values())
    chosen = (
        ids[:: max(1, len(ids) // SAMPLED_IDS)] + ids[-IDS_PER_TEXT:]
    )  # special tokens are the last ones, usually
    for start in range(0, len(chosen), IDS_PER_TEXT):
        yield tokenizer.decode(chosen[start : start + IDS_PER_TEXT])


def differing_ids(text: str, there: list[int], here: list[int]) -> str | None:
    """Describe the first difference of two tokenizations of a text; None without one."""
    if there == here:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b),
        min(len(there), len(here)),
    )
    return f"of {text[:30]!r} token {at} is {_at(there, at)} there and {_at(here, at)} here"


def _at(ids: list[int], position: int) -> str:
    return str(ids[position]) if position < len(ids) else "nothing"


TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of OpenAI's parts of a content that are text -> the field that holds it."""
PLAIN_FIELDS = ("reasoning_content", "reasoning", "name", "tool_call_id")
IMAGES = ("image_url", "input_image", "image")


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages as dicts whose contents are text.

    A list of text parts becomes their text, and null or a missing content becomes "".

    Args:
        messages: dicts or OpenAI's models. Only an answer may lack a content.

    Raises:
        UsageError: a field has a form that no prompt can hold; the error names the field.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise UsageError(f"messages is {kind(messages)}: give a list of messages")
    if not messages:
        raise UsageError("messages is an empty list: give at least one message")
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked(message: Any, where: str) -> dict[str, Any]:
    fields = _fields(message, where, "an object with role and content")
    if not isinstance(fields.get("role"), str) or not fields["role"]:
        raise UsageError(f'{where}.role is {kind(fields.get("role"))}: give a role such as "user"')
    if fields["role"] != "assistant" and "content" not in fields:
        names = ", ".join(sorted(map(str, fields)))
        raise UsageError(f"{where} has no content, only {names:.80}: give its text as `content`")
    fields["content"] = content_text(fields.get("content"), f"{where}.content")
    for name in PLAIN_FIELDS:
        if not isinstance(fields.get(name), str | None):
            raise UsageError(f"{where}.{name} is {kind(fields[name])}: give text")
    if fields.get("tool_calls") is not None:
        fields["tool_calls"] = _calls(fields["tool_calls"], f"{where}.tool_calls")
    return fields


def _fields(value: Any, where: str, remedy: str) -> dict[str, Any]:
    """Return the fields of a dict or of one of OpenAI's models.

    Raises:
        UsageError: the value is neither; the error names the field and the remedy.
    """
    if not isinstance(value, Mapping) and not hasattr(value, "model_dump"):
        raise UsageError(f"{where} is {kind(value)}: give {remedy}")
    return as_dict(value)


def content_text(content: Any, where: str) -> str:
    """Return the text of a content: a string, a list of OpenAI's parts, or null.

    Args:
        content: of a message.
        where: name of the field, for the error.

    Raises:
        UsageError: it holds something that is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise UsageError(f"{where} is {kind(content)}: give text, a list of text parts, or null")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    part = _fields(part, where, '{"type": "text", "text": …}')
    name = part.get("type", "text")
    if name in IMAGES or any(image in part for image in IMAGES):
        raise UsageError(f"{where} is an image: prompts are text here; remove it")
    if not isinstance(name, str) or name not in TEXT_PARTS:
        raise UsageError(
            f'{where}.type is {name!r:.40}: prompts are text here; give parts of type "text"'
        )
    text = part.get(TEXT_PARTS[name])
    if not isinstance(text, str):
        raise UsageError(f"{where}.{TEXT_PARTS[name]} is {kind(text)}: give text")
    return text


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return calls as dicts. Their arguments may be text that is not JSON."""
    if not isinstance(calls, list | tuple):
        raise UsageError(f"{where} is {kind(calls)}: give a list of calls")
    checked = []
    for index, call in enumerate(calls):
        fields = _fields(
            call, f"{where}[{index}]", "an object with function.name and function.arguments"
        )
        function = _fields(
            fields.get("function"),
            f"{where}[{index}].function",
            "an object with name and arguments",
        )
        if not isinstance(function.get("name"), str):
            raise UsageError(
                f"{where}[{index}].function.name is {kind(function.get('name'))}: give the name of a tool"
            )
        checked.append({**fields, "function": function})
    return checked


def kind(value: Any) -> str:
    """Return the JSON type of a value, for an error."""
    if value is None:
        return "missing"
    if isinstance(value, bool):
        return "a boolean"
    names = {
        str: "text",
        int: "a number",
        float: "a number",
        list: "a list",
        tuple: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"a {type(value).__name__}")


logger = logging.getLogger(__name__)

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message in which clients keep reasoning apart from the content."""
_TAG = re.compile("|".join(re.escape(tag) for pair in TAGS for tag in pair), re.IGNORECASE)
_OPENED_BEFORE = re.compile(
    "|".join(rf"(?:{re.escape(a)}\s*(?:{re.escape(b)}\s*)?)\Z" for a, b in TAGS), re.IGNORECASE
)


class MessageKey(NamedTuple):
    """The identity of a message. Two messages with equal keys are the same one, differently
    written.

    Attributes:
        text: the content. An assistant's is split at the tags of reasoning. White space around the
            pieces is removed, so that a client may keep reasoning in a field of its own.
        calls: name and arguments of each call of a tool.
    """

    role: str
    name: str
    call_id: str
    text: tuple[str, ...]
    calls: tuple[tuple[str, str], ...]


def message_key(message: Any) -> MessageKey:
    """Return the key of a message, a dict or one of OpenAI's models."""
    fields = as_dict(message)
    role = str(fields.get("role"))
    text = fields.get("content") or ""
    calls = tuple(_call_key(as_dict(call)) for call in fields.get("tool_calls") or ())
    pieces: tuple[str, ...] = (text,)
    if role == "assistant":
        thoughts = [
            value for name in REASONING_FIELDS if isinstance(value := fields.get(name), str)
        ][:1]
        pieces = tuple(
            piece.strip()
            for part in (*thoughts, text)
            for piece in _TAG.split(part)
            if piece.strip()
        )
    return MessageKey(
        role, str(fields.get("name") or ""), str(fields.get("tool_call_id") or ""), pieces, calls
    )


def _call_key(call: Mapping[str, Any]) -> tuple[str, str]:
    function = as_dict(call.get("function") or {})
    return str(function.get("name")), json.dumps(
        decoded(function.get("arguments")), sort_keys=True, default=str
    )


@dataclass(frozen=True)
class Chat:
    """A request for the next message of a conversation.

    Attributes:
        messages: as dicts whose contents are text; see `atroposlib.inference.chat_template`.
        tools: as in a chat request.
        options: further variables of the template, such as `enable_thinking`.
        keys: of the messages.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]
    keys: tuple[MessageKey, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(map(message_key, self.messages)))


@dataclass(frozen=True)
class Exchange:
    """A request and its answer.

    Attributes:
        chat: the request.
        content: of the answer, as the client got it.
        keys: of the answer, in each of the forms in which a client may return it.
    """

    chat: Chat
    content: str
    keys: frozenset[MessageKey]

    def likeness(self, later: Chat) -> int:
        """Return how well a later request continues this answer.

        Returns:
            0 if it does not, 1 if it does, 2 if it also repeats the content exactly.
        """
        length = len(self.chat.keys)
        if (
            length >= len(later.keys)
            or later.keys[length] not in self.keys
            or later.keys[:length] != self.chat.keys
        ):
            return 0
        return 1 + ((later.messages[length].get("content") or "") == self.content)


def exchange(chat: Chat, message: Any, text: str, opened: str) -> Exchange:
    """Return a request with its answer.

    Args:
        chat: the request.
        message: the answer as the client gets it.
        text: all of the answer, calls of tools included.
        opened: what the prompt opened; see `atroposlib.inference.responses.opened_by`.
    """
    fields = {"tool_calls": None} | as_dict(message)
    parts = read_reasoning(content := (fields.get("content") or ""), opened)
    apart = {"content": parts.answer, REASONING_FIELDS[0]: parts.reasoning}
    forms = [fields, fields | apart, {"role": "assistant", "content": text}]
    return Exchange(chat, content, frozenset(map(message_key, forms)))


DRESSES: tuple[Callable[[str], dict[str, Any]], ...] = (
    lambda text: {"content": text},
    lambda text: {"content": text} | dict.fromkeys(REASONING_FIELDS, "-"),
    lambda text: {"content": f"<think>\n-\n</think>\n\n{text}"},
)
"""Forms of a stand-in, by what templates refuse: nothing, an answer without reasoning in fields,
and one without tags."""


def undressed(message: dict[str, Any], without_calls: bool) -> dict[str, Any]:
    """Return a message without its content, its reasoning and, if wanted, its calls of tools."""
    dropped = ("content", *REASONING_FIELDS, *(("tool_calls",) if without_calls else ()))
    return {name: value for name, value in message.items() if name not in dropped}


def apart(message: dict[str, Any]) -> dict[str, Any]:
    """Return an answer with its reasoning in fields of its own; any other message as it is."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return message
    parts = read_reasoning(content)
    fields = dict.fromkeys(REASONING_FIELDS, parts.reasoning.strip("\n"))
    return fields | message | {"content": parts.answer.strip("\n")}


def require_chat_template(tokenizer: Any) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        EnvironmentFailure: see above. A tokenizer that renders chats in a way of its own is taken.
    """
    renders = getattr(type(tokenizer), "apply_chat_template", None)
    own_way = not getattr(renders, "__qualname__", "").startswith("PreTrainedTokenizerBase.")
    if own_way or getattr(tokenizer, "chat_template", None):
        return
    name = getattr(tokenizer, "name_or_path", "") or "of the served model"
    raise EnvironmentFailure(
        f"the tokenizer {name} has no chat template, like a base model's. Serve an "
        "instruction-tuned model, or name a tokenizer with a chat template and the same "
        "vocabulary by --env.tokenizer_name"
    )


class ChatTemplate:
    """A renderer of conversations. Its texts have marks; see `atroposlib.inference.chat_template`.

    Args:
        tokenizer: has the template, and a method `apply_chat_template`.
        translator: writes calls of tools as text.
    """

    def __init__(self, tokenizer: Any, translator: ToolCallTranslator) -> None:
        self.tokenizer = tokenizer
        self.translator = translator
        self._control = ControlTokens(tokenizer)
        # Digits alone: templates that change white space, case or tags leave them as they are.
        self._stand_in = str(secrets.randbelow(9 * 10**39) + 10**39)

    @cached_property
    def takes_parts(self) -> bool:
        """True if the template shows content in parts and drops text, as some vision models'
        templates do.
        """

        def shows(content: Any) -> bool:
            messages = [{"role": "user", "content": content}]
            try:
                text = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # noqa: BLE001 (templates raise anything)
                logger.debug("the chat template refuses a message: %s", error)
                return False
            return self._stand_in in str(text)

        return not shows(self._stand_in) and shows([{"type": "text", "text": self._stand_in}])

    def whole(self, chat: Chat, keep_reasoning: bool = False) -> str:
        """Render all messages. A turn of the assistant opens unless the last message is one.

        Args:
            chat: what to render.
            keep_reasoning: keep the reasoning of earlier answers, which the template may remove.
        """
        if keep_reasoning and (text := self._with_reasoning(chat)) is not None:
            return text
        error: Exception | None = None
        forms = list(self._forms(chat.messages))
        # The last form is for templates that take reasoning from a field of its own alone.
        for form in (*forms, list(map(apart, forms[0]))):
            try:
                return self._apply(form, chat)
            except Exception as problem:  # noqa: BLE001 (templates raise anything; raised below)
                error = error or problem
        assert error is not None
        raise error

    def after(self, chat: Chat, index: int, end: str) -> str | None:
        """Return the text behind an answer: the end of its turn, and all that follows.

        Args:
            chat: the whole conversation.
            index: of the answer among the messages.
            end: text of the token that ended the answer; empty if none did.

        Returns:
            None if the template does not show where the answer ends.
        """
        answer = chat.messages[index]
        for dress, (number, form) in product(DRESSES, enumerate(self._forms(chat.messages))):
            as_text = number == 0
            earlier, dressed = dress("-"), dress(self._stand_in)
            stood = [
                undressed(message, as_text) | (dressed if position == index else earlier)
                if position <= index and message.get("role") == "assistant"
                else message
                for position, message in enumerate(form)
            ]
            try:
                text = self._apply(stood, chat)
            except Exception as error:  # noqa: BLE001 (templates raise anything; the next form may do)
                logger.debug(
                    "the chat template refuses form %d of a conversation: %s", number, error
                )
                continue
            _, shown, tail = text.partition(self._stand_in)
            if not shown or self._stand_in in tail:
                continue
            if as_text or not answer.get("tool_calls"):
                return tail
            # The template writes the calls behind the content. The end token of the answer ends
            # them.
            begin = tail.find(end) if end else -1
            if begin >= 0:
                return tail[begin:]
        return None

    def same_beginning(self, one: Chat, other: Chat) -> bool:
        """Return True if tools and options of both requests render the first one's messages alike."""
        if (one.tools or None) == (other.tools or None) and one.options == other.options:
            return True
        try:
            texts = [
                self._apply(next(self._forms(one.messages)), chat, opens=False)
                for chat in (one, other)
            ]
        except Exception as error:  # noqa: BLE001 (templates raise anything)
            logger.debug("the chat template refuses a conversation: %s", error)
            return False
        return texts[0] == texts[1]

    def _apply(self, messages: list[dict[str, Any]], chat: Chat, opens: bool | None = None) -> str:
        require_chat_template(self.tokenizer)
        if opens is None:
            opens = not messages or messages[-1].get("role") != "assistant"
        messages = self._control.guard_messages(messages)
        if self.takes_parts:
            messages = [
                message | {"content": [{"type": "text", "text": message["content"]}]}
                for message in messages
            ]
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=self._control.guard(chat.tools),
            tokenize=False,
            add_generation_prompt=opens,
            **chat.options,
        )
        # JSON can hold half of a surrogate pair, and a tokenizer cannot.
        return str(text).encode("utf-8", errors="replace").decode("utf-8")

    def _forms(self, messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """Yield the messages with calls of tools as text, and then as structures if there are
        calls.
        """
        yield self.translator.convert_messages_for_template(messages)
        if any(message.get("tool_calls") for message in messages):
            for write in (
                decoded,
                lambda arguments: (
                    arguments if isinstance(arguments, str) else json.dumps(arguments)
                ),
            ):
                yield [_with_arguments(message, write) for message in messages]

    def _with_reasoning(self, chat: Chat) -> str | None:
        """Render all messages, with the reasoning in the assistant's messages.

        Returns:
            None if the template does not show all of the assistant's reasoning.
        """
        messages = next(self._forms(chat.messages))
        kept = [
            (position, text)
            for position, message in enumerate(messages)
            if message.get("role") == "assistant"
            and _TAG.search(text := (message.get("content") or ""))
        ]
        marks = [f"{self._stand_in}{number:06d}" for number in range(len(kept))]
        for (position, _), mark in zip(kept, marks, strict=True):
            messages[position] = messages[position] | {"content": mark}
        rendered = self._apply(messages, chat)
        if any(rendered.count(mark) != 1 for mark in marks):
            return None
        for (position, text), mark in zip(kept, marks, strict=True):
            before, _, behind = rendered.partition(mark)
            if text.lstrip() and _TAG.match(text.lstrip()):
                # The template opens a block in front of every answer. The answer brings its own.
                before = _OPENED_BEFORE.sub("", before)
            rendered = (
                before
                + self._control.guard_messages([messages[position] | {"content": text}])[0][
                    "content"
                ]
                + behind
            )
        return rendered


def _with_arguments(message: dict[str, Any], write: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments in another form."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in map(as_dict, message["tool_calls"]):
        function = as_dict(call.get("function") or {})
        calls.append(
            {**call, "function": {**function, "arguments": write(function.get("arguments"))}}
        )
    return message | {"tool_calls": calls}


def completed(message: dict[str, Any], opened: str | None, reader: CallFormat) -> dict[str, Any]:
    """Return an answer as one whole message: with the tags that its prompt had opened.

    Args:
        message: any; messages of others than the assistant stay as they are.
        opened: what the prompt opened; see `atroposlib.inference.responses.opened_by`. If it is None,
            the prompt is not known, and a closing tag without an opening one shows it.
        reader: of calls of tools, whose tags are text.
    """
    content = message.get("content")
    if message.get("role") != "assistant":
        return message
    if not isinstance(content, str) or any(
        isinstance(message.get(name), str) for name in REASONING_FIELDS
    ):
        return message
    calls = reader.calls_in(content)
    if HARMONY_CHANNEL in content:
        # The template of gpt-oss refuses these marks in the content of a message.
        parts = read_reasoning(content, opened or "", calls)
        return message | {"content": parts.answer, "thinking": parts.reasoning}
    if opened is None:
        opened = unopened_tag(content, calls)
    if not opened or content.lstrip().startswith(opened.strip()):
        return message
    return message | {"content": opened + content}


def unopened_tag(content: str, calls: CallSpans) -> str:
    """Return the opening tag, and a line break, of a block that begins with the content and lacks
    that tag.
    """
    parts = read_reasoning(content, calls=calls)
    if not parts.closed or not parts.spans or parts.spans[0][0] != parts.insides[0][0]:
        return ""
    closing = content[parts.insides[0][1] : parts.spans[0][1]].lower()
    return next(f"{opening}\n" for opening, other in TAGS if other.lower() == closing)
