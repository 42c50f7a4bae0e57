"""Make the model that studies/learning/trainings.py trains: tokenizer, weights and training log, from generated
solutions alone.

    python -m studies.word_problems.make_model --output DIR  # one GPU, minutes
    python -m studies.word_problems.make_model --output DIR --shape tiny --device cpu  to try it
    python -m studies.word_problems.make_model --output DIR --shape mixture  of experts, for mixtures.py

It is shown worked-out stories (problems.py) until its samples solve a share of the rewarded
problems. Some of these have more steps than any story. Then its learning rate falls to zero over
the last steps. DIR gets what Hugging Face writes, bfloat16 if it was made on a GPU, and
training_log.jsonl: plan, versions, loss, and the share solved by steps.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = (
    "false"  # each worker has a thread of its own; read when the library loads
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from bench.measured import Options, command_line, measured
from studies.starter_model.measuring import generate
from studies.starter_model.tokenizer import save_tokenizer, train_tokenizer
from studies.starter_model.training import new_model
from studies.word_problems.problems import (
    EASY_STEPS,
    REWARDED_STEPS,
    SUPERVISED_STEPS,
    Story,
    held_out,
    training,
)

MAX_POSITIONS = 1024
IGNORED = -100
PROMPT_WEIGHT = 0.3
"""Loss of a prompt's token beside 1 for a solution's. Names that recur teach the model to look back
and copy."""


@dataclass(frozen=True)
class Plan:
    """All that determines the model, but for the order in which a GPU adds.

    Attributes:
        hidden, layers, heads, kv_heads, intermediate: the shape; a head has `head_dim` dimensions.
        batch: solutions in a step.
        most_steps: of training, if the share is not reached.
        target: share of sampled answers to held-out problems of `rewarded` steps that must be right
            before the rate falls.
        cooldown: steps over which it then falls.
        measure_every: steps between measurements, each of `measured_on` problems.
        longest: tokens of an answer, at most; solutions of `rewarded` steps are well below.
        shown, rewarded: steps of the stories that it is shown and measured on.
        experts, chosen: of each layer, and of each token; 0: the model is dense. An expert's inner
            width is `intermediate`.
    """

    hidden: int = 512
    layers: int = 12
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    intermediate: int = 1536
    batch: int = 384
    most_steps: int = 4000
    target: float = 0.2
    cooldown: int = 150
    warmup: int = 100
    measure_every: int = 100
    measured_on: int = 250
    longest: int = 256
    matrix_rate: float = 0.02
    other_rate: float = 2e-3
    shown: tuple[int, ...] = SUPERVISED_STEPS
    rewarded: tuple[int, ...] = REWARDED_STEPS
    experts: int = 0
    chosen: int = 0
    seed: int = 0

    @property
    def shape(self) -> dict[str, int]:
        """Sizes of Qwen3Config, or of Qwen3MoeConfig."""
        mixture = {}
        if self.experts:
            mixture = {
                "num_experts": self.experts,
                "num_experts_per_tok": self.chosen,
                "moe_intermediate_size": self.intermediate,
                "norm_topk_prob": True,
            }
        return mixture | {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": MAX_POSITIONS,
        }


_TINY = Plan(
    hidden=128, layers=2, heads=2, kv_heads=2, head_dim=64, intermediate=256, batch=16, most_steps=20, cooldown=5, warmup=5,
    measure_every=10, measured_on=4, longest=24, shown=EASY_STEPS, rewarded=EASY_STEPS,
)  # fmt: skip
PLANS = {
    "medium": Plan(),
    "mixture": Plan(layers=8, intermediate=512, experts=16, chosen=4),
    "tiny": _TINY,
    "tiny-mixture": replace(_TINY, intermediate=64, experts=4, chosen=2),
}
BALANCE = 0.01
"""Weight of transformers' load balance loss while a mixture learns from solutions."""


def make_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of the stories, whose digits are never merged; the same for the same
    seed.
    """
    stories = itertools.islice(training(seed, range(1, max(REWARDED_STEPS) + 1)), 3_000)
    corpus = (
        f"{role}\n{text}"
        for s in stories
        for role, text in (("user", s.question), ("assistant", s.solution))
    )
    return train_tokenizer(corpus, MAX_POSITIONS)


class Solutions(IterableDataset[tuple[Tensor, Tensor, Tensor]]):
    """Batches of solved stories: tokens, targets and loss weights, each [batch, length].

    Worker w of n makes every n-th batch from a stream of its own, so that the batches are the same
    whenever n is.
    """

    def __init__(self, plan: Plan, tokenizer: PreTrainedTokenizerFast) -> None:
        self.plan, self.tokenizer = plan, tokenizer

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        info = torch.utils.data.get_worker_info()
        stories = training(self.plan.seed * 1000 + (info.id if info else 0), self.plan.shown)
        while True:
            yield batch_of(list(itertools.islice(stories, self.plan.batch)), self.tokenizer)


def batch_of(
    stories: list[Story], tokenizer: PreTrainedTokenizerFast
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets (IGNORED where there is none) and weights of solved stories, padded on the
    right to a multiple of 32.
    """
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": story.question}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for story in stories
    ]
    asked = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    solved = tokenizer([story.solution for story in stories], add_special_tokens=False)["input_ids"]
    rows = [
        [*question, *answer, tokenizer.eos_token_id]
        for question, answer in zip(asked, solved, strict=True)
    ]
    width = -(-max(map(len, rows)) // 32) * 32
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full_like(tokens, IGNORED)
    weights = torch.zeros(len(rows), width)
    for i, (row, question) in enumerate(zip(rows, asked, strict=True)):
        tokens[i, : len(row)] = torch.tensor(row)
        targets[i, : len(row) - 1] = tokens[i, 1 : len(row)]
        weights[i, : len(question) - 1] = PROMPT_WEIGHT
        weights[i, len(question) - 1 : len(row) - 1] = 1.0
    return tokens, targets, weights


def solved_by_steps(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, plan: Plan, temperature: float
) -> dict[int, float]:
    """The share of held-out problems whose answer is right, by their number of steps."""
    stories = held_out(plan.measured_on, plan.rewarded)
    torch.manual_seed(plan.seed)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        replies = generate(
            model, tokenizer, stories, temperature=temperature, max_tokens=plan.longest
        )
    right = [
        story.problem.score(tokenizer.decode(reply, skip_special_tokens=True)) > 0
        for story, reply in zip(stories, replies, strict=True)
    ]
    by_steps = {
        steps: [ok for ok, story in zip(right, stories, strict=True) if story.steps == steps]
        for steps in plan.rewarded
    }
    return {steps: round(sum(found) / len(found), 4) for steps, found in by_steps.items() if found}


def optimizers_of(model: Qwen3ForCausalLM, plan: Plan) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for all other parameters: among them
    routers, and experts, which are stacked.
    """
    matrices, others = list[torch.nn.Parameter](), list[torch.nn.Parameter]()
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name and ".mlp.gate." not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=plan.matrix_rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=plan.other_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def loss_of(
    model: Qwen3ForCausalLM, tokens: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of a batch, with its gradient; and the mean over the solutions' tokens, without."""
    device, is_mixture = tokens.device.type, hasattr(model.config, "num_experts")
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        output = model(input_ids=tokens, use_cache=False, output_router_logits=is_mixture)
    each = torch.nn.functional.cross_entropy(
        output.logits.float().flatten(0, 1),
        targets.flatten(),
        reduction="none",
        ignore_index=IGNORED,
    )
    of_solutions = weights.flatten() == 1.0
    loss = (each * weights.flatten()).sum() / of_solutions.sum()
    if is_mixture:
        loss = loss + BALANCE * output.aux_loss
    return loss, each.detach()[of_solutions].mean()


def train(
    plan: Plan,
    tokenizer: PreTrainedTokenizerFast,
    device: torch.device,
    workers: int,
    seconds: float,
    log: Any,
) -> Qwen3ForCausalLM:
    """Train on solutions until the plan's share is solved, or its steps or the seconds are over."""
    model = new_model(tokenizer, plan.seed, plan.shape).to(device)
    optimizers = optimizers_of(model, plan)
    peaks = [plan.matrix_rate, plan.other_rate]
    loader = iter(
        DataLoader(
            Solutions(plan, tokenizer),
            batch_size=None,
            num_workers=workers,
            pin_memory=device.type == "cuda",
        )
    )
    losses: list[Tensor] = []
    last = plan.most_steps
    began = time.monotonic()
    for step in range(plan.most_steps):
        tokens, targets, weights = (part.to(device, non_blocking=True) for part in next(loader))
        share = min(1.0, (step + 1) / plan.warmup, (last - step) / plan.cooldown)
        loss, of_solutions = loss_of(model, tokens, targets, weights)
        loss.backward()
        losses.append(of_solutions)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % plan.measure_every == 0 and last == plan.most_steps:
            model.eval()
            found = solved_by_steps(model, tokenizer, plan, temperature=1.0)
            model.train()
            mean = sum(found.values()) / len(found)
            mean_loss = torch.stack(losses).mean().item()
            losses.clear()
            log(
                {
                    "step": step + 1,
                    "loss": round(mean_loss, 5),
                    "solved": round(mean, 4),
                    "seconds": round(time.monotonic() - began, 1),
                }
            )
            if mean >= plan.target or time.monotonic() - began > seconds:
                last = min(plan.most_steps, step + 1 + plan.cooldown)
        if step + 1 == last:
            break
    log({"steps": step + 1, "seconds": round(time.monotonic() - began, 1)})
    return model.eval()


OPTIONS: Options = {
    "--output": {"type": Path, "required": True, "help": "folder to write"},
    "--shape": {"choices": PLANS, "default": "medium"},
    "--device": {"choices": ["cuda", "cpu"], "default": "cuda"},
    "--seed": {"type": int, "default": 0},
    "--target": {"type": float, "help": "see Plan.target; default: the shape's"},
    "--most-steps": {"type": int, "help": "see Plan.most_steps; default: the shape's"},
    "--seconds": {
        "type": float,
        "default": 300.0,
        "help": "after which the rate falls in any case (default: %(default)g)",
    },
    "--workers": {
        "type": int,
        "default": 8,
        "help": "processes that make batches; 0: this one (default: %(default)s)",
    },
}


def main(arguments: list[str] | None = None) -> None:
    """Make the model, and log how much it solves."""
    options = command_line(__doc__, OPTIONS).parse_args(arguments)
    given = {
        name: getattr(options, name)
        for name in ("seed", "target", "most_steps")
        if getattr(options, name) is not None
    }
    plan = replace(PLANS[options.shape], **given)
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(plan.seed)
    with (output / "training_log.jsonl").open("w", encoding="utf-8") as file:

        def log(entry: dict[str, Any]) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            print(json.dumps(entry), flush=True)

        device = torch.device(options.device)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        hardware = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        log({"plan": asdict(plan), **versions, "hardware": hardware, "measured": measured()})
        model = train(plan, tokenizer, device, options.workers, options.seconds, log)
        log({"parameters": sum(p.numel() for p in model.parameters())})
        if device.type == "cuda":
            model = model.to(torch.bfloat16)
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            log({f"solved_{name}": solved_by_steps(model, tokenizer, plan, temperature)})
    model.save_pretrained(output)
    save_tokenizer(tokenizer, output)


if __name__ == "__main__":
    main()
