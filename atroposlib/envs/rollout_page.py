"""A page on which a person reads rollouts: scores, and every sampled token shaded by its logprob. One file, no scripts."""

import json
import math
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, StrictUndefined

from atroposlib.envs.groups import PROMPT_MASK
from atroposlib.envs.rollout_template import TEMPLATE

MOST_GROUPS = 200
"""A page with more takes a browser too long; the rest stays in the file."""


def write_rollout_page(groups_path: Path, tokenizer: Any, title: str) -> Path:
    """Render a groups file (JSON lines) to an HTML page next to it, and return the page's path."""
    groups: list[dict[str, Any]] = []
    left_out = 0
    with groups_path.open(encoding="utf-8") as lines:
        for line in lines:
            if len(groups) < MOST_GROUPS:
                groups.append(group_view(json.loads(line), tokenizer))
            else:
                left_out += 1
    jinja = Environment(autoescape=True, undefined=StrictUndefined)
    page = groups_path.with_suffix(".html")
    template = jinja.from_string(TEMPLATE)
    page.write_text(template.render(title=title, groups=groups, left_out=left_out, shade=shade), encoding="utf-8")
    return page


def group_view(group: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """What the template needs of one group."""
    scores = group["scores"]
    ranks = {max(scores): "best", min(scores): "worst"} if min(scores) < max(scores) else {}
    versions = group.get("weight_versions")
    rollouts = []
    for index, (tokens, mask) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
        logprobs = group["inference_logprobs"][index] if group.get("inference_logprobs") else [None] * len(tokens)
        known = [p for p, m in zip(logprobs, mask, strict=True) if m != PROMPT_MASK and p is not None]
        rollouts.append(
            {
                "score": short(scores[index]),
                "rank": ranks.get(scores[index], ""),
                "sampled": sum(m != PROMPT_MASK for m in mask),
                "mean_logprob": fmean(known) if known else None,
                "weight_version": versions[index] if versions else None,
                "parts": token_parts(tokens, mask, logprobs, tokenizer),
            }
        )
    return {"scores": [short(score) for score in scores], "rollouts": rollouts}


def token_parts(tokens: list[int], mask: list[int], logprobs: list[float | None], tokenizer: Any) -> list[dict[str, Any]]:
    """The sequence as pieces of text: given tokens together, sampled ones each by itself.

    A character may be split over several tokens; such tokens become one piece, shaded by the least likely of them.
    """
    parts: list[dict[str, Any]] = []
    rows = list(zip(tokens, mask, logprobs, strict=True))
    for given, run in groupby(rows, key=lambda row: row[1] == PROMPT_MASK):
        pending: list[tuple[int, float | None]] = []
        if given:
            parts.append({"given": True, "text": tokenizer.decode([token for token, _, _ in run])})
            continue
        for token, _, logprob in run:
            pending.append((token, logprob))
            text = tokenizer.decode([token for token, _ in pending])
            if not text.endswith("\ufffd"):
                parts.append(sampled_part(text, pending))
                pending = []
        if pending:
            parts.append(sampled_part(tokenizer.decode([token for token, _ in pending]), pending))
    return parts


def sampled_part(text: str, pieces: list[tuple[int, float | None]]) -> dict[str, Any]:
    ids = ", ".join(str(token) for token, _ in pieces)
    known = [logprob for _, logprob in pieces if logprob is not None]
    if not known:
        return {"given": False, "text": text, "shade": "transparent", "title": f"token {ids}"}
    title = f"logprob {', '.join(f'{logprob:.4f}' for logprob in known)} · token {ids}"
    return {"given": False, "text": text, "shade": shade(math.exp(min(known))), "title": title}


def shade(probability: float) -> str:
    """A background colour: none at probability 1, deeper the less likely (full at one in a thousand)."""
    depth = min(1.0, -math.log10(max(probability, 1e-3)) / 3)
    return f"rgba(230, 120, 20, {0.75 * depth:.2f})"


def short(score: float) -> str:
    return f"{score:.4g}"
