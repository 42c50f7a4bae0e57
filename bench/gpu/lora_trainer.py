"""The trainer's side of exchanging LoRA adapters: a random base model on disk, and two sets of
adapter weights in turn.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.gpu.shapes import SHAPES, STARTER, TOKENIZER_FILES
from bench.gpu.trainer import BenchTrainer, main
from bench.gpu.vllm_server import NUMBERS
from example_trainer.models.decoder import Decoder
from example_trainer.models.hf_checkpoint import save_model
from example_trainer.models.lora.layers import adapters_of, attach_adapters
from example_trainer.models.lora.settings import LoraSettings
from example_trainer.weight_bridge.lora import LoraBridge, LoraServer
from vllm_patching.weights.families import PROJECTIONS, Geometry

RANK = 16


class LoraTrainer(BenchTrainer):
    """BenchTrainer whose weights are adapters on a frozen base model."""

    def save_base(self, folder: str, seed: int = 0) -> dict[str, Any]:
        """Make the base model and write it where the server will read it; the adapters are attached
        afterwards.
        """
        config = SHAPES[self.shape]
        geometry = Geometry.from_config(config)
        model = self.model = Decoder(geometry, self.dtype, self.device)
        generator = torch.Generator(device=self.device).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(std=1.8 / geometry.hidden_size**0.5, generator=generator)
        source = Path(folder).with_name("source")
        source.mkdir(parents=True, exist_ok=True)
        (source / "config.json").write_text(json.dumps(config))
        for name in TOKENIZER_FILES:
            shutil.copy(STARTER / name, source / name)
        model.source = source
        save_model(model, Path(folder))
        settings = self.settings = LoraSettings(RANK, 2.0 * RANK, 0.0, PROJECTIONS)
        attach_adapters(model, settings)
        self.sets = []
        names = [
            found.parameter_name(matrix)
            for found in adapters_of(model)
            for matrix in ("lora_A", "lora_B")
        ]
        parameters = self._adapters = {name: model.get_parameter(name) for name in names}
        for _ in range(2):
            drawn = {}
            for name, parameter in parameters.items():
                # Products as large as the weights under them, so that another adapter shows at
                # once.
                scale = 1.0 / geometry.hidden_size**0.5 if name.endswith("lora_A") else 0.5
                drawn[name] = torch.randn(
                    parameter.shape, generator=generator, device=self.device, dtype=self.dtype
                ).mul_(scale)
            self.sets.append(drawn)
        return {
            "adapter_bytes": sum(p.nbytes for p in parameters.values()),
            "tensors": len(parameters),
            "rank": RANK,
        }

    def write(self, which: int) -> None:
        with torch.no_grad():
            for name, parameter in self._adapters.items():
                parameter.copy_(self.sets[which][name])
        self.served_set = which

    def connect_lora(self, port: int, base_model: str, folder: str) -> dict[str, Any]:
        """Join the server, which compares every bit of the base model, and hand it the first
        adapter.
        """
        assert self.model is not None
        self.url = f"http://localhost:{port}"
        bridge = self.bridge = LoraBridge(
            [LoraServer("localhost", port, self.timeout)], self.settings, Path(folder), base_model
        )
        bridge.serving_dtype()
        bridge.connect(self.model)
        return {
            "params_mapped": bridge.params_mapped,
            "first_swap": self._update(lambda: self.write(0)),
        }

    def _next_update(self, index: int, loaded: bool) -> dict[str, Any]:
        row = self._update(lambda: self.write(1 - self.served_set))
        return {**row, "first_token": self._first_token(index)}

    def first_tokens(self, count: int) -> dict[str, Any]:
        """Median and all seconds of requests for one token each, when nothing is exchanged."""
        seconds = [self._first_token(1000 + index) for index in range(count)]
        return {"median": statistics.median(seconds), "all": seconds}

    def check_adapter(self) -> dict[str, Any]:
        """Do the served logprobs belong to the adapter sent last, and not to the one before?"""
        prompt = self._prompt(0)
        answer = self._sample(prompt, 3, self.url)
        found = {
            key.replace("weights", "adapter"): value
            for key, value in self._compared(prompt, answer).items()
        }
        return {
            **found,
            "weight_versions": sorted(set(answer["weight_versions"])),
            "sent": self.version,
        }

    def commands(self) -> dict[str, Callable[..., Any]]:
        mine = (self.save_base, self.connect_lora, self.first_tokens, self.check_adapter)
        return super().commands() | {method.__name__: method for method in mine}

    def _first_token(self, seed: int) -> float:
        assert self.model is not None
        prompt = [
            (7 * seed + 13 * i) % (self.model.geometry.vocab_size - 10) + 5 for i in range(40)
        ]
        body = {
            "prompt": {"prompt_token_ids": prompt},
            "max_tokens": 1,
            "temperature": 0.0,
            **NUMBERS,
        }
        started = time.monotonic()
        httpx.post(f"{self.url}/generate", json=body, timeout=60).raise_for_status()
        return time.monotonic() - started


if __name__ == "__main__":
    main(LoraTrainer)
