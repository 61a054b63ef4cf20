"""Arithmetic problems made on the spot: for a first run, for tests, and to watch learning happen.

Five levels, from sums of two digits to nested terms. The prompt is as short as it can be, because
prompt tokens dominate the cost of a training step, and its system message is empty, because chat
templates add a long one of their own where there is none.

A problem belongs to the test split when a hash of its sorted characters says so, which it does for
one in four (for 25 of the 100 sums of level 1). That depends on nothing but the problem, and 3 + 4
lies on the same side as 4 + 3.
"""

import hashlib
import itertools
import operator
import random
from collections.abc import Iterator

# Rows where no limit is given; levels with fewer problems (100 and 540) give all of their split.
DEFAULT_ROWS = {"train": 2_000, "test": 200}
MOST_ROWS = 50_000

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def rows(level: str, split: str, seed: int, limit: int | None) -> list[dict]:
    """At most `limit` distinct problems of a level of LEVELS, as {"prompt", "answer"}.

    The same seed gives the same problems, and a larger limit only adds to them. Raises ValueError
    for a limit above MOST_ROWS, which a level may not have.
    """
    wanted = limit or DEFAULT_ROWS[split]
    if wanted > MOST_ROWS:
        raise ValueError(f"{level} gives at most {MOST_ROWS} rows, not {wanted}")
    found = {}
    for text, value in LEVELS[level](random.Random(f"{level}/{seed}")):
        if split_of(text) == split:
            found[text] = value
        if len(found) == wanted:
            break
    return [{"prompt": _prompt(text), "answer": str(value)} for text, value in found.items()]


def split_of(text: str) -> str:
    """The split of a problem, "train" or "test", by its text alone."""
    digest = hashlib.sha256(f"qerl:{''.join(sorted(text))}".encode()).digest()
    return "test" if digest[0] < 64 else "train"


def _prompt(text: str) -> list[dict]:
    return [
        {"role": "system", "content": ""},
        {"role": "user", "content": f"What is {text}?"},
    ]


def _joined(a: int, sign: str, b: int) -> tuple[str, int]:
    return f"{a} {sign} {b}", _OPERATORS[sign](a, b)


def _one_digit_sums(rng: random.Random) -> Iterator[tuple[str, int]]:
    pairs = list(itertools.product(range(10), repeat=2))
    rng.shuffle(pairs)
    for a, b in pairs:
        yield _joined(a, "+", b)


def _up_to_20(rng: random.Random) -> Iterator[tuple[str, int]]:
    problems = list(itertools.product(range(1, 21), "+-*", range(1, 10)))
    rng.shuffle(problems)
    for problem in problems:
        yield _joined(*problem)


def _two_digits(rng: random.Random) -> Iterator[tuple[str, int]]:
    problems = list(itertools.product(range(10, 100), "+-", range(10, 100)))
    rng.shuffle(problems)
    for problem in problems:
        yield _joined(*problem)


def _products_and_three_sums(rng: random.Random) -> Iterator[tuple[str, int]]:
    while True:
        a, b, c = (rng.randint(10, 99) for _ in range(3))
        if rng.random() < 0.5:
            yield _joined(a, "*", rng.randint(2, 9))
        else:
            yield f"{a} + {b} + {c}", a + b + c


def _nested(rng: random.Random) -> Iterator[tuple[str, int]]:
    while True:
        text, value = _term(rng, depth=2)
        yield text[1:-1], value  # without the outermost brackets


def _term(rng: random.Random, depth: int) -> tuple[str, int]:
    """A bracketed term whose left side is `depth` - 1 deep and whose right side may be a number."""
    if depth == 0:
        number = rng.randint(1, 20)
        return str(number), number
    left, a = _term(rng, depth - 1)
    right, b = _term(rng, rng.choice((0, depth - 1)))
    sign = rng.choice("+-*")
    return f"({left} {sign} {right})", _OPERATORS[sign](a, b)


LEVELS = {
    "arithmetic": _one_digit_sums,
    "arithmetic-mixed": _up_to_20,
    "arithmetic-2": _two_digits,
    "arithmetic-3": _products_and_three_sums,
    "arithmetic-4": _nested,
}
