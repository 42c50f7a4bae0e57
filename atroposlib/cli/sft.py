"""Text for supervised fine-tuning from the best responses of each group: `atropos-sft-gen FILE`, or
`python -m atroposlib.cli.sft FILE`.

A row is `{"prefix", "completion", "score"}`, or with --save-messages `{"messages", "score"}`.
"""

from __future__ import annotations

import argparse
from typing import Any

from atroposlib.cli.collecting import (
    Group,
    Row,
    collect,
    collector_parser,
    prompts_and_completions,
    run_collector,
)

TASKS_PER_STEP = 64
NAME = "atropos-sft-gen"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = collector_parser(
        NAME, "Write the best responses of each group to a file of JSON lines.", "sequences"
    )
    parser.add_argument(
        "--save-top-n-per-group",
        type=int,
        default=3,
        help="responses that are kept of a group at most (default: %(default)s)",
    )
    parser.add_argument(
        "--minimum-score-diff-max-min",
        type=float,
        default=0.0,
        help="keep a response only if its score is more than this above the group's lowest (default: 0, whatever it is)",
    )
    return parser.parse_args(argv)


def best_of_group(
    group: Group, tokenizer: Any, most: int, least_difference: float, negative: bool
) -> list[Row]:
    """The rows of one group, best first; of equal scores the one that came first.

    Args:
        group: as a batch holds it.
        tokenizer: of the model that was sampled; None for messages.
        most: rows.
        least_difference: above the group's lowest score that a row's must be, if it is above 0.
        negative: take scores of 0 and below, too.
    """
    if tokenizer is None:
        rows: list[Row] = [{"messages": messages} for messages in group.get("messages") or []]
    else:
        rows = [
            {"prefix": prompt, "completion": text}
            for prompt, text in prompts_and_completions(group, tokenizer)
        ]
    scored = sorted(
        ({**row, "score": score} for row, score in zip(rows, group["scores"], strict=False)),
        key=lambda row: -row["score"],
    )
    lowest = min(group["scores"])
    kept = [row for row in scored if negative or row["score"] > 0]
    if least_difference > 0:
        kept = [row for row in kept if row["score"] - lowest > least_difference]
    return kept[:most]


def main(argv: list[str] | None = None) -> None:
    """Collect until the file is complete."""
    arguments = parse_arguments(argv)

    def select(group: Group, tokenizer: Any) -> list[Row]:
        return best_of_group(
            group,
            tokenizer,
            arguments.save_top_n_per_group,
            arguments.minimum_score_diff_max_min,
            arguments.allow_negative_scores,
        )

    run_collector(lambda: collect(arguments, NAME, TASKS_PER_STEP, select))


if __name__ == "__main__":
    main()
