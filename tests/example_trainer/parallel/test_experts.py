"""Experts that are spread over ranks: the bits of one rank, and numbers of ranks that do."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from example_trainer.errors import ConfigError
from example_trainer.models import Decoder, save_model
from example_trainer.parallel.experts import require_expert_parallel
from tests.conftest import ROOT, Processes
from tests.example_trainer.parallel.experts_worker import CHOSEN, EXPERTS, GEOMETRY
from tests.geometries import config_of, geometry_of

HERE = Path(__file__).resolve().parent
DENSE = geometry_of("Qwen3", 1, 32, 16, 2, 1, 16, 61)


@pytest.mark.parametrize("ranks", [2, 4])
def test_spread_experts_compute_what_one_rank_computes(
    ranks: int, processes: Processes, tmp_path: Path
) -> None:
    model = Decoder(GEOMETRY, torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    save_model(model, tmp_path)
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True}
    config = config_of("Qwen3Moe", 2, 32, 16, 2, 1, 16, 61, **sizes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "tests.forked_ranks", HERE / "experts_worker.py", tmp_path]
    environment = {"PYTHONPATH": str(ROOT), "FORKED_RANKS": str(ranks)}
    started = processes.start("experts", command, environment=environment)
    processes.finish(started, seconds=240)


@pytest.mark.parametrize(("count", "ranks"), [(1, 1), (1, 3), (2, 2), (2, 4), (4, 8), (8, 8)])
def test_numbers_that_divide_are_taken(count: int, ranks: int) -> None:
    require_expert_parallel(count, ranks, GEOMETRY)


@pytest.mark.parametrize(
    ("count", "ranks", "geometry", "reason"),
    [
        (2, 2, DENSE, "(Qwen3ForCausalLM) has none that this trainer computes: leave it out"),
        (2, 3, GEOMETRY, "the 8 experts of a layer cannot be divided among 3 trainer rank(s); "
         "start 2, 4 or 8 ranks (--ranks), or leave it out"),
        (4, 3, GEOMETRY, "start 4 or 8 ranks (--ranks), or leave it out"),
        (3, 3, GEOMETRY, "the 8 experts of a layer cannot be divided among 3 trainer rank(s); "
         "give 2, 4 or 8 and start as many ranks (--ranks), or leave it out"),
        (2, 2, replace(GEOMETRY, num_experts=1), "among 2 trainer rank(s); leave it out"),
        (3, 4, GEOMETRY, "does not divide the 4 trainer rank(s); give 1, 2 or 4"),
        (2, 1, GEOMETRY, "does not divide the 1 trainer rank(s); give 1"),
    ],
)  # fmt: skip
def test_other_numbers_are_refused_in_one_line(
    count: int, ranks: int, geometry: object, reason: str
) -> None:
    with pytest.raises(ConfigError) as error:
        require_expert_parallel(count, ranks, geometry)  # type: ignore[arg-type]
    assert str(error.value).startswith(f"--expert-parallel {count}")
    assert str(error.value).endswith(reason)


@pytest.mark.parametrize("experts", range(1, 13))
def test_what_a_refusal_names_is_taken(experts: int) -> None:
    geometry, tried = replace(GEOMETRY, num_experts=experts), 0
    for count, ranks in itertools.product(range(2, 10), range(1, 10)):
        try:
            require_expert_parallel(count, ranks, geometry)
            continue
        except ConfigError as error:
            advice = str(error).rpartition("; ")[2]
        for number in map(int, re.findall(r"\d+", advice)):
            tried += 1
            named = {"start": (count, number), "give": (number, ranks)}[advice.split()[0]]
            require_expert_parallel(*((number, number) if "as many" in advice else named), geometry)
    assert tried
