"""From the configuration to the runs of an experiment: the product of its axes.

Free of torch, because Snakemake reads the configuration in every dry run.
"""

import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema

from manynodes.base import failure
from manynodes.base.environment import Environment
from manynodes.base.errors import Refusal, shown
from manynodes.base.reading import parse_json
from manynodes.data.addresses import refuse_credentials
from manynodes.data.datasets import DATASETS
from manynodes.data.folder import MANIFEST, SOURCE
from manynodes.data.user.declaration import UserData
from manynodes.experiment import command
from manynodes.experiment.declaration import GROWTH
from manynodes.experiment.environment_here import EnvironmentHere
from manynodes.experiment.installed_program import Installed, installed_program
from manynodes.experiment.keys import (
    GEOMETRY,
    MOST_RUNS,
    PATTERN_WORDS,
    SHARED,
    SIZE,
    Keys,
    keys_of,
)
from manynodes.experiment.log_lines import patterns_of, refuse_bad_patterns
from manynodes.experiment.paths import with_paths, with_program
from manynodes.experiment.search import with_search
from manynodes.experiment.table import with_table

MOST_SHOWN = 8  # values of an axis that are listed one by one
# In a name of a folder. No comma: in the command of a cluster's job, Snakemake divides at it.
UNFIT = re.compile(r"[^A-Za-z0-9._=+-]")
LONGEST_NAME = 200  # file systems allow 255 bytes; some of them are for temporary files
# Axes whose runs repeat a setting: results are averaged over them.
REPEATS = ("seed", "fold")
LONGEST_VALUES = 80_000  # characters of a run's values as JSON
PARAMETER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,49}")
# Files that lie among the user's.
OURS = (MANIFEST, SOURCE, failure.FILE, failure.RESERVED)
# Columns of summary.csv that are not the program's.
COLUMNS = (
    *("seconds", "attempts", "commit", "dirty", "program_commit", "computed_in", "versions"),
    *("code_sha256", "sources_sha256", "data_sha256", "files_sha256"),
    *("run_sha256", "evaluation_sha256"),
)
# Names that no parameter can have, besides keys of ours.
TAKEN_NAMES = (*command.OF_EVALUATION, *COLUMNS, "world_size", "command", "run")


@dataclass(frozen=True)
class Run:
    """One run: every key that can change its result. Its parameters are attributes too.

    Attributes:
        dataset: to stage; None for none.
        parameters: the program's.
        command: the words that start the program, with its arguments; `{name}` stands for a value
            or a folder. Empty for the built-in one.
    """

    dataset: str | None
    nodes: int
    nproc_per_node: int
    cpus_per_proc: int | str
    device: str
    seed: int
    parameters: dict[str, Any]
    command: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["parameters"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node

    @property
    def geometry(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in GEOMETRY} | {"world_size": self.world_size}

    @property
    def values(self) -> dict[str, Any]:
        """Every key; with a command what `{name}` may stand for, and what the program finds in
        LAUNCH_PARAMETERS.
        """
        keys: dict[str, Any] = {key: getattr(self, key) for key in SHARED}
        if self.command:
            keys = {"command": self.command} | keys | {"world_size": self.world_size}
        return keys | self.parameters

    def to_json(self) -> str:
        """Every value, as a JSON object."""
        return json.dumps(self.values)

    def with_values(self, **values: Any) -> "Run":
        """The run with other values of some keys."""
        shared = {key: values.pop(key, getattr(self, key)) for key in SHARED}
        return Run(parameters=self.parameters | values, command=self.command, **shared)


def read_run(text: str, contract: Environment | None = None) -> Run:
    """A run of the built-in program from the JSON object on a command line.

    Args:
        contract: has the geometry, unless the text has it.

    Raises:
        Refusal: it is not a JSON object, or not one valid run.
    """
    given = parse_option("--run", text)
    config = (
        {"experiment": "run"}
        | geometry_from(contract)
        | given
        | ({"dataset": {"name": given["dataset"]}} if "dataset" in given else {})
    )
    experiment = Experiment.from_config(config, reading=True)
    if experiment.axes:
        raise Refusal(f"--run must be one run; {', '.join(experiment.axes)} is a list")
    return next(iter(experiment.runs.values()))


def parse_option(option: str, text: str) -> dict[str, Any]:
    """The JSON object that a command-line option gives.

    Raises:
        Refusal: it is not one.
    """
    try:
        found = parse_json(text)
    except ValueError as error:
        raise Refusal(f"{option} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refusal(f"{option} must be a JSON object, not {shown(found)}")
    return found


def geometry_from(contract: Environment | None) -> dict[str, Any]:
    """The geometry from `launch`, as keys of the configuration."""
    given = {key: getattr(contract, key, None) for key in GEOMETRY}
    cpus = given["cpus_per_proc"]
    if cpus and cpus != "auto":
        given["cpus_per_proc"] = int(cpus)
    return {key: value for key, value in given.items() if value is not None}


@cache
def default_run() -> Run:
    """The run of a configuration with nothing but a name."""
    return next(iter(Experiment.from_config({"experiment": "default"}, reading=True).runs.values()))


@dataclass(frozen=True)
class Experiment:
    """A named product of axes.

    Attributes:
        keys: what its configuration may have.
        config: the resolved configuration, every key present.
        axes: the keys that were given as lists, with their values, in the schema's order.
        runs: every run under the name of its folder, such as `nodes~2_seed~0`.
        points: what each run has on the axes as they were given; a rule such as
            `learning_rate_rule` may have made another value of it.
    """

    name: str
    keys: Keys
    config: dict[str, Any]
    axes: dict[str, list[Any]]
    runs: dict[str, Run]
    points: dict[str, dict[str, Any]]

    @staticmethod
    def from_config(
        config: Mapping[str, Any], reading: bool = False, only: Set[str] = frozenset()
    ) -> "Experiment":
        """Check the configuration, fill in the defaults and multiply out the axes.

        Args:
            reading: for programs that only read results. Skip the check of an undeclared data set,
                and run no code of the user's.
            only: names of the runs to make; all of them if it is empty, or names another one.

        Raises:
            Refusal: a key is unknown, has the wrong type, or contradicts another one.
        """
        keys = keys_of(config)
        resolved = keys.validate(config)
        refuse_bad_names(resolved, keys)
        if not reading:
            keys.refuse_no_axes("runs", set().union(*resolved["runs"]), resolved)
        refuse_bad_outputs(resolved)
        refuse_bad_places(resolved)
        refuse_bad_files(resolved)
        refuse_bad_growth(config, resolved, keys)
        name = resolved["dataset"]["name"] if resolved["dataset"] else None
        values = {key: resolved[key] for key in keys.axes if key in resolved} | {"dataset": name}
        values |= resolved["parameters"]
        rows = resolved["runs"] or [{}]
        together = set().union(*rows)
        for key, spec in keys.properties.items():
            if "counts" in spec and values.get(key) is None and key not in together:
                values |= counted(key, spec["counts"], resolved)
        axes = {key: value for key, value in values.items() if keys.is_axis(key, value)}
        if resolved["dataset"]:
            refuse_impossible_source(axes.get("dataset", [name]), resolved["dataset"], reading)
        refuse_too_many(axes, len(rows))
        refuse_bad_paths(resolved)
        refuse_braces(resolved)
        for key in keys.parameters:
            if key not in {*resolved, *values, *together}:
                raise Refusal(f"config: {key}: is missing; the program has no default of it")
        points = dict(product(axes, rows, list(values)))
        varying = values_by_key(points.values())
        if only and only <= points.keys():
            points = {name: points[name] for name in only}
        words = () if keys.built_in else tuple(command.command(resolved))
        runs = {run: run_with(values | point, words, resolved, keys)
                for run, point in points.items()}  # fmt: skip
        found = Experiment(resolved["experiment"], keys, resolved, varying, runs, points)
        refuse_too_long(found)
        if not reading:
            for key, each in found.axes.items():
                refuse_equal(key, each)
            found.check({name: facts_of(name) for name in found.datasets})
        return found

    @staticmethod
    def from_json(text: str, source: str = "--config") -> "Experiment":
        """An experiment from a JSON object, for a program that only reads results.

        Args:
            source: the option or the file that it comes from, for messages.

        Raises:
            Refusal: it is not a JSON object, or not a valid configuration.
        """
        return Experiment.from_config(parse_option(source, text), reading=True)

    @staticmethod
    def from_files(
        config: Mapping[str, Any], folders: Sequence[Path], only: Set[str] = frozenset()
    ) -> "Experiment":
        """An experiment from what its files and a command line give, with the user's paths.

        Args:
            folders: of the configuration files, see `with_paths`.
            only: as for `from_config`.

        Raises:
            Refusal: as `from_config`; or the table of its runs is none.
        """
        located = with_program(config, folders)
        keys = keys_of(located)
        located = with_paths(keys.with_types(located), folders, keys)
        located = with_table(located, folders, keys)
        return Experiment.from_config(with_search(located, folders, keys), only=only)

    def with_site(self, modules: Sequence[str], setup: str) -> "Experiment":
        """The same with what a site loads first in the environment of every program: its modules
        before those of the experiment, its lines of bash before the experiment's. The workflow's
        own needs nothing of them.
        """
        if self.environment.is_ours:
            return self
        own = self.config["environment"]
        lines = [each for each in (setup, own.get("setup")) if each]
        loaded = {"modules": [*modules, *own.get("modules", [])], "setup": "\n".join(lines)}
        given = own | {name: value for name, value in loaded.items() if value}
        return replace(self, config=self.config | {"environment": given})

    def check(self, datasets: Mapping[str, Mapping[str, Any]]) -> None:
        """Let the program's own `check` look at every run, and refuse an axis without an effect.

        Args:
            datasets: what is known of each data set, see `facts_of`.

        Raises:
            Refusal: naming the key to change.
        """
        if self.keys.declared is None:
            return
        # Nothing that is looked at depends on the seed.
        different = {
            json.dumps(run.with_values(seed=0).values, default=str): run
            for run in self.runs.values()
        }
        for run in different.values():
            dataset = datasets.get(run.dataset) if run.dataset else None
            self.keys.declared.check(run.parameters, run.geometry, dataset)
            self.refuse_unused_axis(run)

    def refuse_unused_axis(self, run: Run) -> None:
        """Refuse an axis that has no effect on a run.

        Raises:
            Refusal: naming it.
        """
        for key in self.axes:
            if (other := self.ignored_with(key, run)) is not None:
                value = (run.values | run.geometry)[other]
                raise Refusal(
                    f"config: {key}: an axis that {other}: {value} ignores; give one value, or "
                    f"another {other}"
                )

    def ignored_with(self, key: str, run: Run) -> str | None:
        """The key of a run whose value makes another one have no effect; None if it has."""
        values = run.values | run.geometry
        for other, spec in self.keys.properties[key].get("only_with", {}).items():
            if not jsonschema.Draft202012Validator(spec).is_valid(values[other]):
                return other
        return None

    @property
    def built_in(self) -> bool:
        """Whether its program is the built-in classifier."""
        return self.keys.built_in

    def changes(self, run: Run) -> str:
        """The keys of a run of the built-in program that differ from the defaults, without the
        geometry, as JSON: what a command line needs, as `launch` passes the geometry on.
        """
        default = default_run().values
        changed = {key: value for key, value in run.values.items() if value != default[key]}
        return json.dumps({key: value for key, value in changed.items() if key not in GEOMETRY})

    def parameters_for(self, result: bool | str) -> dict[str, Any]:
        """The declared parameters that change no result (False), or only that of the evaluation
        (`evaluation`). They are the same in all runs.
        """
        return {
            key: self.config[key]
            for key in self.keys.parameters
            if self.keys.properties[key].get("result", True) == result
        }

    @cached_property
    def gpus_for_auto(self) -> int:
        """GPUs that one machine needs to train all runs with `device: auto` on GPUs; at least 1."""
        return max((r.world_size for r in self.runs.values() if r.device == "auto"), default=1)

    @property
    def program_name(self) -> str:
        """The user's program in messages."""
        return command.name_of(command.command(self.config))

    @property
    def evaluation(self) -> tuple[str, ...]:
        """The words of the user's program that evaluates; empty for none."""
        return command.evaluation(self.config)

    @property
    def has_evaluation(self) -> bool:
        """A program of the user's without `evaluate` has its numbers from the training."""
        return self.built_in or bool(self.evaluation)

    @cached_property
    def environment(self) -> EnvironmentHere:
        """Where the user's program finds its Python."""
        return EnvironmentHere.of(self.config["environment"])

    @cached_property
    def sources_sha256(self) -> str:
        """SHA-256 of the user's program's file, or the command's, of the modules beside it that it
        imports, and of what is locked in its environment.

        Raises:
            Refusal: a file is missing, or is no Python.
        """
        return self.locked_sha256(self.files_sha256(only_code=False))

    @property
    def other_torch(self) -> bool:
        """Whether its program may compute with another torch than the workflow's."""
        by_us = self.built_in or command.command(self.config)[0] == command.PYTHON
        return not (by_us and self.environment.is_ours)

    @cached_property
    def earlier_sha256(self) -> str:
        """The same as earlier versions have noted it: nothing of an installed module was hashed."""
        words, other_python = command.command(self.config), not self.environment.is_ours
        hashed = command.words_sha256(words, other_python, self.config["directory"])
        return self.locked_sha256(hashed)

    def locked_sha256(self, words: str) -> str:
        """With what is locked in the environment.

        Args:
            words: SHA-256 of the program's files.
        """
        locked = self.identity
        return hashlib.sha256(f"{words} {locked}".encode()).hexdigest() if locked else words

    @cached_property
    def code_sha256(self) -> str:
        """The same of its code alone, which must not change while a command runs."""
        return self.files_sha256(only_code=True)

    def files_sha256(self, only_code: bool) -> str:
        """SHA-256 of the files of the user's program, see `command.words_sha256`."""
        words, other_python = command.command(self.config), not self.environment.is_ours
        directory, (installed, _) = self.config["directory"], self.installed_sources
        return command.words_sha256(words, other_python, directory, only_code, installed)

    @property
    def reads(self) -> dict[str, Any]:
        """What is read of the program and of what it leaves, see `Task.reads`."""
        given = {key: self.config[key] for key in ("metrics", "result", "snapshots")}
        return given | {"installed": self.installed_sources[0]}

    @cached_property
    def installed(self) -> Installed | None:
        """The installed module that the program is; None if it is none."""
        words = command.command(self.config)
        return installed_program(self.environment, words, self.config["directory"])

    @cached_property
    def installed_evaluation(self) -> Installed | None:
        """The same of the program that evaluates."""
        if not self.evaluation:
            return None
        return installed_program(self.environment, self.evaluation, None)

    @cached_property
    def installed_sources(self) -> Sequence[Sequence[str]]:
        """`Installed.sources` of the program and of the one that evaluates."""
        programs = self.installed, self.installed_evaluation
        return [program.sources if program else () for program in programs]

    @cached_property
    def identity(self) -> str:
        """What of its environment decides the result."""
        return self.environment.identity

    @property
    def noted(self) -> dict[str, Any]:
        """What jobs are told of an environment that is staged: they run its copy, and may not see
        its own folder.
        """
        environment = self.environment
        names = ("installed_sources", "identity") * (environment.stage and not environment.is_ours)
        return {name: getattr(self, name) for name in names}

    def as_noted(self, noted: Mapping[str, Any]) -> "Experiment":
        """The same, which need not ask for what is `noted`."""
        found = replace(self)
        vars(found).update(noted)
        return found

    @cached_property
    def evaluation_sha256(self) -> str:
        """SHA-256 of the program that evaluates, with its arguments and parameters, without its
        environment; empty if there is none.
        """
        if not self.evaluation:
            return ""
        parameters = self.parameters_for("evaluation")
        return command.evaluation_sha256(self.evaluation, parameters, self.evaluation_code)

    @cached_property
    def evaluation_code(self) -> str:
        """SHA-256 of the files of the program that evaluates."""
        other_python, (_, installed) = not self.environment.is_ours, self.installed_sources
        return command.words_sha256(self.evaluation, other_python, installed=installed)

    @property
    def science(self) -> str:
        """What the results depend on, as JSON: the keys that differ from the defaults, without
        those that change no result.
        """
        default = self.keys.validate({"experiment": self.name})
        changed = {
            key: value
            for key, value in self.config.items()
            if key not in self.keys.site and value != default.get(key)
        }
        dataset = self.config["dataset"] and {"dataset": {"name": self.config["dataset"]["name"]}}
        return json.dumps({"experiment": self.name} | changed | (dataset or {}))

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration without the keys that change no result, without those that each run
        has a value of its own for, and without those that no run uses.
        """
        left_out = {key for row in self.config["runs"] for key in row} | set(self.keys.site)
        return {
            key: value
            for key, value in self.config.items()
            if key not in left_out
            and per_process(self.keys, key, self.config) is None
            and any(self.ignored_with(key, run) is None for run in self.runs.values())
        }

    @property
    def user_data(self) -> UserData | None:
        """The user's own data set; None if all are built in."""
        dataset = self.config["dataset"]
        return UserData.from_config(dataset) if dataset else None

    @property
    def datasets(self) -> list[str]:
        names = dict.fromkeys(run.dataset for run in self.runs.values())
        return [name for name in names if name is not None]

    @property
    def hosts(self) -> list[str]:
        """The hosts that the user names; a single one may be a file of hosts."""
        given = self.config["hosts"]
        return [given] if isinstance(given, str) else given

    @property
    def summary(self) -> str:
        """One line: the name, the number of runs, and what varies."""
        varying = []
        for key, values in self.axes.items():
            texts = [value_text(value) for value in values]
            if len(texts) > MOST_SHOWN:
                texts[3:] = [f"… {texts[-1]}: {len(texts):,} values"]
            if len(texts) > 1:
                varying.append(f"{key} ({', '.join(texts)})")
        runs = f"{len(self.runs):,} run{'s' if len(self.runs) > 1 else ''}"
        what = "varying " + " and ".join(varying) if varying else "nothing varies"
        return f"experiment {self.name}: {runs}, {what}"

    @property
    def varies_in_size(self) -> bool:
        """Whether its runs compare several numbers of nodes, processes or CPUs."""
        return any(len(self.axes.get(key, ())) > 1 for key in SIZE)

    @property
    def numeric_axes(self) -> list[str]:
        """The axes with two or more numbers, except seeds and folds: accuracy is plotted against
        them.
        """
        return [
            key
            for key, values in self.axes.items()
            if len(values) > 1
            and key not in (*REPEATS, "validation_seed")
            and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        ]

    def axis_values(self, name: str) -> dict[str, Any]:
        """A run's name and its value on each axis, as in tables."""
        values = self.runs[name].values
        return {"run": name} | {key: in_tables(values[key]) for key in self.axes}

    def given_values(self, name: str) -> dict[str, Any]:
        """The same as the configuration gives them, without the name."""
        return {key: in_tables(self.points[name][key]) for key in self.axes}


def in_tables(value: Any) -> Any:
    """A value of an axis as in tables: a text instead of nothing, a list or a mapping."""
    if value is None or isinstance(value, tuple | list | dict):
        return value_text(value)
    return value


def run_with(
    chosen: Mapping[str, Any], words: tuple[str, ...], config: Mapping[str, Any], keys: Keys
) -> Run:
    """The run of a point, with what follows from the number of its processes.

    Args:
        chosen: its values of the keys that can be axes, and of parameters that are not declared.
        words: that start the program.

    Raises:
        Refusal: as `refuse_unknown_names`.
    """
    parameters = {key: chosen.get(key, config.get(key)) for key in keys.of_run}
    parameters |= {key: value for key, value in chosen.items()
                   if key not in keys.axes and key not in parameters}  # fmt: skip
    shared = {key: chosen[key] for key in SHARED}
    run = Run(parameters=parameters, command=words, **shared)
    run = run.with_values(**scaled(run, config, keys))
    if words:
        refuse_unknown_names(run, config, keys)
    return run


def product(
    axes: Mapping[str, list[Any]], rows: Sequence[Mapping[str, Any]], order: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every point of the product of the axes and the rows, with the name of its folder.

    Args:
        rows: values of keys that vary together; one without a key if none do.
        order: of the keys in a name.

    Raises:
        Refusal: the rows have different keys or repeat one, or a name is too long.
    """
    for row in rows:
        if row.keys() != rows[0].keys():
            keys = ", ".join(sorted(row.keys() ^ rows[0].keys()))
            raise Refusal(f"config: runs: not in all of them: {keys}; give them in each run")
        for key in row:
            if key in axes:
                raise Refusal(f"config: runs: {key} is an axis too; keep one of the two")
    seen: dict[str, dict[str, Any]] = {}
    for row in rows:
        for values in itertools.product(*axes.values()):
            chosen = dict(row) | dict(zip(axes, values, strict=True))
            point = {key: chosen[key] for key in [*order, *chosen] if key in chosen}
            name = run_name(point)
            if name in seen:
                raise Refusal(
                    f"config: runs: {shown(dict(row))} "
                    + ("is there twice; give it once" if seen[name] == point else "and another one "
                       "would have folders of one name; write a value in another way")
                )  # fmt: skip
            seen[name] = point
            if len(name) > LONGEST_NAME:
                raise Refusal(
                    f"config: {len(point)} axes make a folder name of {len(name)} characters; "
                    f"vary fewer keys, or give shorter values (at most {LONGEST_NAME})"
                )
            yield name, point


def values_by_key(points: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The different values of each key of some points."""
    found: dict[str, dict[str, Any]] = {}
    for point in points:
        for key, value in point.items():
            # 1, 1.0 and true are different, and lists are not hashable.
            found.setdefault(key, {}).setdefault(repr(value), value)
    return {key: list(values.values()) for key, values in found.items()}


def facts_of(dataset: str) -> dict[str, Any]:
    """What a program's `check` is told of a data set: its name, and of a built-in one the numbers
    of its images, their size and channels, and its number of classes.
    """
    if dataset not in DATASETS:
        return {"name": dataset}
    known = DATASETS[dataset]
    images = {"train": known.train_images, "test": known.test_images}
    names = known.class_names or [str(label) for label in range(known.classes)]
    return facts(dataset, known.image_shape, known.classes, images, names)


def facts(
    dataset: str,
    image_shape: Sequence[int | None],
    classes: int | None,
    images: Mapping[str, int],
    class_names: Sequence[str] = (),
) -> dict[str, Any]:
    """What a program's `check` is told of a data set.

    Args:
        image_shape: height, width and channels; each None if it is not known yet.
        images: their number by split; empty if it is not known yet.
        class_names: by label; empty if they are not known yet.
    """
    shape = dict(zip(("height", "width", "channels"), image_shape, strict=True))
    numbers = {f"{split}_images": number for split, number in images.items()}
    names = {"class_names": list(class_names)} if class_names else {}
    return {"name": dataset, "classes": classes} | shape | numbers | names


def counted(key: str, counts: str, config: Mapping[str, Any]) -> dict[str, list[int]]:
    """The axis of a key without a value: the whole numbers below another parameter. Empty if that
    is null or 0.

    Args:
        counts: the other one.

    Raises:
        Refusal: it is a list or varies in `runs`, so that no axis fits all runs; or it is no number
            of them.
    """
    number = config.get(counts)
    if any(counts in row for row in config["runs"]):
        if not any(row[counts] for row in config["runs"]):
            return {}
        raise Refusal(f"config: {counts}: varies in runs or search; give {key} there too")
    if number is None or number == 0:
        return {}
    if isinstance(number, list):
        raise Refusal(f"config: {counts}: is a list; give {key} too")
    if isinstance(number, bool) or number not in range(1, MOST_RUNS + 1):
        raise Refusal(
            f"config: {counts}: {shown(number)} is not a whole number from 1 to {MOST_RUNS:,}, "
            f"which {key} counts"
        )
    return {key: list(range(int(number)))}


def per_process(keys: Keys, key: str, config: Mapping[str, Any]) -> int | None:
    """The size for each process that a key is a multiple of, if one is given."""
    other = keys.properties.get(key, {}).get("per_process")
    return config[other] if other else None


def scaled(run: Run, config: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """The parameters of a run that follow from the number of its processes."""
    found = {}
    for key in keys.of_run:
        if (size := per_process(keys, key, config)) is not None:
            found[key] = size * run.world_size
        if rule := keys.properties[key].get("grows_by"):
            found[key] = run.parameters[key] * GROWTH[config[rule]](run.world_size)
    return found


def refuse_bad_growth(given: Mapping[str, Any], config: Mapping[str, Any], keys: Keys) -> None:
    """Refuse two sizes of a batch, and a rule without a size per process.

    Args:
        given: the configuration without the defaults.

    Raises:
        Refusal: naming the key.
    """
    sizes = {key: spec["per_process"] for key, spec in keys.properties.items()
             if "per_process" in spec}  # fmt: skip
    for key, other in sizes.items():
        if config[other] is not None and any(key in part for part in (given, *config["runs"])):
            raise Refusal(f"config: {other}: {key} is given too; keep one of them")
    for spec in keys.properties.values():
        rule = spec.get("grows_by")
        without = sizes and all(config[each] is None for each in sizes.values())
        if rule and without and config[rule] != "none":
            raise Refusal(
                f"config: {rule}: scales with {' or '.join(sizes.values())}; give that, or leave "
                "the rule out"
            )


def refuse_bad_names(config: Mapping[str, Any], keys: Keys) -> None:
    """Refuse names of parameters that mean something else.

    Raises:
        Refusal: naming the key to change.
    """
    undeclared = {"parameters": config["parameters"],
                  "runs": set().union(*config["runs"]) - keys.axes.keys()}  # fmt: skip
    for key, names in undeclared.items():
        for name in names:
            if not isinstance(name, str) or not PARAMETER.fullmatch(name):
                raise Refusal(f"config: {key}: {shown(name)} is not {PATTERN_WORDS['parameters']}")
    for name in (*keys.parameters, *itertools.chain(*undeclared.values())):
        if name in SHARED or name in TAKEN_NAMES:
            where = "give it beside program" if name in SHARED else "choose another name"
            raise Refusal(f"config: parameters.{name}: has a meaning of its own; {where}")


def is_inside(path: PurePosixPath) -> bool:
    """Whether a path leads to something in the folder that it is relative to."""
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def refuse_bad_outputs(config: Mapping[str, Any]) -> None:
    """Refuse outputs that are not in the results folder, or that share files.

    Raises:
        Refusal: naming them.
    """
    outputs = [PurePosixPath(path) for path in config["outputs"]]
    for text, path in zip(config["outputs"], outputs, strict=True):
        # What begins with a dash is an option of a command; braces would be Snakemake's wildcards,
        # and stars are for a shell.
        unfit = text.startswith("-") or not text.isprintable() or set(text) & set("{}*?[]")
        if unfit or not is_inside(path):
            raise Refusal(
                f"config: outputs: {shown(text)} is not a path inside the results folder; give "
                "one such as model.pt, or a folder"
            )
    for other, path in itertools.combinations(outputs, 2):
        if path.is_relative_to(other) or other.is_relative_to(path):
            raise Refusal(
                f"config: outputs: {shown(str(path))} and {shown(str(other))} are the same, or "
                "one is inside the other; keep one of them"
            )


def refuse_bad_files(config: Mapping[str, Any]) -> None:
    """Refuse files that cannot lie in one folder.

    Raises:
        Refusal: naming one.
    """
    names = [PurePosixPath(path).name for path in config["files"]]
    for path, name in zip(config["files"], names, strict=True):
        # Of the folder above.
        no_name = name in ("", "..")
        if no_name or names.count(name) > 1 or name in OURS:
            why = "is there twice" if names.count(name) > 1 else f"is {name}, which is ours"
            why = "has no name" if no_name else why
            raise Refusal(
                f"config: files: {shown(name or path)} {why}; files are staged in one folder and "
                "need names of their own"
            )


def refuse_bad_places(config: Mapping[str, Any]) -> None:
    """Refuse places of metrics, results and snapshots that cannot be in the results folder.

    Raises:
        Refusal: naming the key.
    """
    metrics = config["metrics"]
    if isinstance(metrics, Mapping):
        if "log" in metrics:
            refuse_bad_patterns(patterns_of(metrics))
        elif importlib.util.find_spec("tensorboard") is None:
            raise Refusal(
                "config: metrics.tensorboard: needs the package tensorboard beside Snakemake; "
                "install it there"
            )
        metrics = metrics.get("tensorboard")
    given = {"metrics": [metrics], "result": [config["result"]], "snapshots": config["snapshots"]}
    for key, values in given.items():
        for value in filter(None, values):
            if re.match(r"\{.*:|.*\(\?P<", value, re.DOTALL):
                raise Refusal(
                    f"config: {key}: {shown(value)} is no path; an expression for lines of the log "
                    "is metrics: {log: '…'}, in single quotes"
                )
            pattern = value.partition("#")[0]
            if name := re.search(r"\{\w+\}", pattern):
                raise Refusal(
                    f"config: {key}: {shown(value)}: {name[0]} is not filled in here; the path "
                    "is relative to the results folder, and * stands for any name"
                )
            unfit = re.search(r"[^/]\*\*|\*\*[^/]|\0", pattern)
            if unfit or not is_inside(PurePosixPath(pattern)):
                raise Refusal(
                    f"config: {key}: {shown(value)} is not a path inside the results folder; "
                    "give one relative to it"
                )


def refuse_unknown_names(run: Run, config: Mapping[str, Any], keys: Keys) -> None:
    """Refuse `{name}` in the words of a program that stands for nothing.

    Raises:
        Refusal: naming it.
    """
    given = {"data": run.dataset, "files": config["files"]}
    absent = {name for name, value in given.items() if not value}
    known = {*run.values, *keys.parameters}
    folders = {*command.FOLDERS, *command.OF_PROCESS} - absent

    def as_parameter(name: str) -> str:
        if name in TAKEN_NAMES or not PARAMETER.fullmatch(name):
            return "choose another name"
        if keys.declared:
            return f"declare {name} in parameters.yaml"
        return f"give {name} in parameters"

    for key, words, others in (
        ("arguments", run.command, folders),
        ("directory", [config["directory"] or ""], folders),
        ("evaluate", command.evaluation(config), {*command.OF_EVALUATION} - absent - {"state"}),
    ):
        command.refuse_unknown_names(key, words, known | others, as_parameter)


def run_name(point: Mapping[str, Any]) -> str:
    """The folder of a run: what varies, as `key~value_key~value`; `run` if nothing does."""
    return "_".join(f"{key}~{value_text(value)}" for key, value in point.items()) or "run"


def value_text(value: Any) -> str:
    """A value as in the name of a run's folder."""
    if isinstance(value, dict):
        parts = (f"{UNFIT.sub('-', str(key))}={value_text(part)}" for key, part in value.items())
        return "+".join(parts) or "none"
    text = "-".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    # Such as my_models.py:Net.
    return UNFIT.sub("-", text if ":" in text or "/" in text else text.lower())


def refuse_too_many(axes: Mapping[str, list[Any]], rows: int) -> None:
    """Refuse a repeated value on an axis, and too many runs.

    Args:
        rows: number of those in which keys vary together.

    Raises:
        Refusal: naming the axis, or the number of runs.
    """
    for key, values in axes.items():
        # As text: 1 and 1.0 are the same folder, and lists are not hashable.
        if len({repr(value) for value in values}) < len(values):
            raise Refusal(f"config: {key}: {shown(values)} has a value twice; give each value once")
        named: dict[str, Any] = {}
        for value in values:
            other = named.setdefault(value_text(value), value)
            if other is not value:
                raise Refusal(
                    f"config: {key}: {shown(other)} and {shown(value)} would have folders of one "
                    "name; write one of them in another way"
                )
    if (runs := math.prod(map(len, axes.values())) * rows) > MOST_RUNS:
        raise Refusal(
            f"config: {' x '.join(axes)} make {runs:,} runs; an experiment has at most "
            f"{MOST_RUNS:,}; give some axes fewer values"
        )


def refuse_equal(key: str, values: Sequence[Any]) -> None:
    """Refuse 1 beside 1.0 or true, and null beside the text none: the tables would take their runs
    for repetitions of one setting.

    Raises:
        Refusal: naming the axis.
    """
    if len({in_tables(value) for value in values}) < len(values):
        raise Refusal(
            f"config: {key}: {shown(list(values))} has one value in two forms, such as 1 and 1.0, "
            "or null and none; write it in one"
        )


def refuse_too_long(experiment: Experiment) -> None:
    """Refuse values that no command line can hold: a job's programs get those of its run as an
    argument, for which Linux has 128 KiB.

    Raises:
        Refusal: naming the run.
    """
    # Of a short configuration no run has long values.
    if len(json.dumps(experiment.config)) <= LONGEST_VALUES:
        return
    for name, run in experiment.runs.items():
        if (length := len(run.to_json())) > LONGEST_VALUES:
            raise Refusal(
                f"config: the values of the run {name} are {length:,} characters long; at most "
                f"{LONGEST_VALUES:,} fit a command line; write them to a file, and name it in files"
            )


def refuse_bad_paths(config: Mapping[str, Any]) -> None:
    """Refuse scratch folders and archives that are not paths, or name an unknown user.

    Raises:
        Refusal: naming the key.
    """
    paths = [("scratch", path) for path in config["scratch"]]
    if config["dataset"]:
        paths.append(("dataset.archive", config["dataset"]["archive"] or ""))
    for key, path in paths:
        if "\0" in path or not path.isprintable():
            raise Refusal(f"config: {key}: {shown(path)} is not a path")
        if os.path.expanduser(path).startswith("~"):  # noqa: PTH111, Path.expanduser raises instead
            raise Refusal(
                f"config: {key}: {shown(path)}: there is no such user on this machine; give the "
                "whole path"
            )


def refuse_braces(config: Mapping[str, Any]) -> None:
    """Refuse files and folders with `{name}` in their path: it becomes a word of a command, where
    that is filled in.

    Raises:
        Refusal: naming the key.
    """
    given = {key: config[key] for key in ("program", "command", "evaluate", "directory")}
    for key, value in given.items():
        for word in value if isinstance(value, list) else [value]:
            if not isinstance(word, str) or not command.NAME.search(word):
                continue
            if os.path.exists(word.partition(":")[0]):  # noqa: PTH110, raises for a long text
                raise Refusal(
                    f"config: {key}: {shown(word)}: what is in braces would be filled in; rename "
                    "it, or work in that folder"
                )


def refuse_bad_declaration(
    declared: UserData, datasets: Sequence[str], settings: Mapping[str, Any]
) -> None:
    """Refuse images of the user's that cannot be told from a built-in data set.

    Raises:
        Refusal: naming the key to change.
    """
    if len(datasets) > 1:
        raise Refusal(
            f"config: dataset.{declared.kind}: it is one data set, not {' and '.join(datasets)}"
        )
    if declared.name in DATASETS:
        raise Refusal(
            f"config: dataset.name: {declared.name} is built in; give your own images another name"
        )
    for key, usual in (("source", "auto"), ("archive", None), ("url", None)):
        if settings[key] != usual:
            raise Refusal(
                f"config: dataset.{key}: is for built-in data sets; leave it out beside "
                f"dataset.{declared.kind}"
            )


def refuse_impossible_source(
    datasets: Sequence[str], settings: Mapping[str, Any], reading: bool
) -> None:
    """Refuse a source that does not have the data set.

    Args:
        reading: skip the check of an undeclared data set.

    Raises:
        Refusal: naming the key to change.
    """
    if declared := UserData.from_config(settings):
        refuse_bad_declaration(declared, datasets, settings)
        return
    if settings["url"] is not None:
        refuse_credentials(settings["url"])
    source = settings["source"]
    known = {name: DATASETS[name].sources for name in datasets if name in DATASETS}
    if not reading and (unknown := [name for name in datasets if name not in known]):
        raise Refusal(
            f"config: dataset.name: {shown(unknown[0])} is not one of {', '.join(DATASETS)}; for "
            "your own images give dataset.folder, docs/your-own.md"
        )
    for dataset, sources in known.items():
        if source not in ("auto", *sources):
            raise Refusal(
                f"config: dataset.source: {dataset} is not available from {source}; use "
                f"{' or '.join(('auto', *sources))}"
            )
    if source == "archive" and settings["archive"] is None:
        raise Refusal(
            "config: dataset.archive: is null; source archive needs the path of the official "
            "archive"
        )
    for key in ("archive", "url"):
        from_it = [dataset for dataset, sources in known.items() if key in sources]
        if settings[key] is not None and len(from_it) > 1:
            raise Refusal(
                f"config: dataset.{key}: one {key} cannot hold {' and '.join(from_it)}; fetch them "
                "one at a time"
            )
