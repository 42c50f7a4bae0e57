"""Requests with a seed on vLLM's CPU build."""

from __future__ import annotations

import importlib
from typing import Any

from vllm_patching.compat.versions import seam


def take_back_cpu_draws() -> None:
    """Let a prompt be computed in pieces on a CPU when its request has a seed.

    vLLM samples after every piece and throws away what came before the last one, and takes the draw
    back by the generator's offset. PyTorch's CPU generators have none: the engine would end, with
    all requests, on "CPU Generator does not use offset". Here such a generator's state is put back
    instead. Call before the engine runs; does nothing elsewhere than on a CPU.
    """
    if not importlib.import_module("vllm.platforms").current_platform.is_cpu():
        return
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    sample, bookkeeping = seam(runner, "_sample"), seam(runner, "_bookkeeping_sync")

    def sample_and_put_back(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = [
            (generator, generator.get_state())
            for generator in _of_unfinished_prompts(self).values()
        ]
        output = sample(self, *args, **kwargs)
        for generator, state in before:
            generator.set_state(state)
        return output

    def bookkeeping_without_offsets(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, put_back = self.input_batch.generators, _of_unfinished_prompts(self)
        self.input_batch.generators = {
            index: one for index, one in generators.items() if index not in put_back
        }
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    runner._sample, runner._bookkeeping_sync = sample_and_put_back, bookkeeping_without_offsets


def _of_unfinished_prompts(runner: Any) -> dict[int, Any]:
    """The generators, by their requests' places in the batch, whose sample of this step is thrown
    away.
    """
    discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
    return {
        index: generator
        for index, generator in runner.input_batch.generators.items()
        if discarded[index]
    }
