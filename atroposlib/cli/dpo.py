"""Pairs for preference learning from each group: `atropos-dpo-gen FILE`, or
`python -m atroposlib.cli.dpo FILE`.

A row is `{"prefix", "pos", "neg", "score"}`, or with --save-messages `{"pos", "neg", "score"}`,
where `pos` and `neg` are lists of messages. The score is the better one's.
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

TASKS_PER_STEP = 8
NAME = "atropos-dpo-gen"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = collector_parser(
        NAME, "Write pairs of a better and a worse response to a file of JSON lines.", "pairs"
    )
    parser.add_argument(
        "--save-n-pairs-per-group",
        type=int,
        default=3,
        help="pairs that are kept of a group at most (default: %(default)s)",
    )
    parser.add_argument(
        "--minimum-score-diff-max-min",
        type=float,
        default=0.5,
        help="the better score must be more than this above the worse (default: %(default)s)",
    )
    return parser.parse_args(argv)


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


def main(argv: list[str] | None = None) -> None:
    """Collect until the file is complete."""
    arguments = parse_arguments(argv)

    def select(group: Group, tokenizer: Any) -> list[Row]:
        return pairs_of_group(
            group,
            tokenizer,
            arguments.save_n_pairs_per_group,
            arguments.minimum_score_diff_max_min,
            arguments.allow_negative_scores,
        )

    run_collector(lambda: collect(arguments, NAME, TASKS_PER_STEP, select))


if __name__ == "__main__":
    main()
