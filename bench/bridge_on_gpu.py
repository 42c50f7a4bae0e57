"""Does the weight bridge work on GPUs? Starts vLLM, joins it by broadcast and by single copy, and compares every weight.

    python bench/bridge_on_gpu.py --output DIR            vLLM on GPU 0, broadcast from GPU 1, single copy on GPU 0
    python bench/bridge_on_gpu.py --output DIR --eager    without compilation and CUDA graphs (starts faster)

After each update the checksum of vLLM's live weights must equal the trainer's, and the logprobs of freshly sampled tokens
must be close to the trainer's own forward pass on the new weights. Prints a table and writes bridge_on_gpu.json. The model
is random, of a shape between Qwen3-0.6B's and 1.7B's; its tokenizer is the starter model's.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import argparse
import copy
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from typing import Any

import httpx
import torch

PORT = 9001
UPDATES = 5
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "bos_token_id": 0,
}


def make_model(folder: Path) -> None:
    """A random checkpoint whose logits are not degenerate."""
    from example_trainer.models.decoder import Decoder
    from example_trainer.models.geometry import Geometry
    from example_trainer.models.hf_checkpoint import save_model

    source = folder.parent / "source"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(SHAPE))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "assets" / "starter_model" / name, source / name)
    torch.manual_seed(0)
    model = Decoder(Geometry.from_config(SHAPE), torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.04)
    model.source = source
    save_model(model, folder)


def start_server(model: Path, folder: Path, eager: bool) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-u",
        str(ROOT / "example_trainer/vllm_api_server.py"),
        "--model",
        str(model),
        "--port",
        str(PORT),
    ]
    command += ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.35", "--max-model-len", "2048"]
    if eager:
        command.append("--enforce-eager")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", "VLLM_ENABLE_SHARED_WEIGHTS": "1", "LOGDIR": str(folder)}
    log = (folder / "vllm.log").open("wb")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def wait_for_server(process: subprocess.Popen[bytes], seconds: float) -> float:
    started = time.monotonic()
    while True:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}")
        try:
            if httpx.get(f"http://localhost:{PORT}/health_generate", timeout=60).status_code == 200:
                return time.monotonic() - started
        except httpx.TransportError:
            time.sleep(1)
        if time.monotonic() - started > seconds:
            process.kill()
            raise SystemExit(f"the server was not ready after {seconds:g} s")


def differences(models: list[Any], seed: int) -> list[float]:
    """For each model: mean |logprob of vLLM - logprob of its own forward pass| over 8 x 32 sampled tokens, all in bf16."""
    prompt = list(range(1000 + seed, 1040 + seed))
    body = {"prompt": {"prompt_token_ids": prompt}, "n": 8, "max_tokens": 32, "ignore_eos": True, "seed": seed}
    answer = httpx.post(f"http://localhost:{PORT}/generate", json=body, timeout=120).json()
    found: list[list[float]] = [[] for _ in models]
    for tokens, logprobs in zip(answer["token_ids"], answer["logprobs"], strict=True):
        ids = torch.tensor([prompt + tokens], device="cuda")
        for model, values in zip(models, found, strict=True):
            with torch.no_grad():
                mine = model.logits(ids)[0].float().log_softmax(-1)
            for i, token in enumerate(tokens):
                values.append(abs(logprobs[i][str(token)] - mine[len(prompt) - 1 + i, token].item()))
    return [sum(values) / len(values) for values in found]


def be_trainer(kind: str, model_path: str, output: Path) -> None:
    """Join the server, update it a few times, and write what was seen."""
    import logging

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    from example_trainer.models.hf_checkpoint import load_model
    from example_trainer.weight_bridge.broadcast import BroadcastBridge
    from example_trainer.weight_bridge.server import BridgeServer
    from example_trainer.weight_bridge.single_copy import SingleCopyBridge

    server = BridgeServer("localhost", PORT, 60)
    bridge = BroadcastBridge(server) if kind == "broadcast" else SingleCopyBridge(server)
    dtype = bridge.serving_dtype()
    assert dtype is not None
    before_load = torch.cuda.mem_get_info()[0]
    model = load_model(model_path, dtype, "cuda")
    initial = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    bridge.connect(model)
    torch.cuda.empty_cache()
    extra_bytes = before_load - torch.cuda.mem_get_info()[0]

    def write(seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        with torch.no_grad():
            for name, p in model.named_parameters():
                noise = torch.randn(p.shape, generator=generator, device="cuda") * (0.01 if seed else 0)
                p.copy_((initial[name].to("cuda").float() + noise).to(p.dtype))

    rows = []
    for version in range(UPDATES + 1):
        stale = copy.deepcopy(model)
        report = bridge.sync(version, lambda seed=version: write(seed))
        to_new, to_old = differences([model, stale], version)
        state = httpx.get(f"http://localhost:{PORT}/bridge/state", timeout=30).json()
        row = {
            "version": version,
            "served": state["weight_version"],
            "checksums_equal": state["checksums"] == [report.checksum],
            "bytes_moved": report.bytes_moved,
            "mean_logprob_difference_to_new_weights": to_new,
            "mean_logprob_difference_to_old_weights": to_old,
            "trainer_seconds": report.seconds,
            "server_seconds": state["last_update"],
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    result = {"params_mapped": bridge.params_mapped, "params_total": bridge.params_total, "updates": rows}
    result["gpu_bytes_used_by_the_trainer_after_connecting"] = extra_bytes
    result["model_bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
    output.write_text(json.dumps(result))
    bridge.close()


def describe() -> dict[str, Any]:
    import vllm

    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "vllm": vllm.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--only", choices=["broadcast", "single_copy"], help="one bridge; single_copy needs one GPU")
    parser.add_argument("--trainer", choices=["broadcast", "single_copy"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.trainer:
        be_trainer(args.trainer, args.model, args.output / f"{args.trainer}.json")
        return
    if torch.cuda.device_count() < (1 if args.only == "single_copy" else 2):
        raise SystemExit(f"this needs more GPUs than the {torch.cuda.device_count()} of this machine")
    work = Path(tempfile.mkdtemp())
    make_model(work / "model")
    process = start_server(work / "model", args.output, args.eager)
    results: dict[str, Any] = {"machine": describe(), "shape": SHAPE, "eager": args.eager}
    try:
        results["seconds_to_ready"] = wait_for_server(process, 330)
        for kind, gpu in (("broadcast", "1"), ("single_copy", "0")):
            if args.only not in (None, kind):
                continue
            command = [
                sys.executable,
                "-u",
                __file__,
                "--output",
                str(args.output),
                "--trainer",
                kind,
                "--model",
                str(work / "model"),
            ]
            log = (args.output / f"{kind}.log").open("wb")
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
            try:
                ended = subprocess.run(command, env=environment, timeout=150, check=False, stdout=log, stderr=subprocess.STDOUT)
            except subprocess.TimeoutExpired:
                results[kind] = {"failed": "not finished after 150 s"}
                continue
            if ended.returncode:
                print((args.output / f"{kind}.log").read_text()[-3000:])
                results[kind] = {"failed": f"status {ended.returncode}"}
            else:
                results[kind] = json.loads((args.output / f"{kind}.json").read_text())
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        print("".join((args.output / "vllm.log").read_text(errors="replace")[-2500:]))
    (args.output / "bridge_on_gpu.json").write_text(json.dumps(results, indent=1))
    print(f"{'bridge':12} {'version':>7} {'served':>6} {'checksum':>9} {'to new':>8} {'to old':>8} {'MB':>8} {'ms':>8}")
    for kind in ("broadcast", "single_copy"):
        for row in results.get(kind, {}).get("updates", []):
            print(
                f"{kind:12} {row['version']:7} {row['served']:6} {'equal' if row['checksums_equal'] else 'DIFFERS':>9} "
                f"{row['mean_logprob_difference_to_new_weights']:8.4f} {row['mean_logprob_difference_to_old_weights']:8.4f} "
                f"{row['bytes_moved'] / 1e6:8.0f} {sum(row['trainer_seconds'].values()) * 1e3:8.1f}"
            )


if __name__ == "__main__":
    main()
