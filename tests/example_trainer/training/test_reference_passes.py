"""The reference in a step: what came along counts as if the trainer had computed it, and it
computes the rest.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from example_trainer.batch.groups import Rules, parse_batch, wire_row
from example_trainer.batch.packing import PackedBin
from example_trainer.models import Decoder
from example_trainer.training import step
from tests.example_trainer.training.test_step import (
    config,
    gradients_of,
    make_groups,
    make_model,
    packed,
)

OPTIONS = config(kl_coef=0.3, temperature=0.8)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Decoder, PackedBin]]:
    """Every pass of any model."""
    seen: list[tuple[Decoder, PackedBin]] = []
    real = step.response_logprobs

    def counted(model: Decoder, bin: PackedBin, *rest: Any) -> Any:
        seen.append((model, bin))
        return real(model, bin, *rest)

    monkeypatch.setattr(step, "response_logprobs", counted)
    return seen


def bins_of(groups: list[dict[str, Any]]) -> list[PackedBin]:
    return packed(parse_batch(groups, 64, 31, Rules(reference="optional")), OPTIONS)[0]


def scored(groups: list[dict[str, Any]], reference: Decoder) -> list[dict[str, Any]]:
    """The groups with the reference's logprobs in the very bins that they are trained in."""
    rows = [[[1.0] * len(row) for row in group["tokens"]] for group in groups]
    for bin in bins_of(groups):
        with torch.no_grad():
            found, _ = step.response_logprobs(reference, bin, bin.packing(), OPTIONS)
        counts = bin.counts.tolist()
        for (group, i), part, places in zip(
            bin.orders.tolist(), found.split(counts), bin.positions.split(counts), strict=True
        ):
            rows[group][i] = wire_row(len(rows[group][i]), places.numpy(), part.numpy())
    return [group | {"ref_logprobs": found} for group, found in zip(groups, rows, strict=True)]


def test_a_step_on_what_came_along_is_the_step_on_what_is_computed_here(
    passes: list[tuple[Decoder, PackedBin]],
) -> None:
    groups, reference = make_groups(2), make_model(seed=9)
    given = scored(groups, reference)
    own, own_row = gradients_of(bins_of(groups), OPTIONS, reference)
    passes.clear()
    found, row = gradients_of(bins_of(given), OPTIONS)  # no reference is there at all
    assert row == own_row
    assert row["reference_kl"] != 0
    assert all(torch.equal(found[name], own[name]) for name in own)
    assert all(model is not reference for model, _ in passes)


def test_the_reference_is_asked_for_the_missing_alone(
    passes: list[tuple[Decoder, PackedBin]],
) -> None:
    groups, reference = make_groups(4), make_model(seed=9)
    given = scored(groups, reference)
    mixed = [given[0], groups[1], given[2]]
    mixed[0]["ref_logprobs"][2] = [1.0] * len(given[0]["tokens"][2])
    passes.clear()
    found, row = gradients_of(bins_of(mixed), OPTIONS, reference)
    asked = [order for model, bin in passes if model is reference for order in bin.orders.tolist()]
    assert sorted(asked) == [[0, 2], [1, 0], [1, 1], [1, 2], [1, 3]]
    own, own_row = gradients_of(bins_of(groups), OPTIONS, reference)
    assert row["reference_kl"] == pytest.approx(own_row["reference_kl"], rel=1e-5)
    for name in own:
        torch.testing.assert_close(found[name], own[name], atol=1e-6, rtol=1e-4)


def test_what_is_missing_without_a_reference_is_said(
    passes: list[tuple[Decoder, PackedBin]],
) -> None:
    with pytest.raises(
        RuntimeError, match="without the reference's logprobs, and there is no reference"
    ):
        gradients_of(bins_of(make_groups(2)), OPTIONS)
