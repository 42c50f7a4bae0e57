"""What `test_exact_determinism.py` does as a script, and what its tests share. Needs no pytest."""

from __future__ import annotations

import argparse
import random

import httpx
import torch
from torch import Tensor

from example_trainer.deterministic import functions
from example_trainer.deterministic.decoder import DeterministicDecoder
from example_trainer.deterministic.packing import Packing
from example_trainer.deterministic.pairing import model_provenance, pair
from example_trainer.models import load_model
from tests.example_trainer.deterministic.cases import CASES, Draws, Sizes, gradients
from tests.example_trainer.deterministic.training import decoder_for, summed_gradients
from vllm_patching.batch_invariant.settings import enable_settings

LENGTHS = (1, 65, 7, 64, 130)


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in tensors]


def run_bits(name: str, sizes: Sizes, dtype: torch.dtype, device: str) -> list[bytes]:
    """Of the outputs and the gradients of one operation."""
    outputs, found = gradients(CASES[name](Draws(sizes, dtype, device, 0)), 1)
    return bits([*outputs, *found.values()])


def packed_bits(model: DeterministicDecoder, sequences: list[Tensor]) -> tuple[list[bytes], list[Tensor]]:
    """Hidden states of each sequence, packed together, and the gradient of each sequence's input embedding."""
    packing = Packing([len(sequence) for sequence in sequences], sequences[0].device)
    hidden = model.packed(torch.cat(sequences), packing).split(list(packing.lengths))
    return bits(list(hidden)), list(hidden)


def check_with_vllm(url: str, folder: str, samples: int = 64, length: int = 256, seed: int = 0) -> int:
    """Sample from a deterministic server and recompute every token; returns how many were compared, all equal.

    Raises:
        ParityError: the server runs other kernels.
        AssertionError: a token differs; names the first.
    """
    enable_settings()
    model = load_model(folder, torch.bfloat16, "cuda", DeterministicDecoder)
    assert isinstance(model, DeterministicDecoder)
    pair(model_provenance(model), httpx.get(f"{url}/bridge/info", timeout=30).raise_for_status().json(), url)
    rng, compared = random.Random(seed), 0
    for number in range(0, samples, 8):
        prompt = [rng.randrange(model.geometry.vocab_size) for _ in range(rng.choice([1, 15, 16, 17, 127, 255, 256]))]
        body = {
            "prompt": {"prompt_token_ids": prompt},
            "n": 8,
            "max_tokens": length,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": seed + number,
        }
        answer = httpx.post(f"{url}/generate", json=body, timeout=300).raise_for_status().json()
        for tokens, sampled in zip(answer["token_ids"], answer["logprobs"], strict=True):
            row = torch.tensor(prompt + tokens, device="cuda")
            with torch.no_grad():
                hidden = model.packed(row[:-1], Packing([len(row) - 1], "cuda"))[len(prompt) - 1 :]
                ours, _ = functions.chosen_logprobs(hidden, model.output_weight, row[len(prompt) :])
            theirs = torch.tensor([entry[str(token)] for entry, token in zip(sampled, tokens, strict=True)], device="cuda")
            wrong = (ours.view(torch.int32) != theirs.view(torch.int32)).nonzero().flatten().tolist()
            assert not wrong, (
                f"{len(wrong)} of {len(tokens)} tokens differ after a prompt of {len(prompt)}; first at {wrong[0]}: "
                f"vLLM {float(theirs[wrong[0]])!r}, trainer {float(ours[wrong[0]])!r}"
            )
            compared += len(tokens)
    return compared


def check_operations(device: str) -> int:
    """Run every operation and a model several times, alone and packed; returns how many differed."""
    failed = 0
    sizes = Sizes(LENGTHS)
    if device != "cpu":
        lengths = (1, 127, 128, 129, 255, 256, 257, 777, 64)
        sizes = Sizes(lengths, hidden=1024, inner=3072, heads=16, kv_heads=8, head_dim=128, vocab=32000)
    for name in CASES:
        first, *others = (run_bits(name, sizes, torch.bfloat16, device) for _ in range(3))
        good = all(other == first for other in others)
        failed += not good
        print(f"{'✓' if good else '✗'} {name}: outputs and gradients, three runs", flush=True)
    return failed + check_packing(device)


def check_packing(device: str) -> int:
    """Hidden states and summed weight gradients of one model, its sequences packed in different ways."""
    model, failed = decoder_for(device), 0
    generator = torch.Generator().manual_seed(1)
    vocab = model.geometry.vocab_size
    sequences = [torch.randint(0, vocab, (length,), generator=generator).to(device) for length in (1, 300, 64, 65, 129, 256, 7)]
    together = packed_bits(model, sequences)[0]
    alone = [packed_bits(model, [sequence])[0][0] for sequence in sequences]
    reference = summed_gradients(model, sequences, 1)
    results = {"forward, packed as alone": together == alone}
    for size in (2, 3, 7):
        other = summed_gradients(model, sequences, size)
        differing = [name for name in reference if not torch.equal(reference[name], other[name])]
        results[
            f"weight gradients, {size} sequences in a pass as 1" + (f" (differs: {differing[:3]})" if differing else "")
        ] = not differing
    for what, good in results.items():
        failed += not good
        print(f"{'✓' if good else '✗'} {what}", flush=True)
    return failed


def main() -> int:
    """Returns the process's status; a closing line is printed for what was checked, and only then."""
    parser = argparse.ArgumentParser(description="Equal bits: operations, packing, and vLLM if there is a server.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vllm-url", help="a server started with --deterministic")
    parser.add_argument("--model", help="the folder of the model that it serves")
    options = parser.parse_args()
    enable_settings()
    if failed := check_operations(options.device):
        print(f"{failed} checks failed")
        return 1
    print("✓ All operations are exactly deterministic!")
    if not options.vllm_url:
        print("vLLM was not compared (--vllm-url, --model)")
        return 0
    compared = check_with_vllm(options.vllm_url.rstrip("/"), options.model)
    print(f"✓ vLLM-TorchTitan bitwise determinism verified: {compared} tokens match exactly")
    return 0
