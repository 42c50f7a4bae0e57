"""Bins hold every trained token once, behind all that it is predicted from, whatever is shared and
however they are filled.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.wire import TrainerSession
from example_trainer.batch.groups import Batch, TrainedSequence
from example_trainer.batch.packing import (
    LEAST_SAVING,
    PAIRS_PER_TOKEN,
    SEEN_PER_TOKEN,
    PackedBin,
    empty_bin,
    pack_batch,
    prefix_tree,
    reading_order,
)
from example_trainer.batch.reader import figures_of
from example_trainer.models.packing import NO_PARENT

MAX_TOKENS = 1000


def rollout(
    order: tuple[int, int], tokens: list[int], trained: list[int], versions: list[int] | None = None
) -> TrainedSequence:
    """Its figures show their place: no two trained tokens of a batch have the same advantage."""
    advantages = [1000 * order[0] + 100 * order[1] + number for number in range(len(trained))]
    fields = {
        "rollout_logprobs": np.array([-0.5 * number for number in range(len(trained))], np.float32),
        "advantages": np.array(advantages, dtype=np.float32),
    }
    if versions is not None:
        fields["versions"] = np.array(versions, dtype=np.int64)
    return TrainedSequence(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.array(trained, dtype=np.int64),
        fields=fields,
        score=float(order[1]),
        weight_version=3,
        order=order,
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Groups whose rollouts begin alike, part, and part again: each continues what it drew from a
    few common runs of tokens.
    """
    sequences = []
    runs = [[7] * 40, [7] * 25 + [8] * 20, [1, 2, 3], [5] * 60]
    for group in range(draw(st.integers(1, 4))):
        for number in range(draw(st.integers(1, 6))):
            turns = draw(st.lists(st.sampled_from(runs), min_size=1, max_size=4))
            tokens = [token for turn in turns for token in turn] + draw(
                st.lists(st.integers(0, 9), max_size=5)
            )
            length = len(tokens)
            trained = sorted(draw(st.sets(st.integers(1, length - 1), max_size=8)))
            versions = draw(st.none() | st.just([number % 5 for number in range(len(trained))]))
            sequences.append(rollout((group, number), tokens, trained, versions))
    return Batch(sequences)


def pack(batch: Batch, budget: int, ranks: int = 1, share: bool = True) -> list[list[PackedBin]]:
    return pack_batch(
        batch,
        tokens_per_bin=budget,
        ranks=ranks,
        normalisation="sequence",
        max_tokens=MAX_TOKENS,
        share_prefixes=share,
    )[0]


def contexts(one: PackedBin) -> list[list[int]]:
    """For each trained token, the tokens that it is predicted from: its span's up to its source,
    behind all that this continues. Independent of Packing and of how bins are made."""
    begins = [0, *np.cumsum(one.lengths.tolist()).tolist()]
    tokens, parents = one.tokens.tolist(), one.parents.tolist()

    def whole(span: int) -> list[int]:
        before = [] if parents[span] == NO_PARENT else whole(parents[span])
        return before + tokens[begins[span] : begins[span + 1]]

    found = []
    for source in one.sources.tolist():
        span = int(np.searchsorted(begins, source, side="right")) - 1
        before = [] if parents[span] == NO_PARENT else whole(parents[span])
        found.append(before + tokens[begins[span] : source + 1])
    return found


def unpacked(bins: list[PackedBin]) -> dict[tuple[int, int], list[tuple[Any, ...]]]:
    """All fields of bins about each rollout's trained tokens, by the rollout's place in the
    batch.
    """
    found: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
    for one in bins:
        columns = zip(
            one.targets.tolist(),
            one.positions.tolist(),
            one["rollout_logprobs"].tolist(),
            one["advantages"].tolist(),
            one.weights.tolist(),
            one["versions"].tolist(),
            map(tuple, contexts(one)),
            strict=True,
        )
        for order, count in zip(one.orders.tolist(), one.counts.tolist(), strict=True):
            assert count > 0
            assert tuple(order) not in found, "a rollout lies in one bin alone"
            found[tuple(order)] = [next(columns) for _ in range(count)]
        assert next(columns, None) is None
    return found


def expected(batch: Batch) -> dict[tuple[int, int], list[tuple[Any, ...]]]:
    """The same, from the batch."""
    found = {}
    trained = sum(len(s.positions) > 0 for s in batch.sequences)
    for s in batch.sequences:
        weight = float(np.float32(1 / (max(1, len(s.positions)) * max(1, trained))))
        rows = zip(
            s.tokens[s.positions].tolist(),
            s.positions.tolist(),
            s["rollout_logprobs"].tolist(),
            s["advantages"].tolist(),
            s["versions"].tolist(),
            strict=True,
        )
        said = [
            (
                target,
                position,
                logprob,
                advantage,
                weight,
                version,
                tuple(s.tokens[:position].tolist()),
            )
            for target, position, logprob, advantage, version in rows
        ]
        if said:
            found[s.order] = said
    return found


@given(batches(), st.integers(1, 300), st.integers(1, 4), st.booleans())
def test_what_is_packed_is_what_came(batch: Batch, budget: int, ranks: int, share: bool) -> None:
    packed = pack(batch, budget, ranks, share)
    assert unpacked([one for share_of_rank in packed for one in share_of_rank]) == expected(batch)
    assert len(packed) == ranks
    assert len({len(share_of_rank) for share_of_rank in packed}) == 1, (
        "every rank takes part in as many passes"
    )


@given(batches(), st.integers(1, 300), st.integers(1, 4), st.booleans())
def test_bins_keep_to_their_budget(batch: Batch, budget: int, ranks: int, share: bool) -> None:
    for one in (
        one for share_of_rank in pack(batch, budget, ranks, share) for one in share_of_rank
    ):
        assert len(one.tokens) == int(one.lengths.sum())
        assert one.packing.nested, "deterministic attention needs it"
        assert len(one.tokens) <= budget or len(one.counts) == 1 or one.empty
        rows = one.packing.key_rows  # what attention lays keys and values out by
        keys = len(one.tokens) if rows is None else len(rows)
        assert keys <= SEEN_PER_TOKEN * max(budget, len(one.tokens)), (
            "what the memory plan counts on"
        )
        if not share:
            assert one.packing.parents == (NO_PARENT,) * len(one.lengths)


@given(
    batches(),
    st.integers(1, 300),
    st.integers(1, 4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_order_of_arrival_does_not_matter(
    batch: Batch, budget: int, ranks: int, share: bool, random: Random
) -> None:
    count = 1 + max(s.order[0] for s in batch.sequences)
    places = random.sample(range(count), count)
    moved = sorted(
        (replace(s, order=(places[s.order[0]], s.order[1])) for s in batch.sequences),
        key=lambda s: s.order,
    )
    for ours, theirs in zip(
        pack(batch, budget, ranks, share), pack(Batch(moved), budget, ranks, share), strict=True
    ):
        for one, other in zip(ours, theirs, strict=True):
            for name, tensor in one.tensors().items():
                assert name == "orders" or torch.equal(
                    tensor.nan_to_num(9.0), other.tensors()[name].nan_to_num(9.0)
                )


@given(batches(), st.integers(1, 300), st.integers(1, 300))
def test_one_rank_that_shares_nothing_sees_the_sequences_in_one_order_whatever_the_budget(
    batch: Batch, one: int, other: int
) -> None:
    orders = [
        [order for part in pack(batch, budget, 1, False)[0] for order in part.orders.tolist()]
        for budget in (one, other)
    ]
    assert orders[0] == orders[1]


def cost(one: PackedBin) -> int:
    return 0 if one.empty else len(one.tokens) * PAIRS_PER_TOKEN + one.packing.attended_pairs


@given(batches(), st.integers(100, 600), st.integers(2, 4))
def test_ranks_have_about_the_same_to_do(batch: Batch, budget: int, ranks: int) -> None:
    """A bin outweighs another one by one sequence at most, unless that had no room for it. The
    ranks' sums differ by no more than two bins do.
    """
    packed = pack(batch, budget, ranks, share=False)
    bins = [one for share in packed for one in share]
    smallest = [min(one.lengths.tolist()) for one in bins]
    costs = [cost(one) for one in bins]
    for i, heavy in enumerate(bins):
        for j, light in enumerate(bins):
            last = smallest[i] * PAIRS_PER_TOKEN + smallest[i] * (smallest[i] + 1) // 2
            has_room = light.empty or len(light.tokens) + smallest[i] <= budget
            assert heavy.empty or not has_room or costs[i] - last <= costs[j]
    totals = [sum(cost(one) for one in share) for share in packed]
    assert max(totals) - min(totals) <= max(costs, default=0) - min(costs, default=0)


def test_of_passes_that_are_made_at_once_the_costlier_goes_to_the_rank_that_has_less() -> None:
    batch = Batch([rollout((i, 0), [i] * length, [1]) for i, length in enumerate((90, 80, 70, 60))])
    packed = pack(batch, 100, ranks=2, share=False)
    assert [[one.lengths.tolist() for one in share] for share in packed] == [
        [[90], [60]],
        [[80], [70]],
    ]


def test_a_prompt_is_forwarded_once_for_its_answers() -> None:
    prompt = [1] * 50
    batch = Batch(
        [rollout((0, i), [*prompt, 10 + i, 20 + i, 30 + i], [50, 51, 52]) for i in range(4)]
    )
    ((shared,),) = pack(batch, 1000)
    ((plain,),) = pack(batch, 1000, share=False)
    assert shared.lengths.tolist() == [50, 3, 3, 3, 3]
    assert shared.parents.tolist() == [NO_PARENT, 0, 0, 0, 0]
    assert (shared.sources == 49).sum() == 4, (
        "the prompt's last token predicts the first of each answer"
    )
    assert len(plain.tokens) == 4 * 53
    assert unpacked([shared]) == unpacked([plain])


def test_turns_are_shared_as_a_tree() -> None:
    prompt, turn = [1] * 40, [2] * 40
    rows = [[*prompt, 3], [*prompt, *turn, 4], [*prompt, *turn, 5]]
    ((one,),) = pack(
        Batch([rollout((0, i), row, [len(row) - 1]) for i, row in enumerate(rows)]), 1000
    )
    assert sorted(zip(one.lengths.tolist(), one.parents.tolist(), strict=True)) == [
        (1, 0),
        (1, 1),
        (1, 1),
        (40, -1),
        (40, 0),
    ]


@pytest.mark.parametrize(("length", "spans"), [(2 * LEAST_SAVING - 1, 2), (2 * LEAST_SAVING, 3)])
def test_little_in_common_is_not_worth_a_span(length: int, spans: int) -> None:
    rows = [[1] * length + [2] * 9, [1] * length + [3] * 9]
    assert len(prefix_tree([np.array(row) for row in rows]).spans) == spans


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=70), min_size=1, max_size=8))
def test_a_tree_holds_its_sequences_and_never_costs_more(rows: list[list[int]]) -> None:
    ordered = sorted((np.array(row, dtype=np.int64) for row in rows), key=reading_order)
    tree = prefix_tree(ordered)
    for row, end in zip(ordered, tree.ends, strict=True):
        parts, position = [], end
        while position != NO_PARENT:
            span = tree.spans[position]
            parts.append(ordered[span.sequence][span.begin : span.end])
            assert span.parent < position
            position = span.parent
        assert np.concatenate(parts[::-1]).tolist() == row.tolist()
    assert tree.tokens <= sum(map(len, rows))
    assert tree.pairs == sum(sum(range(span.begin + 1, span.end + 1)) for span in tree.spans)


def test_a_tree_may_be_as_deep_as_its_group_is_large() -> None:
    rows = sorted(
        (np.arange(2 * LEAST_SAVING * (n + 1), dtype=np.int64) for n in range(1500)),
        key=reading_order,
    )
    assert prefix_tree(rows).tokens == len(rows[-1])


@pytest.mark.parametrize(
    ("answer", "budget", "tokens"),
    [
        (100, 500, [500, 500]),  # 900 tokens
        (10, 300, [140, 140]),  # 180 tokens, but their spans see 100 + 8 · 110 keys
        (10, 490, [180]),
    ],
)
def test_a_group_that_does_not_fit_is_split_with_a_prompt_for_each_part(
    answer: int, budget: int, tokens: list[int]
) -> None:
    batch = Batch([rollout((0, i), [*([1] * 100), *([10 + i] * answer)], [100]) for i in range(8)])
    (bins,) = pack(batch, budget)
    assert [len(one.tokens) for one in bins] == tokens
    assert all(one.lengths[0] == 100 for one in bins)


@given(batches(), st.integers(1, 300))
def test_what_is_shared_never_needs_more_room_than_it_would_apart(
    batch: Batch, budget: int
) -> None:
    """A batch that fits one bin unshared fits one shared: of the keys that spans see, no more than
    half are inner spans'.
    """
    assert len(pack(batch, max(budget, sum(len(s.tokens) for s in batch.sequences)))[0]) <= 1


@pytest.mark.parametrize(("groups", "parts"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_ranks_share_a_group_rather_than_watch_one_of_them(groups: int, parts: int) -> None:
    batch = Batch(
        [
            rollout((g, i), [g] * 40 + [10 + i] * 100, [139])
            for g in range(groups)
            for i in range(16)
        ]
    )
    packed = pack(batch, 100_000, ranks=4)
    tokens = [sum(len(one.tokens) for one in share) for share in packed]
    assert tokens == [(groups * (1600 + parts * 40)) // 4] * 4, (
        "no more copies of the prompt than ranks need"
    )


def test_a_sequence_longer_than_the_budget_has_a_bin_of_its_own() -> None:
    batch = Batch([rollout((i, 0), [i] * length, [1]) for i, length in enumerate((500, 20, 30))])
    assert [one.lengths.tolist() for one in pack(batch, 100)[0]] == [[500], [30, 20]]


def test_a_rank_without_work_takes_part_with_an_empty_bin() -> None:
    (ours,), (theirs,) = pack(Batch([rollout((0, 0), [1, 2, 3], [2])]), 100, ranks=2)
    assert (ours.empty, theirs.empty) == (False, True)
    assert theirs.packing.tokens == 1
    assert theirs.sequences is None
    assert theirs.reference_pass.tolist() == ours.reference_pass.tolist() == [1], (
        "it takes part in the reference's pass too"
    )
    nothing = empty_bin().tensors() | {"reference_pass": theirs.reference_pass}
    assert all(torch.equal(t, nothing[name]) for name, t in theirs.tensors().items())
    assert {name: t.dtype for name, t in ours.tensors().items()} == {
        name: t.dtype for name, t in theirs.tensors().items()
    }


def test_nothing_to_train_on_makes_no_bins() -> None:
    assert pack(Batch([rollout((0, 0), [1, 2], [])]), 100, ranks=2) == [[], []]


def test_figures_tell_environments_apart() -> None:
    batch = Batch(
        [
            replace(rollout((i, 0), [1, 2], [1]), score=float(i), env_id=env_id)
            for i, env_id in enumerate((0, 1, 1, 4, None, 2))
        ]
    )
    names = {"0": "maths: sums", "1": "maths_sums", "2": "maths: sums", "9": "elsewhere"}
    figures = figures_of(batch, [pack(batch, 1000)], version=5, environments=names)
    assert figures.rewards == {"maths_sums": 2.5, "maths_sums_2": 1.5, "environment_4": 3.0}
    row = figures.row()
    assert {key: value for key, value in row.items() if key.startswith("reward/")} == {
        "reward/maths_sums": 2.5, "reward/maths_sums_2": 1.5, "reward/environment_4": 3.0,
    }  # fmt: skip
    assert "rewards" not in row
    assert figures_of(Batch([rollout((0, 0), [1, 2], [1])]), [], version=5).rewards == {}


def test_the_success_rate_is_of_the_rollouts_that_say_so() -> None:
    said = [(0, True), (0, False), (0, None), (1, True), (None, False), (2, None)]
    batch = Batch(
        [
            replace(rollout((i, 0), [1, 2], [1]), env_id=env_id, success=success)
            for i, (env_id, success) in enumerate(said)
        ]
    )
    figures = figures_of(
        batch, [pack(batch, 1000)], version=5, environments={"0": "sums", "1": "maths"}
    )
    row = figures.row()
    assert row["success_rate"] == 0.5
    assert {name: value for name, value in row.items() if name.startswith("success/")} == {
        "success/sums": 0.5,
        "success/maths": 1.0,
    }
    assert "success_rates" not in row
    assert (
        figures_of(Batch([rollout((0, 0), [1, 2], [1])]), [], version=5).row()["success_rate"]
        is None
    )


def test_figures_count_what_is_forwarded_and_what_that_spares() -> None:
    batch = Batch(
        [rollout((0, i), [1] * 50 + [10 + i] * 5, list(range(50, 55))) for i in range(4)],
        ["group 9: bad"],
        2,
    )
    batch.sequences.append(
        replace(rollout((1, 0), [1, 2, 3], []), sampled=2, finish_reason="length")
    )
    batch.sequences[0] = replace(batch.sequences[0], finish_reason="stop")
    figures = figures_of(
        batch, [pack(batch, 1000, ranks=2)], version=5, lives=[TrainerSession(1, 0)]
    )
    assert (figures.reward_mean, figures.sequences, figures.tokens) == (1.2, 5, 20)
    assert (figures.groups_invalid, figures.sequences_too_long, figures.truncated_share) == (
        1,
        2,
        0.5,
    )
    assert (
        figures.response_length_mean,
        figures.response_length_p50,
        figures.response_length_max,
    ) == (4.4, 5.0, 5)
    assert (figures.age_mean, figures.age_max) == (2.0, 2)
    assert (figures.sequence_tokens, figures.forwarded_tokens, figures.bins) == (220, 2 * 60, 2)
    assert (figures.forwarded_targets, figures.zero_advantage_share) == (20, 0.0)
    assert figures.attended_pairs == 2 * (50 * 51 // 2 + 2 * (5 * 50 + 15))
    batch.sequences[1:4] = [
        s.with_fields(advantages=0 * s["advantages"]) for s in batch.sequences[1:4]
    ]
    settings: dict[str, Any] = {
        "tokens_per_bin": 1000,
        "ranks": 1,
        "normalisation": "token",
        "max_tokens": MAX_TOKENS,
    }
    less = pack_batch(batch, **settings, share_prefixes=True, forward_zero_advantages=False)
    figures = figures_of(batch, less, version=5)
    assert (figures.tokens, figures.forwarded_targets, figures.zero_advantage_share) == (
        20,
        5,
        0.75,
    )
    assert (figures.sequence_tokens, figures.forwarded_tokens) == (55, 55)
