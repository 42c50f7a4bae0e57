"""Batches straight from a vLLM server, sampled when they are asked for, in an order that time has no part in."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from example_trainer.batch.client import TrainedBatch
from example_trainer.batch.groups import NOT_TRAINED
from example_trainer.batch.prefetch import ReadyBatch, Upkeep
from example_trainer.batch.problems import Problem
from example_trainer.batch.reader import BatchReader
from example_trainer.errors import ModelError
from example_trainer.vllm_client import VLLMClient

_SECONDS = 600.0
"""One group may take this long."""
TEMPERATURE = 1.0


class Sampler:
    """Asks a server of this project for completions and scores them.

    Args:
        url: of the server.
        folder: holds the tokenizer.
        group_size: completions of each question.
        max_tokens: of each completion.
        seed: of the first request; every sample of a run has another one.
        api_key: bearer token, if the server asks for one.

    Raises:
        ModelError: there is no tokenizer, or it has no chat template.
    """

    def __init__(self, url: str, folder: str, group_size: int, max_tokens: int, seed: int, api_key: str | None = None) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ModelError(f"no tokenizer in {folder}: {str(error).splitlines()[0]}") from error
        if not self._tokenizer.chat_template:
            raise ModelError(f"the tokenizer in {folder} has no chat template; give an instruction-tuned model")
        self._group_size, self._max_tokens, self._next_seed = group_size, max_tokens, seed << 32
        self._client = VLLMClient(url, _SECONDS, api_key)

    def groups(self, problems: Sequence[Problem]) -> list[dict[str, Any]]:
        """One scored group for each problem, in their order, as the rollout service would hand them over.

        Raises:
            BridgeError: the server refused, or did not answer.
        """
        seeds = [self._next_seed + number * self._group_size for number in range(len(problems))]
        self._next_seed += len(problems) * self._group_size
        with ThreadPoolExecutor(max_workers=len(problems)) as pool:
            return list(pool.map(self._group, problems, seeds))

    def _group(self, problem: Problem, seed: int) -> dict[str, Any]:
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], add_generation_prompt=True, tokenize=False
        )
        prompt = self._tokenizer.encode(text, add_special_tokens=False)
        body = {
            "prompt": {"prompt_token_ids": prompt},
            "n": self._group_size,
            "max_tokens": self._max_tokens,
            "temperature": TEMPERATURE,
            "seed": seed,
            "return_text": False,  # decoded here, and so off the server's way
            "token_logprobs": True,
        }
        answer = self._client.call("/generate", body)
        sampled, logprobs = answer["token_ids"], answer["token_logprobs"]
        texts = [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in sampled]
        return {
            "tokens": [prompt + tokens for tokens in sampled],
            "masks": [[NOT_TRAINED] * len(prompt) + tokens for tokens in sampled],
            "inference_logprobs": [[1.0] * len(prompt) + values for values in logprobs],
            "scores": [problem.score(text) for text in texts],
            "weight_versions": answer["weight_versions"],
            "weight_version_spans": answer["weight_version_spans"],
            "sampling_params": [{"temperature": TEMPERATURE, "max_tokens": self._max_tokens}] * len(sampled),
            "finish_reasons": answer["finish_reasons"],
        }

    def close(self) -> None:
        """Hang up."""
        self._client.close()


class SampledBatches:
    """What a training takes its batches from where sampler and trainer take turns; see prefetch.Batches.

    Every batch is sampled under the weights that it is trained on with, and nobody needs to be told what became of it.

    Args:
        groups: problems in a batch.
        device: the trainer's.
    """

    def __init__(
        self, sampler: Sampler, problems: Iterator[Problem], groups: int, reader: BatchReader, device: torch.device
    ) -> None:
        self._sampler, self._problems, self._groups = sampler, problems, groups
        self._reader, self._device = reader, device

    def next(self, version: int, upkeep: Upkeep | None = None) -> ReadyBatch:
        """Sample a batch.

        Raises:
            BatchError: nothing in it can be trained on.
            BridgeError: the server refused, or did not answer.
        """
        begun = time.perf_counter()
        groups = self._sampler.groups(list(itertools.islice(self._problems, self._groups)))
        sampled = time.perf_counter()
        packed = self._reader.read(groups, version)
        on_device = [[one.to(self._device) for one in bins] for (bins,) in packed.minibatches]
        return ReadyBatch(on_device, packed.figures(version), None, 0, sampled - begun, time.perf_counter() - sampled)

    held: tuple[TrainedBatch, ...] = ()
    owes = False

    def begin(self, version: int) -> None:
        """Nothing is sampled before it is asked for."""

    def acknowledge(self, version: int, skipped: str | None = None, hold: bool = False) -> None:
        """Nobody waits to hear of it."""

    def release(self) -> None:
        """Nobody waits to hear of it."""
