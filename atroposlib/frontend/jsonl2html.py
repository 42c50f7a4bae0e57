"""A page from a file of groups with messages, where no tokenizer is at hand: `python -m atroposlib.frontend.jsonl2html FILE`.

`process` and `serve` write a richer page by themselves, with tokens shaded by their logprobs; see `rollout_page`.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

logger = logging.getLogger(__name__)

GROUP = """<details class="group">
  <summary>Group {{ index + 1 }}: {{ rollouts | length }} rollouts, scores {{ scores | join(", ") }}</summary>
  {% for rollout in rollouts %}<article>
    <header class="{{ rollout.score_class }}">score {{ rollout.score }}</header>
    {% for message in rollout.messages %}<pre>{% if message.role %}<b>{{ message.role }}</b>
{% endif %}{{ message.content }}</pre>
    {% endfor %}</article>
  {% endfor %}</details>
"""
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
  article { margin: .6rem 0; border: 1px solid #8884; border-radius: 6px; }
  header { padding: .3rem .7rem; background: #8881; }
  pre { margin: 0; padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; }
  .reward-positive { color: #16803c; } .reward-negative { color: #c0392b; }
</style>
<h1>{{ title }}</h1>
{{ groups }}</html>
"""
jinja = Environment(autoescape=True, undefined=StrictUndefined)


def get_score_class(score: Any) -> str:
    """The CSS class of a score: reward-positive, -zero or -negative; nothing for what is no number."""
    if isinstance(score, bool) or not isinstance(score, int | float):
        return ""
    return "reward-positive" if score > 0 else "reward-negative" if score < 0 else "reward-zero"


def as_messages(entry: Any) -> list[dict[str, str]]:
    """The messages of one rollout, which the file has as text, or as a list of texts or messages."""
    messages = []
    for message in entry if isinstance(entry, list) else [entry]:
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
    return jinja.from_string(GROUP).render(index=index, rollouts=rollouts, scores=scores)


def generate_html(input_path: str | Path, output_path: str | Path | None = None) -> None:
    """Write the page of a groups file (JSON lines), by default beside it with the ending .html.

    Raises:
        OSError: the file cannot be read, or the page not written.
        ValueError: a line is no group, by its number.
    """
    source = Path(input_path)
    page = Path(output_path) if output_path is not None else source.with_suffix(".html")
    groups = []
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                groups.append(create_html_for_group(json.loads(line), number))
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{source}, line {number + 1} is no group: {error}") from error
    head, _, tail = PAGE.partition("{{ groups }}")
    page.write_text("".join([jinja.from_string(head).render(title=source.name), *groups, tail]), encoding="utf-8")
    logger.info("wrote %d groups to %s", sum(map(bool, groups)), page)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: python -m atroposlib.frontend.jsonl2html GROUPS.jsonl [PAGE.html]")
    generate_html(*sys.argv[1:])
