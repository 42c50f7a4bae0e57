"""A page on which a person reads rollouts: scores, and every sampled token shaded by its logprob. One file, no scripts."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from atroposlib.groups import PROMPT_MASK

MOST_GROUPS = 200
MOST_TOKENS = 200_000
"""Sampled tokens after which no further group is begun. A page with more takes too long to write and a browser too long to
show; the rest stays in the file."""
MOST_TOKENS_OF_ROLLOUT = 8192
"""Sampled tokens of one rollout that are shown."""
MOST_OF_CALL = 200
"""Characters of a tool call that are shown above its turn, whose tokens show all of it."""
MOST_TOKENS_OF_PIECE = 16
"""A character takes four at most; more are bytes that are no text."""


class Decoder:
    """Text of tokens. Every token is decoded once, however often it was sampled."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, ...], str] = {}

    def __call__(self, tokens: tuple[int, ...]) -> str:
        """The text; of tokens that the tokenizer does not know, their ids."""
        text = self._known.get(tokens)
        if text is None:
            try:
                text = self._tokenizer.decode(list(tokens))
            except (OverflowError, LookupError, TypeError, ValueError):
                text = f"[{', '.join(map(str, tokens))}]"
            self._known[tokens] = text
        return text


def write_rollout_page(groups_path: Path, tokenizer: Any, title: str) -> Path:
    """Render a groups file (JSON lines) to an HTML page next to it, and return the page's path.

    The file may be of any size: it is read as far as the page goes.

    Raises:
        ValueError: a line is no group; says which.
    """
    page, unfinished = groups_path.with_suffix(".html"), groups_path.with_suffix(".html.part")
    with groups_path.open(encoding="utf-8") as lines:
        unfinished.write_text(rollout_page(lines, tokenizer, title), encoding="utf-8")
    unfinished.replace(page)
    return page


def rollout_page(lines: Iterable[str], tokenizer: Any, title: str) -> str:
    """The page of groups, one in each line, of as many as it has room for.

    Raises:
        ValueError: a line is no group; says which.
    """
    decode, left = Decoder(tokenizer), MOST_TOKENS
    groups: list[dict[str, Any]] = []
    following = iter(lines)
    line = next(following, "")
    while line and len(groups) < MOST_GROUPS and left > 0:
        try:
            groups.append(group_view(json.loads(line), decode))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"line {len(groups) + 1}: {type(error).__name__}: {error}") from error
        left -= sum(rollout["shown"] for rollout in groups[-1]["rollouts"])
        line = next(following, "")
    jinja = Environment(loader=PackageLoader("atroposlib.frontend"), autoescape=True, undefined=StrictUndefined)
    return jinja.get_template("rollouts.html").render(title=title, groups=groups, more=bool(line), shade=shade)


def group_view(group: dict[str, Any], decode: Decoder) -> dict[str, Any]:
    """What the template needs of one group."""
    scores = group["scores"]
    ranks = {max(scores): "best", min(scores): "worst"} if min(scores) < max(scores) else {}
    versions, epochs = group.get("weight_versions"), group.get("weight_epochs")
    sampling, reasons = told_of_each(group, "sampling_params"), told_of_each(group, "finish_reasons")
    talks = told_of_each(group, "messages")
    rollouts = []
    for index, (tokens, mask) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
        logprobs = group["inference_logprobs"][index] if group.get("inference_logprobs") else [None] * len(tokens)
        known = [p for p, m in zip(logprobs, mask, strict=True) if m != PROMPT_MASK and p is not None]
        sampled = sum(m != PROMPT_MASK for m in mask)
        rollouts.append(
            {
                "score": short(scores[index]),
                "rank": ranks.get(scores[index], ""),
                "sampled": sampled,
                "shown": min(sampled, MOST_TOKENS_OF_ROLLOUT),
                "mean_logprob": fmean(known) if known else None,
                "weight_version": versions[index] if versions else None,
                "trainer_started": started(epochs[index] if epochs else 0),
                "sampling": described(sampling[index]),
                "finish_reason": reasons[index] or "",
                "blocks": blocks(token_parts(tokens, mask, logprobs, decode), told_of_runs(talks[index], mask)),
            }
        )
    return {"scores": [short(score) for score in scores], "rollouts": rollouts}


def token_parts(tokens: list[int], mask: list[int], logprobs: list[float | None], decode: Decoder) -> Iterator[dict[str, Any]]:
    """The sequence as pieces of text: given tokens together, sampled ones each by itself.

    A character may be split over several tokens; such tokens become one piece, shaded by the least likely of them.
    """
    left = MOST_TOKENS_OF_ROLLOUT
    rows = list(zip(tokens, mask, logprobs, strict=True))
    for given, run in groupby(rows, key=lambda row: row[1] == PROMPT_MASK):
        if given:
            yield {"given": True, "text": decode(tuple(token for token, _, _ in run))}
            continue
        pieces = [(token, logprob) for token, _, logprob in run]
        yield from sampled_parts(pieces[:left], decode)
        left -= len(pieces)
        if left < 0:
            yield {"given": True, "text": f" \u2026 the rest is in the file: {MOST_TOKENS_OF_ROLLOUT} sampled tokens are shown"}
            return


def blocks(parts: Iterable[dict[str, Any]], told: Sequence[list[dict[str, str]]]) -> list[dict[str, Any]]:
    """Pieces of text, those that were given and those that were sampled by turns.

    Args:
        parts: as `token_parts` gives them.
        told: the tags of each block, as far as they are known.
    """
    runs = [(given, list(run)) for given, run in groupby(parts, key=lambda part: part["given"])]
    tags = [*told, *([] for _ in runs)]
    return [{"given": given, "tags": tags[place], "parts": run} for place, (given, run) in enumerate(runs)]


def told_of_runs(messages: Any, mask: Sequence[int]) -> list[list[dict[str, str]]]:
    """Tags of the runs of given and of sampled tokens: who speaks, which tools are called, and what went wrong.

    The last answers among the messages are those that were sampled.

    Returns:
        nothing where the messages are not those of the tokens.
    """
    kinds = [given for given, _ in groupby(mask, key=lambda token: token == PROMPT_MASK)]
    runs = kinds.count(False)
    known = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"] if known else []
    if not runs or len(answers) < runs or not kinds[0]:
        return []
    told: list[list[dict[str, str]]] = []
    begin = 0
    for place in answers[-runs:]:
        told += [[tag for message in messages[begin:place] for tag in tags_of(message)], tags_of(messages[place])]
        begin = place + 1
    return told


def tags_of(message: Mapping[str, Any]) -> list[dict[str, str]]:
    """What stands above a message: `kind` is said, tool, call, problem or reward."""
    role, name = str(message.get("role")), message.get("name")
    found = [{"kind": "tool" if role == "tool" else "said", "text": f"{role} {name}" if name else role}]
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        named = function if isinstance(function, dict) else {}
        text = f"calls {named.get('name') or '?'} {named.get('arguments')}"
        found.append({"kind": "call", "text": text if len(text) <= MOST_OF_CALL else f"{text[:MOST_OF_CALL]} \u2026"})
    if message.get("problem"):
        found.append({"kind": "problem", "text": str(message["problem"])})
    if message.get("reward"):
        found.append({"kind": "reward", "text": f"reward {of_any_kind(message['reward'])}"})
    return found


def sampled_parts(pieces: list[tuple[int, float | None]], decode: Decoder) -> Iterator[dict[str, Any]]:
    """Tokens that were sampled one after the other."""
    pending: list[tuple[int, float | None]] = []
    for piece in pieces:
        pending.append(piece)
        text = decode(tuple(token for token, _ in pending))
        if not text.endswith("\ufffd") or len(pending) >= MOST_TOKENS_OF_PIECE:
            yield sampled_part(text, pending)
            pending = []
    if pending:
        yield sampled_part(decode(tuple(token for token, _ in pending)), pending)


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


def started(epoch: int) -> str:
    """When the trainer started whose weights these are, from its epoch (unix milliseconds); empty where nobody told."""
    return f"{datetime.fromtimestamp(epoch / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC" if epoch > 0 else ""


def told_of_each(group: Mapping[str, Any], name: str) -> list[Any]:
    """An entry for each sequence, None where nothing is said. What is no list is the environment's own."""
    rows, count = group.get(name), len(group["tokens"])
    return rows if isinstance(rows, list) and len(rows) == count else [None] * count


def described(parameters: dict[str, Any] | list[dict[str, Any]] | None) -> str:
    """Sampling parameters as a line: `temperature 0.7, top_p 0.9`, and those of differing turns one after the other; empty
    where they are not known."""
    if parameters is None:
        return ""
    if isinstance(parameters, list):
        return "; then ".join(described(part) for part in parameters)
    return ", ".join(f"{name} {of_any_kind(value)}" for name, value in parameters.items() if name != "tokens")


def of_any_kind(value: Any) -> str:
    """A parameter's value; a client may send others than numbers."""
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def short(score: float) -> str:
    return f"{score:.4g}"
