"""A trainer that samples from a server and recomputes the logprob of every token.

As bench.gpu.trainer, a process of its own, which takes commands line by line.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import torch

from bench.gpu.shapes import SHAPES
from bench.gpu.trainer import BenchTrainer
from bench.gpu.vllm_server import NUMBERS
from example_trainer.models.packing import Packing

PACKED_TOKENS = 16384
"""Tokens of one forward pass, about."""
REQUEST_SECONDS = 300.0
COUNTERS = {"preemptions": "num_preemptions_total", "prefix_cache_hits": "prefix_cache_hits_total"}


@dataclass(frozen=True)
class Rollout:
    """A prompt, what was sampled after it, and the logprobs that the server gave for that."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def packed(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Rollouts in parts of about PACKED_TOKENS tokens, the longest first."""
    rows = sorted(rollouts, key=lambda r: len(r.prompt) + len(r.tokens))
    parts: list[list[Rollout]] = []
    while rows:
        part, size = [], 0
        while rows and size < PACKED_TOKENS:
            part.append(rows.pop())
            size += len(part[-1].prompt) + len(part[-1].tokens)
        parts.append(part)
    return parts


class ComparingTrainer(BenchTrainer):
    """BenchTrainer that compares logprobs."""

    def cell(
        self,
        concurrency: int,
        requests: int,
        prompts: Sequence[int],
        new: Sequence[int],
        seed: int = 0,
        shared: int = 0,
    ) -> dict[str, Any]:
        """Sample, and compare the bits of every logprob.

        Args:
            concurrency: requests in flight.
            requests: how many in all.
            prompts: their lengths, taken in turn.
            new: fewest and most tokens to sample for each.
            seed: of the prompts; request i samples with seed + i (and other lengths for another
                seed).
            shared: that many first tokens are the same in all prompts, whatever the seed.

        Returns:
            tokens, mismatched, max_difference, kl, first (of the mismatches), std of the logprobs
            and seconds. Then the increase of the server's counters of preemptions and of tokens
            found in the prefix cache.
        """

        def sample() -> list[list[list[Any]]]:
            drawn = asyncio.run(self._rollouts(concurrency, requests, prompts, new, seed, shared))
            return [[one.prompt, one.tokens, one.logprobs] for one in drawn]

        before, started = self._asked(self._counters), time.monotonic()
        rollouts = [Rollout(*row) for row in self._asked(sample)]
        sampled, after = time.monotonic(), self._asked(self._counters)
        comparison = self.compare(rollouts)
        seconds = {
            "sampling": round(sampled - started, 2),
            "comparing": round(time.monotonic() - sampled, 2),
        }
        return {
            **comparison,
            **{name: after[name] - before[name] for name in COUNTERS},
            "seconds": seconds,
        }

    def compare(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """Recompute each sampled token's logprob, and compare it with the server's as a 32-bit
        integer.
        """
        parts = packed(rollouts)
        theirs = [value for part in parts for r in part for value in r.logprobs]
        one = torch.tensor(theirs, dtype=torch.float32)
        other = torch.cat(self._recomputed(parts))
        wrong = (one.view(torch.int32) != other.view(torch.int32)).nonzero().flatten()
        first = int(wrong[0]) if len(wrong) else None
        ratio = (other - one).double()
        return {
            "tokens": len(one),
            "mismatched": len(wrong),
            "max_difference": float((one - other).abs().max()),
            "kl": float((ratio.exp() - 1 - ratio).mean()),
            "first": None
            if first is None
            else {"index": first, "vllm": one[first].item(), "trainer": other[first].item()},
            "logprob_std": float(one.std()),
        }

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {**super().commands(), "cell": self.cell}

    def _recomputed(self, parts: Sequence[Sequence[Rollout]]) -> list[torch.Tensor]:
        """The logprobs of each part's tokens."""
        return [self._logprobs(part).cpu() for part in parts]

    @torch.no_grad()
    def _logprobs(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        assert self.model is not None
        lengths = [len(r.prompt) + len(r.tokens) - 1 for r in rollouts]
        ids = torch.tensor(
            [t for r in rollouts for t in (r.prompt + r.tokens)[:-1]], device=self.device
        )
        packing = Packing(lengths, self.device)
        # The state at a token predicts the next one, the last token of the prompt the first sampled
        # one.
        sources = [
            torch.arange(begin + len(r.prompt) - 1, begin + length)
            for begin, length, r in zip(packing.begins, lengths, rollouts, strict=False)
        ]
        hidden = self.model(ids, packing).index_select(0, torch.cat(sources).to(self.device))
        targets = torch.tensor([t for r in rollouts for t in r.tokens], device=self.device)
        counts = Packing([len(r.tokens) for r in rollouts], self.device)
        return self.model.chosen_logprobs(hidden, targets, counts)[0]

    async def _rollouts(
        self,
        concurrency: int,
        requests: int,
        prompts: Sequence[int],
        new: Sequence[int],
        seed: int,
        shared: int,
    ) -> list[Rollout]:
        vocab: int = SHAPES[self.shape]["vocab_size"]
        prefix = [random.Random(f"prefix {shared}").randrange(3, vocab) for _ in range(shared)]
        draw = random.Random(seed)
        slots = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=limits) as client:

            async def one(prompt: list[int], tokens: int, index: int) -> Rollout:
                body = {
                    "prompt": {"prompt_token_ids": prompt},
                    "max_tokens": tokens,
                    "seed": seed + index,
                    **NUMBERS,
                }
                async with slots:
                    answer = (
                        (await client.post(f"{self.url}/generate", json=body))
                        .raise_for_status()
                        .json()
                    )
                return Rollout(prompt, answer["token_ids"][0], answer["token_logprobs"][0])

            work = []
            for index in range(requests):
                length = prompts[index % len(prompts)]
                prompt = (prefix + [draw.randrange(3, vocab) for _ in range(length)])[
                    : max(length, shared + 1)
                ]
                work.append(one(prompt, draw.randint(new[0], new[1]), index))
            return list(await asyncio.gather(*work))

    def _counters(self) -> dict[str, int]:
        text = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        counts = {}
        for name, counter in COUNTERS.items():
            values = re.findall(rf"^vllm:{counter}\S* (\S+)$", text, re.MULTILINE)
            counts[name] = int(sum(map(float, values)))
        return counts
