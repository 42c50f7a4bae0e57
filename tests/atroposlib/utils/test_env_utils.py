"""The small helpers that environments import."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from atroposlib.compat.evaluation import pass_at_k
from atroposlib.compat.utils import (
    allclose_to_first,
    compute_discounted_returns,
    compute_grpo_process_supervision_advantages,
    compute_stats,
    ensure_trajectory_token_limit,
    select_best_index,
    tokenize_for_trainer,
    truncate_thinking,
)
from atroposlib.inference.responses import parse_tool_call
from atroposlib.utils.metrics import get_std_min_max_avg
from tests.atroposlib.inference.template_shapes import STARTER

rewards = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=1, max_size=5)


class LetterTokenizer:
    """One token per character; an end token, 0, after each turn."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self,
        chat: list[Any],
        tokenize: bool = True,
        return_dict: bool = False,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        assert tokenize
        assert not return_dict
        ids = [
            i
            for message in chat
            for i in [*map(ord, f"{message['role'][0]}:{message['content']}"), 0]
        ]
        return ids + ([ord("a"), ord(":")] if add_generation_prompt else [])


CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "U2"},
    {"role": "assistant", "content": "A2"},
]


def trained(row: dict[str, Any]) -> str:
    assert len(row["tokens"]) == len(row["masks"])
    assert all(
        mask in (-100, token) for token, mask in zip(row["tokens"], row["masks"], strict=True)
    )
    return "".join(chr(token) for token in row["masks"] if token != -100)


def test_the_last_turn_or_all_turns_of_the_assistant_are_trained() -> None:
    assert trained(tokenize_for_trainer(LetterTokenizer(), CHAT)) == "A2\0"
    assert (
        trained(tokenize_for_trainer(LetterTokenizer(), CHAT, train_on_all_assistant_turns=True))
        == "A1\0A2\0"
    )


def test_a_last_message_of_another_role_is_trained_behind_the_generation_prompt() -> None:
    """As by the public SDK, whose environments may end with an observation."""
    tokenizer = LetterTokenizer()
    chat = [*CHAT, {"role": "user", "content": "a long observation"}]
    begin = len(tokenizer.apply_chat_template(CHAT, add_generation_prompt=True))
    row = tokenize_for_trainer(tokenizer, chat)
    assert row["masks"] == [-100] * begin + row["tokens"][begin:]
    assert trained(row)
    all_turns = tokenize_for_trainer(tokenizer, chat, train_on_all_assistant_turns=True)
    assert trained(all_turns) == "A1\0A2\0"


STRIPS = "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
REBUILDS = "<think>\n{{ m.content.split('</think>')[0] if loop.last else '' }}</think>{{ m.content.split('</think>')[-1] }}"


@pytest.mark.parametrize(
    ("history", "first", "last"),
    [
        ("{{ m.content }}", "hm</think>2", "so</think>4"),
        (STRIPS, "2", "so</think>4"),
        (REBUILDS, "</think>2", "so</think>4"),
    ],
)
def test_templates_that_open_the_reasoning_and_rewrite_answers_lose_no_token(
    history: str, first: str, last: str
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(STARTER)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + history
        + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    contents = [
        ("user", "1 plus 1?"),
        ("assistant", "hm</think>2"),
        ("user", "2 plus 2?"),
        ("assistant", "so</think>4"),
    ]
    chat: list[Any] = [{"role": role, "content": content} for role, content in contents]

    def text(row: dict[str, Any]) -> str:
        return str(tokenizer.decode([mask for mask in row["masks"] if mask != -100]))

    end = "<|im_end|>\n"
    assert text(tokenize_for_trainer(tokenizer, chat)) == last + end
    both = tokenize_for_trainer(tokenizer, chat, train_on_all_assistant_turns=True)
    assert text(both) == first + end + last + end


def test_an_end_that_was_not_sampled_is_not_trained() -> None:
    assert trained(tokenize_for_trainer(LetterTokenizer(), CHAT, finish_reason="length")) == "A2"
    assert trained(tokenize_for_trainer(LetterTokenizer(), CHAT, finish_reason="stop")) == "A2\0"
    assert tokenize_for_trainer(LetterTokenizer(), CHAT, include_messages=True)["messages"] == CHAT


@given(data=rewards)
def test_stats_are_those_of_the_flattened_numbers(data: list[list[float]]) -> None:
    flat = [value for row in data for value in row]
    stats = compute_stats(data)
    assert stats["mean"] == pytest.approx(np.mean(flat), abs=1e-9)
    assert stats["var"] == pytest.approx(np.var(flat), abs=1e-9)


def test_stats_of_what_is_no_number() -> None:
    for wrong in ([], [[]], [["x"]]):
        with pytest.raises(ValueError, match="number"):
            compute_stats(wrong)


@given(row=st.lists(st.floats(-5, 5), min_size=1, max_size=6), gamma=st.floats(0, 1))
def test_discounted_returns_follow_their_definition(row: list[float], gamma: float) -> None:
    expected = [sum(gamma**k * reward for k, reward in enumerate(row[t:])) for t in range(len(row))]
    np.testing.assert_allclose(
        compute_discounted_returns(np.array(row), gamma), expected, atol=1e-9
    )


@given(data=rewards)
def test_process_advantages_are_sums_of_normalised_rewards(data: list[list[float]]) -> None:
    flat = np.array([value for row in data for value in row])
    if flat.std() < 1e-6:
        return
    for row, advantages in zip(
        data, compute_grpo_process_supervision_advantages(data), strict=True
    ):
        normalised = (np.array(row) - flat.mean()) / flat.std()
        np.testing.assert_allclose(
            advantages, normalised[::-1].cumsum()[::-1], rtol=1e-4, atol=1e-4
        )


def test_equal_rewards_have_no_advantages() -> None:
    with pytest.raises(ValueError, match="standard deviation"):
        compute_grpo_process_supervision_advantages([[1.0, 1.0], [1.0]])


def test_close_to_the_first() -> None:
    values = [[1.0, 2.0], [1.0, 2.0 + 1e-9], [1.0, 3.0]]
    assert allclose_to_first(values[:2]) is True
    assert list(allclose_to_first(values, return_vector=True)) == [True, True, False]  # type: ignore[arg-type]


@given(
    scores=st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1),
    high=st.booleans(),
    low=st.booleans(),
)
def test_no_alternative_is_better_than_the_one_that_is_selected(
    scores: list[tuple[int, int]], high: bool, low: bool
) -> None:
    best = select_best_index([a for a, _ in scores], [b for _, b in scores], high, low)

    def rank(index: int) -> tuple[int, int, int]:
        first, second = scores[index]
        return (first if high else -first, -second if low else second, -index)

    assert all(rank(best) >= rank(other) for other in range(len(scores)))


def test_selecting_from_nothing_is_an_error() -> None:
    for first, second in (([], []), ([1], [1, 2])):
        with pytest.raises(ValueError, match="scores"):
            select_best_index(first, second)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '<tool_call>{"name": "f", "arguments": {"a": "it\'s"}}</tool_call>',
            ("f", {"a": "it's"}, False),
        ),
        ("<tool_call>{'name': 'f', 'arguments': {}}</tool_call>", ("f", {}, False)),
        (
            '<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>',
            ("-ERROR-", {"a": 1}, True),
        ),
        ("<tool_call>f()</tool_call>", ("-ERROR-", {}, True)),
        ("no call", ("-ERROR-", {}, True)),
    ],
)
def test_tool_calls_are_read_or_refused(
    text: str, expected: tuple[str, dict[str, Any], bool]
) -> None:
    assert parse_tool_call(text, [{"function": {"name": "f"}}]) == expected


def test_thinking_is_shortened_from_the_front() -> None:
    tokenizer = LetterTokenizer()
    long = "<think>first thoughts\n\nlast</think>done"
    assert (
        truncate_thinking(long, tokenizer, 100) == "<think>\nfirst thoughts\n\nlast\n</think>done"
    )
    assert truncate_thinking(long, tokenizer, 6) == "<think>\n... last\n</think>done"
    assert truncate_thinking(long, tokenizer, 2) == "<think>\n... st\n</think>done"
    assert truncate_thinking("<think> </think>done", tokenizer, 2) == "<think></think>done"
    assert truncate_thinking("no thoughts", tokenizer, 2) == "no thoughts"
    assert truncate_thinking(long.removeprefix("<think>"), tokenizer, 6) == "... last\n</think>done"


def test_histories_lose_their_oldest_turns_until_they_fit() -> None:
    tokenizer = LetterTokenizer()

    def step() -> Any:
        rows = [tokenize_for_trainer(tokenizer, CHAT) for _ in range(2)]  # type: ignore[arg-type]
        return {
            "messages": [list(CHAT), list(CHAT)],
            "tokens": [row["tokens"] for row in rows],
            "masks": [row["masks"] for row in rows],
            "scores": [1.0, 0.0],
            "inference_logprobs": [[1.0] * len(row["tokens"]) for row in rows],
        }

    whole = len(step()["tokens"][0])
    assert ensure_trajectory_token_limit([step()], tokenizer, whole) == [step()]
    (shorter,) = ensure_trajectory_token_limit([step()], tokenizer, whole - 1)
    assert [message["content"] for message in (shorter["messages"] or [])[0]] == ["S", "U2", "A2"]
    assert max(map(len, shorter["tokens"])) < whole
    assert "inference_logprobs" not in shorter
    assert ensure_trajectory_token_limit([step()], tokenizer, 3) == []


def test_statistics_have_the_names_that_dashboards_use() -> None:
    assert get_std_min_max_avg("x", [1.0, 3.0], {"y": 0}) == {
        "y": 0,
        "x_mean": 2.0,
        "x_std": 1.0,
        "x_max": 3.0,
        "x_min": 1.0,
    }


@given(m=st.integers(1, 12), c=st.integers(0, 12), k=st.integers(1, 12))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(m: int, c: int, k: int) -> None:
    c, k = min(c, m), min(k, m)
    assert pass_at_k(m, c, k) == pytest.approx(1 - math.comb(m - c, k) / math.comb(m, k))
