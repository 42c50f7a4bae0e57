"""The size of fuzz tests: a small one by default, and the size and seed in the environment for long
runs.

    LOCKSTEP_FUZZ_INPUTS=10000 ./scripts/test.sh -k fuzz
    LOCKSTEP_FUZZ_INPUTS=10000 LOCKSTEP_FUZZ_SEED=7 pytest -s tests/atroposlib/service/test_fuzz.py

A small run always has seed 0. A long run takes a new seed each time; pytest shows it for a test
that fails.
"""

from __future__ import annotations

import os
import secrets

INPUTS = "LOCKSTEP_FUZZ_INPUTS"
SEED = "LOCKSTEP_FUZZ_SEED"
LONG_SECONDS = 3600
"""Limit on the time of a fuzz test, whatever its size."""


def fuzz_inputs(small: int) -> int:
    """Return the number of inputs of a test that has `small` of them by default."""
    return int(os.environ.get(INPUTS) or small)


def fuzz_seed() -> int:
    """Return the seed of this run, and print how to repeat it."""
    seed = int(os.environ.get(SEED) or (secrets.randbelow(2**32) if os.environ.get(INPUTS) else 0))
    print(f"fuzz seed {seed}: repeat with {SEED}={seed} {INPUTS}={os.environ.get(INPUTS, '')}")
    return seed
