"""pass@k, majorities and errors against their definitions: small cases walked whole."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy
import pytest

from qerl import statistics


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_pass_at_k_is_the_share_of_draws_of_k_with_a_right_one(samples):
    for verdicts in itertools.product([False, True], repeat=samples):
        for k in range(1, samples + 1):
            draws = [any(draw) for draw in itertools.combinations(verdicts, k)]
            found = statistics.pass_at_k(samples, sum(verdicts), k)
            assert found == pytest.approx(sum(draws) / len(draws))


def test_pass_at_k_has_no_bias():
    """Over samples of a question that is right with chance p, its mean is 1 - (1 - p)^k."""
    for p, n in itertools.product((0.1, 0.5, 0.9), (2, 3, 4)):
        for k in range(1, n + 1):
            mean = 0.0
            for verdicts in itertools.product([0, 1], repeat=n):
                chance = p ** sum(verdicts) * (1 - p) ** (n - sum(verdicts))
                mean += chance * statistics.pass_at_k(n, sum(verdicts), k)
            assert mean == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_an_impossible_k_or_count_is_refused(samples, right, k):
    with pytest.raises(ValueError, match="k is 1 to 4"):
        statistics.pass_at_k(samples, right, k)


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_a_majority_is_worth_its_chance_of_being_right_when_ties_are_drawn(samples):
    """Every vote of up to four samples on four answers, of which "a" is right."""
    for answers in itertools.product("abcd", repeat=samples):
        counts = Counter(answers)
        winners = [answer for answer in counts if counts[answer] == max(counts.values())]
        groups = statistics.grouped(answers, lambda one, other: one == other)
        votes = [[answer == "a" for answer in group] for group in groups]
        assert statistics.majority(votes) == pytest.approx(("a" in winners) / len(winners))


def test_a_majority_of_nobody_is_worth_nothing():
    assert statistics.majority([]) == 0.0


def test_verdicts_that_differ_within_an_answer_count_by_their_mean():
    assert statistics.majority([[True, False], [False]]) == 0.5


def test_an_item_joins_the_first_group_that_is_the_same():
    assert statistics.grouped([1, 11, 2, 21, 5], lambda a, b: a % 10 == b % 10) == [
        [1, 11, 21],
        [2],
        [5],
    ]


def test_the_clustered_error_is_that_of_a_bootstrap_over_questions():
    """40 questions x 8 samples of unlike difficulty: draw whole questions, look at the spread."""
    random.seed(0)
    chances = [random.random() ** 2 for _ in range(40)]
    verdicts = numpy.array([[random.random() < p for _ in range(8)] for p in chances], float)
    values = verdicts.mean(axis=1)
    draws = numpy.random.default_rng(0).integers(0, 40, size=(20_000, 40))
    bootstrap = values[draws].mean(axis=1).std()
    mean, error = statistics.mean_and_error(values.tolist())
    assert mean == pytest.approx(verdicts.mean())
    assert error == pytest.approx(bootstrap, rel=0.03)
    as_if_independent = verdicts.std() / verdicts.size**0.5
    assert error > 1.5 * as_if_independent  # what an error that is not clustered would claim


def test_the_interval_covers_the_truth_19_times_in_20():
    generator = numpy.random.default_rng(0)
    covered = 0
    for values in generator.binomial(4, 0.3, size=(2_000, 100)) / 4:
        low, high = statistics.interval_95(*statistics.mean_and_error(values.tolist()))
        covered += low <= 0.3 <= high
    assert covered / 2_000 == pytest.approx(0.95, abs=0.015)


def test_one_question_has_no_spread_and_none_has_no_mean():
    assert statistics.mean_and_error([0.25]) == (0.25, None)
    assert statistics.interval_95(0.25, None) is None
    with pytest.raises(ValueError, match="no question"):
        statistics.mean_and_error([])
