"""Pairs for preference learning from each group: `atropos-dpo-gen FILE`, or
`python -m atroposlib.cli.dpo FILE`.

A row is `{"prefix", "pos", "neg", "score"}`, or with --save-messages `{"pos", "neg", "score"}`,
where `pos` and `neg` are lists of messages. The score is the better one's.
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
from atroposlib.command_line import AtLeastOne, parse_options

NAME = "atropos-dpo-gen"


class PairOptions(CollectorOptions):
    """The options of this command."""

    tasks_per_step: AtLeastOne = Field(default=8, description="groups in a batch")
    save_n_pairs_per_group: int = Field(
        default=3, description="pairs that are kept of a group at most"
    )
    minimum_score_diff_max_min: float = Field(
        default=0.5, description="the better score must be more than this above the worse"
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> PairOptions:
    """Read the command line."""
    description = "Write pairs of a better and a worse response to a file of JSON lines."
    return parse_options(PairOptions, arguments, NAME, description, positional=("filepath",))


def pairs_of_group(
    group: Group, tokenizer: Any, most: int, least_difference: float, negative: bool
) -> list[Row]:
    """The pairs of one group: the best with the worst, the second best with the second worst, and
    so on. No response is in two pairs, and both of a pair answer the same prompt.

    Args:
        group: as a batch holds it.
        tokenizer: of the model that was sampled; None for messages.
        most: pairs.
        least_difference: by which the scores of a pair must differ, and more.
        negative: let the better one have a score of 0 or below, too.
    """
    answers: list[tuple[str, Any]]
    if tokenizer is None:
        answers = [("", messages) for messages in group.get("messages") or []]
    else:
        answers = list(prompts_and_completions(group, tokenizer))
    ranked = sorted(zip(group["scores"], answers, strict=False), key=lambda entry: -entry[0])
    pairs: list[Row] = []
    for (score, (prompt, better)), (lower, (other, worse)) in zip(
        ranked, reversed(ranked), strict=True
    ):
        if (
            len(pairs) >= most
            or score - lower <= least_difference
            or not (negative or score > 0)
            or score <= lower
        ):
            break
        if prompt == other:
            prefix = {} if tokenizer is None else {"prefix": prompt}
            pairs.append({**prefix, "pos": better, "neg": worse, "score": score})
    return pairs


def select(group: Group, tokenizer: Any, options: PairOptions) -> list[Row]:
    """Return the pairs of one group by the options."""
    return pairs_of_group(
        group,
        tokenizer,
        options.save_n_pairs_per_group,
        options.minimum_score_diff_max_min,
        options.allow_negative_scores,
    )


def main(argv: list[str] | None = None) -> None:
    """Collect until the file is complete."""
    run_collector(parse_arguments(argv), NAME, select)


if __name__ == "__main__":
    main()
