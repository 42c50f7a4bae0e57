"""Conversations kept token for token, over turns and branches."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.inference.generation import (
    Generation,
    Span,
    Weights,
    joined,
    sampling_of,
    spans_of,
    weight_fields,
)
from atroposlib.inference.managed_server import (
    Prompt,
    SequenceNode,
    SequenceTracker,
    say_that_experts_are_missing,
    sequence_fields,
)
from atroposlib.inference.routed_experts import ExpertsError, checked
from vllm_patching.protocol.routed_experts import from_wire, to_wire


def trained(node: Any) -> str:
    """The text of the tokens that are trained."""
    return "".join(chr(token) for token in node.masked_tokens if token != -100)


class OddTokenizer:
    """Two ways to write every text: encoding always joins pairs of characters, the sampler emits
    single ones.

    So a response that was tokenised again would come out with other ids than the sampled ones.
    """

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        pairs = [text[i : i + 2] for i in range(0, len(text), 2)]
        return [
            ord(pair) if len(pair) == 1 else 10**7 + ord(pair[0]) * 2000 + ord(pair[1])
            for pair in pairs
        ]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            chr(token)
            if token < 10**7
            else chr((token - 10**7) // 2000) + chr((token - 10**7) % 2000)
            for token in ids
        )


TOKENIZER = OddTokenizer()


def sampled(
    prompt: list[int], *texts: str, version: int = 0, epoch: int | None = None
) -> Generation:
    """Return completions of one character per token, whose logprobs name their token."""
    tokens = [[ord(character) for character in text] for text in texts]
    return Generation(
        prompt_tokens=prompt,
        output_tokens=tokens,
        output_logprobs=[[-token / 1000 for token in row] for row in tokens],
        finish_reasons=["stop"] * len(texts),
        weight_versions=[version] * len(texts),
        weight_epochs=None if epoch is None else [epoch] * len(texts),
    )


def sent(tracker: SequenceTracker, text: str, rendered: bool = True) -> tuple[list[int], Prompt]:
    """Return the token ids of a prompt that is sent now, and its request."""
    prompt = tracker.whole(text, rendered)
    return prompt.tokens, tracker.begin(prompt)


def turn(
    tracker: SequenceTracker, text: str, *texts: str, version: int = 0, epoch: int | None = None
) -> list[Any]:
    ids, request = sent(tracker, text)
    return tracker.add(text, request, sampled(ids, *texts, version=version, epoch=epoch))


class UnderWay:
    """A prompt that is sent now and answered later."""

    def __init__(self, tracker: SequenceTracker, text: str):
        self.tracker, self.text = tracker, text
        self.ids, self.request = sent(tracker, text)

    def answer(self, *texts: str) -> list[Any]:
        return self.tracker.add(self.text, self.request, sampled(self.ids, *texts))


def check(node: Any) -> None:
    """Sampled tokens are the sampler's own, with their logprobs; all others are masked."""
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
    assert [mask for mask in node.masked_tokens if mask != -100] == [
        ord(c) for _, answer in turns for c in answer
    ]
    assert node.weight_version == 10 - len(turns) + 1, "the oldest version of all its turns"


@given(answers=st.lists(words, min_size=2, max_size=5), follow_up=words)
def test_branches_share_their_past_and_keep_their_own_tokens(
    answers: list[str], follow_up: str
) -> None:
    tracker = SequenceTracker(TOKENIZER)
    first = turn(tracker, "<q>", *answers)
    assert [
        TOKENIZER.decode([m for m in node.masked_tokens if m != -100]) for node in first
    ] == answers
    turn(tracker, f"<q>{answers[0]}<more>", follow_up)
    assert len(tracker.nodes) == len(answers), "the continued branch took its parent's place"
    for node in tracker.nodes:
        check(node)
    texts = [f"<q>{answers[0]}<more>{follow_up}", *(f"<q>{answer}" for answer in answers[1:])]
    assert [node.full_text for node in tracker.nodes] == texts


def test_one_turn_continued_several_ways_keeps_every_branch() -> None:
    tracker = SequenceTracker(TOKENIZER)
    turn(tracker, "<q>", "abc")
    turn(tracker, "<q>abc<more>", "x", "y")
    assert [node.full_text for node in tracker.nodes] == ["<q>abc<more>x", "<q>abc<more>y"]
    for node in tracker.nodes:
        check(node)
        assert [m for m in node.masked_tokens if m != -100] == [
            ord(c) for c in "abc" + node.full_text[-1]
        ]


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
    assert [m for m in node.masked_tokens if m != -100] == [ord("5")], (
        "text that was not sampled as it stands is not trained"
    )
    assert len(tracker.nodes) == 2


def test_logprobs_that_do_not_line_up_are_refused() -> None:
    tracker = SequenceTracker(TOKENIZER)
    generation = sampled([1], "ab")
    generation.output_logprobs[0].pop()
    with pytest.raises(ValueError, match="2 tokens but 1 logprobs"):
        tracker.add("x", sent(tracker, "x")[1], generation)


@given(
    answers=st.lists(words, min_size=1, max_size=5, unique=True),
    turns=st.integers(1, 4),
    drawn=st.data(),
)
def test_sequences_stand_where_their_first_turn_stood_whatever_is_continued_when(
    answers: list[str], turns: int, drawn: st.DataObject
) -> None:
    """Conversations of one request, each continued on its own; some do not go on, and the answers
    come in any order.
    """
    tracker = SequenceTracker(TOKENIZER)
    texts = [f"<q>{node_text}" for node_text in answers]
    turn(tracker, "<q>", *answers)
    for number in range(turns):
        goes_on = drawn.draw(
            st.lists(st.sampled_from(range(len(answers))), unique=True).map(sorted)
        )
        prompts = {
            index: UnderWay(tracker, f"{texts[index]}<{number}.{index}>") for index in goes_on
        }
        for index in drawn.draw(st.permutations(goes_on)):
            (node,) = prompts[index].answer("abc")
            texts[index] = node.full_text
    assert [node.full_text for node in tracker.nodes] == texts
    for node in tracker.nodes:
        check(node)


@given(answered=st.permutations(range(4)))
def test_conversations_that_were_begun_together_stand_in_the_order_in_which_they_were_begun(
    answered: list[int],
) -> None:
    tracker = SequenceTracker(TOKENIZER)
    prompts = [UnderWay(tracker, f"<{index}>") for index in range(4)]
    for index in answered:
        prompts[index].answer("xy")
    assert [node.full_text for node in tracker.nodes] == [f"<{index}>xy" for index in range(4)]


def test_equal_answers_are_each_continued_once() -> None:
    tracker = SequenceTracker(TOKENIZER)
    turn(tracker, "<q>", "same", "same", "same")
    prompts = [UnderWay(tracker, f"<q>same<{index}>") for index in range(3)]
    for prompt, text in zip(prompts, "abc", strict=True):
        prompt.answer(text)
    assert [trained(node) for node in tracker.nodes] == ["samea", "sameb", "samec"]


def test_a_prompt_that_was_not_answered_lets_its_sequence_go() -> None:
    tracker = SequenceTracker(TOKENIZER)
    turn(tracker, "<q>", "same", "same")
    tracker.abandon(UnderWay(tracker, "<q>same<0>").request)
    turn(tracker, "<q>same<0>", "a")
    turn(tracker, "<q>same<1>", "b")
    assert [trained(node) for node in tracker.nodes] == ["samea", "sameb"]


def test_a_turn_that_was_continued_already_is_continued_again_with_its_own_tokens() -> None:
    tracker = SequenceTracker(TOKENIZER)
    turn(tracker, "<q>", "abc", "zz")
    turn(tracker, "<q>abc<one>", "x")
    turn(tracker, "<q>abc<one>x<deep>", "u")
    turn(tracker, "<q>abc<two>", "y")
    assert [trained(node) for node in tracker.nodes] == ["abcxu", "abcy", "zz"]
    for node in tracker.nodes:
        check(node)


def test_a_prompt_that_gave_nothing_takes_nothing_away() -> None:
    tracker = SequenceTracker(TOKENIZER)
    turn(tracker, "<q>", "abc")
    turn(tracker, "<q>abc<more>")
    assert [trained(node) for node in tracker.nodes] == ["abc"]


def test_the_oldest_weights_are_those_that_were_served_first() -> None:
    """A trainer at version 17 is killed and resumes at 10: 17 was served before 11."""
    tracker = SequenceTracker(TOKENIZER)
    turn(tracker, "<q>", "abc", version=17, epoch=1000)
    (node,) = turn(tracker, "<q>abc<more>", "x", version=11, epoch=2000)
    assert (node.weight_version, node.weight_epoch) == (17, 1000)
    assert node.weights == Weights(epoch=1000, version=17)
    (node,) = turn(tracker, "<other>", "x", version=3)
    assert (node.weight_version, node.weight_epoch) == (3, None), "a server that tells no epochs"


SPANS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 4)), max_size=4)
"""(epoch, version, tokens) as in a server's answer."""


@given(st.lists(SPANS, min_size=1, max_size=5), st.booleans())
def test_every_sampled_token_of_a_conversation_keeps_its_weights(
    turns: list[list[tuple[int, int, int]]], one_untold: bool
) -> None:
    tracker = SequenceTracker(TOKENIZER)
    text = ""
    expected: list[Weights] = []
    for number, told in enumerate(turns):
        spans = [Span(Weights(epoch, version), count) for epoch, version, count in told]
        completion = "x" * sum(span.tokens for span in spans)
        text += f"<{number}>"
        ids, request = sent(tracker, text)
        generation = sampled(ids, completion)
        generation.weight_spans = None if one_untold and number == 0 else [spans]
        (node,) = tracker.add(text, request, generation)
        text += completion
        expected += [span.weights for span in spans for _ in range(span.tokens)]
    if one_untold:
        assert node.weight_spans is None, "of some tokens nobody knows"
        return
    assert [span.weights for span in node.weight_spans for _ in range(span.tokens)] == expected
    assert len(expected) == sum(token != -100 for token in node.masked_tokens)
    assert all(span.tokens for span in node.weight_spans)
    assert all(one.weights != next_one.weights for one, next_one in pairwise(node.weight_spans)), (
        "side by side they are one"
    )
    assert SequenceNode(**json.loads(json.dumps(node.model_dump()))) == node, (
        "it travels through a proxy"
    )


REQUESTS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.5, 1.0]), "max_tokens": st.integers(1, 9)}
)


@given(st.lists(st.tuples(REQUESTS, words), min_size=1, max_size=5), st.booleans())
def test_every_sampled_token_of_a_conversation_keeps_the_parameters_that_it_was_sampled_with(
    turns: list[tuple[dict[str, Any], str]], one_untold: bool
) -> None:
    tracker = SequenceTracker(TOKENIZER)
    text = ""
    for number, (asked, answer) in enumerate(turns):
        text += f"<{number}>"
        ids, request = sent(tracker, text)
        generation = sampled(ids, answer)
        generation.sampling = None if one_untold and number == 0 else sampling_of(asked, 1)
        (node,) = tracker.add(text, request, generation)
        text += answer
    assert SequenceNode(**json.loads(json.dumps(node.model_dump()))) == node, (
        "it travels through a proxy"
    )
    fields = sequence_fields([node])
    assert fields["finish_reasons"] == ["stop"]
    if one_untold:
        assert "sampling_params" not in fields
        return
    (told,) = fields["sampling_params"]
    expected = [asked["temperature"] for asked, answer in turns for _ in answer]
    if isinstance(told, dict):
        assert set(expected) == {told["temperature"]}
        assert told["max_tokens"] == turns[-1][0]["max_tokens"], (
            "the last turn's, which the finish reason is of"
        )
    else:
        assert [part["temperature"] for part in told for _ in range(part["tokens"])] == expected
        assert len(set(expected)) > 1
    other = SequenceNode(full_text="", tokens=[1], masked_tokens=[1], logprobs=[0.0])
    assert sequence_fields([other, node]) == {
        "finish_reasons": [None, "stop"],
        "sampling_params": [None, told],
    }


def experts_of(turn_number: int, tokens: int) -> npt.NDArray[np.int64]:
    """Return experts [tokens, 3, 2] that name the turn and the token."""
    rows = np.full((tokens, 3, 2), 100 * turn_number)
    return rows + np.arange(tokens)[:, None, None]


def routed_turn(tracker: SequenceTracker, text: str, number: int, *answers: str) -> list[Any]:
    ids, request = sent(tracker, text)
    generation = sampled(ids, *answers)
    generation.routed_experts = [
        to_wire(experts_of(number, len(ids) + len(answer) - 1)) for answer in answers
    ]
    return tracker.add(text, request, generation)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=5))
def test_every_token_of_a_conversation_keeps_the_experts_of_the_turn_that_read_it_first(
    turns: list[tuple[str, str]],
) -> None:
    tracker = SequenceTracker(TOKENIZER)
    text, expected = "", np.zeros((0, 3, 2))
    for number, (asked, answer) in enumerate(turns):
        text += f"<{number}>{asked}"
        (node,) = routed_turn(tracker, text, number, answer)
        whole = experts_of(number, len(node.tokens) - 1)
        expected = np.concatenate([expected, whole[len(expected) :]])
        text += answer
    assert len(node.tokens) == 1 + len(expected)
    (word,) = sequence_fields([node])["routed_experts"]
    assert from_wire(word).tolist() == expected.tolist()


def test_a_branch_keeps_the_experts_of_its_own_past() -> None:
    tracker = SequenceTracker(TOKENIZER, keep_all=True)
    one, other = routed_turn(tracker, "<a>", 0, "xyz", "v")
    (longer,) = routed_turn(tracker, "<a>xyz<b>", 1, "w")
    (again,) = routed_turn(tracker, "<a>xyz<c>", 2, "w")
    kept = len(one.tokens) - 1
    for node, number in ((longer, 1), (again, 2)):
        experts = from_wire(node.routed_experts)
        assert experts[:kept].tolist() == experts_of(0, kept).tolist()
        assert experts[kept:].tolist() == experts_of(number, len(experts))[kept:].tolist()
    assert len(from_wire(other.routed_experts)) == len(other.tokens) - 1


@pytest.mark.parametrize("first_has_them", [True, False])
def test_a_conversation_with_a_turn_without_experts_has_none(
    caplog: pytest.LogCaptureFixture, first_has_them: bool
) -> None:
    say_that_experts_are_missing.cache_clear()
    tracker = SequenceTracker(TOKENIZER)
    for number, (text, answer) in enumerate((("<a>", "b"), ("<a>b<c>", "d"))):
        if first_has_them == (number == 0):
            (node,) = routed_turn(tracker, text, number, answer)
        else:
            (node,) = turn(tracker, text, answer)
    assert "routed_experts" not in sequence_fields([node])
    assert "only some of its turns" in caplog.text
    assert "Start every vLLM server with --enable-return-routed-experts" in caplog.text


def test_experts_of_other_tokens_or_models_are_refused() -> None:
    tracker = SequenceTracker(TOKENIZER)
    ids, request = sent(tracker, "<a>")
    generation = sampled(ids, "b")
    generation.routed_experts = [to_wire(experts_of(0, len(ids) - 1))]
    with pytest.raises(ValueError, match=f"and {len(ids)} tokens have"):
        tracker.add("<a>", request, generation)
    routed_turn(tracker, "<a>", 0, "b")
    ids, request = sent(tracker, "<a>b<c>")
    generation = sampled(ids, "d")
    generation.routed_experts = [to_wire(np.zeros((len(ids), 4, 2), dtype=int))]
    with pytest.raises(ValueError, match="3 and 4 layers, with 2 and 2 experts of a token: give"):
        tracker.add("<a>b<c>", request, generation)


@pytest.mark.parametrize("word", [None, 3, "", "0x2x1:", "2x2x3:AA==", "2x2x1:?", "2x2x1AAAA"])
def test_a_word_of_another_form_is_refused(word: object) -> None:
    with pytest.raises(ExpertsError, match="of /generate"):
        checked(word, 1)


def test_a_branch_keeps_the_weights_of_its_own_past() -> None:
    tracker = SequenceTracker(TOKENIZER)
    for text, completion, version in (
        ("<q>", "abc", 1),
        ("<q>abc<r>", "de", 2),
        ("<q>abc<other>", "f", 3),
    ):
        ids, request = sent(tracker, text)
        generation = sampled(ids, completion, version=version)
        generation.weight_spans = [[Span(Weights(0, version), len(completion))]]
        tracker.add(text, request, generation)
    spans = [
        [(span.weights.version, span.tokens) for span in node.weight_spans or []]
        for node in tracker.nodes
    ]
    assert sorted(spans) == [[(1, 3), (2, 2)], [(1, 3), (3, 1)]]


def test_spans_that_do_not_cover_the_completion_are_refused() -> None:
    tracker = SequenceTracker(TOKENIZER)
    ids, request = sent(tracker, "<q>")
    generation = sampled(ids, "abc")
    generation.weight_spans = [[Span(Weights(0, 1), 2)]]
    with pytest.raises(ValueError, match="3 tokens, but its weight spans cover"):
        tracker.add("<q>", request, generation)


@given(st.lists(SPANS, min_size=1, max_size=4), st.booleans())
def test_a_group_says_the_spans_of_all_its_sequences_or_of_none(
    rows: list[list[tuple[int, int, int]]], one_untold: bool
) -> None:
    told = [
        joined([Span(Weights(epoch, version), count) for epoch, version, count in row])
        for row in rows
    ]
    spans: list[list[Span] | None] = [
        None if one_untold and index == 0 else row for index, row in enumerate(told)
    ]
    fields = weight_fields([Weights(0, 0) for _ in rows], spans)
    if one_untold:
        assert not {"weight_version_spans", "weight_epoch_spans"} & fields.keys()
        return
    assert spans_of(fields["weight_version_spans"], fields.get("weight_epoch_spans")) == told


class StartingTokenizer(OddTokenizer):
    """Puts a start token before text, as Llama's does."""

    bos_token_id = 7

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        starts = [7] if text.startswith(chr(7)) else []
        return [7] * add_special_tokens + starts + super().encode(text[len(starts) :])


@pytest.mark.parametrize(
    ("text", "rendered", "starts"),
    [("plain", False, 1), (f"{chr(7)}plain", False, 1), ("<|user|>hi", True, 0)],
)
def test_plain_text_begins_with_one_start_token_and_rendered_text_as_it_was_rendered(
    text: str, rendered: bool, starts: int
) -> None:
    tracker = SequenceTracker(StartingTokenizer())
    ids, request = sent(tracker, text, rendered)
    assert ids.count(7) == starts
    assert tracker.whole(text, rendered).tokens == ids
    (node,) = tracker.add(text, request, sampled(ids, "abc"))
    following = tracker.whole(f"{node.full_text}, more", rendered).tokens
    assert following[: len(node.tokens)] == node.tokens, (
        "a continuation goes on from the very tokens"
    )
    assert following.count(7) == starts
