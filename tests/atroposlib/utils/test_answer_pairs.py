"""Right and wrong answers as models and datasets write them, by the kind of spelling."""

import pytest

from atroposlib.utils.math_scoring import compare_plainly, equal_in_this_process, last_boxed

RIGHT = {
    "intervals with outward brackets": [
        ("(1,2]", "]1,2]"), ("(1,2)", "]1,2["), ("[1,2)", r"\left[1,2\right["), (r"(1,\infty)", r"]1,+\infty["),
        (r"(1,2)\cup(3,4)", "]1,2[∪]3,4["), (r"[1,2)\cup(3,4]", r"[1,2[ \cup ]3,4]"), ("[1,2],[3,4]", "[1,2],[3,4]"),
        (r"(1,2]\cup\{3,4\}\cup[5,6)", r"(1,2] \cup \{3,4\} \cup [5,6)"),
    ],
    "combinations without indices": [
        ("10", "5C2"), ("10", "C(5,2)"), ("10", "C_5^2"), ("10", "C^2_5"), ("10", r"\mathrm{C}_5^2"), ("10", r"5\text{C}2"),
        ("20", r"2\cdot 5C2"), ("10", r"{5 \choose 2}"), (r"\binom52", "5C2"), ("1/5", r"\frac{C_4^2}{30}"),
        ("C_5^2 x", "xC_5^2"),
    ],
    "residues": [
        ("204", r"204 \pmod{1000}"), ("204", "204 mod 1000"), ("204", r"204\bmod 1000"), (r"204\pmod{1000}", "204"),
        ("3", r"3\ (\text{mod }7)"), ("3", r"x \equiv 3 \pmod 7"), ("3", "10 mod 7"), (r"3\pmod 7", "3 (mod 7)"),
        (r"\frac62", r"3\pmod 7"), ("4", r"2^{10}\bmod 6"),
    ],
    "semicolons": [
        ("(1,2]", "]1;2]"), ("[1,2]", "[1;2]"), ("(0.5,2]", "]0,5;2]"), ("(-1.5,2)", "(-1,5;2)"),
        ("(1,2)", "(1;2)"), (r"\{1,2\}", r"\{1;2\}"), (r"(-\infty,2)\cup(5,\infty)", r"]-\infty;2[\cup]5;+\infty["),
    ],
    "approximations": [
        (r"\sqrt2", r"\sqrt2 \approx 1.41"), ("3.33", r"\frac{10}{3}\approx 3.33"), (r"\frac{10}{3}", r"x=\frac{10}{3}≈3.33"),
        ("26", "25.7 ≈ 26"), ("3.14", r"x\approx 3.14"), (r"33\%", r"33.3\% \approx 33\%"), (r"\pi \approx 3.14", r"\pi"),
        ("25", "approximately 25"), ("25", r"\text{about } 25"), (r"\sqrt2", r"1.41421356\ldots"),
    ],
    "quarters": [
        ("3/4", "3 quarters"), ("0.75", r"3\text{ quarters}"), ("3", "3 quarters"), ("1/4", "one quarter"),
        ("3/100", "3 hundredths"), ("0.25", "1 quarter"),
    ],
    "the number on the left": [
        ("5", "5=x"), ("x=5", "5=x"), ("5=x", "5"), (r"\frac12", r"\frac12=P(A)"), ("18", "18=m+n"), ("2+3i", "z=2+3i"),
        ("f(2)=5", "5"), ("72", "72=60+12"),
    ],
    "large numbers": [("2^{2000}", "4^{1000}")],
    "spaces and fonts": [
        (r"\begin{pmatrix}a&b\\c&d\end{pmatrix}", r"\begin{pmatrix}a & b \\ c & d\end{pmatrix}"), (r"\text{B,E}", "B,E"),
    ],
    "ellipses": [(r"1,3,5,\ldots", r"1, 3, 5, \dots"), (r"1+2+\cdots+n", r"1+2+\dots+n")],
    "sentences": [
        ("25", "25 is the answer"), ("25", r"25\text{ is the final answer}"), ("5", "5 wrong answers"), ("5", "150-145"),
        ("(-\\infty,\\infty)", r"\text{All real numbers}"), ("all reals", r"\mathbb R"),
    ],
    "numbers of combinations": [
        ("10", "_5C_2"), ("10", "{}_5C_2"), ("10", "{}_{5}C_{2}"), ("10", "{}^5C_2"), ("30", r"3\cdot {}_5C_2"),
        ("10", r"{}_5\mathrm{C}_2"), (r"\frac{5}{18}", r"\frac{{}_5C_2}{36}"),
    ],
    "the function cis": [
        (r"\frac12+\frac{\sqrt3}{2}i", r"\operatorname{cis}(60^\circ)"), ("2i", "2 cis 90°"),
        ("2i", r"2\text{ cis }\frac{\pi}{2}"), (r"\operatorname{cis} 60^\circ", r"\cos 60^\circ+i\sin 60^\circ"),
    ],
    "fractions and numbers in words": [
        ("3/4", "three fourths"), ("3/4", r"\text{Three-fourths}"), ("3/4", "three quarters"), ("1/2", "half"),
        ("1/3", "a third"), ("5/2", "two and a half"), ("3/4", "3 fourths"), ("45", "forty-five"),
        ("150", "one hundred and fifty"), ("1205", "one thousand two hundred five"), ("2000000", "two million"),
        ("1200", "twelve hundred"),
    ],
    "equations that name a value": [
        ("18", "x=18"), ("18", "m+n=18"), ("18", "m+n=7+11=18"), ("18", "9+9=18"), ("18", "AB=18"), ("18", "|AB|=18"),
        ("18", "f(3)=18"), ("4/5", r"\sin A=\frac45"), ("x^2=5", "x^2=5"), ("y=2x+1", "2x-y+1=0"), ("3.14", "22/7=3.14"),
        ("1,2", "x=1, x=2"), ("x-3", "f^{-1}(x)=x-3"), ("12.57", r"4\pi=12.57"), ("18", "x=36/2=18"),
    ],
    "marks of feet and inches": [("70 inches", "5'10\""), ("12 inches", "12''"), ("12 ft", "12′"), ("5 ft 6 in", "5'6″")],
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
    "vectors": [
        ("(1,2)", r"\begin{pmatrix}1\\2\end{pmatrix}"), (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"),
        ("(1,2,3)", r"\begin{bmatrix}1&2&3\end{bmatrix}"), ("(0.5,-3)", r"\begin{pmatrix}\frac12\\-3\end{pmatrix}"),
        ("(1,2)", r"\left(\begin{array}{c}1\\2\end{array}\right)"), ("(1,2)", r"\mathbf{v}=\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\[4pt]3&4\end{pmatrix}"),
    ],
    "values of variables": [
        ("(1,2)", "x=1, y=2"), ("(1,2)", "y=2, x=1"), ("x=1,y=2", "(1,2)"), ("x=1,y=2", r"y=2\text{ and }x=1"),
        ("(2,3)", "m=2, b=3"), ("x=1, y=2", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ],
    "decimals in exponents": [
        (r"\sqrt3", "3^{0.5}"), (r"2\sqrt3", r"2\cdot 3^{0.5}"), (r"\sqrt3", "3^.5"), ("8", "4^{1.5}"),
        (r"\frac{1}{\sqrt2}", "2^{-0.5}"), ("e^{0.05t}", "e^{t/20}"), (r"\pm\sqrt3", r"\pm 3^{0.5}"),
    ],
    "binomials": [
        ("10", r"\tbinom52"), ("10", r"\dbinom{5}{2}"), (r"\binom52", r"\dbinom{5}{2}"), (r"\binom{n}{2}", r"\tbinom n2"),
        ("30", r"3\binom{5}{2}"), ("60", r"\binom{5}{2}\binom{4}{2}"), (r"\frac{5}{18}", r"\frac{\tbinom52}{36}"),
    ],
    "products without a sign": [
        ("30", "3(10)"), ("60", "(10)(6)"), ("30", r"3\left(10\right)"), ("24", "2(3)(4)"), ("15", "(3)5"), ("40", "2^3(5)"),
        ("3", r"\log_2(8)"), ("(0,1]", r"\left(0,1\right]"),
    ],
    "times": [
        ("4:00 pm", "4 pm"), ("4:00 pm", r"4\text{ P.M.}"), ("4:00 pm", "16:00"), ("4:00 pm", "4:00"),
        ("12:30 am", "0:30"), ("7", "7 pm"),
    ],
    "amounts in other units": [
        ("1 hour", "60 minutes"), ("$3", "300 cents"), (r"50\text{ cents}", r"\$0.50"), (r"30\text{ cm}", r"0.3\text{ m}"),
        ("6 feet", "6 ft"), ("12.50", "USD 12.50"), ("50", "50¢"), (r"12\pi", "12π cubic inches"),
    ],
    "ratios": [
        ("3:2", "3 to 2"), ("3:2:1", "6:4:2"), ("3:2", r"3\text{ to }2"), ("1.5", "3:2"),
        (r"1:\sqrt3:2", r"2:2\sqrt{3}:4"), ("4:5", r"4\colon 5"),
    ],
    "bases": [
        ("12_3", "(12)_3"), ("12_3", "12 base 3"), ("12_3", r"12_{\text{three}}"), ("12_3", r"\text{12}_3"),
        ("12_3", "12"), ("1A_{16}", "1a"),
        ("12", "12_{10}"),
    ],
    "complex numbers": [
        ("2+3i", r"2+3\mathrm{i}"), (r"e^{i\pi/3}", r"\frac12+\frac{\sqrt3}{2}i"), ("2i", r"\sqrt{-4}"), ("1+i", "1+1i"),
        ("-1", "i^2"), (r"\sum_{i=1}^{3} i", "6"),
    ],
    "degrees in functions": [
        ("0.5", r"\sin 30^\circ"), (r"\cos 20^\circ", r"\sin(70°)"), ("3", r"\tan^2\left(60^{\circ}\right)"),
    ],
    "inequalities joined by or": [
        (r"(-\infty,2)\cup(3,\infty)", r"x<2\text{ or }x>3"), (r"(-\infty,-1)\cup(1,2)", "x<-1 or 1<x<2"),
        ("x<2 or x>3", r"(-\infty,2)\cup(3,\infty)"),
    ],
    "products of braces and brackets": [
        ("6", "{2}(3)"), ("24", "{2}(3)(4)"), ("-6", "{-2}(3)"), ("7", "1+{2}(3)"), ("6", "{2}{(3)}"), ("6", r"{\bf 2}(3)"),
        ("6", r"\mathbf{2}(3)"), ("12", "3[4]"), ("12", r"{2}^{2}(3)"), ("7/2", r"3{\frac12}"), ("-7/2", r"-3\tfrac12"),
    ],
    "amounts of one dimension": [
        (r"\frac12 hour", "30 minutes"), (r"\frac{1}{2} hour", r"\frac12 hour"), ("1/2", r"\frac12 hour"),
        ("1 1/2 hours", "90 minutes"), ("1 hour 30 minutes", "90 minutes"), ("5 ft 6 in", "66 inches"), ("36 km/h", "10 m/s"),
        ("5 cm^2", "5 square centimeters"), ("5 cm^2", r"5\text{ cm}^2"), ("1 m^2", "10000 cm^2"), ("1 liter", "1000 mL"),
        ("5 cm^3", "5 mL"), ("16 oz", "1 pound"), (r"5\times 10^{3}\text{ m}", "5 km"), ("60 mph", "60 miles per hour"),
        ("$5.50", "5 dollars and 50 cents"), ("1 inch", "2.54 cm"), ("£5", "5 pounds"), ("5 minutes", "5 m"),
        ("$5", "$5 per hour"),
        ("90 degrees", "90°F"), ("5 J", "5 N m"), (r"9.8\,\frac{\text{m}}{\text{s}^2}", "9.8 m/s^2"), ("12", "12 (cm)"),
        ("5", "$5/hour"), ("3 hours", "3 hours per day"),
        ("5 marbles", "5 decks"),
    ],
    "both signs inside a fraction": [(r"\frac{-1\pm\sqrt5}{2}", r"\frac{-1+\sqrt{5}}{2},\frac{-1-\sqrt{5}}{2}")],
    "degrees and radians": [(r"\frac{\pi}{3}", r"60^\circ"), (r"60^\circ", r"\frac{\pi}{3}"), (r"\frac\pi4", r"\tan^{-1}(1)")],
    "lists and sets": [
        ("1,2", "(1,2)"), ("(1,2)", "1, 2"), ("3, 3, 8", "8, 3, 3"), ("0.5, 0.5, 1", r"\frac12, 1, \frac12"),
        ("1, 2", "1, 2, 2"),
        (r"\{(1,2),(3,4)\}", "(3,4), (1,2)"), (r"\emptyset", r"\text{empty set}"), ("x, z", r"(x)\text{ and }(z)"),
    ],
    "inequalities joined by and": [("1<x<2", r"x>1\text{ and }x<2"), ("1<x<2", "2>x>1")],
    "numbers in words and other separators": [
        ("7", "seven"), (r"\text{Twelve}", "12"), ("1234567", "1.234.567"), ("1234567", "1’234’567"), ("20%", "20％"),
        (r"\frac{1}{1000}", r"\frac{1}{1{,}000}"), ("1/7", "0.142857142857..."), ("1/3", r"0.\overline3"), ("500", "Rs. 500"),
    ],
    "words": [
        ("No solutions", "no solution"), ("DNE", "does not exist"), ("the circle", "circle"), ("red and blue", "blue and red"),
        ("C", "The answer is C"), ("AC", "A, C"), ("A and C", "AC"),
    ],
    "times and dates in words": [
        ("12:00 pm", "noon"), ("midnight", "12 am"), ("4:00 pm", "4 o'clock"), ("March 5", "5 March"), ("March 5", "March 5th"),
        ("2020-03-05", "March 5, 2020"), (r"\text{March 5, 2020}", "5 March 2020"), ("March 5", "March 5, 2020"),
    ],
    "more commands": [
        ("12", r"\mathtt{12}"), ("12", r"12 \tag{1}"), ("5", r"\therefore x=5"), ("5", r"\Rightarrow 5"), ("x^2", "x**2"),
        ("x^2", "x ** 2"),
        (r"\phi", r"\varphi"), ("2", r"\lg 100"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{smallmatrix}1&2\\3&4\end{smallmatrix}"),
        ("432_5", "432 (base 5)"), ("432_5", r"432\text{ in base 5}"),
    ],
    "primes": [("f'(x)", r"f^{\prime}(x)"), ("y'", "y'"), ("5 feet", "5'"), ("A'B'", "B'A'")],
    "other commands": [
        ("1/2", r"\sfrac{1}{2}"), ("1/2", r"\nicefrac12"), (r"5\sqrt2", "5*sqrt{2}"), (r"\lfloor x\rfloor", "⌊x⌋"),
        (r"\infty", r"\text{infinity}"), ("12/99", r"0.\dot{1}\dot{2}"),
        ("1/3", "0.(3)"), ("1/6", "0.1(6)"), ("-7/6", "-1.1(6)"), ("1/7", "0.(142857)"),
        (r"17\pmod{20}", r"x\equiv 17\pmod{20}"),
    ],
}  # fmt: skip
WRONG = {
    "words that judge a number": [
        ("25", r"25\text{ is wrong}"), ("25", "25 is wrong"), ("25", "25 (wrong)"), ("25", "25 false"), ("5", "5 too many"),
        ("5", "5 maybe"), ("5", r"5\text{ doesn't work}"), ("5", "5 fails"), ("5", r"5\text{ is not possible}"),
        ("5", "Not: 5"), ("5", r"\text{It isn't true: } 5"),
    ],
    "false approximations": [
        ("25", "25 ≈ 26"), ("26", "25 ≈ 26"), ("26", r"25\approx 26"), ("3.14", r"3\approx 3.14"), ("10", r"2x\approx 10"),
        ("26", r"25.4\approx 26"), ("3", r"\pi\approx 3.14\approx 3.2"), ("25", "not approximately 25"),
    ],
    "ellipses": [
        ("25", r"25\ldots"), ("25", r"\ldots 25"), ("2,5", r"2,5,\ldots"), ("0.25", r"0.25\ldots"), (r"1,2,\ldots", "1,2"),
        (r"1,3,5,\ldots", "1,3,5"), (r"\sqrt2", r"1.41431357\ldots"), ("1,2,3", "1,2,3,…"),
    ],
    "combinations without indices": [
        ("10", "5C1"), ("10", "C_6^2"), ("10", "C(2,5)"), ("10", "C_2^5"), ("7", "5C2"), ("10", "5C2x"), ("10x", "5Cx"),
        ("(5,2)", "C(6,2)"), ("1", "C_2^2 + x"),
    ],
    "residues": [
        ("204", r"1204\pmod{1000}"), ("7", "7 mod 3"), ("3", r"4\pmod 7"), ("7", r"3\pmod 7"), (r"3\pmod 7", r"3\pmod 5"),
        ("6", r"-1\pmod 7"), ("3", r"3\pmod 0"), ("3", "3 mod x"), (r"3\pmod 7", "4"),
        ("10", r"10 \bmod 7"), ("3", "3, 4 mod 7"),
    ],
    "semicolons": [
        ("(1,2]", "[1;2]"), ("(0.5,2]", "]0,6;2]"), ("(1,2,3)", "(1;2)"), ("(1000,2)", "(1,000;3)"),
        ("(1,2)", "(2;1)"),
    ],
    "quarters": [
        ("4", "3 quarters"), ("4/3", "3 quarters"), ("3", "3 quarters of an hour"), ("3", "3 hundredths"), ("7", "7 tenths"),
        ("1", "1 fourth"), ("1", "1 third"),
    ],
    "the number on the left": [
        ("5", "5=2x"), ("5", "5=x+1"), ("5", "5=x^2"), ("5", "6=x"), ("x=5", "6=x"), ("5", "5=6"), ("2+3i", "z=2-3i"),
        ("6", "5=x=6"), ("5", "5=x=6"),
    ],
    "invisible numbers": [("7", r"\phantom{7}"), ("7", r"\hphantom{7}8")],
    "a line for a number": [("x+y=3", "3"), ("xy=6", "6"), (r"\frac{x}{2}+\frac{y}{3}=1", "1"), ("x+y+z=0", "0")],
    "equations that are to be solved": [
        ("5", "x^2=5"), ("5", "2x=5"), ("5", "x+1=5"), ("5", "-x=5"), ("5", "|x|=5"), ("5", "1/x=5"), ("5", r"\sqrt{x}=5"),
        ("5", r"\frac{x}{2}=5"), ("0", "x^2=0"), ("1,4", "x^2=1, x^2=4"), ("5", "(x-1)^2=5"),
    ],
    "false equations": [("18", "17=18"), ("18", "9+8=18"), ("0", "1=0"), ("204", "m+n=100+103=204"), ("25", "0=25")],
    "percent for another unit": [
        ("60°", "60%"), (r"60^\circ", r"60\%"), ("20%", "20°"), ("$5", "5%"), ("5 cm", r"5\%"), ("5 minutes", "5 percent"),
        ("18", "18%%"), ("3", "300%%"),
    ],
    "marks of feet and inches": [
        ("12", "12'"), ("12", r"12^\prime"), ("12", "12′"), ("5", "5\""), ("5", "5''"), ("5", "5″"), ("5 hours", "5'"),
        ("5 cm", "5'"),
        ("5 ft", "5''"), ("70", "5'10\""),
    ],
    "repeating decimals in parentheses": [("1/6", "0.1(7)"), ("1/6", "0.(16)"), ("0.6", "0.1(6)"), ("16", "0.1(6)")],
    "intervals with outward brackets": [
        ("(1,2]", "]1,2["), ("[1,2]", "]1,2["), ("[1,2]", "]1,2]"), ("(1,2)", "[1,2["), (r"(1,4)", "]1,2[∪]3,4["),
    ],
    "numbers of combinations": [("10", "_6C_2"), ("10", "{}_5C_1"), ("11", "{}_5C_2"), ("10", "{}_5P_2"), ("20", "2{}_6C_2")],
    "the function cis": [
        (r"\frac12+\frac{\sqrt3}{2}i", r"\operatorname{cis}(30^\circ)"), ("1", r"\operatorname{cis}\pi"), ("-2i", "2 cis 90°"),
    ],
    "fractions and numbers in words": [
        ("3/4", "three fifths"), ("3/4", "four thirds"), ("3", "three fourths"), ("4", "three fourths"), ("25", "twenty-fifth"),
        ("3/4", "three and fourths"), ("3", "one two"), ("3", "one and two"), ("1/3", "third"), ("25", "five twenty"),
        ("105", "five hundred"), ("1", "a"), ("4", "twenty fifth"), ("1500", "five hundred thousand"),
    ],
    "vectors": [
        ("(1,2)", r"\begin{pmatrix}2\\1\end{pmatrix}"), (r"\begin{pmatrix}1\\2\end{pmatrix}", "(2,1)"),
        ("(1,2)", r"\begin{pmatrix}1&3\end{pmatrix}"), ("(1,2)", r"\begin{pmatrix}1\\2\\3\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "(1,2,3,4)"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "1<x<2"), ("[1,2]", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\{2,1\}"),
        ("(1,2)", r"\begin{pmatrix}1\\2\end{pmatrix},\begin{pmatrix}3\\4\end{pmatrix}"),
    ],
    "values of variables": [
        ("(1,2)", "x=2, y=1"), ("x=2, y=1", "(1,2)"), ("x=1,y=2", "x=2,y=1"), ("(1,2)", "y=1, x=2"), ("(2,3)", "m=3, b=2"),
        ("x=1,y=2", "x=1"),
    ],
    "decimals in exponents": [(r"\sqrt3", "3^{0.6}"), ("3^{0.5}", "3^{0.51}"), ("e^{0.05t}", "e^{t/2}"), ("8", "4^{2.5}")],
    "binomials": [
        ("11", r"\tbinom52"), ("13", r"3\binom{5}{2}"),
        (r"\binom52", r"\tbinom51"), ("16", r"\binom{5}{2}\binom{4}{2}"),
    ],
    "products without a sign": [("13", "3(10)"), ("16", "(10)(6)"), ("8", "(3)5"), ("13", "2^3(5)"), ("-1", "-3(2)")],
    "times": [
        ("4:00 pm", "4 am"), ("4:00 pm", "4:30 pm"), ("4:00 pm", "5 pm"), ("16:00", "4:00 am"), ("12:00 pm", "12 am"),
        ("4:00 pm", "4"), ("10:30", "22:30"), ("12:30 pm", "0:30"),
    ],
    "products of braces and brackets": [
        ("5", "{2}(3)"), ("9", "{2}(3)(4)"), ("1", "{-2}(3)"), ("6", "1+{2}(3)"), ("5", "{2}{(3)}"), ("5", r"\mathbf{2}(3)"),
        ("7", "3[4]"), ("7", r"{2}^{2}(3)"), ("3/2", r"3{\frac12}"), ("5", r"\frac{4}{2}(3)"),
    ],
    "amounts of other dimensions": [
        ("5 cm", "5 cm^2"), ("5 cm^2", "5 cm"), ("5 square feet", "5 feet"), ("60 mph", "60 km/h"), ("5 kg", "5 lb"),
        ("5 hours", "5 km"), (r"9.8\text{ m/s}^2", "9.8 m/s"), ("5 liters", "5 mL"), (r"20^\circ C", r"20^\circ F"),
        (r"30^\circ", r"30\text{ radians}"), (r"\frac12 hour", "1/2 minute"), ("20 N", "20 J"), ("10 m/s", "10 m"),
        ("10 minutes", "10 miles"),
        ("$5", "€5"), ("5 euros", "5 dollars"), ("1 hour 30 minutes", "1.3 hours"), ("5 ft 6 in", "5.6 ft"),
        ("2 hours, 3 hours", "5 hours"),
    ],
    "both signs inside a fraction": [
        (r"\frac{-1\pm\sqrt5}{2}", r"\frac{-1+\sqrt{5}}{2}"), (r"\frac{-1\pm\sqrt5}{2}", r"\frac{1\pm\sqrt5}{2}"),
    ],
    "degrees and radians": [(r"60^\circ", r"\frac\pi6"), ("30", r"30\pi"), (r"\frac{\pi}{6}", "30")],
    "lists and sets": [
        ("1,2", "(2,1)"), ("(1,2)", "2,1"), (r"\{1,2\}", "(1,2)"), (r"\{1,2\}", "(x,y)=(1,2)"), ("3, 3, 8", "3, 8, 8"),
        ("3, 3, 8", "3, 8"),
        ("0.5, 0.5, 1", r"\frac12, 1, 1"),
    ],
    "inequalities joined by and": [("1<x<2", r"x>1\text{ and }x<3"), ("1<x<2", "1>x>2"), ("1<x<2", r"x>1\text{ or }x<2")],
    "numbers in words and other separators": [
        ("7", "eight"), ("1234567", "1.234.568"), ("1.234", "1234"), ("1/7", "0.142856142856..."), ("33", r"33.\overline3"),
    ],
    "words": [
        ("No solutions", "one solution"), ("red and blue", "red"), ("AC", "A, B"), ("A", "AC"), ("AC", "A"), ("BAC", "ABC"),
        ("the circle", "the square"),
    ],
    "times and dates in words": [
        ("noon", "midnight"), ("12:00 pm", "midnight"), ("4:00 pm", "5 o'clock"), ("March 5", "March 6"), ("3 May", "3 June"),
        ("March 5", "May 5"),
        ("2020-03-05", "May 3, 2020"), ("March 5, 2020", "March 5"), ("March 5, 2020", "March 5, 2021"),
    ],
    "primes": [("f'(x)", "f''(x)"), ("y", "y'"), ("x", r"x^{\prime}"), ("A'", "A")],
    "dates": [("2005", "2023-03-15"), ("2023-03-15", "2023-03-16")],
    "amounts in other units": [
        ("5 hours", "5 minutes"), ("$3", "3 cents"), (r"30\text{ cm}", r"30\text{ m}"), ("$50", "50¢"), ("6 feet", "6 inches"),
        ("12.50", "USD 12.05"), ("15 m", "1,5 m"),
    ],
    "words that change a number": [
        ("5", "5 squared"), ("5", r"5\text{ halves}"), ("5", "5 thirds"),
        ("5", "5 hundredths"), ("5", "5 below zero"), ("5", "5 factorial"),
    ],
    "ratios": [
        ("3:2", "2 to 3"), ("3:2:1", "3:1:2"), ("3:2", "3:2:1"), ("5", "5 to 1"), ("1/2", "1:2:1"), ("1:2:3", "1/6"),
        (r"1:\sqrt3:2", r"1:2:\sqrt3"), ("1:2:3", r"0:\frac02:0"), ("2", "2:1:1"),
    ],
    "bases": [
        ("12_3", "(12)_4"), ("12_3", "12 base 4"), ("12_3", r"12_{\text{four}}"), ("12_3", "12_{(4)}"), ("18", "18_{16}"),
        ("101", "101_2"), ("18", "x=18_{16}"), ("24", "18_{16}"),
    ],
    "complex numbers": [
        ("2+3i", r"2-3\mathrm{i}"), ("5", r"2+3\mathrm{i}"),
        (r"e^{i\pi/3}", r"\frac12-\frac{\sqrt3}{2}i"), ("-2i", r"\sqrt{-4}"), ("1", "i^2"),
    ],
    "degrees in functions": [("0.5", r"\cos 30^\circ"), (r"\cos 20^\circ", r"\sin 20^\circ"), ("0.5", r"\sin 30")],
    "inequalities joined by or": [
        (r"(-\infty,2)\cup(3,\infty)", "x<2 or x>4"), (r"(-\infty,2)\cup(3,\infty)", r"x<2\text{ and }x>3"),
        (r"(-\infty,2)\cup(3,\infty)", r"x<2\text{ or }x\ge 3"), ("x<2 or x>3", "x<2"),
    ],
    "other commands": [
        ("12/99", r"0.\dot{1}\dot{3}"), ("1/3", "0.(4)"),
        (r"\infty", "-infinity"), (r"17\pmod{20}", r"x\equiv 17\pmod{21}"),
    ],
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
    "piece",
    [
        "1 m ",
        "Total ",
        "1.",
        "12 hours ",
        "5%",
        r"\text{a}",
        "(A)",
        "²",
        "sin",
        "3…",
        "1:",
        "x=1,",
        "^{0.5}",
        r"\dot1",
        r"\\",
        "1 to ",
        r"\binom1",
        "3(1)",
        r"\sin 1^\circ",
        "1 ft ",
        "{1}",
        r"\text{1}",
        "March 1",
        "1,",
        "a and ",
        "**1",
        " ",
        "]1,",
        "_1C",
        "cis(",
        "one hundred ",
        " hundred",
        "0.1(",
        "(1;2",
        "1;",
        "5C2 ",
        "C_5^2",
        "approximately ",
        " is the answer",
        " quarter ",
        "7 mod ",
        "not ",
        r"\approx 1",
        "...",
        "=1",
    ],
)
def test_long_answers_of_these_spellings_are_read_in_time(piece: str) -> None:
    """The time limit of a test ends a search that takes exponential time."""
    compare_plainly("5 cm 3 mm", "1" + piece * (1900 // len(piece)) + "!")
    compare_plainly("A", piece * (1900 // len(piece)))
