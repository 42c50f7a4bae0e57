"""Sampling for a light server in deterministic mode. Its answers have the bits of the trainer's
forward pass on a CPU, whatever else is sampled. They depend on the weights and the seed alone.

A server of tests/fleet_server.py that is started with `samples` answers POST /test/sample. To the
request {"prompts": [[5, 1], [5, 1]], "length": 6, "seed": 3} it answers with `tokens` and
`logprobs` of each answer. The `version` and `epoch` are of the weights that sampled all of them.
POST /test/swap {"kernel": "rms_norm"} has it compute an operation in another way from then on, as
only a comparison of tokens can notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import torch
from fastapi import Body, FastAPI

from example_trainer.deterministic.pairing import deterministic_decoder, model_provenance
from example_trainer.models import Decoder
from example_trainer.models.packing import Packing
from vllm_patching.batch_invariant import reference
from vllm_patching.batch_invariant.plan import SumPlan, plan_of
from vllm_patching.server.routes import LockstepService
from vllm_patching.weights.families import Geometry

PAUSED_SECONDS = 0.01
NO_WEIGHTS = 0
"""The epoch of a light server before its first update. A vLLM server has the checkpoint's weights then,
a light one has zeros: nothing may be sampled with them."""


class Sampler:
    """Samples with the weights of a server's model, wherever they are now.

    Args:
        model: the server's; its parameters are the decoder's.
        config: of the checkpoint.
        plan: of its sums, as of a server with so many ranks.
    """

    def __init__(self, model: torch.nn.Module, config: dict[str, Any], plan: SumPlan) -> None:
        self.model = model
        geometry = Geometry.from_config(config)
        self.decoder: Decoder = deterministic_decoder(geometry, torch.float32, plan=plan)

    def report(self) -> dict[str, Any]:
        """The report of deterministic mode, as the self-test's."""
        kernels = model_provenance(self.decoder)
        table = kernels.pop("rotary_table")
        return {"provenance": kernels, "rotary_table": table, "checks": 0, "seconds": 0.0}

    @torch.no_grad()
    def sample(self, prompts: list[list[int]], length: int, seed: int) -> dict[str, Any]:
        """Sample an answer to each of several prompts of one length, together."""
        held = dict(self.model.named_parameters())
        for name, parameter in self.decoder.named_parameters():
            parameter.data = held[name].data.narrow(0, 0, parameter.shape[0])
        generator = torch.Generator().manual_seed(seed)
        rows, count = torch.tensor(prompts), len(prompts)
        logprobs = []
        for _ in range(length):
            hidden = self.decoder(rows.flatten(), Packing([rows.shape[1]] * count))
            last = hidden.view(count, rows.shape[1], -1)[:, -1]
            weights = self._logits(last).double().softmax(-1)
            chosen = torch.multinomial(weights, 1, generator=generator)
            ones = Packing([1] * count)
            logprobs.append(self.decoder.chosen_logprobs(last, chosen[:, 0], ones)[0])
            rows = torch.cat([rows, chosen], dim=1)
        answers = rows[:, len(prompts[0]) :]
        return {"tokens": answers.tolist(), "logprobs": torch.stack(logprobs, dim=1).tolist()}

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        ops = self.decoder.arithmetic.ops
        return ops.linear(hidden, self.decoder.output_weight)  # type: ignore[no-any-return]


def in_float64(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Another kernel for the same operation: exact to more digits, then rounded."""

    def other(*arguments: Any) -> Any:
        wide = [
            one.double() if isinstance(one, torch.Tensor) and one.is_floating_point() else one
            for one in arguments
        ]
        outcome = kernel(*wide)
        if isinstance(outcome, torch.Tensor):
            return outcome.float()
        return tuple(one.float() for one in outcome)

    return other


def add_sampling(
    app: FastAPI, service: LockstepService, engine: Any, model: Any, config: dict[str, Any]
) -> None:
    """Put a light server into deterministic mode, and have it sample, by the sum plan of the report
    that it has already. This report replaces entries of its kernels.
    """
    changed = service.deterministic or {}
    sampler = Sampler(model, config, plan_of(changed))
    report = sampler.report()
    report["provenance"] |= changed
    service.deterministic = report

    @app.post("/test/swap")
    async def swap(body: Annotated[dict[str, str], Body()]) -> dict[str, Any]:
        setattr(reference, body["kernel"], in_float64(getattr(reference, body["kernel"])))
        return {}

    @app.post("/test/sample")
    async def sample(body: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
        while True:
            before = service.weights()
            if before[1] == NO_WEIGHTS or engine.paused or not service.weights_served()["serving"]:
                await asyncio.sleep(PAUSED_SECONDS)
                continue
            answer: dict[str, Any] = await engine.on_main(lambda: sampler.sample(**body))
            if service.weights() == before and not engine.paused:
                return answer | {"version": before[0], "epoch": before[1]}
