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
    if not primary_higher_is_better:
        primary_scores = [-score for score in primary_scores]
    if secondary_lower_is_better:
        secondary_scores = [-score for score in secondary_scores]
    scores = list(zip(primary_scores, secondary_scores, strict=True))
    return scores.index(max(scores))
