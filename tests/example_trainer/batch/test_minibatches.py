"""A batch in parts: every rollout in one of them, groups whole where that is possible, whatever the
order of arrival.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.batch.groups import Batch
from example_trainer.batch.packing import PackedBin, divide, pack_batch
from tests.example_trainer.batch.test_packing import MAX_TOKENS, batches, rollout

GROUPS = st.lists(st.integers(0, 5), min_size=1, max_size=24)


@given(GROUPS, st.integers(1, 8))
def test_every_rollout_is_in_one_part_and_the_parts_are_even(groups: list[int], count: int) -> None:
    rollouts = [(group, bytes([number])) for number, group in enumerate(groups)]
    parts = divide(rollouts, count)
    assert sorted(number for part in parts for number in part) == list(range(len(groups)))
    assert len(parts) == min(count, len(groups))
    sizes, largest = (
        [len(part) for part in parts],
        max(groups.count(group) for group in set(groups)),
    )
    if len(set(groups)) >= count:
        assert max(sizes) - min(sizes) <= largest
        places = [
            {index for index, part in enumerate(parts) for n in part if groups[n] == group}
            for group in set(groups)
        ]
        assert all(len(place) == 1 for place in places)
    else:
        assert max(sizes) - min(sizes) <= 1


@given(GROUPS, st.integers(1, 8), st.randoms(use_true_random=False))
def test_content_decides_and_not_the_order_of_arrival(
    groups: list[int], count: int, random: Random
) -> None:
    rollouts = [(group, bytes([number])) for number, group in enumerate(groups)]
    order = random.sample(range(len(rollouts)), len(rollouts))
    names = random.sample(range(6), 6)
    moved = [(names[rollouts[n][0]], rollouts[n][1]) for n in order]

    def contents(rows: list[tuple[int, bytes]]) -> list[list[bytes]]:
        return [sorted(rows[n][1] for n in part) for part in divide(rows, count)]

    assert contents(moved) == contents(rollouts)


def pack(
    batch: Batch, minibatches: int, ranks: int = 1, share: bool = True, forward: bool = True
) -> list[list[list[PackedBin]]]:
    return pack_batch(
        batch, tokens_per_bin=200, ranks=ranks, normalisation="token", max_tokens=MAX_TOKENS, share_prefixes=share,
        minibatches=minibatches, temperature=0.5, forward_zero_advantages=forward,
    )  # fmt: skip


@given(batches(), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_minibatches_hold_the_batch_and_weigh_one_each(
    batch: Batch, minibatches: int, ranks: int, share: bool
) -> None:
    packed = pack(batch, minibatches, ranks, share)
    orders, trained = [], [s for s in batch.sequences if len(s.positions)]
    for shares in packed:
        assert len(shares) == ranks
        assert len({len(bins) for bins in shares}) == 1, "every rank takes part in as many passes"
        found = [one for bins in shares for one in bins]
        orders += [tuple(order) for one in found for order in one.orders.tolist()]
        weights = sum(float(one.weights.double().sum()) for one in found)
        assert weights == pytest.approx(1.0 if trained else 0.0, rel=1e-5)
    assert sorted(orders) == sorted(s.order for s in trained)
    assert len(packed) == max(1, min(minibatches, len(trained)))


@given(batches(), st.integers(1, 4), st.booleans(), st.integers(0, 2**24 - 1))
def test_what_teaches_nothing_is_left_out_and_counts_as_before(
    batch: Batch, count: int, share: bool, zeroed: int
) -> None:
    """The sum over tokens of weight × advantage × any function of the token, which gradients are,
    stays what it was. Each minibatch has a sequence to forward.
    """
    sequences = [
        s.with_fields(advantages=(s["advantages"] + 1) * np.float32(1 - (zeroed >> number & 1)))
        for number, s in enumerate(batch.sequences)
    ]
    all_of_it, less = (
        pack(Batch(sequences), count, share=share, forward=forward) for forward in (True, False)
    )
    assert len(all_of_it) == len(less)
    for (whole,), (part,) in zip(all_of_it, less, strict=True):
        products: list[dict[tuple[int, ...], list[float]]] = [{}, {}]
        for bins, found in zip((whole, part), products, strict=True):
            for one in bins:
                shares = (one.weights * one["advantages"]).split(one.counts.tolist())
                found.update(
                    {
                        tuple(o): p.tolist()
                        for o, p in zip(one.orders.tolist(), shares, strict=True)
                        if p.any()
                    }
                )
        assert products[0] == products[1]
        forwarded = sum(len(one.counts) for one in part)
        assert forwarded == max(len(products[0]), min(1, sum(len(one.counts) for one in whole)))


@given(batches(), st.integers(1, 4), st.integers(0, 2**24 - 1))
def test_a_constant_does_not_depend_on_what_is_masked(
    batch: Batch, count: int, masked: int
) -> None:
    """A trained token weighs the same in every minibatch, however many sequences lost all of
    theirs.
    """
    some = [s.masked() if masked >> number & 1 else s for number, s in enumerate(batch.sequences)]
    packed = pack_batch(
        Batch(some), tokens_per_bin=200, ranks=1, normalisation="constant", max_tokens=MAX_TOKENS, share_prefixes=True,
        minibatches=count,
    )  # fmt: skip
    weights = {weight for (bins,) in packed for one in bins for weight in one.weights.tolist()}
    assert weights <= {float(np.float32(1 / (len(some) / min(count, len(some)) * MAX_TOKENS)))}


def test_temperatures_and_teachers_come_along() -> None:
    rows = batches_of_two()
    ((bins,),) = pack(rows, 1)
    (one,) = bins
    by_order = dict(
        zip(
            map(tuple, one.orders.tolist()),
            one["temperatures"].split(one.counts.tolist()),
            strict=True,
        )
    )
    assert by_order[0, 0].tolist() == [np.float32(0.7)] * 2
    assert by_order[0, 1].tolist() == [0.5, 0.5], "the option's, where nobody said"
    taught = dict(
        zip(
            map(tuple, one.orders.tolist()),
            one["teacher_logprobs"].split(one.counts.tolist()),
            strict=True,
        )
    )
    assert taught[0, 0].isnan().all()
    assert taught[0, 1].tolist() == [-1.0, -2.0]


def batches_of_two() -> Batch:
    """One group: a sequence with its temperature, and one that a teacher scored."""
    first, second = rollout((0, 0), [1, 2, 3], [1, 2]), rollout((0, 1), [1, 4, 5], [1, 2])
    return Batch(
        [
            first.with_fields(temperatures=np.full(2, 0.7, dtype=np.float32)),
            second.with_fields(teacher_logprobs=np.array([-1, -2], dtype=np.float32)),
        ]
    )
