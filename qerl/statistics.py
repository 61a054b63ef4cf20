"""What k samples a question say about a model, and how sure that is: plain numbers, no text.

A metric has one value a question: the mean of its verdicts, its pass@k, what its majority is worth.
Questions are independent draws, the samples of one are not. So an error is that of the mean over
questions, clustered by question, and two models are compared by the difference at each question
(Miller 2024, arXiv 2411.00640). This is no test of hypotheses, and nothing here knows what
an answer is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

NORMAL_95 = 1.96  # standard errors to either side of a 95% interval, for many questions


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean over questions and its standard error; None for one question, which has no spread.

    values: one a question. Raises ValueError when there is none.
    """
    if not values:
        raise ValueError("there is no question: a mean needs at least one")
    count, mean = len(values), math.fsum(values) / len(values)
    if count == 1:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)


def interval_95(mean: float, error: float | None) -> tuple[float, float] | None:
    """Mean +- 1.96 standard errors (normal; for 30 questions Student's t would be 4% wider)."""
    return None if error is None else (mean - NORMAL_95 * error, mean + NORMAL_95 * error)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that k of the `samples`, drawn without replacement, hold a right one.

    1 - C(n - c, k) / C(n, k), which estimates pass@k without bias (Chen et al. 2021, arXiv
    2107.03374, equation 1). Raises ValueError unless 0 <= right <= samples and 1 <= k <= samples.
    """
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {right} right samples out of {samples}: k is 1 to {samples}")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def grouped(items: Sequence[Hashable], same: Callable) -> list[list]:
    """Items in groups: each joins the first group to whose first member it is the `same`."""
    groups = []
    for item in items:
        home = next((group for group in groups if same(item, group[0])), None)
        if home is None:
            groups.append([item])
        else:
            home.append(item)
    return groups


def majority(votes: Sequence[Sequence[bool]]) -> float:
    """The chance that the answer with most votes is right, one of those tied drawn evenly.

    votes: for each answer that was given, the verdict on each sample that gave it; should they
    differ within an answer, their mean counts. 0 when nobody gave an answer.
    """
    most = max(map(len, votes), default=0)
    tied = [sum(verdicts) / most for verdicts in votes if len(verdicts) == most]
    return sum(tied) / len(tied) if tied else 0.0
