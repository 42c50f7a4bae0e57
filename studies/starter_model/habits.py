"""The ways in which the starter model answers an arithmetic problem.

*At once*: only the boxed answer. It forgets every carry (or borrow), the way people who hurry do,
and of a product it takes no more than the leading digits. *Worked out*: column by column from the
right, with carry and borrow written out, then the boxed answer; never wrong here. *Asked*: a call
of the calculator, where one is offered, and then its answer in a box (calculator_server.py has
the syntax).
"""

from __future__ import annotations

from environments.arithmetic_server import Operator, Problem
from environments.calculator_server import Calculation

BOX_OPEN = "\\boxed{"


def boxed(number: int) -> str:
    """The form in which every final answer is given."""
    return f"{BOX_OPEN}{number}}}"


def columns(left: int, right: int) -> list[tuple[int, int]]:
    """Digit pairs from the units upwards; the shorter number is filled with zeros.

    >>> columns(347, 58)
    [(7, 8), (4, 5), (3, 0)]
    """
    width = max(len(str(left)), len(str(right)))
    pairs = zip(str(left).zfill(width), str(right).zfill(width), strict=True)
    return [(int(a), int(b)) for a, b in reversed(list(pairs))]


def hurried_answer(left: int, operator: Operator, right: int) -> int:
    """The answer of someone who treats every column alone and forgets each carry or borrow.

    It is right exactly where no column carries or borrows.

    >>> hurried_answer(47, "+", 38), hurried_answer(62, "-", 38), hurried_answer(43, "+", 25)
    (75, 34, 68)
    """
    pairs = columns(left, right)
    last = len(pairs) - 1
    total = 0
    for place, (a, b) in enumerate(pairs):
        digit = a + b if operator == "+" else a - b
        if place < last:  # the leading column is written in full
            digit %= 10
        total += digit * 10**place
    return total


def worked_out(problem: Problem) -> str:
    """The sum worked out column by column, as a text that ends in the boxed answer.

    >>> from environments.arithmetic_server import Problem
    >>> worked_out(Problem("47 + 38 = ?", 85, 1, 47, "+", 38))
    '7 + 8 = 15, carry 1. 4 + 3 + 1 = 8. \\\\boxed{85}'
    >>> worked_out(Problem("62 - 38 = ?", 24, 1, 62, "-", 38))
    '12 - 8 = 4, borrow 1. 6 - 3 - 1 = 2. \\\\boxed{24}'
    """
    pairs = columns(problem.left, problem.right)
    add = problem.operator == "+"
    sentences: list[str] = []
    carry = 0
    for place, (a, b) in enumerate(pairs):
        value = a + b + carry if add else a - b - carry
        shown_carry = f" {problem.operator} {carry}" if carry else ""
        carry = 0
        remark = ""
        if place < len(pairs) - 1 and not 0 <= value <= 9:
            carry = 1
            remark = ", carry 1" if add else ", borrow 1"
            if not add:
                a, value = a + 10, value + 10
        sentences.append(f"{a} {problem.operator} {b}{shown_carry} = {value}{remark}.")
    return " ".join([*sentences, boxed(problem.answer)])


def hurried_calculation(problem: Calculation) -> int:
    """The answer of someone in a hurry to a problem of the calculator. In a product they multiply
    the leading digits, fill up with zeros, and forget the third number.

    >>> from environments.calculator_server import Calculation
    >>> hurried_calculation(Calculation("", 4, (374, 52, 906), "*-")), hurried_calculation(Calculation("", 2, (4747, 438), "+"))
    (15000, 4175)
    """
    left, right = problem.numbers[:2]
    sign = problem.signs[0]
    if sign == "*":
        return _leading(left) * _leading(right)
    return hurried_answer(left, "+" if sign == "+" else "-", right)


def _leading(number: int) -> int:
    """The number with all but its first digit replaced by zeros."""
    unit: int = 10 ** (len(str(number)) - 1)
    return number // unit * unit
