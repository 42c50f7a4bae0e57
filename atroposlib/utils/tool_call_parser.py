"""Read a tool call that a model wrote as JSON between tags."""

import ast
import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

logger = logging.getLogger(__name__)

NO_TOOL = "-ERROR-"


def extract_tool_call(text: str, preferred_tags: Sequence[str] | None = None) -> str | None:
    """What stands between the first pair of tags (`tool_call` by default; earlier names first), or None."""
    for tag in preferred_tags or ("tool_call",):
        if found := re.search(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL):
            return found[1].strip()
    return None


def parse_tool_call(
    response: str, available_tools: Iterable[dict[str, Any]] | None = None, preferred_tags: Sequence[str] | None = None
) -> tuple[str, dict[str, Any], bool]:
    """(name of the tool, its arguments, whether something is wrong); the name is `-ERROR-` then.

    Args:
        response: what the model wrote.
        available_tools: as in a chat request; a name that is not among them is wrong.
        preferred_tags: see `extract_tool_call`.
    """
    content = extract_tool_call(response, preferred_tags)
    if not content:
        return NO_TOOL, {}, True
    call = read_object(content)
    if call is None:
        logger.warning("a tool call is no JSON object: %.200r", content)
        return NO_TOOL, {}, True
    name, arguments = call.get("name", ""), call.get("arguments", {})
    if available_tools:
        known = {tool.get("name") or tool.get("function", {}).get("name") for tool in available_tools}
        if not name or name not in known:
            return NO_TOOL, arguments, True
    return name, arguments, False


def read_object(text: str) -> dict[str, Any] | None:
    """A JSON object, or a Python one, which models write when they use single quotes."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return value if isinstance(value, dict) else None
