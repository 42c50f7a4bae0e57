"""Whether two tokenizers mean the same by a token id. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

TEXTS = (
    "Hello, world! It's 3.14159 and 2,024.",
    "def f(x):\n\treturn [x ** 2 for x in range(10)]  # \u2713\n\n",
    "Über naïve cafés, 日本語, 한국어, Русский, عربي, 😀",
    "\\boxed{42} <think>\n  123 + 456 = 579\n</think>",
)
"""Several scripts, numbers, code and white space."""
SAMPLED_IDS = 512
IDS_PER_TEXT = 64


def first_difference(there: Mapping[str, int], here: Mapping[str, int]) -> str | None:
    """The lowest id that is not the same token in both vocabularies (token -> id), in words; None where there is none."""
    differing = there.items() ^ here.items()
    if not differing:
        return None
    lowest = min(token_id for _, token_id in differing)
    theirs, ours = ([token for token, token_id in table.items() if token_id == lowest] for table in (there, here))
    return f"id {lowest} is {_named(theirs)} there and {_named(ours)} here ({len(there)} and {len(here)} entries)"


def _named(tokens: list[str]) -> str:
    return " or ".join(sorted(map(repr, tokens))) or "nothing"


def probe_texts(tokenizer: Any) -> Iterator[str]:
    """Texts whose ids tell vocabularies apart: of several kinds, and of tokens from all over the tokenizer's own vocabulary."""
    yield from TEXTS
    ids = sorted(tokenizer.get_vocab().values())
    chosen = ids[:: max(1, len(ids) // SAMPLED_IDS)] + ids[-IDS_PER_TEXT:]  # special tokens are the last ones, usually
    for start in range(0, len(chosen), IDS_PER_TEXT):
        yield tokenizer.decode(chosen[start : start + IDS_PER_TEXT])


def differing_ids(text: str, there: list[int], here: list[int]) -> str | None:
    """Where two tokenizations of a text part, in words; None if they are the same."""
    if there == here:
        return None
    at = next((i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), min(len(there), len(here)))
    return f"of {text[:30]!r} token {at} is {_at(there, at)} there and {_at(here, at)} here"


def _at(ids: list[int], position: int) -> str:
    return str(ids[position]) if position < len(ids) else "nothing"
