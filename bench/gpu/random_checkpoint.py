"""A checkpoint with random weights whose answers end by chance: every token is about as likely as
any other, and some end.

Input: {"shape", "folder", "cap"}. As many tokens end an answer as make its mean length about half
of `cap`, before the cap. The tokenizer is the starter model's, with a name for every other id,
since some clients read an answer as text.

The files of a large model are written by several threads at the same time, and nothing waits for
the disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.processes import answer_once
from bench.gpu.shapes import SHAPES, write_model_folder
from example_trainer.models.safetensors_writer import make_header
from vllm_patching.weights.families import Geometry, parameters

END_TOKENS_FROM = 150_000
"""First of the ids that end an answer, where the vocabulary is so large; the last ones
otherwise."""
FILE_BYTES = 2 << 30
STD = 0.02
"""Standard deviation of the weights, as transformers initialises these models."""


def end_tokens(vocab_size: int, cap: int) -> list[int]:
    """Ids that end an answer; the tokenizer's own end token is among them."""
    count = max(1, round(2 * vocab_size / cap))
    first = min(END_TOKENS_FROM, vocab_size - count)
    return [2, *range(first, first + count - 1)]


def write(asked: dict[str, Any]) -> dict[str, Any]:
    """Write the folder. Returns its parameters and how many tokens end an answer."""
    from transformers import AutoConfig

    folder, shape = Path(asked["folder"]), dict(SHAPES[asked["shape"]])
    dtype = getattr(torch, shape.pop("torch_dtype"))
    ends = end_tokens(shape["vocab_size"], asked["cap"])
    config = AutoConfig.for_model(**shape | {"eos_token_id": ends})
    config.dtype = dtype
    planned = parameters(Geometry.from_config(SHAPES[asked["shape"]])).values()
    shapes = {tensor.name: tensor.shape for one in planned for tensor in one.tensors}
    write_model_folder(folder, asked["shape"])
    config.save_pretrained(folder)
    _write_weights(folder, shapes, dtype)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ends, "bos_token_id": 0, "pad_token_id": 2})
    )
    _name_every_token(folder / "tokenizer.json", shape["vocab_size"])
    return {"parameters": sum(one.size for one in planned), "end_tokens": len(ends)}


def _write_weights(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    files: list[dict[str, tuple[int, ...]]] = []
    room = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > room:
            files.append({})
            room = FILE_BYTES
        files[-1][name] = shape
        room -= size
    names = [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    with ThreadPoolExecutor(8) as threads:
        for job in [
            threads.submit(_write_file, folder / names[n], held, dtype, n)
            for n, held in enumerate(files)
        ]:
            job.result()
    index = {
        "metadata": {},
        "weight_map": {
            name: file for file, held in zip(names, files, strict=True) for name in held
        },
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_file(
    path: Path, held: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int
) -> None:
    header = make_header({name: (dtype, shape) for name, shape in held.items()}, {"format": "pt"})
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in _values(held, dtype, seed):
            file.write(tensor.cpu().view(-1).view(torch.uint8).numpy().data)


def _values(held: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int) -> Iterator[Tensor]:
    """Ones for norms, zeros for biases, random numbers for the rest."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in held.items():
        if name.endswith("norm.weight"):
            yield torch.ones(shape, dtype=dtype, device=device)
        elif name.endswith(".bias"):
            yield torch.zeros(shape, dtype=dtype, device=device)
        else:
            yield torch.empty(shape, dtype=dtype, device=device).normal_(
                0.0, STD, generator=generator
            )


def _name_every_token(file: Path, vocab_size: int) -> None:
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    named = set(vocabulary.values()) | {token["id"] for token in tokenizer.get("added_tokens", [])}
    vocabulary.update({f"w{number}": number for number in range(vocab_size) if number not in named})
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


if __name__ == "__main__":
    answer_once(write)
