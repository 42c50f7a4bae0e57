"""Models of transformers, packed, against transformers' own model of each sequence alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_outputs import CausalLMOutput

from example_trainer.errors import ModelError
from example_trainer.models import load_model, save_model
from example_trainer.models.hf_checkpoint import (
    SINGLE_FILE,
    make_whole,
    read_geometry,
    read_weights,
)
from example_trainer.models.packing import Packing
from example_trainer.models.transformers_layout import transformers_geometry
from example_trainer.models.transformers_model import TransformersModel
from example_trainer.observe.perf import matrix_elements
from tests.example_trainer.models.transformers_cases import CONFIGS, SAMPLE, checkpoint

LENGTHS = (9, 1, 17, 3)


@pytest.fixture(params=SAMPLE)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def loaded(name: str, dtype: torch.dtype = torch.float32) -> TransformersModel:
    model = load_model(str(checkpoint(name)), dtype)
    assert isinstance(model, TransformersModel)
    return model


def tokens_of(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, 90, (2, sum(LENGTHS)), generator=generator)
    return tokens, targets


def alone(
    model: transformers.PreTrainedModel, tokens: torch.Tensor, targets: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies of each sequence forwarded by itself."""
    rows = [model(input_ids=one[None]).logits[0] for one in tokens.split(LENGTHS)]
    logprobs = (torch.cat(rows) / scale).log_softmax(-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("recomputed", [False, True])
def test_packed_logprobs_and_gradients_are_those_of_the_sequences_alone(
    name: str, recomputed: bool
) -> None:
    model, (tokens, targets) = loaded(name), tokens_of()
    kind = getattr(transformers, model.geometry.architecture)
    reference = kind.from_pretrained(checkpoint(name), dtype=torch.float32).eval()
    model.gradient_checkpointing = recomputed
    packing = Packing(LENGTHS)
    logprobs, entropy = model.chosen_logprobs(
        model(tokens, packing), targets, packing, 7, torch.full((len(targets),), 1.5), True
    )
    expected = alone(reference, tokens, targets, 1.5)
    torch.testing.assert_close((logprobs, entropy), expected, atol=1e-5, rtol=0)

    mixed = torch.randn(len(targets))
    (mixed * logprobs + entropy).sum().backward()
    (mixed * expected[0] + expected[1]).sum().backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
    for key, parameter in reference.named_parameters():
        if key in gradients:
            torch.testing.assert_close(gradients.pop(key), parameter.grad, atol=1e-4, rtol=1e-4)
        else:
            assert parameter.grad is None, key
    assert not gradients


def test_a_pass_in_bfloat16_is_as_near_to_float32_as_that_of_transformers(name: str) -> None:
    folder, (tokens, targets) = checkpoint(name, torch.bfloat16), tokens_of()
    model = load_model(str(folder), torch.bfloat16)
    packing = Packing(LENGTHS)
    hidden = model(tokens, packing)
    assert hidden.dtype is torch.bfloat16
    logprobs, _ = model.chosen_logprobs(hidden, targets, packing)
    kind = getattr(transformers, model.geometry.architecture)
    with torch.no_grad():
        exact, theirs = (
            alone(kind.from_pretrained(folder, dtype=dtype).eval(), tokens, targets, 1.0)[0].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    errors = [float((one.detach() - exact).abs().mean()) for one in (logprobs, theirs)]
    assert errors[0] < 1.5 * errors[1] + 1e-3
    logprobs.sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is None or bool(parameter.grad.isfinite().all()), key


def test_a_checkpoint_is_read_and_written_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = loaded(name)
    save_model(model, tmp_path)
    before, after = load_file(checkpoint(name) / SINGLE_FILE), load_file(tmp_path / SINGLE_FILE)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key


def test_a_tensor_that_a_16_bit_checkpoint_holds_in_float32_stays_so(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint("Qwen3Next", torch.bfloat16), source)
    tensors = load_file(source / SINGLE_FILE)
    wide = {key: tensor.float() for key, tensor in tensors.items() if key.endswith("A_log")}
    assert wide
    tensors |= {key: tensor * 1.001 for key, tensor in wide.items()}
    save_file(tensors, source / SINGLE_FILE)
    model = load_model(str(source), torch.bfloat16)
    save_model(model, tmp_path / "saved")
    written = load_file(tmp_path / "saved" / SINGLE_FILE)
    for key, tensor in tensors.items():
        assert written[key].dtype == tensor.dtype
        assert torch.equal(written[key], tensor), key


def test_float32_weights_that_the_class_cannot_take_are_computed_in_16_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    source = tmp_path / "source"
    shutil.copytree(checkpoint("Qwen3Next", torch.bfloat16), source)
    tensors = load_file(source / SINGLE_FILE)
    wide = {key for key in tensors if key.endswith(("A_log", "k_proj.weight"))}
    tensors |= {key: tensors[key].float() for key in wide}
    save_file(tensors, source / SINGLE_FILE)
    model, (tokens, targets) = load_model(str(source), torch.bfloat16), tokens_of()
    assert "the checkpoint holds 1 weights in float32, and transformers' Qwen3Next" in caplog.text
    for key, parameter in model.named_parameters():
        expected = torch.float32 if key.endswith("A_log") else torch.bfloat16
        assert parameter.dtype is expected, key
    packing = Packing(LENGTHS)
    logprobs, _ = model.chosen_logprobs(model(tokens, packing), targets, packing)
    logprobs.sum().backward()
    save_model(model, tmp_path / "saved")
    for key, tensor in load_file(tmp_path / "saved" / SINGLE_FILE).items():
        assert tensor.dtype is tensors[key].dtype, key
        assert torch.equal(tensor, tensors[key]), key


def test_the_parts_beside_the_text_are_frozen() -> None:
    model = loaded("Qwen2_5_VL")
    frozen = [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen
    assert all(".visual." in key for key in frozen)
    assert model.geometry.media_tokens == {90, 91}


def test_a_model_that_would_carry_state_over_forwards_one_sequence_per_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    model = loaded("Qwen3Next")
    assert model.way == "one per row"
    assert "Qwen3NextForCausalLM does not keep packed ones apart" in caplog.text
    model.way = "packed"
    assert carries_state_or_refuses(model)


def carries_state_or_refuses(model: TransformersModel) -> bool:
    """transformers refuses packed sequences from 5.20 on, and before carried the state over."""
    try:
        return bool(model._reached()[:5].all())
    except ValueError as error:
        return "packed sequences" in str(error)


def test_blocks_that_are_counted_along_a_row_are_not_packed() -> None:
    model, (tokens, targets) = loaded("DeepseekV4"), tokens_of()
    assert model.way == "one per row"
    reference = transformers.DeepseekV4ForCausalLM.from_pretrained(checkpoint("DeepseekV4")).eval()
    packing = Packing(LENGTHS)
    with torch.no_grad():
        found = model.chosen_logprobs(model(tokens, packing), targets, packing)
        expected = alone(reference, tokens, targets, 1.0)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_a_table_of_ids_is_saved_in_whole_numbers(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint("DeepseekV4", torch.bfloat16), source)
    tensors = load_file(source / SINGLE_FILE)
    tensors["model.layers.0.ffn.gate.tid2eid"] += 257  # no number of bfloat16
    save_file(tensors, source / SINGLE_FILE)
    model = make_whole(read_geometry(source)[0], torch.bfloat16, torch.device("cpu"))
    read_weights(model, source)
    save_model(model, tmp_path / "saved")
    for key, tensor in load_file(tmp_path / "saved" / SINGLE_FILE).items():
        assert tensor.dtype is tensors[key].dtype, key
        assert torch.equal(tensor, tensors[key]), key


def test_a_way_that_gives_hidden_states_of_another_shape_is_not_chosen() -> None:
    model = loaded("BioGpt")
    assert model.way == "one per row"
    model.way = "packed for media"
    with pytest.raises(ValueError, match=r"hidden states have the shape \[4, 1, 9, 32\]"):
        model._reached()


def test_attention_alone_is_packed() -> None:
    assert loaded("Mixtral").way == "packed"


def test_a_batch_without_targets_gives_the_head_a_gradient_of_zeros() -> None:
    for name in ("Gemma2", "Mixtral"):
        model, (tokens, targets) = loaded(name), tokens_of()
        hidden = model(tokens, Packing(LENGTHS))
        logprobs, entropy = model.chosen_logprobs(hidden[:0], targets[:0], None)
        assert logprobs.shape == entropy.shape == (0,)
        logprobs.sum().backward()
        assert model.output_weight.grad is not None
        assert not model.output_weight.grad.any()


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        load_model(str(folder), torch.float32)
    assert "\n" not in str(error.value)
    return str(error.value)


def changed(tmp_path: Path, **keys: object) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(checkpoint("Mixtral"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def test_an_architecture_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    error = refused(changed(tmp_path, architectures=["NewestForCausalLM"]))
    assert "architecture NewestForCausalLM is not in transformers" in error
    assert "use a newer transformers" in error


@pytest.mark.parametrize(
    ("name", "published"),
    [("ExaoneMoe", "ExaoneMoEForCausalLM"), ("Phimoe", "PhiMoEForCausalLM")],
)
def test_a_class_is_found_whose_name_differs_in_case(
    tmp_path: Path, name: str, published: str
) -> None:
    config = getattr(transformers, f"{name}Config")(
        **CONFIGS["Mixtral"] | {"sliding_window": 8}, architectures=[published]
    )
    config.save_pretrained(tmp_path)
    assert transformers_geometry(tmp_path).architecture == f"{name}ForCausalLM"


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling.NewestForCausalLM"}
    folder = changed(tmp_path, architectures=["NewestForCausalLM"], auto_map=auto_map)
    (folder / "modeling.py").write_text("raise SystemExit('it ran')\n")
    assert "comes with the checkpoint (auto_map), and code of checkpoints is never run" in refused(
        folder
    )


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    error = refused(changed(tmp_path, quantization_config={"quant_method": "mxfp4"}))
    assert "a quantised checkpoint cannot be trained; use the unquantised one" in error


def test_a_model_that_does_not_continue_text_is_refused(tmp_path: Path) -> None:
    error = refused(changed(tmp_path, architectures=["MixtralModel"]))
    assert "MixtralModel does not continue text" in error


def test_a_config_that_transformers_refuses_is_refused_in_one_line(tmp_path: Path) -> None:
    error = refused(changed(tmp_path, hidden_size="wide"))
    assert "transformers' MixtralForCausalLM refuses it" in error


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        ({"rope_type": "longrope"}, "'longrope' is not supported, since vLLM chooses its factors"),
        ({"rope_type": "newest"}, "transformers' GraniteForCausalLM refuses it: KeyError 'newest'"),
    ],
)
def test_rope_scaling_that_vllm_computes_otherwise_is_refused(
    rope: dict[str, object], reason: str, tmp_path: Path
) -> None:
    keys = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**CONFIGS["Cohere"] | {"logit_scale": None})
    ).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = keys | factors | rope
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refused(tmp_path)
    assert reason in error
    assert "model" in error.rpartition("; ")[2]


def test_logits_that_cannot_be_taken_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: object, inputs_embeds: torch.Tensor, use_cache: bool) -> None:
        raise TypeError("it wants images")

    monkeypatch.setattr(transformers.MixtralForCausalLM, "forward", forward)
    error = refused(checkpoint("Mixtral"))
    assert "makes logits in a way that cannot be taken apart from the rest (it wants" in error


def test_a_change_of_hidden_states_before_the_head_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(
        self: transformers.MixtralForCausalLM, inputs_embeds: torch.Tensor, use_cache: bool
    ) -> CausalLMOutput:
        hidden = self.model(inputs_embeds=inputs_embeds, use_cache=use_cache)[0]
        return CausalLMOutput(logits=self.lm_head(hidden.tanh()))

    monkeypatch.setattr(transformers.MixtralForCausalLM, "forward", forward)
    error = refused(checkpoint("Mixtral"))
    assert "taken apart from the rest (it changes hidden states before its head)" in error


def test_a_head_with_a_bias_behind_a_change_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    keys = {"vocab_size": 97, "intermediate_size": 48, "is_decoder": True}
    transformers.BertLMHeadModel(transformers.BertConfig(**sizes, **keys)).save_pretrained(tmp_path)
    assert "BertLMHeadModel makes logits in a way that cannot be taken apart" in refused(tmp_path)


def test_a_head_inside_of_another_module_is_refused(tmp_path: Path) -> None:
    config = transformers.XLMConfig(vocab_size=97, emb_dim=32, n_layers=1, n_heads=4)
    transformers.XLMWithLMHeadModel(config).save_pretrained(tmp_path)
    assert "it holds pred_layer.proj.bias inside of another module" in refused(tmp_path)


def test_a_head_with_other_rows_than_the_tokens_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_decoder_layers": 1, "num_decoder_attention_heads": 4}
    keys = {"vocab_size": 97, "decoder_ffn_dim": 48, "is_decoder": True}
    config = transformers.ProphetNetConfig(**sizes, **keys, is_encoder_decoder=False)
    transformers.ProphetNetForCausalLM(config).save_pretrained(tmp_path)
    assert "ProphetNetForCausalLM makes logits in a way that cannot be taken apart" in refused(
        tmp_path
    )


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    tensors = load_file(folder / SINGLE_FILE)
    expert = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del tensors[expert]
    save_file(tensors | {"model.extra.weight": torch.zeros(2)}, folder / SINGLE_FILE)
    error = refused(folder)
    assert f"missing {expert}; not expected model.extra.weight" in error


def test_names_without_the_prefix_of_the_model_below_the_head(tmp_path: Path) -> None:
    folder = tmp_path / "as-on-the-hub"
    shutil.copytree(checkpoint("GPT2"), folder)
    tensors = load_file(folder / SINGLE_FILE)
    bare = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    mask = torch.ones(1, 1, 64, 64)
    save_file(bare | {"h.0.attn.bias": mask}, folder / SINGLE_FILE)
    model = load_model(str(folder), torch.float32)
    save_model(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / SINGLE_FILE)
    assert saved.keys() == bare.keys()
    for key, tensor in saved.items():
        assert torch.equal(tensor, bare[key]), key


def test_an_incomplete_download_is_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    weights = (folder / SINGLE_FILE).read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for content in (weights[: len(weights) // 2], b"", pointer):
        (folder / SINGLE_FILE).write_bytes(content)
        error = refused(folder)
        assert error.startswith("cannot read the weights in ")
        assert error.endswith("; is the download complete?")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_packed_weights_are_refused_without_a_quantisation_in_the_config(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = changed(tmp_path)
    tensors = load_file(folder / SINGLE_FILE)
    key = "model.layers.0.self_attn.q_proj.weight"
    save_file(tensors | {key: tensors[key].to(dtype)}, folder / SINGLE_FILE)
    error = refused(folder)
    assert f"{key} is stored in" in error
    assert "a quantised checkpoint cannot be trained; use the unquantised one" in error


def test_tensors_that_transformers_ignores_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "with-draft"
    shutil.copytree(checkpoint("Qwen3Next"), folder)
    tensors = load_file(folder / SINGLE_FILE)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2)}, folder / SINGLE_FILE)
    assert r"^mtp.*" in read_geometry(folder)[0].ignored
    load_model(str(folder), torch.float32)


def test_a_token_is_multiplied_with_the_experts_that_it_goes_to() -> None:
    geometry = read_geometry(checkpoint("Mixtral"))[0]
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32
    router, expert = 4 * 32, 3 * 32 * 48
    assert matrix_elements(geometry) == 2 * (attention + router + 2 * expert)


def test_spans_that_share_prefixes_are_refused() -> None:
    model, (tokens, _) = loaded("Mixtral"), tokens_of()
    with pytest.raises(ValueError, match="share no prefixes"):
        model(tokens[:6], Packing([2, 2, 2], parents=[-1, 0, 0]))


def test_a_sequence_beyond_the_model_s_positions_is_refused() -> None:
    model = loaded("Mixtral")
    with pytest.raises(ModelError, match="exceeds the model's 64 positions"):
        model(torch.zeros(65, dtype=torch.int64), Packing([65]))
