"""studies/bitwise/on_off.py and studies/bitwise/published_loss.py: the study's commands, its table, and its loss
against closed forms.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.figure_tables import on_off_published
from bench.results_book import Book, FigureError
from example_trainer.algorithm.losses import LossInputs, LossSettings
from example_trainer.simple_rl import parse_arguments, trainer_config
from studies.bitwise.on_off import PROTOCOLS, Run, command_of
from studies.bitwise.published_loss import ENTROPY_WEIGHT, KL_WEIGHT, sequence_ppo
from studies.bitwise.summary import HEAD, best_window, differences, row_of

DATED = {"commit": "abc", "date": "2026-01-02 03:04", "run": "2026-01-02 03:00"}


def course(
    mode: str, seed: int, lr: float, rewards: list[float], failed: str = ""
) -> dict[str, Any]:
    steps = len(rewards)
    return {
        "mode": mode, "seed": seed, "lr": lr, "steps": steps, "reward_mean": rewards, "parity_kl": [0.0] * steps,
        "mismatched_tokens": [0] * steps, "compared_tokens": [50] * steps, "held_out": [[0, 0.25], [steps, 0.5]],
        "failed": failed, "measured": DATED,
    }  # fmt: skip


def test_the_published_protocol_is_the_published_study() -> None:
    args = argparse.Namespace(protocol="published", steps=100, device="cpu", rest=[])
    command = command_of(Run("off", 2, 1e-5, Path("out")), args)
    options = parse_arguments(command[command.index("--no-batch-invariant") :])
    assert (options.problem_count, options.groups, options.group_size, options.steps) == (
        10,
        20,
        8,
        100,
    )
    config = trainer_config(options, port=1)
    assert (config.method.advantages, config.advantage_beta, config.lr, config.seed) == (
        "exponential",
        0.1,
        1e-5,
        2,
    )
    assert (config.weight_decay, config.beta1, config.beta2, config.max_grad_norm) == (
        0.01,
        0.9,
        0.999,
        1.0,
    )
    assert (config.correction, config.method.loss_normalisation, config.method.clip_eps) == (
        "none",
        "sequence",
        0.2,
    )


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_is_understood_and_later_options_win(name: str) -> None:
    args = argparse.Namespace(protocol=name, steps=5, device="cpu", rest=["--digits", "1"])
    command = command_of(Run("on", 0, 0.5, Path("out")), args)
    options = parse_arguments(command[command.index("--batch-invariant") :])
    assert (options.batch_invariant, options.lr, options.digits, options.evaluate_every) == (
        True,
        0.5,
        1,
        5,
    )


def answers(*ratios: list[float]) -> tuple[LossInputs, list[Tensor]]:
    """Answers whose tokens have these log ratios, with advantages 2, -1, 2, -1 …"""
    present = [torch.linspace(-2, -1, len(one)).requires_grad_() for one in ratios]
    old = torch.cat(
        [p.detach() - torch.tensor(one) for p, one in zip(present, ratios, strict=True)]
    )
    counts = torch.tensor([len(one) for one in ratios])
    advantages = torch.tensor([2.0, -1.0] * len(ratios))[: len(ratios)]
    sequence = torch.arange(len(ratios)).repeat_interleave(counts)
    return LossInputs(torch.cat(present), old, advantages[sequence], sequence, len(ratios)), present


def test_on_equal_bits_the_loss_is_the_policy_gradient() -> None:
    inputs, present = answers([0.0] * 3, [0.0] * 5)
    found = sequence_ppo(inputs, LossSettings(0.2, 0.2))
    weights = torch.tensor(
        [1 / 6] * 3 + [1 / 10] * 5
    )  # of --loss-normalisation sequence: 1 / (length × answers)
    loss = (found.losses * weights).sum()
    entropies = [ENTROPY_WEIGHT * float(one.detach().mean()) for one in present]
    assert float(loss.detach()) == pytest.approx((-2 + 1 + sum(entropies)) / 2, rel=1e-6)
    gradients = torch.autograd.grad(loss, present)
    for gradient, advantage, length in zip(gradients, (2, -1), (3, 5), strict=True):
        # The divergence's gradient is 0 where the ratio is 1, and each token gets that of the whole
        # answer.
        assert gradient.tolist() == pytest.approx(
            [(-advantage + ENTROPY_WEIGHT / length) / 2] * length, rel=1e-5
        )
    assert not (found.clipped_low | found.clipped_high).any()


def test_other_bits_move_the_ratio_of_the_whole_answer_within_its_bounds() -> None:
    logs = [[0.05, 0.03], [-0.2, -0.1], [0.3, 0.1]]
    inputs, present = answers(*logs)
    found = sequence_ppo(inputs, LossSettings(0.2, 0.2))
    for number, (tokens, advantage) in enumerate(zip(logs, (2, -1, 2), strict=True)):
        log = sum(tokens)
        ratio = math.exp(log)
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        entropy = ENTROPY_WEIGHT * float(present[number].detach().mean())
        expected = -surrogate + KL_WEIGHT * (ratio - 1 - log) + entropy
        mine = found.losses[inputs.sequence == number]
        assert mine.tolist() == pytest.approx([expected] * 2, rel=1e-5)
    assert found.clipped_low.tolist() == [False, False, True, True, False, False]
    assert found.clipped_high.tolist() == [False, False, False, False, True, True]


def test_a_row_and_its_best_steps() -> None:
    rewards = [float(n) for n in range(20)] + [0.0] * 10
    assert best_window(rewards) == sum(range(10, 20)) / 10
    assert best_window([1.0, 2.0]) == 1.5
    row = row_of(course("on", 3, 1e-5, rewards))
    assert len(row) == len(HEAD)
    assert row == [
        "on, seed 3, lr 1e-05",
        "30",
        "+4.500",
        "+0.000",
        "+14.500",
        "0.0e+00",
        "0 of 1,500",
        "25.0%",
        "50.0%",
    ]
    assert len(row_of(course("off", 0, 1e-5, []))) == len(HEAD), (
        "a run that ended before its first step has a row"
    )


def test_differences_are_taken_seed_by_seed() -> None:
    runs = [course("on", seed, 1e-5, [0.5 + 0.1 * seed]) for seed in range(3)]
    runs += [course("off", seed, 1e-5, [0.4 + 0.1 * seed]) for seed in range(3)]
    (line,) = differences(runs)
    assert (
        "+0.100, 95 % interval +0.100 to +0.100 (seed by seed +0.100, +0.100, +0.100). The interval excludes 0"
        in line
    )
    runs[-1]["reward_mean"] = [0.9]
    (line,) = differences(runs)
    # +0.1, +0.1, -0.2: mean 0, standard deviation sqrt(0.03), half 4.303 · sqrt(0.03 / 3).
    assert "+0.000, 95 % interval -0.430 to +0.430" in line.replace("-0.000,", "+0.000,")
    assert "includes 0: 3 seeds show no difference" in line
    assert "1 seeds ran in both modes" in differences([runs[0], runs[3]])[0]


def test_documents_show_whole_runs_alone(tmp_path: Path) -> None:
    runs = {
        f"{m} {s}": course(m, s, 1e-5, [0.5, 0.25 * s]) for s in range(2) for m in ("on", "off")
    }
    page = {
        "measured": DATED,
        "steps": 2,
        "machine": {"gpus": ["A GPU"], "torch": "2", "vllm": "0.26"},
        "runs": runs,
    }
    runs["off 0"]["mismatched_tokens"] = [3, 4]
    (tmp_path / "on_off_published.json").write_text(json.dumps(page))
    text = on_off_published(Book(tmp_path))
    assert (
        "with the mode on 0 of 200 tokens differed; with the mode off 7 of 200 tokens differed."
        in text
    )
    assert text.endswith("A GPU, torch 2, vLLM 0.26. One run of 2026-01-02, commit abc.")
    runs["on 1"]["failed"] = "out of memory"
    (tmp_path / "on_off_published.json").write_text(json.dumps(page))
    with pytest.raises(
        FigureError, match=r"on_off_published\.json runs/on 1: not a whole run: out of memory"
    ):
        on_off_published(Book(tmp_path))
