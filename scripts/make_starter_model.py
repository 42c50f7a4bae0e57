"""Make the starter model that ships in assets/starter_model: tokenizer, weights, training log and a README with its figures.

    python scripts/make_starter_model.py --seed 0 --output assets/starter_model

Everything is generated on this machine; nothing is downloaded. The same command gives the same bytes on the same machine
(same PyTorch build, same number of threads). Takes about ten minutes on two cores.
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

sys.path[0] = str(
    Path(__file__).resolve().parents[1]
)  # run by path: import from the repository, and never a sibling file by a bare name

# Both are read when the libraries load. Merges are learned in one thread, so that their order cannot depend on timing.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from environments.arithmetic_problems import MAX_HELD_OUT, OPERAND_DIGITS
from scripts.starter_model.report import write_readme
from scripts.starter_model.tokenizer import save_tokenizer, starter_corpus, train_tokenizer
from scripts.starter_model.training import MAX_POSITIONS, TrainingPlan, measure_habits, train

logger = logging.getLogger("make_starter_model")

DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "assets" / "starter_model"
SIZE_LIMIT_BYTES = 10_000_000


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; the shipped model is made with the defaults."""
    defaults = TrainingPlan()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, help="folder to write; files of the same names are replaced"
    )
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--steps", type=int, default=defaults.steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; another number may give other bits (default: 2)")
    parser.add_argument(
        "--eval-problems", type=int, default=200, help="held-out problems of each level for the figures (default: 200)"
    )
    options = parser.parse_args(arguments)
    for name in ("steps", "threads", "eval_problems"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give at least 1")
    if options.eval_problems > MAX_HELD_OUT:
        parser.error(f"--eval-problems {options.eval_problems}: give at most {MAX_HELD_OUT}")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Train, measure, and write the folder."""
    options = parse_arguments(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    torch.set_num_threads(options.threads)
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    plan = dataclasses.replace(TrainingPlan(), seed=options.seed, steps=options.steps)

    tokenizer = train_tokenizer(starter_corpus(plan.seed), MAX_POSITIONS)
    log_path = output / "training_log.jsonl"
    started = time.monotonic()
    with log_path.open("w", encoding="utf-8") as log_file:

        def record(entry: dict[str, Any]) -> None:
            # Times go to the terminal only: the log is part of what must come out the same each time.
            log_file.write(json.dumps(entry) + "\n")
            log_file.flush()
            logger.info("%s (%.0f s)", json.dumps(entry), time.monotonic() - started)

        record({"plan": dataclasses.asdict(plan), **_versions(options.threads)})
        model = train(plan, tokenizer, record)
        habits = [measure_habits(model, tokenizer, level, n=options.eval_problems) for level in sorted(OPERAND_DIGITS)]
        for report in habits:
            record({"habits": report.to_dict()})

    model.save_pretrained(output)
    save_tokenizer(tokenizer, output)
    parameters = sum(p.numel() for p in model.parameters())
    write_readme(output / "README.md", plan, habits, parameters=parameters, threads=options.threads)
    _check(output, tokenizer)
    digest = hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()
    logger.info("%s: %s parameters, weights sha256 %s, %.0f s", output, f"{parameters:,}", digest, time.monotonic() - started)


def _versions(threads: int) -> dict[str, Any]:
    """What else the bits depend on."""
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
        sys.exit(f"{output}: {size:,} bytes, more than the {SIZE_LIMIT_BYTES:,} that may be shipped; make the model smaller")
    text = "Noah has 47 grapes; Zoë's café sold 38.\n\\boxed{85} ✓"
    loaded = transformers.AutoTokenizer.from_pretrained(output)
    if loaded.encode(text) != tokenizer.encode(text) or loaded.decode(loaded.encode(text)) != text:
        sys.exit(f"{output}: the tokenizer reads back differently; transformers {transformers.__version__} is not supported")


if __name__ == "__main__":
    main()
