"""Make the starter models in assets/: tokenizer, weights, training log, README with figures.

    python -m studies.starter_model --seed 0 --output assets/starter_model

Everything is generated on this machine; nothing is downloaded. The same command gives the same
bytes on the same machine (same PyTorch build, same number of threads). Takes about ten minutes on
two cores. A second stage is of as long again. In it the model learns to ask a calculator, too, if
it is offered one (docs/calculator.md gives the reason for a second model):

    python -m studies.starter_model --first-stage assets/starter_model \
        --calculator-steps 600 --threads 1 --output assets/calculator_model
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

# Both are read when the libraries load. Merges are learned in one thread, so that their order
# cannot depend on timing.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from environments.arithmetic_server import MAX_HELD_OUT, OPERAND_DIGITS
from environments.calculator_server import LEVELS
from studies.starter_model.measuring import CallReport, HabitReport, measure_calls, measure_habits
from studies.starter_model.report import how_made, write_readme
from studies.starter_model.tokenizer import save_tokenizer, starter_corpus, train_tokenizer
from studies.starter_model.training import MAX_POSITIONS, Log, TrainingPlan, train, train_calculator

logger = logging.getLogger("starter_model")

DEFAULT_OUTPUT = Path(__file__).resolve().parents[2] / "assets" / "starter_model"
SIZE_LIMIT_BYTES = 10_000_000


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; the starter model is made with the defaults."""
    defaults = TrainingPlan()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=DEFAULT_OUTPUT,
        help="folder to write; files of the same names are replaced",
    )
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--calculator-steps",
        type=int,
        default=defaults.calculator_steps,
        help="optimizer steps of the second stage, in which it learns to ask a calculator (default: %(default)s; 600 will do)",
    )
    parser.add_argument(
        "--first-stage",
        type=Path,
        default=None,
        help="folder of a model whose first stage, with its log, is taken as it is",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=2,
        help="CPU threads; another number may give other bits (default: 2)",
    )
    parser.add_argument(
        "--eval-problems",
        type=int,
        default=200,
        help="held-out problems of each level for the figures; 0: none are measured (default: 200)",
    )
    options = parser.parse_args(arguments)
    for name, least in {"steps": 1, "threads": 1, "eval_problems": 0}.items():
        if getattr(options, name) < least:
            parser.error(
                f"--{name.replace('_', '-')} {getattr(options, name)}: give at least {least}"
            )
    if options.eval_problems > MAX_HELD_OUT:
        parser.error(f"--eval-problems {options.eval_problems}: give at most {MAX_HELD_OUT}")
    if (
        options.first_stage is not None
        and not (options.first_stage / "training_log.jsonl").is_file()
    ):
        parser.error(
            f"--first-stage {options.first_stage}: no training_log.jsonl there: give a folder that this command made"
        )
    return options


def main(arguments: list[str] | None = None) -> None:
    """Train, measure, and write the folder."""
    options = parse_arguments(arguments)
    started = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    torch.set_num_threads(options.threads)
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    plan = dataclasses.replace(
        TrainingPlan(),
        seed=options.seed,
        steps=options.steps,
        calculator_steps=options.calculator_steps,
    )

    tokenizer = train_tokenizer(starter_corpus(plan.seed), MAX_POSITIONS)
    log_path = output / "training_log.jsonl"
    with log_path.open("w", encoding="utf-8") as log_file:

        def record(entry: dict[str, Any]) -> None:
            # Times go to the terminal only: the log is part of what must come out the same each
            # time.
            log_file.write(json.dumps(entry) + "\n")
            log_file.flush()
            logger.info("%s (%.0f s)", json.dumps(entry), time.monotonic() - started)

        record({"plan": dataclasses.asdict(plan), **_versions(options.threads)})
        taken: dict[str, Any] | None = None
        if options.first_stage is None:
            model = train(plan, tokenizer, record)
        else:
            model, taken = first_stage(options.first_stage, plan, tokenizer, record)
        if plan.calculator_steps > 0:
            model = train_calculator(model, plan, tokenizer, record)
        model.save_pretrained(output)
        save_tokenizer(tokenizer, output)
        habits, calls = measure(model, tokenizer, options.eval_problems)
        reports: list[HabitReport | CallReport] = [*habits, *calls]
        for report in reports:
            record({"habits": report.to_dict()})

    parameters = sum(p.numel() for p in model.parameters())
    write_readme(
        output / "README.md",
        plan,
        habits,
        calls,
        parameters,
        how_made(plan, options.threads, taken),
    )
    _check(output, tokenizer)
    digest = hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()
    logger.info(
        "%s: %s parameters, weights sha256 %s, %.0f s",
        output,
        f"{parameters:,}",
        digest,
        time.monotonic() - started,
    )


def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: int
) -> tuple[list[HabitReport], list[CallReport]]:
    """Measure habits and calls on so many held-out problems of each level; 0 for nothing."""
    if not problems:
        return [], []
    habits = [measure_habits(model, tokenizer, level, n=problems) for level in OPERAND_DIGITS]
    return habits, [measure_calls(model, tokenizer, level, n=problems) for level in LEVELS]


def first_stage(
    folder: Path, plan: TrainingPlan, tokenizer: PreTrainedTokenizerFast, record: Log
) -> tuple[Qwen3ForCausalLM, dict[str, Any]]:
    """The model of a folder, which knows the first stage alone, and its origin. That is the first
    line of its log, and the checksum of its weights. Both go into this log, with the losses.

    Ends the process if the folder's tokenizer is another one. It also ends it if the model has been
    through the second stage, or if its first was not the plan's.
    """
    lines = [
        json.loads(line)
        for line in (folder / "training_log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    if theirs.get_vocab() != tokenizer.get_vocab():
        sys.exit(
            f"--first-stage {folder}: these texts give another tokenizer than its own; leave the "
            "option out"
        )
    if any("called_share" in line for line in lines):
        sys.exit(
            f"--first-stage {folder}: this model has been through the second stage; give one that has not"
        )
    seed, steps = (lines[0]["plan"][name] for name in ("seed", "steps"))
    if (seed, steps) != (plan.seed, plan.steps):
        sys.exit(
            f"--first-stage {folder}: it was made with --seed {seed} --steps {steps}; give the same here"
        )
    taken = {
        "first_stage": lines[0],
        "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
    }
    record(taken)
    for line in lines[1:]:
        if "loss" in line:
            record(line)
    model: Qwen3ForCausalLM = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )
    return model, taken


def _versions(threads: int) -> dict[str, Any]:
    """Versions on which the bits depend, too."""
    return {
        "threads": threads,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _check(output: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuse a folder that is too large to ship, or whose tokenizer reads back as another one."""
    size = sum(path.stat().st_size for path in output.iterdir() if path.is_file())
    if size > SIZE_LIMIT_BYTES:
        sys.exit(
            f"{output}: {size:,} bytes, more than the {SIZE_LIMIT_BYTES:,} that may be shipped; make the model smaller"
        )
    text = "Noah has 47 grapes; Zoë's café sold 38.\n\\boxed{85} ✓"
    loaded = transformers.AutoTokenizer.from_pretrained(output)
    if loaded.encode(text) != tokenizer.encode(text) or loaded.decode(loaded.encode(text)) != text:
        sys.exit(
            f"{output}: the tokenizer reads back differently; transformers {transformers.__version__} is not supported"
        )


if __name__ == "__main__":
    main()
