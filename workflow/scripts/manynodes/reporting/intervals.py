"""Confidence intervals, from scipy.special: scipy.stats takes longer to import than pandas."""

import math

from scipy.special import ndtri, stdtrit

LEVEL = 0.95


def half_width(deviation: float, n: int) -> float:
    """Of Student's interval of the mean of n >= 2 numbers with this standard deviation."""
    return float(deviation / math.sqrt(n) * stdtrit(n - 1, (1 + LEVEL) / 2))


def of_share(right: int, n: int) -> tuple[float, float]:
    """Wilson's interval of a share, `right` of n.

    Source: R. G. Newcombe, "Two-sided confidence intervals for the single proportion", 1998.
    """
    share, z = right / n, float(ndtri(0.5 + 0.5 * LEVEL))
    divisor = 2 * (n + z**2)
    centre = (2 * n * share + z**2) / divisor
    delta = z / divisor * math.sqrt(4 * n * share * (1 - share) + z**2)
    return 0.0 if right == 0 else centre - delta, 1.0 if right == n else centre + delta
