"""Two experiments compared: what was configured differently, and what came of it. And two runs,
image by image.
"""

import json
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from scipy import stats

from manynodes.base.errors import Refusal
from manynodes.base.reading import read_json
from manynodes.experiment.config import REPEATS, Experiment
from manynodes.experiment.installed import other_packages, packages_of
from manynodes.reporting import predictions, scaling
from manynodes.reporting.intervals import LEVEL
from manynodes.reporting.measures import ORIGINS, Of, columns_of, read_measured
from manynodes.reporting.predictions import Predictions
from manynodes.reporting.progress import read_record
from manynodes.reporting.results import read_finished, same, shortened
from manynodes.reporting.sums import PUT_BACK
from manynodes.reporting.tables import refuse_mixture, value_words

# Keys that name files.
NO_SETTING = ("experiment", "runs")
ENVIRONMENT = "environment.json"  # of a run of a program, all of its packages
ONE_VIEW = "accuracy, one view"
# By the origin of a number.
WHERE = {"result": "its result", "evaluated": "its evaluation", "newest": "its last row"}
# By seed and position among the runs with that seed.
Runs = dict[tuple[Any, int], dict[str, float]]


@dataclass(frozen=True)
class Setting:
    """What the runs of a setting have in common.

    Attributes:
        key: the values of the axes that both experiments have.
        alone: those of the others, in words.
        words: those of the common ones, as one of the two has written them.
    """

    key: tuple[Any, ...]
    alone: str
    words: str = field(compare=False)


@dataclass(frozen=True)
class Results:
    """The finished runs of an experiment.

    Attributes:
        numbers: of each finished run, by its name.
        data: of each of them, SHA-256 of the data and of the files on which it was trained.
        views: of the accuracies; empty for a program of the user's.
        versions: of Python and its packages, by name; several if the runs differ.
        complete: whether these are all of their packages, and not those alone that run.json has.
        computed_in: what `precision: auto` came to.
        code: SHA-256 of the code that trained, by the classifier's network; by "" of a program.
        elsewhere: the origin of numbers by their names in its own summary, which are compared with
            those of another origin, or under another name.
    """

    experiment: Experiment
    numbers: dict[str, dict[str, float]]
    data: Mapping[str, tuple[str | None, ...]]
    views: frozenset[str]
    versions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    computed_in: frozenset[str] = frozenset()
    code: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True
    elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """A number of one setting in both experiments.

    Attributes:
        setting: the values of the axes that both have, in words; empty if there are none.
        before, after: its values, one per run.
        difference: of the means, after less before.
        low, high: of the interval at LEVEL; NaN if there are too few runs.
        paired: whether runs with the same seed, or the same fold, were compared with each other.
        of: what there is a value of, `seed`, or with folds, whose seeds are averaged, `fold`.
    """

    setting: str
    name: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    difference: float
    low: float
    high: float
    paired: bool
    of: str = "seed"


def read(*folders: Path) -> list[Results]:
    """The results of one experiment, or of two that are compared.

    Args:
        folders: results/<experiment> of each.

    Raises:
        Refusal: there is no experiment, no run has been finished, a file is damaged, or runs are
            of different code or data.
    """
    records = [read_record(folder) for folder in folders]
    found = [of_runs(*each) for each in zip(records, folders, strict=True)]
    written = [
        dict.fromkeys(of for numbers, _ in runs.values() for of in numbers if of[0])
        for runs in found
    ]
    meant = [
        {of: compared_as(of, own, other) for of in own}
        for own, other in zip(written, written[::-1], strict=True)
    ]
    axes = [axis for record in records for axis in record.axes]
    columns = columns_of(axes, [each for same in meant for each in same.values()])
    return [results_of(*each, columns) for each in zip(records, folders, found, meant, strict=True)]


def compared_as(of: Of, own: Collection[Of], other: Collection[Of]) -> list[Of]:
    """The origins as which a number is compared. The first ones of a name in two experiments are
    compared with each other unless both have numbers of one origin; those of last rows, which stand
    in for a result, are compared with results, too.

    Args:
        own, other: all numbers of its experiment, and of the other.
    """
    mine, its = ([each for each in ORIGINS if (each, of[1]) in found] for found in (own, other))
    apart = ["newest"] in (mine, its) or not {*mine} & {*its}
    if not its or not apart or of[0] != mine[0]:
        return [of]
    first = min(mine[0], its[0], key=ORIGINS.index), of[1]
    return [first, *[of] * (of != first and of in other)]


def results_of(
    experiment: Experiment,
    folder: Path,
    runs: Mapping[str, tuple[Mapping[Of, float], dict[str, Any]]],
    meant: Mapping[Of, Sequence[Of]],
    columns: Mapping[Of, str],
) -> Results:
    """The results of an experiment under the names that they are compared by.

    Args:
        runs: of `of_runs`.
        meant: as which each number is compared that has no fixed name.
        columns: the names of these.
    """
    numbers = {
        name: {
            columns.get(as_of, of[1]): value
            for of, value in found.items()
            for as_of in meant.get(of, [of])
            if math.isfinite(value)
        }
        for name, (found, _) in runs.items()
    }
    abouts = {name: about for name, (_, about) in runs.items()}
    views = frozenset(about["views"] for about in abouts.values() if "views" in about)
    versions: dict[str, tuple[str, ...]] = {}
    for name, about in abouts.items():
        for package, version in packages(folder / name, about).items():
            versions[package] = tuple(sorted({*versions.get(package, ()), version}))
    if not numbers:
        raise Refusal(f"{folder} has no finished run; run snakemake first")
    refuse_mixture(abouts)
    data = {
        name: (about["data_sha256"], about.get("files_sha256")) for name, about in abouts.items()
    }
    computed_in = frozenset(
        scaling.computed_in(run, about)
        for name, about in abouts.items()
        if experiment.built_in and (run := experiment.runs[name]).precision == "auto"
    )
    code = {
        str(about["config"].get("model", "")): about[
            "code_sha256" if experiment.built_in else "sources_sha256"
        ]
        for about in abouts.values()
    }
    complete = any((folder / name / ENVIRONMENT).exists() for name in numbers)
    elsewhere = {
        name: of[0]
        for of, name in columns_of(experiment.axes, [meant]).items()
        if meant[of] != [of] or columns[of] != name
    }
    return Results(
        experiment, numbers, data, views, versions, computed_in, code, complete, elsewhere
    )


def packages(run: Path, about: Mapping[str, Any]) -> dict[str, str]:
    """The versions of Python and of all packages that a run has had, as far as they are known."""
    with suppress(FileNotFoundError):
        found = read_json(run / ENVIRONMENT, "environment", PUT_BACK)
        return packages_of(found)
    return dict(about["versions"])


def of_runs(
    experiment: Experiment, folder: Path
) -> dict[str, tuple[dict[Of, float], dict[str, Any]]]:
    """The numbers of each finished run, and its run.json with the views of its accuracy. What has a
    fixed name has no origin.

    Raises:
        Refusal: a file is damaged.
    """
    found = {}
    for name in experiment.runs:
        with suppress(FileNotFoundError):
            read = of_classifier if experiment.built_in else of_program
            found[name] = read(experiment, folder / name)
    return found


def of_classifier(experiment: Experiment, run: Path) -> tuple[dict[Of, float], dict[str, Any]]:
    finished = read_finished(experiment, run)
    evaluation, views = finished.evaluation, finished.evaluation["views"]
    found = {
        ("", "accuracy"): evaluation["accuracy"],
        ("", ONE_VIEW): evaluation["plain"]["accuracy"],
        ("", "loss"): evaluation["loss"],
        ("", "seconds"): finished.about["seconds"],
    }
    if views == "plain":
        del found["", ONE_VIEW]
    return found, finished.about | {"views": views}


def of_program(experiment: Experiment, run: Path) -> tuple[dict[Of, float], dict[str, Any]]:
    found = read_measured(experiment, run)
    return found.numbers | {("", "seconds"): found.about["seconds"]}, found.about


def settings(before: Experiment, after: Experiment) -> list[str]:
    """The keys whose values differ, as `key before -> after`."""
    one, other = flat(before.settings), flat(after.settings)
    as_written = not (before.built_in and after.built_in)
    return [
        f"{key} {' -> '.join(values_of(one, other, key))}"
        for key in dict.fromkeys([*one, *other])
        if key not in one or key not in other or not same(one[key], other[key], as_written)
    ]


def changed_code(before: Results, after: Results) -> bool:
    """Whether a network that both have, or the program, was trained with other code."""
    common = before.code.keys() & after.code.keys()
    # Of a program in which nothing was hashed it is empty.
    pairs = [(before.code[of], after.code[of]) for of in common]
    return any(one and other and one != other for one, other in pairs)


def values_of(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> list[str]:
    """In words, or as JSON if these are the same, such as of null and a text."""
    sides = (before, after)
    words = [value_words(config[key]) if key in config else "not given" for config in sides]
    if words[0] != words[1]:
        return words
    return [json.dumps(config[key]) if key in config else "no value" for config in sides]


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that may change a result; those of a data set and of parameters by themselves."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in NO_SETTING:
            continue
        if key == "dataset" and value:
            found[key] = value["name"]
        elif key == "parameters":
            found |= value
        else:
            found[key] = value
    return found


def doubts(before: Results, after: Results) -> list[str]:
    """What makes the numbers hard to compare."""
    found = []
    if {*before.data.values()} != {*after.data.values()}:
        found.append("they were trained on different data")
    if before.computed_in and after.computed_in and before.computed_in != after.computed_in:
        found.append("precision: auto was " + " and ".join(
            f"{', '.join(sorted(each.computed_in))} in {each.experiment.name}"
            for each in (before, after)
        ))  # fmt: skip
    # Those of a program are of no views that are known.
    if before.views and after.views and before.views != after.views:
        found.append("their accuracies are of different views of the test images")
    if len({"fold" in each.experiment.axes for each in (before, after)}) > 1:
        found.append("only one of them is the mean of several folds")
    found += [line for each in (before, after) for line in of_elsewhere(each)]
    names = dict.fromkeys(
        name for each in (before, after) for numbers in each.numbers.values() for name in numbers
        if name != ONE_VIEW  # the only one has no name
    )  # fmt: skip
    found += [line for each in (before, after) for line in (*left_out(each), *without(each, names))]
    one, other = before.versions, after.versions
    if before.complete != after.complete:
        # That one of them does not name a package says nothing.
        one, other = ({name: each[name] for name in one.keys() & other} for each in (one, other))
    if changed := other_packages(one, other):
        found.append(f"their packages differ: {changed}")
    return found


def left_out(results: Results) -> list[str]:
    """The runs of an experiment that are not compared, in a line if there are any."""
    runs = results.experiment.runs
    names = [name for name in runs if name not in results.numbers]
    verb = "is" if len(names) == 1 else "are"
    return [f"{len(names)} of {len(runs)} runs of {results.experiment.name} {verb} not finished, "
            f"and left out: {shortened(names)}"] if names else []  # fmt: skip


def of_elsewhere(results: Results) -> list[str]:
    """What the numbers of its summary are of that the other's of these names are not, in lines."""
    found: dict[str, list[str]] = {}
    for name, origin in results.elsewhere.items():
        found.setdefault(origin, []).append(name)
    return [f"{shortened(names)} of {results.experiment.name} {'is' if len(names) == 1 else 'are'} "
            f"from {WHERE[origin]}" for origin, names in found.items()]  # fmt: skip


def without(results: Results, names: Iterable[str]) -> list[str]:
    """Which of these numbers some runs of an experiment do not have, such as of a training that
    diverged: a line for those that the same runs lack.
    """
    lacking: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        runs = tuple(run for run, numbers in results.numbers.items() if name not in numbers)
        # Of what is from elsewhere that is told.
        if len(runs) < len(results.numbers) or name not in results.elsewhere:
            lacking.setdefault(runs, []).append(name)
    return [f"{len(runs)} of {len(results.numbers)} runs of {results.experiment.name} "
            f"{'has' if len(runs) == 1 else 'have'} no {shortened(found)}"
            for runs, found in lacking.items() if runs]  # fmt: skip


def compare(before: Results, after: Results) -> list[Difference]:
    """Every number that both have, for every setting that both have. Each value of an axis that
    only one of them knows is compared with the other's runs.

    Raises:
        Refusal: there is no such number or setting.
    """
    one, other = both_by_setting(before, after)
    found = []
    for setting, runs in one.items():
        for there, others in other.items():
            for name in common_names(runs, others) if setting.key == there.key else ():
                words = "  ".join(filter(None, (setting.words, setting.alone, there.alone)))
                found.append(difference(words, name, runs, others))
    if not found:
        raise Refusal(
            "the two experiments have no setting and number in common; their axes are "
            f"{in_words(before)} and {in_words(after)}"
        )
    return found


def unpaired(before: Results, after: Results) -> list[str]:
    """The settings that only one of the two has, in words."""
    one, other = (
        {setting.key: setting.words for setting in each} for each in both_by_setting(before, after)
    )
    return [words for key, words in (one | other).items() if key not in one or key not in other]


def both_by_setting(
    before: Results, after: Results
) -> tuple[dict[Setting, Runs], dict[Setting, Runs]]:
    """The runs of each by their settings."""
    named = dict.fromkeys([*before.experiment.axes, *after.experiment.axes])
    axes = [axis for axis in named if axis not in REPEATS]
    values = [next(iter(each.experiment.runs.values())).values for each in (before, after)]
    common = [axis for axis in axes if all(axis in each for each in values)]
    return by_setting(before, axes, common), by_setting(after, axes, common)


def in_a_row(axes: Sequence[str], values: Mapping[str, Any]) -> str:
    """A setting in words."""
    return "  ".join(f"{axis} {value_words(values[axis])}" for axis in axes)


def in_words(results: Results) -> str:
    return results.experiment.summary.partition(", ")[2]


def by_setting(results: Results, axes: Sequence[str], common: Sequence[str]) -> dict[Setting, Runs]:
    """The numbers of the runs of each setting.

    Args:
        common: those of the axes that the other experiment has too.
    """
    found: dict[Setting, Runs] = {}
    own = [axis for axis in axes if axis not in common and axis in results.experiment.axes]
    for name, numbers in results.numbers.items():
        values = results.experiment.runs[name].values
        key = tuple(hashable(values[axis]) for axis in common)
        setting = Setting(key, in_a_row(own, values), in_a_row(common, values))
        runs = found.setdefault(setting, {})
        fold = "None"  # one that is no axis is the same in all runs
        if "fold" in results.experiment.axes:
            # Its images follow from these.
            of = [values.get(key) for key in ("folds", "validation_seed")]
            fold = json.dumps([values["fold"], *of, results.data[name]])
        repeat = values["seed"], fold
        runs[repeat, sum(key[0] == repeat for key in runs)] = numbers
    return found


def hashable(value: Any) -> Any:
    """A value by which settings are told apart: 1 and 1.0 are the same, 1 and true are not."""
    if isinstance(value, int | float | str | None):
        return isinstance(value, bool), value
    return json.dumps(value)


def common_names(one: Runs, other: Runs) -> list[str]:
    names = dict.fromkeys(name for numbers in one.values() for name in numbers)
    there = {name for numbers in other.values() for name in numbers}
    return [name for name in names if name in there]


def difference(setting: str, name: str, one: Runs, other: Runs) -> Difference:
    """Of the means; paired if both have the same two or more seeds or folds. Of folds with other
    seeds in one of them, only what both have is paired: else its mean would be of other seeds.
    """
    found, there = (
        {key: numbers[name] for key, numbers in sorted(runs.items()) if name in numbers}
        for runs in (one, other)
    )
    before, after = by_fold(found), by_fold(there)
    common = found.keys() & there.keys()
    shared = [by_fold({key: each[key] for key in each if key in common}) for each in (found, there)]
    if has_folds(found) and shared[0].keys() == before.keys() == after.keys():
        before, after = shared
    paired = before.keys() == after.keys() and len(before) > 1
    if paired:
        # With missing runs, the folds of the two may come in another order.
        after = {key: after[key] for key in before}
    low, high = interval([*before.values()], [*after.values()], paired)
    of = "fold" if any(isinstance(key, str) for key in before) else "seed"
    return Difference(
        setting, name, tuple(before.values()), tuple(after.values()),
        mean(after.values()) - mean(before.values()), low, high, paired, of,
    )  # fmt: skip


def by_fold(values: dict[tuple[Any, int], float]) -> dict[Any, float]:
    """The values by seed; with folds the mean of each, whose seeds share its images."""
    if not has_folds(values):
        return dict(values)
    folds: dict[str, list[float]] = {}
    for ((_, fold), _), value in values.items():
        folds.setdefault(fold, []).append(value)
    return {fold: mean(found) for fold, found in folds.items()}


def has_folds(values: Collection[tuple[Any, int]]) -> bool:
    return any(fold != "None" for (_, fold), _ in values)


def interval(before: list[float], after: list[float], paired: bool) -> tuple[float, float]:
    """Of Student's t-test of pairs, otherwise of Welch's; NaN for a single value."""
    if min(len(before), len(after)) < 2:
        return math.nan, math.nan
    # Equal values have no variance, which is divided by for the statistic.
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        test = (
            stats.ttest_rel(after, before)
            if paired
            else stats.ttest_ind(after, before, equal_var=False)
        )
        found = test.confidence_interval(LEVEL)
    return float(found.low), float(found.high)


@dataclass(frozen=True)
class Discordance:
    """Two runs on the same test images.

    Attributes:
        n: number of images.
        before, after: images that only this run has right.
        p: of McNemar's test that both runs are equally often right.
        views: of each run.
    """

    n: int
    before: int
    after: int
    p: float
    views: tuple[str, str]


def discordance(before: Path, after: Path) -> Discordance:
    """The images of which only one of two runs is right.

    Args:
        before, after: results/<experiment>/<run>.

    Raises:
        Refusal: a run is not evaluated, or they were evaluated on different images.
    """
    refuse_own_program(before, after)
    one, other = of_images(before), of_images(after)
    same = (one.images_sha256, one.class_names) == (other.images_sha256, other.class_names)
    rows = ["row", "true_class"]
    if not same or not one.table[rows].equals(other.table[rows]):
        raise Refusal(
            f"{before} and {after} were evaluated on different test images; compare runs on one "
            "data set"
        )
    right, now_right = (
        each.table["true_class"] == each.table["predicted_class"] for each in (one, other)
    )
    only, now_only = int((right & ~now_right).sum()), int((now_right & ~right).sum())
    p = mcnemar(only, now_only)
    return Discordance(len(right), only, now_only, p, (one.views, other.views))


def refuse_own_program(*runs: Path) -> None:
    """Refuse runs of a program of the user's, which have no predictions."""
    for run in runs:
        # Such as every one of them leaves, and the classifier does not.
        if (run / ENVIRONMENT).exists():
            folders = dict.fromkeys(str(each.parent) for each in runs)
            only, *others = folders
            both = f"compare the experiments: {' '.join(folders)}"
            own = f"its numbers and the other's are in {only}/summary.csv"
            raise Refusal(f"{run} is of your own program; {both if others else own}")


def of_images(run: Path) -> Predictions:
    """The predictions of a run; refuses as `discordance`."""
    with suppress(FileNotFoundError):
        if (found := predictions.read(run)) is not None:
            return found
    raise Refusal(f"{run} has no {predictions.FILE}; run snakemake for its experiment again")


def mcnemar(b: int, c: int) -> float:
    """The exact p-value of McNemar's test, two-sided: of the images that one of two runs alone has
    right, each has them with the same probability.

    Args:
        b, c: how many of them each run has right.

    Source: Q. McNemar, "Note on the sampling error of the difference between correlated
        proportions or percentages", 1947; with the binomial distribution, so for few images too.
    """
    return float(stats.binomtest(b, b + c).pvalue) if b + c else 1.0
