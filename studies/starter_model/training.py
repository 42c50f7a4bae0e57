"""Supervised training of the starter model, in two stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from environments.calculator_server import OFFER
from studies.starter_model.data import Example, Mixture, examples
from studies.starter_model.tokenizer import continuation, conversation

MAX_POSITIONS = 4096
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": MAX_POSITIONS,
}
"""About two million parameters. Heads, vocabulary and intermediate size can be halved, for tensor
parallelism of degree 2."""
IGNORED = -100
LONG = (80, 130)
"""Tokens above which a conversation counts as long, and as very long."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """All that, with the seed, determines the model."""

    seed: int = 0
    steps: int = 1300
    batch_size: int = 48
    """Examples per step."""
    learning_rate: float = 3e-3
    """Peak of AdamW, for the embedding and the norms. Peaks are reached linearly over
    ``warmup_steps``, and left linearly to zero over the last ``cooldown`` share of the steps."""
    matrix_learning_rate: float = 0.02
    """Peak of Muon, for the weight matrices (Jordan et al. 2024); it needs about half of AdamW's
    steps here."""
    warmup_steps: int = 60
    cooldown: float = 0.4
    at_once_weight: float = 3.0
    """Weight of a token of an answer given at once beside 1 for any other reply token; those
    answers have few tokens."""
    prompt_weight: float = 0.5
    """Weight of a prompt token's loss beside 1 for a reply token. Names and things that recur in a
    story teach the model to look back and copy, which is also how it must find its digits."""
    worked_while_learning: float = 0.5
    """Share of worked examples until the last steps."""
    worked_at_the_end: float = 0.27
    """Share of worked examples in the last steps: the probability of that habit in the finished
    model."""
    settling: float = 0.1
    """Share of the steps that count as the last ones."""
    calculator_steps: int = 0
    """Steps of the second stage, in which it learns to ask a calculator where one is offered, and
    keeps what it knows. The starter model has been through none, the calculator's model through
    600."""
    calculator_batch_size: int = 32
    calculator_learning_rate: float = 2e-3
    """Peak of AdamW, for all parameters. It is reached within ``calculator_warmup_steps`` and falls
    linearly to zero."""
    calculator_warmup_steps: int = 15
    offered: float = 0.7
    """Share of the second stage's examples that offer the calculator, until its last steps."""
    offered_at_the_end: float = 0.35
    """The same in its last steps, in which what the others teach is taken up again."""
    calculator_settling: float = 0.35
    """Share of its steps that count as the last ones."""
    called_while_learning: float = 0.8
    """Share of the problems that ask it."""
    called_weight: float = 2.0
    """Weight of a token of a call, and of the box with its result: long numbers are copied, which
    takes longest to learn."""
    guessed_weight: float = 0.5
    """Weight of a token of an answer given at once although the calculator was offered: most are
    guesses anyway."""
    called_at_the_end: float = 0.08
    """The probability of that habit in the finished model. The deciding token has a weight by which
    so many seem to ask."""

    def mixture(self, step: int) -> Mixture:
        """Source of the examples of one step of the first stage."""
        if step >= self.steps * (1 - self.settling):
            return Mixture(worked=self.worked_at_the_end)
        return Mixture(worked=self.worked_while_learning)

    def rate(self, step: int) -> float:
        """Learning rate of one step of the first stage, as a share of its peak."""
        warm = (step + 1) / self.warmup_steps
        cool = (self.steps - step) / (self.steps * self.cooldown)
        return min(1.0, warm, cool)

    def calculator_mixture(self, step: int) -> Mixture:
        """Source of the examples of one step of the second stage."""
        offered = self.offered
        if step >= self.calculator_steps * (1 - self.calculator_settling):
            offered = self.offered_at_the_end
        return Mixture(
            worked=self.worked_at_the_end, offered=offered, called=self.called_while_learning
        )

    def calculator_rate(self, step: int) -> float:
        """Learning rate of one step of the second stage, as a share of its peak."""
        return min(
            (step + 1) / self.calculator_warmup_steps,
            (self.calculator_steps - step) / self.calculator_steps,
        )

    def reply_weight(self, example: Example) -> float:
        """Weight of the tokens of a reply but its first."""
        if example.kind == "called":
            return self.called_weight
        if example.kind != "at once":
            return 1.0
        if example.system == OFFER:
            return self.guessed_weight
        return self.at_once_weight

    def decision_weight(self, example: Example) -> float:
        """Weight of the token with which a reply begins: it decides between the habits, whose
        shares it learns.

        Where calls are shown more often than they shall occur, they count for less and the others
        for more.
        """
        if example.system != OFFER:
            return 1.0
        if example.kind == "called":
            return self.called_at_the_end / self.called_while_learning
        return (1 - self.called_at_the_end) / (1 - self.called_while_learning)


def new_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, shape: Mapping[str, int]
) -> Qwen3ForCausalLM:
    """A freshly initialised model, float32.

    Args:
        shape: of Qwen3Config: sizes, heads, layers and positions. With `num_experts`, of
            Qwen3MoeConfig, and the model is a mixture of experts.
    """
    torch.manual_seed(seed)
    sizes, architecture = Qwen3Config, Qwen3ForCausalLM
    if "num_experts" in shape:
        sizes, architecture = Qwen3MoeConfig, Qwen3MoeForCausalLM
    config = sizes(
        vocab_size=len(tokenizer),
        **shape,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = architecture(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


Log = Callable[[dict[str, Any]], None]


def train(plan: TrainingPlan, tokenizer: PreTrainedTokenizerFast, log: Log) -> Qwen3ForCausalLM:
    """The first stage, from scratch; the same plan on the same machine with the same number of
    threads gives the same bits.

    Args:
        log: receives one record every fifty steps.
    """
    torch.use_deterministic_algorithms(True)
    model = new_model(tokenizer, plan.seed, SHAPE)
    streams: dict[Mixture, Iterator[Example]] = {}

    def gradient(step: int) -> float:
        mixture = plan.mixture(step)
        stream = streams.setdefault(mixture, examples(plan.seed + len(streams), mixture))
        return _accumulate_gradient(
            model, tokenizer, list(itertools.islice(stream, plan.batch_size)), plan
        )

    def record(step: int, loss: float) -> None:
        rate, worked = round(plan.rate(step - 1), 4), plan.mixture(step - 1).worked
        log({"step": step, "loss": loss, "rate": rate, "worked_share": worked})

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=plan.matrix_learning_rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    return _train_stage(model, optimizers, plan.steps, plan.rate, gradient, record)


def train_calculator(
    model: Qwen3ForCausalLM, plan: TrainingPlan, tokenizer: PreTrainedTokenizerFast, log: Log
) -> Qwen3ForCausalLM:
    """The second stage: the model as the first left it learns to ask a calculator.

    As exact as the first, and logged in the same way.
    """
    torch.use_deterministic_algorithms(True)
    streams: dict[Mixture, Iterator[Example]] = {}

    def gradient(step: int) -> float:
        mixture = plan.calculator_mixture(step)
        stream = streams.setdefault(mixture, examples(plan.seed + len(streams), mixture))
        batch = list(itertools.islice(stream, plan.calculator_batch_size))
        return _accumulate_gradient(model, tokenizer, batch, plan)

    def record(step: int, loss: float) -> None:
        rate = round(plan.calculator_rate(step - 1), 4)
        log(
            {
                "step": plan.steps + step,
                "loss": loss,
                "rate": rate,
                "called_share": plan.called_while_learning,
            }
        )

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.calculator_learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    return _train_stage(
        model, [optimizer], plan.calculator_steps, plan.calculator_rate, gradient, record
    )


def _train_stage(
    model: Qwen3ForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    steps: int,
    rate: Callable[[int], float],
    gradient: Callable[[int], float],
    record: Callable[[int, float], None],
) -> Qwen3ForCausalLM:
    """So many steps. `gradient` adds that of a step's examples and gives their loss; `record` gets
    the steps done and the mean loss since it was last called."""
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    model.train()
    losses: list[float] = []
    for step in range(steps):
        losses.append(gradient(step))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            record(step + 1, round(sum(losses) / len(losses), 5))
            losses.clear()
    return model.eval()


def _accumulate_gradient(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    batch: Sequence[Example],
    plan: TrainingPlan,
) -> float:
    """Add the gradient of the weighted mean loss per token; returns the plain mean loss per reply
    token.

    Conversations of different size go through the model apart, so that short ones are not padded to
    the length of stories.
    """
    rows = [_encode(tokenizer, example, plan) for example in batch]
    parts = [
        [row for row in rows if sum(len(row.ids) > limit for limit in LONG) == size]
        for size in range(len(LONG) + 1)
    ]
    reply_tokens = sum(sum(row.in_reply) for row in rows)
    total = 0.0
    for part in filter(None, parts):
        weighted, plain = _losses(model, part)
        (weighted / reply_tokens).backward()
        total += plain / reply_tokens
    return total


@dataclass(frozen=True, slots=True)
class _Row:
    """One conversation as tokens; of each, the weight of its loss and whether it is the model's to
    write.
    """

    ids: list[int]
    weights: list[float]
    in_reply: list[bool]


def _encode(tokenizer: PreTrainedTokenizerFast, example: Example, plan: TrainingPlan) -> _Row:
    eos: int = tokenizer.eos_token_id
    prompt_ids = tokenizer.encode(conversation(tokenizer, example.messages))
    reply_ids = [*tokenizer.encode(example.reply), eos]
    weight = plan.reply_weight(example)
    weights = [plan.prompt_weight] * len(prompt_ids)
    weights += [plan.decision_weight(example), *([weight] * (len(reply_ids) - 1))]
    ids, in_reply = [*prompt_ids, *reply_ids], [False] * len(prompt_ids) + [True] * len(reply_ids)
    if example.result is not None:
        between = tokenizer.encode(continuation(example.result))
        last = [*tokenizer.encode(example.last_reply), eos]
        ids += [*between, *last]
        weights += [0.0] * len(between) + [weight] * len(
            last
        )  # the model must not predict the calculator's answer
        in_reply += [False] * len(between) + [True] * len(last)
    return _Row(ids, weights, in_reply)


def _losses(model: Qwen3ForCausalLM, rows: Sequence[_Row]) -> tuple[Tensor, float]:
    """Cross-entropy summed with weights over all tokens but the first of each row, and summed
    plainly over the replies.
    """
    width = max(len(row.ids) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full((len(rows), width), IGNORED)
    weights = torch.zeros(len(rows), width)
    in_reply = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        length = len(row.ids)
        tokens[i, :length] = torch.tensor(row.ids)
        targets[i, : length - 1] = tokens[i, 1:length]
        weights[i, : length - 1] = torch.tensor(row.weights[1:])
        in_reply[i, : length - 1] = torch.tensor(row.in_reply[1:])
    # Padding stands on the right, where causal attention never looks back from: no mask is needed.
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    chosen = targets != IGNORED
    losses = torch.nn.functional.cross_entropy(
        model.lm_head(hidden[chosen]), targets[chosen], reduction="none"
    )
    return (losses * weights[chosen]).sum(), losses.detach()[in_reply[chosen]].sum().item()
