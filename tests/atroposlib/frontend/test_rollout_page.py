"""The page on which a person reads rollouts: what it shows, and that it stays small and quick however much was sampled."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.envs._runtime.command_line import write_page
from atroposlib.frontend import rollout_page
from atroposlib.frontend.rollout_page import Decoder, token_parts, write_rollout_page
from tests.atroposlib.envs.scripted_env import ScriptedEnv

PROMPT = [1000, 1001]


class ByteTokenizer:
    """One token per byte of UTF-8, as the bytes of a byte-level vocabulary are; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def decode(self, ids: list[int]) -> str:
        self.asked += 1
        if any(token > 2000 for token in ids):
            raise OverflowError("out of range integral type conversion attempted")
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def group(*texts: bytes, **more: Any) -> dict[str, Any]:
    return {
        "tokens": [[*PROMPT, *text] for text in texts],
        "masks": [[-100, -100, *text] for text in texts],
        "inference_logprobs": [[1.0, 1.0, *[-0.5] * len(text)] for text in texts],
        "scores": [float(index) for index in range(len(texts))],
    } | more


def page_of(groups: list[dict[str, Any]], folder: Path, tokenizer: Any) -> str:
    path = folder / "groups.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in groups))
    return write_rollout_page(path, tokenizer, "title").read_text()


@given(text=st.text(max_size=12))
def test_the_text_is_that_of_the_tokens_however_characters_are_split(text: str) -> None:
    sampled = list(text.encode())
    row = [-0.1] * len(sampled)
    parts = list(token_parts(sampled, sampled, row, Decoder(ByteTokenizer())))
    assert "".join(part["text"] for part in parts) == text
    assert len(parts) == len(text), "one piece for each character"


def test_every_token_is_decoded_once_however_often_it_was_sampled(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    shown = page_of([group(b"ab" * 500, b"ba" * 500)] * 20, tmp_path, tokenizer)
    assert shown.count(">a</span>") == 20 * 1000
    assert tokenizer.asked <= 3, "a, b and the prompt"


def test_bytes_that_are_no_text_are_not_decoded_again_and_again() -> None:
    tokenizer = ByteTokenizer()
    sampled = [0xFF] * 4096
    parts = list(token_parts(sampled, sampled, [-0.1] * len(sampled), Decoder(tokenizer)))
    assert tokenizer.asked <= rollout_page.MOST_TOKENS_OF_PIECE
    assert len(parts) == 4096 / rollout_page.MOST_TOKENS_OF_PIECE


def test_a_page_ends_where_a_browser_could_not_show_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_page, "MOST_TOKENS", 100)
    monkeypatch.setattr(rollout_page, "MOST_TOKENS_OF_ROLLOUT", 30)
    groups = [group(b"x" * 20, b"y" * 70) for _ in range(6)]
    (tmp_path / "groups.jsonl").touch()
    shown = page_of(groups, tmp_path, ByteTokenizer())
    assert "The first 2 groups; the file holds the rest" in shown
    assert (shown.count(">x</span>"), shown.count(">y</span>")) == (40, 60)
    assert "70 tokens sampled" in shown
    assert "30 sampled tokens are shown" in shown
    assert "The first" not in page_of(groups[:2], tmp_path, ByteTokenizer())


def test_a_file_is_read_no_further_than_the_page_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_page, "MOST_GROUPS", 1)
    path = tmp_path / "groups.jsonl"
    path.write_text(json.dumps(group(b"a", b"b")) + "\n" + "what follows is not even read as JSON\n" * 3)
    assert "The first 1 groups" in write_rollout_page(path, ByteTokenizer(), "title").read_text()


def test_a_weight_version_tells_whose_it_is(tmp_path: Path) -> None:
    shown = page_of(
        [group(b"a", b"b", weight_versions=[17, 3], weight_epochs=[1_700_000_000_000, 0])], tmp_path, ByteTokenizer()
    )
    assert '<span title="of the trainer started 2023-11-14 22:13:20 UTC">weight version 17</span>' in shown
    assert "<span>weight version 3</span>" in shown


def test_a_rollout_says_how_it_was_sampled_and_why_it_ended(tmp_path: Path) -> None:
    turns = [{"temperature": 1.0, "tokens": 1}, {"temperature": 0.5, "tokens": 1}]
    told = {"sampling_params": [{"temperature": 0.7, "top_p": 0.9}, turns], "finish_reasons": ["length", "stop"]}
    shown = page_of([group(b"a", b"b", **told)], tmp_path, ByteTokenizer())
    assert "<span>temperature 0.7, top_p 0.9</span>" in shown
    assert "<span>temperature 1; then temperature 0.5</span>" in shown
    assert "<span>ended by length</span>" in shown
    half = {"sampling_params": [None, {"temperature": 0.25, "stop": "x"}], "finish_reasons": [None, "stop"]}
    shown = page_of([group(b"a", b"b", **half)], tmp_path, ByteTokenizer())
    assert shown.count("<span>temperature 0.25, stop x</span>") == shown.count("<span>ended by stop</span>") == 1
    own = {"sampling_params": {"stop": "x"}, "finish_reasons": "stop"}
    for silent in ({}, own):
        assert "ended by" not in page_of([group(b"a", b"b", **silent)], tmp_path, ByteTokenizer())


def test_a_conversation_shows_who_speaks_and_which_tools_are_called(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"to": "<b>&"}'}}
    talk = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "c", "tool_calls": [call], "reward": 0.5},
        {"role": "tool", "name": "<i>add", "content": "!", "problem": "raised"},
        {"role": "assistant", "content": "d"},
    ]
    row = {"tokens": [1000, 99, 1001, 100], "masks": [-100, 99, -100, 100]}
    both = {name: [value, value] for name, value in row.items()} | {"scores": [0.0, 1.0], "messages": [talk, None]}
    shown = page_of([both], tmp_path, ByteTokenizer())
    assert shown.count('<p class="tags">') == 4, "of the first only, whose messages are known"
    assert '<span class="call">calls add {&#34;to&#34;: &#34;&lt;b&gt;&amp;&#34;}</span>' in shown
    assert '<span class="tool">tool &lt;i&gt;add</span> <span class="problem">raised</span>' in shown
    assert '<span class="reward">reward 0.5</span>' in shown
    assert (shown.count(">c</span>"), shown.count(">d</span>")) == (2, 2)


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.just("assistant"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "function", "name", "reward"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=40)
@given(messages=JSON, mask=st.lists(st.sampled_from([-100, 7]), max_size=6))
def test_messages_of_any_kind_label_runs_or_nothing(messages: Any, mask: list[int]) -> None:
    told = rollout_page.told_of_runs(messages, mask)
    assert len(told) <= sum(1 for place, token in enumerate(mask) if place == 0 or token != mask[place - 1])
    assert all(isinstance(tag["text"], str) for tags in told for tag in tags)


def test_tokens_that_the_tokenizer_does_not_know_are_shown_by_their_ids(tmp_path: Path) -> None:
    odd = group(b"a", b"b")
    odd["tokens"][0][2] = odd["masks"][0][2] = 10**12
    assert ">[1000000000000]</span>" in page_of([odd], tmp_path, ByteTokenizer())


def test_a_page_that_cannot_be_made_does_not_fail_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_text('{"scores": [1.0], "tok')
    env = ScriptedEnv([])
    env.tokenizer = ByteTokenizer()
    write_page(str(path), env)
    assert f"wrote the groups to {path}; a page to read them could not be made" in caplog.text
