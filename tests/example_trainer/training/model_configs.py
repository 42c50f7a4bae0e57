"""config.json of the models that the pages name, as far as the memory plan reads it."""

from __future__ import annotations

from typing import Any

from bench.gpu.shapes import SHAPES

MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    name: SHAPES[name.removeprefix("Qwen/").removesuffix("-Instruct").lower()]
    | {"max_position_embeddings": 40960 if name.startswith("Qwen/Qwen3") else 32768}
    for name in (
        "Qwen/Qwen2.5-1.5B-Instruct",
        "Qwen/Qwen2.5-3B",
        "Qwen/Qwen2.5-3B-Instruct",
        "Qwen/Qwen2.5-7B-Instruct",
        "Qwen/Qwen2.5-14B-Instruct",
        "Qwen/Qwen2.5-72B-Instruct",
        "Qwen/Qwen3-1.7B",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-30B-A3B",
    )
}
PARAMETERS = {
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54e9, "Qwen/Qwen2.5-3B": 3.09e9, "Qwen/Qwen2.5-3B-Instruct": 3.09e9,
    "Qwen/Qwen2.5-7B-Instruct": 7.62e9, "Qwen/Qwen2.5-14B-Instruct": 14.77e9, "Qwen/Qwen2.5-72B-Instruct": 72.7e9,
    "Qwen/Qwen3-1.7B": 1.72e9, "Qwen/Qwen3-8B": 8.19e9,
    "Qwen/Qwen3-30B-A3B": 30.5e9,
}  # fmt: skip
"""Parameters of each, as its page on the hub states them (a tied output matrix counted once)."""
