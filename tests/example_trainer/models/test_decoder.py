"""The decoder computes what transformers computes."""

from __future__ import annotations

import pytest
import torch

from example_trainer.errors import ModelError
from example_trainer.models import load_model
from tests.example_trainer.models.conftest import CASES, MakeCheckpoint


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, make_checkpoint: MakeCheckpoint) -> None:
    folder, reference = make_checkpoint(case)
    model = load_model(str(folder), torch.float32)
    tokens = torch.randint(0, model.geometry.vocab_size, (3, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = model.logits(tokens), reference(tokens).logits
    assert theirs.std() > 0.5, "the comparison would say little about a model whose logits are all alike"
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("case", ["qwen2-tied", "qwen3-untied", "llama-biases"])
def test_gradients_equal_those_of_transformers(case: str, make_checkpoint: MakeCheckpoint) -> None:
    folder, reference = make_checkpoint(case)
    model = load_model(str(folder), torch.float32)
    tokens = torch.randint(0, model.geometry.vocab_size, (2, 40), generator=torch.Generator().manual_seed(2))
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


def test_heads_repeated_for_attention_give_the_same(make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As float32 does it on a GPU, whose kernels would otherwise keep length × length matrices."""
    folder, _ = make_checkpoint("qwen3-untied")
    model = load_model(str(folder), torch.float32)
    assert model.geometry.num_kv_heads < model.geometry.num_heads
    tokens = torch.randint(0, model.geometry.vocab_size, (2, 9))
    shared = model.logits(tokens)
    monkeypatch.setattr("example_trainer.models.decoder._repeats_heads", lambda q: True)
    torch.testing.assert_close(model.logits(tokens), shared, atol=1e-5, rtol=1e-5)


def test_padding_on_the_right_changes_nothing_before_it(make_checkpoint: MakeCheckpoint) -> None:
    folder, _ = make_checkpoint("qwen3-untied")
    model = load_model(str(folder), torch.float32)
    tokens = torch.randint(0, 97, (1, 30), generator=torch.Generator().manual_seed(3))
    padded = torch.cat([tokens, torch.zeros(1, 11, dtype=torch.long)], dim=1)
    other = torch.cat([tokens, torch.full((1, 11), 50)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model(padded)[:, :30], model(tokens), atol=1e-5, rtol=1e-5)
        assert not torch.equal(model(padded)[:, 30:], model(other)[:, 30:])


def test_recomputing_activations_gives_the_same_gradients(make_checkpoint: MakeCheckpoint) -> None:
    folder, _ = make_checkpoint("llama-tied-llama3")
    tokens = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(4))
    gradients = []
    for recompute in (False, True):
        model = load_model(str(folder), torch.float32)
        model.gradient_checkpointing = recompute
        model(tokens).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_a_sequence_beyond_the_last_position_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    folder, _ = make_checkpoint("llama-untied")
    model = load_model(str(folder), torch.float32)
    with pytest.raises(ModelError, match=r"257 tokens exceeds the model's 256 positions; lower --seq-len"):
        model(torch.zeros(1, 257, dtype=torch.long))


def test_bfloat16_stays_close_to_float32(make_checkpoint: MakeCheckpoint) -> None:
    folder, reference = make_checkpoint("qwen3-tied-mqa")
    model = load_model(str(folder), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    tokens = torch.randint(0, 97, (2, 50), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours, theirs = model.logits(tokens), reference(tokens).logits
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - theirs).pow(2).mean().sqrt() < 0.05 * theirs.std()
