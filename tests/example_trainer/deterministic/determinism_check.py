"""The checks of `test_exact_determinism.py` as a script, and the shared parts of its tests. Needs
no pytest.
"""

from __future__ import annotations

import argparse
import random

import httpx
import torch
from torch import Tensor

from example_trainer.deterministic.pairing import deterministic_decoder, model_provenance, pair
from example_trainer.models import Decoder, load_model
from example_trainer.models.ops import invariant
from example_trainer.models.packing import Packing
from tests.example_trainer.deterministic.cases import INVARIANT_CASES, Draws, Sizes, gradients
from tests.example_trainer.deterministic.training import decoder_for, summed_gradients
from vllm_patching.batch_invariant.settings import enable_settings

LENGTHS = (1, 65, 7, 64, 130)


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [
        tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in tensors
    ]


def run_bits(name: str, sizes: Sizes, dtype: torch.dtype, device: str) -> list[bytes]:
    """Digest of the outputs and the gradients of one operation."""
    outputs, found = gradients(INVARIANT_CASES[name](Draws(sizes, dtype, device, 0), invariant), 1)
    return bits([*outputs, *found.values()])


def packed_bits(model: Decoder, sequences: list[Tensor]) -> tuple[list[bytes], list[Tensor]]:
    """Hidden states of each sequence, packed together, and the gradient of each sequence's input
    embedding.
    """
    packing = Packing([len(sequence) for sequence in sequences], sequences[0].device)
    hidden = model(torch.cat(sequences), packing).split(list(packing.lengths))
    return bits(list(hidden)), list(hidden)


def check_with_vllm(
    url: str, folder: str, device: str = "cuda", samples: int = 64, length: int = 256, seed: int = 0
) -> int:
    """Sample from a deterministic server and recompute every token, each sequence alone and eight
    packed together.

    Prints the outcome for each prompt, also if something differs: the place of the differences
    shows their cause.

    Returns:
        how many tokens were compared; 0 if one differs.

    Raises:
        ParityError: the server is not in deterministic mode, or runs other kernels.
    """
    enable_settings()
    model = load_model(
        folder, torch.bfloat16 if device == "cuda" else torch.float32, device, deterministic_decoder
    )
    answer = httpx.get(f"{url}/deterministic", timeout=120)
    if answer.status_code != 404:
        answer.raise_for_status()
    pair(
        model_provenance(model),
        {"deterministic": answer.json() if answer.status_code == 200 else None},
        url,
    )
    rng, compared, wrong = random.Random(seed), 0, 0
    lengths = [1, 15, 16, 17, 127, 255, 256, 600]
    for number in range(0, samples, 8):
        prompt = [
            rng.randrange(model.geometry.vocab_size)
            for _ in range(lengths[number // 8 % len(lengths)])
        ]
        rows, sampled = sampled_rows(url, prompt, length, seed + number, device)
        alone = [logprobs_after(model, [row], len(prompt))[0] for row in rows]
        packed = logprobs_after(model, rows, len(prompt))
        theirs, ours, together = torch.cat(sampled), torch.cat(alone), torch.cat(packed)
        different = (theirs.view(torch.int32) != ours.view(torch.int32)).nonzero().flatten()
        within = int((ours.view(torch.int32) != together.view(torch.int32)).sum())
        compared, wrong = compared + len(theirs), wrong + len(different) + within
        line = f"prompt of {len(prompt)}: {len(different)} of {len(theirs)} differ from vLLM, {within} alone from packed"
        if len(different):
            line += differences(theirs, ours, different, length)
        print(("✗ " if len(different) or within else "✓ ") + line, flush=True)
    return 0 if wrong else compared


def sampled_rows(
    url: str, prompt: list[int], length: int, seed: int, device: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Return eight samples, each with its prompt, and the server's logprobs of them."""
    body: dict[str, object] = {
        "prompt": {"prompt_token_ids": prompt},
        "n": 8,
        "max_tokens": length,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": seed,
    }
    answer = httpx.post(f"{url}/generate", json=body, timeout=300).raise_for_status().json()
    rows = [torch.tensor(prompt + tokens, device=device) for tokens in answer["token_ids"]]
    sampled = [
        torch.tensor(
            [entry[str(token)] for entry, token in zip(entries, tokens, strict=True)],
            device=device,
        )
        for entries, tokens in zip(answer["logprobs"], answer["token_ids"], strict=True)
    ]
    return rows, sampled


def differences(theirs: Tensor, ours: Tensor, different: Tensor, length: int) -> str:
    """Return the places where answers of this length differ, and by how much."""
    first, counts = int(different[0]), [0] * 8
    for index in different.tolist():
        counts[min(7, index % length * 8 // length)] += 1
    line = f"; by up to {float((theirs - ours).abs().max()):.3g}; first: sample {first // length}, token "
    line += f"{first % length}, vLLM {float(theirs[first])!r}, trainer {float(ours[first])!r}"
    return line + f"; by eighth of the answer {counts}"


def logprobs_after(model: Decoder, rows: list[Tensor], prompt: int) -> list[Tensor]:
    """Logprobs of the tokens behind the first `prompt` ones of each row, the rows packed into one
    pass.
    """
    packing = Packing([len(row) - 1 for row in rows], rows[0].device)
    with torch.no_grad():
        hidden = model(torch.cat([row[:-1] for row in rows]), packing).split(list(packing.lengths))
        states = torch.cat([part[prompt - 1 :] for part in hidden])
        found, _ = invariant.chosen_logprobs(
            states, model.output_weight, torch.cat([row[prompt:] for row in rows])
        )
    return list(found.split([len(row) - prompt for row in rows]))


def check_operations(device: str) -> int:
    """Run every operation and a model several times, alone and packed; returns how many differed."""
    failed = 0
    sizes = Sizes(LENGTHS)
    if device != "cpu":
        lengths = (1, 127, 128, 129, 255, 256, 257, 777, 64)
        sizes = Sizes(
            lengths, hidden=1024, inner=3072, heads=16, kv_heads=8, head_dim=128, vocab=32000
        )
    for name in INVARIANT_CASES:
        first, *others = (run_bits(name, sizes, torch.bfloat16, device) for _ in range(3))
        good = all(other == first for other in others)
        failed += not good
        print(f"{'✓' if good else '✗'} {name}: outputs and gradients, three runs", flush=True)
    return failed + check_packing(device)


def check_packing(device: str) -> int:
    """Hidden states and summed weight gradients of one model, its sequences packed in different
    ways.
    """
    model, failed = decoder_for(device), 0
    generator = torch.Generator().manual_seed(1)
    vocab = model.geometry.vocab_size
    sequences = [
        torch.randint(0, vocab, (length,), generator=generator).to(device)
        for length in (1, 300, 64, 65, 129, 256, 7)
    ]
    together = packed_bits(model, sequences)[0]
    alone = [packed_bits(model, [sequence])[0][0] for sequence in sequences]
    reference = summed_gradients(model, sequences, 1)
    results = {"forward, packed as alone": together == alone}
    for size in (2, 3, 7):
        other = summed_gradients(model, sequences, size)
        differing = [name for name in reference if not torch.equal(reference[name], other[name])]
        results[
            f"weight gradients, {size} sequences in a pass as 1"
            + (f" (differs: {differing[:3]})" if differing else "")
        ] = not differing
    for what, good in results.items():
        failed += not good
        print(f"{'✓' if good else '✗'} {what}", flush=True)
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Returns the process's status; a closing line is printed for what was checked, and only then."""
    parser = argparse.ArgumentParser(
        description="Equal bits: operations, packing, and vLLM if there is a server."
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vllm-url", help="a server started with --deterministic")
    parser.add_argument("--model", help="the folder of the model that it serves")
    parser.add_argument(
        "--samples",
        type=int,
        default=64,
        help="answers to sample, eight to a prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--length", type=int, default=256, help="tokens of each (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.vllm_url and not options.model:
        parser.error("--vllm-url needs --model, the folder of the model that the server has")
    enable_settings()
    if failed := check_operations(options.device):
        print(f"{failed} checks failed")
        return 1
    print("✓ All operations are exactly deterministic!")
    if not options.vllm_url:
        print("vLLM was not compared (--vllm-url, --model)")
        return 0
    url = options.vllm_url.rstrip("/")
    compared = check_with_vllm(url, options.model, options.device, options.samples, options.length)
    if not compared:
        print("vLLM and the trainer differ")
        return 1
    print(f"✓ vLLM-TorchTitan bitwise determinism verified: {compared} tokens match exactly")
    return 0
