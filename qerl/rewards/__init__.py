"""Rewards: text in, verdict or float out.

A verdict is a function `correct(completion, answer) -> bool`. Training and evaluation use the same
one; `as_reward` gives it the signature that TRL calls, and STATED names the function that reads
the answer a completion states, so that samples can vote. This package reads text only: it knows no
tokenizer, no data set and no tensor. math.py judges numbers and formulas, code.py programs;
math_worker.py and sandbox.py run as child processes.
"""

from collections.abc import Callable

from .code import code_correct
from .math import (
    final_answer,
    last_integer_correct,
    last_number,
    math_correct,
    says_something,
)

__all__ = [
    "STATED",
    "as_reward",
    "code_correct",
    "final_answer",
    "format_score",
    "last_integer_correct",
    "last_number",
    "math_correct",
    "says_something",
    "soft_overlong_punishment",
    "text_of",
]

# Verdict -> the answer that it reads in a completion, "" when there is none. Programs have no form
# in which two of them could be compared.
STATED = {math_correct: final_answer, last_integer_correct: last_number}

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def text_of(completion: str | list[dict]) -> str:
    """The text of a completion, which TRL passes as a string or as chat messages (the last one)."""
    if isinstance(completion, str):
        return completion
    return completion[-1]["content"]


def as_reward(verdict: Callable[[str, str], bool | float], name: str) -> Callable:
    """Turn `verdict(completion, answer)` into a TRL reward function called `name`.

    The result takes `completions` (B strings or B lists of chat messages) and `answer` (B strings,
    the column of that name) and returns B floats. TRL logs it as `rewards/<name>`.
    """

    def reward(completions: list, answer: list[str], **kwargs) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [float(verdict(text_of(completion), one)) for completion, one in pairs]

    reward.__name__ = name
    return reward


def format_score(completion: str) -> float:
    """How well a completion keeps to <think>..</think><answer>..</answer>, from 0 to 1.

    1 when it is exactly that, with something in both; otherwise an eighth for each of the four
    tags that occurs exactly once, so that there is a slope to climb. Only for data sets whose
    prompt asks for the tags. It says nothing about the answer.
    """
    once = [tag for tag in TAGS if completion.count(tag) == 1]
    if len(once) == 4:
        before, thought, between, answer, after = _split_at_tags(completion)
        if not (before + between + after).strip() and thought.strip() and answer.strip():
            return 1.0
    return len(once) / 8


def _split_at_tags(completion: str) -> list[str]:
    """The five stretches of text around the four tags; two empty inner ones when out of order."""
    cuts = [completion.index(tag) for tag in TAGS]
    if cuts != sorted(cuts):
        return [completion, "", "", "", ""]
    parts, start = [], 0
    for tag, cut in zip(TAGS, cuts, strict=True):
        parts.append(completion[start:cut])
        start = cut + len(tag)
    return [*parts, completion[start:]]


def soft_overlong_punishment(length: int, max_length: int, buffer: int) -> float:
    """The "soft overlong punishment" of DAPO (arXiv 2503.14476), from 0 to -1.

    `length`, `max_length` and `buffer` are tokens of the completion. 0 up to max_length - buffer,
    then a straight line to -1 at max_length, and -1 beyond.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"the overlong buffer is {buffer} tokens; it must be from 1 to the maximum completion "
            f"length, {max_length}"
        )
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))
