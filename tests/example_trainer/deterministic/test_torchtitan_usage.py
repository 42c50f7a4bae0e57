"""The deterministic package as code written for TorchTitan's experiment uses it: names, signatures,
weights, a training.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from example_trainer.deterministic import (
    Packing,
    Qwen3ModelArgs,
    Qwen3StateDictAdapter,
    Qwen3VLLMCompatModel,
    VLLMRMSNorm,
    rms_norm_with_gradients,
    silu_and_mul_with_gradients,
    torchtitan_to_vllm_compat,
    vllm_compat_to_torchtitan,
)
from example_trainer.errors import ModelError
from vllm_patching.weights.families import parameters

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[3]
SIZES = {
    "dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 97,
    "head_dim": 16,
    "hidden_dim": 40,
}
VarlenMetadata = namedtuple("VarlenMetadata", ["cu_seq_q", "cu_seq_k", "max_q", "max_k"])


def arguments(**changed: object) -> Qwen3ModelArgs:
    return Qwen3ModelArgs(**{**SIZES, "max_seq_len": 64, "enable_weight_tying": True, **changed})  # type: ignore[arg-type]


def model_of(seed: int = 0, **changed: object) -> Qwen3VLLMCompatModel:
    torch.manual_seed(seed)
    model = Qwen3VLLMCompatModel(arguments(**changed), device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


TOKENS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(7))


def test_a_script_for_torchtitan_runs() -> None:
    """In a process of its own, because it pins torch's settings."""
    script = ROOT / "tests" / "example_trainer" / "deterministic" / "torchtitan_script.py"
    result = subprocess.run(
        [sys.executable, script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "learned" in result.stdout


class TestForward:
    def test_positions_from_0_on_change_no_bit(self) -> None:
        model = model_of()
        plain = model(TOKENS)
        assert plain.shape == (2, 12, 97)
        for positions in (
            torch.arange(12),
            torch.arange(12).unsqueeze(0),
            torch.arange(12).expand(2, 12),
        ):
            assert torch.equal(model(TOKENS, attention_masks=None, positions=positions), plain)

    def test_positions_rotate_and_mask_nothing(self) -> None:
        model = model_of()
        plain, shifted = model(TOKENS), model(TOKENS, positions=torch.arange(5, 17))
        assert not torch.equal(plain, shifted)
        torch.testing.assert_close(
            plain, shifted, rtol=1e-4, atol=1e-4
        )  # a rotation depends on distances alone
        stretched = model(TOKENS, positions=3 * torch.arange(12))
        assert (stretched - plain)[:, 2:].abs().max() > 1e-2

    def test_documents_are_apart(self) -> None:
        model = model_of()
        bounds = torch.tensor([0, 5, 12, 12, 24], dtype=torch.int32)
        masks = VarlenMetadata(bounds, bounds, 12, 12)
        together = model(TOKENS, attention_masks=masks)
        flat = TOKENS.flatten()
        alone = torch.cat(
            [model(flat[a:b].unsqueeze(0))[0] for a, b in ((0, 5), (5, 12), (12, 24))]
        )
        assert torch.equal(together.flatten(0, 1), alone)

    def test_a_packing_gives_hidden_states(self) -> None:
        model = model_of()
        hidden = model(TOKENS.flatten(), Packing([12, 12]))
        assert hidden.shape == (24, 48)
        logits = F.linear(hidden, model.output_weight).view(2, 12, 97)
        torch.testing.assert_close(logits, model(TOKENS))

    @pytest.mark.parametrize(
        ("tokens", "given", "error", "message"),
        [
            (TOKENS[0], {}, ValueError, r"tokens \(12,\): give \[batch, length\]"),
            (
                TOKENS,
                {"attention_masks": torch.ones(12, 12)},
                ValueError,
                "attention_masks of type Tensor: .*give None",
            ),
            (
                TOKENS,
                {"attention_masks": VarlenMetadata(torch.tensor([0, 5]), None, 5, 5)},
                ValueError,
                r"cu_seq_q \[0, 5\] does not fit 2 rows of 12 tokens",
            ),
            (
                TOKENS,
                {"positions": torch.arange(11)},
                ValueError,
                r"positions \(11,\) do not fit tokens \(2, 12\)",
            ),
            (
                TOKENS,
                {"positions": torch.arange(60, 72)},
                ModelError,
                "positions 60 to 71 are not within max_seq_len, 64",
            ),
            (
                TOKENS,
                {"positions": torch.arange(-1, 11)},
                ModelError,
                "positions -1 to 10 are not within",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, tokens: Tensor, given: dict, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            model_of()(tokens, **given)


class TestInitialWeights:
    def test_a_model_made_on_meta_is_materialised(self) -> None:
        with torch.device("meta"):
            model = Qwen3VLLMCompatModel(arguments())
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        model.init_weights(buffer_device=torch.device("cpu"))
        torch.manual_seed(3)
        direct = Qwen3VLLMCompatModel(arguments(), device="cpu")
        assert torch.equal(model.rotary, direct.rotary)
        assert torch.equal(model(TOKENS), direct(TOKENS))

    @pytest.mark.parametrize("depth_init", [True, False])
    def test_what_adds_to_the_residual_is_smaller(self, depth_init: bool) -> None:
        torch.manual_seed(0)
        model = Qwen3VLLMCompatModel(
            arguments(dim=256, hidden_dim=256, depth_init=depth_init), device="cpu"
        )
        for number, layer in enumerate(model.model.layers):
            expected = 0.02 / math.sqrt(2 * (number + 1 if depth_init else 2))
            assert float(layer.mlp.down_proj.weight.detach().std()) == pytest.approx(
                expected, rel=0.05
            )
            assert float(layer.mlp.gate_up_proj.weight.detach().std()) == pytest.approx(
                0.02, rel=0.05
            )

    def test_a_cast_makes_the_rotary_table_again(self) -> None:
        model = model_of().to(torch.bfloat16)
        assert torch.equal(
            model.rotary, Qwen3VLLMCompatModel(arguments(), torch.bfloat16, "cpu").rotary
        )


class TestWeights:
    @pytest.mark.parametrize("tied", [True, False])
    def test_they_survive_each_naming(self, tied: bool) -> None:
        model = model_of(enable_weight_tying=tied)
        state, adapter = model.state_dict(), Qwen3StateDictAdapter(model.model_args)
        hf, titan = adapter.to_hf(state), adapter.to_torchtitan(state)
        assert hf.keys() == {
            part.name for planned in parameters(model.geometry).values() for part in planned.parts
        }
        assert titan.keys() == vllm_compat_to_torchtitan(state).keys()
        assert titan["layers.1.attention.wk.weight"].shape == (32, 48)
        assert torch.equal(
            titan["layers.1.feed_forward.w3.weight"],
            state["model.layers.1.mlp.gate_up_proj.weight"][40:],
        )
        merged = dict(titan)
        for layer in range(2):
            at = f"layers.{layer}.feed_forward"
            merged[f"{at}.gate_up_proj.weight"] = torch.cat(
                [merged.pop(f"{at}.{name}.weight") for name in ("w1", "w3")]
            )
            merged[f"{at}.down_proj.weight"] = merged.pop(f"{at}.w2.weight")
        for named in (state, hf, titan, merged, torchtitan_to_vllm_compat(titan)):
            other = model_of(seed=1, enable_weight_tying=tied)
            other.load_state_dict(named)
            assert torch.equal(other(TOKENS), model(TOKENS))
        assert not {value.data_ptr() for value in titan.values()} & {
            value.data_ptr() for value in state.values()
        }

    @pytest.mark.parametrize("strict", [True, False])
    def test_unknown_names_alone_load_nothing_and_say_so(self, strict: bool) -> None:
        with pytest.raises(
            ModelError, match="none of 1 weights has a name of vLLM, Hugging Face or TorchTitan"
        ):
            model_of().load_state_dict({"transformer.h.0.weight": torch.ones(1)}, strict=strict)

    def test_what_is_missing_is_named(self) -> None:
        model = model_of()
        titan = vllm_compat_to_torchtitan(model.state_dict())
        del titan["layers.0.attention.wk.weight"]
        with pytest.raises(
            ModelError,
            match=r"qkv_proj.weight is made of 3 weights, and .*k_proj\.weight is missing",
        ):
            model.load_state_dict(titan)
        with pytest.raises(ModelError, match=r"there is no model\.embed_tokens\.weight"):
            torchtitan_to_vllm_compat({"norm.weight": torch.ones(48)})

    def test_tied_and_untied_weights_are_told_apart(self) -> None:
        tied = vllm_compat_to_torchtitan(model_of().state_dict())
        assert torch.equal(tied["output.weight"], tied["tok_embeddings.weight"])
        alone = {name: value for name, value in tied.items() if name != "output.weight"}
        with pytest.raises(ModelError, match="enable_weight_tying=True"):
            model_of(enable_weight_tying=False).load_state_dict(alone, strict=False)
        tied["output.weight"] += 1
        with pytest.raises(ModelError, match="enable_weight_tying=False"):
            model_of().load_state_dict(tied)


@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16), (2, 3, 4, 16), (0, 16)])
def test_the_norm_takes_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = VLLMRMSNorm(16, eps=1e-5)
    with torch.no_grad():
        norm.weight.mul_(torch.rand(16) + 0.5)
    x = torch.randn(shape, requires_grad=True)
    wide, weight = (
        x.detach().double().requires_grad_(),
        norm.weight.detach().double().requires_grad_(),
    )
    wanted = F.rms_norm(wide, (16,), weight, eps=1e-5)
    found = norm(x)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(found, rms_norm_with_gradients(x, norm.weight, 1e-5))
    slope = torch.randn(shape)
    for ours, right in zip(
        torch.autograd.grad(found, (x, norm.weight), slope),
        torch.autograd.grad(wanted, (wide, weight), slope.double()),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-5)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(16))


def test_the_activation_takes_the_gate_first() -> None:
    x = torch.randn(2, 3, 10)
    torch.testing.assert_close(silu_and_mul_with_gradients(x), F.silu(x[..., :5]) * x[..., 5:])
