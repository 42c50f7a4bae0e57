"""One rollout as it is read: runs of given and of sampled tokens by turns, each token's text and
numbers, who speaks. Pure.

A rollout may be of any length, so it is told by pieces: whoever reads asks for so many tokens from
a place on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from atroposlib.dashboard.rollouts.rollout_stats import (
    Floats,
    TrainedTokens,
    logprobs_of,
    of_each_token,
    sampled_places,
    told_of_each,
    versions_of,
)
from atroposlib.dashboard.rollouts.text import MAX_TOKENS_OF_PIECE, TextOfTokens, messages_of
from atroposlib.wire.groups import PROMPT_MASK

MAX_CALL = 200
"""Characters of a tool call that are shown above its turn, whose tokens show all of it."""
MAX_TAG = 1000
CHARACTERS_OF_PIECE = 200
"""Of a message that has no tokens; it counts as one."""


def transcript(
    group: Mapping[str, Any],
    index: int,
    text: TextOfTokens,
    trained: TrainedTokens | None = None,
    begin: int = 0,
    count: int = 2000,
) -> dict[str, Any]:
    """A rollout's tokens from `begin` on, `count` of them or a few more, so that no character is
    torn.

    Returns:
        length: of the whole rollout, in tokens. begin, end: what this is of. runs: `given`,
        `begin`, `end`, `tags` of who speaks, and `pieces`, [text, number of tokens] each. Runs that
        began
            earlier are told from `begin` on, without tags.
        columns: [end - begin] of each token, null where not known: `token`, its id; `logprob` under
        the sampler; `trainer`,
            under the trainer's weights; `entropy`; `advantage`; `version` of the weights that
            sampled it.
        boundaries: [position, version] of tokens at which the weights changed, in the whole
        rollout.
    """
    tokens = told_of_each(group, "tokens")[index]
    if not isinstance(tokens, list):
        return _of_messages(told_of_each(group, "messages")[index], begin, count)
    mask = told_of_each(group, "masks")[index]
    mask = (
        mask if isinstance(mask, list) and len(mask) == len(tokens) else [PROMPT_MASK] * len(tokens)
    )
    begin = max(0, min(begin, len(tokens)))
    stop_of_page = min(len(tokens), begin + max(1, count))
    runs, tags = [], told_of_runs(told_of_each(group, "messages")[index], mask)
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
    runs, begin = [], 0
    for _, run in groupby(mask, key=lambda token: token == PROMPT_MASK):
        end = begin + sum(1 for _ in run)
        runs.append((begin, end))
        begin = end
    return runs


def boundaries(places: npt.NDArray[np.int64], versions: npt.NDArray[np.int64]) -> list[list[int]]:
    """[position, version] of each sampled token whose weights are not those of the one before."""
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
    none = np.full(length, np.nan, dtype=np.float32)
    sampler = logprobs_of(group, index)
    logprob = of_each_token(length, places, sampler[places]) if len(sampler) else none
    trainer = entropy = none
    advantage = _own_advantages(group, index, places, length)
    if trained is not None and len(learned := places[places > 0]) == trained.trained:
        trainer = of_each_token(length, learned, trained.logprobs)
        entropy = of_each_token(length, learned, trained.entropies)
        advantage = of_each_token(length, learned, trained.advantages)
    versions: list[int | None] = [None] * length
    for place, version in zip(
        places.tolist(), versions_of(group, index, len(places)).tolist(), strict=True
    ):
        versions[place] = version if version >= 0 else None
    columns = {"logprob": logprob, "trainer": trainer, "entropy": entropy, "advantage": advantage}
    return {"token": tokens[part], "version": versions[part]} | {
        name: np.ascontiguousarray(column[part]) for name, column in columns.items()
    }


def _own_advantages(
    group: Mapping[str, Any], index: int, places: npt.NDArray[np.int64], length: int
) -> Floats:
    """[tokens] what the environment sent, NaN where nothing: for each token, or one number for all."""
    row = told_of_each(group, "advantages")[index]
    row = row if isinstance(row, list) else [] if row is None else [row]
    values = np.asarray([row[0]] * length if len(row) == 1 else row, dtype=np.float32)
    return (
        of_each_token(length, places, values[places])
        if len(values) == length
        else np.full(length, np.nan, np.float32)
    )


def _of_messages(entry: Any, begin: int, count: int) -> dict[str, Any]:
    """A rollout without tokens: its messages, a few characters of one counting as a token."""
    runs, start = [], 0
    messages = messages_of(entry)
    last = max(
        (number for number, (role, _) in enumerate(messages) if role in ("assistant", "")),
        default=-1,
    )
    messages_of_run = entry if isinstance(entry, list) else [entry]
    for number, (role, content) in enumerate(messages):
        pieces = [
            content[at : at + CHARACTERS_OF_PIECE]
            for at in range(0, len(content), CHARACTERS_OF_PIECE)
        ] or [""]
        first, stop = max(start, begin), min(start + len(pieces), begin + count)
        if first < stop:
            message = messages_of_run[number]
            tags = tags_of(message) if isinstance(message, Mapping) and start >= begin else []
            is_given = role not in ("assistant", "") or (role == "" and number != last)
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


def told_of_runs(messages: Any, mask: Sequence[int]) -> list[list[dict[str, str]]]:
    """Tags of the runs of given and of sampled tokens: who speaks, which tools are called, and what
    went wrong.

    The last answers among the messages are those that were sampled.

    Returns:
        nothing where the messages are not those of the tokens.
    """
    kinds = [is_prompt for is_prompt, _ in groupby(mask, key=lambda token: token == PROMPT_MASK)]
    runs = kinds.count(False)
    known = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    answers = (
        [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if known
        else []
    )
    if not runs or len(answers) < runs or not kinds[0]:
        return []
    told: list[list[dict[str, str]]] = []
    begin = 0
    for place in answers[-runs:]:
        told += [
            [tag for message in messages[begin:place] for tag in tags_of(message)],
            tags_of(messages[place]),
        ]
        begin = place + 1
    return told


def tags_of(message: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the tags above a message: `kind` is said, tool, call, problem or reward."""
    role, name = str(message.get("role")), message.get("name")
    tags = [
        {
            "kind": "tool" if role == "tool" else "said",
            "text": _cut(f"{role} {name}" if name else role, MAX_CALL),
        }
    ]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, Mapping) else None
        named = function if isinstance(function, Mapping) else {}
        tags.append(
            {
                "kind": "call",
                "text": _cut(
                    f"calls {named.get('name') or '?'} {named.get('arguments')}", MAX_CALL
                ),
            }
        )
    if message.get("problem"):
        tags.append({"kind": "problem", "text": _cut(str(message["problem"]), MAX_TAG)})
    if message.get("reward"):
        tags.append(
            {"kind": "reward", "text": _cut(f"reward {of_any_kind(message['reward'])}", MAX_CALL)}
        )
    return tags


def described(parameters: Any) -> str:
    """Sampling parameters as a line: `temperature 0.7, top_p 0.9`, and those of differing turns one
    after the other; empty where they are not known."""
    if isinstance(parameters, list):
        return "; then ".join(described(part) for part in parameters)
    if not isinstance(parameters, Mapping):
        return ""
    return ", ".join(
        f"{name} {of_any_kind(value)}" for name, value in parameters.items() if name != "tokens"
    )


def of_any_kind(value: Any) -> str:
    """A number as it is read; a client may send others things."""
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} \u2026"
