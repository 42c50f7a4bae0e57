"""From rewards of turns to advantages of tokens. Pure.

With rewards of single turns, a token is made responsible for what comes from its own turn on. Of
conversation i of a group, r_{i,t} the reward of its turn t, T_i the number of its turns, γ the
discount:

    G_{i,t} = Σ_{s ≥ t} γ^{s-t} r_{i,s}                         the return from turn t on
    d_{i,t} = G_{i,t} - mean of G_{j,t} over all j with t ≤ T_j  against the same turn of the others
    A_{i,t} = d_{i,t} / std of all d of the group

Turns of the same number are compared because they have as much left to win; a turn that no other
conversation came to has nothing to be compared with: 0. One standard deviation for all turns keeps
their proportion. With one turn each, A is the trainer's `--advantages group` (arXiv:2402.03300),
and so it is where only the last turn has a reward, all have as many turns, and γ = 1.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from statistics import fmean, pstdev

from atroposlib.wire import PROMPT_MASK

SMALLEST_SPREAD = 1e-9
"""Below it, relative to the returns, differences are rounding."""


def returns_to_go(rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """The return from each turn on, of the rewards of one conversation's turns."""
    return list(accumulate(reversed(rewards), lambda later, reward: reward + discount * later))[
        ::-1
    ]


def turn_advantages(rewards: Sequence[Sequence[float]], discount: float = 1.0) -> list[list[float]]:
    """Compare each turn of each conversation with the same turn of the others.

    Args:
        rewards: of the turns of each conversation of a group.
        discount: γ, from 0 to 1.

    Returns:
        A number for each turn, in the same shape; all 0 where nothing differs.
    """
    returns = [returns_to_go(row, discount) for row in rewards]
    turns = max(map(len, returns), default=0)
    means = [fmean(row[turn] for row in returns if turn < len(row)) for turn in range(turns)]
    centred = [[value - mean for value, mean in zip(row, means, strict=False)] for row in returns]
    every = [value for row in centred for value in row]
    spread = pstdev(every) if every else 0.0
    if spread <= SMALLEST_SPREAD * max(
        (abs(value) for row in returns for value in row), default=0.0
    ):
        return [[0.0] * len(row) for row in rewards]
    return [[value / spread for value in row] for row in centred]


def sampled_runs(mask: Iterable[int]) -> list[tuple[int, int]]:
    """(first, one past the last) place of each run of sampled tokens: the turns of a sequence."""
    runs = []
    for is_prompt, run in groupby(enumerate(mask), key=lambda place: place[1] == PROMPT_MASK):
        if not is_prompt:
            places = [place for place, _ in run]
            runs.append((places[0], places[-1] + 1))
    return runs


def spread_over_tokens(mask: Sequence[int], of_turns: Sequence[float]) -> list[float]:
    """A number for each token of a sequence: that of its turn where it was sampled, 0 where it was
    given.

    Args:
        mask: of the sequence, -100 where a token was given.
        of_turns: of all turns of the conversation. A sequence whose history was rewritten holds the
            last of them only.
    """
    runs = sampled_runs(mask)
    numbers = [0.0] * len(mask)
    if runs:
        for (begin, end), number in zip(runs, of_turns[-len(runs) :], strict=True):
            numbers[begin:end] = [number] * (end - begin)
    return numbers
