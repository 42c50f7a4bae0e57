"""The starter model's tokenizer: byte-level BPE, trained on the generated problems and a page of
ordinary English.

Every byte is in the vocabulary, so any text can be encoded and comes back unchanged. Digits are
never merged, neither with each other nor with anything else, so the columns of a sum line up with
tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from studies.starter_model.data import Mixture, examples

ENGLISH = Path(__file__).with_name("english.txt")
VOCAB_SIZE = 1024
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# Where BPE may merge. Beside ordinary words, the short phrases between two digits of a worked sum
# (" + ", ", carry ", ". ") are whole pieces. Every token less saves time in each rollout.
PIECES = "|".join(
    [
        r"\\boxed\{",
        r"\p{N}",
        r" [-+=] (?=\p{N})",
        r",? ?\p{L}+ (?=\p{N})",
        r"\. (?=\p{N}|\\boxed\{)",
        r" ?\p{L}+",
        r" ?(?:(?!\\boxed\{)[^\s\p{L}\p{N}])+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(corpus: Iterable[str], max_length: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer; the same corpus gives the same merges.

    Args:
        corpus: the texts that it is trained on.
        max_length: positions that the model supports, which becomes ``model_max_length``.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_settings(max_length))
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, in the one form that transformers 4
    and 5 both read.
    """
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        **_settings(tokenizer.model_max_length),
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


def _settings(max_length: int) -> dict[str, Any]:
    return {
        "pad_token": PAD,
        "eos_token": TURN_END,
        "additional_special_tokens": [TURN_START],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }


def conversation(tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, str]]) -> str:
    """The text that the model continues."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return text


def continuation(result: str) -> str:
    """Text of the chat template between a call's end-of-turn token and the next reply."""
    return f"\n{TURN_START}tool\n{result}{TURN_END}\n{TURN_START}assistant\n"


def starter_corpus(seed: int) -> Iterator[str]:
    """Problems as the starter model will see them, and the English page as often as it takes to
    weigh as much.
    """
    for example in itertools.islice(examples(seed, Mixture(worked=0.5, story=0.3)), 2_000):
        yield from (
            example.system or "",
            f"user\n{example.question}",
            f"assistant\n{example.reply}",
            "system\n",
        )
    english = ENGLISH.read_text(encoding="utf-8")
    yield from itertools.repeat(english, 30)
