r"""The answer in `\boxed{…}`, with braces inside it balanced."""

import re

BOXED = re.compile(r"\\boxed\s*\{")


def boxed_contents(text: str) -> list[str | None]:
    r"""The content of every `\boxed{`, in order; None where its brace is never closed.

    >>> boxed_contents(r"so \boxed{\frac{1}{2}} or \boxed{3")
    ['\\frac{1}{2}', None]
    """
    contents: list[str | None] = []
    position = 0
    while found := BOXED.search(text, position):
        end = closing_brace(text, found.end())
        contents.append(None if end is None else text[found.end() : end])
        position = found.end() if end is None else end + 1
    return contents


def closing_brace(text: str, start: int) -> int | None:
    """Where the brace that was opened just before `start` is closed; escaped braces do not count."""
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
        position += 1
    return None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{}` that is closed, without surrounding space; None when there is none."""
    closed = [content for content in boxed_contents(text) if content is not None]
    return closed[-1].strip() if closed else None


def is_well_formed(text: str) -> bool:
    r"""Whether there is exactly one `\boxed{`, closed and not empty."""
    contents = boxed_contents(text)
    return len(contents) == 1 and contents[0] is not None and bool(contents[0].strip())
