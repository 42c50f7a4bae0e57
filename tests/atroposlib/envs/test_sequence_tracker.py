"""Conversations kept token for token, over turns and branches."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.envs.server_handling.generation import Generation
from atroposlib.envs.server_handling.sequence_tracker import SequenceTracker


class OddTokenizer:
    """Two ways to write every text: encoding always joins pairs of characters, the sampler emits single ones.

    So a response that was tokenised again would come out with other ids than those that were sampled.
    """

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        pairs = [text[i : i + 2] for i in range(0, len(text), 2)]
        return [ord(pair) if len(pair) == 1 else 10**7 + ord(pair[0]) * 2000 + ord(pair[1]) for pair in pairs]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            chr(token) if token < 10**7 else chr((token - 10**7) // 2000) + chr((token - 10**7) % 2000) for token in ids
        )


TOKENIZER = OddTokenizer()


def sampled(prompt: list[int], *texts: str, version: int = 0) -> Generation:
    """Completions one character per token, with logprobs that tell which token they belong to."""
    tokens = [[ord(character) for character in text] for text in texts]
    return Generation(
        prompt_tokens=prompt,
        output_tokens=tokens,
        output_logprobs=[[-token / 1000 for token in row] for row in tokens],
        finish_reasons=["stop"] * len(texts),
        weight_versions=[version] * len(texts),
    )


def turn(tracker: SequenceTracker, prompt_text: str, *texts: str, version: int = 0) -> list[Any]:
    ids, parent = tracker.prompt(prompt_text)
    return tracker.add(prompt_text, parent, sampled(ids, *texts, version=version))


def check(node: Any) -> None:
    """Sampled tokens are those that the sampler emitted, with their logprobs; all others are masked."""
    assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
    assert TOKENIZER.decode(node.tokens) == node.full_text
    for token, mask, logprob in zip(node.tokens, node.masked_tokens, node.logprobs, strict=True):
        assert (mask, logprob) in {(-100, 1.0), (token, -token / 1000)}


words = st.text(alphabet="abcd", min_size=1, max_size=7)


@given(turns=st.lists(st.tuples(words, words), min_size=1, max_size=5))
def test_a_conversation_is_one_sequence_however_many_turns(turns: list[tuple[str, str]]) -> None:
    tracker = SequenceTracker(TOKENIZER)
    text = ""
    for number, (question, answer) in enumerate(turns):
        text += f"<{question}>"
        turn(tracker, text, answer, version=10 - number)
        text += answer
    (node,) = tracker.nodes
    check(node)
    assert node.full_text == text
    assert [mask for mask in node.masked_tokens if mask != -100] == [ord(c) for _, answer in turns for c in answer]
    assert node.weight_version == 10 - len(turns) + 1, "the oldest version of all its turns"


@given(answers=st.lists(words, min_size=2, max_size=5), follow_up=words)
def test_branches_share_their_past_and_keep_their_own_tokens(answers: list[str], follow_up: str) -> None:
    tracker = SequenceTracker(TOKENIZER)
    first = turn(tracker, "<q>", *answers)
    assert [TOKENIZER.decode([m for m in node.masked_tokens if m != -100]) for node in first] == answers
    turn(tracker, f"<q>{answers[0]}<more>", follow_up)
    assert len(tracker.nodes) == len(answers), "the continued branch took its parent's place"
    for node in tracker.nodes:
        check(node)
    assert tracker.nodes[-1].full_text == f"<q>{answers[0]}<more>{follow_up}"


def test_one_turn_continued_several_ways_keeps_every_branch() -> None:
    tracker = SequenceTracker(TOKENIZER)
    turn(tracker, "<q>", "abc")
    turn(tracker, "<q>abc<more>", "x", "y")
    assert [node.full_text for node in tracker.nodes] == ["<q>abc<more>x", "<q>abc<more>y"]
    for node in tracker.nodes:
        check(node)
        assert [m for m in node.masked_tokens if m != -100] == [ord(c) for c in "abc" + node.full_text[-1]]


@settings(max_examples=30)
@given(answers=st.lists(words, min_size=1, max_size=3, unique=True))
def test_a_tree_keeps_every_sequence(answers: list[str]) -> None:
    tracker = SequenceTracker(TOKENIZER, keep_all=True)
    turn(tracker, "<q>", *answers)
    for answer in answers:
        turn(tracker, f"<q>{answer}<more>", "z")
    assert len(tracker.nodes) == 2 * len(answers)


def test_a_history_that_was_changed_starts_a_sequence_of_its_own() -> None:
    tracker = SequenceTracker(TOKENIZER)
    turn(tracker, "<q>", "<think>hm</think>4")
    (node,) = turn(tracker, "<q>4<more>", "5")
    assert [m for m in node.masked_tokens if m != -100] == [ord("5")], "text that was not sampled as it stands is not trained"
    assert len(tracker.nodes) == 2


def test_logprobs_that_do_not_line_up_are_refused() -> None:
    tracker = SequenceTracker(TOKENIZER)
    generation = sampled([1], "ab")
    generation.output_logprobs[0].pop()
    with pytest.raises(ValueError, match="2 tokens but 1 logprobs"):
        tracker.add("x", None, generation)
