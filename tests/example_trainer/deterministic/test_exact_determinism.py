"""Equal bits where they are promised: run to run, packing to packing, and (on a GPU) trainer to vLLM; also a plain script:

    python tests/example_trainer/deterministic/test_exact_determinism.py                       # the operations and the model
    python tests/example_trainer/deterministic/test_exact_determinism.py --vllm-url http://localhost:9001 --model FOLDER

With --vllm-url it samples from a server started with --deterministic, and compares every token's logprob.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import httpx
import pytest
import torch
from torch import Tensor

from example_trainer.deterministic import functions
from example_trainer.deterministic.decoder import DeterministicDecoder
from example_trainer.deterministic.packing import Packing
from example_trainer.deterministic.pairing import model_provenance, pair
from example_trainer.models import load_model
from example_trainer.models.qwen3 import Qwen3ModelArgs, Qwen3VLLMCompatModel
from tests.example_trainer.deterministic.cases import CASES, Draws, Sizes, gradients
from vllm_patching.batch_invariant.settings import enable_settings

LENGTHS = (1, 65, 7, 64, 130)


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in tensors]


def run_bits(name: str, sizes: Sizes, dtype: torch.dtype, device: str) -> list[bytes]:
    """Of the outputs and the gradients of one operation."""
    outputs, found = gradients(CASES[name](Draws(sizes, dtype, device, 0)), 1)
    return bits([*outputs, *found.values()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", CASES)
def test_the_same_inputs_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    sizes = Sizes(LENGTHS)
    assert run_bits(name, sizes, dtype, "cpu") == run_bits(name, sizes, dtype, "cpu")


def small_model(seed: int = 0, tied: bool = True, device: str = "cpu") -> Qwen3VLLMCompatModel:
    torch.manual_seed(seed)
    sizes = Qwen3ModelArgs(
        dim=48, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=97, head_dim=16, hidden_dim=40, max_seq_len=256,
        enable_weight_tying=tied,
    )  # fmt: skip
    model = Qwen3VLLMCompatModel(sizes, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter, device="cpu").to(device))
    return model


def packed_bits(model: DeterministicDecoder, sequences: list[Tensor]) -> tuple[list[bytes], list[Tensor]]:
    """Hidden states of each sequence, packed together, and the gradient of each sequence's input embedding."""
    packing = Packing([len(sequence) for sequence in sequences], sequences[0].device)
    hidden = model.packed(torch.cat(sequences), packing).split(list(packing.lengths))
    return bits(list(hidden)), list(hidden)


def test_a_sequence_has_the_bits_of_itself_alone() -> None:
    model = small_model()
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 97, (length,), generator=generator) for length in LENGTHS]
    together, _ = packed_bits(model, sequences)
    alone = [packed_bits(model, [sequence])[0][0] for sequence in sequences]
    assert together == alone
    assert packed_bits(model, sequences[::-1])[0] == alone[::-1]


def test_a_prefix_has_the_bits_of_the_longer_sequence() -> None:
    """What was sampled as a short sequence is trained on as part of a longer one."""
    model = small_model()
    tokens = torch.randint(0, 97, (130,), generator=torch.Generator().manual_seed(2))
    whole = model.packed(tokens, Packing([130]))
    for length in (1, 63, 64, 65, 129):
        assert torch.equal(model.packed(tokens[:length], Packing([length])), whole[:length])


def test_gradients_through_attention_do_not_depend_on_the_packing() -> None:
    d = Draws(Sizes(LENGTHS), torch.bfloat16, "cpu", 4)
    q, k, v, dy = d.normal(267, 4, 16), d.normal(267, 2, 16), d.normal(267, 2, 16), d.normal(267, 4, 16)

    def gradients_of(rows: slice, lengths: tuple[int, ...]) -> list[Tensor]:
        leaves = [part[rows].clone().requires_grad_() for part in (q, k, v)]
        functions.attention(*leaves, Packing(lengths), 0.25).backward(dy[rows])
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    together, start = gradients_of(slice(0, 267), LENGTHS), 0
    for length in LENGTHS:
        alone = gradients_of(slice(start, start + length), (length,))
        assert all(torch.equal(a, b[start : start + length]) for a, b in zip(alone, together, strict=True))
        start += length


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
    from tests.example_trainer.deterministic.training import decoder_for, summed_gradients

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


if __name__ == "__main__":
    sys.exit(main())
