"""One rollout as people read it: runs of prompt tokens and of sampled tokens in turn, with each
token's text and numbers, and the speaker. Pure.

A rollout may be of any length, so a reader asks for a number of tokens from a position on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from atroposlib.dashboard.rollouts.rollout_stats import (
    Floats,
    TrainedTokens,
    entries_of,
    logprobs_of,
    of_each_token,
    sampled_places,
    versions_of,
)
from atroposlib.dashboard.rollouts.text import MAX_TOKENS_OF_PIECE, TextOfTokens, messages_of
from atroposlib.wire import PROMPT_MASK

T = TypeVar("T", list[Any], dict[str, Any])
MAX_CALL = 200
"""Characters of a tool call above its turn, whose tokens show all of it."""
MAX_TAG = 1000
CHARACTERS_OF_PIECE = 200
"""Characters of a message without tokens that count as one token."""


def transcript(
    group: Mapping[str, Any],
    index: int,
    text: TextOfTokens,
    trained: TrainedTokens | None = None,
    begin: int = 0,
    count: int = 2000,
) -> dict[str, Any]:
    """Return `count` tokens of a rollout from `begin` on, or a few more, so that no character is
    torn.

    Returns:
        length: of the whole rollout, in tokens. begin, end: the range that this covers. `runs` has
        `given`, `begin`, `end`, `tags` of who speaks, and `pieces`, [text, number of tokens] each.
        Runs that began earlier are cut to begin at `begin`, without tags.
        columns: [end - begin] of each token, null where not known. `token`: its id; `logprob` under
        the sampler; `trainer`, under the trainer's weights; `entropy`; `advantage`; `version` of
        the weights that sampled it.
        boundaries: [position, version] of tokens at which the weights changed, in the whole
        rollout.
    """
    tokens = entries_of(group, "tokens")[index]
    if not isinstance(tokens, list):
        return _of_messages(entries_of(group, "messages")[index], begin, count)
    mask = entries_of(group, "masks")[index]
    if not isinstance(mask, list) or len(mask) != len(tokens):
        mask = [PROMPT_MASK] * len(tokens)
    begin = max(0, min(begin, len(tokens)))
    stop_of_page = min(len(tokens), begin + max(1, count))
    runs, tags = [], tags_of_runs(entries_of(group, "messages")[index], mask)
    end = begin
    for number, (start, stop) in enumerate(runs_of(mask)):
        if stop <= begin or start >= stop_of_page:
            continue
        first, last = max(start, begin), min(stop, stop_of_page)
        pieces = _whole_pieces(text, tokens, first, last, stop)
        end = first + sum(size for _, size in pieces)
        runs.append(
            {
                "given": mask[start] == PROMPT_MASK,
                "begin": first,
                "end": end,
                "tags": tags[number] if start >= begin and number < len(tags) else [],
                "pieces": pieces,
            }
        )
    places = sampled_places(mask)
    return {
        "length": len(tokens),
        "begin": begin,
        "end": end,
        "runs": runs,
        "columns": _columns(group, index, tokens, places, trained, begin, end),
        "boundaries": boundaries(places, versions_of(group, index, len(places))),
    }


def _whole_pieces(
    text: TextOfTokens, tokens: Sequence[int], first: int, last: int, stop: int
) -> list[tuple[str, int]]:
    """Pieces of the tokens from `first` to `last`, the last one whole if it goes on before `stop`."""
    pieces, size = [], 0
    for piece in text.pieces(tokens[first : min(stop, last + MAX_TOKENS_OF_PIECE)]):
        if size >= last - first:
            break
        pieces.append(piece)
        size += piece[1]
    return pieces


def runs_of(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end of each run of tokens that were all given, or all sampled."""
    places = range(len(mask))
    runs = [list(run) for _, run in groupby(places, key=lambda at: mask[at] == PROMPT_MASK)]
    return [(run[0], run[-1] + 1) for run in runs]


def boundaries(places: npt.NDArray[np.int64], versions: npt.NDArray[np.int64]) -> list[list[int]]:
    """[position, version] of each sampled token whose version differs from the token's before."""
    changed = np.flatnonzero(np.diff(versions)) + 1
    return [[int(places[at]), int(versions[at])] for at in changed]


def _columns(
    group: Mapping[str, Any],
    index: int,
    tokens: list[int],
    places: npt.NDArray[np.int64],
    trained: TrainedTokens | None,
    begin: int,
    end: int,
) -> dict[str, Any]:
    part, length = slice(begin, end), len(tokens)
    logprob = trainer = entropy = np.full(length, np.nan, dtype=np.float32)
    sampler = logprobs_of(group, index)
    if len(sampler):
        logprob = of_each_token(length, places, sampler[places])
    advantage = _own_advantages(group, index, places, length)
    if trained is not None and len(learned := places[places > 0]) == trained.trained:
        trainer = of_each_token(length, learned, trained.logprobs)
        entropy = of_each_token(length, learned, trained.entropies)
        advantage = of_each_token(length, learned, trained.advantages)
    versions: list[int | None] = [None] * length
    for place, version in zip(
        places.tolist(), versions_of(group, index, len(places)).tolist(), strict=True
    ):
        if version >= 0:
            versions[place] = version
    columns = {"logprob": logprob, "trainer": trainer, "entropy": entropy, "advantage": advantage}
    return {"token": tokens[part], "version": versions[part]} | {
        name: np.ascontiguousarray(column[part]) for name, column in columns.items()
    }


def _own_advantages(
    group: Mapping[str, Any], index: int, places: npt.NDArray[np.int64], length: int
) -> Floats:
    """[tokens] the environment's advantages, NaN without one. It may send one number for all."""
    row = entries_of(group, "advantages")[index]
    values = np.atleast_1d(np.asarray(row, dtype=np.float32))
    if len(values) == 1:
        values = np.repeat(values, length)
    if len(values) == length:
        return of_each_token(length, places, values[places])
    return np.full(length, np.nan, np.float32)


def _of_messages(entry: Any, begin: int, count: int) -> dict[str, Any]:
    """Return a rollout without tokens: a few characters of its messages count as a token."""
    runs, start = [], 0
    messages = messages_of(entry)
    answers = [number for number, (role, _) in enumerate(messages) if role in ("assistant", "")]
    last = max(answers, default=-1)
    for number, (role, content) in enumerate(messages):
        pieces = [
            content[at : at + CHARACTERS_OF_PIECE]
            for at in range(0, len(content), CHARACTERS_OF_PIECE)
        ] or [""]
        first, stop = max(start, begin), min(start + len(pieces), begin + count)
        if first < stop:
            message = entry[number] if isinstance(entry, list) else entry
            tags = tags_of(message) if isinstance(message, Mapping) and start >= begin else []
            is_given = role != "assistant" and (role != "" or number != last)
            shown = [(piece, 1) for piece in pieces[first - start : stop - start]]
            runs.append(
                {"given": is_given, "begin": first, "end": stop, "tags": tags, "pieces": shown}
            )
        start += len(pieces)
    end = min(start, begin + count)
    return {
        "length": start,
        "begin": min(begin, start),
        "end": end,
        "runs": runs,
        "columns": {},
        "boundaries": [],
    }


def tags_of_runs(messages: Any, mask: Sequence[int]) -> list[list[dict[str, str]]]:
    """Return the tags of each run of prompt or of sampled tokens: speakers, tool calls, problems.

    The last answers among the messages are the sampled ones.

    Returns:
        An empty list if the messages do not belong to the tokens.
    """
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return []
    kinds = [is_prompt for is_prompt, _ in groupby(mask, key=lambda token: token == PROMPT_MASK)]
    runs = kinds.count(False)
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not runs or len(answers) < runs or not kinds[0]:
        return []
    tags: list[list[dict[str, str]]] = []
    begin = 0
    for place in answers[-runs:]:
        tags += [
            [tag for message in messages[begin:place] for tag in tags_of(message)],
            tags_of(messages[place]),
        ]
        begin = place + 1
    return tags


def tags_of(message: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the tags above a message: `kind` is `said`, tool, call, problem or reward."""
    role, name = str(message.get("role")), message.get("name")
    speaker = f"{role} {name}" if name else role
    tags = [{"kind": "tool" if role == "tool" else "said", "text": _cut(speaker, MAX_CALL)}]
    for call in _as(list, message.get("tool_calls")):
        function = _as(dict, _as(dict, call).get("function"))
        text = f"calls {function.get('name') or '?'} {function.get('arguments')}"
        tags.append({"kind": "call", "text": _cut(text, MAX_CALL)})
    if message.get("problem"):
        tags.append({"kind": "problem", "text": _cut(str(message["problem"]), MAX_TAG)})
    if message.get("reward"):
        text = f"reward {of_any_kind(message['reward'])}"
        tags.append({"kind": "reward", "text": _cut(text, MAX_CALL)})
    return tags


def _as(kind: type[T], value: Any) -> T:
    """Return a value of this type; an empty one in place of another type."""
    return value if isinstance(value, kind) else kind()


def described(parameters: Any) -> str:
    """Return sampling parameters as a line, such as `temperature 0.7, top_p 0.9`.

    Different parameters of several turns follow each other. The line is empty if none are known.
    """
    if isinstance(parameters, list):
        return "; then ".join(described(part) for part in parameters)
    if not isinstance(parameters, Mapping):
        return ""
    return ", ".join(
        f"{name} {of_any_kind(value)}" for name, value in parameters.items() if name != "tokens"
    )


def of_any_kind(value: Any) -> str:
    """Return a number in its short form; a client may send something else."""
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} \u2026"
