"""Tool calls between OpenAI's messages and the text that a model reads and writes."""

import json
import logging
import uuid
from dataclasses import dataclass
from typing import Any

from atroposlib.inference.tokenizers import ResponseDecoder
from atroposlib.inference.tool_call_formats import FORMATS, content_before

logger = logging.getLogger(__name__)


class ToolCall(dict[str, Any]):
    """A call in OpenAI's JSON, whose fields can be read as attributes too: `call["function"]["name"]`, `call.function.name`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a tool call has no {name!r}; it has {', '.join(self)}") from None


@dataclass(frozen=True)
class Answer:
    """An answer of the model, and how it was read. A message with the same content and calls is this text again.

    Attributes:
        raw: all of its text.
        content: the text before its calls.
        ids: of its calls.
        problems: reasons why further calls could not be read.
    """

    raw: str
    content: str | None
    ids: tuple[str, ...]
    problems: tuple[str, ...] = ()


class ToolCallTranslator:
    """Both directions, for one conversation: it remembers the text of each answer with calls, so that it comes back unchanged.

    Args:
        tokenizer: decodes, see `decode_with_tool_awareness`.
        parser_name: how the model writes calls, by the name of vLLM's parser: one of `tool_call_formats.FORMATS`.

    Raises:
        ValueError: another format.
    """

    def __init__(self, tokenizer: Any, parser_name: str = "hermes"):
        if parser_name not in FORMATS:
            raise ValueError(f"tool parser {parser_name!r} is not known: choose one of {', '.join(FORMATS)}")
        self.tokenizer = tokenizer
        self._decode = ResponseDecoder(tokenizer)
        self.parser_name = parser_name
        self.format = FORMATS[parser_name]
        self.answers: dict[str, Answer] = {}
        """By the id of each call."""
        self._unreadable: dict[str, tuple[str, ...]] = {}
        """Text of each answer in which no call could be read, and the reasons."""

    def parse_model_output(
        self, raw_text: str, tool_choice: Any = None, tools: list[dict[str, Any]] | None = None, opened: str = ""
    ) -> tuple[str | None, list[ToolCall] | None, str]:
        """Return the text before the calls, the calls, and the finish reason.

        Text in which no call can be read comes back as plain text, so nothing that the model wrote
        is lost. `problems_of` has the reasons, and `with_problems` puts them into the history.

        Args:
            raw_text: all of the answer.
            tool_choice, tools: of the request.
            opened: what the prompt opened; see `atroposlib.utils.thinking.opened_by`.
        """
        if not tools or tool_choice == "none":
            return raw_text, None, "stop"
        found = self.format.read(raw_text, tools, opened)
        problems = tuple(dict.fromkeys(one.problem for one in found if one.problem))
        for problem in problems:
            logger.warning("a tool call cannot be read: %.300s", problem)
        readable = [one for one in found if not one.problem]
        if not readable:
            if problems:
                self._unreadable[raw_text.strip()] = problems
            return raw_text, None, "stop"
        calls = []
        for one in readable:
            function = ToolCall(name=sendable(one.name), arguments=as_json(one.arguments))
            calls.append(ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", type="function", function=function))
        content = content_before(raw_text, found)
        answer = Answer(raw_text, content, tuple(call["id"] for call in calls), problems)
        self.answers.update(dict.fromkeys(answer.ids, answer))
        return content, calls, "tool_calls"

    def problems_of(self, message: dict[str, Any]) -> tuple[str, ...]:
        """Return the reasons why calls in an answer from here could not be read."""
        if message.get("role") != "assistant":
            return ()
        if calls := message.get("tool_calls"):
            answer = self._answer_of([as_dict(call) for call in calls])
            return answer.problems if answer is not None else ()
        return self._unreadable.get((message.get("content") or "").strip(), ())

    def with_problems(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in which the model reads why its calls could not be read.

        The reasons stand in front of the message that follows the answer. A message of their own
        would break templates in which roles alternate.

        Args:
            messages: with text as their contents.
        """
        told: list[dict[str, Any]] = []
        waiting: tuple[str, ...] = ()
        for message in messages:
            if waiting and message.get("role") != "assistant":
                reasons = "\n".join(f"error: a tool call cannot be read: {problem}" for problem in waiting)
                message = message | {"content": f"{reasons}\n\n{message.get('content') or ''}"}
                waiting = ()
            waiting = self.problems_of(message) or waiting
            told.append(message)
        return told

    def reconstruct_raw_text_from_tool_calls(self, tool_calls: list[Any]) -> str:
        """Return the text of calls: the model's own if they are all of one answer from here, else a new one."""
        calls = [as_dict(call) for call in tool_calls]
        answer = self._answer_of(calls)
        return answer.raw if answer is not None else self._written(calls)

    def _answer_of(self, calls: list[dict[str, Any]]) -> Answer | None:
        """Return the answer that consisted of exactly these calls."""
        ids = tuple(call.get("id") or "" for call in calls)
        answer = self.answers.get(ids[0]) if ids else None
        return answer if answer is not None and answer.ids == ids else None

    def _written(self, calls: list[dict[str, Any]]) -> str:
        functions = [as_dict(call["function"]) for call in calls]
        arguments = [decoded(function.get("arguments") or {}) for function in functions]
        return self.format.write_all(zip((function["name"] for function in functions), arguments, strict=True))

    def convert_messages_for_template(self, messages: list[Any]) -> list[dict[str, Any]]:
        """Messages in which the assistant's calls are text again, so that the prompt begins with what was sampled."""
        converted = []
        for message in map(as_dict, messages):
            if message.get("role") == "assistant" and message.get("tool_calls"):
                calls = [as_dict(call) for call in message["tool_calls"]]
                content, answer = message.get("content") or None, self._answer_of(calls)
                if answer is not None and content == answer.content:
                    text = answer.raw
                else:
                    text = "\n".join(part for part in (content, self._written(calls)) if part)
                message = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}
            converted.append(message)
        return converted

    def decode_with_tool_awareness(self, token_ids: list[int], has_tools: bool = False) -> str:
        """Text of the tokens. Some tokenizers hold the marks of calls as special tokens, which must not be lost with tools."""
        if not has_tools:
            return self._decode(token_ids)
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        marks = self.format.write("f", {"x": "y"})
        for special in self.tokenizer.all_special_tokens:
            if "tool" not in special and special not in marks and special not in self._decode.kept:
                text = text.replace(special, "")
        return text


def sendable(text: str) -> str:
    """Return text that UTF-8 can hold. A model can write half of a surrogate pair in JSON."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def as_json(arguments: Any) -> str:
    """Return arguments as JSON that UTF-8 can hold, with as few escapes as possible."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if sendable(text) == text else json.dumps(arguments)


def decoded(arguments: Any) -> Any:
    """Return arguments of a call as JSON's values. Text that is not JSON stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def as_dict(message: Any) -> dict[str, Any]:
    """A message given as a dict or as one of OpenAI's models."""
    return dict(message) if isinstance(message, dict) else message.model_dump(exclude_none=True, warnings=False)
