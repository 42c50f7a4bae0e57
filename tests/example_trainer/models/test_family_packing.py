"""Packed spans and shared prefixes of every family: the sums of its sequences alone."""

from __future__ import annotations

import pytest
import torch

from example_trainer.models import load_model
from example_trainer.models.packing import NO_PARENT
from tests.example_trainer.models.conftest import CASES, MakeCheckpoint
from tests.example_trainer.models.test_packed_gradients import (
    Tree,
    packed_gradients,
    sequence_rows,
)

TREES = {
    "rows": Tree((40, 1, 9, 44), (NO_PARENT,) * 4),
    "equal rows": Tree((42, 42), (NO_PARENT,) * 2),
    "shared prefixes": Tree((40, 3, 9, 5), (NO_PARENT, 0, 0, 2)),
}
"""Sequences longer than the windows of the cases, and spans that see a part of their prefix."""


@pytest.mark.parametrize("totals", [False, True], ids=["autograd", "totals"])
@pytest.mark.parametrize("case", CASES)
def test_packed_sequences_count_as_they_do_alone(
    case: str, totals: bool, make_checkpoint: MakeCheckpoint
) -> None:
    folder, _ = make_checkpoint(case, torch.float64)
    model = load_model(str(folder), torch.float64)
    for kind, tree in TREES.items():
        tokens = torch.arange(sum(tree.lengths)) * 7 % 97
        loss, ours = packed_gradients(model, tree, tokens, totals)
        alone = 0.0
        sums = {name: torch.zeros_like(gradient) for name, gradient in ours.items()}
        for rows in sequence_rows(tree):
            model.zero_grad()
            one = Tree((len(rows),), (NO_PARENT,))
            part, gradients = packed_gradients(model, one, tokens[rows], totals)
            alone += part
            for name, gradient in gradients.items():
                sums[name] += gradient
        assert loss == pytest.approx(alone, rel=1e-10)
        model.zero_grad()
        for name, expected in sums.items():
            assert expected.isfinite().all(), name
            torch.testing.assert_close(
                ours[name],
                expected,
                atol=1e-9,
                rtol=1e-8,
                msg=lambda text, n=f"{kind}, {name}": f"{n}: {text}",
            )
