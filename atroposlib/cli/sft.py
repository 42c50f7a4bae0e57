"""Text for supervised fine-tuning from the best responses of each group: `atropos-sft-gen FILE`, or
`python -m atroposlib.cli.sft FILE`.

A row is `{"prefix", "completion", "score"}`, or with --save-messages `{"messages", "score"}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from atroposlib.cli.collecting import (
    CollectorOptions,
    Group,
    Row,
    prompts_and_completions,
    run_collector,
)
from atroposlib.command_line import parse_options

NAME = "atropos-sft-gen"


class BestOptions(CollectorOptions):
    """The options of this command."""

    save_top_n_per_group: int = Field(
        default=3, description="responses that are kept of a group at most"
    )
    minimum_score_diff_max_min: float = Field(
        default=0.0,
        description="keep a response only if its score is more than this above the group's lowest "
        "(default: 0, whatever it is)",
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> BestOptions:
    """Read the command line."""
    description = "Write the best responses of each group to a file of JSON lines."
    return parse_options(BestOptions, arguments, NAME, description, positional=("filepath",))


def best_of_group(
    group: Group, tokenizer: Any, most: int, least_difference: float, negative: bool
) -> list[Row]:
    """The rows of one group, best first; rows of equal scores keep their order.

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


def select(group: Group, tokenizer: Any, options: BestOptions) -> list[Row]:
    """Return the rows of one group by the options."""
    return best_of_group(
        group,
        tokenizer,
        options.save_top_n_per_group,
        options.minimum_score_diff_max_min,
        options.allow_negative_scores,
    )


def main(argv: list[str] | None = None) -> None:
    """Collect until the file is complete."""
    run_collector(parse_arguments(argv), NAME, select)


if __name__ == "__main__":
    main()
