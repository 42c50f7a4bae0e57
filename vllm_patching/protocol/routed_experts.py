"""The experts that a mixture's routers chose for each token of a sequence, as one word of text.

    48x8x1:AAECAwQF…      layers, experts of a token, bytes of a number : base64 of the numbers

The numbers are unsigned, little-endian, and lie in the order [tokens, layers, experts of a token].
Layers without experts have numbers too, which the reader ignores.
"""

from __future__ import annotations

import base64
import binascii
import re

import numpy as np
import numpy.typing as npt

_HEAD = re.compile(r"(\d{1,6})x(\d{1,6})x([12])")
_TYPES: dict[int, npt.DTypeLike] = {1: np.dtype("u1"), 2: np.dtype("<u2")}


class ExpertsError(ValueError):
    """The text is not in the form that `to_wire` writes."""


def to_wire(experts: npt.NDArray[np.integer]) -> str:
    """Write experts [tokens, layers, count] of each token.

    Raises:
        ExpertsError: they have another number of dimensions, or one is negative or too large.
    """
    if experts.ndim != 3 or (experts.size and not 0 <= experts.min() <= experts.max() < 1 << 16):
        raise ExpertsError(f"experts of shape {experts.shape}: numbers from 0 to 65535 are needed")
    width = 1 + bool(experts.size and experts.max() > 255)
    data = base64.b64encode(np.ascontiguousarray(experts, dtype=_TYPES[width]).tobytes())
    return f"{experts.shape[1]}x{experts.shape[2]}x{width}:{data.decode()}"


def from_wire(word: object) -> npt.NDArray[np.int64]:
    """Read experts [tokens, layers, count].

    Raises:
        ExpertsError: the text is not in the form that `to_wire` writes.
    """
    head, colon, data = word.partition(":") if isinstance(word, str) else ("", "", "")
    match = _HEAD.fullmatch(head)
    if match is None or not colon:
        raise ExpertsError(
            f"{word!r:.40} does not begin with layers, experts and bytes of a number"
        )
    layers, count, width = map(int, match.groups())
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ExpertsError(f"{word!r:.40} holds no base64: {error}") from error
    if not layers * count or len(raw) % (layers * count * width):
        raise ExpertsError(
            f"{word!r:.40} has {len(raw)} bytes, which is not a multiple of {layers * count * width}"
        )
    numbers: npt.NDArray[np.integer] = np.frombuffer(raw, _TYPES[width])
    return numbers.reshape(-1, layers, count).astype(np.int64)
