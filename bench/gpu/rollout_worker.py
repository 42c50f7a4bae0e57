"""vLLM by itself: as it comes, in its own batch-invariant mode, or in ours.

It takes commands line by line.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from typing import Any

from bench.gpu.processes import Answers, serve

MODES = ("off", "vllm", "ours")
MOST_KERNELS = 40


class RolloutWorker:
    """An engine without a server around it."""

    def __init__(self, mode: str, model: str, tp: int = 1) -> None:
        """
        Args:
            mode: one of MODES.
            model: folder with config.json; the weights are random.
            tp: GPUs that the engine splits its weights over.
        """
        self.mode, self.model, self.tp = mode, model, tp
        self.llm: Any = None

    def load(self, max_model_len: int, max_num_seqs: int, cache_bytes: int) -> dict[str, Any]:
        """Start the engine and let it compile and capture what it will."""
        started = time.monotonic()
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = (
            "1"  # `kernels` sends functions to the worker
        )
        options: dict[str, Any] = {}
        if self.mode == "vllm":
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        elif self.mode == "ours":
            from vllm_patching.batch_invariant.mode import prepare_server

            args = argparse.Namespace(dtype="bfloat16", tensor_parallel_size=self.tp)
            prepare_server(args, shared=False)
            options = vars(args)
        from vllm import LLM

        self.llm = LLM(
            **{
                "model": self.model, "load_format": "dummy", "dtype": "auto", "skip_tokenizer_init": True,
                "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": cache_bytes, "max_model_len": max_model_len,
                "max_num_seqs": max_num_seqs, "enable_prefix_caching": False, "tensor_parallel_size": self.tp, **options,
            }
        )  # fmt: skip
        report: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1)}
        if self.mode == "ours":
            from vllm_patching.protocol.messages import DeterministicWorker

            check = DeterministicWorker.lockstep_deterministic_check
            report["self_test"] = self.llm.collective_rpc(check.__name__)[0]
        return report

    def generate(
        self,
        count: int,
        new_tokens: int,
        prompt_tokens: int,
        vocab: int,
        seeded: bool,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Sample `count` sequences of exactly `new_tokens` with logprobs, all at once.

        Returns:
            {"tokens_per_second", "seconds"}, prefill included.
        """
        from vllm import SamplingParams

        draw = random.Random(seed)
        prompts = [
            {"prompt_token_ids": [draw.randrange(3, vocab) for _ in range(prompt_tokens)]}
            for _ in range(count)
        ]
        sampling = [
            SamplingParams(
                max_tokens=new_tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                seed=seed + i if seeded else None,
            )
            for i in range(count)
        ]
        started = time.monotonic()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.monotonic() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return {"tokens_per_second": round(tokens / seconds, 1), "seconds": round(seconds, 3)}

    def kernels(
        self, count: int, new_tokens: int, prompt_tokens: int, vocab: int, seeded: bool = False
    ) -> dict[str, Any]:
        """Measure the GPU while it samples: seconds of each kernel, and between kernels.

        Returns:
            {"steps", "seconds", "busy_seconds", "kernels": [[name, launches, seconds], ...] the
            longest first}
        """
        self.llm.collective_rpc(start_profile)
        found = self.generate(count, new_tokens, prompt_tokens, vocab, seeded, seed=7)
        rows = self.llm.collective_rpc(stop_profile)[0]
        busy = sum(seconds for *_, seconds in rows)
        return {
            "steps": new_tokens,
            "seconds": found["seconds"],
            "busy_seconds": round(busy, 4),
            "kernels": rows[:MOST_KERNELS],
        }


def start_profile(worker: Any) -> None:
    """Runs in vLLM's worker."""
    import torch

    worker.lockstep_profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    )
    worker.lockstep_profile.start()


def stop_profile(worker: Any) -> list[list[Any]]:
    """Runs in vLLM's worker: [kernel's name, launches, seconds], the longest first."""
    import torch

    torch.cuda.synchronize()
    worker.lockstep_profile.stop()
    events = worker.lockstep_profile.key_averages()
    rows = [
        [event.key[:120], event.count, round(event.self_device_time_total / 1e6, 6)]
        for event in events
    ]
    return sorted((row for row in rows if row[2]), key=lambda row: -row[2])


if __name__ == "__main__":
    answers = Answers()
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", required=True, choices=MODES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tp", type=int, default=1)
    parsed = parser.parse_args()
    worker = RolloutWorker(parsed.mode, parsed.model, parsed.tp)
    serve(answers, {"load": worker.load, "generate": worker.generate, "kernels": worker.kernels})
