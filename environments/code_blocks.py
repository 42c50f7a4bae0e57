"""Fenced blocks of code in a model's answer, and which of them is the program.

Fences come in pairs, as in CommonMark: a block ends at a fence of the same character, at least as
long and without an info string. Two things that models write go beyond it: a fence may be indented
by any amount (in a list), and a backtick fence without an info string, or with Python's name, may
open behind text on the same line. A tag or a brace may follow a closing fence, and code may begin
behind the opening one. Blocks inside a block of Markdown count as blocks.
"""

import re
import textwrap
from dataclasses import dataclass

_FENCE = re.compile(
    r"(?P<before>[ \t]*|[^`\n]*[^`\n \t][ \t]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)"
)
_INLINE = re.compile(r"```(?:python3?|py)?[ \t]+(.+?)```|```(.+?)```", re.IGNORECASE)
_LANGUAGE = re.compile(r"[\s{.]*([a-z+#_-]*)")
_LIST_MARKER = re.compile(r"[ \t]*(?:[-*+]|\d{1,9}[.)])[ \t]+")
_PYTHON_NAME = re.compile(r"(?:\{[^}\s]*\}\s*)?\S*?(?<![a-z])(?:i?python|py|sage)(?![a-z_]|-[a-z])")
"""Python's name in the first word of an info string: `python3`, `text/x-python`, `inc.py`,
`{code-cell} python`."""
_CODE_AS_INFO = re.compile(
    r"(?:\s*(?:python3?|py)\s)?\s*((?:(?:async\s+)?def|class)\s+\w+\s*[(:\[].*|import\s.*|from\s+\S+\s+import\s.*)"
)
_NO_LANGUAGE = frozenset(("code", "tool_code", "solution", "program", "answer"))
_MARKDOWN = frozenset(("markdown", "md"))
_CLOSED_BEHIND_CODE = re.compile(r"(`{3,}|~{3,})[ \t]*$", re.MULTILINE)
_PYTHON = "python"


@dataclass(frozen=True)
class CodeBlock:
    """One fenced block.

    Attributes:
        language: `python`, or the first word of another info string in lower case, without a
            version; "" without one.
        code: the lines between the fences, without the fence's own indentation.
    """

    language: str
    code: str

    @property
    def is_python(self) -> bool:
        """Return whether the info string names Python."""
        return self.language == _PYTHON


def code_blocks(text: str, inside_markdown: bool = False) -> tuple[list[CodeBlock], str]:
    """Return the fenced blocks of a text in order, and the text outside them.

    A block whose fence is never closed ends with the text, or behind code on its own last line.

    Args:
        text: of an answer.
        inside_markdown: the text is a block of Markdown itself, so that such a block in it is one
            block.
    """
    blocks: list[CodeBlock] = []
    outside: list[str] = []
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        opening = _opening(lines[number])
        number += 1
        if opening is None:
            outside.append(lines[number - 1])
            continue
        indent = len(opening["before"])
        if opening["before"].strip():
            outside.append(opening["before"])
            indent = len(opening["before"]) if _LIST_MARKER.fullmatch(opening["before"]) else 0
        end = _closing(lines, number, indent, opening["fence"])
        rest: str | None = None
        code = "\n".join(
            _without_indent(line, indent)
            for line in lines[number : len(lines) if end is None else end]
        )
        if end is None:
            code, rest = _cut(code)
        language = _language(opening["info"])
        if first := _CODE_AS_INFO.fullmatch(opening["info"].rstrip("\r")):
            language, code = _PYTHON, f"{first[1]}\n{code}"
        is_nested = language in _MARKDOWN and not inside_markdown
        blocks.extend(
            code_blocks(code, inside_markdown=True)[0] if is_nested else [CodeBlock(language, code)]
        )
        if rest:
            outside.append(rest)
        number = len(lines) if end is None else end + 1
    return blocks, "\n".join(outside)


def program_in(text: str, function: str | None = None) -> str:
    """Return the Python program in an answer.

    It is the last block that defines the function, of those that are Python or name no language. If
    none does, it is the last block that is marked as Python, else the last one that names no
    language. An answer without such a block is a program itself, as far as it is not in a block of
    another language.

    Args:
        text: the answer, without the reasoning before it.
        function: the name that the program must define; None for any function.
    """
    blocks, outside = code_blocks(text)
    candidates = [block for block in blocks if block.is_python or not block.language]
    name = r"\w+" if function is None else re.escape(function)
    for pattern in (
        rf"^(?:async[ \t]+def|def|class)[ \t]+{name}\b",
        rf"^{name}[ \t]*(?::[^=\n]*)?=(?!=)",
        rf"^[ \t]+(?:async[ \t]+)?def[ \t]+{name}\b",
    ):
        defining = re.compile(pattern, re.MULTILINE)
        if defining_blocks := [block.code for block in candidates if defining.search(block.code)]:
            return defining_blocks[-1]
    if candidates:
        return ([block.code for block in candidates if block.is_python] or [candidates[-1].code])[
            -1
        ]
    if not blocks and (inline := _INLINE.findall(outside)):
        return str(inline[-1][0] or inline[-1][1])
    return textwrap.dedent(outside)


def _opening(line: str) -> re.Match[str] | None:
    if "```" not in line and "~~~" not in line:
        return None
    match = _FENCE.fullmatch(line)
    if match is not None and match["before"].strip():
        opens = match["fence"][0] == "`" and (
            not match["info"].strip() or _language(match["info"]) == _PYTHON
        )
        return match if opens else None  # "put it between ``` and ```" opens nothing
    return match


def _closing(lines: list[str], start: int, indent: int, fence: str) -> int | None:
    """Return the line with the closing fence.

    More indentation than the opening one's and three spaces makes it code.
    """
    closing = re.compile(
        rf"[ \t]{{0,{indent + 3}}}{fence[0]}{{{len(fence)},}}[ \t]*(?:[<}}][^`\n]*)?\r?"
    )
    return next(
        (number for number in range(start, len(lines)) if closing.fullmatch(lines[number])), None
    )


def _cut(code: str) -> tuple[str, str | None]:
    """Split a block that no line closes at a fence behind code, as in `return n```."""
    match = _CLOSED_BEHIND_CODE.search(code)
    return (code, None) if match is None else (code[: match.start()], code[match.end() :])


def _without_indent(line: str, indent: int) -> str:
    blank = len(line) - len(line.lstrip(" \t"))
    return line[min(indent, blank) :]


def _language(info: str) -> str:
    info = info.lower().strip()
    if _PYTHON_NAME.match(info):
        return _PYTHON
    named = _LANGUAGE.match(info)
    return named[1] if named and named[1] not in _NO_LANGUAGE else ""
