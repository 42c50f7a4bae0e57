"""Text to tokens and back where a conversation goes on."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from atroposlib.inference.chat_template import Continuation
from atroposlib.inference.responses import ResponseDecoder, answer_part
from tests.atroposlib.inference.template_shapes import STARTER


def with_marks(*marks: str) -> Any:
    made = PreTrainedTokenizerFast.from_pretrained(STARTER)
    made.add_special_tokens(
        {"additional_special_tokens": list(marks)}, replace_extra_special_tokens=False
    )
    return made


@pytest.mark.parametrize(
    ("marks", "text"),
    [
        ((), "<think>5</think>4"),
        (("[THINK]", "[/THINK]"), "[THINK]5[/THINK]4"),
        (("<think>", "</think>"), "<think>5</think>4"),
        (("<|channel>", "<channel|>"), "<|channel>thought\n5<channel|>4"),
        (
            ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
            "<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>4",
        ),
    ],
)
def test_tags_of_reasoning_stay_in_a_response_where_they_are_special_tokens(
    marks: tuple[str, ...], text: str
) -> None:
    tokenizer = with_marks(*marks)
    tokens = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
    assert ResponseDecoder(tokenizer)(tokens) == text
    assert answer_part(text) == "4"


def test_an_end_mark_alone_is_not_a_tag_of_reasoning() -> None:
    tokenizer = with_marks("<|end|>")
    assert ResponseDecoder(tokenizer)(tokenizer.encode("4<|end|>", add_special_tokens=False)) == "4"


@pytest.mark.parametrize("prepend", ["always", "first", "never"])
def test_no_space_is_added_where_text_goes_on(prepend: str) -> None:
    """As SentencePiece's tokenizers do before the first word, with the marker U+2581 for a space."""
    letters = {letter: number for number, letter in enumerate(["</s>", "\u2581", "a", "b", "\n"])}
    inner = Tokenizer(models.BPE(vocab=letters, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    inner.decoder = decoders.Metaspace(prepend_scheme=prepend)
    inner.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    continuation = Continuation(tokenizer)
    whole = tokenizer.encode("</s>\na b", add_special_tokens=False)
    assert continuation("\na b") == whole[1:]
    assert continuation("</s>a") == tokenizer.encode("</s>a", add_special_tokens=False)
    if prepend == "first":
        assert continuation("a") == [2]
    assert continuation("") == []
