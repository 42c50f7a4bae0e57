"""Attention over packed tokens for the models of transformers, by our table of operations.

An attention function is added to transformers by name, and beside it a function that makes its
masks. Ours makes none. A small object stands in the place of a mask: it holds the packing and the
window, and the attention reads them there. So no layer makes a table of tokens by tokens.

Causal attention within each sequence is accepted, with a window or without one. Everything else is
refused, and the model falls back to an attention of transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from example_trainer.models.ops import Operations
from example_trainer.models.packing import Packing

NAME = "lockstep"
"""Name of the attention in transformers, which has a meaning of its own for some other words."""
ALIGNMENT = 8
"""GPU kernels take heads whose width is a multiple of this."""
_CAUSAL = "causal_mask_function"
_JOINED = {"and_masks.<locals>.and_mask", "remap_positions_for_packed_sequence.<locals>.inner_mask"}
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
"""Names of transformers' functions for parts of masks."""
_WITHOUT_EFFECT = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "seq_idx",
    "sliding_window",
    "use_cache",
}
"""Arguments that change nothing here. The window is read from the mask, as torch's attention does
in transformers: a layer without one there has none."""


class Refused(NotImplementedError):
    """The model asks for an attention that ours is not."""


@dataclass(frozen=True)
class Seen:
    """Stands in the place of a mask.

    Attributes:
        ops: the table that has the attention.
        packing: sequences, and the tokens of each.
        rows: how often the packing's tokens stand side by side in the model's batch: 1, or the
            number of sequences. Each is then padded to the length of the longest one.
        window: how many of the newest tokens a query sees; None: all of its sequence.
    """

    ops: Operations
    packing: Packing
    rows: int
    window: int | None


_forwarded: ContextVar[tuple[Operations, Packing, int]] = ContextVar("forwarded")


@contextmanager
def forwarding(ops: Operations, packing: Packing, rows: int = 1) -> Iterator[None]:
    """Set what the masks of a model refer to inside of the block.

    Args:
        packing: of the tokens of all rows.
        rows: see Seen.
    """
    token = _forwarded.set((ops, packing, rows))
    try:
        yield
    finally:
        _forwarded.reset(token)


def register() -> None:
    """Add the attention to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, seen)


def seen(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Seen:
    """Return what stands in the place of the mask that a model asks for.

    Args:
        batch_size, q_length, kv_length: sizes of the mask.
        mask_function: of a pair of tokens: whether the first one sees the second one.
        attention_mask: true where a token is not padding.

    Raises:
        Refused: it is not the mask of causal attention in each sequence.
    """
    ops, packing, rows = _forwarded.get()
    if attention_mask is not None:
        raise Refused("it masks tokens by itself")
    if (batch_size, q_length, kv_length) != (rows, packing.tokens // rows, packing.tokens // rows):
        raise Refused(f"its mask is for {batch_size} rows of {q_length} by {kv_length} tokens")
    parts = dict(_parts(mask_function))
    if _CAUSAL not in parts:
        raise Refused("its mask is not causal")
    return Seen(ops, packing, rows, parts.get(_WINDOW))


def _parts(mask_function: Callable[..., Any]) -> Iterator[tuple[str, int | None]]:
    """Yield the names of the functions that a mask is made of, and the window of one that has it.

    Raises:
        Refused: a part of the mask is not known here.
    """
    name = getattr(mask_function, "__qualname__", type(mask_function).__name__)
    if name in (_CAUSAL, _PACKED):
        yield name, None
        return
    known = name == _WINDOW or name in _JOINED
    held = inspect.getclosurevars(mask_function).nonlocals if known else {}
    if "sliding_window" in held:
        yield name, int(held["sliding_window"])
    elif "mask_functions" in held:
        for part in held["mask_functions"]:
            yield from _parts(part)
    elif "mask_function" in held:
        yield from _parts(held["mask_function"])
    else:
        raise Refused(f"its mask has a part of its own, {name}")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend, as transformers calls it.

    Args:
        module: the layer's attention.
        query: [rows, heads, tokens, head_dim].
        key, value: [rows, kv_heads, tokens, head_dim]; the values' heads may be narrower.
        attention_mask: what `seen` returned.
        scaling: of the scores; not given: head_dim ** -0.5.
        dropout, is_causal, others: what else the class asks for.

    Returns:
        [rows, tokens, heads, head_dim] of the values, and no weights.

    Raises:
        Refused: the model asks for something that changes attention in another way.
    """
    if not isinstance(attention_mask, Seen):
        raise Refused("its attention has a mask of its own, or none")
    asked = [name for name, one in others.items() if one is not None and one is not False]
    asked = sorted({*asked} - _WITHOUT_EFFECT)
    if asked or dropout or is_causal is False:
        raise Refused(f"its attention has {', '.join(asked) or 'dropout, or is not causal'}")
    if query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
        raise Refused("queries do not fit its keys")
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    width = value.shape[-1]
    q, k, v = _packed(query, key, value)
    found = attention_mask.ops.attention(
        q, k, v, attention_mask.packing, scale, attention_mask.window
    )
    return found[..., :width].unflatten(0, (len(query), -1)), None


def _packed(*parts: Tensor) -> Iterator[Tensor]:
    """Yield [rows · tokens, heads, width] of each part [rows, heads, tokens, head_dim], filled up
    with zeros to one width."""
    widest = max(part.shape[-1] for part in parts)
    width = -(-widest // ALIGNMENT) * ALIGNMENT
    for part in parts:
        tokens = part.transpose(1, 2).flatten(0, 1)
        yield F.pad(tokens, (0, width - part.shape[-1])).contiguous()
