"""TRL's asynchronous GRPO (TRL 1.16) on the questions, group size, lengths and reward of
bench/whole_run.py, step by step.

python -m bench.gpu.trl_trainer SETTINGS.json ROWS.jsonl
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

PHASES = ("seconds_wait", "seconds_pack", "seconds_sync")
"""Between two steps, beside the training itself: the wait for answers, packing them, and the
weights' way to vLLM."""


class DropCounter(logging.Handler):
    """Counts the samples that TRL reports as dropped."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.dropped = 0
        for name in ("trl", "trl.experimental.async_grpo.async_grpo_trainer"):
            logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger("trl").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.dropped += "dropping stale sample" in record.getMessage()


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for an odd number of tokens."""
    return [float(len(ids) % 2) for ids in completion_ids]


def make_tokenizer(model: str) -> Any:
    """Load the tokenizer with a chat template that TRL can parse."""
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.chat_template = qwen3_chat_template
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def make_dataset(questions: Path) -> Any:
    """Make TRL's dataset of the questions."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    lines = [line for line in questions.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    # A fingerprint is given, because from_dict pickles to make one, which fails for some versions
    # of Python and pyarrow.
    return Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="questions")


def main(settings: dict[str, Any], rows: Path) -> None:
    """Train, and append a row for each step, with the keys of our metrics.jsonl."""
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    class Timed(AsyncGRPOTrainer):
        """Counts and times what it does between two steps."""

        def start_row(self) -> None:
            self.row = dict.fromkeys(
                ("tokens", "sequences", "forwarded_tokens"), 0
            ) | dict.fromkeys(PHASES, 0.0)
            self.began = time.monotonic()

        def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
            began = time.monotonic()
            answer = super().get_batch_samples(*arguments, **options)
            # The wait within it is taken off at the end of the step.
            self.row["seconds_pack"] += time.monotonic() - began
            return answer

        def compute_loss(
            self, model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any
        ) -> Any:
            trained = inputs["token_index"] >= 0
            self.row["tokens"] += int(trained.sum())
            self.row["sequences"] += int(inputs["segment_id"][trained].unique().numel())
            self.row["forwarded_tokens"] += int(inputs["attention_mask"].sum())
            return super().compute_loss(model, inputs, *arguments, **options)

        def _sync_weight(self) -> None:
            began = time.monotonic()
            super()._sync_weight()
            self.row["seconds_sync"] += time.monotonic() - began

    class Rows(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            row, whole = trainer.row, time.monotonic() - trainer.began
            # TRL's own count, which it clears after this.
            row["seconds_wait"] = trainer._rollout_dataset.wait_s
            row["seconds_pack"] -= row["seconds_wait"]
            row |= {
                "seconds_train": whole - sum(row[name] for name in PHASES),
                "thrown_away": drops.dropped,
            }
            with rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step} | row) + "\n")
            trainer.start_row()

    drops = DropCounter()
    config = AsyncGRPOConfig(
        output_dir=settings["folder"], bf16=True, gradient_checkpointing=False, logging_steps=1, report_to=[],
        save_strategy="no", per_device_train_batch_size=1, **settings["config"],
    )  # fmt: skip
    trainer = Timed(
        model=settings["model"], processing_class=make_tokenizer(settings["model"]), reward_funcs=length_reward, args=config,
        train_dataset=make_dataset(Path(settings["questions"])), callbacks=[Rows()],
    )  # fmt: skip
    trainer.start_row()
    trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
