"""Measure the starter model on problems that it was not shown: the frequency of each habit, and the
success of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from environments.arithmetic_server import Problem, held_out_problems
from environments.calculator_server import CALL_START, OFFER, call, held_out_calculations
from studies.starter_model.habits import BOX_OPEN, boxed
from studies.starter_model.tokenizer import TURN_END, continuation, conversation


@dataclass(frozen=True, slots=True)
class HabitReport:
    """Sort the model's answers to held-out problems of one level.

    All but lengths and counts are fractions from 0 to 1.
    """

    difficulty: int
    problems: int
    greedy_accuracy: float
    greedy_at_once: float
    """Return how often the greedy answer comes at once."""
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
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    difficulty: int,
    *,
    n: int,
    samples: int = 2,
    seed: int = 0,
) -> HabitReport:
    """Measure both habits on the first
    ``n`` held-out problems of a level; sampling takes ``samples`` replies of each.
    """
    problems = held_out_problems(n, difficulty)
    box = tokenizer.convert_tokens_to_ids(BOX_OPEN)
    eos = tokenizer.eos_token_id
    greedy = generate(model, tokenizer, problems)
    at_once = generate(model, tokenizer, problems, first_token=box)
    worked = generate(model, tokenizer, problems, forbidden_first=(box,))
    torch.manual_seed(seed)
    many = [problem for problem in problems for _ in range(samples)]
    sampled = generate(model, tokenizer, many, temperature=1.0)

    def accuracy(replies: list[list[int]], asked: Sequence[Problem]) -> float:
        texts = [tokenizer.decode([t for t in ids if t != eos]) for ids in replies]
        return sum(t.endswith(boxed(p.answer)) for t, p in zip(texts, asked, strict=True)) / len(
            asked
        )

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


@dataclass(frozen=True, slots=True)
class CallReport:
    """Sort the model's replies to held-out problems, with the calculator on offer.

    All but level and count are fractions from 0 to 1.
    """

    calculator_level: int
    problems: int
    greedy_accuracy: float
    """Greedy; a call without its answer counts as wrong."""
    sampled_called: float
    """Return how often a sampled reply begins a call (temperature 1)."""
    worked_accuracy: float
    """Greedy, where the first token may open neither a box nor a call."""
    called_accuracy: float
    """Greedy, where the first token is made to open a call: the right call, and what it gives in a
    box."""

    def to_dict(self) -> dict[str, float]:
        """The figures, rounded for print."""
        return {key: round(value, 4) for key, value in asdict(self).items()}


def measure_calls(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    level: int,
    *,
    n: int,
    samples: int = 2,
    seed: int = 0,
) -> CallReport:
    """Measure the habits of the first ``n`` held-out problems of one of the calculator's levels."""
    problems = held_out_calculations(n, (level,))
    prompts = [
        conversation(
            tokenizer,
            [{"role": "system", "content": OFFER}, {"role": "user", "content": problem.question}],
        )
        for problem in problems
    ]
    box, start = tokenizer.convert_tokens_to_ids(BOX_OPEN), tokenizer.encode(CALL_START)[0]
    eos = tokenizer.eos_token_id

    def right(replies: list[list[int]]) -> list[bool]:
        texts = [tokenizer.decode([t for t in ids if t != eos]) for ids in replies]
        return [
            text.endswith(boxed(problem.answer))
            for text, problem in zip(texts, problems, strict=True)
        ]

    greedy = right(complete(model, tokenizer, prompts))
    worked = right(complete(model, tokenizer, prompts, forbidden_first=(box, start), max_tokens=96))
    calls = complete(model, tokenizer, prompts, first_token=start)
    called = [
        ids == [*tokenizer.encode(call(problem.expression)), eos]
        for ids, problem in zip(calls, problems, strict=True)
    ]
    goes_on = [
        prompt + call(problem.expression) + TURN_END + continuation(str(problem.answer))
        for prompt, problem in zip(prompts, problems, strict=True)
    ]
    copied = right(complete(model, tokenizer, goes_on))
    torch.manual_seed(seed)
    sampled = complete(model, tokenizer, prompts * samples, temperature=1.0, max_tokens=1)
    return CallReport(
        calculator_level=level,
        problems=n,
        greedy_accuracy=sum(greedy) / n,
        sampled_called=sum(ids[0] == start for ids in sampled) / len(sampled),
        worked_accuracy=sum(worked) / n,
        called_accuracy=sum(asked and put for asked, put in zip(called, copied, strict=True)) / n,
    )


class Asked(Protocol):
    """A question to be answered."""

    @property
    def question(self) -> str: ...


def generate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Asked],
    **how: Any,
) -> list[list[int]]:
    """Replies to problems, which are whatever has a `question`; `how` goes to `complete`."""
    prompts = [
        conversation(tokenizer, [{"role": "user", "content": problem.question}])
        for problem in problems
    ]
    return complete(model, tokenizer, prompts, **how)


@torch.no_grad()
def complete(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    temperature: float = 0.0,
    first_token: int | None = None,
    forbidden_first: Sequence[int] = (),
    max_tokens: int = 48,
) -> list[list[int]]:
    """Return the model's continuation of each text: token ids up to and including its end-of-turn
    token; temperature 0 is greedy.
    """
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left").to(
        model.device
    )
    attention, cache, tokens = batch.attention_mask, None, batch.input_ids
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    replies: list[Tensor] = []
    done = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    for i in range(max_tokens):
        out = model(
            tokens,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
        )
        cache, logits = out.past_key_values, out.logits[:, -1]
        if i == 0 and forbidden_first:
            logits[:, list(forbidden_first)] = -math.inf
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
    return [
        row[: row.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in row else row
        for row in rows
    ]
