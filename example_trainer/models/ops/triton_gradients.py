"""The backward passes on a GPU, under the names of `torch_gradients`, each on its tensors' GPU.
Imports Triton.

Weight gradients over tiles of tokens, norms, SwiGLU, embedding, log-softmax; attention's lies in
`triton_attention`. Every program walks over its tiles, or its tokens, in the order in which they
are packed, adding to what the accumulator held before. To go on in a second call gives the bits
that one call over both would have given.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged

from example_trainer.models.ops import flash_attention_4, triton_attention
from example_trainer.models.ops.launch import on_its_device
from example_trainer.models.ops.triton_heads import heads_gradient
from example_trainer.models.packing import TILE, Packing

__all__ = [
    "add_embedding_gradient",
    "add_expert_gradient",
    "add_row_sums",
    "add_shares",
    "add_weight_gradient",
    "attention_backward",
    "entropy",
    "expert_gradient",
    "heads_gradient",
    "logit_gradient",
    "norm_gradient",
    "silu_and_mul_gradient",
]


@on_its_device
def attention_backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packing: Packing,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See triton_attention.attention_backward. By FlashAttention 4, if it can run and no span
    continues another: for long sequences it takes half of the time.
    """
    tensors = upstream, q, k, v, out, lse
    if not packing.shared and flash_attention_4.usable(q):
        return flash_attention_4.attention_backward(*tensors, packing, scale)
    return triton_attention.attention_backward(*tensors, packing, scale)


@dataclass(frozen=True)
class WeightBlocks:
    """The programs of a weight's gradient. Each element is the sum over the same steps of 16 tokens
    with any blocks, so its bits stay (bench/gpu/gradient_kernels.py compares them).

    Attributes:
        outputs, inputs: of the matrix, for each program.
        warps, stages: of a program, and its tiles of tokens that are on their way.
        group: blocks of outputs whose programs run side by side.
        ahead: whether the place of a tile is read one tile ahead.
        descriptors: whether the GPU's copy engine reads the tiles (Hopper's TMA), and not the
            programs themselves; needs `ahead`, and tensors that `describable` accepts.
        tokens: of a tile.
    """

    outputs: int = 128
    inputs: int = 128
    warps: int = 8
    stages: int = 3
    group: int = 8
    ahead: bool = False
    descriptors: bool = False
    tokens: int = TILE

    def __str__(self) -> str:
        sizes = f"{self.outputs} x {self.inputs}, {self.warps} warps, {self.stages} stages"
        reads = ", descriptors" if self.descriptors else ", read ahead" if self.ahead else ""
        tokens = "" if self.tokens == TILE else f", {self.tokens} tokens"
        return f"{sizes}, groups of {self.group}{reads}{tokens}"

    def count(self, outputs: int, inputs: int) -> int:
        """Programs of a matrix."""
        return triton.cdiv(outputs, self.outputs) * triton.cdiv(inputs, self.inputs)

    def divide(self, outputs: int, inputs: int) -> bool:
        """Report if the blocks cover a matrix without rest."""
        return outputs % self.outputs == 0 and inputs % self.inputs == 0


FLOAT32_BLOCKS = WeightBlocks(64, 64, warps=4, stages=2, tokens=TILE // 2)
HALF_BLOCKS = WeightBlocks()
WIDE_BLOCKS = WeightBlocks(inputs=256, ahead=True)
"""For Hopper and the GPUs after it in data centres, which have 160 KiB of shared memory for them."""
DESCRIPTOR_BLOCKS = WeightBlocks(inputs=256, stages=4, group=16, ahead=True, descriptors=True)
"""For Hopper, whose products are too fast for the programs' own reads."""
_FEWEST_WIDE = 96
"""Programs that keep three quarters of such a GPU's 132 processors busy."""


def weight_blocks(dy: Tensor, x: Tensor, major: int, experts: int = 1) -> WeightBlocks:
    """Choose for dy [tokens, outputs] and x [tokens, inputs] of a matrix, or of one for each expert.
    `major` is the first number of the GPU's compute capability.
    """
    if dy.dtype == torch.float32:
        return FLOAT32_BLOCKS
    sizes = dy.shape[1], x.shape[1]
    enough = WIDE_BLOCKS.divide(*sizes) and WIDE_BLOCKS.count(*sizes) * experts >= _FEWEST_WIDE
    if not enough or major not in (9, 10):
        return HALF_BLOCKS
    return DESCRIPTOR_BLOCKS if major == 9 and describable(dy) and describable(x) else WIDE_BLOCKS


def describable(rows: Tensor) -> bool:
    """Report if a descriptor can name a matrix whose columns lie side by side. Its rows must begin
    at multiples of 16 bytes.
    """
    return rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0


@triton.jit
def _block(program, outputs, inputs, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """The first output and input of a program's block. Neighbouring programs share columns of dy, so
    that these are read from the cache.
    """
    blocks_out = tl.cdiv(outputs, OUTPUTS)
    blocks_in = tl.cdiv(inputs, INPUTS)
    in_group = GROUP * blocks_in
    first_out = (program // in_group) * GROUP
    height = tl.minimum(blocks_out - first_out, GROUP)
    block_out = first_out + (program % in_group) % height
    block_in = (program % in_group) // height
    return block_out * OUTPUTS, block_in * INPUTS


@triton.jit
def _read_tile(
    source, start, length, first_column, columns, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Some columns of a tile of tokens, and zeros behind its last one."""
    if DESCRIPTORS:
        tile = load_ragged(source, start.to(tl.int32), length, [0, first_column])
    else:
        rows = tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        live = (rows < length)[:, None]
        if not EVEN:
            live = live & (column < columns)[None, :]
        at = source + (start + rows)[:, None] * stride + column[None, :]
        tile = tl.load(at, mask=live, other=0.0)
    return tile


@triton.jit(do_not_specialize=["tiles"])
def _weight_gradient(
    dy, x, out, tile_starts, tile_lengths, tiles, firsts, ends, outputs, inputs, stride_dy, stride_x,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    AHEAD: tl.constexpr, DESCRIPTORS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """out += dyᵀ x, tile after tile of tokens, into the same accumulator.

    EXPERTS: there are several matrices, and each has tiles of its own, from `firsts` to `ends`.

    EVEN: blocks divide the matrix, and columns need no mask: half of the time goes into masks
    otherwise.

    AHEAD: the place of a tile is read one tile ahead. The compiler gives that read a stage of its own
    otherwise, and each turn waits for all reads.

    DESCRIPTORS: dy and x are ragged descriptors, which read zeros behind a tile's last row, and a
    few instructions read a tile. With pointers, each thread computes the addresses of 12 copies, and
    has to wait until the products see them in shared memory.
    """
    first, end = 0, tiles
    if EXPERTS:
        expert = tl.program_id(1).to(tl.int64)
        first = tl.load(firsts + expert)
        end = tl.load(ends + expert)
        if first == end:
            return
        out += expert * outputs * inputs
    first_output, first_input = _block(tl.program_id(0), outputs, inputs, OUTPUTS, INPUTS, GROUP)
    output = first_output + tl.arange(0, OUTPUTS)
    inp = first_input + tl.arange(0, INPUTS)
    at = output.to(tl.int64)[:, None] * inputs + inp[None, :]
    if EVEN:
        total = tl.load(out + at)
    else:
        live = (output < outputs)[:, None] & (inp < inputs)[None, :]
        total = tl.load(out + at, mask=live, other=0.0)
    if AHEAD:
        start = tl.load(tile_starts + first).to(tl.int64)
        length = tl.load(tile_lengths + first)
    for tile in range(first, end):
        if not AHEAD:
            start = tl.load(tile_starts + tile).to(tl.int64)
            length = tl.load(tile_lengths + tile)
        gradient = _read_tile(
            dy, start, length, first_output, outputs, stride_dy, ROWS, OUTPUTS, EVEN, DESCRIPTORS
        )
        value = _read_tile(
            x, start, length, first_input, inputs, stride_x, ROWS, INPUTS, EVEN, DESCRIPTORS
        )
        if AHEAD:
            following = tl.minimum(tile + 1, end - 1)
            start = tl.load(tile_starts + following).to(tl.int64)
            length = tl.load(tile_lengths + following)
        total = tl.dot(tl.trans(gradient), value, total, input_precision="ieee")
    if EVEN:
        tl.store(out + at, total)
    else:
        tl.store(out + at, total, mask=live)


@triton.jit
def _tile_sums(dy, shares, tile_starts, tile_lengths, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """shares[tile] = Σ over the tile's rows of dy."""
    tile = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    column_live = column < width
    rows = tl.arange(0, ROWS)
    live = (rows < tl.load(tile_lengths + tile))[:, None] & column_live[None, :]
    row = tl.load(tile_starts + tile).to(tl.int64) + rows
    term = tl.load(dy + row[:, None] * width + column[None, :], mask=live, other=0.0)
    total = tl.sum(term.to(tl.float32), axis=0)
    tl.store(shares + tile.to(tl.int64) * width + column, total, mask=column_live)


@triton.jit(do_not_specialize=["tiles"])
def _add_shares(shares, out, tiles, width, PARTS: tl.constexpr, WIDTH: tl.constexpr, TURN: tl.constexpr):  # fmt: skip
    """out += shares[0] + shares[1] + …, one tile after the other; a tile's parts are summed first.

    TURN: tiles of a turn of the loop, so that as many reads are on their way.
    """
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    live = column < width
    part = tl.arange(0, PARTS)
    total = tl.load(out + column, mask=live, other=0.0)
    for first in range(0, tiles, TURN):
        for step in tl.static_range(TURN):
            row = (first + step) * PARTS + part
            mask = (row < tiles * PARTS)[:, None] & live[None, :]
            at = row.to(tl.int64)[:, None] * width + column[None, :]
            total += tl.sum(tl.load(shares + at, mask=mask, other=0.0), axis=0)
    tl.store(out + column, total, mask=live)


@triton.jit
def _norm_gradient(
    dy, x, weight, extra, dx, shares, tile_starts, tile_lengths, per_token, each, width, eps,
    HAS_EXTRA: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dx of RMSNorm, plus a gradient that reaches x by another way, for `each` rows of a tile.

    A token has `per_token` rows. shares[tile, part] is these rows' share of the weight's gradient.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    start = tl.load(tile_starts + tile).to(tl.int64) * per_token
    count = tl.load(tile_lengths + tile) * per_token
    column = tl.arange(0, WIDTH)
    column_live = column < width
    factor = tl.load(weight + column, mask=column_live, other=0.0).to(tl.float32)
    share = tl.zeros((WIDTH,), dtype=tl.float32)
    for offset in range(part * each, tl.minimum((part + 1) * each, count), ROWS):
        row = offset + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & column_live[None, :]
        at = (start + row)[:, None] * width + column[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        upstream = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        scale = (1.0 / tl.sqrt(tl.sum(value * value, axis=1) / width + eps))[:, None]
        normed = value * scale
        share += tl.sum(upstream * normed, axis=0)
        slope = upstream * factor[None, :]
        result = scale * (slope - normed * (tl.sum(slope * normed, axis=1) / width)[:, None])
        if HAS_EXTRA:
            result += tl.load(extra + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)
    own = (tile * tl.num_programs(1) + part).to(tl.int64) * width
    tl.store(shares + own + column, share, mask=column_live)


@triton.jit
def _silu_gradient(dy, x, dx, width, SIZE: tl.constexpr):
    """Gradient of one row of silu(x[:width]) · x[width:]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    live = column < width
    at = row * (2 * width) + column
    gate = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x + at + width, mask=live, other=0.0).to(tl.float32)
    slope = tl.load(dy + row * width + column, mask=live, other=0.0).to(tl.float32)
    chance = 1.0 / (1.0 + tl.exp(-gate))
    gate_slope = slope * up * chance * (1.0 + gate * (1.0 - chance))
    tl.store(dx + at, gate_slope.to(dx.dtype.element_ty), mask=live)
    tl.store(dx + at + width, (slope * gate * chance).to(dx.dtype.element_ty), mask=live)


@triton.jit
def _expert_rows(slope, inner, weights, d_inner, scaled, d_weights, width, SIZE: tl.constexpr):
    """See expert_gradient; one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    live = column < width
    at = row * (2 * width) + column
    gate = tl.load(inner + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(inner + at + width, mask=live, other=0.0).to(tl.float32)
    value = tl.load(slope + row * width + column, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(weights + row)
    chance = 1.0 / (1.0 + tl.exp(-gate))
    gated = gate * chance * up
    tl.store(d_weights + row, tl.sum(value * gated, axis=0))
    tl.store(scaled + row * width + column, (gated * weight).to(scaled.dtype.element_ty), mask=live)
    value = value * weight
    gate_slope = value * up * chance * (1.0 + gate * (1.0 - chance))
    tl.store(d_inner + at, gate_slope.to(d_inner.dtype.element_ty), mask=live)
    up_slope = value * gate * chance
    tl.store(d_inner + at + width, up_slope.to(d_inner.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["spans"])
def _expert_tiles(bounds, firsts, ends, starts, lengths, spans, ROWS: tl.constexpr, SPANS: tl.constexpr):  # fmt: skip
    """The tiles of an expert's rows, span after span. They stand where no other expert's can."""
    expert = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS)
    live = span < spans
    at = bounds + expert * (spans + 1) + span
    begin = tl.load(at, mask=live, other=0)
    rows = tl.load(at + 1, mask=live, other=0) - begin
    count = tl.cdiv(rows, ROWS)
    first = tl.load(bounds + expert * (spans + 1)) // ROWS + expert * (spans + 1)
    tl.store(firsts + expert, first)
    tl.store(ends + expert, first + tl.sum(count, axis=0))
    place = first + tl.cumsum(count, axis=0) - count
    for tile in range(0, tl.max(count, axis=0)):
        tl.store(starts + place + tile, begin + tile * ROWS, mask=tile < count)
        tl.store(lengths + place + tile, tl.minimum(rows - tile * ROWS, ROWS), mask=tile < count)


@triton.jit(do_not_specialize=["tokens"])
def _embedding_gradient(dy, sorted_ids, order, out, tokens, width, WIDTH: tl.constexpr):
    """out[id] += dy of each token with that id, in the tokens' order; the program of an id's first
    token does them all.
    """
    place = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = column < width
    mine = tl.load(sorted_ids + place)
    before = tl.load(sorted_ids + place - 1, mask=place > 0, other=-1)
    if mine != before:
        total = tl.load(out + mine.to(tl.int64) * width + column, mask=live, other=0.0)
        at = place
        same = mine
        while same == mine:
            token = tl.load(order + at).to(tl.int64)
            total += tl.load(dy + token * width + column, mask=live, other=0.0).to(tl.float32)
            at += 1
            same = tl.load(sorted_ids + at, mask=at < tokens, other=-1)
        tl.store(out + mine.to(tl.int64) * width + column, total, mask=live)


@triton.jit
def _logit_gradient(
    logits, targets, lse, upstream, entropies, entropy_upstream, width, stride, inverse_temperature,
    BY_ROW: tl.constexpr, ENTROPY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Over the logits of one row: upstream · (onehot(target) - softmax(logits / temperature)) /
    temperature.

    BY_ROW: `inverse_temperature` is where each row's is, and not one number for all.
    ENTROPY: less entropy_upstream · softmax · (log softmax + entropy) / temperature.
    """
    row = tl.program_id(0).to(tl.int64)
    if BY_ROW:
        inverse = tl.load(inverse_temperature + row)
    else:
        inverse = inverse_temperature
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    live = column < width
    value = tl.load(logits + row * stride + column, mask=live, other=0.0).to(tl.float32) * inverse
    hit = (column == tl.load(targets + row)).to(tl.float32)
    if ENTROPY:
        value -= tl.load(lse + row)
        chance = tl.exp(value)
        slope = (hit - chance) * tl.load(upstream + row)
        slope -= chance * (value + tl.load(entropies + row)) * tl.load(entropy_upstream + row)
        slope *= inverse
    else:
        slope = (hit - tl.exp(value - tl.load(lse + row))) * (tl.load(upstream + row) * inverse)
    tl.store(logits + row * stride + column, slope.to(logits.dtype.element_ty), mask=live)


@triton.jit
def _entropy(logits, lse, out, width, SIZE: tl.constexpr):
    """out[row] = -Σ softmax · log(softmax), in nats."""
    row = tl.program_id(0).to(tl.int64)
    row_lse = tl.load(lse + row)
    total = 0.0
    for first in range(0, width, SIZE):
        column = first + tl.arange(0, SIZE)
        live = column < width
        value = tl.load(logits + row * width + column, mask=live, other=0.0).to(tl.float32)
        value -= row_lse
        total += tl.sum(tl.where(live, tl.exp(value) * value, 0.0), axis=0)
    tl.store(out + row, -total)


@on_its_device
def add_weight_gradient(
    dy: Tensor, x: Tensor, total: Tensor, packing: Packing, blocks: WeightBlocks | None = None
) -> None:
    """total [outputs, inputs] float32 += dyᵀ x of dy [tokens, outputs] and x [tokens, inputs], in
    place; not given `blocks`: `weight_blocks`.
    """
    dy, x = _columns_contiguous(dy), _columns_contiguous(x)
    blocks = blocks or _blocks_here(dy, x, 1)
    starts, lengths = packing.tiles(blocks.tokens)[:2]
    if len(starts):
        _add_products(dy, x, total, starts, lengths, None, blocks)


def _blocks_here(dy: Tensor, x: Tensor, experts: int) -> WeightBlocks:
    """Choose by `weight_blocks` for the tensors' GPU."""
    major = torch.cuda.get_device_capability(dy.device)[0] if dy.is_cuda else 0
    return weight_blocks(dy, x, major, experts)


def _add_products(
    dy: Tensor,
    x: Tensor,
    total: Tensor,
    starts: Tensor,
    lengths: Tensor,
    experts: tuple[Tensor, Tensor] | None,
    blocks: WeightBlocks,
) -> None:
    """See add_weight_gradient.

    Args:
        starts, lengths: of the tiles.
        experts: for each, its first tile and one past its last. None: total is one matrix.
    """
    outputs, inputs = total.shape[-2:]
    grid = (blocks.count(outputs, inputs), 1 if experts is None else len(total))
    strides = dy.stride(0), x.stride(0)
    if blocks.descriptors:
        dy = create_ragged_descriptor(dy, (blocks.tokens, blocks.outputs))
        x = create_ragged_descriptor(x, (blocks.tokens, blocks.inputs))
    _weight_gradient[grid](
        dy, x, total, starts, lengths, len(starts), *(experts or (starts, starts)), outputs, inputs, *strides,
        ROWS=blocks.tokens, OUTPUTS=blocks.outputs, INPUTS=blocks.inputs, GROUP=blocks.group,
        EVEN=blocks.divide(outputs, inputs), AHEAD=blocks.ahead, DESCRIPTORS=blocks.descriptors,
        EXPERTS=experts is not None, num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


@on_its_device
def add_row_sums(dy: Tensor, total: Tensor, packing: Packing) -> None:
    """total [width] float32 += Σ over the rows of dy [tokens, width], in place."""
    dy = dy.contiguous()
    width = dy.shape[1]
    starts, lengths = packing.tiles()[:2]
    shares = torch.empty((len(starts), 1, width), dtype=torch.float32, device=dy.device)
    _tile_sums[(len(starts), triton.cdiv(width, 128))](
        dy, shares, starts, lengths, width, ROWS=TILE, WIDTH=128, num_warps=4
    )
    add_shares(shares, total)


@on_its_device
def add_shares(shares: Tensor, total: Tensor) -> None:
    """See torch_gradients.add_shares; shares [tiles, parts, width] float32."""
    tiles, parts, width = shares.shape
    # Each thread of a warp reads one number of a tile, so that many tiles can be on their way.
    columns = max(1, 32 // parts)
    _add_shares[(triton.cdiv(width, columns),)](
        shares, total, tiles, width, PARTS=parts, WIDTH=columns, TURN=32, num_warps=1
    )


_NORM_PARTS = 4
"""Programs for each tile in the backward pass of a norm."""


@on_its_device
def norm_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, extra: Tensor | None, packing: Packing
) -> tuple[Tensor, Tensor]:
    """See torch_gradients.norm_gradient; the shares are [tiles, parts, width] float32."""
    dy, x = dy.contiguous(), x.contiguous()
    rows, width = x.shape
    per_token = rows // packing.tokens
    starts, lengths = packing.tiles()[:2]
    padded = triton.next_power_of_2(width)
    dx = torch.empty_like(x)
    shares = torch.empty((len(starts), _NORM_PARTS, width), dtype=torch.float32, device=x.device)
    _norm_gradient[(len(starts), _NORM_PARTS)](
        dy, x, weight.contiguous(), extra.contiguous() if extra is not None else dy, dx, shares, starts, lengths,
        per_token, TILE // _NORM_PARTS * per_token, width, eps, HAS_EXTRA=extra is not None,
        ROWS=min(16, max(1, 1024 // padded)), WIDTH=padded, num_warps=8 if padded >= 2048 else 4,
    )  # fmt: skip
    return dx, shares


@on_its_device
def silu_and_mul_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient for x [rows, 2 · width] of silu_and_mul, from dy [rows, width]."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    rows, width = dy.shape
    _silu_gradient[(rows, triton.cdiv(width, 1024))](dy, x, dx, width, SIZE=1024, num_warps=4)
    return dx


@on_its_device
def expert_gradient(slope: Tensor, inner: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See torch_gradients.expert_gradient; weights in float32."""
    slope, inner, weights = slope.contiguous(), inner.contiguous(), weights.contiguous()
    rows, width = slope.shape
    d_inner, scaled = torch.empty_like(inner), torch.empty_like(slope)
    d_weights = torch.empty_like(weights)
    size = triton.next_power_of_2(width)
    _expert_rows[(rows,)](
        slope, inner, weights, d_inner, scaled, d_weights, width, SIZE=size,
        num_warps=min(16, max(1, size // 256)),
    )  # fmt: skip
    return d_inner, scaled, d_weights


@on_its_device
def add_expert_gradient(
    dy: Tensor, x: Tensor, total: Tensor, bounds: Tensor, blocks: WeightBlocks | None = None
) -> None:
    """See torch_gradients.add_expert_gradient; total in float32. Not given `blocks`:
    `weight_blocks`.
    """
    dy, x, bounds = dy.contiguous(), x.contiguous(), bounds.contiguous()
    experts, spans = bounds.shape[0], bounds.shape[1] - 1
    if not len(dy):
        return
    blocks = blocks or _blocks_here(dy, x, experts)
    rows = blocks.tokens
    most = len(dy) // rows + experts * (spans + 1)
    firsts, ends = torch.empty((2, experts), dtype=torch.int32, device=dy.device)
    starts, lengths = torch.empty((2, most), dtype=torch.int32, device=dy.device)
    _expert_tiles[(experts,)](
        bounds, firsts, ends, starts, lengths, spans, ROWS=rows, SPANS=triton.next_power_of_2(spans), num_warps=4
    )  # fmt: skip
    _add_products(dy, x, total, starts, lengths, (firsts, ends), blocks)


@on_its_device
def add_embedding_gradient(dy: Tensor, ids: Tensor, total: Tensor) -> None:
    """total [vocab, width] float32 gets dy [tokens, width] added at ids [tokens], in the tokens'
    order, in place.
    """
    dy = dy.contiguous()
    sorted_ids, order = torch.sort(ids, stable=True)
    grid = (len(ids), triton.cdiv(dy.shape[1], 256))
    _embedding_gradient[grid](
        dy, sorted_ids, order, total, len(ids), dy.shape[1], WIDTH=256, num_warps=4
    )


@on_its_device
def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    upstream: Tensor,
    inverse_temperature: float | Tensor = 1.0,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Gradient of logits [rows, vocab] from that of the targets' logprobs, `upstream` [rows]
    float32; written over the logits.

    Args:
        targets: [rows] int64 columns; a number that is not a column belongs to another rank.
        lse: [rows] float32, log of the denominators of softmax(logits · inverse_temperature).
        inverse_temperature: a number, or [rows] float32.
        entropy: that of each row and the gradient that reaches it, both [rows] float32 and
            contiguous, if one does.
    """
    rows, vocab = logits.shape
    entropies, entropy_upstream = entropy or (lse, lse)
    _logit_gradient[(rows, triton.cdiv(vocab, 4096))](
        logits, targets, lse, upstream, entropies, entropy_upstream, vocab, logits.stride(0), inverse_temperature,
        BY_ROW=isinstance(inverse_temperature, Tensor), ENTROPY=entropy is not None, SIZE=4096, num_warps=8,
    )  # fmt: skip
    return logits


@on_its_device
def entropy(logits: Tensor, lse: Tensor) -> Tensor:
    """Entropy [rows] float32 of softmax(logits [rows, vocab]), in nats."""
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _entropy[(len(logits),)](logits, lse, out, logits.shape[1], SIZE=4096, num_warps=8)
    return out


def _columns_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
