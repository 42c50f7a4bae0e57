"""Tool calls between OpenAI's messages and the text that a model reads and writes.

The format is the one that Hermes and Qwen models are trained on: a JSON object with `name` and `arguments` between
`<tool_call>` tags, several of them for several calls.
"""

import json
import logging
import re
import uuid
from typing import Any

from openai.types.chat import ChatCompletionMessageFunctionToolCall as ToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

from atroposlib.utils.tool_call_parser import read_object

logger = logging.getLogger(__name__)

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
PARSERS = ("hermes", "qwen", "qwen25", "qwen3")


class ToolCallTranslator:
    """Both directions, for one conversation: it remembers the text of each call, so that it comes back unchanged.

    Args:
        tokenizer: decodes, see `decode_with_tool_awareness`.
        parser_name: the model's format, one of `PARSERS`.

    Raises:
        ValueError: another format.
    """

    def __init__(self, tokenizer: Any, parser_name: str = "hermes"):
        if parser_name not in PARSERS:
            raise ValueError(f"tool parser {parser_name!r} is not known: choose one of {', '.join(PARSERS)}")
        self.tokenizer = tokenizer
        self.parser_name = parser_name
        self.raw_text: dict[str, str] = {}

    def parse_model_output(
        self, raw_text: str, tool_choice: Any = None, tools: list[dict[str, Any]] | None = None
    ) -> tuple[str | None, list[ToolCall] | None, str]:
        """(text outside the calls, the calls, finish reason).

        Text whose calls cannot be read comes back as plain text, so nothing that the model wrote is lost.
        """
        if not tools or tool_choice == "none":
            return raw_text, None, "stop"
        calls = []
        for found in CALL.finditer(raw_text):
            call = read_object(found[1])
            if call is None or not isinstance(call.get("name"), str):
                logger.warning("a tool call cannot be read: %.200r", found[1])
                return raw_text, None, "stop"
            arguments = call.get("arguments", {})
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            made = ToolCall(
                id=f"call_{uuid.uuid4().hex[:24]}", type="function", function=Function(name=call["name"], arguments=text)
            )
            self.raw_text[made.id] = found[0]
            calls.append(made)
        if not calls:
            return raw_text, None, "stop"
        return raw_text[: raw_text.index("<tool_call>")].strip() or None, calls, "tool_calls"

    def reconstruct_raw_text_from_tool_calls(self, tool_calls: list[Any]) -> str:
        """The text of calls: as the model wrote it where it came from here, else written anew."""
        return "\n".join(self._text_of(as_dict(call)) for call in tool_calls)

    def _text_of(self, call: dict[str, Any]) -> str:
        if (known := self.raw_text.get(call.get("id") or "")) is not None:
            return known
        function = call["function"]
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        content = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{content}\n</tool_call>"

    def convert_messages_for_template(self, messages: list[Any]) -> list[dict[str, Any]]:
        """Messages in which the assistant's calls are text again, so that the prompt begins with what was sampled."""
        converted = []
        for message in map(as_dict, messages):
            if message.get("role") == "assistant" and message.get("tool_calls"):
                calls = self.reconstruct_raw_text_from_tool_calls(message["tool_calls"])
                content = "\n".join(part for part in (message.get("content"), calls) if part)
                message = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
            converted.append(message)
        return converted

    def decode_with_tool_awareness(self, token_ids: list[int], has_tools: bool = False) -> str:
        """Text of the tokens. Some tokenizers hold the tags as special tokens, which must not be lost when tools are used."""
        if not has_tools:
            return self.tokenizer.decode(token_ids, skip_special_tokens=True)
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        for special in self.tokenizer.all_special_tokens:
            if "tool" not in special:
                text = text.replace(special, "")
        return text


def as_dict(message: Any) -> dict[str, Any]:
    """A message given as a dict or as one of OpenAI's models."""
    return dict(message) if isinstance(message, dict) else message.model_dump(exclude_none=True)
