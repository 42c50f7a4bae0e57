"""The experts that a mixture chose for each token of a sequence, as the one word of text in which
`/generate` answers them.

    48x8x1:AAECAwQF…      layers, experts of a token, bytes of a number : base64 of the numbers

The numbers are unsigned, little-endian, and lie in the order [tokens, layers, experts of a token].
A sequence's last token has none, since the model has not read it.
"""

import re
from base64 import b64decode, b64encode
from typing import NamedTuple

_HEAD = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})x([12]):")


class ExpertsError(ValueError):
    """A word has another form, or the experts of other tokens."""


class RoutedExperts(NamedTuple):
    """A word that was read.

    Attributes:
        layers: of the model, those without experts included.
        experts: of a token.
        width: bytes of a number.
        numbers: of all tokens.
    """

    layers: int
    experts: int
    width: int
    numbers: bytes

    @property
    def row(self) -> int:
        """Bytes of one token."""
        return self.layers * self.experts * self.width

    def widened(self) -> "RoutedExperts":
        """Return the same experts with two bytes for each number."""
        if self.width == 2:
            return self
        numbers = bytearray(2 * len(self.numbers))
        numbers[::2] = self.numbers
        return self._replace(width=2, numbers=bytes(numbers))

    def to_wire(self) -> str:
        """Return the word."""
        data = b64encode(self.numbers).decode()
        return f"{self.layers}x{self.experts}x{self.width}:{data}"


def read(word: object) -> RoutedExperts:
    """Read a word.

    Raises:
        ExpertsError: it has another form.
    """
    text = word if isinstance(word, str) else ""
    head = _HEAD.match(text)
    if head is None:
        raise ExpertsError(
            f"routed_experts {word!r:.40} of /generate does not begin with layers, experts and bytes "
            "of a number: use the server of this version"
        )
    layers, count, width = map(int, head.groups())
    try:
        numbers = b64decode(text[head.end() :], validate=True)
    except ValueError as error:
        raise ExpertsError(
            f"routed_experts {word!r:.40} of /generate holds no base64: {error}"
        ) from error
    return RoutedExperts(layers, count, width, numbers)


def checked(word: object, tokens: int) -> RoutedExperts:
    """Read a word that has the experts of so many tokens.

    Raises:
        ExpertsError: it has another form, or the experts of other tokens.
    """
    experts = read(word)
    if len(experts.numbers) != tokens * experts.row:
        raise ExpertsError(
            f"routed_experts {word!r:.40} of /generate has {len(experts.numbers)} bytes, and {tokens} "
            f"tokens have {tokens * experts.row}: start the server without "
            "--enable-return-routed-experts"
        )
    return experts


def continued_experts(before: str, after: RoutedExperts, kept: int) -> RoutedExperts:
    """Return the first tokens of an earlier sequence's word with the others of a later one's.

    Args:
        before: of the earlier sequence, which may go on beyond these tokens.
        after: of the later sequence.
        kept: tokens of `before` that stay.

    Raises:
        ExpertsError: the two are of different models.
    """
    earlier = read(before)
    if (earlier.layers, earlier.experts) != (after.layers, after.experts):
        raise ExpertsError(
            f"routed_experts of two turns have {earlier.layers} and {after.layers} layers, with "
            f"{earlier.experts} and {after.experts} experts of a token: give the environment servers of "
            "one model"
        )
    if earlier.width != after.width:
        earlier, after = earlier.widened(), after.widened()
    end = kept * after.row
    return after._replace(numbers=earlier.numbers[:end] + after.numbers[end:])
