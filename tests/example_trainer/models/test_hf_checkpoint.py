"""Checkpoints are read and written exactly, also a tensor at a time, and errors name what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from example_trainer.errors import ModelError
from example_trainer.models import hf_checkpoint, load_model, safetensors_writer, save_model
from example_trainer.models.hf_checkpoint import (
    checkpoint_dtype,
    find_checkpoint,
    hf_tensors,
    read_geometry,
)
from example_trainer.models.safetensors_writer import write_safetensors
from tests.example_trainer.models.conftest import CASES, MakeCheckpoint


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_then_save_gives_equal_tensors_and_config(
    case: str, dtype: torch.dtype, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder, reference = make_checkpoint(case, dtype)
    save_model(load_model(str(folder), dtype), tmp_path / "out")
    before, after = read_all(folder), read_all(tmp_path / "out")
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype == dtype
        assert before[name].view(torch.uint8).equal(after[name].view(torch.uint8)), name
    assert (folder / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        kind = type(reference)
        assert torch.equal(
            kind.from_pretrained(tmp_path / "out")(tokens).logits,
            kind.from_pretrained(folder)(tokens).logits,
        )


def test_shards_are_read_and_written(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder, _ = make_checkpoint("qwen2-untied-mha", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    save_model(load_model(str(folder), torch.float32), tmp_path / "out", max_shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    before, after = read_all(folder), read_all(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = load_model(str(tmp_path / "out"), torch.float32)
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in hf_tensors(again.geometry, torch.float32, again.named_parameters())
    )


def test_another_dtype_is_written_into_the_config(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder, _ = make_checkpoint("qwen3-untied", torch.bfloat16)
    save_model(load_model(str(folder), torch.float32), tmp_path / "out")
    assert checkpoint_dtype(folder) == torch.bfloat16
    assert checkpoint_dtype(tmp_path / "out") == torch.float32
    assert {tensor.dtype for tensor in read_all(tmp_path / "out").values()} == {torch.float32}


def test_tokenizer_files_travel_along(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder, _ = make_checkpoint("qwen3-untied")
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "trainer_state").mkdir()
    save_model(load_model(str(folder), torch.float32), tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }


def test_a_tied_model_may_store_its_head_twice_but_not_two_heads(
    make_checkpoint: MakeCheckpoint,
) -> None:
    folder, _ = make_checkpoint("qwen2-tied")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(str(folder), torch.float32)
    assert model.lm_head is None
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="ties lm_head to the embedding"):
        load_model(str(folder), torch.float32)


def test_missing_and_left_over_tensors_are_named(make_checkpoint: MakeCheckpoint) -> None:
    folder, _ = make_checkpoint("llama-untied")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(
        4
    )  # of old checkpoints, and harmless
    tensors["model.layers.0.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_model(str(folder), torch.float32)
    message = str(caught.value)
    assert "missing model.layers.1.mlp.up_proj.weight" in message
    assert "not expected model.layers.0.extra.weight" in message
    assert "inv_freq" not in message


def test_a_tensor_of_another_shape_is_named(make_checkpoint: MakeCheckpoint) -> None:
    folder, _ = make_checkpoint("llama-untied")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(47)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight has shape \[47\], config\.json implies \[48\]"
    ):
        load_model(str(folder), torch.float32)


def test_weights_come_from_the_hub_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Mistral-7B-v0.3 has them."""
    weights = ["model-00001-of-00003.safetensors", "model.safetensors.index.json"]
    others = ["config.json", "params.json", "tokenizer.json", "tokenizer.model.v3"]
    again = ["consolidated.safetensors", "pytorch_model.bin"]

    def download(name: str, **patterns: list[str]) -> str:
        fetched.extend(filter_repo_objects([*weights, *others, *again], **patterns))
        return str(tmp_path)

    fetched: list[str] = []
    monkeypatch.setattr(hf_checkpoint, "snapshot_download", download)
    assert find_checkpoint("mistralai/Mistral-7B-v0.3") == tmp_path
    assert fetched == [*weights, *others[:3]]


def test_an_unsupported_config_is_refused_in_one_line(make_checkpoint: MakeCheckpoint) -> None:
    folder, _ = make_checkpoint("llama-untied")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["NewestForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError,
        match=r"^\S+config\.json: architecture NewestForCausalLM is not in transformers .*$",
    ):
        load_model(str(folder), torch.float32)


def test_configs_of_transformers_4_are_read(make_checkpoint: MakeCheckpoint) -> None:
    folder, _ = make_checkpoint("llama-tied-llama3")
    new = load_model(str(folder), torch.float32).geometry
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "torch_dtype": config.pop("dtype"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(str(folder), torch.float32).geometry == new
    assert checkpoint_dtype(folder) == torch.float32


def test_unknown_paths_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"model folder .*nowhere does not exist .*; give a folder or a hub id"
    ):
        load_model(str(tmp_path / "nowhere"), torch.float32)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty has no config\.json"):
        load_model(str(tmp_path / "empty"), torch.float32)
    with pytest.raises(ModelError) as caught:
        load_model("no-such-owner/no-such-model", torch.float32)
    assert str(caught.value).startswith("model 'no-such-owner/no-such-model': no folder ")
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_there_are_named(make_checkpoint: MakeCheckpoint) -> None:
    folder, _ = make_checkpoint("llama-untied", max_shard_size="20KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=f"names files that are not there: {lost.name}"):
        load_model(str(folder), torch.float32)
    for file in folder.glob("model*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor"):
        load_model(str(folder), torch.float32)


def test_a_truncated_file_is_one_clear_line(make_checkpoint: MakeCheckpoint) -> None:
    folder, _ = make_checkpoint("llama-untied")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    line = rf"cannot read the weights in {weights}: .*is the download complete"
    with pytest.raises(ModelError, match=line):
        load_model(str(folder), torch.float32)


@pytest.mark.parametrize("index", ['{"metadata": {}', "{}"])
def test_a_damaged_index_is_one_clear_line(index: str, make_checkpoint: MakeCheckpoint) -> None:
    folder, _ = make_checkpoint("llama-untied")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"cannot read .*index\.json: .*is the download complete"):
        load_model(str(folder), torch.float32)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.sampled_from(DTYPES), st.booleans(), st.integers(1, 50))
def test_a_file_is_byte_for_byte_the_librarys(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[int]],
    dtype: torch.dtype,
    named: bool,
    at_once: int,
) -> None:
    folder = tmp_path_factory.mktemp("files")
    tensors = {f"t{number}": torch.randn(shape).to(dtype) for number, shape in enumerate(shapes)}
    metadata = {"format": "pt"} if named else None
    moved = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(safetensors_writer, "_AT_ONCE", at_once)
        entries = {name: (dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_safetensors(
            folder / "ours", entries, tensors.items(), metadata, lambda: moved.append(1)
        )
    save_file(tensors, folder / "theirs", metadata=metadata)
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
    assert len(moved) == sum(-(-tensor.nbytes // at_once) for tensor in tensors.values())


def test_any_order_several_dtypes_and_views_are_read_back(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    tensors = {"z": whole[:, 2:4], "a": whole[1:3].bfloat16(), "m": whole.t()}
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_safetensors(tmp_path / "file", entries, tensors.items())
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "tensors",
    [
        [("b", torch.zeros(2))],
        [("a", torch.zeros(3))],
        [("a", torch.zeros(2).bfloat16())],
        [],
        [("a", torch.zeros(2))] * 2,
    ],
)
def test_anything_else_than_was_promised_is_an_error(
    tmp_path: Path, tensors: list[tuple[str, torch.Tensor]]
) -> None:
    with pytest.raises(ValueError, match=r"was to come|zip\(\)"):
        write_safetensors(tmp_path / "file", {"a": (torch.float32, (2,))}, tensors)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read .*config.json: Expecting property name"),
        (
            "[1]",
            r"config.json holds \[1\], not a JSON object; take the file of a complete checkpoint",
        ),
        ("null", "config.json holds None, not a JSON object"),
        ('{"architectures": "Qwen3"}', "architectures is 'Qwen3', not a list of names; take the"),
        ('{"architectures": [3]}', r"architectures is \[3\], not a list of names"),
        ('{"architectures": null}', "config.json has no 'architectures'"),
    ],
)
def test_a_config_of_another_form_is_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message) as refusal:
        read_geometry(tmp_path)
    assert "\n" not in str(refusal.value)
