"""A page of one file of groups with messages, as the public package makes it:
`python -m atroposlib.compat.jsonl2html FILE`.

`view-run FILE` shows more of them: see `atroposlib.dashboard`.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from atroposlib.envs.runner.items import as_list
from atroposlib.utils.files import disk_refusal, write_whole

logger = logging.getLogger(__name__)

jinja = Environment(
    loader=PackageLoader("atroposlib.compat"), autoescape=True, undefined=StrictUndefined
)


def get_score_class(score: Any) -> str:
    """The CSS class of a score: reward-positive, -zero or -negative; empty if not a number."""
    if isinstance(score, bool) or not isinstance(score, int | float):
        return ""
    if score == 0:
        return "reward-zero"
    return "reward-positive" if score > 0 else "reward-negative"


def as_messages(entry: Any) -> list[dict[str, str]]:
    """The messages of one rollout, which the file has as text, or as a list of texts or messages."""
    messages = []
    for message in as_list(entry):
        if isinstance(message, dict):
            content = message.get("content")
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            messages.append({"role": str(message.get("role", "")), "content": text})
        else:
            messages.append({"role": "", "content": str(message)})
    return messages


def create_html_for_group(group_data: dict[str, Any], index: int) -> str:
    """The part of the page for one group; empty if it has no messages or scores."""
    messages, scores = group_data.get("messages"), group_data.get("scores")
    if not messages or not scores:
        return ""
    rollouts = [
        {"messages": as_messages(entry), "score": score, "score_class": get_score_class(score)}
        for entry, score in zip(messages, scores, strict=True)
    ]
    return jinja.get_template("messages_of_group.html").render(
        index=index, rollouts=rollouts, scores=scores
    )


def generate_html(input_path: str | Path, output_path: str | Path | None = None) -> None:
    """Write the page of a groups file (JSON lines), by default beside it with the ending .html.

    Raises:
        OSError: the file cannot be read, or the page not written.
        ValueError: a line is not a group; the message has its number.
    """
    source = Path(input_path)
    page = Path(output_path or source.with_suffix(".html"))
    groups = []
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                groups.append(create_html_for_group(json.loads(line), number))
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{source}, line {number + 1} is not a group: {error}") from error
    whole = jinja.get_template("messages.html").render(
        title=source.name, groups=Markup("").join(map(Markup, groups))
    )
    write_whole(page, whole.encode())
    logger.info("wrote %d groups to %s", sum(map(bool, groups)), page)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: python -m atroposlib.compat.jsonl2html GROUPS.jsonl [PAGE.html]")
    try:
        generate_html(*sys.argv[1:])
    except OSError as error:
        if (line := disk_refusal(error)) is None:
            raise
        raise SystemExit(f"error: {line}") from None
