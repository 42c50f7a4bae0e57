"""Prompts of conversations under a tokenizer's chat template.

Templates rewrite the answers of earlier turns: they remove reasoning, trim white space, write calls
of tools in their own way, or put an empty block of reasoning in front. So the template renders a
stand-in in place of the answer, and only the text around it is used.

Rendered text holds the marks of `control_tokens.GUARD`: special tokens that messages spell out stay
text.
"""

import json
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from atroposlib.errors import EnvironmentFailure
from atroposlib.inference.tool_calls import CallFormat, ToolCallTranslator, as_dict, decoded
from atroposlib.utils.control_tokens import ControlTokens
from atroposlib.utils.thinking import HARMONY_CHANNEL, TAGS, CallSpans, read_reasoning

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
        text: the content. An assistant's is split at the tags of reasoning, and white space around
            the pieces is removed, so that a client may keep reasoning in a field of its own.
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
        messages: as dicts whose contents are text; see `atroposlib.inference.messages`.
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
        opened: what the prompt opened; see `atroposlib.utils.thinking.opened_by`.
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
        f"the tokenizer {name} has no chat template, as those of base models: serve an instruction-tuned model, or name a "
        "tokenizer with a chat template and the same vocabulary by --env.tokenizer_name"
    )


class ChatTemplate:
    """A renderer of conversations. Its texts have marks; see `atroposlib.utils.control_tokens`.

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
        """True if the template shows content in parts and drops text, as those of some vision
        models do.
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
        """Render all messages, with the reasoning in those of the assistant.

        Returns:
            None if the template does not show all of those.
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
        message: any; those that are not the assistant's stay as they are.
        opened: what the prompt opened; see `atroposlib.utils.thinking.opened_by`. If it is None,
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
