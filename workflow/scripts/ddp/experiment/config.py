"""From the configuration to the runs of an experiment: the product of its axes.

Free of torch, because Snakemake reads the configuration in every dry run.
"""

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ddp.base.environment import Environment
from ddp.base.errors import Refusal, shown
from ddp.base.reading import parse_json
from ddp.data.addresses import refuse_credentials
from ddp.data.datasets import DATASETS
from ddp.experiment.schema import validate
from ddp.models.names import OWN_MODELS, refuse_unfit_model, with_muon, with_widths

# Keys that change no result, besides the source of the data.
SITE = ("launcher", "scratch", "save_every_epochs", "save_every_seconds", "resume", "replace")
# Where a run is computed. `launch` takes these keys and passes them on to the program.
GEOMETRY = ("nodes", "nproc_per_node", "cpus_per_proc", "device")
MOST_SHOWN = 8  # values of an axis that are listed one by one
# Runs of an experiment. A dry run of 10,000 takes half a minute.
MOST_RUNS = 10_000
LONGEST_NAME = 200  # file systems allow 255 bytes; some of them are for temporary files


@dataclass(frozen=True)
class Run:
    """One run: every key that can change its result, as in config/README.md."""

    dataset: str
    model: str
    widths: tuple[int, int, int]
    epochs: int
    global_batch_size: int
    optimizer: str
    learning_rate: float
    momentum: float
    weight_decay: float
    warmup: float
    label_smoothing: float
    flip: bool
    shift: int
    cutout: int
    validation_fraction: float
    validation_seed: int
    checkpoint_every: int
    nodes: int
    nproc_per_node: int
    cpus_per_proc: int | str
    device: str
    precision: str
    compile: str
    gradient_compression: str
    seed: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node

    @property
    def validation_images(self) -> int:
        """Number of training images held out for validation."""
        return DATASETS[self.dataset].held_out(self.validation_fraction)

    @property
    def training_images(self) -> int:
        """Number of images of an epoch."""
        return DATASETS[self.dataset].train_images - self.validation_images

    def to_json(self) -> str:
        """Every key, as a JSON object."""
        return json.dumps(vars(self))

    def changes(self) -> str:
        """The keys that differ from the schema's defaults, without the geometry, as JSON.

        This is what a command line needs: `launch` passes the geometry on in the environment.
        """
        default = vars(default_run())
        changed = {key: value for key, value in vars(self).items() if value != default[key]}
        return json.dumps({key: value for key, value in changed.items() if key not in GEOMETRY})

    @staticmethod
    def from_json(text: str, contract: Environment | None = None) -> "Run":
        """A run from the JSON object on a program's command line.

        Args:
            contract: has the geometry, unless the text has it.

        Raises:
            Refusal: it is not a JSON object, or not one valid run.
        """
        given = parse_option("--run", text)
        config = (
            {"experiment": "run"}
            | geometry_of(contract)
            | given
            | ({"dataset": {"name": given["dataset"]}} if "dataset" in given else {})
        )
        experiment = Experiment.from_config(config)
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


def geometry_of(contract: Environment | None) -> dict[str, Any]:
    """The geometry from `launch`, as keys of the configuration."""
    given = {key: getattr(contract, key, None) for key in GEOMETRY}
    cpus = given["cpus_per_proc"]
    if cpus and cpus != "auto":
        given["cpus_per_proc"] = int(cpus)
    return {key: value for key, value in given.items() if value is not None}


@cache
def default_run() -> Run:
    """The run of a configuration with nothing but a name."""
    return next(iter(Experiment.from_config({"experiment": "default"}).runs.values()))


@dataclass(frozen=True)
class Experiment:
    """A named product of axes.

    Attributes:
        config: the resolved configuration, every key present.
        axes: the keys that were given as lists, with their values, in the schema's order.
        runs: every run under the name of its folder, such as `nodes~2_seed~0`.
    """

    name: str
    config: dict[str, Any]
    axes: dict[str, list[Any]]
    runs: dict[str, Run]

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "Experiment":
        """Check the configuration, fill in the defaults and multiply out the axes.

        Raises:
            Refusal: a key is unknown, has the wrong type, or contradicts another one.
        """
        resolved = validate(config)
        values = resolved | {"dataset": resolved["dataset"]["name"]}
        fields = [field.name for field in dataclasses.fields(Run)]
        axes = {key: values[key] for key in fields if is_axis(key, values[key])}
        refuse_impossible_source(axes.get("dataset", [values["dataset"]]), resolved["dataset"])
        refuse_too_many(axes)
        refuse_bad_paths(resolved)
        runs = {}
        for point in itertools.product(*axes.values()):
            varied = dict(zip(axes, point, strict=True))
            chosen = {key: values[key] for key in fields} | varied
            run = Run(**chosen | {"widths": tuple(chosen["widths"])})
            refuse_impossible(run, axes)
            runs[run_name(varied)] = run
        if (longest := max(map(len, runs))) > LONGEST_NAME:
            raise Refusal(
                f"config: {len(axes)} axes make a folder name of {longest} characters; vary fewer "
                f"keys (at most {LONGEST_NAME})"
            )
        return Experiment(resolved["experiment"], resolved, axes, runs)

    @property
    def summary(self) -> str:
        """One line: the name, the number of runs, and what varies."""
        varying = [
            f"{key} ({values_text(values)})" for key, values in self.axes.items() if len(values) > 1
        ]
        runs = f"{len(self.runs):,} run{'s' if len(self.runs) > 1 else ''}"
        what = "varying " + " and ".join(varying) if varying else "nothing varies"
        return f"experiment {self.name}: {runs}, {what}"

    @property
    def numeric_axes(self) -> list[str]:
        """The axes with two or more numbers, except the seeds: accuracy is plotted against them."""

        def numeric(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool)

        return [
            key
            for key, values in self.axes.items()
            if len(values) > 1
            and key not in ("seed", "validation_seed")
            and all(map(numeric, values))
        ]

    def axis_values(self, name: str) -> dict[str, Any]:
        """A run's name and its value on each axis, as in tables."""
        values = {key: getattr(self.runs[name], key) for key in self.axes}
        return {"run": name} | {
            key: "-".join(map(str, value)) if isinstance(value, tuple) else value
            for key, value in values.items()
        }

    @staticmethod
    def from_json(text: str) -> "Experiment":
        """An experiment from the JSON object on a program's command line.

        Raises:
            Refusal: it is not a JSON object, or not a valid configuration.
        """
        return Experiment.from_config(parse_option("--config", text))

    @property
    def name_pattern(self) -> str:
        """Regular expression for the names of the runs. Its length grows with the axes, not
        with their product.
        """
        names = (
            f"{key}~{any_of(frozenset(map(value_text, values)))}"
            for key, values in self.axes.items()
        )
        return "_".join(names) or "run"

    @property
    def science(self) -> str:
        """What the results depend on, as JSON: the keys that differ from the schema's
        defaults, without SITE.
        """
        default = validate({"experiment": self.name})
        changed = {
            key: value
            for key, value in self.config.items()
            if key not in SITE and value != default[key]
        }
        return json.dumps(
            {"experiment": self.name}
            | changed
            | {"dataset": {"name": self.config["dataset"]["name"]}}
        )


def is_axis(key: str, value: Any) -> bool:
    """Whether the value is a list of values. A single `widths` is itself a list."""
    return isinstance(value, list) and (key != "widths" or isinstance(value[0], list))


def run_name(point: Mapping[str, Any]) -> str:
    """The folder of a run: what varies, as `key~value_key~value`; `run` if nothing does."""
    return "_".join(f"{key}~{value_text(value)}" for key, value in point.items()) or "run"


def value_text(value: Any) -> str:
    """A value as in the name of a run's folder."""
    return "-".join(map(str, value)) if isinstance(value, list) else str(value).lower()


def values_text(values: Sequence[Any]) -> str:
    """The values of an axis in a few words."""
    texts = [value_text(value) for value in values]
    return (
        ", ".join(texts)
        if len(texts) <= MOST_SHOWN
        else f"{', '.join(texts[:3])}, … {texts[-1]}: {len(texts):,} values"
    )


def any_of(texts: frozenset[str]) -> str:
    """Regular expression for exactly these texts, short for a range of numbers:
    `[01234](?:|[01])`.

    Snakemake puts it into the pattern of every file and matches it for every job. With all seeds
    listed in it, 8 of the 50 s of a dry run of 5,000 runs went there (profiled).
    """
    # First characters by what may follow: characters with the same continuations form a class.
    followers: dict[str, set[str]] = {}
    for text in texts:
        if text:
            followers.setdefault(text[0], set()).add(text[1:])
    first_characters: dict[frozenset[str], list[str]] = {}
    for first, rest in followers.items():
        first_characters.setdefault(frozenset(rest), []).append(first)
    alternatives = [""] if "" in texts else []
    for after, firsts in first_characters.items():
        one_of = (
            re.escape(firsts[0])
            if len(firsts) == 1
            else f"[{''.join(map(re.escape, sorted(firsts)))}]"
        )
        alternatives.append(one_of + any_of(after))
    return alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(sorted(alternatives))})"


def refuse_impossible(run: Run, axes: Mapping[str, Any]) -> None:
    """Refuse keys that contradict each other.

    Raises:
        Refusal: naming the key to change.
    """
    # First, because a mistyped model also contradicts other keys.
    if run.model not in OWN_MODELS:
        refuse_unfit_model(run.model)
    if run.global_batch_size % run.world_size:
        raise Refusal(
            f"config: global_batch_size: {run.global_batch_size} does not divide among "
            f"{run.world_size} processes "
            f"({run.nodes} nodes x {run.nproc_per_node}); "
            f"use {max(1, round(run.global_batch_size / run.world_size)) * run.world_size}"
        )
    if run.training_images < 1 or (run.validation_fraction and not run.validation_images):
        raise Refusal(
            f"config: validation_fraction: {run.validation_fraction} of the "
            f"{DATASETS[run.dataset].train_images:,} images of "
            f"{run.dataset} leaves {run.validation_images} for validation and "
            f"{run.training_images} for training; both need one"
        )
    if run.global_batch_size > run.training_images:
        raise Refusal(
            f"config: global_batch_size: {run.global_batch_size} is more than the "
            f"{run.training_images:,} training images "
            f"of {run.dataset}; use at most that"
        )
    # The smallest share of an epoch's smallest batch, see `batches.batch_sizes`.
    share = (
        run.training_images // -(-run.training_images // run.global_batch_size) // run.world_size
    )
    if share < 2:
        raise Refusal(
            f"config: global_batch_size: {run.global_batch_size} on {run.world_size} processes "
            f"leaves a process {share} images in some "
            f"steps, too few for BatchNorm; use {4 * run.world_size} or more"
        )
    if not run.validation_fraction and "validation_seed" in axes:
        raise Refusal(
            "config: validation_seed: an axis that validation_fraction 0 ignores; give one value, "
            "or a fraction above 0"
        )
    if run.model not in with_widths() and "widths" in axes:
        raise Refusal(
            f"config: widths: an axis that model {run.model} ignores; give one value, or only "
            f"{' and '.join(with_widths())}"
        )
    if run.optimizer == "adamw" and "momentum" in axes:
        raise Refusal(
            "config: momentum: an axis that optimizer adamw ignores; give one value, or only sgd "
            "and muon"
        )
    if run.world_size == 1 and "gradient_compression" in axes:
        raise Refusal(
            "config: gradient_compression: an axis that a single process ignores; give one value, "
            "or more processes"
        )
    if run.optimizer == "muon" and run.model not in with_muon():
        raise Refusal(
            f"config: optimizer: muon knows the filters of {' and '.join(with_muon())}, not those "
            f"of {run.model}; use sgd or adamw"
        )
    if run.optimizer == "muon" and run.precision == "fp16":
        raise Refusal(
            "config: precision: muon cannot skip the steps that the gradient scaler of fp16 "
            "rejects; use bf16, or sgd or adamw"
        )


def refuse_too_many(axes: Mapping[str, list[Any]]) -> None:
    """Refuse a repeated value on an axis, and too many runs.

    Raises:
        Refusal: naming the axis, or the number of runs.
    """
    for key, values in axes.items():
        # As text: 1 and 1.0 are the same folder, and lists are not hashable.
        if len({value_text(value) for value in values}) < len(values):
            raise Refusal(f"config: {key}: {shown(values)} has a value twice; give each value once")
    if (runs := math.prod(map(len, axes.values()))) > MOST_RUNS:
        raise Refusal(
            f"config: {' x '.join(axes)} make {runs:,} runs; an experiment has at most "
            f"{MOST_RUNS:,}; give some axes fewer values"
        )


def refuse_bad_paths(config: Mapping[str, Any]) -> None:
    """Refuse scratch folders and archives that are not paths, or name an unknown user.

    Raises:
        Refusal: naming the key.
    """
    paths = [("scratch", path) for path in config["scratch"]] + [
        ("dataset.archive", config["dataset"]["archive"] or "")
    ]
    for key, path in paths:
        if "\0" in path or not path.isprintable():
            raise Refusal(f"config: {key}: {shown(path)} is not a path")
        if os.path.expanduser(path).startswith("~"):  # noqa: PTH111, Path.expanduser raises instead
            raise Refusal(
                f"config: {key}: {shown(path)}: there is no such user on this machine; give the "
                "whole path"
            )


def refuse_impossible_source(datasets: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Refuse a source that does not have the data set.

    Raises:
        Refusal: naming the key to change.
    """
    if settings["url"] is not None:
        refuse_credentials(settings["url"])
    source = settings["source"]
    for dataset in datasets:
        options = ("auto", *DATASETS[dataset].sources)
        if source not in options:
            raise Refusal(
                f"config: dataset.source: {dataset} is not available from {source}; use "
                f"{' or '.join(options)}"
            )
    if source == "archive" and settings["archive"] is None:
        raise Refusal(
            "config: dataset.archive: is null; source archive needs the path of the official "
            "archive"
        )
    for key in ("archive", "url"):
        from_it = [dataset for dataset in datasets if key in DATASETS[dataset].sources]
        if settings[key] is not None and len(from_it) > 1:
            raise Refusal(
                f"config: dataset.{key}: one {key} cannot hold {' and '.join(from_it)}; fetch them "
                "one at a time"
            )
