"""Our attention in transformers' models: the masks and arguments that it takes and refuses, and
that no table of tokens by tokens is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from example_trainer.models import load_model
from example_trainer.models.ops import reference
from example_trainer.models.packing import Packing
from example_trainer.models.transformers_activations import measure_activations
from example_trainer.models.transformers_attention import (
    NAME,
    Refused,
    Seen,
    attend,
    forwarding,
    seen,
)
from example_trainer.models.transformers_layout import transformers_geometry
from example_trainer.models.transformers_model import TransformersModel
from tests.example_trainer.models.transformers_cases import checkpoint

OURS = ("Cohere", "Cohere2", "DeepseekV3", "GPT2", "Mixtral", "Qwen2_5_VL", "Qwen3Next")
REFUSED = {"Gemma2": "softcap", "GptOss": "s_aux"}
PACKING = Packing([3, 5])


def loaded(name: str, dtype: torch.dtype = torch.float32) -> TransformersModel:
    model = load_model(str(checkpoint(name)), dtype)
    assert isinstance(model, TransformersModel)
    return model


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [one.numel() for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return found


def largest(model: TransformersModel) -> int:
    """The elements of the largest tensor of a pass over 960 tokens in both directions."""
    packing = Packing([8] * 120)
    with Largest() as found:
        model(torch.zeros(packing.tokens, dtype=torch.int64), packing).sum().backward()
    return found.elements


@pytest.mark.parametrize("name", OURS)
def test_causal_models_take_our_attention(name: str) -> None:
    assert loaded(name).attention == "ours (reference)"


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_attention_does_more_keep_one_of_transformers(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = loaded(name)
    expected = f"{model.parts.attention} (not ours: its attention has {REFUSED[name]})"
    assert model.parts.attention in ("eager", "sdpa")
    assert model.attention == expected
    assert f"attention is {expected}" in caplog.text


def test_a_model_may_choose_again() -> None:
    for name in ("Gemma2", "Mixtral"):
        model = loaded(name)
        before = model.attention
        model.choose_way()
        assert model.attention == before
        assert model.parts.attention != NAME


@pytest.mark.parametrize("name", ["Cohere2", "Mixtral"])
def test_no_tensor_has_a_number_for_each_pair_of_tokens(name: str) -> None:
    model, pairs = loaded(name), 960**2
    assert largest(model) < pairs
    model.parts.base.set_attn_implementation("sdpa")
    assert largest(model) >= pairs


@pytest.mark.parametrize("name", ["Cohere", "Mixtral"])
def test_what_is_kept_grows_with_tokens_alone(name: str) -> None:
    model = TransformersModel(transformers_geometry(checkpoint(name)), torch.float32)
    grown = measure_activations(model, torch.device("cpu"))
    assert all(layer.by_pair == 0 < layer.by_token for layer in (*grown.layers, grown.rest))


def asked(mask_function: Any, rows: int = 1, **others: Any) -> Seen:
    length = PACKING.tokens // rows
    with forwarding(reference, PACKING, rows):
        return seen(rows, length, length, mask_function, q_offset=0, device="cpu", **others)


def test_windows_are_read_from_the_mask_that_is_asked_for() -> None:
    causal, windowed = (
        masking_utils.causal_mask_function,
        masking_utils.sliding_window_causal_mask_function(4),
    )
    packed = masking_utils.packed_sequence_mask_function(PACKING.numbers[None])
    assert asked(causal) == Seen(reference, PACKING, 1, None)
    assert asked(masking_utils.and_masks(causal, packed)).window is None
    assert asked(masking_utils.and_masks(windowed, packed)).window == 4
    assert asked(windowed, rows=2) == Seen(reference, PACKING, 2, 4)


def test_other_masks_are_refused() -> None:
    utils = masking_utils
    causal, packed = (
        utils.causal_mask_function,
        utils.packed_sequence_mask_function(PACKING.numbers[None]),
    )
    chunked = utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    for mask in (
        chunked,
        utils.or_masks(causal, packed),
        utils.and_masks(causal, lambda *_: torch.tensor(True)),
        utils.bidirectional_mask_function,
        print,
    ):
        with pytest.raises(Refused, match="part of its own"):
            asked(mask)
    with pytest.raises(Refused, match="not causal"):
        asked(packed)
    with pytest.raises(Refused, match="masks tokens by itself"):
        asked(causal, attention_mask=torch.ones(1, 8, dtype=torch.bool))
    with forwarding(reference, PACKING), pytest.raises(Refused, match="1 rows of 8 by 9 tokens"):
        seen(1, 8, 9, causal)
    with pytest.raises(LookupError):
        seen(1, 8, 8, causal)


def attended(mask: object = None, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1, 4, 8, 6, generator=generator)
    k, v = torch.randn(2, 1, 2, 8, 6, generator=generator)
    mask = Seen(reference, PACKING, 1, None) if mask is None else mask
    found, weights = attend(nn.Identity(), q, k, v[..., :5], mask, **options)
    assert weights is None
    return found


@pytest.mark.parametrize("window", [None, 2])
def test_heads_of_unequal_and_odd_widths_are_attended_as_they_are(window: int | None) -> None:
    found = attended(Seen(reference, PACKING, 1, window), scaling=0.3, position_ids=PACKING)
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(4, 8, 6, generator=generator)
    k, v = torch.randn(2, 1, 2, 8, 6, generator=generator)[:, 0].repeat_interleave(2, dim=1)
    scores = 0.3 * q @ k.transpose(1, 2)
    places, numbers = torch.arange(8), PACKING.numbers
    distance = places[:, None] - places
    hidden = (numbers[:, None] != numbers) | (distance < 0) | (distance >= (window or 8))
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[..., :5]
    torch.testing.assert_close(found[0].transpose(0, 1), expected)


def test_scores_have_a_scale_of_their_own_if_none_is_given() -> None:
    assert torch.equal(attended(), attended(scaling=6**-0.5))
    assert not torch.equal(attended(), attended(scaling=1.0))


def test_what_changes_attention_is_refused() -> None:
    assert NAME == "lockstep"
    for options, reason in (
        ({"s_aux": torch.zeros(4)}, "has s_aux"),
        ({"softcap": 50.0, "indices": 3}, "has indices, softcap"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
    ):
        with pytest.raises(Refused, match=reason):
            attended(**options)
    attended(softcap=None, is_causal=True, dropout=0.0, sliding_window=3, output_attentions=False)
    with pytest.raises(Refused, match="a mask of its own, or none"):
        attended(torch.zeros(1, 1, 8, 8))
