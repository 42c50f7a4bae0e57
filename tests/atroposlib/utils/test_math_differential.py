"""Our comparison of answers against math_verify by itself, on 2,000 made-up pairs whose right
verdict is known.

Every pair on which both differ must belong to a kind that `EXPLAINED` lists, and there ours must be
right.
"""

import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import pytest

from atroposlib.utils.math_scoring import compare_plainly, equal_in_this_process

pytestmark = pytest.mark.nightly

math_verify = pytest.importorskip("math_verify", reason="compares with the math_verify package")

PAIRS = 2000
EXPLAINED = {
    "scientific notation": "math_verify reads the e of 1e5 as Euler's number",
    "a full stop behind a number": "math_verify cannot read `5.`",
    r"`\,` between thousands": r"math_verify reads `1\,000` as two numbers",
    "full-width digits": "math_verify cannot read them",
    "the same list of groups of three digits": "math_verify reads `100,200` as a number and `100, 200` as a list",
}
"""Kind of pair -> why math_verify by itself gives another verdict there."""

Pair = tuple[str, str, bool]
"""Gold answer, given answer, whether they are equal."""


def thousands(rng: random.Random) -> Pair:
    value = rng.randrange(1000, 10**9)
    return (
        str(value),
        rng.choice(
            [f"{value:,}", f"${value:,}$", rf"\${value:,}", f"{value:,}".replace(",", "{,}")]
        ),
        True,
    )


def other_number(rng: random.Random) -> Pair:
    value = rng.randrange(10**6)
    return str(value), f"{value + rng.choice([-1, 1, 10, 1000]):,}", False


def decimals(rng: random.Random) -> Pair:
    value = Fraction(rng.randrange(1, 1000), rng.choice([2, 4, 5, 8, 10]))
    return f"{float(value)}", rf"\frac{{{value.numerator}}}{{{value.denominator}}}", True


def unequal_fractions(rng: random.Random) -> Pair:
    above, below = rng.randrange(1, 100), rng.randrange(2, 100)
    return rf"\frac{{{above}}}{{{below}}}", rf"\frac{{{above + 1}}}{{{below}}}", False


def sums(rng: random.Random) -> Pair:
    left, right = rng.randrange(1, 500), rng.randrange(1, 500)
    return str(left + right), f"{left} + {right}", True


def lists(rng: random.Random) -> Pair:
    entries = rng.sample(range(100), rng.randrange(2, 5))
    shuffled = rng.sample(entries, len(entries))
    return ",".join(map(str, entries)), rng.choice([",", ", "]).join(map(str, shuffled)), True


def joined_lists(rng: random.Random) -> Pair:
    entries = rng.sample(range(10, 100), rng.randrange(2, 4))
    return ",".join(map(str, entries)), "".join(map(str, entries)), False


def tuples(rng: random.Random) -> Pair:
    left, right = rng.sample(range(100), 2)
    same = rng.random() < 0.5
    return f"({left},{right})", f"({left}, {right})" if same else f"({right}, {left})", same


def units(rng: random.Random) -> Pair:
    value = rng.randrange(1, 1000)
    return str(value), rf"{value}\text{{ {rng.choice(['cm', 'apples', 'dollars'])}}}", True


def percents(rng: random.Random) -> Pair:
    value = rng.randrange(1, 100)
    return rf"{value}\%", rng.choice([str(value), f"{value}%", f"{value / 100}"]), True


def underscores(rng: random.Random) -> Pair:
    value = rng.randrange(1000, 10**6)
    return str(value), f"{value:_}", False


def expressions(rng: random.Random) -> Pair:
    factor, shift = rng.randrange(2, 20), rng.randrange(1, 20)
    return f"{factor}x + {factor * shift}", f"{factor}(x + {shift})", True


def roots(rng: random.Random) -> Pair:
    value = rng.randrange(2, 50)
    return rf"{value}\sqrt{{2}}", rf"\sqrt{{{2 * value * value}}}", True


def scientific(rng: random.Random) -> Pair:
    value, exponent = rng.randrange(1, 10), rng.randrange(1, 9)
    return str(value * 10**exponent), f"{value}e{exponent}", True


def full_stops(rng: random.Random) -> Pair:
    value = rng.randrange(1000)
    return str(value), f"{value}.", True


def thin_spaces(rng: random.Random) -> Pair:
    value = rng.randrange(1000, 10**6)
    return str(value), f"{value:,}".replace(",", r"\,"), True


def full_width(rng: random.Random) -> Pair:
    value = rng.randrange(1000)
    return (
        str(value),
        str(value).translate(str.maketrans("0123456789", "０１２３４５６７８９")),
        True,
    )


def long_lists(rng: random.Random) -> Pair:
    entries = [str(rng.randrange(100, 1000)) for _ in range(rng.randrange(2, 4))]
    return ",".join(entries), ", ".join(entries), True


KINDS: dict[str, Callable[[random.Random], Pair]] = {
    **{
        made.__name__: made
        for made in (
            thousands, other_number, decimals, unequal_fractions, sums, lists, joined_lists, tuples, units, percents,
            underscores, expressions, roots,
        )
    },
    "scientific notation": scientific,
    "a full stop behind a number": full_stops,
    r"`\,` between thousands": thin_spaces,
    "full-width digits": full_width,
    "the same list of groups of three digits": long_lists,
}  # fmt: skip


def ours(gold: str, answer: str) -> bool:
    plainly = compare_plainly(gold, answer)
    return equal_in_this_process(gold, answer) if plainly is None else plainly


def theirs(gold: str, answer: str) -> bool:
    expected, given = (math_verify.parse(rf"\boxed{{{text}}}") for text in (gold, answer))
    return bool(math_verify.verify(expected, given))


def test_every_difference_from_math_verify_is_explained() -> None:
    rng = random.Random(36)
    differences: Counter[str] = Counter()
    names = list(KINDS)
    for number in range(PAIRS):
        kind = names[number % len(names)]
        gold, answer, right = KINDS[kind](rng)
        verdict = ours(gold, answer)
        assert verdict is right, (kind, gold, answer)
        if theirs(gold, answer) is not verdict:
            assert kind in EXPLAINED, (kind, gold, answer)
            differences[kind] += 1
    assert set(differences) == set(EXPLAINED)
