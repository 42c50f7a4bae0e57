"""One rollout, token by token: its text, its speakers, its numbers, and any part of it by
itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.dashboard.rollouts.rollout_stats import TrainedTokens, numbers_of, places_of
from atroposlib.dashboard.rollouts.text import MAX_TOKENS_OF_PIECE, TextOfTokens, searched_text
from atroposlib.dashboard.rollouts.transcript import (
    CHARACTERS_OF_PIECE,
    described,
    tags_of_runs,
    transcript,
)


class ByteTokenizer:
    """One token per byte of UTF-8, as the bytes of a byte-level vocabulary are; counts how often it
    is asked.
    """

    def __init__(self) -> None:
        self.asked = 0

    def decode(self, ids: list[int]) -> str:
        self.asked += 1
        if any(token > 2000 for token in ids):
            raise OverflowError("out of range integral type conversion attempted")
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def text_of(tokenizer: ByteTokenizer | None = None) -> TextOfTokens:
    return TextOfTokens((tokenizer or ByteTokenizer()).decode)


def group_of(*turns: tuple[bool, bytes], **more: Any) -> dict[str, Any]:
    """A group of one rollout of turns: whether it was given, and its bytes."""
    tokens = [token for _, content in turns for token in content]
    masks = [-100 if given else token for given, content in turns for token in content]
    return {"tokens": [tokens], "masks": [masks], "scores": [1.0]} | more


def joined(told: dict[str, Any]) -> str:
    return "".join(piece for run in told["runs"] for piece, _ in run["pieces"])


@given(text=st.text(max_size=12))
def test_the_text_is_that_of_the_tokens_however_characters_are_split(text: str) -> None:
    pieces = text_of().pieces(list(text.encode()))
    assert "".join(piece for piece, _ in pieces) == text
    assert [len(character.encode()) for character in text] == [size for _, size in pieces], (
        "one piece for each character"
    )


@settings(max_examples=60)
@given(
    turns=st.lists(
        st.tuples(st.booleans(), st.text(min_size=1, max_size=9)), min_size=1, max_size=5
    ),
    count=st.integers(1, 7),
)
def test_pieces_asked_for_one_after_the_other_are_the_whole(
    turns: list[tuple[bool, str]], count: int
) -> None:
    group = group_of(*[(given, text.encode()) for given, text in turns])
    length = len(group["tokens"][0])
    group["inference_logprobs"] = [[-float(place) for place in range(length)]]
    read, logprobs, begin = "", [], 0
    while begin < length:
        told = transcript(group, 0, text_of(), None, begin, count)
        assert told["begin"] == begin < told["end"] <= begin + count + MAX_TOKENS_OF_PIECE
        assert [run["begin"] for run in told["runs"]] == [
            begin,
            *(run["end"] for run in told["runs"][:-1]),
        ]
        read += joined(told)
        logprobs += told["columns"]["logprob"].tolist()
        begin = told["end"]
    assert read == "".join(text for _, text in turns)
    sampled = [place for place in range(length) if group["masks"][0][place] != -100]
    assert [place for place, value in enumerate(logprobs) if not np.isnan(value)] == sampled
    assert all(logprobs[place] == -place for place in sampled)


def test_every_token_is_decoded_once_and_bytes_that_are_no_text_not_again_and_again() -> None:
    tokenizer = ByteTokenizer()
    text = text_of(tokenizer)
    assert len(text.pieces([97, 98] * 2000)) == 4000
    assert tokenizer.asked == 2
    assert len(text.pieces([0xFF] * 4096)) == 4096 / MAX_TOKENS_OF_PIECE
    assert tokenizer.asked <= 2 + MAX_TOKENS_OF_PIECE
    assert text.pieces([10**12]) == [("[1000000000000]", 1)]
    assert TextOfTokens().pieces([7, 8]) == [("7 ", 1), ("8 ", 1)]


def test_a_word_of_a_vocabulary_that_marks_spaces_keeps_its_space() -> None:
    names = {1: "\u2581one", 2: "two"}
    text = TextOfTokens(lambda ids: " ".join(names[i].strip("\u2581") for i in ids), names.get)
    assert text.pieces([2, 1]) == [("two", 1), (" one", 1)]


def test_numbers_stand_at_their_tokens_and_versions_change_in_the_middle() -> None:
    group = group_of((True, b"ab"), (False, b"cde"), (True, b"f"), (False, b"gh"))
    group |= {
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25, -1.0, 1.0, -2.0, -3.0]],
        "weight_version_spans": [[[4, 2], [6, 3]]],
    }
    trained = TrainedTokens(
        7, 5, *(np.array(row, dtype=np.float32) for row in ([-0.5, -0.5], [1.0, 2.0], [3.0, 3.0]))
    )
    told = orjson.loads(
        orjson.dumps(transcript(group, 0, text_of(), trained), option=orjson.OPT_SERIALIZE_NUMPY)
    )
    columns = told["columns"]
    assert columns["logprob"] == [None, None, -0.5, -0.25, -1.0, None, -2.0, -3.0]
    assert columns["trainer"] == [None, None, -0.5, -0.5, *[None] * 4]
    assert columns["entropy"][2:4] == [1.0, 2.0]
    assert columns["advantage"][2:5] == [3.0, 3.0, None]
    assert columns["version"] == [None, None, 4, 4, 6, None, 6, 6]
    assert told["boundaries"] == [[4, 6]]
    assert [(run["given"], run["begin"], run["end"]) for run in told["runs"]] == [
        (True, 0, 2), (False, 2, 5), (True, 5, 6), (False, 6, 8),
    ]  # fmt: skip
    (numbers,) = numbers_of(group, places_of(group))
    assert (numbers.sampled, numbers.mean_logprob, numbers.oldest, numbers.newest) == (
        5,
        -1.35,
        4,
        6,
    )
    other = TrainedTokens(7, 4, *(np.zeros(2, dtype=np.float32) for _ in range(3)))
    assert np.isnan(transcript(group, 0, text_of(), other)["columns"]["trainer"]).all(), (
        "of another number of tokens"
    )
    own = transcript(group | {"advantages": [[0.5]]}, 0, text_of())["columns"]["advantage"]
    assert own[2] == 0.5
    assert np.isnan(own[0])


def test_a_conversation_shows_who_speaks_and_which_tools_are_called() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"to": "<b>&"}'}}
    talk = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "c", "tool_calls": [call], "reward": 0.5},
        {"role": "tool", "name": "<i>add", "content": "!", "problem": "raised"},
        {"role": "assistant", "content": "d"},
    ]
    group = group_of((True, b"a"), (False, b"b"), (True, b"c"), (False, b"d"), messages=[talk])
    tags = [run["tags"] for run in transcript(group, 0, text_of())["runs"]]
    assert tags[1] == [
        {"kind": "said", "text": "assistant"},
        {"kind": "call", "text": 'calls add {"to": "<b>&"}'},
        {"kind": "reward", "text": "reward 0.5"},
    ]
    assert tags[2] == [
        {"kind": "tool", "text": "tool <i>add"},
        {"kind": "problem", "text": "raised"},
    ]
    assert [run["tags"] for run in transcript(group, 0, text_of(), None, 2, 1)["runs"]] == [tags[2]]


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.just("assistant"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "function", "name", "reward"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=40)
@given(messages=JSON, mask=st.lists(st.sampled_from([-100, 7]), max_size=6))
def test_messages_of_any_kind_label_runs_or_nothing(messages: Any, mask: list[int]) -> None:
    told = tags_of_runs(messages, mask)
    assert len(told) <= sum(
        1 for place, token in enumerate(mask) if place == 0 or token != mask[place - 1]
    )
    assert all(isinstance(tag["text"], str) for tags in told for tag in tags)
    alone = {"messages": [messages], "scores": [0.0]}
    assert transcript(alone, 0, text_of())["length"] >= 0
    assert isinstance(searched_text(alone, 0, text_of(), places_of(alone)[0]), str)


def test_messages_without_tokens_are_read_by_pieces_too() -> None:
    answer = "x" * (3 * CHARACTERS_OF_PIECE + 1)
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}]
    group = {"messages": [talk], "scores": [1.0]}
    whole = transcript(group, 0, TextOfTokens())
    assert (whole["length"], joined(whole)) == (5, "2 + 2?" + answer)
    assert [run["given"] for run in whole["runs"]] == [True, False]
    part = transcript(group, 0, TextOfTokens(), None, 2, 2)
    assert (part["begin"], part["end"], len(joined(part))) == (2, 4, 2 * CHARACTERS_OF_PIECE)
    assert searched_text(group, 0, TextOfTokens(), places_of(group)[0]).startswith("xxx")
    assert (
        joined(transcript({"messages": ["plain <b>"], "scores": [0.0]}, 0, TextOfTokens()))
        == "plain <b>"
    )


def test_the_search_reads_a_long_answer_at_both_ends_and_its_prompt() -> None:
    group = group_of((True, b"question"), (False, b"begin" + b"." * 50_000 + b"end"))
    found = searched_text(group, 0, text_of(), places_of(group)[0])
    assert found.startswith("begin.")
    assert "end\n\nquestion" in found
    assert len(found) < 20_000


def test_sampling_parameters_are_one_line() -> None:
    assert described({"temperature": 0.7, "top_p": 0.9}) == "temperature 0.7, top_p 0.9"
    turns = [{"temperature": 1.0, "tokens": 1}, {"temperature": 0.5, "tokens": 1}]
    assert described(turns) == "temperature 1; then temperature 0.5"
    assert (described(None), described("hot"), described({"stop": "x"})) == ("", "", "stop x")


def test_tokens_that_are_none_are_shown_as_they_are() -> None:
    """Files of groups may hold anything."""
    group = {"tokens": [["a", -5, 2**80, None, 65]], "scores": [1.0]}
    shown = joined(transcript(group, 0, text_of()))
    assert "a" in shown
    assert "-5" in shown
