"""Expressions for the numbers in the lines of a program's log: `metrics: {log: …}`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from manynodes.base.errors import Refusal, shown

# Columns that count, in the order in which they are looked for in a program's own tables; if there
# is none, the first one counts.
COUNTS = ("step", "global_step", "iter", "iteration", "epoch")


def patterns_of(given: Mapping[str, Any]) -> list[str]:
    return [given["log"]] if isinstance(given["log"], str) else list(given["log"])


def columns_of(patterns: Sequence[str]) -> list[str]:
    """The names of their groups; the one that counts comes first."""
    names = dict.fromkeys(name for each in patterns for name in re.compile(each).groupindex)
    count = next(filter(None, map(count_of, patterns)), None)
    return sorted(names, key=lambda name: name != count)


def count_of(pattern: str) -> str | None:
    """The first group that counts; None if none does, and its lines belong to the newest count."""
    return next((name for name in re.compile(pattern).groupindex if name in COUNTS), None)


def refuse_bad_patterns(patterns: Sequence[str]) -> None:
    """Refuse expressions that find no numbers, or do not say which row the numbers belong to.

    Lines cannot be numbered instead: a program that starts again may repeat some or leave some out.

    Raises:
        Refusal: naming the expression.
    """
    for text in patterns:
        try:
            groups = re.compile(text).groupindex
        except re.error as error:
            raise Refusal(f"config: metrics.log: {shown(text)}: {error}; correct it") from None
        if not groups:
            raise Refusal(
                f"config: metrics.log: {shown(text)} has no named group; name each number, such as "
                "(?P<loss>\\S+)"
            )
    counts = sorted(set(filter(None, map(count_of, patterns))))
    if not counts:
        raise Refusal(
            f"config: metrics.log: {shown(patterns[0])} has no group that counts; name one step, "
            "iter or epoch, such as (?P<epoch>\\d+), or let the program write metrics.csv"
        )
    if len(counts) > 1:
        raise Refusal(
            f"config: metrics.log: one expression counts {counts[0]}, another {counts[1]}; let the "
            "first of these names be the same in all of them"
        )
    if len(columns_of(patterns)) < 2:
        raise Refusal(
            f"config: metrics.log: {shown(patterns[0])} has only one named group; name each number "
            "too, such as (?P<loss>\\S+)"
        )
