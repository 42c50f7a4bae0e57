"""docs/algorithms.md, metrics.md: their tables equal the code's.

The loss of docs/your-loss.md learns.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from example_trainer.algorithm.advantages import BOUNDS, METHODS, Method, find_advantages
from example_trainer.algorithm.advantages import BUILT_IN as ADVANTAGES
from example_trainer.algorithm.objective import ObjectiveInputs, StepFigures, bin_loss
from example_trainer.command_line import parse_config
from example_trainer.config import (
    AlgorithmOptions,
    CorrectionOptions,
    DistillationOptions,
    LengthOptions,
    ReferenceWorkerOptions,
    TrainerConfig,
    flag_of,
)
from example_trainer.reference_worker import parse_arguments
from example_trainer.training.step import make_objective

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "algorithms.md").read_text(encoding="utf-8")
TUTORIAL = (DOCS / "your-loss.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The first table behind a heading, without its head and without the marks of code."""
    table = re.search(
        r"^\|.*?(?=^[^|])", PAGE[PAGE.index(f"\n## {heading}\n") :], re.MULTILINE | re.DOTALL
    )
    assert table is not None
    return [
        [cell.strip().replace("`", "") for cell in line.split("|")[1:-1]]
        for line in table[0].splitlines()[2:]
    ]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def typed(page: str, program: str) -> list[list[str]]:
    """Return the arguments of each command of a page that starts a program."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line.partition(program)[2]) for line in lines if program in line]


def row_of(name: str, method: Method) -> list[str]:
    high = method.clip_eps if method.clip_eps_high is None else method.clip_eps_high
    dual = f", dual {method.dual_clip:g}" if method.dual_clip else ""
    bounds = f"{method.clip_eps:.4g}, {high:.4g}{dual}" if BOUNDS[method.loss] else "no bounds"
    divided = "yes" if method.advantage_std else "no"
    return [
        name,
        method.loss,
        method.advantages,
        divided,
        method.loss_normalisation,
        bounds,
        method.kl_in,
    ]


def test_the_methods_are_those_of_the_code() -> None:
    assert rows("Methods") == [row_of(name, method) for name, method in METHODS.items()]


def test_the_advantages_are_those_of_the_code() -> None:
    assert [row[0] for row in rows("Advantages")] == [*ADVANTAGES, "module:function"]


def test_every_option_of_the_algorithm_is_told_of() -> None:
    sections = (AlgorithmOptions, CorrectionOptions, LengthOptions, DistillationOptions)
    flags = [
        flag_of(name)
        for section in sections
        for name in section.model_fields
        if name != "logprob_chunk"
    ]
    told = set(re.findall(r"--[a-z][a-z-]*[a-z]", PAGE)) | {
        f"--{name.replace('_', '-')}" for name in re.findall(r"\w+", PAGE)
    }
    assert [flag for flag in flags if flag not in told] == []
    known = {
        flag_of(name)
        for options in (TrainerConfig, ReferenceWorkerOptions)
        for name in options.model_fields
    }
    known |= {
        "--config",
        "--help",
        "--no-advantage-std",
        "--store",
    }  # the last one is the rollout service's
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", PAGE)) - known == set()


def test_the_metrics_page_explains_every_figure_of_a_step() -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    section = page[page.index("## What the figures of a step mean") : page.index("### Evaluations")]
    explained = set(re.findall(r"`([a-z_0-9]+)`", section))
    explained |= {f"kl_age_{age}" for age in range(1, 7)}  # the page writes `kl_age_0` … `kl_age_7`
    assert StepFigures(torch.device("cpu"), 0).row(lambda sums: sums).keys() - explained == set()


def test_its_commands_are_understood() -> None:
    assert [parse_config(words).kl_coef for words in typed(PAGE, "grpo.py")] == [0.0, 0.04]
    assert [parse_arguments(words)[0].atropos_url for words in typed(PAGE, "reference_worker")] == [
        "http://localhost:8000"
    ]


def test_the_loss_of_the_tutorial_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy over five tokens, one of them rewarded, by the trainer's own objective."""
    code, *_ = blocks(TUTORIAL, "python")
    (tmp_path / "my_losses.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (config,) = (parse_config(words) for words in typed(TUTORIAL, "grpo.py"))
    assert (config.loss, config.method.clip_eps, config.minibatches) == (
        "my_losses:pulled_back",
        0.1,
        4,
    )
    objective, advantages = make_objective(config), find_advantages(config.method.advantages)
    generator = torch.Generator().manual_seed(0)
    policy = torch.zeros(5, requires_grad=True)
    clipped = 0
    for _ in range(10):
        tokens = torch.multinomial(
            policy.detach().softmax(0).expand(64, 5), 1, generator=generator
        ).squeeze(1)
        began = policy.detach().log_softmax(0)[tokens]
        given = torch.tensor(advantages([(tokens == 3).float().tolist()])[0])
        for _ in range(config.minibatches):
            logprobs = policy.log_softmax(0)[tokens]
            inputs = ObjectiveInputs(
                logprobs=logprobs,
                entropy=torch.zeros(64),
                proximal_logprobs=began,
                rollout_logprobs=began,
                reference_logprobs=None,
                teacher_logprobs=torch.full((64,), torch.nan),
                advantages=given,
                weights=torch.full((64,), 1 / 64),
                versions=torch.zeros(64, dtype=torch.int64),
                sequence=torch.arange(64),
                sequences=64,
            )
            found = bin_loss(inputs, objective)
            clipped += int((found.outcome.clipped_low | found.outcome.clipped_high).sum())
            (gradient,) = torch.autograd.grad(found.loss, policy)
            policy = (policy.detach() - 2.0 * gradient).requires_grad_()
    assert policy.softmax(0)[3] > 0.8
    assert clipped > 0
