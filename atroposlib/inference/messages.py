"""Messages of a chat request, brought into one form. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.errors import UsageError
from atroposlib.inference.tool_calls import as_dict

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of OpenAI's parts of a content that are text -> the field that holds it."""
PLAIN_FIELDS = ("reasoning_content", "reasoning", "name", "tool_call_id")
IMAGES = ("image_url", "input_image", "image")


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages as dicts whose contents are text.

    A list of text parts becomes their text, and a missing content becomes "".

    Args:
        messages: dicts or OpenAI's models.

    Raises:
        UsageError: a field has a form that no prompt can hold; the error names the field.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise UsageError(f"messages is {kind(messages)}: give a list of messages")
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked(message: Any, where: str) -> dict[str, Any]:
    fields = _fields(message, where, "an object with role and content")
    if not isinstance(fields.get("role"), str) or not fields["role"]:
        raise UsageError(f'{where}.role is {kind(fields.get("role"))}: give a role such as "user"')
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
