"""Right and wrong answers as models and datasets write them, by the kind of spelling."""

import pytest

from atroposlib.utils.math_scoring import compare_plainly, equal_in_this_process, last_boxed

RIGHT = {
    "percentages with decimals": [
        (r"12.5\%", "12.5"), ("75", r"75.0\%"), (r"0.5\%", "0.5"), (r"0.5\%", "0.005"), (r"150\%", "1.5"),
        (r"12\frac{1}{2}\%", "12.5"), (r"33\frac{1}{3}\%", r"\frac{1}{3}"), (r"25\%", r"\frac14"), ("25%", "25 per cent"),
    ],
    "functions without a backslash": [
        (r"\ln x", "ln(x)"), (r"\sin x", "sin(x)"), (r"\frac{\pi}{2}", "pi/2"), (r"O(n \log n)", "O(n log n)"),
        (r"\arctan x", "arctan(x)"), (r"\sec x", "sec x"), (r"\sin \cos x", "sin cos x"),
        (r"\ln 2", r"\log_e 2"), (r"\sin x", r"\operatorname{sin} x"),
    ],
    "raised and lowered digits, fractions in one character, roots": [
        ("0.0015", "1.5×10⁻³"), ("1000000", "10⁶"), ("x^{10}", "x¹⁰"), ("x^{-1}", "x⁻¹"), ("x_{12}", "x₁₂"), ("1/8", "⅛"),
        ("8/5", "1⅗"), (r"\sqrt{12}", "√(12)"), ("3", "∛27"), ("-5", "—5"), ("x-1", "x–1"), ("45", "45º"),
    ],
    "sizes, fonts, colours": [
        ("5", r"\bf 5"), ("5", r"{\bf 5}"), ("5", r"\large 5"), ("5", r"\Huge{5}"), ("5", r"\underline{5}"), ("5", r"\bm{5}"),
        ("5", r"\textcolor{red}{5}"), (r"\{1,2\}", r"\lbrace 1,2\rbrace"),
    ],
    "a label in front": [
        ("12", r"\text{Total: } 12"), ("12", r"\text{Total: 12}"), ("12", "Total cost: 12"),
        ("12", r"\text{The answer is } 12"), ("C", "Option C"), ("C", r"\text{Choice C}"), ("C", "Option (C)"),
    ],
    "units": [
        ("5", "5 m"), ("10 m", "10"), ("3m", "3 m"), ("5", "5 kJ"), ("300", "300 K"), ("5", "5 m²"),
        ("5", r"5\,\mu\text{m}"), ("5", r"5\ \Omega"), ("9.8", r"9.8\ \mathrm{m\,s^{-2}}"),
        ("9.8", r"9.8\,\frac{\text{m}}{\text{s}^2}"),
        ("5", "5 sec"), ("5", r"5\text{ sec}"), ("5", r"5\,\mathrm{sec}"), ("2 min 30 sec", r"2\text{ min }30\text{ sec}"),
        ("2 hours 30 minutes", "2 hours and 30 minutes"), ("2 red, 3 blue", "3 blue, 2 red"),
    ],
    "inequalities and intervals": [
        (r"(-\infty,3)", "x<3"), ("[1,2]", "1≤x≤2"), (r"[1,\infty)", r"x\ge1"), (r"(2,\infty)", r"\{x \mid x > 2\}"),
        (r"\{x\in\mathbb{R}|x>2\}", r"(2,\infty)"),
    ],
    "repeating decimals": [("1/3", "0.333..."), ("1/6", r"0.1666\ldots"), ("4/33", "0.121212…")],
    "several choices": [("A, C", "(A), (C)"), ("A, C", r"(A)\text{ and }(C)"), ("A and C", "(C) and (A)")],
    "small numbers": [(r"1.6\times 10^{-19}", r"\frac{16}{10^{20}}"), ("0.0000001", r"\frac{1}{10^7}")],
}  # fmt: skip
WRONG = {
    "small numbers": [
        (r"6.63\times 10^{-34}", r"\frac{1}{10^9}"), (r"1.6\times 10^{-19}", r"2\cdot 10^{-20}\cdot 3"),
        ("10^{-9}", r"\frac{0}{2}"), (r"\frac{1}{13983816}", "0.0"), (r"\frac{1}{13983816}", "0.00000009"),
        ("0.00000012", r"\frac{13}{10^8}"),
        (r"\frac{\pi}{10^{20}}", r"\frac{e}{10^{20}}"),
    ],
    "numbers of other units": [
        ("2 hours 30 minutes", "3 hours 20 minutes"), ("2 hours 30 minutes", r"30\text{ hours }2\text{ minutes}"),
        ("2 feet 3 inches", "3 feet 2 inches"), ("2 red, 3 blue", "3 red, 2 blue"), ("2 hours 30 minutes", "2 hours"),
    ],
    "more than one choice": [
        ("A", "(A), (C)"), ("A", "(A) and (C)"), ("A", r"(A)\text{ or }(B)"), ("A", "(A) 5 (B) 6"), ("A, C", "(A)"),
    ],
    "anagrams": [("stop", "pots"), ("none", "neon"), ("silent", "listen"), ("no real roots", "no lear roots")],
    "times with the same ratio": [("12:30", "6:15"), ("10:30", "5:15")],
    "percentages": [(r"0.5\%", "50"), (r"12.5\%", "1.25"), (r"5\%", "500"), (r"33\frac13\%", r"\frac{1}{4}")],
    "intervals": [("(1,2)", r"1\le x\le 2"), (r"(2,\infty)", r"x\ge 2"), (r"(2,\infty)", r"\{x|x<2\}")],
    "numbers that do not repeat": [("1/3", "0.334..."), ("1/3", "0.33"), (r"\frac16", r"0.1777\ldots")],
    "variables": [("3m", "3"), ("m", "5"), ("5", "5x"), ("2 x", "2")],
}  # fmt: skip


def verdict(gold: str, answer: str) -> bool:
    boxed = last_boxed(rf"So it is \boxed{{{answer}}}.") or ""
    plainly = compare_plainly(gold, boxed)
    return equal_in_this_process(gold, boxed) if plainly is None else plainly


@pytest.mark.parametrize(
    ("gold", "answer"),
    [pytest.param(*pair, id=f"{kind}: {pair}") for kind, pairs in RIGHT.items() for pair in pairs],
)
def test_a_right_answer_counts_in_another_spelling(gold: str, answer: str) -> None:
    assert verdict(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [pytest.param(*pair, id=f"{kind}: {pair}") for kind, pairs in WRONG.items() for pair in pairs],
)
def test_a_wrong_answer_never_counts(gold: str, answer: str) -> None:
    assert not verdict(gold, answer)


@pytest.mark.parametrize(
    "piece", ["1 m ", "Total ", "1.", "12 hours ", "5%", r"\text{a}", "(A)", "²", "sin", "3…", "1:"]
)
def test_long_answers_of_these_spellings_are_read_in_time(piece: str) -> None:
    """The time limit of a test ends a search that takes exponential time."""
    compare_plainly("5 cm 3 mm", "1" + piece * (1900 // len(piece)) + "!")
    compare_plainly("A", piece * (1900 // len(piece)))
