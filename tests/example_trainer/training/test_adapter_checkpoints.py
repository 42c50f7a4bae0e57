"""Checkpoints of adapters: a folder called adapter_step_N is whole, and training goes on from it
exactly.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from example_trainer.batch.groups import parse_batch
from example_trainer.batch.packing import pack_batch
from example_trainer.command_line import parse_config
from example_trainer.config import TrainerConfig
from example_trainer.errors import CheckpointError
from example_trainer.models import Decoder
from example_trainer.parallel.ranks import Ranks
from example_trainer.process import StopSignal
from example_trainer.training.checkpoints import checkpoint_prefix, load_state, make_checkpoints
from example_trainer.training.model import make_model
from example_trainer.training.optimizer import MasterAdamW, make_optimizer
from example_trainer.training.runs import Start, choose_start
from example_trainer.training.step import guarded_step, make_objective

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=13, num_hidden_layers=2, **sizes)).save_pretrained(
        tmp_path / "base"
    )
    words = [
        "--model-name",
        str(tmp_path / "base"),
        "--save-path",
        str(tmp_path / "saved"),
        "--lr",
        "1e-2",
    ]
    return parse_config(
        [
            *words,
            "--weight-bridge-mode",
            "lora_only",
            "--lora-r",
            "4",
            "--lora-alpha",
            "8",
            "--resume",
            "auto",
        ]
    )


def begin(config: TrainerConfig, start: Start) -> tuple[Decoder, MasterAdamW]:
    torch.manual_seed(1)
    model = make_model(config, start.checkpoint, torch.float32, CPU)
    optimizer = make_optimizer(config, model)
    if start.saved:
        load_state(start.saved, optimizer)
        optimizer.write_weights()
    return model, optimizer


def train(model: Decoder, optimizer: MasterAdamW, until: int) -> None:
    while optimizer.steps < until:
        tokens = torch.randint(
            0, 13, (3, 9), generator=torch.Generator().manual_seed(optimizer.steps)
        )
        model.logits(tokens).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.write_weights()


def newest(config: TrainerConfig) -> Start:
    return choose_start(
        config.resume, config.save_path, config.model_name, 1000, checkpoint_prefix(config)
    )


def save(config: TrainerConfig, model: Decoder, optimizer: MasterAdamW) -> Path:
    checkpoints = make_checkpoints(config, model, newest(config), Ranks(), lambda step: False)
    return checkpoints.save(model, optimizer, config.shareable)


def test_stopping_and_resuming_gives_the_adapters_of_one_run(config: TrainerConfig) -> None:
    whole, whole_optimizer = begin(config, newest(config))
    train(whole, whole_optimizer, 4)

    model, optimizer = begin(config, newest(config))
    train(model, optimizer, 2)
    saved = save(config, model, optimizer)
    assert saved == config.save_path / "adapter_step_2"
    (config.save_path / "step_9" / "trainer_state").mkdir(parents=True)
    (config.save_path / "step_9" / "trainer_state" / "trainer.json").write_text(
        "{}"
    )  # of a run without adapters
    torch.manual_seed(77)
    resumed, resumed_optimizer = begin(config, newest(config))
    assert resumed_optimizer.steps == 2
    train(resumed, resumed_optimizer, 4)
    for (name, one), (_, two) in zip(
        whole.named_parameters(), resumed.named_parameters(), strict=True
    ):
        assert torch.equal(one, two), name


def test_a_resumed_run_drops_the_same_inputs(config: TrainerConfig) -> None:
    config = config.model_copy(update={"lora_dropout": 0.5})
    group = {
        "tokens": [[1, 2, 3, 4, 5], [1, 2, 6, 7, 8]],
        "masks": [[-100, -100, 3, 4, 5], [-100, -100, 6, 7, 8]],
        "scores": [0.0, 1.0],
    }
    batch, rules = parse_batch([group], 16, 13), {"normalisation": "token", "max_tokens": 16}
    bins = pack_batch(batch, tokens_per_bin=64, ranks=1, share_prefixes=True, **rules)

    def steps(model: Decoder, optimizer: MasterAdamW, until: int) -> None:
        while optimizer.steps < until:
            minibatches = [shares[0] for shares in bins]
            objective, stop = make_objective(config), StopSignal()
            guarded_step(model, optimizer, minibatches, config, objective, stop)
            optimizer.write_weights()

    whole, whole_optimizer = begin(config, newest(config))
    steps(whole, whole_optimizer, 3)
    model, optimizer = begin(config, newest(config))
    steps(model, optimizer, 2)
    save(config, model, optimizer)
    resumed, resumed_optimizer = begin(config, newest(config))
    steps(resumed, resumed_optimizer, 3)
    for name, one in whole_optimizer.masters.items():
        assert torch.equal(one, resumed_optimizer.masters[name]), name


def test_a_checkpoint_is_small_and_holds_only_the_adapters(config: TrainerConfig) -> None:
    model, optimizer = begin(config, newest(config))
    train(model, optimizer, 1)
    saved = save(config, model, optimizer)
    assert sorted(path.name for path in saved.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "trainer_state",
    ]
    tensors = load_file(saved / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2
    assert set(load_file(saved / "trainer_state" / "optimizer.safetensors")) == {
        f"{kind}.{name}"
        for name in optimizer.masters
        for kind in ("master", "exp_avg", "exp_avg_sq")
    }


def test_adapters_of_another_rank_are_not_continued(config: TrainerConfig) -> None:
    model, optimizer = begin(config, newest(config))
    train(model, optimizer, 1)
    save(config, model, optimizer)
    other = config.model_copy(update={"lora_r": 8})
    with pytest.raises(
        CheckpointError, match=r"adapter_step_1 was made with --lora-r 4, and this run has 8"
    ):
        make_model(other, newest(other).checkpoint, torch.float32, CPU)
