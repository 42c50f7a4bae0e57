"""A run that a test makes up: a real rollout service, and what a trainer and an environment would
have written and posted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.atroposlib.service.conftest import Service, environment, trainer


def row(step: int, **fields: Any) -> dict[str, Any]:
    """A step of metrics.jsonl, as far as pages draw it; the reward rises from -0.8 towards 1."""
    reward = 1 - 1.8 * math.exp(-step / 12)
    return {
        "step": step, "reward_mean": reward, "response_length_mean": 6 + 18 * (reward + 0.8) / 1.8, "kl": 1e-4 * step,
        "entropy": 0.7 - 0.01 * min(step, 50), "clip_fraction": 0.01, "clip_fraction_low": 0.004, "clip_fraction_high": 0.006,
        "tokens_per_second": 400.0 + step, "mfu": None, "age_mean": 0.5, "age_max": 1, "grad_norm": 0.9, "lr": 5e-4,
        "weight_version": step, "seconds_wait": 2.0, "seconds_train": 1.2, "seconds_sync": 0.2, "sync/transfer": 0.11,
        "sync/commit": 0.06, "bytes_moved": 9155840, "checksum": f"{step:032x}", "params_mapped": 42, "params_total": 42,
        **fields,
    }  # fmt: skip


def tokens_of(data: bytes, vocabulary: dict[str, int]) -> list[int]:
    """A token for each byte, by the byte-level alphabet that such tokenizers share."""
    return [vocabulary[CHARACTERS[byte]] for byte in data]


def _characters() -> list[str]:
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


CHARACTERS = _characters()
"""The character by which a byte-level tokenizer writes each byte."""


@dataclass
class MadeUpRun:
    """A service, and the part of its trainer and of its environment.

    Attributes:
        folder: the run's.
        service: to which it posts.
        tokenizer: the folder of a tokenizer with a token for each byte.
        headers: of each request, such as the one with the key.
    """

    folder: Path
    service: Service
    tokenizer: Path
    headers: dict[str, str] = field(default_factory=dict)
    steps: int = 0

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.service.port}"

    @property
    def metrics(self) -> Path:
        return self.folder / "trainer" / "metrics.jsonl"

    def post(self, path: str, body: Any) -> Any:
        answer = self.service.http.post(path, json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str, **params: Any) -> Any:
        answer = self.service.http.get(path, params=params, headers=self.headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def begin(self, name: str = "arithmetic", group_size: int = 2) -> int:
        """Register a trainer and one environment; returns the latter's id."""
        self.metrics.parent.mkdir(parents=True, exist_ok=True)
        self.post(
            "/register",
            trainer(
                model=str(self.tokenizer), log_dir=str(self.metrics.parent), batch_size=group_size
            ),
        )
        self.get("/batch")
        told = environment(desired_name=name, group_size=group_size)
        return int(self.post("/register-env", told)["env_id"])

    def step(self, count: int = 1, **fields: Any) -> None:
        """Write the next steps, as the trainer does: whole lines."""
        with self.metrics.open("a") as file:
            for _ in range(count):
                self.steps += 1
                file.write(json.dumps(row(self.steps, **fields)) + "\n")

    def group(
        self, prompt: str, responses: Sequence[bytes], scores: Sequence[float], **fields: Any
    ) -> dict[str, Any]:
        """A group of responses to one prompt, as an environment posts it."""
        vocabulary = json.loads((self.tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
        asked = tokens_of(prompt.encode(), vocabulary)
        answered = [tokens_of(response, vocabulary) for response in responses]
        return {
            "tokens": [asked + tokens for tokens in answered],
            "masks": [[-100] * len(asked) + tokens for tokens in answered],
            "scores": list(scores),
            "inference_logprobs": [
                [1.0] * len(asked) + [-0.01 * (i % 300) for i in range(len(t))] for t in answered
            ],
            **fields,
        }

    def sample(
        self, prompt: str, responses: Sequence[bytes], scores: Sequence[float], **fields: Any
    ) -> dict[str, Any]:
        """Post such a group; returns it."""
        posted = self.group(prompt, responses, scores, **fields)
        self.post("/scored_data", posted)
        return posted
