r"""Verdicts on numbers and formulas: find the final answer in a completion, compare it.

`final_answer` takes, in this order: the last <answer>..</answer>; the last \boxed{..} with balanced
braces; the last line `#### x`; else what is said last ("the answer is x", or the last number).
`math_correct` compares in three steps, cheapest first: the same text once the typesetting is off;
two numbers, compared exactly as fractions; and only then math-verify, in a process of its own with
a time limit (math_worker.py).

What counts as the same number
- 1,234 and 1234; $18 and 18; 18.0 and 18; 3/4, \frac{3}{4} and 0.75; 0.333333 and 1/3 (two
  non-integers may differ by a millionth, which is math-verify's own six digits); 1e-5 and 0.00001.
- A unit may be missing on one side ("18 dollars", "5 cm" for 5); two units must agree, spelled out
  or not ("5 centimeters" for 5 cm).
- % means hundredths: 50% is 50\%, 1/2 and 0.5. Where the other side has no % and is above 1, the %
  may also be the unit that was asked for: 50% is right for 50, but 0.5% is wrong for 0.5.
"""

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from .math_worker import judge

# Enough for an answer and some words after it; a completion of any length costs the same.
TAIL_CHARACTERS = 20_000
# No right answer is longer: more is compared as text only and never parsed.
FORMULA_CHARACTERS = 500
NUMBER_CHARACTERS = 200

_DASHES = str.maketrans("\u2212\u2013", "--")  # the typographic minus, and what is typed for it
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_DIGITS += r"(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?"
_MAGNITUDES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_MIXED = re.compile(r"([-+]?)([0-9]+) ?\\frac\{([0-9]+)\}\{([0-9]+)\}")  # 3\frac{1}{2} is 7/2
_NO_NUMBER = re.compile(r"[0-9]_|[<>≤≥≠±]|\\(?:[lg]e(?:q|qslant)?|neq?|[lg]t|pm)(?![A-Za-z])")
_MINUS = r"(?:(?<![\w)\]}])-)?"
_INTEGER = re.compile(rf"{_MINUS}{_DIGITS}")
_FRACTION = re.compile(rf"([-+]?)\\[dt]?frac\{{\s*([-+]?{_DIGITS})\s*\}}\{{\s*({_DIGITS})\s*\}}")
_NUMBER = re.compile(rf"([-+]?)\s*[€£]?\s*({_DIGITS})(?:\s*/\s*({_DIGITS}))?(\s*%?)(.*)")
_PHRASE = re.compile(r"(?im)^.*answer[\s*]*(?:is|:|=)[\s*:]*(.+?)(?=\.\s|\.?$|[?!])")
_SPOKEN = re.compile(
    rf"-?\\[dt]?frac\{{\s*-?{_DIGITS}\s*\}}\{{\s*{_DIGITS}\s*\}}|"
    rf"(?<![{{^_0-9]){_MINUS}\\?[$€£]?{_DIGITS}(?:/{_DIGITS})?"
    rf"(?:\s?\\?%| (?:{'|'.join(_MAGNITUDES)}|percent)\b|[A-Za-z^]+)?"
)
_HASHES = re.compile(r"(?m)^[ \t]*####[ \t]*(\S.*)$")
# Short units that may touch the number or have fewer than three letters.
_UNITS = frozenset(
    ["mm", "cm", "m", "km", "in", "ft", "yd", "mi", "mg", "g", "kg", "lb", "lbs", "oz", "ml", "l"]
    + ["s", "h", "hr", "hrs", "min", "mph", "kph"]
)
_SHORT = {  # units spelled out, without their plural s
    **{"millimeter": "mm", "centimeter": "cm", "meter": "m", "kilometer": "km", "yard": "yd"},
    **{"inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "mile": "mi", "gram": "g"},
    **{"kilogram": "kg", "pound": "lb", "ounce": "oz", "liter": "l", "second": "s"},
    **{"minute": "min", "hour": "h", "hr": "h"},
}
# Words that change the value, so that the text is no number with a unit.
_NO_UNITS = frozenset(
    ["and", "or", "to", "of", "plus", "minus", "times", "over", "mod", "log", "sin", "cos", "tan"]
    + ["sqrt", "squared", "cubed"]
)


def last_integer_correct(completion: str, answer: str) -> bool:
    """True when the last number written in the completion equals the integer `answer`.

    1,234 is one number, -5 is negative, 18.0 counts as 18, 18.5 is no integer and so is wrong.
    Raises ValueError when `answer` is no number.
    """
    number = last_number(completion)
    return bool(number) and _decimal(number) == _decimal(answer.translate(_DASHES))


def last_number(completion: str) -> str:
    """The last number in the last 2,000 characters, as it is written; an empty string if none."""
    numbers = _INTEGER.findall(completion[-2_000:].translate(_DASHES))
    return numbers[-1] if numbers else ""


def _decimal(text: str) -> Decimal:
    try:  # Decimal, because int() refuses more than 4300 digits, and a model may write them
        return Decimal(text.replace(",", ""))
    except InvalidOperation as error:
        raise ValueError(f"the reference answer {text!r} is not a number") from error


def math_correct(completion: str, answer: str) -> bool:
    """True when the final answer of `completion` is mathematically equal to `answer`.

    Works from any thread. Returns False when the comparison runs past its time limit. Raises
    ValueError when `answer` is empty, because nothing could ever be right.
    """
    gold = _gold(answer)
    if not gold:
        raise ValueError(f"the reference answer is empty ({answer!r}): remove that row")
    mine = _plain(final_answer(completion))
    if not mine:
        return False
    if re.fullmatch(r"\(?[A-Z]\)?", gold):  # a choice, which may come with its text: (C) 5
        mine = re.sub(r"^(\([A-Z]\)) [\w\\-].*", r"\1", mine)
    if _letters(mine) == _letters(gold):
        return True
    expected = _quantity(gold)
    if expected is not None:
        found = _read_number(mine)
        if found is not None:
            return _same_quantity(found, expected)
        mine = _right_hand_side(mine)
        if not re.search(r"[0-9\\]", mine) or _NO_NUMBER.search(mine):
            return False  # math-verify takes the number out of \geq 18 and of 18_{20}
    elif _letters(mine).isalpha() and _letters(gold).isalpha():
        return False  # math-verify reads ABC as A * B * C, which is CBA
    return max(len(mine), len(gold)) <= FORMULA_CHARACTERS and judge.equal(gold, mine)


def says_something(answer: str) -> bool:
    """Whether a reference answer leaves something to compare: r"\text{}" does not."""
    return bool(_gold(answer))


def _gold(answer: str) -> str:
    answer = answer.translate(_DASHES)
    return _plain(_boxed(answer) or answer)


def final_answer(completion: str) -> str:
    """The final answer as it stands in the last TAIL_CHARACTERS characters, or an empty string."""
    found = _found_answer(completion)
    return found if _plain(_boxed(found) or found) else ""


def _found_answer(completion: str) -> str:
    tail = completion[-TAIL_CHARACTERS:].translate(_DASHES)
    end = tail.rfind("</answer>")
    start = tail.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        inside = tail[start + len("<answer>") : end]
        return _boxed(inside) or inside
    hashes = _HASHES.findall(tail)
    return _boxed(tail) or (hashes[-1] if hashes else _said_last(tail))


def _boxed(text: str) -> str | None:
    r"""The content of the last \boxed{..} whose braces balance, in one pass over `text`."""
    opened, found, skip = [], (-1, -1), False
    for position, character in enumerate(text):
        if skip or character == "\\":
            skip = not skip
        elif character == "{":
            opened.append(position)
        elif character == "}" and opened:
            start = opened.pop()
            if start > found[0] and text.endswith((r"\boxed", r"\fbox"), 0, start):
                found = (start, position)
    return text[found[0] + 1 : found[1]] if found[1] >= 0 else None


def _said_last(text: str) -> str:
    """The words after "the answer is", unless a number follows later; else the last number."""
    phrases = list(_PHRASE.finditer(text))
    if phrases and not re.search("[0-9]", text[phrases[-1].end() :]):
        return phrases[-1].group(1)
    numbers = _SPOKEN.findall(text)
    return numbers[-1] if numbers else ""


_FONTS = "text|textbf|textit|mathrm|mathbf|mbox|boldsymbol|underline"
_REWRITES = [
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|(?<!\\)\\[!,;:()\[\]]|\\?\$"), ""),
    (re.compile(rf"\\(?:{_FONTS})\s*\{{([^{{}}]*)\}}"), r" \1 "),
    (re.compile(r"(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*C(?![A-Za-z])"), " celsius"),
    (re.compile(r"(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*F(?![A-Za-z])"), " fahrenheit"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"(?<!\\)\\ |~|\s+"), " "),
    (re.compile(r"(?<=[0-9]) (?=[0-9]{3}(?![0-9]))"), ""),  # 1 234
    (re.compile(r"(?<![0-9.,/])([0-9]+) ([0-9]+)/([0-9]+)"), r"\1\\frac{\2}{\3}"),  # 2 1/2
    (re.compile(r"(?<=\w)\*\*(?=\w)"), "^"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])|\u03c0"), r"\\pi "),
    (re.compile(r"(?<![\\A-Za-z])(ln|log|sin|cos|tan)(?=[ (]?[0-9(])"), r"\\\1"),
    (re.compile(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)|\u221a\(?([0-9]+)\)?"), r"\\sqrt{\1\2}"),
]


def _plain(text: str) -> str:
    r"""`text` without typesetting: spacing, $ signs, \text, degrees, bold, a closing full stop."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip(" *`").removesuffix(".").strip(" *`")


def _letters(text: str) -> str:
    """The form in which two texts are compared: no spaces; words in lower case; (C) is C."""
    text = re.sub("(?<![0-9]) | (?![0-9])", "", text)  # 1 8 is not 18
    if re.fullmatch(r"\([A-Z]\)", text):
        return text[1]
    return text.lower() if len(text) > 1 and text.isalpha() else text


@dataclass(frozen=True)
class _Quantity:
    value: Fraction
    percent: bool
    unit: str  # "" when none is written


def _read_number(mine: str) -> _Quantity | None:
    """The number that is written, or that an equation or a sentence ends in."""
    sentence = re.search("[A-Za-z]{2,} [A-Za-z]{2,}", mine)
    bound = re.search(r"\b(?:than|least|most|not) \W?[0-9]", mine)
    return (
        _quantity(mine)
        or _quantity(_right_hand_side(mine))
        or (_quantity(_plain(_said_last(mine))) if sentence and not bound else None)
    )


_NAME_OR_SUM = re.compile(
    r"\\?[A-Za-z][\w\\ ]*(?:\([^()]*\))? ?|[a-z](?: ?\+ ?[a-z])+ ?|"  # m+n, as AIME asks
    r"(?:[-+*/0-9.,()={} ]|\\(?:times|cdot|div|frac))+"
)


def _right_hand_side(text: str) -> str:
    """18 of "x = 18", "m+n = 18", "f(2) = 18", "9 * 2 = 18"; nothing of "2x = 18"; else `text`."""
    left, equals, right = text.rpartition("=")
    return text if not equals else right.strip() if _NAME_OR_SUM.fullmatch(left) else ""


def _quantity(text: str) -> _Quantity | None:
    """Read a number, a fraction, a percentage, each perhaps with a unit; None for anything else."""
    if len(text) > NUMBER_CHARACTERS:
        return None
    if mixed := _MIXED.match(text):
        sign, whole, top, bottom = mixed.groups()
        text = f"{sign}{int(whole) * int(bottom) + int(top)}/{bottom}" + text[mixed.end() :]
    elif fraction := _FRACTION.match(text):
        text = "{}{}/{}".format(*fraction.groups()) + text[fraction.end() :]
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, top, bottom, percent, rest = match.groups()
    unit, magnitude = _unit(rest, touching=not percent)
    if unit is None or (bottom and not Fraction(bottom.replace(",", ""))):
        return None
    value = Fraction(top.replace(",", "")) / Fraction((bottom or "1").replace(",", ""))
    value = value * magnitude * (-1 if sign == "-" else 1)
    is_percent = "%" in percent or unit == "percent"
    return _Quantity(value, is_percent, "" if unit == "percent" else unit)


def _unit(rest: str, touching: bool) -> tuple[str | None, int]:
    """Split what follows a number into (unit, magnitude); the unit is None if it is no unit."""
    words = rest.lower().split()
    magnitude = _MAGNITUDES.get(words[0], 1) if words else 1
    words = words[1:] if magnitude != 1 else words
    unit = " ".join(words).replace(" ^", "^")
    if not unit:
        return "", magnitude
    names = re.findall("[a-z]+", unit)
    shaped = re.fullmatch(r"[a-z]+(?:[ /]+[a-z]+){0,3}(?:\^\{?[23]\}?|[²³])?", unit)
    known = all(name in _UNITS or len(name) >= 3 for name in names)
    attached = touching and magnitude == 1 and (len(unit) < 2 or unit not in _UNITS)
    if not shaped or not known or attached or _NO_UNITS & set(names):
        return None, 1
    unit = re.sub("[a-z]+", lambda name: _SHORT.get(name[0].removesuffix("s"), name[0]), unit)
    return re.sub("(?<=..)(?:es?|s)$", "", unit), magnitude  # boxes, box; eggs, egg


def _same_quantity(mine: _Quantity, gold: _Quantity) -> bool:
    if mine.unit and gold.unit and mine.unit != gold.unit:
        return False
    if mine.percent == gold.percent:
        return _same_value(mine.value, gold.value)
    percent, number = (mine, gold) if mine.percent else (gold, mine)
    is_unit = abs(number.value) > 1 and _same_value(percent.value, number.value)
    return is_unit or _same_value(percent.value / 100, number.value)


def _same_value(a: Fraction, b: Fraction) -> bool:
    if a.denominator == 1 or b.denominator == 1:
        return a == b
    return abs(a - b) <= max(abs(a), abs(b)) / 10**6
