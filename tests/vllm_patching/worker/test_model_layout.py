"""A worker's layout: learned around vLLM's processing, or a line that names the obstacle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.fleet_server import module_of
from tests.geometries import config_of
from vllm_patching.weights.families import Geometry
from vllm_patching.weights.sharding import plan_shards
from vllm_patching.worker.model_layout import layout_of, learn_while_loading
from vllm_patching.worker.parameters import LayoutError

CONFIG = SimpleNamespace(architectures=["NewForCausalLM"])


class Layer(nn.Module):
    """A matrix, and a hook that keeps its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.transposed = self.weight.detach().t().to(dtype).contiguous()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.layer.weight.data.copy_(tensor)


def model_config(folder: Path, **changes: Any) -> SimpleNamespace:
    fields = {"model": str(folder), "quantization": None, "dtype": torch.float32}
    return SimpleNamespace(hf_config=CONFIG, **(fields | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"layer.weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    return tmp_path


def loaded(config: SimpleNamespace, process: Callable[[Model], object]) -> Model:
    model = Model()
    with learn_while_loading(model, config):
        process(model)
    return model


def test_derived_tensors_are_recomputed_and_no_part_of_the_manifest(folder: Path) -> None:
    model = loaded(
        model_config(folder), lambda m: m.layer.process_weights_after_loading(torch.float32)
    )
    layout = layout_of(model, CONFIG, 0, 1)
    assert [entry.shard.name for entry in layout.manifest.entries] == ["layer.weight"]
    layout.tensors["layer.weight"].data.mul_(2)
    assert layout.recompute is not None
    assert layout.recompute() == ""
    assert torch.equal(model.layer.transposed, model.layer.weight.data.t())


class TiedModel(Model):
    """Has a head that is tied after loading."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Layer()

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def test_a_head_that_vllm_ties_after_loading_is_no_part_of_the_layout(folder: Path) -> None:
    names = ("layer.weight", "head.weight")
    save_file({name: torch.zeros(2, 3) for name in names}, folder / "model.safetensors")
    model = TiedModel()
    with learn_while_loading(model, model_config(folder)):
        model.head.weight = model.layer.weight
    layout = layout_of(model, CONFIG, 0, 1)
    assert [entry.shard.name for entry in layout.manifest.entries] == ["layer.weight"]
    assert layout.recompute is None


def swap(model: Model) -> None:
    model.layer.weight.data = model.layer.weight.data.flip(0)


def replace(model: Model) -> None:
    model.layer.weight = nn.Parameter(model.layer.weight.data.t().contiguous())


def keep_without_a_hook(model: Model) -> None:
    model.register_buffer("table", torch.ones(3))


@pytest.fixture
def reloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's reload, and the processing that the model under test has had."""

    def reloader(model: Model, config: Any) -> Callable[[dict[str, torch.Tensor]], None]:
        def load(tensors: dict[str, torch.Tensor]) -> None:
            model.load_weights(iter(tensors.items()))
            model.layer.weight.data += config.drift
            swap(model)

        return load

    monkeypatch.setattr("vllm_patching.worker.model_layout.reloader", reloader)


@pytest.mark.usefixtures("reloads")
def test_a_model_that_is_stored_otherwise_is_reloaded_from_a_copy(folder: Path) -> None:
    save_file({"layer.weight": torch.arange(6.0).view(2, 3)}, folder / "model.safetensors")
    model = loaded(model_config(folder, drift=0), swap)
    layout = layout_of(model, CONFIG, 0, 1)
    copy = layout.tensors["layer.weight"]
    assert torch.equal(copy, torch.arange(6.0).view(2, 3))
    assert layout.recompute is not None
    before = layout.recompute()
    copy.add_(1)
    assert layout.recompute() != before
    assert torch.equal(model.layer.weight.data, copy.flip(0))


@pytest.mark.usefixtures("reloads")
def test_a_reload_that_gives_other_parameters_is_refused(folder: Path) -> None:
    save_file({"layer.weight": torch.arange(6.0).view(2, 3)}, folder / "model.safetensors")
    model = loaded(model_config(folder, drift=1), swap)
    with pytest.raises(
        LayoutError,
        match=r"otherwise than it loads them \(layer.weight\); and vLLM's reload of its own "
        "checkpoint gives other parameters$",
    ):
        layout_of(model, CONFIG, 0, 1)


@pytest.mark.usefixtures("reloads")
def test_a_reload_that_leaves_parameters_as_they_were_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vllm_patching.worker.model_layout.reloader", lambda model, config: lambda tensors: None
    )
    model = loaded(model_config(folder), swap)
    with pytest.raises(
        LayoutError,
        match=r"reload of other weights leaves 1 parameters as they were \(layer.weight\); if",
    ):
        layout_of(model, CONFIG, 0, 1)


class OnCPU(torch.Tensor):
    """A tensor that was moved to the CPU."""


class ComputingModel(Model):
    """Its loader computes with tensors, which rounds in another way on a GPU than on the CPU."""

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            loaded = -torch.exp(tensor)
            if self.on_gpu and not isinstance(tensor, OnCPU):
                loaded = loaded.nextafter(torch.zeros(()))
            self.layer.weight.data.copy_(loaded)

    on_gpu = False


def test_a_loader_that_computes_does_so_on_the_cpu_as_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vllm_patching.worker.model_layout.reloader",
        lambda model, config: lambda tensors: model.load_weights(tensors.items()),
    )
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor.as_subclass(OnCPU))
    stored = torch.arange(6.0).view(2, 3)
    save_file({"layer.weight": stored}, folder / "model.safetensors")
    model = ComputingModel()
    model.load_weights([("layer.weight", stored)])
    model.on_gpu = True
    with learn_while_loading(model, model_config(folder)):
        pass
    layout = layout_of(model, CONFIG, 0, 1)
    layout.tensors["layer.weight"].add_(1)
    assert layout.recompute is not None
    layout.recompute()
    assert torch.equal(model.layer.weight.data, -torch.exp(stored + 1))


def no_reload(model: Any, config: Any) -> Any:
    raise LayoutError("no reload here")


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        (swap, r"vLLM stores 1 parameters otherwise than it loads them \(layer.weight\)"),
        (replace, r"vLLM stores 1 parameters otherwise than it loads them \(layer.weight\)"),
        (keep_without_a_hook, "table is derived from the weights, and nothing can recompute it"),
    ],
)
def test_a_processing_that_an_update_would_miss_is_refused(
    folder: Path,
    process: Callable[[Model], object],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_patching.worker.model_layout.reloader", no_reload)
    model = loaded(model_config(folder), process)
    with pytest.raises(LayoutError, match=f"^NewForCausalLM cannot be updated: {reason}; and no"):
        layout_of(model, CONFIG, 0, 1)


def test_a_quantised_model_is_refused(folder: Path) -> None:
    model = loaded(model_config(folder, quantization="fp8"), lambda m: None)
    with pytest.raises(LayoutError, match=r"are quantised \(fp8\); serve the unquantised check"):
        layout_of(model, CONFIG, 0, 1)


def test_a_checkpoint_without_names_is_refused(tmp_path: Path) -> None:
    model = loaded(model_config(tmp_path), lambda m: None)
    with pytest.raises(LayoutError, match=r"has no \*\.safetensors, whose names"):
        layout_of(model, CONFIG, 0, 1)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    model = loaded(model_config(tmp_path), lambda m: None)
    with pytest.raises(LayoutError, match="a safetensors file cannot be read"):
        layout_of(model, CONFIG, 0, 1)


def test_a_stored_dtype_that_is_quantised_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    model = loaded(model_config(tmp_path), lambda m: None)
    with pytest.raises(LayoutError, match="the checkpoint has tensors of I8; supported: F32,"):
        layout_of(model, CONFIG, 0, 1)


def test_a_loader_that_was_not_seen_is_named() -> None:
    with pytest.raises(LayoutError, match="start the server with --load-format auto"):
        layout_of(Model(), CONFIG, 0, 1)


MIXTURE = config_of("Qwen3Moe", 2, 8, 6, 4, 2, 2, 70, mlp_only_layers=[0])


def mixture_of_experts(
    process: Callable[[nn.Module], object],
) -> tuple[nn.Module, SimpleNamespace]:
    """Random weights under vLLM's names, as vLLM has processed them, and the configuration."""
    config = SimpleNamespace(architectures=MIXTURE["architectures"], to_dict=lambda: MIXTURE)
    plan = plan_shards(Geometry.from_config(MIXTURE), 0, 1)
    model = module_of(
        {
            spec.name.replace(".experts.", ".experts.routed_experts."): torch.randn(spec.shape)
            for spec in plan
        }
    )
    with learn_while_loading(model, SimpleNamespace(hf_config=config)):
        process(model)
    return model, config


def swap_halves(model: nn.Module) -> None:
    """Exchange gate and up, as FlashInfer's kernels want them."""
    weight = model.get_parameter("model.layers.1.mlp.experts.routed_experts.w13_weight")
    weight.data = weight.data.roll(6, dims=1)


def test_experts_that_vllm_leaves_alone_are_planned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        model, config = mixture_of_experts(lambda _: None)
    assert "Experts of 1 layers of Qwen3MoeForCausalLM are stored as they are" in caplog.text
    layout = layout_of(model, config, 0, 1)
    assert layout.recompute is None
    experts = "model.layers.1.mlp.experts"
    held = model.get_parameter(f"{experts}.routed_experts.w2_weight")
    assert layout.tensors[f"{experts}.w2_weight"] is held


def test_experts_that_vllm_swaps_are_refused_with_the_kernels_that_do_not() -> None:
    model, config = mixture_of_experts(swap_halves)
    with pytest.raises(
        LayoutError,
        match=r"^Qwen3MoeForCausalLM cannot be updated: vLLM stores 1 parameters otherwise than "
        r"it loads them \(model.layers.1.mlp.experts.w13_weight\); start the server with "
        "--moe-backend triton, ",
    ):
        layout_of(model, config, 0, 1)


def test_experts_whose_loader_was_not_seen_are_refused() -> None:
    model, config = mixture_of_experts(lambda _: None)
    with pytest.raises(LayoutError, match="start the server with --load-format auto"):
        layout_of(copy.deepcopy(model), config, 0, 1)
