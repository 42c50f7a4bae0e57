"""The text of a response outside of its reasoning, wherever that was opened."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.inference.responses import (
    TAGS,
    answer_part,
    known_calls,
    leaves_open,
    opened_by,
    read_reasoning,
)

PLAIN = [pair for pair in TAGS if pair[1] != "<|end|>"]
THINK = "<think>\n"

# No tag, no quote and no fence can come out of these.
words = st.text(alphabet="abc 1\n{}\\.", max_size=12)


@pytest.mark.parametrize(
    ("text", "opened", "answer"),
    [
        ("4", "", "4"),
        ("<think>5</think>4", "", "4"),
        ("5</think>4", "", "4"),
        ("5</think>4", THINK, "4"),
        ("<think>5</think>4", THINK, "4"),
        ("4", "<think>\n\n</think>\n\n", "4"),
        ("4", "</think>", "4"),
        # Reasoning that never ends holds no answer.
        ("5", THINK, ""),
        ("<think>5", "", ""),
        ("4<think>5", "", "4"),
        # Several blocks; the last lone closing tag ends whatever stands before it.
        ("3<think>5</think>4", "", "34"),
        ("<think>a</think>3<think>b</think>4", "", "34"),
        ("a</think>5</think>4", THINK, "4"),
        ("<think>a<think>b</think>5</think>4", "", "4"),
        # Tags that the reasoning or the answer only mention.
        ("I use <think> tags.</think>4", THINK, "4"),
        ("I close with `</think>` later.</think>4", THINK, "4"),
        ('I close with "</think>" later: 5', THINK, ""),
        ('It is "cat"</think>"cat"', THINK, '"cat"'),
        ("The tag `</think>` ends it: 4", "", "The tag `</think>` ends it: 4"),
        (
            "<think>5</think>```python\nx = 'a </think> b'\n```",
            "",
            "```python\nx = 'a </think> b'\n```",
        ),
        ("```python\nx = 'a <think> b'\n```", "", "```python\nx = 'a <think> b'\n```"),
        ("~~~~ py\n```\n</think>\n~~~~\n4", "", "~~~~ py\n```\n</think>\n~~~~\n4"),
        # Fences in reasoning need not be in pairs.
        ("```python\nx\n</think>4", THINK, "4"),
        ("```python\nx\n</think>4", "", "4"),
        # Channels.
        (
            "<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
            "",
            "4",
        ),
        ("<|channel|>analysis<|message|>5", "", ""),
        ("split('<|end|>')", "", "split('<|end|>')"),
        ("<|channel>thought\n5<channel|>4", "", "4"),
    ],
)
def test_the_answer_is_what_stands_outside_of_the_reasoning(
    text: str, opened: str, answer: str
) -> None:
    assert answer_part(text, opened) == answer


@given(
    pair=st.sampled_from(PLAIN),
    thoughts=st.lists(words, max_size=3),
    answers=st.lists(words, min_size=4, max_size=4),
    starts_inside=st.booleans(),
    ends_inside=st.booleans(),
)
def test_every_kind_of_block_is_read(
    pair: tuple[str, str],
    thoughts: list[str],
    answers: list[str],
    starts_inside: bool,
    ends_inside: bool,
) -> None:
    opening, closing = pair
    text, expected = "", ""
    for number, thought in enumerate(thoughts):
        if number or not starts_inside:
            text, expected = text + answers[number], expected + answers[number]
            text += opening
        text += thought
        if number < len(thoughts) - 1 or not ends_inside:
            text += closing
    prompt = f"<|assistant|>{opening if starts_inside and thoughts else ''}"
    last = "" if thoughts and ends_inside else answers[3]
    parts = read_reasoning(text + last, opened_by(prompt))
    assert parts.answer == expected + last
    assert list(parts.blocks) == thoughts
    assert parts.closed == (not thoughts or not ends_inside)
    for (begin, end), (first, after), block in zip(
        parts.spans, parts.insides, parts.blocks, strict=True
    ):
        assert begin <= first <= after <= end
        assert (text + last)[first:after] == block


@given(
    pair=st.sampled_from(PLAIN),
    thought=words,
    answer=words,
    space=st.sampled_from(["", "\n", "\n\n", " "]),
)
def test_a_tag_in_the_prompt_counts_as_one_in_the_response(
    pair: tuple[str, str], thought: str, answer: str, space: str
) -> None:
    opening, closing = pair
    opened = opened_by(f"<|im_start|>assistant\n{opening}{space}")
    assert opened == opening + space
    assert leaves_open(opened)
    rest = f"{thought}{closing}{answer}"
    assert answer_part(rest, opened) == answer_part(rest) == answer_part(opening + rest) == answer
    assert answer_part(thought, opened) == ""
    empty = opened_by(f"<|assistant|>{opening}{space}{closing}{space}")
    assert not leaves_open(empty)
    assert answer_part(answer, empty) == answer


@given(
    text=st.lists(
        st.sampled_from(
            [
                *(tag for pair in TAGS for tag in pair),
                "```",
                "\n",
                "~~~py",
                "`",
                '"',
                "\\boxed{4}",
                "a",
                "\ud800",
            ]
        )
    ).map("".join),
    opened=st.sampled_from(["", THINK, "<think>\n\n</think>\n\n", "</think>", "nothing"]),
)
def test_any_text_is_taken_apart_without_loss(text: str, opened: str) -> None:
    parts = read_reasoning(text, opened)
    edges = [0, *(edge for span in parts.spans for edge in span), len(text)]
    assert edges == sorted(edges)
    assert len(parts.blocks) == len(parts.spans) == len(parts.insides)
    assert answer_part(text, opened) == parts.answer
    if not parts.closed:
        assert parts.spans[-1][1] == len(text)


@pytest.mark.parametrize(
    "prompt", ["", "Use <think> tags.", "<|im_start|>assistant\n", "…<|end|>\n", "a <think>\nb"]
)
def test_a_prompt_that_opens_nothing(prompt: str) -> None:
    assert opened_by(prompt) == ""


def test_tags_in_calls_are_text() -> None:
    text = "<think>a</think>{'t': 'b </think> c'} d"
    begin, end = text.index("{"), text.index("}") + 1
    assert read_reasoning(text, calls=known_calls([(begin, end)])).answer == text[begin:]
    assert read_reasoning(text).answer == " c'} d"
