"""The checks of `test_batch_invariant_backward.py` as a script: every gradient at the sizes of a
real layer. Needs no pytest.
"""

from __future__ import annotations

import argparse
import time

import torch

from example_trainer.batch_invariant_backward import patch_batch_invariant_with_gradients
from tests.example_trainer.deterministic.cases import INVARIANT_CASES, LIMITS, Sizes, errors


def main() -> int:
    """Check every gradient at the sizes of a real layer; returns the process's status."""
    parser = argparse.ArgumentParser(
        description="Backward passes against float64, on a GPU if there is one."
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    patch_batch_invariant_with_gradients()
    if device == "cpu":
        chosen = {"small": Sizes((1, 65, 7, 64, 130))}
    else:
        lengths = (1, 127, 128, 129, 255, 256, 257, 777, 64)
        chosen = {
            "Qwen3-0.6B": Sizes(
                lengths, hidden=1024, inner=3072, heads=16, kv_heads=8, head_dim=128, vocab=151936
            ),
            "ragged": Sizes(
                (1, 2, 63, 65, 300),
                hidden=192,
                inner=200,
                heads=6,
                kv_heads=2,
                head_dim=64,
                vocab=1000,
            ),
        }
    failed = 0
    for label, shape in chosen.items():
        for dtype in (torch.bfloat16, torch.float32):
            for name in INVARIANT_CASES:
                if device != "cpu" and name.startswith("attention") and dtype == torch.float32:
                    print(
                        f"-- {label} {name} float32: the GPU's kernel takes 16 bits only; see tests/gpu"
                    )
                    continue
                begun = time.perf_counter()
                found = errors(name, shape, dtype, device)
                good = max(found.values()) <= LIMITS[dtype]
                failed += not good
                shown = "  ".join(f"{key} {error:.1e}" for key, error in found.items())
                mark, seconds = "✓" if good else "✗", time.perf_counter() - begun
                print(
                    f"{mark} {label} {name} {str(dtype).removeprefix('torch.')}: {shown}  ({seconds:.1f} s)",
                    flush=True,
                )
    if failed:
        print(f"{failed} checks failed")
        return 1
    print(f"✓ All backward passes agree with float64 autograd on {device}")
    return 0
