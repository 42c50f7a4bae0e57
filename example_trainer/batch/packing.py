"""A batch of rollouts as bins of packed tokens, each of one forward and backward pass. Pure: no
I/O, no state.

Which rollouts share a bin does not change what is learned, since each token's weight is its weight
in the whole minibatch. It decides how long the ranks wait for each other, and how often a prompt is
forwarded:

    minibatch ── groups ──► units: rollouts that share what they begin with, whole groups if they fit
                            units ──► bins of at most tokens_per_bin tokens, the costliest first
                                      bins ──► ranks, as many to each, in each pass of about the same cost

The same rollouts always come into the same bins, in whatever order they arrived: where length does
not decide, content does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from example_trainer.algorithm.advantages import Normalisation, token_weights
from example_trainer.batch.groups import TOKEN_FIELDS, Batch, TrainedSequence
from example_trainer.models.packing import NO_PARENT, Packing

# A batch as bins: packed tokens with everything that the loss needs, each of one forward and
# backward pass on one rank.

_HOST = ("lengths", "parents", "counts", "orders", "unreferenced", "reference_pass")
"""Fields that are read on the host."""


@dataclass(frozen=True)
class PackedBin:
    """Spans of one forward pass. It has n trained tokens: of all its sequences, in the order of the
    sequences and, in each, of the tokens.

    Attributes:
        tokens: [tokens] int64, span after span.
        lengths, parents: [spans] int64, see Packing.
        sources: [n] int64, which row of the decoder's output predicts each trained token.
        targets: [n] int64, the trained tokens.
        fields: [n] each, by their names in TOKEN_FIELDS; `bin[name]` is one of them.
        weights: [n] float32.
        positions: [n] int64, each one's place among the tokens of its rollout.
        counts: [sequences] int64, how many of the n belong to each sequence; none has 0.
        orders: [sequences, 2] int64, each sequence's place in the batch: group, and number within
            the group.
        unreferenced: [sequences] int64, of how many of its trained tokens the reference's logprob
            did not come along.
        reference_pass: [1] int64, not 0 if there are any of those in the bins that the ranks work
            on at the same time.
        routed: [tokens, choices] int16, the sampler's choices of experts, see ReplayedRouters; no
            choices without them.
        shared_by: [tokens] int32, how many sequences have each token.
    """

    tokens: Tensor
    lengths: Tensor
    parents: Tensor
    sources: Tensor
    targets: Tensor
    fields: Mapping[str, Tensor]
    weights: Tensor
    positions: Tensor
    counts: Tensor
    orders: Tensor
    unreferenced: Tensor
    reference_pass: Tensor
    routed: Tensor
    shared_by: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        del own["fields"]
        return own | dict(self.fields)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> PackedBin:
        """Make a bin of what `tensors` returned."""
        own = {name: tensor for name, tensor in tensors.items() if name not in TOKEN_FIELDS}
        return cls(**own, fields={name: tensors[name] for name in TOKEN_FIELDS})

    def of_targets(self) -> dict[str, Tensor]:
        """The fields that have a number for each trained token."""
        return {
            name: tensor
            for name, tensor in self.tensors().items()
            if name not in (*_HOST, "tokens", "sources", "routed", "shared_by")
        }

    def to(self, device: torch.device, non_blocking: bool = False) -> PackedBin:
        """The same on another device, but for the places of spans and sequences, which are read on
        the host.
        """
        moved = {
            name: t if name in _HOST else t.to(device, non_blocking=non_blocking)
            for name, t in self.tensors().items()
        }
        return PackedBin.of(moved)

    def handed_to(self, device: torch.device) -> PackedBin:
        """As `to`, from pinned memory, so that the copy is not waited for; the allocator keeps that
        memory until it is done.
        """
        if device.type != "cuda":
            return self.to(device)
        pinned = PackedBin.of({name: t.pin_memory() for name, t in self.tensors().items()})
        return pinned.to(device, non_blocking=True)

    @property
    def empty(self) -> bool:
        """Return whether there is nothing to train on: a bin for a rank that must take part in a
        pass without work of its own.
        """
        return len(self.targets) == 0

    @cached_property
    def packing(self) -> Packing:
        """Where its spans are, on the device of its tokens."""
        packing = Packing(self.lengths.tolist(), self.tokens.device, self.parents.tolist())
        if self.routed.shape[1]:
            packing.routed = self.routed
        # Equal rollouts share a span that continues none. Each sequence ends with a span.
        if packing.shared or len(self.counts) > len(self.lengths):
            packing.shared_by = self.shared_by
        return packing

    @cached_property
    def sequences(self) -> Packing | None:
        """The trained tokens as spans, one for each sequence; None for an empty bin."""
        if self.empty:
            return None
        return Packing(self.counts.tolist(), self.tokens.device)

    @property
    def sequence(self) -> Tensor:
        """[n] int64, ascending: which of the bin's sequences each trained token is of."""
        return self.targets if self.sequences is None else self.sequences.numbers

    def device_tensors(self) -> list[Tensor]:
        """All that a pass reads on the device of the tokens, what the packings work out for it
        included.
        """
        packings = [self.packing, self.sequences]
        worked_out = [
            tensor
            for packing in packings
            if packing is not None
            for tensor in packing.index_tensors()
        ]
        return [
            t for t in [*self.tensors().values(), *worked_out] if t.device == self.tokens.device
        ]


# Common beginnings of rollouts, as a tree of spans; each span is forwarded once. Pure.
#
# Rollouts of a group begin with the same prompt, and rollouts of several turns may part later:
#
#     prompt ─┬─ answer 1
#             └─ turn 1 ─┬─ answer 2          four spans in place of three sequences
#                        └─ answer 3
#
# A span is split off only if it spares the rollouts that share it at least LEAST_SAVING tokens
# each. For all that continue it, every further span is one more run of keys that attention has to
# gather. It is also one more ragged end among its tiles.

LEAST_SAVING = 16

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """The tokens from `begin` to `end` of a sequence, and of all that share them.

    Attributes:
        sequence: number of one that holds them.
        begin, end: positions in it.
        parent: number of the span that ends at `begin`, NO_PARENT for a first one.
    """

    sequence: int
    begin: int
    end: int
    parent: int


@dataclass(frozen=True)
class PrefixTree:
    """Sequences as spans. A sequence is the span that it ends in, with all that this one continues.

    Attributes:
        spans: each behind its parent.
        ends: for each sequence, the span that it ends with.
    """

    spans: tuple[Span, ...]
    ends: tuple[int, ...]

    def holders(self) -> list[list[int]]:
        """Return the sequences that have each span, in their order."""
        held: list[list[int]] = [[] for _ in self.spans]
        for sequence, span in enumerate(self.ends):
            while span != NO_PARENT:
                held[span].append(sequence)
                span = self.spans[span].parent
        return held

    @property
    def tokens(self) -> int:
        """Tokens to forward."""
        return sum(span.end - span.begin for span in self.spans)

    @property
    def keys(self) -> int:
        """Keys that the spans see, each its own keys and the keys of all spans that it continues."""
        return sum(span.end for span in self.spans)

    @property
    def pairs(self) -> int:
        """Pairs of a token and one that it attends to."""
        lengths = ((span.begin, span.end - span.begin) for span in self.spans)
        return sum(length * begin + length * (length + 1) // 2 for begin, length in lengths)


def reading_order(tokens: Tokens) -> bytes:
    """Sorts sequences like words in a dictionary, so that what begins alike stands together."""
    return tokens.astype(">u4").tobytes()


def separate(rows: Sequence[Tokens]) -> PrefixTree:
    """Each sequence as a span of its own."""
    return PrefixTree(
        tuple(Span(i, 0, len(row), NO_PARENT) for i, row in enumerate(rows)),
        tuple(range(len(rows))),
    )


def prefix_tree(rows: Sequence[Tokens]) -> PrefixTree:
    """Find what sequences have in common.

    Args:
        rows: [length] each, of at least one token, sorted by `reading_order`.
    """
    common = [_common(one, two) for one, two in pairwise(rows)]
    spans: list[Span] = []
    ends = [NO_PARENT] * len(rows)
    # Sequences first to last - 1 have their first `depth` tokens in `parent` and what it continues.
    # A stack and no recursion: a tree may be as deep as the group is large.
    todo = [(0, len(rows), 0, NO_PARENT)]
    while todo:
        first, last, depth, parent = todo.pop()
        sharers = last - first
        end = min(common[first : last - 1], default=len(rows[first]))
        if sharers == 1 or (end - depth) * (sharers - 1) >= LEAST_SAVING * sharers:
            if end > depth:
                spans.append(Span(first, depth, end, parent))
                depth, parent = end, len(spans) - 1
            while (
                first < last and len(rows[first]) == depth
            ):  # in reading order, what ends here comes first
                ends[first] = parent
                first += 1
        cuts = [first, *(i + 1 for i in range(first, last - 1) if common[i] <= end), last]
        todo += [(a, b, depth, parent) for a, b in reversed(list(pairwise(cuts))) if a < b]
    return PrefixTree(tuple(spans), tuple(ends))


def _common(one: Tokens, two: Tokens) -> int:
    """Count the tokens that two sequences have in common at their beginning."""
    shorter = min(len(one), len(two))
    different = np.flatnonzero(one[:shorter] != two[:shorter])
    return int(different[0]) if len(different) else shorter


# Which rollouts of a batch are learned from together, in one optimizer update.
#
# Pure: no I/O, no state.


def divide(rollouts: Sequence[tuple[int, bytes]], count: int) -> list[list[int]]:
    """Divide a batch into minibatches of about as many rollouts each.

    Groups stay together where there are as many of them as minibatches: their members have their
    advantages from each other. Where there are fewer, each minibatch has rollouts that stand next
    to each other, group by group. The same rollouts come into the same minibatch in whatever order
    they arrived: content decides.

    Args:
        rollouts: group and digest of the content of each.
        count: of minibatches. With fewer rollouts there are as many minibatches as rollouts: none
            is empty.

    Returns:
        For each minibatch the numbers of its rollouts, ascending.
    """
    count = min(count, len(rollouts))
    if count <= 1:
        return [list(range(len(rollouts)))]
    members: dict[int, list[int]] = {}
    for number, (name, _) in enumerate(rollouts):
        members.setdefault(name, []).append(number)
    # Rollouts with the same content may change places. The number comes last, and settles only
    # their order.
    groups = [
        sorted(group, key=lambda number: (rollouts[number][1], number))
        for group in members.values()
    ]
    groups.sort(
        key=lambda group: (
            -len(group),
            hashlib.sha256(b"".join(rollouts[number][1] for number in group)).digest(),
            group,
        )
    )
    if len(groups) < count:
        row = [number for group in groups for number in group]
        bounds = [len(row) * part // count for part in range(count + 1)]
        return [sorted(row[begin:end]) for begin, end in pairwise(bounds)]
    minibatches: list[list[int]] = [[] for _ in range(count)]
    for group in groups:  # the largest first, to where there are fewest
        min(minibatches, key=len).extend(group)
    return [sorted(numbers) for numbers in minibatches]


PAIRS_PER_TOKEN = 1 << 14
"""Pairs of attention that cost as much as all the rest that is done for a token. A layer spends 2
operations a parameter on a token, 4 times its attention's width on a pair. With about 12 width²
parameters that is 6 times the width: 12,000 to 30,000 for models of 1.7B to 14B parameters.
"""
SEEN_PER_TOKEN = 2
"""Keys that the spans of a bin may see for each token of its budget. Attention has the keys and
values of a prompt laid out again for each span that continues it (see Packing.key_rows). That is so
in every layer, and the backward pass needs them. Without a bound, many short answers to a long
prompt are few tokens and any amount of memory. With 2 the bound is not felt where answers are as
long as their prompt, or longer. And rollouts never need more room together than apart. The spans of
a tree in which no rollout ends are fewer than its rollouts. Each of these spans sees no more than
one rollout's span does.
"""


@dataclass(frozen=True)
class _Rollout:
    """A sequence, a digest that stands for its content, and the weight of each of its trained
    tokens.
    """

    sequence: TrainedSequence
    digest: bytes
    weight: float = 0.0

    @classmethod
    def of(cls, sequence: TrainedSequence, default_temperature: float) -> _Rollout:
        if "temperatures" not in sequence.fields:
            every = np.full(len(sequence.positions), default_temperature, dtype=np.float32)
            sequence = sequence.with_fields(temperatures=every)
        parts = [sequence.tokens, sequence.positions]
        rows = ((field, sequence[name]) for name, field in TOKEN_FIELDS.items())
        parts += [row for field, row in rows if field.orders(row)]
        # A digest, because the keys of a whole batch exist at once.
        content = hashlib.sha256()
        for part in parts:
            content.update(np.ascontiguousarray(part).data)
        return cls(sequence, content.digest())

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return self.sequence.tokens


@dataclass(frozen=True)
class _Unit:
    """Rollouts that go into one bin together."""

    rollouts: tuple[_Rollout, ...]
    tree: PrefixTree

    @cached_property
    def tokens(self) -> int:
        return self.tree.tokens

    @cached_property
    def size(self) -> int:
        """Tokens of a bin's budget that it takes up, with its keys' share if that is the larger
        one.
        """
        return max(self.tokens, -(-self.tree.keys // SEEN_PER_TOKEN))

    @cached_property
    def cost(self) -> int:
        return self.tokens * PAIRS_PER_TOKEN + self.tree.pairs

    @property
    def rank(self) -> tuple[int, bytes, tuple[int, int]]:
        """The costliest first, so that memory runs out early, if it does."""
        digest = hashlib.sha256(b"".join(rollout.digest for rollout in self.rollouts)).digest()
        return -self.cost, digest, min(rollout.sequence.order for rollout in self.rollouts)


@dataclass
class _Bin:
    units: list[_Unit] = field(default_factory=list)

    @property
    def cost(self) -> int:
        return sum(unit.cost for unit in self.units)


def pack_batch(
    batch: Batch,
    *,
    tokens_per_bin: int,
    ranks: int,
    normalisation: Normalisation,
    max_tokens: int,
    share_prefixes: bool,
    minibatches: int = 1,
    temperature: float = 1.0,
    forward_zero_advantages: bool = True,
) -> list[list[list[PackedBin]]]:
    """Lay a batch out in minibatches, and these in bins. Sequences without a trained token are left
    out.

    Every other trained token is there once, but for sequences whose advantages are all 0 where
    these need not be forwarded. Then they count in the weights of the others alone. One sequence of
    each minibatch is forwarded in any case, the shortest, so that a batch that teaches nothing is a
    step like others.

    With one rank and nothing shared the sequences follow each other in the same order whatever
    `tokens_per_bin` is. So sums that are taken in that order come out the same to the bit.

    Args:
        tokens_per_bin: at most so many are forwarded in one pass, and they see at most
            SEEN_PER_TOKEN times as many keys: activations grow with both. A sequence that is longer
            itself has a pass of its own.
        ranks: data-parallel ones; each works on its own bins, pass by pass with the others.
        normalisation, max_tokens: see token_weights; the weights count in the whole minibatch.
            A constant is the same for all minibatches, whatever is masked: it counts as many
            sequences as the batch has for each of them.
        share_prefixes: forward what rollouts of a group have in common once.
        minibatches: of an optimizer update each; see divide. Fewer are made of a batch with fewer
            trained sequences.
        temperature: of sequences without one.
        forward_zero_advantages: forward those too from which nothing is learned.

    Returns:
        For each minibatch, the bins of each rank: as many for each; those without work are empty.
    """
    trained = (sequence for sequence in batch.sequences if len(sequence.positions))
    rollouts = [_Rollout.of(sequence, temperature) for sequence in trained]
    if not rollouts:
        return [[[] for _ in range(ranks)]]
    sequences = len(batch.sequences) / min(minibatches, len(batch.sequences))
    packed = []
    for members in divide(
        [(rollout.sequence.order[0], rollout.digest) for rollout in rollouts], minibatches
    ):
        lengths = [len(rollouts[i].sequence.positions) for i in members]
        weights = token_weights(lengths, normalisation, max_tokens, sequences)
        chosen = [
            replace(rollouts[i], weight=weight) for i, weight in zip(members, weights, strict=True)
        ]
        if not forward_zero_advantages:
            chosen = _that_teach(chosen)
        make_bins = _bins_of_groups if share_prefixes else _bins_of_rollouts
        packed.append(_shares(make_bins(chosen, tokens_per_bin, ranks), ranks))
    return packed


def _shares(bins: Sequence[_Bin], ranks: int) -> list[list[PackedBin]]:
    """Return the bins of each rank."""
    shares = [[_packed(one.units) for one in share] for share in _deal(bins, ranks)]
    for at_once in zip(*shares, strict=True):
        missing = any(one.unreferenced.any() for one in at_once)
        for one in at_once:
            one.reference_pass.fill_(int(missing))
    return shares


def empty_bin() -> PackedBin:
    """One token and nothing to train on: for a rank that must take part in a pass without work of
    its own.
    """
    ids = torch.zeros(0, dtype=torch.int64)
    one = torch.ones(1, dtype=torch.int64)
    return PackedBin(
        tokens=torch.zeros_like(one),
        lengths=one,
        parents=torch.full_like(one, NO_PARENT),
        sources=ids,
        targets=ids,
        fields={name: torch.from_numpy(field.filled(0)) for name, field in TOKEN_FIELDS.items()},
        weights=torch.zeros(0),
        positions=ids,
        counts=ids,
        orders=torch.zeros((0, 2), dtype=torch.int64),
        unreferenced=ids,
        reference_pass=torch.zeros_like(one),
        routed=torch.zeros((1, 0), dtype=torch.int16),
        shared_by=torch.ones(1, dtype=torch.int32),
    )


def _that_teach(rollouts: Sequence[_Rollout]) -> list[_Rollout]:
    """Return the rollouts with an advantage; if there is none, the shortest."""
    teaching = [rollout for rollout in rollouts if rollout.sequence["advantages"].any()]
    return teaching or [
        min(
            rollouts,
            key=lambda rollout: (len(rollout.tokens), rollout.digest, rollout.sequence.order),
        )
    ]


def _bins_of_rollouts(rollouts: Sequence[_Rollout], tokens_per_bin: int, ranks: int) -> list[_Bin]:
    """Bins in which nothing is shared."""
    units = [_Unit((rollout,), separate([rollout.tokens])) for rollout in rollouts]
    return _fill(units, tokens_per_bin, ranks)


def _bins_of_groups(rollouts: Sequence[_Rollout], tokens_per_bin: int, ranks: int) -> list[_Bin]:
    """Bins in which rollouts of a group share their beginnings. With several ranks, groups are
    halved as long as that pays. The ranks wait less for each other, but pay for further copies of
    the halves' common tokens.
    """
    groups: dict[int, list[_Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.sequence.order[0], []).append(rollout)
    by_beginning = [
        sorted(g, key=lambda r: (reading_order(r.tokens), r.digest, r.sequence.order))
        for g in groups.values()
    ]
    whole = [_unit(group) for group in by_beginning]

    def divided(parts: int) -> list[_Bin]:
        units = [
            unit
            for one in whole
            for unit in _split(one, tokens_per_bin, -(-len(one.rollouts) // parts))
        ]
        return _fill(units, tokens_per_bin, ranks)

    best, parts = divided(1), 2
    while ranks > 1 and parts < 2 * max(map(len, groups.values())):
        finer = divided(parts)
        if _duration(finer, ranks) >= _duration(best, ranks):
            break
        best, parts = finer, parts * 2
    return best


def _unit(rollouts: Sequence[_Rollout]) -> _Unit:
    return _Unit(tuple(rollouts), prefix_tree([rollout.tokens for rollout in rollouts]))


def _split(unit: _Unit, tokens_per_bin: int, most_rollouts: int) -> list[_Unit]:
    """Halve a unit until its parts are small enough, each with its own copy of what the halves
    shared. Rollouts that share most are neighbours, and so stay together."""
    done, todo = [], [unit]
    while todo:
        unit = todo.pop()
        if len(unit.rollouts) == 1 or (
            unit.size <= tokens_per_bin and len(unit.rollouts) <= most_rollouts
        ):
            done.append(unit)
            continue
        seen = np.cumsum([len(rollout.tokens) for rollout in unit.rollouts])
        middle = min(int(np.searchsorted(seen, seen[-1] / 2)) + 1, len(unit.rollouts) - 1)
        todo += [_unit(unit.rollouts[middle:]), _unit(unit.rollouts[:middle])]
    return done


def _fill(units: Sequence[_Unit], tokens_per_bin: int, ranks: int) -> list[_Bin]:
    """Bins for all ranks, some perhaps empty, the costliest first."""
    ordered = sorted(units, key=lambda unit: unit.rank)
    if ranks == 1:
        return _fill_in_order(ordered, tokens_per_bin)
    return sorted(_fill_evenly(ordered, tokens_per_bin, ranks), key=lambda one: -one.cost)


def _fill_in_order(units: Sequence[_Unit], tokens_per_bin: int) -> list[_Bin]:
    """Each unit behind the one before, in a new bin where the last one has no room."""
    bins, room = [_Bin()], tokens_per_bin
    for unit in units:
        if unit.size > room and bins[-1].units:
            bins.append(_Bin())
            room = tokens_per_bin
        bins[-1].units.append(unit)
        room -= unit.size
    return bins


def _fill_evenly(units: Sequence[_Unit], tokens_per_bin: int, ranks: int) -> list[_Bin]:
    """Put each unit, the costliest first, into the bin of the least cost that has room for it
    (Graham, 1969: longest processing time first). The passes are as few as possible, or a few more.
    """
    passes = -(-sum(min(unit.size, tokens_per_bin) for unit in units) // (tokens_per_bin * ranks))
    while (bins := _fill_so_many(units, tokens_per_bin, passes * ranks)) is None:
        passes += 1 + passes // 8  # each try costs a look at every unit
    return bins


def _fill_so_many(units: Sequence[_Unit], tokens_per_bin: int, count: int) -> list[_Bin] | None:
    bins = [_Bin() for _ in range(count)]
    costs, room = np.zeros(count, dtype=np.int64), np.full(count, tokens_per_bin, dtype=np.int64)
    for unit in units:
        fits = (room >= unit.size) | (costs == 0)
        if not fits.any():
            return None
        chosen = int(np.argmin(np.where(fits, costs, np.iinfo(np.int64).max)))
        bins[chosen].units.append(unit)
        costs[chosen] += unit.cost
        room[chosen] -= unit.size
    return bins


def _duration(bins: Sequence[_Bin], ranks: int) -> int:
    """Return the cost of all passes; in each pass the ranks wait for the costliest bin."""
    return sum(one.cost for one in bins[::ranks])


def _deal(bins: Sequence[_Bin], ranks: int) -> list[list[_Bin]]:
    """Bins of about the same cost to all ranks in each pass, the costliest of them to the rank that
    has the least so far.
    """
    dealt: list[list[_Bin]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(bins), ranks):
        for rank, one in zip(
            sorted(range(ranks), key=lambda r: totals[r]), bins[start : start + ranks], strict=True
        ):
            dealt[rank].append(one)
            totals[rank] += one.cost
    return dealt


def _packed(units: Sequence[_Unit]) -> PackedBin:
    if not units:
        return empty_bin()
    tokens: list[npt.NDArray[np.int64]] = []
    parents: list[int] = []
    sources: list[npt.NDArray[np.int64]] = []
    rollouts: list[_Rollout] = []
    routed: list[npt.NDArray[np.int16]] = []
    shared_by: list[int] = []
    row = 0
    for unit in units:
        before = len(parents)
        rows: list[npt.NDArray[np.int64]] = []  # for each span, where all tokens up to its end are
        for span, holders in zip(unit.tree.spans, unit.tree.holders(), strict=True):
            tokens.append(unit.rollouts[span.sequence].tokens[span.begin : span.end])
            # The last token of a sequence has no experts, and in a longer one it has.
            longest = max((unit.rollouts[i] for i in holders), key=lambda one: len(one.tokens))
            routed.append(_routed_of(longest)[span.begin : span.end])
            shared_by += [len(holders)] * (span.end - span.begin)
            own = np.arange(row, row + span.end - span.begin)
            first = span.parent == NO_PARENT
            parents.append(NO_PARENT if first else before + span.parent)
            rows.append(own if first else np.concatenate((rows[span.parent], own)))
            row += len(own)
        for rollout, end in zip(unit.rollouts, unit.tree.ends, strict=True):
            sources.append(rows[end][rollout.sequence.positions - 1])
        rollouts += unit.rollouts
    sequences = [rollout.sequence for rollout in rollouts]
    counts = [len(sequence.positions) for sequence in sequences]
    weights = np.array([rollout.weight for rollout in rollouts], dtype=np.float32)
    unreferenced = [int(np.isnan(s["reference_logprobs"]).sum()) for s in sequences]
    return PackedBin(
        tokens=_joined(tokens),
        lengths=torch.tensor([len(part) for part in tokens]),
        parents=torch.tensor(parents),
        sources=_joined(sources),
        targets=_joined([s.tokens[s.positions] for s in sequences]),
        fields={name: _joined([s[name] for s in sequences]) for name in TOKEN_FIELDS},
        weights=torch.from_numpy(np.repeat(weights, counts)),
        positions=_joined([s.positions for s in sequences]),
        counts=torch.tensor(counts),
        orders=torch.tensor([s.order for s in sequences]),
        unreferenced=torch.tensor(unreferenced),
        reference_pass=torch.zeros(1, dtype=torch.int64),
        routed=torch.from_numpy(np.concatenate(routed)),
        shared_by=torch.tensor(shared_by, dtype=torch.int32),
    )


def _routed_of(rollout: _Rollout) -> npt.NDArray[np.int16]:
    routed = rollout.sequence.routed
    if routed is None:
        return np.zeros((len(rollout.tokens), 0), dtype=np.int16)
    return routed


def _joined(parts: Sequence[npt.NDArray[np.int64] | npt.NDArray[np.float32]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


# Bins of some of a bin's sequences: for a pass over only the sequences that still lack a value.


def completed_reference(bin: PackedBin, compute: Callable[[PackedBin], Tensor]) -> Tensor:
    """The reference's logprobs of a bin's trained tokens: as they came along, and computed ones
    where they are missing.

    A sequence that misses a single one is forwarded as a whole. If none came along, `compute` is
    given the bin itself.

    Args:
        compute: [n] float32 logprobs of the trained tokens of a bin. Collective where the reference
            is spread over ranks. Each has as many bins, and all of them agree by `reference_pass`
            on the bins that get a pass.

    Returns:
        [n] float32 on the bin's device.
    """
    sent = bin["reference_logprobs"]
    if not bin.reference_pass.any():
        return sent
    chosen = bin.unreferenced.nonzero().flatten().tolist()
    if len(chosen) == len(bin.counts):
        return torch.where(sent.isnan(), compute(bin), sent)
    part, rows = part_of(bin, chosen)
    completed = sent.clone()
    completed[rows] = torch.where(sent[rows].isnan(), compute(part), sent[rows])
    return completed


def part_of(bin: PackedBin, sequences: Sequence[int]) -> tuple[PackedBin, Tensor]:
    """Some of a bin's sequences as a bin of their own: the spans that they are in, and the spans
    that these continue.

    Args:
        sequences: their numbers in the bin, ascending. Without any it is the bin of a rank without
            work.

    Returns:
        The bin, and [n] int64 on its device: the places of its trained tokens among the whole bin's
        trained tokens.
    """
    device = bin.tokens.device
    if not sequences:
        return empty_bin().to(device), torch.zeros(0, dtype=torch.int64, device=device)
    ends = bin.counts.cumsum(0).tolist()
    rows = torch.cat([torch.arange(ends[i] - int(bin.counts[i]), ends[i]) for i in sequences])
    sources = bin.sources.cpu()[rows]
    begins = torch.tensor(bin.packing.begins)
    spans = torch.searchsorted(begins, sources, right=True) - 1
    kept = _with_parents(spans.tolist(), bin.parents.tolist())
    places = torch.full((len(bin.lengths),), NO_PARENT)
    places[kept] = torch.arange(len(kept))
    new_begins = torch.cat((torch.zeros(1, dtype=torch.int64), bin.lengths[kept].cumsum(0)))
    tokens = torch.cat(
        [torch.arange(begin, end) for begin, end in map(bin.packing.spans().__getitem__, kept)]
    )
    parents = bin.parents[kept]
    on_device, of_sequences = rows.to(device), torch.tensor(sequences)
    taken = {name: tensor[on_device] for name, tensor in bin.of_targets().items()}
    whole = replace(
        bin,
        tokens=bin.tokens[tokens.to(device)],
        routed=bin.routed[tokens.to(device)],
        shared_by=bin.shared_by[tokens.to(device)],
        lengths=bin.lengths[kept],
        parents=torch.where(parents == NO_PARENT, parents, places[parents]),
        sources=(sources - begins[spans] + new_begins[places[spans]]).to(device),
        counts=bin.counts[of_sequences],
        orders=bin.orders[of_sequences],
        unreferenced=bin.unreferenced[of_sequences],
    )
    return PackedBin.of(whole.tensors() | taken), on_device


def _with_parents(spans: Iterable[int], parents: Sequence[int]) -> list[int]:
    """The spans with all that they continue, ascending."""
    kept: set[int] = set()
    for span in set(spans):
        while span != NO_PARENT and span not in kept:
            kept.add(span)
            span = parents[span]
    return sorted(kept)
