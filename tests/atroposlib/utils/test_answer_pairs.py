"""Right and wrong answers as models and datasets write them, by the kind of spelling."""

import pytest

from atroposlib.utils.math_scoring import compare_plainly, equal_in_this_process, last_boxed

pytestmark = pytest.mark.nightly

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
    "points with a name": [
        ("A(1,2)", "(1,2)"), ("(1,2)", "A(1,2)"), ("P(3,-4)", "P=(3,-4)"), (r"A\left(\frac12,2\right)", "(0.5,2)"),
        ("(2,3,-1)", "Q(2,3,-1)"), ("(1,2)", r"\text{point }(1,2)"), ("(5,2)", "P(5,2)"), ("A(1,2)", "A=(1,2)"),
        ("A(1,2)", "A(1, 2)"), ("(0,0)", "O(0,0)"), ("A=(1,2)", "(1,2)"),
        ("(1,2)", "the point (1,2)"), ("(1,2)", "P=(1,2)"), ("(-1,3)", r"P\left(-1,3\right)"), ("A'(1,2)", "A'(1,2)"),
    ],
    "units in a fraction": [
        (r"15\frac{km}{h}", "15 km/h"), (r"15\frac{km}{h}", "15"), ("15", r"15\ \frac{\text{km}}{\text{h}}"),
        (r"15\frac{\mathrm{km}}{\mathrm{h}}", "15 km/h"), ("15 km/h", r"15\,\frac{km}{hr}"),
        (r"9.8\frac{m}{s^2}", "9.8 m/s^2"), ("15", r"15\frac{km}{h}"), (r"60 \frac{miles}{hour}", "60 mph"),
        ("30", r"30\frac{miles}{hour}"), ("2.5", r"2.5\frac{g}{cm^3}"), ("2.5 g/cm^3", r"2.5\frac{g}{cm^3}"),
        ("9.8", r"9.8\frac{m}{s^2}"), ("12", r"12\,\dfrac{kg}{m^3}"), (r"\frac{5}{2}", r"\frac52\frac{km}{h}"),
    ],
    "dozens": [
        ("12", "1 dozen"), ("1 dozen", "12"), ("24 eggs", "2 dozen eggs"), ("36", "3 dozen"), ("18", "1.5 dozen"),
        ("2 dozen", "2 dozens"), ("2 dozen", "2 dozen eggs"), ("24", r"2\text{ dozen}"), ("2 dozen", "24 eggs"),
        ("60", "5 dozen cookies"), ("30", "2.5 dozen"),
    ],
    "functions and graphs": [
        ("f(x)=2x+1", "y=2x+1"), ("f(x)=2x+1", "2x+1"), ("y=2x+1", "2x+1"), ("2x+1", "y=2x+1"), ("2x+1", "f(x)=2x+1"),
        ("y=x^2-3", "f(x)=x^2-3"), ("f(x)=x^2", r"f(x)=x\cdot x"), ("f(x)=2x+1", "1+2x"), ("P(n)=n^2+n", "n(n+1)"),
        ("x^2+1", "g(x)=x^2+1"), ("y=3", "f(x)=3"), (r"f(x)=\frac{1}{x}", "y=x^{-1}"), ("f(x)=2x+1", "y=1+2x"),
        ("f(x)=2x+1", "f(x)=1+2x"), ("f(2)=5", "f(2)=5"), (r"y=\sin x", r"f(x)=\sin x"), ("f(x)=2x+1", "y = 2x + 1."),
    ],
    "a name in words": [
        ("area = 12", "12"), ("12", "area = 12"), ("area = 12", r"\text{area}=12"), ("Area = 12", "12 cm^2"),
        (r"\text{Area}=12", "12"), ("12", r"\text{total cost}=12"), ("speed = 60 km/h", "60 km/h"),
        (r"perimeter = 4\pi", r"4\pi"), ("Answer: 12", "12"), ("12", "Area = 3*4 = 12"), ("area = 3*4 = 12", "12"),
        ("abcd=12", "12"), ("12", "abcd=12"), ("18", "100m+n=18"), ("18", "2AB=18"), ("12", "[ABCD]=12"),
        ("12", "total = $12"), ("12", r"Total cost = \$12.00"), ("60", r"\theta = 60^\circ"),
        ("60", "angle = 60 degrees"), ("12", r"\text{Area of } \triangle ABC = 12"), ("60", r"\angle ABC = 60^\circ"),
        ("60", r"m\angle ABC = 60"), ("12", r"\frac12\cdot\text{base}\cdot\text{height}=12"),
        ("12", r"\text{Area}=\frac12\cdot 6\cdot 4=12"), ("sum of squares = 50", "50"),
        ("speed = distance/time", "speed = distance/time"), ("1/2", "sin x=1/2"), ("1/2", "probability = 0.5"),
        ("12", r"\mathrm{lcm}(3,4)=12"), ("3", r"\lfloor\pi\rfloor=3"), ("12", "$area = 12$"),
        (r"\text{Area} = 12\pi", r"12\pi"), ("12", r"\text{Number of apples} = 12"), ("12", "apples = 12"),
        ("1/2", "P(A)=1/2"), ("10", "width=10"), ("x=5", "5"), ("2,3", "2 and 3"), ("slope = 3", "m = 3"),
        ("220", "Buicks:12+8(26)=220"), ("12", "Over 50:40-4-24=12 Judges"),
        ("300", "100 less than one-third capacity is 400 - 100 = 300 people."),
    ],
    "permutations": [
        ("20", "5P2"), ("5P2", "20"), ("20", "_5P_2"), ("20", "P_5^2"), ("20", "{}^5P_2"), ("60", "{}_5P_3"),
        (r"\frac{1}{20}", r"\frac{1}{{}_5P_2}"), ("336", "8P3"), ("1", "5P0"), ("120", "5P5"), ("40", r"2\cdot 5P2"),
        ("20", "{}_{5}P_{2}"), ("20", r"5\text{P}2"),
    ],
    "school problems": [
        ("18", "$18"), ("70000", "$70,000"), ("540", "540 meters"), ("20", "20 cups of feed"), ("64", "$64.00"),
        ("260", "260 miles"), ("160", "160 minutes"), ("45", "45 hours of work"), ("460", r"\$460"),
        ("366", "366 downloads"), ("694", "694 dollars"), ("13", "13 slices left"), ("18", "18 eggs per day"),
        ("5.75", "$5.75"), ("1.5", "1 1/2 hours"), ("25", "25%"), ("2,125", "2125"), ("3", "3.00"),
        ("104", "104 hours/year"), ("0.75", "0.750"),
    ],
    "problems of competitions": [
        (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)"), ("p-q", "-q+p"), (r"\frac{14}{3}", r"4\frac{2}{3}"),
        (r"\text{Evelyn}", "Evelyn"), ("42", r"42^\circ"), ("6-5i", "-5i+6"), (r"\frac{3}{56}", "3/56"),
        (r"x \in [-2,7]", "[-2,7]"), ("[-2,7]", r"-2\le x\le 7"), (r"\text{even}", "even"), (r"-\frac{1}{2}", "-0.5"),
        (r"(-\infty,-2)\cup(-2,\infty)", r"x\neq -2"), ("y=-2x+3", "2x+y=3"), ("2k+2", "2(k+1)"),
        (r"\sqrt{51}", "51^{1/2}"), ("(6,31,-1)", "(6, 31, -1)"),
        (r"\begin{pmatrix}-1&0\\0&-1\end{pmatrix}", r"-\begin{pmatrix}1&0\\0&1\end{pmatrix}"), ("-50", "-50.0"),
        ("x^3+3x-6", "x^3 + 3x - 6"), (r"3\sqrt{13}", r"\sqrt{117}"), (r"144\pi", r"144\pi\text{ cm}^3"),
        ("10,11,12", r"10, 11, \text{ and } 12"), (r"\{1,2,3\}", r"\{3,2,1\}"), ("1,-2", "x = 1 or x = -2"),
        ("1,-2", r"x=1\text{ or }x=-2"), (r"1\pm\sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"), ("2516_8", "2516_{8}"),
        (r"11\sqrt2", r"\sqrt{242}"), ("28", r"28\%"), ("0.09", r"\frac{9}{100}"),
        (r"\frac{270}{7}\text{ degrees}", r"\frac{270}{7}"), (r"(5,\infty)", "x>5"), ("5x^2-7x+1", "1-7x+5x^2"),
        (r"\pi", "3.14159265358979"), (r"\dfrac{9}{7}", "9/7"), (r"-\frac{35}{9}", r"\frac{-35}{9}"),
        ("(x-2)(x+2)", "x^2-4"), ("17", "seventeen"), ("2^{10}", "1024"), ("9901", "9,901"), ("(D)", "D"),
        (r"\text{(D)}", "D"), (r"\textbf{(D)}", "(D)"), ("B", r"\text{B. }42"), ("073", "73"), ("33", "033"),
        ("25", "025"), ("204", "m+n=204"), ("809", "809."), ("1", "001"),
    ],
    "problems of olympiads": [
        ("2^{n-1}", r"\frac{2^n}{2}"), (r"\frac{n(n+1)}{2}", r"\binom{n+1}{2}"), ("n!", r"n\cdot(n-1)!"),
        ("f(x)=x", "f(x) = x"), ("f(x)=0, f(x)=x", r"f(x)=x \text{ and } f(x)=0"), (r"\frac{1}{2}\ln 3", r"\ln\sqrt{3}"),
        ("(p,q)=(2,3)", "(2,3)"), ("(2,3),(3,2)", "(p,q)=(2,3),(3,2)"), (r"n\geq 3", r"[3,\infty)"),
        ("2n", r"2 \cdot n"), (r"6.02\times10^{23}", "6.02 × 10²³"), (r"3.0\times 10^8", "300000000"),
        (r"3\times 10^8\text{ m/s}", "3e8 m/s"),
    ],
    "currencies and units": [
        ("$2.50", "2.50 dollars"), ("€20", "20 euros"), ("20 euros", "20"), ("5 kg", "5000 g"),
        ("1.5 hours", "90 minutes"), ("72 in", "6 feet"), ("0.5 km", "500 m"), (r"100\text{ cm}^2", "100 cm²"),
        ("37%", "0.37"), ("12.5%", "1/8"), ("50 percent", "50%"), ("4:15 PM", "4:15 p.m."),
        ("3 hours 20 minutes", "200 min"), (r"2\frac34", "2.75"), ("2 3/4 cups", "11/4"), (r"1 \frac{1}{2}", "3/2"),
    ],
    "words that join inequalities": [
        ("x>5 or x<2", "x<2 or x>5"), ("x<2 or x>5", r"x<2 \text{ or } x>5"), ("1<x<2", "x>1 and x<2"),
        ("x>5 or x<2", r"(-\infty,2)\cup(5,\infty)"), ("x=1 or x=2", "1,2"), ("x=1 or x=2", "x=1 and x=2"),
        (r"x\le -1\text{ or }x\ge 1", r"x\geq1\text{ or }x\leq-1"), ("-1<x<1 or x>2", r"(-1,1)\cup(2,\infty)"),
    ],
    "names, and one of several values": [
        ("x=1, y=2", "x=1 and y=2"), ("x=1 or x=2", "x=1, x=2"), ("x=1, y=2", "y=2, x=1"), ("perimeter = 2a+2b", "2a+2b"),
        (r"area = \pi r^2", r"\pi r^2"), ("12", "the area = 12"), ("3 dozen", "36"), ("time = 5 hours", "300 minutes"),
        ("5", "x = 5 hours"), ("probability = 1/3", r"33\frac13\%"), ("12", r"\textbf{Area} = 12"),
        ("12", r"\mathrm{Area}=12"), ("0.75", "probability = 3/4"), ("area = 12", "Area: 12"),
        ("5:30 pm", "time = 5:30 pm"), ("(1,2)", "vertex = (1,2)"), ("(1,2)", "center = (1,2)"),
        ("(1,2)", "Vertex: (1,2)"), ("[1,2]", "domain = [1,2]"), (r"(-\infty,2)", r"range = (-\infty,2)"),
        ("1,2", "roots = 1, 2"), ("1,2", "roots = 2, 1"), ("3", "ratio = 3"), ("3:2", "ratio = 3:2"),
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
    "points with a name": [
        ("A(1,2)", "(2,1)"), ("A(1,2)", "B(2,1)"), ("(1,2)", "A(1,3)"), ("A(1,2)", "1.2"), ("(1,2)", "C(2,1)"),
        ("A(1,2), B(3,4)", "(3,4), (1,2)"), ("A(1,2)", "B(1,2)"), ("(5,2)", "C(5,2)"), ("10", "C(5,1)"),
        ("(1,2)", "f(1,2)"), ("2", "A(1,2)"), ("12", "A(1,2)"), ("3", "A(1,2)"), ("(1,2)", "-A(1,2)"),
        ("(1,2)", "2A(1,2)"), ("A(1,2)", "[1,2]"), ("A(1,2)", r"\{1,2\}"), ("A(1,2)", "A(2,1)"), ("(1,2)", "AB(1,2)"),
        ("(1,2)", "A(1,2)+B"), ("(1,2)", "A(1,2), B(3,4)"), ("(0,1)", "N(0,1)"), ("(1,2)", "|A(1,2)|"),
        ("(1,2)", "A(1,2,3)"), ("(1,2,3)", "A(1,2)"), ("1,2", "A(2,1)"), (r"\{1,2\}", "A(1,2)"),
        ("(1,2)", r"A \ne (1,2)"), ("(1,2)", "not A(1,2)"), ("(1,2]", "A(1,2)"), ("A(1,2)", "(1,2]"),
        ("5", "point (5,5)"), ("0.5", "point 5"), ("5", "A(5)"), ("(2,1)", "C(2,1)"),
        ("A(1,2), B(3,4)", "B(1,2), A(3,4)"), ("A(1,2), B(3,4)", "(1,2)"), ("A(1,2)", "A(1,2) or A(3,4)"),
    ],
    "units in a fraction": [
        (r"15\frac{km}{h}", "15 m/s"), (r"15\frac{km}{h}", "15 km"), (r"15\frac{km}{h}", r"\frac{15}{h}"),
        (r"15\frac{a}{b}", "15"), ("15", r"15\frac{x}{y}"), (r"15\frac{m}{n}", "15"), ("15", r"15\frac{m}{n}"),
        (r"15\frac{km}{h}", "16"), ("15", r"15\frac{1}{2}"), ("15", r"15\frac{s}{t}"), (r"\frac{km}{h}", "1"),
        (r"15\frac{h}{km}", "15 km/h"), ("3", r"3\frac{L}{W}"), ("3", r"3\frac{h}{s}"), ("3", r"3\frac{m}{s}x"),
        ("15", r"15\frac{km}{h}x"), ("15", r"15\frac{a}{h}"), ("15", r"x15\frac{km}{h}"), ("15", r"15\frac{km}{x}"),
        ("15", r"15\frac{s}{h}"), ("15 km/h", r"15\frac{h}{km}"), ("9.8 m/s^2", r"9.8\frac{m}{s}"),
        ("3", r"3\frac{g}{h}y"), ("2.5 g/cm^3", r"2.5\frac{g}{cm^2}"), ("15", r"\frac{15}{2}\frac{km}{h}"),
        ("60 mph", r"60\frac{km}{h}"), ("15", r"15\frac{g}{s}t"),
    ],
    "dozens": [
        ("1 dozen", "1"), ("1", "1 dozen"), ("12", "2 dozen"), ("24", "12 dozen"), ("2 dozen", "2"),
        ("2", "2 dozen eggs"), ("12", "12 dozen"), ("12", "a dozen times 2"), ("6", "1 dozen/2 apples"),
        ("12", "1 dozen dozen"), ("144", "1 dozen"), ("24", "2 dozen and 3"), ("2", "2 dozen"), ("24", "a couple dozen"),
        ("24", "2 dozen minus 1"), ("24 dozen", "24"), ("12", "1 dozen squared"), ("12", "12 dozens"), ("12%", "2 dozen"),
        ("12 hours", "1 dozen minutes"),
    ],
    "functions and graphs": [
        ("f(x)=2x+1", "y=2x+2"), ("f(x)=2x+1", "x=2y+1"), ("y=2x+1", "x=2y+1"), ("f(x)=2x+1", "2y+1"), ("f(x)=2x+1", "5"),
        ("f(x)=5", "x=5"), ("y=5", "x=5"), ("y=2x+1", "2x+y=1"), ("y^2=x", "x"), ("f(x)=2x+1", "f(x)=2x"),
        ("y=x", "x=y+1"), ("f(x)=x^2", "f(x^2)=x"), ("f(2)=5", "f(3)=5"), ("f(x)=2x+1", "f(2x+1)"), ("2x+1", "2x+1=0"),
        ("2x", "2x=0"), ("x+1", "y=x-1"), ("x=2y+1", "2x+1"), ("f(x)=x", "y=-x"), ("f^{-1}(x)=x-3", "f(x)=x-3"),
        ("f'(x)=2x", "f(x)=2x"), ("f(x)=2x", "f(y)=2x"), ("x^2+y^2=1", "1"), ("y=2x+1", "2x+1=y+1"), ("f(x)=g(x)", "x"),
        ("y=3", "f(x)=4"), ("y=2x+1", "f(y)=2x+1"), ("y=2x+1", "f(x)=2y+1"), ("f(x)=2x+1", "y=2x"),
        ("f(x)=2x+1", "-y=2x+1"), ("f(x)=2x+1", "y^2=2x+1"), ("f(x)=2x+1", "2y=2x+1"), (r"f(x)=\sin x", r"y=\cos x"),
        ("f(2)=5", "f(2)=6"), ("f(2)=5", "f(5)=2"), ("f'(x)=2x+1", "y=2x+1"), ("y=2x+1", "f(2)=2x+1"),
        ("f(x,y)=x+y", "y=x+y"), ("f(3)=5", "3"), ("f(x)=2x+1, g(x)=x", "y=2x+1"), ("y=2x+1", "f(x)>2x+1"),
    ],
    "a name in words": [
        ("area = 12", "13"), ("area = 12", "perimeter = 12"), ("12", "area = 13"), ("area = 12", "area = 24/3"),
        ("12", "not area = 12"), ("12", r"\text{area}\neq 12"), ("12", "area > 12"), ("12", "2 area = 12"),
        ("12", "area^2=12"), ("area = 12 cm^2", "12 cm"), ("12", r"\frac{area}{2}=12"), ("12", "half area = 12"),
        ("12", "twice the area = 12"), ("no = 5", "5"), ("12", "-area=12"), ("12", "area+3=12"),
        ("area = 12", "area = 21"), ("area = 12", "2"), ("12", "area = 3*4 = 13"), ("12", "area = 3*5 = 12"),
        ("12", "area = 12, perimeter = 14"), ("12", "perimeter = 14, area = 12"),
        ("width = 5, length = 10", "width = 10, length = 5"), ("5", "width = 5, length = 10"),
        ("10", "width = 5, length = 10"), ("5, 10", "length = 5"), ("12", "negative area = 12"),
        ("12", "double area = 12"), ("12", "area/2 = 12"), ("12", r"area \cdot 2 = 12"), ("12", r"\sqrt{area}=12"),
        ("12", r"\sqrt{\text{area}}=12"), ("12", r"2\cdot\text{area}=12"), ("12", r"\text{area}^2=12"),
        ("area^2 = 12", "12"), ("2 area = 12", "area = 12"), ("2 area = 12", "12"), ("12", "12 = 2 area"),
        ("12", "area = x+12"), ("12", "area = 12x"), ("speed = distance/time", "speed = time/distance"),
        ("speed = 60 km/h", "60 m/s"), ("area = 12 cm^2", "12 cm^3"), ("12", "area = 12 or 13"), ("12", "area = 12, 13"),
        ("12", "area != 12"), ("12", r"\text{area} \ne 12"), ("area = 12", r"\text{Perimeter} = 12"), ("area > 12", "12"),
        ("12", "the answer isn't = 12"), ("5", "one third of x = 5"), ("5", "minus five = 5"), ("5", "twice x = 5"),
        ("cos theta = 1/2", "sin theta = 1/2"), ("2", "length = 2:3"),
    ],
    "permutations": [
        ("20", "5P3"), ("10", "5P2"), ("20", "P(2,5)"), ("20", "5C2"), ("5P2", "10"), ("7", "5P2"), ("20", "5P2x"),
        ("10P", "5P2"), ("1/2", "P(5,2)"), ("0.2", "P(1,5)"), ("20", "5P2P3"), ("20", "5P2+x"), ("20", "P_5"),
        ("20", "P^2"), ("25", "P_5^2"), ("20", "2P5"), ("20", "_2P_5"), ("20", "P(5,2)=10"), ("P_5^2", "10"),
        ("20", "P_2^5x"), ("20", "5P-2"), ("400", "5P2^2"), ("20P", "5P2"),
    ],
    "school problems": [
        ("18", "$81"), ("18", "1.8"), ("540", "5.40"), ("18", "-18"), ("70000", "70,00"), ("18", "17.99"),
        ("18", "18000"), ("18", "18 million"), ("18", "$18 million"), ("3", "3/1000"), ("18", "18 or 20"),
        ("18", "18-20"), ("18", "18, 20"), ("18", "18±1"), ("18", "about 20"), ("5.75", "575"), ("2.5", "2:5"),
        ("25", "2.5%"), ("3", "3rd root of 3"), ("18", "18^2"), ("18", "18x"), ("$18", "18 cents"),
        ("18 hours", "18 minutes"), ("18", "18+"), ("18", ">18"), ("18", "at least 18"), ("18", "less than 18"),
        ("18", "18 more than x"), ("18", "18 times as many"), ("10", "10 less than 20"), ("10", "10 percent of 50"),
        ("5", "5 out of 8"), ("5", "5 of 8"), ("5", "5/8 of the cake"), ("5", "5 sixths"), ("5", "5 divided by 2"),
        ("5", "5 plus 2"), ("5", "5 to 7"), ("5", "5 through 7"), ("5", "5 and a half"), ("5", "5 minus 1"),
        ("5", "5 choose 2"), ("5", "5 over 2"),
    ],
    "problems of competitions": [
        (r"(3,\pi/2)", r"(\pi/2,3)"), ("[-2,7]", "(-2,7)"), ("[-2,7]", "[-2,7)"), ("6-5i", "6+5i"),
        (r"\text{even}", "odd"), (r"\text{Evelyn}", "Carla"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"), (r"\{1,2,3\}", r"\{1,2\}"),
        (r"\{1,2,3\}", r"\{1,2,3,4\}"), ("1,-2", "x=1"), ("1,-2", "1"), (r"1\pm\sqrt{19}", r"1+\sqrt{19}"),
        ("2516_8", "2516_9"), (r"(5,\infty)", "x<5"), (r"(5,\infty)", r"[5,\infty)"), (r"x\neq -2", "x=-2"),
        ("x^2-4", "x^2+4"), ("D", "(A)"), ("D", "A or D"), ("D", "D or E"), ("D", "not D"), ("D", "D, E"), ("B", "C. B"),
        ("10,11,12", "10,11"), (r"\frac{14}{3}", r"4\frac{1}{3}"), (r"42^\circ", r"42\text{ radians}"),
        (r"\sqrt{51}", "51^{1/3}"), ("0.09", "0.9"), ("-50", "50"), (r"\pi", "3.14"), (r"\pi", "22/7"),
        (r"\frac13", "0.33"), (r"2\pi", "6.28"), (r"\sqrt2", "1.414"), ("y=-2x+3", "y=2x+3"),
        (r"(-1,2)\cup(3,4)", r"(-1,2)\cap(3,4)"), (r"(-1,2)\cup(3,4)", "(-1,4)"), ("3!", "3"), ("e^2", "2e"),
        (r"\log 2", r"\ln 2"), ("x>5 or x<2", "x>5 and x<2"), ("5 or 6", "5"), ("odd", "even and odd"), ("073", "730"),
        ("204", "m+n=205"), ("204", "m=204, n=3"), ("33", "m+n=330"), ("100", "1e3"), ("25", "2.5e0"),
    ],
    "problems of olympiads": [
        ("2^{n-1}", "2^{n+1}"), ("n!", "(n-1)!"), ("f(x)=x", "f(x)=-x"), ("f(x)=0, f(x)=x", "f(x)=x"),
        ("(1,1,1)", "x=y=1"), ("(2,3),(3,2)", "(2,3)"), (r"n\geq 3", "n>3"), (r"n\geq 3", "3"),
        (r"6.02\times10^{23}", r"6.02\times10^{22}"), (r"3\times 10^8", r"3\times 10^{-8}"),
        ("all primes", "all odd primes"), ("all positive integers n", "n=1"), ("none", "all"), ("Yes", "No"),
        (r"\text{True}", "False"), ("n odd", "n even"), ("p=2", "p=3"), ("2n", "2"), ("2n", "2m"), ("n+1", "n"),
    ],
    "currencies and units": [
        ("$2.50", "$25.0"), ("€20", "£20"), ("5 kg", "500 g"), ("1.5 hours", "1.5 minutes"), ("0.5 km", "50 m"),
        ("37%", "3.7"), ("37%", "0.037"), ("4:15 PM", "4:15 AM"), ("4:15", "16:30"), ("3 hours 20 minutes", "3.2 hours"),
        (r"2\frac34", "23/4"), (r"2\frac34", "3/2"), (r"1 \frac12", "1/2"), ("100 cm^2", "100 cm^3"),
        (r"20^\circ", "20'"), ("3 yards", "3 feet"), ("5 pounds", "5 ounces"), ("60 km/h", "60 km"), ("10 m/s", "10 s/m"),
    ],
    "words that join inequalities": [
        ("x>5 or x<2", "x>5"), ("x>5 or x<2", "x>5, x<2"), ("x>5 and x<7", "x>5 or x<7"), ("x>5 or x<2", "x>2 or x<5"),
        (r"x\ge5\text{ or }x<2", "x>5 or x<2"), ("1<x<2 or x>3", "1<x<2 and x>3"),
    ],
    "right answers in forms that the grader does not read": [
        ("20", "P(5,2)"), ("A(1,2), B(3,4)", "(1,2), (3,4)"), ("6", "half a dozen"), ("(1,1,1)", "x=y=z=1"),
        (r"1.6 \times 10^{-19} C", "1.6e-19"), ("12", "lcm(3,4)=12"), ("4", r"\gcd(8,12)=4"), ("4", "gcd(8,12)=4"),
        ("2,3", "width = 2, height = 3"), ("width = 5, length = 10", "length = 10, width = 5"),
    ],
    "names, and one of several values": [
        ("x=1, y=2", "x=1 or y=2"), ("x=1,y=2", r"x=1\text{ or }y=2"), ("mean = median", "median"),
        ("mean = mode", "mean = median"), ("(1,2)", "vertex = (2,1)"), ("[1,2]", "domain = (1,2)"), ("1,2", "roots = 1"),
        ("roots = 1, 2", "1"), ("roots = 1, 2", "3"), ("time = 5 hours", "5 minutes"), ("5:30 pm", "time = 5:30 am"),
        ("5", "area = 5x"), ("5", "area = 5 = 6"), ("5", "area = 6 = 5"), ("6", "area = 5 = 6"), ("5", "height = 5 or 6"),
        ("5", "sum = 5, product = 6"), ("5", "sum = 5 and product = 6"), ("5", "rate = 5%%"), ("5", "area < 5 = x"),
        ("5", "area = |x|"), ("5", "area = 5'"), ("5", r"sum = \pm 5"), ("-5", "sum = 5"), ("5", "sum = -5"),
        ("5", "sum = 5!"), ("5", "sum = 5..."), ("120", "sum = 5"), ("f(x)=2x", "sum = 2x+1"), ("x+y=3", "total = 3"),
        ("x=5", "twice = 5"), ("5", "no solution = 5"), ("5", "5 dozen"), ("60", "6 dozen"), ("5", "P(5)"),
        ("(1,2)", "(1,2)A"), ("(1,2)", "A(1,2)=B"), ("(1,2)", "A(1,2)=0"), ("5", "A(1,2)=5x"),
        ("15", r"15\frac{km}{h^2}s"), ("15 km", r"15\frac{km}{h}"), ("15", r"15+\frac{km}{h}"), ("20", r"\frac{5P2}{2}"),
        ("10", "5P2/4"), ("20", "P_5^2+1"), ("5P2", "5P3"), ("C(5,2)", "P_5^2"), ("5C2", "5P2"), ("y=2x", "f(x)=2x, x>0"),
        ("y=2x", "f(x)=2x+c"), ("12", "Area A=13"), ("12", "dozen"), ("1", "dozen"), ("$2", "2 dozen"),
        ("2 dozen", "2 eggs"), ("2 dozen", "$2"), ("2.5", "2 dozen 5"),
    ],
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
        "area ",
        "area = ",
        "no ",
        "P(1,",
        "5P2 ",
        " dozen ",
        r"\frac{km}{h}",
        "point (",
        "_5P_2",
    ],
)
def test_long_answers_of_these_spellings_are_read_in_time(piece: str) -> None:
    """The time limit of a test ends a search that takes exponential time."""
    compare_plainly("5 cm 3 mm", "1" + piece * (1900 // len(piece)) + "!")
    compare_plainly("A", piece * (1900 // len(piece)))
