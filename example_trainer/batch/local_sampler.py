"""Batches straight from a vLLM server, sampled when they are asked for, in an order that time has
no part in.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from atroposlib.inference.chat_template import render_messages
from atroposlib.inference.responses import ResponseDecoder, opened_by
from example_trainer.batch.client import TrainedBatch
from example_trainer.batch.evaluations import Evaluation
from example_trainer.batch.groups import NOT_TRAINED
from example_trainer.batch.prefetch import Upkeep
from example_trainer.batch.problems import Problem
from example_trainer.batch.reader import BatchReader, ReadyBatch
from example_trainer.errors import ModelError, TrainerError
from example_trainer.vllm_client import VLLMClient

_SECONDS = 600.0
"""One group may take this long."""
_AT_ONCE = 64
"""Requests of one answer that are under way at the same time, at most; groups all are."""


class Sampler:
    """Asks a server of this project for completions and scores them.

    Args:
        url: of the server.
        folder: holds the tokenizer.
        group_size: completions of each question.
        max_tokens: of each completion.
        seed: of the first request; every sample of a run has another one.
        temperature: of the completions that are trained on.
        thinking: `enable_thinking` of the chat template; not given: the template's own default.
        routed_experts: training data has the experts of each token.
        api_key: bearer token, if the server asks for one.

    Raises:
        ModelError: the tokenizer is missing, or has no chat template.
    """

    def __init__(
        self,
        url: str,
        folder: str,
        group_size: int,
        max_tokens: int,
        seed: int,
        api_key: str | None = None,
        temperature: float = 1.0,
        thinking: bool | None = None,
        routed_experts: bool = False,
    ) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ModelError(f"no tokenizer in {folder}: {str(error).splitlines()[0]}") from error
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"the tokenizer in {folder} has no chat template; give an instruction-tuned model"
            )
        self._decode = ResponseDecoder(self._tokenizer)
        self._group_size, self._max_tokens, self._next_seed = group_size, max_tokens, seed << 32
        self._temperature, self._routed_experts = temperature, routed_experts
        self._template = {} if thinking is None else {"enable_thinking": thinking}
        self._client = VLLMClient(url, _SECONDS, api_key)

    def groups(self, problems: Sequence[Problem]) -> list[dict[str, Any]]:
        """One scored group for each problem, in their order, as the rollout service would hand them
        over.

        Raises:
            BridgeError: the server refused, or did not answer.
        """
        seeds = [self._next_seed + number * self._group_size for number in range(len(problems))]
        self._next_seed += len(problems) * self._group_size
        with ThreadPoolExecutor(max_workers=len(problems)) as pool:
            return list(pool.map(self._group, problems, seeds))

    def greedy(self, problems: Sequence[Problem]) -> list[tuple[float, int]]:
        """Score and length in tokens of one answer to each problem, sampled at temperature 0.

        Raises:
            BridgeError: the server refused, or did not answer.
        """

        def answered(problem: Problem) -> tuple[float, int]:
            _, opened, answer = self._ask(problem, {"n": 1, "temperature": 0.0})
            (tokens,) = answer["token_ids"]
            return problem.score(self._decode(tokens), opened), len(tokens)

        with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(problems))) as pool:
            return list(pool.map(answered, problems))

    def _group(self, problem: Problem, seed: int) -> dict[str, Any]:
        sampling = {"n": self._group_size, "temperature": self._temperature, "seed": seed}
        if self._routed_experts:
            sampling["routed_experts"] = True
        prompt, opened, answer = self._ask(problem, sampling)
        sampled, logprobs = answer["token_ids"], answer["token_logprobs"]
        return {
            "tokens": [prompt + tokens for tokens in sampled],
            "masks": [[NOT_TRAINED] * len(prompt) + tokens for tokens in sampled],
            "inference_logprobs": [[1.0] * len(prompt) + values for values in logprobs],
            "scores": [problem.score(self._decode(tokens), opened) for tokens in sampled],
            "weight_versions": answer["weight_versions"],
            "weight_version_spans": answer["weight_version_spans"],
            "sampling_params": [{"temperature": self._temperature, "max_tokens": self._max_tokens}]
            * len(sampled),
            "finish_reasons": answer["finish_reasons"],
            "routed_experts": answer.get("routed_experts"),
        }

    def _ask(
        self, problem: Problem, wanted: dict[str, Any]
    ) -> tuple[list[int], str, dict[str, Any]]:
        """Return the prompt's tokens, what the prompt opened (see `opened_by`), and the server's
        answer.
        """
        messages = [{"role": "user", "content": problem.question}]
        text, prompt = render_messages(
            self._tokenizer, messages, add_generation_prompt=True, **self._template
        )
        body = {
            "prompt": {"prompt_token_ids": prompt},
            "max_tokens": self._max_tokens,
            "return_text": False,  # decoded here, and so off the server's way
            "token_logprobs": True,
            **wanted,
        }
        return prompt, opened_by(text), self._client.call("/generate", body)

    def close(self) -> None:
        """Hang up."""
        self._client.close()


@dataclass
class HeldOut:
    """Measures the weights that a server serves, by greedy answers to problems that are not trained
    on.

    Attributes:
        every: weight versions between measurements.
        record: gets each: `solved`, a share, and `response_length_mean`, in tokens.
        measured: the version that was measured last.
    """

    sampler: Sampler
    problems: Sequence[Problem]
    every: int
    record: Callable[[Evaluation], None]
    measured: int | None = field(default=None, init=False)

    def look(self, version: int, last: bool = False) -> None:
        """Measure, if the version's turn has come or it is the last one; never the same version
        twice in a row.
        """
        if version == self.measured or (version % self.every and not last):
            return
        answers = self.sampler.greedy(self.problems)
        solved = sum(score > 0 for score, _ in answers) / len(answers)
        length = sum(length for _, length in answers) / len(answers)
        metrics = {"solved": solved, "response_length_mean": length}
        self.measured = version
        self.record(Evaluation(version, time.time(), None, "held_out", version, metrics))


class SampledBatches:
    """Source of batches where sampler and trainer take turns; see prefetch.Batches.

    Acknowledgements go nowhere. Without staleness, each batch is sampled under the weights that it
    is trained on with. With a staleness of K, the batch of version t is always sampled under
    version max(0, t - K). An asynchronous run has such ages by chance.

        K = 2    trained at    0  1  2  3  4
                 sampled at    0  0  0  1  2

    Each of those batches is there once. Where one is left out, no other of its age is left, and the
    run ends. Without staleness, or before the first step, another is sampled in its place.

    Args:
        groups: problems in a batch.
        device: the trainer's.
        staleness: K.
        last_version: at which the run ends; nothing is sampled ahead for later ones.
        held_out: measures the weights before each batch is sampled.
    """

    def __init__(
        self,
        sampler: Sampler,
        problems: Iterator[Problem],
        groups: int,
        reader: BatchReader,
        device: torch.device,
        staleness: int = 0,
        last_version: int | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        self._sampler, self._problems, self._groups = sampler, problems, groups
        self._reader, self._device = reader, device
        self._staleness, self._last_version, self._held_out = staleness, last_version, held_out
        self._sampled: deque[list[dict[str, Any]]] = deque()

    def next(self, version: int, upkeep: Upkeep | None = None) -> ReadyBatch:
        """The batch whose turn it is.

        Raises:
            BatchError: nothing in it can be trained on.
            BridgeError: the server refused, or did not answer.
        """
        if self._held_out is not None:
            self._held_out.look(version)
        self._sample_ahead(version)
        packed = self._reader.read(self._sampled.popleft(), version)
        on_device = [[one.to(self._device) for one in bins] for (bins,) in packed.minibatches]
        return ReadyBatch(on_device, packed.figures(version), None, 0)

    def _sample_ahead(self, version: int) -> None:
        """Sample under the weights of `version` as many batches as are missing; never none at all."""
        ahead = self._staleness + 1
        if self._last_version is not None:
            ahead = min(ahead, self._last_version - version)
        while len(self._sampled) < max(1, ahead):
            self._sampled.append(
                self._sampler.groups(list(itertools.islice(self._problems, self._groups)))
            )

    held: tuple[TrainedBatch, ...] = ()
    has_unacknowledged = False

    def begin(self, version: int) -> None:
        """Nothing is sampled before it is asked for."""

    def acknowledge(
        self,
        version: int,
        skipped: str | None = None,
        hold: bool = False,
        report: dict[str, Any] | None = None,
    ) -> None:
        """Check that a batch that is left out can be replaced.

        Raises:
            TrainerError: there is none to take its place that is as old.
        """
        if skipped is not None and self._staleness and version:
            raise TrainerError(
                f"a batch was left out at step {version}, and the next one is not --staleness "
                f"{self._staleness} steps old, as all are to be. Give --staleness 0, or mend why "
                f"it was left out: {skipped}"
            )

    def last_report(
        self, report: dict[str, Any] | None, error: str | None, patience: float
    ) -> None:
        """Do nothing: no service reads it."""

    def end_run(self) -> None:
        """No service follows the run."""

    @property
    def in_hand(self) -> None:
        """No service names its batches."""
        return

    def release(self) -> None:
        """Do nothing: no service holds batches."""
