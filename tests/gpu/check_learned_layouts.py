"""Learn layouts on a GPU: updates of tiny models that vLLM's CPU build cannot run.

    python tests/gpu/check_learned_layouts.py [NAME …]

For each architecture a random model in bfloat16 is served in this process. It is updated in place
to the weights of another checkpoint, through the learned layout or through vLLM's reload. Its
logprobs must then equal those from an engine that was started with the other checkpoint. Prints a
line for each architecture, and ends with 1 if one is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.tiny_models import CONFIGS, make_model

LARGER = {
    "vocab_size": 301,
    "max_position_embeddings": 512,
    "hidden_size": 256,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""Sizes that the GPU's kernels take."""
PROMPT = [72, 101, 108, 108, 111]
TOLERANCE = 1e-3
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
EXTENSION = "vllm_patching.worker.extension.LockstepWorkerExtension"


def checkpoint(name: str, folder: Path, seed: int) -> dict[str, torch.Tensor]:
    keys = {key: value for key, value in LARGER.items() if key in CONFIGS[name]}
    return make_model(name, folder, seed, **keys)


def logprobs(engine: Any) -> list[float]:
    """The engine's logprobs of a prompt and of its greedy continuation."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    parameters = SamplingParams(
        temperature=0, max_tokens=8, logprobs=0, prompt_logprobs=0, ignore_eos=True
    )
    answer = engine.generate([TokensPrompt(prompt_token_ids=PROMPT)], parameters, use_tqdm=False)[0]
    rows = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
    return [next(iter(row.values())).logprob for row in rows]


def update(worker: Any, folder: str) -> str:
    """In vLLM's worker: write another checkpoint's weights as an update does."""
    from safetensors.torch import load_file

    from vllm_patching.protocol.manifest import flat_layout, local_view, source_view
    from vllm_patching.worker.model_layout import layout_of
    from vllm_patching.worker.parameters import tensor_parallel

    model = worker.get_model()
    config = worker.vllm_config.model_config.hf_config
    layout = layout_of(model, config, *tensor_parallel())
    weights = {
        name: tensor
        for path in Path(folder).glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    with torch.no_grad():
        for item in flat_layout(layout.manifest)[0]:
            target = local_view(item, layout.tensors[item.name].data)
            target.copy_(source_view(item, weights[item.slice.source].contiguous()))
        reloaded = layout.recompute() if layout.recompute is not None else ""
    return "reloaded" if reloaded else f"{len(layout.manifest.entries)} parameters"


def one(name: str) -> int:
    """Try one architecture in this process."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    options = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 256}
    options |= {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.3}
    with tempfile.TemporaryDirectory() as text:
        first, second = Path(text) / "first", Path(text) / "second"
        checkpoint(name, first, 0)
        checkpoint(name, second, 1)
        engine = LLM(str(first), worker_extension_cls=EXTENSION, **options)  # type: ignore[arg-type]
        before = logprobs(engine)
        how = engine.collective_rpc(update, args=(str(second),))[0]
        engine.reset_prefix_cache()
        after = logprobs(engine)
        del engine
        fresh = logprobs(LLM(str(second), **options))  # type: ignore[arg-type]
    worst = max(abs(a - b) for a, b in zip(after, fresh, strict=True))
    changed = max(abs(a - b) for a, b in zip(before, fresh, strict=True))
    good = worst <= TOLERANCE < changed
    print(json.dumps({"name": name, "good": good, "how": how, "difference": worst}), flush=True)
    return 0 if good else 1


def main() -> int:
    names = sys.argv[1:] or [name for name in CONFIGS if name not in ("Qwen3", "Llama")]
    if len(names) == 1:
        return one(names[0])
    failed = []
    for name in names:
        done = subprocess.run(
            [sys.executable, __file__, name],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
        print(lines[-1] if lines else f"{name}: failed: {done.stderr.strip()[-600:]}", flush=True)
        if done.returncode:
            failed.append(name)
    print(f"{len(names) - len(failed)} of {len(names)} right" + f"; wrong: {failed}" * bool(failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
