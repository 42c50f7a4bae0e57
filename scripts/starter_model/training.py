"""Supervised training of the starter model, and the measurement of its habits."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from environments.arithmetic_problems import Problem, held_out_problems
from scripts.starter_model.data import Example, Mixture, examples
from scripts.starter_model.habits import BOX_OPEN, boxed

logger = logging.getLogger(__name__)

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
"""About two million parameters. Heads, vocabulary and intermediate size can be halved, for tensor parallelism of degree 2."""
IGNORED = -100
LONG = 80
"""Tokens from which a conversation counts as long."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """All that, with the seed, determines the model."""

    seed: int = 0
    steps: int = 1300
    batch_size: int = 48
    """Examples per step."""
    learning_rate: float = 3e-3
    """Peak of AdamW, for the embedding and the norms. Peaks are reached linearly over ``warmup_steps``, and left linearly to
    zero over the last ``cooldown`` share of the steps."""
    matrix_learning_rate: float = 0.02
    """Peak of Muon, for the weight matrices (Jordan et al. 2024); it needs about half of AdamW's steps here."""
    warmup_steps: int = 60
    cooldown: float = 0.4
    at_once_weight: float = 3.0
    """Weight of a token of an answer given at once beside 1 for any other reply token; those answers have few tokens."""
    prompt_weight: float = 0.5
    """Weight of a prompt token's loss beside 1 for a reply token. Names and things that recur in a story teach the model to
    look back and copy, which is also how it must find its digits."""
    worked_while_learning: float = 0.5
    """Share of worked examples until the last steps."""
    worked_at_the_end: float = 0.27
    """Share of worked examples in the last steps: the probability of that habit in the finished model."""
    settling: float = 0.1
    """Share of the steps that count as the last ones."""

    def mixture(self, step: int) -> Mixture:
        """What the examples of one step are drawn from."""
        settling = step >= self.steps * (1 - self.settling)
        return Mixture(worked=self.worked_at_the_end if settling else self.worked_while_learning)

    def rate(self, step: int) -> float:
        """Learning rate of one step, as a share of its peak."""
        warm = (step + 1) / self.warmup_steps
        cool = (self.steps - step) / (self.steps * self.cooldown)
        return min(1.0, warm, cool)


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int, shape: Mapping[str, int]) -> Qwen3ForCausalLM:
    """A freshly initialised model, float32.

    Args:
        shape: of Qwen3Config: sizes, heads, layers and positions.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        **shape,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def train(plan: TrainingPlan, tokenizer: PreTrainedTokenizerFast, log: Callable[[dict[str, Any]], None]) -> Qwen3ForCausalLM:
    """Train from scratch; the same plan on the same machine with the same number of threads gives the same bits.

    Args:
        log: receives one record every fifty steps.
    """
    torch.use_deterministic_algorithms(True)
    model = new_model(tokenizer, plan.seed, SHAPE)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=plan.matrix_learning_rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, plan.rate) for optimizer in optimizers]
    streams: dict[Mixture, Iterator[Example]] = {}
    model.train()
    losses: list[float] = []
    for step in range(plan.steps):
        mixture = plan.mixture(step)
        stream = streams.setdefault(mixture, examples(plan.seed + len(streams), mixture))
        loss = _accumulate_gradient(model, tokenizer, list(itertools.islice(stream, plan.batch_size)), plan)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        losses.append(loss)
        if (step + 1) % 50 == 0 or step + 1 == plan.steps:
            log(
                {
                    "step": step + 1,
                    "loss": round(sum(losses) / len(losses), 5),
                    "rate": round(plan.rate(step), 4),
                    "worked_share": mixture.worked,
                }
            )
            losses.clear()
    return model.eval()


def _accumulate_gradient(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, batch: Sequence[Example], plan: TrainingPlan
) -> float:
    """Add the gradient of the weighted mean loss per token; returns the plain mean loss per reply token.

    The few long stories go through the model apart from the short problems, so that the latter are not padded to their length.
    """
    rows = [_encode(tokenizer, example, plan) for example in batch]
    parts = [[row for row in rows if (len(row.ids) > LONG) is is_long] for is_long in (False, True)]
    reply_tokens = sum(len(row.ids) - row.reply_start for row in rows)
    total = 0.0
    for part in filter(None, parts):
        weighted, plain = _losses(model, part, plan.prompt_weight)
        (weighted / reply_tokens).backward()
        total += plain / reply_tokens
    return total


@dataclass(frozen=True, slots=True)
class _Row:
    """One conversation as tokens."""

    ids: list[int]
    reply_start: int
    reply_weight: float


def _encode(tokenizer: PreTrainedTokenizerFast, example: Example, plan: TrainingPlan) -> _Row:
    prompt = tokenizer.apply_chat_template(example.messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(prompt)
    ids = [*prompt_ids, *tokenizer.encode(example.reply), tokenizer.eos_token_id]
    return _Row(ids, len(prompt_ids), plan.at_once_weight if example.kind == "at once" else 1.0)


def _losses(model: Qwen3ForCausalLM, rows: Sequence[_Row], prompt_weight: float) -> tuple[Tensor, float]:
    """Cross-entropy summed with weights over all tokens but the first of each row, and summed plainly over the replies."""
    width = max(len(row.ids) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full((len(rows), width), IGNORED)
    weights = torch.full((len(rows), width), prompt_weight)
    in_reply = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        length, start = len(row.ids), row.reply_start
        tokens[i, :length] = torch.tensor(row.ids)
        targets[i, : length - 1] = tokens[i, 1:length]
        weights[i, start - 1] = 1.0  # the token that decides between the habits: its probability is learned as it occurs
        weights[i, start : length - 1] = row.reply_weight
        in_reply[i, start - 1 : length - 1] = True
    # Padding stands on the right, where causal attention never looks back from: no mask is needed.
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    chosen = targets != IGNORED
    losses = torch.nn.functional.cross_entropy(model.lm_head(hidden[chosen]), targets[chosen], reduction="none")
    return (losses * weights[chosen]).sum(), losses.detach()[in_reply[chosen]].sum().item()


@dataclass(frozen=True, slots=True)
class HabitReport:
    """How the model answers held-out problems of one level. All but lengths and counts are fractions from 0 to 1."""

    difficulty: int
    problems: int
    greedy_accuracy: float
    greedy_at_once: float
    """How often the greedy answer is given at once."""
    sampled_accuracy: float
    sampled_at_once: float
    sampled_length: float
    """Mean length of a sampled reply in tokens, end-of-turn token included (temperature 1)."""
    at_once_accuracy: float
    """Greedy, where the first token is made to open a box."""
    worked_accuracy: float
    """Greedy, where the first token may not open a box."""
    worked_length: float
    """Mean length of a reply that is worked out, in tokens."""

    def to_dict(self) -> dict[str, float]:
        """The figures, rounded for print."""
        return {key: round(value, 4) for key, value in asdict(self).items()}


def measure_habits(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, difficulty: int, *, n: int, samples: int = 2, seed: int = 0
) -> HabitReport:
    """Measure both habits on the first ``n`` held-out problems of a level; sampling takes ``samples`` replies of each."""
    problems = held_out_problems(n, difficulty)
    box = tokenizer.convert_tokens_to_ids(BOX_OPEN)
    eos = tokenizer.eos_token_id
    greedy = generate(model, tokenizer, problems)
    at_once = generate(model, tokenizer, problems, first_token=box)
    worked = generate(model, tokenizer, problems, forbidden_first=box)
    torch.manual_seed(seed)
    many = [problem for problem in problems for _ in range(samples)]
    sampled = generate(model, tokenizer, many, temperature=1.0)

    def accuracy(replies: list[list[int]], asked: Sequence[Problem]) -> float:
        texts = [tokenizer.decode([t for t in ids if t != eos]) for ids in replies]
        return sum(t.endswith(boxed(p.answer)) for t, p in zip(texts, asked, strict=True)) / len(asked)

    def mean_length(replies: list[list[int]]) -> float:
        return sum(map(len, replies)) / len(replies)

    return HabitReport(
        difficulty=difficulty,
        problems=n,
        greedy_accuracy=accuracy(greedy, problems),
        greedy_at_once=sum(ids[0] == box for ids in greedy) / n,
        sampled_accuracy=accuracy(sampled, many),
        sampled_at_once=sum(ids[0] == box for ids in sampled) / len(many),
        sampled_length=mean_length(sampled),
        at_once_accuracy=accuracy(at_once, problems),
        worked_accuracy=accuracy(worked, problems),
        worked_length=mean_length(worked),
    )


class Asked(Protocol):
    """A question to be answered."""

    @property
    def question(self) -> str: ...


@torch.no_grad()
def generate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Asked],
    *,
    temperature: float = 0.0,
    first_token: int | None = None,
    forbidden_first: int | None = None,
    max_tokens: int = 48,
) -> list[list[int]]:
    """Replies as token ids, each up to and including its end-of-turn token; temperature 0 is greedy.

    Args:
        problems: whatever has a `question`.
    """
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p.question}], add_generation_prompt=True, tokenize=False)
        for p in problems
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    attention, cache, tokens = batch.attention_mask, None, batch.input_ids
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    replies: list[Tensor] = []
    done = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    for i in range(max_tokens):
        out = model(tokens, attention_mask=attention, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1]
        if i == 0 and forbidden_first is not None:
            logits[:, forbidden_first] = -math.inf
        if i == 0 and first_token is not None:
            chosen = torch.full_like(tokens[:, 0], first_token)
        elif temperature > 0:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1).squeeze(-1)
        else:
            chosen = logits.argmax(-1)
        replies.append(chosen)
        done |= chosen == tokenizer.eos_token_id
        if done.all():
            break
        tokens, positions = chosen[:, None], positions[:, -1:] + 1
        attention = torch.cat([attention, torch.ones_like(tokens)], dim=1)
    rows = torch.stack(replies, dim=1).tolist()
    return [row[: row.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in row else row for row in rows]
