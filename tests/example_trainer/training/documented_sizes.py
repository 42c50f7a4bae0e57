"""The memory plan's answer for each size of model, way to train and card, as docs/your-model.md
shows it.

python -m tests.example_trainer.training.documented_sizes     prints the table
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from example_trainer.config import TrainerConfig
from tests.example_trainer.training.documented_commands import (
    CARDS,
    DEFAULT_SHARE,
    ROOT,
    Documented,
    outcome,
    shown,
)

START, END = "<!-- sizes -->", "<!-- end of sizes -->"
"""Around the table in docs/your-model.md."""
SMALL_CARDS = {"24 GB": (23.6, 23.1), "48 GB": (44.5, 43.9)}
"""GiB in all and free, as an RTX 4090 and an L40S report them before a training."""
MODELS = (
    "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen3-1.7B", "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-8B",
    "Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-72B-Instruct",
)  # fmt: skip
SHARED = 0.45
"""vLLM's share of a GPU that start.sh lets it share with the trainer."""


def ways(model: str) -> dict[str, Documented]:
    """The ways to train a model that the table compares, by the words that it shows."""

    def command(share: float, own_gpus: bool, **options: object) -> Documented:
        config = TrainerConfig.model_validate({"model_name": model, **options})
        return Documented("docs/your-model.md", config, share=share, own_gpus=own_gpus)

    return {
        "full, shared": command(SHARED, False, weight_bridge_mode="shared_vllm", single_copy=True),
        "full, own": command(
            DEFAULT_SHARE, True, weight_bridge_mode="shared_vllm", use_shared_memory=True
        ),
        "LoRA, shared": command(SHARED, False, weight_bridge_mode="lora_only"),
    }


def cell(command: Documented, card: str, cards: Mapping[str, tuple[float, float]]) -> str:
    """The plan's answer, or the number of trainer GPUs with which it would be another one."""
    found = outcome(command, card, cards)
    gpus = re.fullmatch(r"no: (\d+ GPUs)", found)
    return gpus[1] if gpus else shown(found.partition(":")[0])


def sizes_table() -> str:
    """One row for each way; models with the same answers share their rows."""
    cards = {**SMALL_CARDS, **CARDS}
    models: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for model in MODELS:
        answers = tuple(
            (way, *(cell(command, card, cards) for card in cards))
            for way, command in ways(model).items()
        )
        models.setdefault(answers, []).append(model.partition("/")[2].removesuffix("-Instruct"))
    lines = [["model", "way", *cards], ["---"] * (2 + len(cards))]
    for answers, names in models.items():
        lines += [[", ".join(names), *answer] for answer in answers]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def written_sizes() -> str:
    """The table as the page has it."""
    text = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8")
    return text.partition(START)[2].partition(END)[0].strip()


if __name__ == "__main__":
    print(sizes_table())
