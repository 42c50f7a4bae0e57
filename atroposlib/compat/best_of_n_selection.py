"""Pick the best of several alternatives."""

from collections.abc import Sequence


def select_best_index(
    primary_scores: Sequence[float],
    secondary_scores: Sequence[float],
    primary_higher_is_better: bool = True,
    secondary_lower_is_better: bool = True,
) -> int:
    """The index of the best alternative; the secondary scores decide between equals, then the
    order.

    Raises:
        ValueError: no scores, or lists of different lengths.
    """
    if not primary_scores or len(primary_scores) != len(secondary_scores):
        raise ValueError(
            f"{len(primary_scores)} primary and {len(secondary_scores)} secondary scores: give as many of each, and some"
        )
    primary_sign = 1 if primary_higher_is_better else -1
    secondary_sign = -1 if secondary_lower_is_better else 1
    return max(
        range(len(primary_scores)),
        key=lambda i: (primary_sign * primary_scores[i], secondary_sign * secondary_scores[i], -i),
    )
