"""Tokenizers: loading one, text to token ids, and whether two of them mean the same by an id.

Prompts come in two ways: as plain text, and as a chat template rendered it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atroposlib.errors import InferenceUnavailable
from atroposlib.utils.control_tokens import GUARD, ControlTokens
from atroposlib.utils.thinking import SPECIAL_MARKS

PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that tokenizer.json describes fully."""
TEXTS = (
    "Hello, world! It's 3.14159 and 2,024.",
    "def f(x):\n\treturn [x ** 2 for x in range(10)]  # \u2713\n\n",
    "Über naïve cafés, 日本語, 한국어, Русский, عربي, 😀",
    "\\boxed{42} <think>\n  123 + 456 = 579\n</think>",
)
"""Several scripts, numbers, code and white space."""
SAMPLED_IDS = 512
IDS_PER_TEXT = 64


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer by name or path.

    Raises:
        InferenceUnavailable: it cannot be had; says which flag names another.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        if is_plain_tokenizer(Path(name)):
            return PreTrainedTokenizerFast.from_pretrained(name)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InferenceUnavailable(
            f"no tokenizer for {name!r}: {reason}; pass a local folder or a model name as --env.tokenizer_name"
        ) from error


def is_plain_tokenizer(folder: Path) -> bool:
    """Return whether a local tokenizer is fully described by its tokenizer.json, so that its class
    need not be looked up.

    `AutoTokenizer` imports PyTorch where it is installed: seconds and hundreds of megabytes that an
    environment has no use for.
    """
    try:
        named = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError):
        return False
    return named in PLAIN_TOKENIZERS and (folder / "tokenizer.json").exists()


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Ids of a prompt as a person wrote it: with the start token that the model was trained to see
    first, exactly once.
    """
    tokens = list(tokenizer.encode(text))
    bos = getattr(tokenizer, "bos_token_id", None)
    # Text that a chat template made begins with the start token already, and encoding adds it
    # again.
    return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Ids of text that a chat template rendered, marks of `ControlTokens.guard` included, or of
    what follows other text.
    """
    if GUARD in text:
        return ControlTokens(tokenizer).encode(text)
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


class Continuation:
    """An encoder of text that follows other tokens.

    Some tokenizers put a space before the first word of whatever they encode. So the text is
    encoded behind the end token, which nothing merges with.

    Attributes:
        atomic: ids of tokens that no text is merged with, such as those that end a turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        end, number = (
            getattr(tokenizer, "eos_token", None),
            getattr(tokenizer, "eos_token_id", None),
        )
        self.atomic = frozenset([*added, *getattr(tokenizer, "all_special_ids", ()), number])
        takes_space = number not in added or added[number].rstrip
        self._end, self._end_id = ("" if takes_space or not isinstance(end, str) else end), number

    def __call__(self, text: str) -> list[int]:
        """Return the ids of the text alone."""
        if text and self._end:
            tokens = encode_rendered(self.tokenizer, self._end + text)
            if tokens[0] == self._end_id:
                return tokens[1:]
        return encode_rendered(self.tokenizer, text)


class ResponseDecoder:
    """A decoder of sampled tokens into text without special tokens.

    Some tokenizers hold the tags of reasoning as special tokens. Those stay in the text: they show
    where the reasoning ends.

    Attributes:
        kept: the special tokens that stay.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token.content: number for number, token in added.items() if token.special}
        self.kept = frozenset(
            mark for marks in SPECIAL_MARKS if marks <= special.keys() for mark in marks
        )
        self._dropped = frozenset(
            number for mark, number in special.items() if mark not in self.kept
        )

    def __call__(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens."""
        if not self.kept:
            return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        rest = [token for token in tokens if token not in self._dropped]
        return str(self.tokenizer.decode(rest, skip_special_tokens=False))


def first_difference(there: Mapping[str, int], here: Mapping[str, int]) -> str | None:
    """The lowest id that is not the same token in both vocabularies (token -> id), in words; None
    where there is none.
    """
    differing = there.items() ^ here.items()
    if not differing:
        return None
    lowest = min(token_id for _, token_id in differing)
    theirs, ours = (
        [token for token, token_id in table.items() if token_id == lowest]
        for table in (there, here)
    )
    return f"id {lowest} is {_named(theirs)} there and {_named(ours)} here ({len(there)} and {len(here)} entries)"


def _named(tokens: list[str]) -> str:
    return " or ".join(sorted(map(repr, tokens))) or "nothing"


def probe_texts(tokenizer: Any) -> Iterator[str]:
    """Texts whose ids tell vocabularies apart: of several kinds, and of tokens from all over the
    tokenizer's own vocabulary.
    """
    yield from TEXTS
    ids = sorted(tokenizer.get_vocab().values())
    chosen = (
        ids[:: max(1, len(ids) // SAMPLED_IDS)] + ids[-IDS_PER_TEXT:]
    )  # special tokens are the last ones, usually
    for start in range(0, len(chosen), IDS_PER_TEXT):
        yield tokenizer.decode(chosen[start : start + IDS_PER_TEXT])


def differing_ids(text: str, there: list[int], here: list[int]) -> str | None:
    """Where two tokenizations of a text part, in words; None if they are the same."""
    if there == here:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b),
        min(len(there), len(here)),
    )
    return f"of {text[:30]!r} token {at} is {_at(there, at)} there and {_at(here, at)} here"


def _at(ids: list[int], position: int) -> str:
    return str(ids[position]) if position < len(ids) else "nothing"
