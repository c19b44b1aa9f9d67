"""Compare two experiments: python workflow/scripts/difference.py results/before results/after.

It prints the keys whose values differ, then a line for each number of each setting that both have:
its mean and standard deviation over the runs of each, and the difference with its 95 % interval. If
both have the same seeds, runs with the same seed are compared with each other. With folds there is
one value for each, the mean over its seeds, and the same folds are compared.

Of two runs of the classifier, results/before/run results/after/run, it prints a line: how many test
images only one of them has right, and the exact p-value of McNemar's test.
"""

import argparse
import math
import sys
from pathlib import Path
from statistics import mean, stdev

# Python looks there by itself, unless a site has set PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from manynodes.base.errors import one_line, told_in_one_line
from manynodes.reporting import difference
from manynodes.reporting.difference import Difference
from manynodes.reporting.metrics import is_share, percent
from manynodes.reporting.results import VIEWS, shortened

MOST_CHARACTERS = 400
POINTS = " points"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="results of an experiment, or of a run")
    parser.add_argument("after", type=Path, help="results of the one to compare with it")
    args = parser.parse_args()
    with told_in_one_line("difference"):
        if all((folder / "run.json").exists() for folder in (args.before, args.after)):
            compare_images(args.before, args.after)
            return
        before, after = difference.read(args.before, args.after)
        for warning in difference.doubts(before, after):
            print(f"warning: {warning}", file=sys.stderr)
        found = difference.compare(before, after)
        keys = difference.settings(before.experiment, after.experiment)
        code = ["the code"] if difference.changed_code(before, after) else []
        tell(f"different: {'; '.join(keys + code) or 'no key of the configuration'}")
        for each in found:
            tell(line(each))
        if alone := difference.unpaired(before, after):
            tell(f"only in one of them: {shortened(alone)}")


def compare_images(before: Path, after: Path) -> None:
    """Compare two runs image by image."""
    found = difference.discordance(before, after)
    if found.views[0] != found.views[1]:
        views = " and ".join(VIEWS[each] for each in found.views)
        print(f"warning: they are of {views} of the test images", file=sys.stderr)
    tell(
        f"of {found.n:,} test images, b = {found.before:,} are right only before and c = "
        f"{found.after:,} only after; McNemar's test (exact): p = {found.p:.3g}"
    )


def tell(text: str) -> None:
    print(one_line(text, MOST_CHARACTERS))


def line(each: Difference) -> str:
    """A difference in words."""
    share = is_share(each.name, (*each.before, *each.after))
    head = f"{each.setting}: {each.name}" if each.setting else each.name
    text = (
        f"{head} {spread(each.before, share)} -> {spread(each.after, share)}: "
        f"{change(each.difference, share)}"
    )
    if math.isnan(each.low):
        return f"{text} (too few runs for an interval)"
    how = f"paired by {each.of}" if each.paired else "not paired"
    low, high = (change(value, share) for value in (each.low, each.high))
    return f"{text} (95 %: {low.removesuffix(POINTS)} to {high}, {how})"


def spread(values: tuple[float, ...], share: bool) -> str:
    deviation = f"sd {number(stdev(values), share)}, " if len(values) > 1 else ""
    return f"{number(mean(values), share)} ({deviation}n = {len(values)})"


def number(value: float, share: bool) -> str:
    """A share in per cent, any other number with five digits."""
    return percent(value) if share else f"{value:.5g}"


def change(value: float, share: bool) -> str:
    """A difference; of two shares in percentage points, not relative to one of them."""
    return f"{100 * value:+.2f}{POINTS}" if share else f"{value:+.5g}"


if __name__ == "__main__":
    main()
