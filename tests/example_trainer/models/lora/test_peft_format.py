"""Adapters on the disk: PEFT reads what is written here, the server reads what PEFT writes, and
what is neither is refused.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from example_trainer.errors import CheckpointError, ModelError
from example_trainer.models import Decoder, load_model
from example_trainer.models.lora.layers import adapters_of, attach_adapters
from example_trainer.models.lora.peft_format import AdapterWriter, check_same_adapter, peft_name
from example_trainer.models.lora.settings import LoraSettings
from tests.geometries import geometry_of
from vllm_patching.protocol.checksum import WeightSummary
from vllm_patching.transport.adapter_file import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterError,
    expected_shapes,
    open_adapter,
)
from vllm_patching.weights.families import PROJECTIONS, Geometry

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
NO_SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "glm4": lambda: Glm4ForCausalLM(Glm4Config(**SIZES, **NO_SPECIAL_TOKENS, head_dim=8)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES, **NO_SPECIAL_TOKENS)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **NO_SPECIAL_TOKENS, head_dim=8)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, **NO_SPECIAL_TOKENS)),
    "qwen3moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
        )
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
}
TOKENS = torch.arange(20).reshape(2, 10) % 31
SETTINGS = LoraSettings(4, 6.0, 0.1, PROJECTIONS)


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder: Path = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param]().float().save_pretrained(folder)
    return folder


def geometry(folder: Path) -> Geometry:
    return Geometry.from_config(json.loads((folder / "config.json").read_text()))


def adapted(
    base: Path, settings: LoraSettings = SETTINGS, dtype: torch.dtype = torch.float32
) -> Decoder:
    model = load_model(str(base), dtype)
    attach_adapters(model, settings)
    torch.manual_seed(3)
    for found in adapters_of(model):
        torch.nn.init.normal_(found.adapter.lora_B, 0, 0.2)
    return model.eval()


@pytest.mark.parametrize("targets", [PROJECTIONS, ("v_proj", "down_proj")])
def test_peft_loads_it_and_computes_the_same(
    base: Path, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    from peft import PeftModel

    if geometry(base).num_experts and targets != PROJECTIONS:
        targets = ("v_proj", "o_proj")
    settings = LoraSettings(4, 6.0, 0.1, targets)
    model = adapted(base, settings)
    AdapterWriter(model, settings, str(base)).write(tmp_path / "adapter")
    reference = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        without = reference(TOKENS).logits
        peft = PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()
        theirs, ours = peft(TOKENS).logits, model.logits(TOKENS)
    assert (theirs - ours).abs().max() < 1e-5
    assert (without - ours).abs().max() > 1e-2
    assert peft.peft_config["default"].target_modules == set(
        settings.of_model(model.geometry).targets
    )


def test_adapters_on_experts_are_refused_in_one_line() -> None:
    mixture = geometry_of("Qwen3Moe", 2, 16, 24, 4, 2, 8, 31)
    line = (
        "--lora-target-modules up_proj, down_proj: experts have no adapters; give all-linear, "
        "which leaves them as they are, or some of q_proj, k_proj, v_proj, o_proj"
    )
    targets = ("q_proj", "up_proj", "down_proj")
    with pytest.raises(ModelError, match=f"^{line}$"):
        replace(SETTINGS, targets=targets).of_model(mixture)
    assert SETTINGS.of_model(mixture).targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    # A layer without experts has an MLP, whose projections can have adapters.
    partly = geometry_of("Qwen3Moe", 2, 16, 24, 4, 2, 8, 31, mlp_only_layers=[0])
    assert replace(SETTINGS, targets=targets).of_model(partly).targets == targets


def test_the_server_reads_what_peft_saves(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    targets: str | list[str] = "all-linear"
    if geometry(base).num_experts:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    peft = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=4, lora_alpha=8, target_modules=targets),
    )
    peft.save_pretrained(tmp_path)
    file = open_adapter(tmp_path, geometry(base), max_rank=4)
    assert (file.rank, file.scale, file.dtype) == (4, 2.0, torch.float32)
    data = torch.empty(file.num_bytes, dtype=torch.uint8)
    file.read_into(data)
    tensors, saved = file.tensors(data.view(file.dtype)), load_file(tmp_path / WEIGHTS_FILE)
    assert len(saved) == 2 * len(tensors) == 2 * len(expected_shapes(geometry(base)))
    for projection, matrices in tensors.items():
        for matrix, tensor in matrices.items():
            assert torch.equal(tensor, saved[peft_name(projection, matrix)])


def test_the_file_holds_the_masters_rounded_and_its_checksum_is_what_the_server_finds(
    base: Path, tmp_path: Path
) -> None:
    model = adapted(base, dtype=torch.bfloat16)
    values = {
        name: p.detach().float() + 1e-3 for name, p in model.named_parameters() if p.requires_grad
    }
    writer = AdapterWriter(model, SETTINGS, str(base))
    written = writer.write(tmp_path, values)
    saved = load_file(tmp_path / WEIGHTS_FILE)
    assert len(saved) == writer.num_tensors == len(values)
    for found in adapters_of(model):
        for matrix in ("lora_A", "lora_B"):
            expected = values[found.parameter_name(matrix)].to(torch.bfloat16)
            assert torch.equal(saved[peft_name(found.projection, matrix)], expected)
    file = open_adapter(tmp_path, geometry(base), max_rank=8)
    data = torch.empty(file.num_bytes, dtype=torch.uint8)
    file.read_into(data)
    assert file.num_bytes == written.num_bytes == sum(t.nbytes for t in saved.values())
    assert file.summary(data.view(file.dtype)) == WeightSummary(written.checksum, "")
    data[1234] ^= 1
    assert file.summary(data.view(file.dtype)).checksum != written.checksum


@pytest.mark.parametrize("base", ["llama"], indirect=True)
def test_rank_stabilised_adapters_are_scaled_by_the_root_of_the_rank(
    base: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj"], use_rslora=True)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path)
    assert open_adapter(tmp_path, geometry(base), max_rank=4).scale == 8 / 2


def change_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / CONFIG_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_FILE)

    return rewrite


def cut_short(folder: Path) -> None:
    path = folder / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-100])


def no_header(folder: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", 1 << 40) + b"{}")


def change_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / WEIGHTS_FILE
        data = path.read_bytes()
        end = 8 + int(struct.unpack("<Q", data[:8])[0])
        header = json.loads(data[8:end])
        change(header[FIRST])
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])

    return rewrite


FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (
        lambda folder: (folder / CONFIG_FILE).unlink(),
        r"cannot read .*adapter_config\.json: No such file",
    ),
    "no weights": (
        lambda folder: (folder / WEIGHTS_FILE).unlink(),
        r"cannot read .*adapter_model\.safetensors: No such file",
    ),
    "config is no JSON": (
        lambda folder: (folder / CONFIG_FILE).write_text("{"),
        "is not PEFT's adapter_config.json",
    ),
    "config without rank": (
        lambda folder: (folder / CONFIG_FILE).write_text("{}"),
        "is not PEFT's adapter_config.json",
    ),
    "rank above the server's": (
        change_config(r=32),
        "rank 32 does not fit .* --max-lora-rank 16; start it with a larger",
    ),
    "rank unlike the tensors'": (
        change_config(r=8),
        r"has shape \[.*\], the served model wants \[",
    ),
    "other method": (change_config(peft_type="IA3"), "peft_type 'IA3' is not LORA"),
    "dora": (change_config(use_dora=True), "use_dora True is not supported"),
    "bias": (change_config(bias="all"), "bias 'all' is not supported"),
    "ranks of their own": (
        change_config(rank_pattern={"q_proj": 2}),
        "rank_pattern is not supported",
    ),
    "cut short": (cut_short, "holds .* bytes of data, its header describes"),
    "no header": (no_header, "is not a safetensors file, or was cut short"),
    "empty file": (
        lambda folder: (folder / WEIGHTS_FILE).write_bytes(b""),
        "is not a safetensors file, or was cut short",
    ),
    "partner missing": (
        change_tensors(lambda t: t.pop(FIRST)),
        r"down_proj has lora_B and not its partner",
    ),
    "layer too many": (
        change_tensors(lambda t: t.update({FIRST.replace("layers.0", "layers.2"): t.pop(FIRST)})),
        "has no place in the served model of 2 layers",
    ),
    "other width": (
        change_tensors(lambda t: t.update({FIRST: t[FIRST][:, :-1].contiguous()})),
        "the served model wants",
    ),
    "tensor without dtype": (change_header(lambda t: t.pop("dtype")), "is not a safetensors file"),
    "tensor without shape": (change_header(lambda t: t.pop("shape")), "is not a safetensors file"),
    "three offsets": (
        change_header(lambda t: t["data_offsets"].append(0)),
        "is not a safetensors file",
    ),
    "endless offset": (
        change_header(lambda t: t.update(data_offsets=[0, math.inf])),
        "is not a safetensors file",
    ),
    "scale that is no number": (change_config(lora_alpha=math.nan), "lora_alpha is nan"),
    "endless rank": (change_config(r=math.inf), "is not PEFT's adapter_config.json"),
    "two dtypes": (
        change_tensors(lambda t: t.update({FIRST: t[FIRST].half()})),
        "the tensors are of F16, F32 dtype",
    ),
    "odd name": (
        change_tensors(lambda t: t.update({"x": torch.zeros(1)})),
        "x is not PEFT's name of a LoRA matrix",
    ),
}


@pytest.mark.parametrize("base", ["qwen3"], indirect=True)
@pytest.mark.parametrize("kind", DAMAGE)
def test_what_cannot_be_served_is_refused_with_its_reason(
    base: Path, tmp_path: Path, kind: str
) -> None:
    AdapterWriter(adapted(base), SETTINGS, str(base)).write(tmp_path)
    open_adapter(tmp_path, geometry(base), max_rank=16)
    damage, message = DAMAGE[kind]
    damage(tmp_path)
    with pytest.raises(AdapterError, match=message) as refused:
        open_adapter(tmp_path, geometry(base), max_rank=16)
    assert "\n" not in str(refused.value)


def test_every_projection_of_the_model_has_its_shape(base: Path) -> None:
    weights = load_file(base / "model.safetensors")
    shapes = {
        name.removesuffix(".weight"): tuple(t.shape)[::-1]
        for name, t in weights.items()
        if "_proj.weight" in name and ".experts." not in name
    }
    assert expected_shapes(geometry(base)) == shapes


@pytest.mark.parametrize("base", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("settings", "dtype", "message"),
    [
        (
            LoraSettings(8, 6.0, 0.1, PROJECTIONS),
            torch.float32,
            "made with --lora-r 4, and this run has 8",
        ),
        (
            LoraSettings(4, 8.0, 0.1, PROJECTIONS),
            torch.float32,
            "made with --lora-alpha 6, and this run has 8.0",
        ),
        (
            LoraSettings(4, 6.0, 0.1, PROJECTIONS[:2]),
            torch.float32,
            "made with --lora-target-modules .*, and this run has k_proj q_",
        ),
        (
            LoraSettings(4, 6.0, 0.1, PROJECTIONS),
            torch.bfloat16,
            "made with --dtype F32, and this run has BF16",
        ),
    ],
)
def test_another_adapter_is_not_continued(
    base: Path, tmp_path: Path, settings: LoraSettings, dtype: torch.dtype, message: str
) -> None:
    AdapterWriter(adapted(base), SETTINGS, str(base)).write(tmp_path)
    check_same_adapter(tmp_path, SETTINGS, torch.float32)
    with pytest.raises(CheckpointError, match=message):
        check_same_adapter(tmp_path, settings, dtype)
    with pytest.raises(CheckpointError, match="cannot read the adapter"):
        check_same_adapter(tmp_path / "none", settings, dtype)
