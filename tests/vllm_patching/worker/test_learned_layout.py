"""Layouts learned from vLLM's own loader: equal to a real load, and to the plans of the families."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny_models import make_model, without_images
from vllm_patching.weights.families import Geometry, parameters
from vllm_patching.weights.sharding import LearnedShard, SourceSlice, plan_shards, source_slices
from vllm_patching.worker.learned_layout import LearnedLayout, learn_layout
from vllm_patching.worker.parameters import LayoutError

ROOT = Path(__file__).resolve().parents[3]
PLANNED = ("Qwen3", "Llama", "Qwen3Moe")
RANKS: dict[str, list[tuple[int, int]]] = {
    **{name: [(1, 0), (2, 0), (2, 1)] for name in PLANNED},
    "Olmo3": [(1, 0), (2, 1)],
    "Phi3": [(2, 0)],
    "Phi": [(1, 0), (2, 1)],  # the head has a bias
    "DeepseekV2": [(2, 0)],
    "DeepseekV3": [(2, 1)],
    "Qwen3Next": [(1, 0), (2, 1)],
    "GptOss": [(1, 0)],  # vLLM's CPU build has no experts of this kind for two ranks
    "Mamba2": [(1, 0)],
    "Qwen2_5_VL": [(1, 0), (2, 1)],
}
LEARNED = [
    f"{name} {size} {rank}" for name in RANKS if name != "Mamba2" for size, rank in RANKS[name]
]

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def learned() -> dict[str, Any]:
    """The layouts of all cases, from a process of its own that compares each with a real load."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm_patching.worker.learn_layouts", json.dumps(RANKS)],
        cwd=ROOT,
        env={**os.environ, **without_images(), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("case", LEARNED)
def test_a_layout_puts_every_element_where_the_loader_does(
    case: str, learned: dict[str, Any]
) -> None:
    """The process has compared them; the padding is the vocabulary's."""
    assert "error" not in learned[case], learned[case]["error"]
    assert learned[case]["unused"] == []
    assert all("embed" in name or "lm_head" in name for name in learned[case]["padding"])


@pytest.mark.parametrize("size_and_rank", RANKS["Qwen3"])
@pytest.mark.parametrize("name", PLANNED)
def test_a_layout_equals_the_plan_of_the_family(
    name: str, size_and_rank: tuple[int, int], learned: dict[str, Any], tmp_path: Path
) -> None:
    size, rank = size_and_rank
    checkpoint = make_model(name, tmp_path)
    geometry = Geometry.from_config(json.loads((tmp_path / "config.json").read_text()))
    shards = learned[f"{name} {size} {rank}"]["shards"]
    plan = {spec.name: spec for spec in plan_shards(geometry, rank, size)}
    assert shards.keys() == plan.keys()
    numbered, first = {}, 1
    for key, tensor in checkpoint.items():
        numbered[key] = torch.arange(first, first + tensor.numel()).view(tensor.shape)
        first += tensor.numel()
    for key, spec in plan.items():
        parameter = parameters(geometry)[key]
        rows = torch.cat([numbered[part.name] for part in parameter.parts])
        full = rows.view(parameter.shape)
        planned = assembled(spec.shape, source_slices(spec), {key: full})
        slices = [SourceSlice(**row) for row in shards[key]["slices"]]
        assert torch.equal(planned, assembled(spec.shape, slices, numbered)), key


def assembled(shape: Any, slices: Any, sources: dict[str, torch.Tensor]) -> torch.Tensor:
    local = torch.zeros(torch.Size(shape).numel(), dtype=torch.int64)
    for piece in slices:
        values = sources[piece.source].as_strided(
            piece.shape, piece.source_strides, piece.source_offset
        )
        local[piece.local_start : piece.local_start + values.numel()] = values.flatten()
    return local


def test_arithmetic_in_a_loader_is_named(learned: dict[str, Any]) -> None:
    assert learned["Mamba2 1 0"]["error"] == (
        "1 parameters cannot be mapped: backbone.layers.0.mixer.A: the loader copies a computed "
        "value into it"
    )


# Loaders that do one thing each


class Toy(nn.Module):
    """A model of two parameters with any loader."""

    def __init__(self, load: Callable[[Toy, dict[str, torch.Tensor]], object]) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.b = nn.Parameter(torch.arange(4.0))
        self.register_buffer("scale", torch.ones(3))
        self._load = load

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._load(self, dict(weights))


CHECKPOINT = {
    "x": torch.empty(3, 2, device="meta"),
    "y": torch.empty(4, device="meta"),
    "z": torch.empty(3, device="meta"),
}


def learn(load: Callable[[Any, dict[str, torch.Tensor]], object]) -> LearnedLayout:
    model = Toy(load)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        return learn_layout(model, CHECKPOINT)
    finally:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), f"{name} was written"


def test_casts_clones_and_transposes_keep_the_source() -> None:
    def load(model: Any, tensors: dict[str, torch.Tensor]) -> None:
        model.a.data.copy_(tensors["x"].to(torch.float64).t().contiguous().to("cpu"))
        model.b[:3].data.copy_(tensors["y"][1:])
        model.b[3:].data.fill_(0)

    layout = learn(load)
    assert layout.shards == (
        LearnedShard("a", (2, 3), (("x", (3, 2)),), (SourceSlice("x", (2, 3), 0, (1, 2), 0),)),
        LearnedShard("b", (4,), (("y", (4,)),), (SourceSlice("y", (3,), 1, (1,), 0),)),
    )
    assert layout.padding == {"b": 1}
    assert layout.unused == ("z",)


def test_a_buffer_that_is_loaded_belongs_to_the_layout() -> None:
    def load(model: Any, tensors: dict[str, torch.Tensor]) -> None:
        plain(model, tensors)
        model.scale.copy_(tensors["z"])

    assert [shard.name for shard in learn(load).shards] == ["a", "b", "scale"]


def test_a_parameter_that_the_loader_makes_anew_keeps_its_memory() -> None:
    def load(model: Any, tensors: dict[str, torch.Tensor]) -> None:
        model.a.data.copy_(tensors["x"].t())
        model.b = nn.Parameter(torch.empty(4))
        model.b.data.copy_(tensors["y"])

    model = Toy(load)
    before = dict(model.named_parameters())
    shards = learn_layout(model, CHECKPOINT).shards
    assert [(shard.name, shard.slices[0].source) for shard in shards] == [("a", "x"), ("b", "y")]
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
    assert torch.equal(model.b, torch.arange(4.0))


def plain(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    model.a.data.copy_(tensors["x"].t())
    model.b.data.copy_(tensors["y"])


def then(load: Callable[[Any, dict[str, torch.Tensor]], object]) -> Callable[..., None]:
    """The plain loader, and something after it."""

    def both(model: Any, tensors: dict[str, torch.Tensor]) -> None:
        plain(model, tensors)
        load(model, tensors)

    return both


@pytest.mark.parametrize(
    ("load", "problem"),
    [
        (lambda m, t: m.a.data.copy_(t["x"].t()), "b: 4 of 4 elements come from no tensor"),
        (
            lambda m, t: (m.a.data.copy_(t["x"].t()), m.b.data[1:].copy_(t["y"][1:])),
            "b: 1 of 4 elements come from no tensor",
        ),
        (then(lambda m, t: m.b.data[:2].copy_(t["z"][1:])), "b: 2 of 4 elements come twice"),
        (then(lambda m, t: m.b.data.copy_(t["y"] + 1)), "b: the loader copies a computed value"),
        (then(lambda m, t: m.b.data.copy_(t["y"].neg_())), "b: the loader copies a computed value"),
        (then(lambda m, t: m.b.data.mul_(2)), r"b: the loader computes it by aten\.mul_"),
        (then(lambda m, t: m.b.data.exp()), r"b: the loader computes with it by aten\.exp"),
        (then(lambda m, t: setattr(m.b, "data", torch.ones(4))), "b: the loader puts other memory"),
        (then(lambda m, t: m.a.data.copy_(m.b.data[:3])), "a: the loader copies a computed value"),
        (then(lambda m, t: t["y"].sum().item()), r"tensors without data \(\w*Error: "),
        (then(lambda m, t: t["w"]), r"tensors without data \(KeyError: 'w'\)"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_refused(
    load: Callable[[Any, dict[str, torch.Tensor]], object], problem: str
) -> None:
    with pytest.raises(LayoutError, match=problem):
        learn(load)


@pytest.mark.parametrize("load", [lambda m, t: -t["y"].float().exp(), lambda m, t: t["y"].neg_()])
def test_a_refusal_names_the_tensors_that_the_loader_computes_with(
    load: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor],
) -> None:
    with pytest.raises(LayoutError) as refusal:
        learn(then(lambda m, t: m.b.data.copy_(load(m, t))))
    assert refusal.value.computed == {"y"}


def test_a_tensor_that_is_loaded_twice_counts_once() -> None:
    assert learn(then(plain)) == learn(plain)
