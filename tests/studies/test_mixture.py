"""Mixtures of experts that are made of dense models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from studies.starter_model.mixture import STARTER_MODEL, main
from vllm_patching.weights.families import Geometry, parameters


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(3, 40).unsqueeze(0)).logits
    return result


def test_experts_without_noise_compute_what_the_dense_model_does(tmp_path: Path) -> None:
    flags = ["--experts", "3", "--experts-per-token", "2", "--noise", "0"]
    main(["--output", str(tmp_path), *flags])
    torch.testing.assert_close(logits(tmp_path), logits(STARTER_MODEL), atol=1e-4, rtol=1e-4)
    text = "17 + 26"
    ours, theirs = (AutoTokenizer.from_pretrained(one) for one in (tmp_path, STARTER_MODEL))
    assert ours.encode(text) == theirs.encode(text)


def test_the_checkpoint_is_that_of_a_family_and_repeats_with_its_seed(tmp_path: Path) -> None:
    for name in "ab":
        main(["--output", str(tmp_path / name), "--experts", "2"])
    main(["--output", str(tmp_path / "c"), "--experts", "2", "--seed", "1"])
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    geometry = Geometry.from_config(json.loads((tmp_path / "a" / "config.json").read_text()))
    assert (geometry.num_experts, geometry.experts_per_token) == (2, 2)
    parts = [part for one in parameters(geometry).values() for part in one.tensors]
    assert {part.name: part.shape for part in parts} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    again, other = (load_file(tmp_path / name / "model.safetensors") for name in "bc")
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())
    first, second = (tensors[f"model.layers.0.mlp.experts.{n}.up_proj.weight"] for n in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, other["model.layers.0.mlp.experts.0.up_proj.weight"])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--experts-per-token", "5"], "--experts-per-token 5: give 1 to --experts, which is 4"),
        (["--noise", "-1"], "--noise -1: give 0 or more"),
        (["--model", "studies"], "--model studies: no *.safetensors there"),
    ],
)
def test_bad_options_are_refused(
    flags: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path), *flags])
    assert line in capsys.readouterr().err


def test_a_mixture_is_not_made_into_a_mixture_again(tmp_path: Path) -> None:
    main(["--output", str(tmp_path / "once"), "--experts", "2"])
    words = ["--model", str(tmp_path / "once"), "--output", str(tmp_path / "twice")]
    with pytest.raises(SystemExit, match="give a Qwen3ForCausalLM"):
        main(words)
