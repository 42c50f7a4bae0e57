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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from example_trainer.algorithm.advantages import Normalisation, token_weights
from example_trainer.batch.bins import PackedBin
from example_trainer.batch.groups import Batch, TrainedSequence
from example_trainer.batch.minibatches import divide
from example_trainer.batch.prefixes import PrefixTree, prefix_tree, reading_order, separate
from example_trainer.batch.token_fields import TOKEN_FIELDS
from example_trainer.models.packing import NO_PARENT

PAIRS_PER_TOKEN = 1 << 14
"""Pairs of attention that cost as much as all the rest that is done for a token. A layer spends 2
operations a parameter on a token, 4 times its attention's width on a pair; with about 12 width²
parameters that is 6 times the width: 12,000 to 30,000 for models of 1.7B to 14B parameters."""
SEEN_PER_TOKEN = 2
"""Keys that the spans of a bin may see for each token of its budget. Attention has the keys and
values of a prompt laid out again for each span that continues it (see Packing.key_rows), in every
layer, and the backward pass needs them: without a bound, many short answers to a long prompt are
few tokens and any amount of memory. With 2 the bound is not felt where answers are as long as their
prompt, or longer. And rollouts never need more room together than apart: spans of a tree in which
none of them ends are fewer than they are, and each of these sees no more than one of theirs."""


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

    Every other trained token is there once, but for those of sequences whose advantages are all 0
    where these need not be forwarded: then they are there in the weights of the others alone. One
    sequence of each minibatch is forwarded in any case, the shortest, so that a batch that teaches
    nothing is a step like others.

    With one rank and nothing shared the sequences follow each other in the same order whatever
    `tokens_per_bin` is, so that sums which are taken in that order come out the same to the bit.

    Args:
        tokens_per_bin: at most so many are forwarded in one pass, and they see at most
            SEEN_PER_TOKEN times as many keys: activations grow with both. A sequence that is longer
            itself has a pass of its own.
        ranks: data-parallel ones; each works on its own bins, pass by pass with the others.
        normalisation, max_tokens: see token_weights; the weights are those of the whole minibatch.
            A constant is the same for all minibatches, whatever is masked: it counts as many
            sequences as the batch has for each of them.
        share_prefixes: forward what rollouts of a group have in common once.
        minibatches: of an optimizer update each; see divide. Fewer are made of a batch with fewer
            trained sequences.
        temperature: of sequences that do not say theirs.
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
    )


def _that_teach(rollouts: Sequence[_Rollout]) -> list[_Rollout]:
    """Those with an advantage; if there is none, the shortest."""
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
    halved as long as less waiting for each other saves the ranks more than further copies of what
    the halves shared cost them."""
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
    shared. Those that share most stand together, and so stay together."""
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
    """Each unit, the costliest first, into the bin of the least cost that has room for it (Graham,
    1969: longest processing time first), in as few passes as that is possible in, or a few more."""
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
    """What the ranks spend together, as a cost: in each pass all wait for the one with the
    costliest bin.
    """
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
    row = 0
    for unit in units:
        before = len(parents)
        rows: list[npt.NDArray[np.int64]] = []  # for each span, where all tokens up to its end are
        for span in unit.tree.spans:
            tokens.append(unit.rollouts[span.sequence].tokens[span.begin : span.end])
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
    )


def _joined(parts: Sequence[npt.NDArray[np.int64] | npt.NDArray[np.float32]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))
