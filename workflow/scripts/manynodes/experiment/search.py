"""Points of a search, drawn once from a seed: they become runs like any others."""

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manynodes.base.errors import Refusal, shown
from manynodes.experiment.keys import MOST_RUNS, Keys, kinds
from manynodes.experiment.paths import with_paths

NUMBER = r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*"
RANGE = re.compile(rf"(log|uniform)\({NUMBER},{NUMBER}\)")
SHAPE = "log(1e-3, 1), uniform(0, 0.9) or a list of values"
OWN = ("runs", "seed")
# Points that are drawn for each wanted one, as rounding and choices make some of them equal.
TRIES = 16


def with_search(config: Mapping[str, Any], folders: Sequence[Path], keys: Keys) -> dict[str, Any]:
    """The configuration with the points of `search` as its `runs`.

    The first points stay the same when more are asked for.

    Args:
        folders, keys: as for `with_paths`.

    Source: scrambled Sobol points of scipy.stats.qmc; I. M. Sobol, "The distribution of points in
        a cube and the accurate evaluation of integrals", 1967.

    Raises:
        Refusal: naming what cannot be drawn.
    """
    given = config.get("search")
    if not given:
        return dict(config)
    if not isinstance(given, Mapping):
        raise Refusal(f"config: search: {shown(given)} is no mapping; give runs and {SHAPE}")
    if config.get("runs"):
        raise Refusal("config: search: runs is given too; keep one of them")
    keys.refuse_no_axes("search", given.keys() - {*OWN}, config)
    parameters = config.get("parameters")
    values = dict(config) | (parameters if isinstance(parameters, dict) else {})
    for key in given:
        if key not in OWN and keys.is_axis(key, values.get(key)):
            raise Refusal(f"config: search: {key} is an axis too; keep one of the two")
    count, seed = (whole(given, name, least) for name, least in zip(OWN, (1, 0), strict=True))
    drawn = {key: scale(key, value, keys) for key, value in given.items() if key not in OWN}
    if not drawn:
        raise Refusal(f"config: search: no key to search; give one or more as {SHAPE}")
    # Only here: it takes a second to import.
    import numpy as np
    from scipy.stats import qmc

    points = qmc.Sobol(len(drawn), rng=np.random.default_rng(seed))
    found: dict[str, dict[str, Any]] = {}
    for row in points.random_base2(math.ceil(math.log2(count * TRIES))).tolist():
        point = {key: of(part) for (key, of), part in zip(drawn.items(), row, strict=True)}
        found.setdefault(repr(point), point)
        if len(found) == count:
            rows = [with_paths(row, folders, keys) for row in found.values()]
            return {key: value for key, value in config.items() if key != "search"} | {"runs": rows}
    raise Refusal(
        f"config: search: runs: {count} is more than the {len(found)} different points there are; "
        "ask for fewer"
    )


def whole(given: Mapping[str, Any], name: str, least: int) -> int:
    """A whole number of the search's own."""
    value = given.get(name, 0)
    if isinstance(value, str) and value.isdecimal():  # from a command line
        value = int(value)
    if type(value) is not int or not least <= value <= MOST_RUNS:
        raise Refusal(
            f"config: search: {name}: {shown(value)} is not a whole number from {least} to "
            f"{MOST_RUNS:,}"
        )
    return value


def scale(key: Any, value: Any, keys: Keys) -> Callable[[float], Any]:
    """From a share of one to a value of a key.

    Raises:
        Refusal: the key is unknown, or its value is no range and no list.
    """
    if keys.declared and key not in keys.axes:
        near = difflib.get_close_matches(str(key), keys.axes, n=1)
        hint = f"did you mean {near[0]}?" if near else "give one that can be an axis"
        raise Refusal(f"config: search: {shown(key)} is no key of a run; {hint}")
    if isinstance(value, list) and value:
        return lambda part: value[min(int(part * len(value)), len(value) - 1)]
    form = RANGE.fullmatch(value.strip()) if isinstance(value, str) else None
    if not form:
        raise Refusal(f"config: search: {key}: {shown(value)} is not {SHAPE}")
    try:
        low, high = float(form[2]), float(form[3])
    except ValueError:
        raise Refusal(f"config: search: {key}: {shown(value)} has no two numbers") from None
    logarithmic = form[1] == "log"
    if not low < high or (logarithmic and low <= 0):
        least = " and above 0" if logarithmic else ""
        raise Refusal(f"config: search: {key}: {shown(value)} must have a lower end first{least}")
    spec = keys.axes.get(key, {})
    types = kinds(spec)
    integer = "integer" in types and "number" not in types
    if integer and not (low.is_integer() and high.is_integer()):
        raise Refusal(
            f"config: search: {key}: {shown(value)} must have whole ends, as {key} is whole"
        )
    excluded = {spec.get("exclusiveMinimum"), spec.get("exclusiveMaximum")}
    # Three digits, for the names of folders; more for ends that are close to each other.
    close = max(abs(low), abs(high)) / (high - low)
    digits = 3 + (math.ceil(math.log10(close)) - 1 if close > 100 else 0)

    def of(part: float) -> float | int:
        if integer and not logarithmic:
            return math.floor(low + (high + 1 - low) * part)
        exact = low * (high / low) ** part if logarithmic else low + (high - low) * part
        found = min(max(float(f"{exact:.{digits}g}"), low), high)
        # Rounding may come to an end that is none of the key's values.
        found = exact if found in excluded else found
        return round(found) if integer else found

    return of
