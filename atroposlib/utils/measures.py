"""Amounts with common units, such as `1 hour 30 minutes`, `$5` or `9.8 m/s^2`.

Two amounts of one dimension are comparable: `36 km/h` is `10 m/s`. Two amounts of other dimensions
are never equal: `5 cm^2` is not `5 cm`.

The library `pint` cannot replace the tables. It reads `3 bags` as an amount, equates 5% with 0.05,
and has no currencies.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

TEXT_COMMAND = r"\\(?:text(?:rm|bf|it|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname|boldsymbol|bm|emph|underline)"
"""A LaTeX command that only changes the font of its argument."""

Dimension = frozenset[tuple[str, int]]
"""Kinds and their powers: metres per second are `{("length", 1), ("time", -1)}`."""


@dataclass(frozen=True)
class Measure:
    """A number with a unit.

    Attributes:
        dimension: kinds and powers of the unit.
        amount: the number in the base units.
        unit: the unit as the answer spells it.
    """

    dimension: Dimension
    amount: Fraction
    unit: str


_SIZES: dict[str, dict[str, int | str]] = {
    "money": {"cent": "1/100", "dollar": 1, "usd": 1},
    "euro": {"euro": 1, "eur": 1},
    "yen": {"yen": 1},
    "rupee": {"rupee": 1},
    "length": {"m": 1, "meter": 1, "metre": 1, "km": 1000, "kilometer": 1000, "kilometre": 1000,
        "cm": "1/100", "centimeter": "1/100", "centimetre": "1/100", "mm": "1/1000",
        "millimeter": "1/1000", "millimetre": "1/1000", "in": "127/5000", "inch": "127/5000",
        "ft": "381/1250", "foot": "381/1250", "feet": "381/1250", "yd": "1143/1250", "yard": "1143/1250",
        "mi": "201168/125", "mile": "201168/125"},
    "time": {"s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hr": 3600, "hour": 3600,
        "day": 86400, "week": 604800, "month": 2629746, "year": 31556952, "yr": 31556952},
    "mass": {"g": 1, "gram": 1, "mg": "1/1000", "milligram": "1/1000", "kg": 1000, "kilogram": 1000,
        "lb": "45359237/100000", "pound": "45359237/100000", "oz": "45359237/1600000",
        "ounce": "45359237/1600000"},
    "degree": {"degree": 1},
    "percent": {"percent": 1},
    "celsius": {"celsius": 1},
    "fahrenheit": {"fahrenheit": 1},
    "radian": {"radian": 1, "rad": 1},
}  # fmt: skip
"""Kind -> unit -> its size, as a whole number or a fraction."""
_DERIVED = {
    "liter": ("m^3", Fraction(1, 1000)),
    "gallon": ("in^3", Fraction(231)),
    "mph": ("mi/h", Fraction(1)),
    "kph": ("km/h", Fraction(1)),
    "N": ("kg m/s^2", Fraction(1)),
    "J": ("kg m^2/s^2", Fraction(1)),
    "W": ("kg m^2/s^3", Fraction(1)),
    "Pa": ("kg/m s^2", Fraction(1)),
    "litre": ("liter", Fraction(1)),
    "L": ("liter", Fraction(1)),
    "mL": ("liter", Fraction(1, 1000)),
    "ml": ("liter", Fraction(1, 1000)),
    "milliliter": ("liter", Fraction(1, 1000)),
    "quart": ("gallon", Fraction(1, 4)),
    "pint": ("gallon", Fraction(1, 8)),
    "cup": ("gallon", Fraction(1, 16)),
    "tablespoon": ("gallon", Fraction(1, 256)),
    "teaspoon": ("gallon", Fraction(1, 768)),
    "newton": ("N", Fraction(1)),
    "kN": ("N", Fraction(1000)),
    "joule": ("J", Fraction(1)),
    "kJ": ("J", Fraction(1000)),
    "watt": ("W", Fraction(1)),
    "kW": ("W", Fraction(1000)),
    "pascal": ("Pa", Fraction(1)),
    "kPa": ("Pa", Fraction(1000)),
}
"""Unit -> the units that it consists of, and how many of them it is."""

_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
_UNSPACED = re.compile(rf"{TEXT_COMMAND}|\\(?:left|right|displaystyle)(?![A-Za-z])|\\!")
_SPACE = re.compile(r"\\[,;: ]|\\q?quad(?![A-Za-z])|[\s~]+|\\cdot(?=\s*\{?\s*[A-Za-z])")
_DEGREES = re.compile(
    r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})\s*\{?\s*(?:([CF])(?![A-Za-z]))?"
)
_SIGNS = (
    (r"\\?%|\bper cent\b", " percent"),
    (r"(?<=[\d}])\s*(?:''|\")", " inch "),
    (r"(?<=[\d}])\s*'", " foot "),
)
_DEGREE_WORDS = re.compile(r"\bdegrees?\s+(celsius|fahrenheit|[CF](?![A-Za-z]))", re.IGNORECASE)
_SCALE_NAMES = {"": "degree", "c": "celsius", "f": "fahrenheit"}
_FRACTION_OF_UNITS = re.compile(
    r"\\[dt]?frac\s*\{\s*\{?([A-Za-z]+)\}?\s*\}\s*\{\s*\{?([A-Za-z]+)\}?\s*(\^\s*\{?\d\}?)?\s*\}"
)
_WHOLE = r"\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+"
_FRACTION = r"\\[dt]?frac\s*(?:\{\s*(?P<above>\d+)\s*\}|(?P<a>\d))\s*(?:\{\s*(?P<below>0*[1-9]\d*)\s*\}|(?P<b>[1-9]))"
_AMOUNT = re.compile(
    r"\s*(?P<sign>[+-]?)\s*(?P<currency>(?:US)?\s*\\?\$|[€£¥₹])?\s*(?P<inner>[+-]?)"
    rf"(?:(?P<whole>{_WHOLE})(?:\s+(?P<top>\d+)\s*/\s*(?P<bottom>[1-9]\d*)|\s*/\s*(?P<divisor>[1-9]\d*)"
    rf"|\.(?P<digits>\d+))?|\.(?P<only>\d+))?\s*(?:{_FRACTION})?"
    r"(?:\s*(?:\\times|\*|x)\s*10\s*\^\s*\{?\s*(?P<power>[+-]?\d{1,2})\s*\}?)?(?:[eE](?P<exponent>[+-]?\d{1,2}))?"
)
_FACTOR = re.compile(
    r"\s*(?P<operator>/|\bper\b|\*)?\s*\{?\s*(?:(?P<raised>square|sq|cubic|cu)\b\.?\s*)?"
    r"(?P<name>[A-Za-z]+)\}*\.?(?:\s*\^\s*\{?\s*(?P<power>-?\d)\s*\}?)?\}*"
)
_BETWEEN = re.compile(r"\s*(?:,|\band\b)?\s*")


_UNITS: dict[str, tuple[Dimension, Fraction]] = {
    name: (frozenset({(kind, 1)}), Fraction(size))
    for kind, sizes in _SIZES.items()
    for name, size in sizes.items()
}


def _unit_named(name: str) -> tuple[Dimension, Fraction] | None:
    """Return dimension and size of a unit in the singular or plural; None for any other word."""
    for spelling in (name, name.lower()) if len(name) > 2 else (name,):
        for singular in (spelling, spelling.removesuffix("s"), spelling.removesuffix("es")):
            if singular in _UNITS:
                return _UNITS[singular]
    return None


def _unit_at(text: str, start: int) -> tuple[Dimension, Fraction, int] | None:
    """Return dimension, size and end of the unit that starts there; None without a known unit."""
    powers: Counter[str] = Counter()
    size, position, below = Fraction(1), start, False
    while factor := _FACTOR.match(text, position):
        if factor["name"] in ("and", "per") or (factor["operator"] and position == start):
            break
        unit = _unit_named(factor["name"])
        if unit is None:
            return None
        below = below or factor["operator"] in ("/", "per")
        power = int(factor["power"] or 1) * {"s": 2, "c": 3}.get((factor["raised"] or " ")[0], 1)
        power = -power if below else power
        for kind, of_kind in unit[0]:
            powers[kind] += of_kind * power
        size *= unit[1] ** power
        position = factor.end()
    if position == start:
        return None
    return frozenset((kind, power) for kind, power in powers.items() if power), size, position


def _derive_units() -> None:
    """Add the derived units to the table. Each one's definition names earlier units only."""
    for name, (definition, count) in _DERIVED.items():
        unit = _unit_at(definition, 0)
        assert unit is not None, name
        _UNITS[name] = unit[0], unit[1] * count


_derive_units()


def _number(match: re.Match[str]) -> Fraction | None:
    """Return the number that `_AMOUNT` matched; None if there is none or it has two signs."""
    parts = match.groupdict()
    above, below = parts["above"] or parts["a"], parts["below"] or parts["b"]
    if not (parts["whole"] or parts["only"] or above) or (parts["sign"] and parts["inner"]):
        return None
    if above and (parts["digits"] or parts["only"] or parts["divisor"] or parts["top"]):
        return None
    whole = re.sub(r"[,{}]", "", parts["whole"] or "0")
    number = Fraction(f"{whole}.{parts['digits'] or parts['only'] or 0}")
    number /= int(parts["divisor"] or 1)
    number += Fraction(int(parts["top"] or above or 0), int(parts["bottom"] or below or 1))
    number *= Fraction(10) ** int(parts["power"] or parts["exponent"] or 0)
    return -number if "-" in (parts["sign"], parts["inner"]) else number


def _plain(text: str) -> str:
    """Return an answer without fonts and spacing commands, and with names for degree signs."""
    text = _SPACE.sub(" ", _UNSPACED.sub("", text))
    text = _DEGREE_WORDS.sub(lambda found: _SCALE_NAMES[found[1][0].lower()], text)
    text = _DEGREES.sub(lambda found: " " + _SCALE_NAMES[(found[1] or "").lower()], text)
    for sign, unit in _SIGNS:
        text = re.sub(sign, unit, text)
    text = re.sub(
        r"\b(?:USD|EUR)\s*(?=[\d.])", lambda found: {"U": "$", "E": "€"}[found[0][0]], text
    )
    return _FRACTION_OF_UNITS.sub(r"\1/\2\3", text).replace(r"\mu", "μ").strip()


def measure(text: str) -> Measure | None:
    """Return the amount that an answer gives; None unless it is numbers with common units.

    Units may follow one another from the largest to the smallest, as in `5 ft 6 in`.

    >>> measure("2 hours").amount == measure("1 hour 60 minutes").amount, measure("3 apples")
    (True, None)
    """
    text = _plain(text)
    total, position = Fraction(0), 0
    dimension, smallest, unit_text = None, None, ""
    while position < len(text):
        found = _AMOUNT.match(text, position)
        number = _number(found) if found else None
        if found is None or number is None:
            return None
        if found["currency"]:
            unit = _unit_after_currency(text, found)
        else:
            unit = _unit_at(text, found.end())
        if unit is None or dimension not in (None, unit[0]) or (smallest and unit[1] >= smallest):
            return None
        dimension, smallest = unit[0], unit[1]
        unit_text = text[found.end() : unit[2]].strip(" {}")
        total += abs(number) * smallest * (-1 if number < 0 and not total else 1)
        between = _BETWEEN.match(text, unit[2])
        position = between.end() if between else unit[2]
    return Measure(dimension, total, unit_text) if dimension is not None else None


def _unit_after_currency(text: str, found: re.Match[str]) -> tuple[Dimension, Fraction, int] | None:
    """Return the unit of `$5` or `$5 per hour`."""
    name = _CURRENCIES[found["currency"][-1]]
    rest = text[found.end() :].strip()
    unit = _unit_at(f"{name} {rest}", 0)
    return (
        (unit[0], unit[1], len(text))
        if unit and unit[2] == len(f"{name} {rest}".rstrip())
        else None
    )


def equal_measures(one: Measure, other: Measure) -> bool | None:
    """Compare two amounts; None if the numbers alone must decide.

    `5 m` may be metres or minutes. `90 degrees` may be a temperature. `3 hours per day` may
    answer for `3 hours`.
    """
    if one.dimension == other.dimension:
        return one.amount == other.amount
    for first, second in ((one, other), (other, one)):
        kinds = {kind for kind, _ in second.dimension}
        if first.unit == "m" and kinds == {"time"}:
            return None
        if first.dimension == {("degree", 1)} and kinds & {"celsius", "fahrenheit"}:
            return None
        if first.dimension == {("money", 1)} and first.dimension <= second.dimension:
            return None
        head, per, _ = second.unit.partition(" per ")
        if per and (unit := _unit_at(head, 0)) and unit[0] == first.dimension:
            return None
    return False
