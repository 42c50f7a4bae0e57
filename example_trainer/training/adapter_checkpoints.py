"""Checkpoints of a run that trains adapters: `adapter_step_N/` in PEFT's format, the optimizer's
state beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from example_trainer.config import TrainerConfig
from example_trainer.models import Decoder
from example_trainer.models.lora.peft_format import AdapterWriter
from example_trainer.models.lora.settings import base_model_name
from example_trainer.parallel.ranks import Ranks
from example_trainer.training.checkpoints import Checkpoints
from example_trainer.training.optimizer import MasterAdamW
from example_trainer.training.resume import Start
from example_trainer.training.runs import PREFIX, Run

ADAPTER_PREFIX = "adapter_step_"


class AdapterCheckpoints(Checkpoints):
    """As Checkpoints, of the adapters alone: the base model is named in adapter_config.json, not
    copied.

    Args:
        writer: writes the model's adapters.
    """

    prefix = ADAPTER_PREFIX

    def __init__(
        self,
        folder: Path,
        run: Run,
        keep_states: int | None,
        last: int | None,
        writer: AdapterWriter,
        keep: int = 0,
    ) -> None:
        super().__init__(folder, run, keep_states, last, keep=keep)
        self._writer = writer

    def _weights(self, model: Decoder, optimizer: MasterAdamW) -> Sequence[str]:
        return list(optimizer.masters)

    def _write_weights(
        self,
        model: Decoder,
        dtype: torch.dtype,
        weights: Iterator[tuple[str, Tensor]],
        draft: Path,
        moved: Callable[[], None],
    ) -> None:
        self._writer.write(draft, dict(weights))


def checkpoint_prefix(config: TrainerConfig) -> str:
    """What the names of this run's checkpoints begin with."""
    if config.lora:
        return ADAPTER_PREFIX
    return PREFIX


def make_checkpoints(
    config: TrainerConfig,
    model: Decoder,
    start: Start,
    ranks: Ranks,
    restarts_at: Callable[[int], bool],
) -> Checkpoints:
    """Where the run saves: `step_N/`, or `adapter_step_N/` in PEFT's format. `restarts_at` is the
    bridge's.
    """
    last = states = None
    if start.saved:
        last = start.saved.step
    if config.keep_optimizer_states != "all":
        states = config.keep_optimizer_states
    if not config.lora:

        def in_use(step: int) -> bool:
            # A server that dies is started again on the checkpoint that it had: at first, the one
            # that training went on from.
            return step == last or restarts_at(step)

        return Checkpoints(
            config.save_path, start.run, states, last, ranks, config.keep_checkpoints, in_use
        )
    writer = AdapterWriter(model, config.lora, base_model_name(config.model_name))
    return AdapterCheckpoints(
        config.save_path, start.run, states, last, writer, config.keep_checkpoints
    )
