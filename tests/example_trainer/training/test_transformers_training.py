"""Models of transformers are trained, saved and resumed like the decoders of the first tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from atroposlib.wire import TrainerSession
from example_trainer.batch.groups import Rules, parse_batch
from example_trainer.config import TrainerConfig
from example_trainer.errors import ConfigError, ModelError
from example_trainer.models.transformers_model import TransformersModel
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal
from example_trainer.training import memory_choice
from example_trainer.training.checkpoints import Checkpoints, load_state
from example_trainer.training.memory_choice import memory_request
from example_trainer.training.memory_plan import plan_memory
from example_trainer.training.model import (
    decoder_maker,
    fitted_to_model,
    make_model,
    make_reference,
)
from example_trainer.training.optimizer import MasterAdamW, make_optimizer
from example_trainer.training.runs import Run, SavedStep
from example_trainer.training.step import BatchGradients, make_objective
from example_trainer.weight_bridge.base import NoBridge
from tests.example_trainer.models.transformers_cases import SAMPLE, checkpoint
from tests.example_trainer.training.test_step import make_groups, packed

RUN = Run("a", "model", (TrainerSession(1000, 0),))
CPU = torch.device("cpu")


def config(name: str = "Mixtral", **options: object) -> TrainerConfig:
    flags = {"seq_len": 64, "lr": 1e-2, "training_steps": 4} | options
    return TrainerConfig(model_name=str(checkpoint(name)), **flags)


def loaded(
    options: TrainerConfig, start: Path | None = None, dtype: torch.dtype = torch.float32
) -> tuple[TransformersModel, MasterAdamW]:
    model = make_model(options, start, dtype, CPU, decoder_maker(options, Ranks()))
    assert isinstance(model, TransformersModel)
    return model, make_optimizer(options, model)


def train(
    model: TransformersModel, optimizer: MasterAdamW, options: TrainerConfig, until: int
) -> dict[str, float | None]:
    """Take steps of GRPO; return the figures of the last one."""
    reference = make_reference(options, model, model.dtype, CPU)
    while optimizer.steps < until:
        batch = parse_batch(make_groups(optimizer.steps), 64, model.geometry.vocab_size)
        gradients = BatchGradients(
            model, optimizer, packed(batch, options), options, make_objective(options),
            StopSignal(), reference,
        )  # fmt: skip
        gradients.accumulate(0)
        optimizer.update()
        gradients.updated()
        optimizer.write_weights()
        optimizer.end_step()
    return gradients.row()


@pytest.fixture(params=SAMPLE)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def test_a_run_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    options = fitted_to_model(config(name, kl_coef=0.1, entropy_coef=0.01))
    model, optimizer = loaded(options)
    checkpoints = Checkpoints(tmp_path / "whole", RUN, keep_states=None)
    train(model, optimizer, options, 2)
    saved = checkpoints.save(model, optimizer, {})
    assert train(model, optimizer, options, 4)["loss"] is not None
    last = checkpoints.save(model, optimizer, {})

    model, optimizer = loaded(options, saved)
    load_state(SavedStep.read(saved), optimizer)
    train(model, optimizer, options, 4)
    again = Checkpoints(tmp_path / "parts", RUN).save(model, optimizer, {})
    for file in ("model.safetensors", "trainer_state/optimizer.safetensors"):
        one, two = load_file(last / file), load_file(again / file)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one), file

    start, learned = (
        load_file(checkpoint(name) / "model.safetensors"),
        load_file(last / "model.safetensors"),
    )
    assert start.keys() == learned.keys()
    frozen = {part.name for one in model.geometry.tensors if one.frozen for part in one.parts}
    for key, tensor in start.items():
        assert torch.equal(tensor, learned[key]) == (key in frozen), key
    assert (last / "config.json").read_bytes() == (checkpoint(name) / "config.json").read_bytes()


def test_bfloat16_weights_are_the_rounded_masters(tmp_path: Path) -> None:
    options = config("Qwen3Next")
    model, optimizer = loaded(options, checkpoint("Qwen3Next", torch.bfloat16), torch.bfloat16)
    train(model, optimizer, options, 1)
    saved = Checkpoints(tmp_path, RUN).save(model, optimizer, {})
    again, _ = loaded(options, saved, torch.bfloat16)
    masters = optimizer.masters
    for key, parameter in again.named_parameters():
        assert torch.equal(parameter, masters[key].bfloat16()), key


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--deterministic", {"deterministic": True, "weight_bridge_mode": "shared_vllm"}),
        ("--share-prefixes", {"share_prefixes": True}),
        ("--weight-bridge-mode lora_only", {"weight_bridge_mode": "lora_only"}),
        ("--single-copy", {"weight_bridge_mode": "shared_vllm", "single_copy": True}),
    ],
)
def test_options_that_need_a_decoder_of_its_own_are_refused(
    flag: str, options: dict[str, object]
) -> None:
    with pytest.raises(ConfigError) as error:
        fitted_to_model(config(**options))
    assert str(error.value).startswith(f"{flag} needs an architecture with a decoder of its own")
    assert "is a MixtralForCausalLM: " in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["router_balance_coef", "router_z_coef"])
def test_losses_of_routers_need_routers_of_our_own(name: str) -> None:
    flag = f"--{name.replace('_', '-')} 0.01"
    with pytest.raises(ConfigError, match=f"^{flag} is the weight .* leave it out$"):
        fitted_to_model(config(**{name: 0.01}))


def test_the_log_names_the_tier(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert not fitted_to_model(config()).shares_prefixes
    assert "model: tier 2, transformers' MixtralForCausalLM, not exact" in caplog.text


def test_a_group_with_an_image_is_left_out_in_one_line() -> None:
    model, _ = loaded(config("Qwen2_5_VL"))
    groups = make_groups(0)
    groups[1]["tokens"][0][1] = 90
    rules = Rules(media_tokens=model.geometry.media_tokens)
    batch = parse_batch(groups, 64, model.geometry.vocab_size, rules)
    assert batch.invalid == [
        "group 1: tokens[0] holds 90, which stands for an image, a sound or a film, and the trainer "
        "sees text alone; leave them out of prompts"
    ]


def test_a_parameter_without_a_gradient_keeps_its_weights() -> None:
    model, optimizer = loaded(config())
    without = next(iter(optimizer.masters))
    for key in optimizer.masters:
        if key != without:
            model.get_parameter(key).sum().backward()
    before = {key: tensor.clone() for key, tensor in optimizer.masters.items()}
    optimizer.step()
    for key, tensor in optimizer.masters.items():
        assert torch.equal(tensor, before[key]) == (key == without), key


def test_the_memory_plan_counts_trained_tensors_and_measured_activations() -> None:
    options = config("Qwen2_5_VL")
    request = memory_request(options, NoBridge(), torch.float32, CPU)
    model, optimizer = loaded(options)
    assert request.trained == sum(tensor.numel() for tensor in optimizer.masters.values())
    assert request.trained < sum(tensor.numel() for tensor in model.parameters())
    assert request.activations is not None
    recomputed = replace(request, gradient_checkpointing=True)
    longer = replace(request, tokens_per_microbatch=2 * request.tokens)
    totals = [plan_memory(one).total for one in (recomputed, request, longer)]
    assert totals == sorted(set(totals))


def test_activations_that_cannot_be_measured_are_planned_by_sizes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("index 2 is out of range")

    monkeypatch.setattr(memory_choice, "measure_activations", fail)
    request = memory_request(config(), NoBridge(), torch.float32, CPU)
    assert request.activations is None
    assert "cannot be measured (index 2 is out of range)" in caplog.text
    assert plan_memory(request).total > 0


def test_the_plan_leaves_the_refusal_of_a_model_to_the_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forward(self: object, inputs_embeds: torch.Tensor, use_cache: bool) -> None:
        raise TypeError("it wants images")

    monkeypatch.setattr(transformers.MixtralForCausalLM, "forward", forward)
    with pytest.raises(ModelError, match="makes logits in a way that cannot be taken apart"):
        memory_request(config(), NoBridge(), torch.float32, CPU)
    assert "it wants images" not in caplog.text
