"""The decoder computes what transformers computes."""

from __future__ import annotations

import pytest
import torch

from example_trainer.deterministic.pairing import deterministic_decoder
from example_trainer.errors import ModelError
from example_trainer.models import Decoder, load_model
from example_trainer.models.decoder import Choose
from example_trainer.models.hf_checkpoint import read_geometry
from example_trainer.models.packing import Packing
from example_trainer.models.shards import Split
from tests.example_trainer.models.conftest import CASES, MakeCheckpoint
from tests.geometries import geometry_of


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, make_checkpoint: MakeCheckpoint) -> None:
    folder, reference = make_checkpoint(case)
    model = load_model(str(folder), torch.float32)
    tokens = torch.randint(
        0, model.geometry.vocab_size, (3, 200), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        ours, theirs = model.logits(tokens), reference(tokens).logits
    assert theirs.std() > 0.5, (
        "the comparison would say little about a model whose logits are all alike"
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_invariant_table_gives_the_logits_of_transformers_too(
    case: str, make_checkpoint: MakeCheckpoint
) -> None:
    folder, reference = make_checkpoint(case)
    if read_geometry(folder)[0].inexact:
        with pytest.raises(
            ModelError, match="has no deterministic mode yet; train without --deterministic"
        ):
            load_model(str(folder), torch.float32, make=deterministic_decoder)
        return
    model = load_model(str(folder), torch.float32, make=deterministic_decoder)
    tokens = torch.randint(
        0, model.geometry.vocab_size, (2, 20), generator=torch.Generator().manual_seed(6)
    )
    with torch.no_grad():
        torch.testing.assert_close(
            model.logits(tokens), reference(tokens).logits, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("case", ["qwen2-tied", "qwen3-untied", "llama-biases", "qwen3-moe"])
def test_gradients_equal_those_of_transformers(case: str, make_checkpoint: MakeCheckpoint) -> None:
    folder, reference = make_checkpoint(case)
    model = load_model(str(folder), torch.float32)
    tokens = torch.randint(
        0, model.geometry.vocab_size, (2, 40), generator=torch.Generator().manual_seed(2)
    )
    model.logits(tokens).logsumexp(-1).sum().backward()
    reference(tokens).logits.logsumexp(-1).sum().backward()
    theirs = dict(reference.named_parameters())
    ours = dict(model.named_parameters())
    assert all(parameter.grad is not None for parameter in ours.values())
    at = "model.layers.1.self_attn"
    fused = torch.cat([theirs[f"{at}.{name}_proj.weight"].grad for name in "qkv"])
    torch.testing.assert_close(ours[f"{at}.qkv_proj.weight"].grad, fused, atol=1e-4, rtol=1e-4)
    embedding = "model.embed_tokens.weight"
    torch.testing.assert_close(ours[embedding].grad, theirs[embedding].grad, atol=1e-4, rtol=1e-4)
    mlp = "model.layers.0.mlp"
    if f"{mlp}.gate.weight" in ours:
        for mine, its in {
            "gate.weight": "gate.weight",
            "experts.w13_weight": "experts.gate_up_proj",
            "experts.w2_weight": "experts.down_proj",
        }.items():
            expected = theirs[f"{mlp}.{its}"].grad
            assert expected.abs().max() > 1e-2
            torch.testing.assert_close(ours[f"{mlp}.{mine}"].grad, expected, atol=1e-4, rtol=1e-4)


def test_the_choice_of_experts_can_be_given_and_read(make_checkpoint: MakeCheckpoint) -> None:
    folder, _ = make_checkpoint("qwen3-moe-dense-layers")
    model = load_model(str(folder), torch.float64)
    tokens, packing = torch.arange(30) % 97, Packing([20, 10])
    seen: dict[int, torch.Tensor] = {}

    def record(
        layer: int, logits: torch.Tensor, packing: Packing, choose: Choose
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, seen[layer] = choose(logits)
        return weights, seen[layer]

    def replay(
        layer: int, logits: torch.Tensor, packing: Packing, choose: Choose
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return choose(logits, chosen=replayed[layer])

    plain = model(tokens, packing)
    model.arithmetic.routing = record
    assert torch.equal(model(tokens, packing), plain)
    assert {layer: chosen.shape for layer, chosen in seen.items()} == {1: (30, 1)}
    model.arithmetic.routing, replayed = replay, dict(seen)
    assert torch.equal(model(tokens, packing), plain)
    replayed = {layer: (chosen + 1) % 4 for layer, chosen in seen.items()}
    assert not torch.allclose(model(tokens, packing), plain)


def test_each_sequence_is_computed_as_if_alone(make_checkpoint: MakeCheckpoint) -> None:
    folder, _ = make_checkpoint("qwen3-untied")
    model = load_model(str(folder), torch.float32)
    tokens = torch.randint(0, 97, (41,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        together = model(tokens, Packing([30, 1, 10]))
        for begin, end in ((0, 30), (30, 31), (31, 41)):
            alone = model(tokens[begin:end], Packing([end - begin]))
            torch.testing.assert_close(together[begin:end], alone, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(model(tokens, Packing([41]))[30:], together[30:], atol=1e-2), (
            "the spans would not matter"
        )


@pytest.mark.parametrize("case", ["llama-tied-llama3", "qwen3-moe"])
def test_recomputing_activations_gives_the_same_gradients(
    case: str, make_checkpoint: MakeCheckpoint
) -> None:
    folder, _ = make_checkpoint(case)
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(4))
    gradients = []
    for recompute in (False, True):
        model = load_model(str(folder), torch.float32)
        model.gradient_checkpointing = recompute
        model(tokens, Packing([15, 25])).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        if name == "lm_head.weight":  # the hidden states do not depend on it
            continue
        assert torch.equal(gradient, gradients[1][name]), name


def test_a_sequence_beyond_the_last_position_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    folder, _ = make_checkpoint("llama-untied")
    model = load_model(str(folder), torch.float32)
    with pytest.raises(
        ModelError, match=r"257 tokens exceeds the model's 256 positions; lower --seq-len"
    ):
        model(torch.zeros(257, dtype=torch.long), Packing([200, 57], parents=[-1, 0]))


def test_joint_norms_of_queries_are_refused_on_split_ranks() -> None:
    geometry = geometry_of("Olmo2", 1, 8, 6, 4, 2, 2, 10)
    with pytest.raises(ModelError, match=r"split over 2 ranks .* or without --single-copy"):
        Decoder(geometry, torch.float32, split=Split(0, 2))


def test_bfloat16_stays_close_to_float32(make_checkpoint: MakeCheckpoint) -> None:
    folder, reference = make_checkpoint("qwen3-tied-mqa")
    model = load_model(str(folder), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    tokens = torch.randint(0, 97, (2, 50), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours, theirs = model.logits(tokens), reference(tokens).logits
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - theirs).pow(2).mean().sqrt() < 0.05 * theirs.std()
