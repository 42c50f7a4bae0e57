"""Serve tiny models by the real vLLM, give each one new weights by its layout, and serve it again.

Run as a program with a folder and names. For each name it reads the checkpoints `old` and `new` of
that subfolder, and writes result.json beside them. Each model has a process of its own, forked from
one that has imported vLLM.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.v1.worker import cpu_worker  # noqa: F401 - every child needs it

from tests.vllm_patching.worker.learn_layouts import assembled
from vllm_patching.worker.model_layout import layout_of

PROMPTS = ([5], [72, 31, 8, 8, 11], list(range(20, 80)))
EXTENSION = "vllm_patching.worker.extension.LockstepWorkerExtension"


def logprobs(llm: LLM) -> list[list[Any]]:
    """Return for each prompt its tokens with the sampled ones, and the logprobs of all but one."""
    asked = SamplingParams(
        max_tokens=6, logprobs=0, prompt_logprobs=0, detokenize=False, seed=3, ignore_eos=True
    )
    found = []
    for prompt in PROMPTS:
        request = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)[0]
        tokens = [*prompt, *request.outputs[0].token_ids]
        rows = [*request.prompt_logprobs[1:], *request.outputs[0].logprobs]
        pairs = zip(rows, tokens[1:], strict=True)
        found.append([tokens, [row[token].logprob for row, token in pairs]])
    return found


def write(checkpoint: dict[str, torch.Tensor], worker: Any) -> list[str]:
    """Write a checkpoint into a worker's model by its layout; return the tensors that it took."""
    model, config = worker.get_model(), worker.vllm_config.model_config.hf_config
    layout = layout_of(model, config, 0, 1)
    taken = set()
    for entry in layout.manifest.entries:
        layout.tensors[entry.shard.name].data.copy_(assembled(entry.shard, checkpoint))
        taken |= {piece.source for piece in entry.shard.slices}
    if layout.recompute is not None:
        layout.recompute()
    return sorted(taken)


def serve(folder: Path) -> tuple[LLM, dict[str, Any]]:
    """Return vLLM, and the logprobs of both checkpoints."""
    llm = LLM(
        model=str(folder / "old"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        num_gpu_blocks_override=64,
        enable_prefix_caching=False,
        worker_extension_cls=EXTENSION,
    )
    old = logprobs(llm)
    checkpoint = load_file(folder / "new" / "model.safetensors")
    (taken,) = llm.collective_rpc(partial(write, checkpoint))
    return llm, {"old": old, "new": logprobs(llm), "taken": taken, "held": sorted(checkpoint)}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    gc.freeze()  # vLLM collects garbage seven times per model, which would search all imports
    for name in names:
        child = os.fork()
        if child == 0:
            try:
                _llm, result = serve(folder / name)  # its shutdown would take as long as the rest
            except BaseException:  # noqa: BLE001 - the test shows it
                result = {"error": traceback.format_exc()}
            (folder / name / "result.json").write_text(json.dumps(result))
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
