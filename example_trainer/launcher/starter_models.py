"""The models in assets/, and the sizes that suit them: steps, learning rate, shape of a batch,
longest answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from example_trainer.launcher.command_line import ROOT

STARTER_MODEL = ROOT / "assets" / "starter_model"
CALCULATOR_MODEL = ROOT / "assets" / "calculator_model"
MODELS = {"arithmetic": STARTER_MODEL, "calculator": CALCULATOR_MODEL}
"""The model of each environment where no other model is named."""
STEPS = {"arithmetic": 50, "calculator": 40}
"""Optimizer steps in each environment where no other number is given."""
LEARNING_RATES = {"arithmetic": 3e-4, "calculator": 5e-4}
"""Peak learning rate in each environment unless --lr is given."""
BATCHES_AHEAD = 1
"""Batches that the environment may be ahead of the trainer: vLLM samples the next one while the
trainer works on this one."""


@dataclass(frozen=True)
class BatchShape:
    """Rollouts of one optimizer step: `groups` problems with `group_size` answers to each."""

    groups: int
    group_size: int

    @property
    def rollouts(self) -> int:
        """Sequences of one optimizer step."""
        return self.groups * self.group_size

    @property
    def groups_in_work(self) -> int:
        """Groups that the environment works on at once.

        With the groups of one batch alone, vLLM would idle while that batch waits for its longest
        answer.
        """
        return self.groups * (1 + BATCHES_AHEAD)


BATCHES = {
    "arithmetic": BatchShape(groups=16, group_size=8),
    "calculator": BatchShape(groups=8, group_size=16),
}
"""Shape of a batch in each environment.

Late in an arithmetic run, nearly all answers to one problem get the same reward. The reward of a
batch is then an average over its problems, not over its answers. If 2 of 8 problems fail, it drops
to 75 % although the model has not changed. More problems with fewer answers each cost the same.
"""
MICRO_BATCH = 64
MAX_RESPONSE_TOKENS = 96
MAX_MODEL_LENGTH = 512
MAX_SEQUENCES = 256
