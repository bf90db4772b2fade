# SPDX-License-Identifier: MIT
"""Statistics of measurements: paired where two configurations saw the same tokens or the same rounds.

Standard errors are those of a mean of n values, s / sqrt(n) with s from n - 1 degrees of freedom. With few
values 2 of them are less than 95 % of certainty (4 values: 86 %, 8: 91 %, 16: 94 %, from Student's distribution).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Optional, Sequence, Tuple


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences.

    Attributes:
        mean: of the differences.
        se: its standard error.
        n: how many pairs.
    """

    mean: float
    se: float
    n: int

    @property
    def beyond(self) -> bool:
        """True if it is more than 2 standard errors away from 0."""
        return abs(self.mean) > 2 * self.se


def difference(a: Optional[Sequence[float]], b: Optional[Sequence[float]]) -> Optional[Difference]:
    """``a`` minus ``b``, value by value; the paired t statistic is ``mean / se``.

    None if one is missing, if their numbers differ, or if there is only one pair.
    """
    if not a or not b or len(a) != len(b) or len(a) < 2:
        return None
    d = [x - y for x, y in zip(a, b)]
    return Difference(statistics.fmean(d), statistics.stdev(d) / math.sqrt(len(d)), len(d))


def ppl_change(nll: Optional[Sequence[float]], base: Optional[Sequence[float]]) -> Optional[Tuple[float, float]]:
    """Change of perplexity and its standard error, both as a share of the base's, paired by chunk.

    With d the difference of a chunk's mean negative log-likelihood, PPL / PPL_base = exp(mean d); to first order
    its standard error is exp(mean d) * SE(mean d). How hard a chunk is cancels in d, which is why this error is
    far smaller than that of either perplexity.

    Args:
        nll: mean negative log-likelihood of each chunk, in nats.
        base: the same of what is compared with, over the same chunks.
    """
    d = difference(nll, base)
    return None if d is None else (math.expm1(d.mean), math.exp(d.mean) * d.se)


def median_interval(values: Sequence[float]) -> Tuple[float, float, float]:
    """An interval for the median that supposes nothing of the distribution, and how sure it is.

    The k-th smallest and the k-th largest of n values enclose the median unless fewer than k values fall on one
    side of it; each falls there with probability 1/2, so the certainty is 1 - 2 * P(Binomial(n, 1/2) < k). The
    largest k with at least 90 % is taken: the 1st for 5 to 7 values, the 2nd from 8 on. Fewer than 5 give less.
    """
    x = sorted(values)
    n = len(x)

    def certainty(k: int) -> float:
        return 1.0 - 2 * sum(math.comb(n, i) for i in range(k)) / float(2**n)

    k = max([k for k in range(1, n // 2 + 1) if certainty(k) >= 0.9], default=1)
    return x[k - 1], x[n - k], max(0.0, certainty(k))


def ratio(samples: Sequence[float], base: Sequence[float]) -> Optional[Tuple[float, float, float]]:
    """Median of the ratios within rounds, and an interval for it by :func:`median_interval`.

    Args:
        samples: one a round.
        base: those of what is compared with, of the same rounds in the same order.

    Returns:
        None if there are no samples, or not as many as of the base.
    """
    if not samples or len(samples) != len(base):
        return None
    ratios = [a / b for a, b in zip(samples, base)]
    low, high, _ = median_interval(ratios)
    return statistics.median(ratios), low, high


def quartiles(values: Sequence[float]) -> Tuple[float, float]:
    """Lower and upper quartile, between values linearly (NumPy's default); of one value that value twice."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def wilson(found: int, n: int, z: float = 1.959963984540054) -> Tuple[float, float]:
    """Interval for a share of which ``found`` of ``n`` were seen (Wilson 1927); 95 % by default.

    Unlike the share +- 2 standard errors it stays within 0 and 1 and has a width where all or none were found.

    Raises:
        ValueError: n is no positive number, or found lies outside 0 to n.
    """
    if n < 1 or not 0 <= found <= n:
        raise ValueError(f"{found} of {n} is no share")
    p = found / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # exact where all or none were found; rounding would leave 1e-17
    return (0.0 if found == 0 else middle - half), (1.0 if found == n else middle + half)
