"""A checkpoint with random weights whose answers end by chance: every token is about as likely as any other, and some end.

Asked for {"shape", "folder", "cap"}: so many tokens end an answer that half of `cap` would be about its mean length without the
cap. The tokenizer is the starter model's, with a name for every other id, since an answer is text to some who ask.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bench.gpu.processes import answer_once
from bench.gpu.shapes import SHAPES, write_model_folder

END_TOKENS_FROM = 150_000
"""First of the ids that end an answer, where the vocabulary is so large; the last ones otherwise."""


def end_tokens(vocab_size: int, cap: int) -> list[int]:
    """Ids that end an answer; the tokenizer's own end token is among them."""
    count = max(1, round(2 * vocab_size / cap))
    first = min(END_TOKENS_FROM, vocab_size - count)
    return [2, *range(first, first + count - 1)]


def write(asked: dict[str, Any]) -> dict[str, Any]:
    """Write the folder. Returns its parameters and how many tokens end an answer."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    folder, shape = Path(asked["folder"]), dict(SHAPES[asked["shape"]])
    dtype = getattr(torch, shape.pop("torch_dtype"))
    ends = end_tokens(shape["vocab_size"], asked["cap"])
    config = Qwen3Config(**{key: value for key, value in shape.items() if key != "model_type"} | {"eos_token_id": ends})
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    write_model_folder(folder, asked["shape"])
    model.to("cpu").save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "bos_token_id": 0, "pad_token_id": 2}))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    named = set(vocabulary.values()) | {token["id"] for token in tokenizer.get("added_tokens", [])}
    vocabulary.update({f"w{number}": number for number in range(shape["vocab_size"]) if number not in named})
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return {"parameters": model.num_parameters(), "end_tokens": len(ends)}


if __name__ == "__main__":
    answer_once(write)
