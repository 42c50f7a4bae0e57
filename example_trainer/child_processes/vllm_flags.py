"""Reading flags of `vllm serve` as vLLM reads them: the last one counts, and `_` is as good as `-`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Degrees:
    """A vLLM server's size.

    Attributes:
        tensor: tensor-parallel degree; None if the flags do not give it.
        data: data-parallel degree.
    """

    tensor: int | None = None
    data: int = 1

    @property
    def gpus(self) -> int | None:
        """GPUs that one server needs; None if any number will do."""
        return None if self.tensor is None else self.tensor * self.data


def flag_value(words: Sequence[str], *names: str) -> str | None:
    """The value of a flag that has these names; None if it is not given.

    A flag at the end without a value has an empty one.
    """
    last = None
    for word, following in zip(words, (*words[1:], ""), strict=False):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = "--" + flag[2:].replace("_", "-")
        if flag in names:
            last = value
            if not equals:
                last = following
    return last


def degrees(words: Sequence[str]) -> Degrees:
    """Read the degrees among a server's flags.

    Raises:
        ValueError: a degree is not a number above 0.
    """
    counts: list[int | None] = []
    for names in (("--tensor-parallel-size", "-tp"), ("--data-parallel-size", "-dp")):
        value = flag_value(words, *names)
        if value is not None and (not value.isdigit() or int(value) < 1):
            raise ValueError(
                f"{' or '.join(names)} is {value or 'nothing'!r}: give the number of GPUs"
            )
        counts.append(None if value is None else int(value))
    return Degrees(counts[0], counts[1] or 1)
