# SPDX-License-Identifier: MIT
"""Statistics against scipy, on known data and on random ones."""

from __future__ import annotations

import math
import random
from typing import Any, List

import numpy as np
import pytest
from scipy import stats as reference

from kvsplit import stats

# Negative log-likelihoods of six chunks: chunks differ by far more than the two caches do.
BASE = [2.889, 3.412, 2.655, 3.101, 3.730, 2.998]
NLL = [2.893, 3.415, 2.661, 3.104, 3.741, 3.001]


def _random(seed: int, n: int, spread: float = 1.0) -> List[float]:
    rng = random.Random(seed)
    return [rng.gauss(3, spread) for _ in range(n)]


@pytest.mark.parametrize("n", [2, 3, 8, 40])
def test_a_difference_is_that_of_the_paired_t_test(n: int) -> None:
    a, b = _random(n, n), _random(n + 100, n)
    d = stats.difference(a, b)
    assert d is not None and d.n == n
    t = reference.ttest_rel(a, b).statistic
    # double precision, some twenty operations
    assert d.mean / d.se == pytest.approx(t, rel=1e-12)
    assert d.se == pytest.approx(reference.sem(np.subtract(a, b)), rel=1e-12)
    assert d.beyond == (abs(t) > 2)


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [2.0]), ([1.0, 2.0], [1.0]), (None, [1.0, 2.0])])
def test_what_is_not_paired_has_no_difference(a: Any, b: Any) -> None:
    assert stats.difference(a, b) is None and stats.ppl_change(a, b) is None


def test_a_paired_change_is_known_far_better_than_a_perplexity() -> None:
    found = stats.ppl_change(NLL, BASE)
    assert found is not None
    change, se = found
    # by hand: d = 0.004 0.003 0.006 0.003 0.011 0.003, mean 0.005, s = 0.00316228
    assert change == pytest.approx(math.exp(0.005) - 1, rel=1e-9)
    assert se == pytest.approx(math.exp(0.005) * 0.0031622777 / math.sqrt(6), rel=1e-6)
    ppl = math.exp(np.mean(NLL))
    alone = ppl * reference.sem(NLL)
    assert se * ppl < alone / 50
    # scipy's own interval of the ratio of geometric means, by its t distribution, has the same half-width
    t = reference.ttest_rel(NLL, BASE).confidence_interval(0.95)
    half = (t.high - t.low) / 2 / reference.t.ppf(0.975, 5)
    assert se == pytest.approx(math.exp(0.005) * half, rel=1e-9)


def test_equal_chunks_change_nothing() -> None:
    assert stats.ppl_change(BASE, BASE) == (0, 0)


def test_the_error_of_a_change_covers_the_truth() -> None:
    """Over 2000 draws the true change lies within 2 SE as often as Student's distribution says."""
    rng = np.random.default_rng(1)
    n, truth, hits, draws = 8, 0.01, 0, 2000
    for _ in range(draws):
        base = rng.normal(3, 0.5, n)
        found = stats.ppl_change(list(base + math.log1p(truth) + rng.normal(0, 0.004, n)), list(base))
        assert found is not None
        hits += abs(found[0] - truth) < 2 * found[1]
    expected = 1 - 2 * reference.t.sf(2, n - 1)
    # 4 standard deviations of a binomial share
    assert hits / draws == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / draws))


@pytest.mark.parametrize(("found", "n"), [(0, 1), (0, 15), (1, 15), (7, 15), (14, 15), (15, 15), (500, 1000)])
def test_shares_have_the_interval_of_wilson(found: int, n: int) -> None:
    low, high = stats.wilson(found, n)
    want = reference.binomtest(found, n).proportion_ci(0.95, method="wilson")
    # scipy's quantile of the normal distribution is the same to 1e-15
    assert (low, high) == pytest.approx((want.low, want.high), abs=1e-12)


@pytest.mark.parametrize(("found", "n"), [(1, 0), (-1, 3), (4, 3)])
def test_what_is_no_share_is_refused(found: int, n: int) -> None:
    with pytest.raises(ValueError, match="no share"):
        stats.wilson(found, n)


@pytest.mark.parametrize("n", range(1, 30))
def test_the_interval_of_a_median_is_as_sure_as_it_says(n: int) -> None:
    values = [float(v) for v in range(n, 0, -1)]
    low, high, sure = stats.median_interval(values)
    k = int(low)  # the k-th smallest
    assert high == n + 1 - k
    assert sure == pytest.approx(max(0.0, 1 - 2 * reference.binom.cdf(k - 1, n, 0.5)), abs=1e-12)
    if n >= 5:
        assert sure >= 0.9 and 1 - 2 * reference.binom.cdf(k, n, 0.5) < 0.9


def test_ratios_are_taken_within_rounds() -> None:
    base = [10.0, 20.0, 5.0, 8.0, 11.0]  # the machine's speed swings; the ratio doesn't
    assert stats.ratio([2 * b for b in base], base) == (2, 2, 2)
    middle, low, high = stats.ratio([11.0, 30.0, 10.0, 8.0, 22.0], base)  # type: ignore[misc]
    assert (middle, low, high) == (1.5, 1.0, 2.0)
    assert stats.ratio([], []) is None and stats.ratio([1.0], base) is None


@pytest.mark.parametrize("n", [1, 2, 3, 7, 20])
def test_quartiles_are_numpys(n: int) -> None:
    x = _random(n, n)
    assert stats.quartiles(x) == pytest.approx(tuple(np.percentile(x, [25, 75])), rel=1e-12)
