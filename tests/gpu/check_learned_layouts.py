"""Learn layouts on a GPU: updates of tiny models that vLLM's CPU build cannot run.

    python tests/gpu/check_learned_layouts.py [NAME …] [--json FILE]
    python tests/gpu/check_learned_layouts.py --device cpu     tries the program, without a GPU

For each architecture a random model is served, in bfloat16 on a GPU. It is updated in place to the
weights of another checkpoint, through the learned layout or through vLLM's reload. Its logprobs
must then equal those from an engine that was started with the other checkpoint.

One process imports vLLM, and never uses the GPU. It forks one for each architecture, some at once.
Without names, those run that no test of vLLM's CPU build updates. Each has a deadline.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu.checks import JSON, NEEDS_GPU, Check, run_checks
from bench.measured import Options, command_line
from tests.tiny_models import CONFIGS, ON_GPUS, SERVED, UPDATED, make_model, make_served
from vllm_patching.weights.families import FAMILIES

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
}
"""Sizes that the GPU's kernels take, for the models of CONFIGS."""
NAMES = (*ON_GPUS, *(name for name in CONFIGS if name not in ON_GPUS))
BY_DEFAULT = [
    name
    for name in NAMES
    if name not in {*SERVED, *UPDATED} and f"{name}ForCausalLM" not in FAMILIES
]
ON_CPUS = ["Olmoe", "SmolLM3"]
"""For a try without a GPU."""
PROMPT = [72, 31, 8, 8, 11]
TOLERANCE = 1e-3
CACHE_BYTES = 256 << 20
SEQUENCES, LENGTH = 8, 128
"""Limits of vLLM. Every model has at least so many positions."""
SHOWN = 1500
"""Characters of a failure that are kept: the end of it, which names the place."""
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
EXTENSION = "vllm_patching.worker.extension.LockstepWorkerExtension"
OPTIONS: Options = {
    "names": {"nargs": "*", "metavar": "NAME", "help": f"of {', '.join({*NAMES, *SERVED})}"},
    **JSON,
    "--device": {"choices": ("cuda", "cpu"), "default": "cuda"},
    "--at-once": {"type": int, "default": 4, "help": "processes that share the GPU (default: 4)"},
    "--seconds": {"type": float, "default": 240, "help": "deadline of a process (default: 240)"},
    "--forks": {"type": Path, "help": "used by this program itself: the folder of results"},
}


def checkpoint(name: str, folder: Path, seed: int) -> None:
    """Save a random model."""
    if name in ON_GPUS or name not in CONFIGS:
        make_served(name, folder, seed)
        return
    keys = {key: value for key, value in LARGER.items() if key in CONFIGS[name]}
    make_model(name, folder, seed, **keys)


def logprobs(engine: Any) -> list[float]:
    """The engine's logprobs of a prompt and of its greedy continuation."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    parameters = SamplingParams(
        temperature=0,
        max_tokens=8,
        logprobs=0,
        prompt_logprobs=0,
        ignore_eos=True,
        detokenize=False,
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


def update_one(name: str, device: str) -> tuple[bool, Any]:
    """Try one architecture in this process; see run_checks."""
    from vllm import LLM

    options: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": LENGTH,
        "max_num_seqs": SEQUENCES,
        # vLLM's warm-up deals them to the sequences, and none may get more than its length.
        "max_num_batched_tokens": SEQUENCES * LENGTH,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }
    if device == "cpu":
        options |= {"dtype": "float32", "num_gpu_blocks_override": 64}
    else:
        # vLLM wants this share of the GPU free at the start, and measures nothing.
        options |= {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": CACHE_BYTES}
        options |= {"dtype": "bfloat16", "moe_backend": "triton"}  # as our server has it
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as text:
        first, second = Path(text) / "first", Path(text) / "second"
        checkpoint(name, first, 0)
        checkpoint(name, second, 1)
        engine = LLM(str(first), worker_extension_cls=EXTENSION, **options)
        before = logprobs(engine)
        served = time.monotonic() - began
        how = engine.collective_rpc(update, args=(str(second),))[0]
        after = logprobs(engine)
        del engine
        fresh = logprobs(LLM(str(second), **options))
    worst = max(abs(a - b) for a, b in zip(after, fresh, strict=True))
    changed = max(abs(a - b) for a, b in zip(before, fresh, strict=True))
    seconds = {"first_engine_s": round(served, 1), "both_s": round(time.monotonic() - began, 1)}
    seen = {"how": how, "difference": worst, "changed": changed, **seconds}
    return worst <= TOLERANCE < changed, seen


def write_outcome(folder: Path, name: str, passed: bool, seen: Any) -> None:
    """Write the outcome of one architecture, at once."""
    part = folder / f"{name}.part"
    part.write_text(json.dumps([passed, seen]), encoding="utf-8")
    part.rename(folder / f"{name}.json")


def forked(name: str, folder: Path, device: str) -> int:
    """Fork a process that tries one architecture; return its id."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    log = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        write_outcome(folder, name, *update_one(name, device))
    except BaseException:  # noqa: BLE001 - the outcome names it
        traceback.print_exc()
        write_outcome(folder, name, False, traceback.format_exc().strip()[-SHOWN:])
    sys.stderr.flush()
    os._exit(0)


def fork_all(names: list[str], folder: Path, device: str, at_once: int, seconds: float) -> None:
    """Try the architectures, some at once, each in a process of its own."""
    parent = os.getppid()
    import vllm  # noqa: F401  # once, for all of them

    waiting, running = list(names), dict[int, tuple[str, float]]()
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            running[forked(name, folder, device)] = name, time.monotonic()
        time.sleep(0.05)
        if os.getppid() != parent:  # it has ended, as by a time limit
            for child in running:
                os.killpg(child, signal.SIGKILL)
            return
        for child, (name, began) in list(running.items()):
            late = time.monotonic() - began > seconds
            if late:
                os.killpg(child, signal.SIGKILL)
            if not os.waitpid(child, 0 if late else os.WNOHANG)[0]:
                continue
            del running[child]
            if not (folder / f"{name}.json").exists():
                reason = f"no outcome in {seconds:g} s" if late else "its process ended"
                log = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
                write_outcome(folder, name, False, f"{reason}; its log ends with {log[-SHOWN:]}")


class Outcomes(Mapping[str, Check]):
    """The checks, in the order in which their outcomes appear in a folder."""

    def __init__(self, names: list[str], folder: Path, forks: subprocess.Popen[bytes]) -> None:
        self._names, self._folder, self._forks = names, folder, forks

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        waiting = list(self._names)
        while waiting:
            ended = self._forks.poll() is not None
            there = [name for name in waiting if (self._folder / f"{name}.json").exists()]
            yield from there
            waiting = [name for name in waiting if name not in there]
            if ended and not there:
                yield from waiting
                return
            time.sleep(0.05)

    def __getitem__(self, name: str) -> Check:
        return partial(self._outcome, name)

    def _outcome(self, name: str) -> tuple[bool, Any]:
        file = self._folder / f"{name}.json"
        if not file.exists():
            return False, f"the process that forks has ended with {self._forks.poll()}"
        passed, seen = json.loads(file.read_text(encoding="utf-8"))
        return passed, seen


def vllm_facts() -> dict[str, Any]:
    """The version of the installed vLLM."""
    names = packages_distributions().get("vllm", [])
    return {"vllm": " ".join(f"{name} {version(name)}" for name in sorted({*names}))}


def main(arguments: list[str] | None = None) -> int:
    """Make every check; 0 if all passed."""
    parser = command_line(__doc__, OPTIONS)
    options = parser.parse_args(arguments)
    names = options.names or (BY_DEFAULT if options.device == "cuda" else ON_CPUS)
    if unknown := [name for name in names if name not in {*NAMES, *SERVED}]:
        parser.error(f"{unknown[0]}: not one of {', '.join(sorted({*NAMES, *SERVED}))}")
    if options.forks:
        fork_all(names, options.forks, options.device, options.at_once, options.seconds)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NEEDS_GPU)
        return 2
    with tempfile.TemporaryDirectory() as text:
        command = [sys.executable, __file__, *names, "--forks", text, "--device", options.device]
        command += ["--at-once", str(options.at_once), "--seconds", str(options.seconds)]
        environment = {**os.environ, **ENVIRONMENT, **(ON_CPU if options.device == "cpu" else {})}
        with subprocess.Popen(command, env=environment) as forks:
            kept = ["--json", str(options.json)] if options.json else []
            checks = Outcomes(names, Path(text), forks)
            return run_checks(__doc__, checks, kept, vllm_facts, needs_gpu=False)


if __name__ == "__main__":
    sys.exit(main())
