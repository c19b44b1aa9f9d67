"""From the configuration to the runs of an experiment: the product of its axes.

Free of torch, because Snakemake reads the configuration in every dry run.
"""

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ddp.base.environment import Environment
from ddp.base.errors import Refusal, shown
from ddp.base.reading import parse_json
from ddp.data.addresses import refuse_credentials
from ddp.data.datasets import DATASETS
from ddp.data.own.declaration import Own
from ddp.experiment.schema import validate
from ddp.models.names import (
    OWN_MODELS,
    TIMM,
    Form,
    is_own,
    refuse_unknown_model,
    with_muon,
    with_widths,
)

# Keys that change no result, besides the source of the data.
SITE = (
    "launcher",
    "hosts",
    "scratch",
    "save_every_epochs",
    "save_every_seconds",
    "resume",
    "replace",
    "timeout",
    "probe",
    "preflight",
    "images_in",
)
# Where a run is computed. `launch` takes these keys and passes them on to the program.
SIZE = ("nodes", "nproc_per_node", "cpus_per_proc")
GEOMETRY = (*SIZE, "device")
# A key, one of its values, and a key that has no meaning with that value.
IGNORED = (
    ("loss", "squared_error", "label_smoothing"),
    ("loss", "focal", "label_smoothing"),
    ("crop", "shift", "crop_area"),
    ("crop", "resized", "shift"),
)
MOST_SHOWN = 8  # values of an axis that are listed one by one
# Runs of an experiment. A dry run of 10,000 takes half a minute.
MOST_RUNS = 10_000
UNFIT = re.compile(r"[^A-Za-z0-9._,=+-]")  # in a name of a folder
LONGEST_NAME = 200  # file systems allow 255 bytes; some of them are for temporary files


@dataclass(frozen=True)
class Run:
    """One run: every key that can change its result, as in config/README.md."""

    dataset: str
    model: str
    model_args: dict[str, Any]
    initial_weights: str | None
    widths: tuple[int, int, int]
    epochs: int
    global_batch_size: int
    optimizer: str
    learning_rate: float
    momentum: float
    weight_decay: float
    warmup: float
    schedule: str
    loss: str
    label_smoothing: float
    flip: bool
    crop: str
    crop_size: int | list[int] | None
    crop_area: float
    test_size: int | list[int] | None
    colour: float
    order: str
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
    def values(self) -> dict[str, Any]:
        """Every key."""
        return vars(self)

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node

    def validation_images(self, train_images: int) -> int:
        """Number of training images held out for validation, of so many in the data set."""
        return round(self.validation_fraction * train_images)

    def training_images(self, train_images: int) -> int:
        """Number of images of an epoch, of so many in the data set."""
        return train_images - self.validation_images(train_images)

    def refuse_unfit_sizes(self, height: int, width: int) -> None:
        """Refuse a run that needs larger images than its data set has.

        Raises:
            Refusal: naming the key to change.
        """
        for key in ("crop_size", "test_size"):
            size = edges(getattr(self, key)) or (1, 1)
            if size[0] > height or size[1] > width:
                raise Refusal(
                    f"{key}: {size[0]} x {size[1]} is larger than the {height} x {width} images of "
                    f"{self.dataset}; use at most that"
                )
        window = edges(self.crop_size) or (height, width)
        if self.cutout > min(window):
            raise Refusal(
                f"cutout: {self.cutout} is more than the {window[0]} x {window[1]} pixels of an "
                "image; use less"
            )

    def refuse_unfit_counts(self, train_images: int) -> None:
        """Refuse a run that needs more images than the train split of its data set has.

        Raises:
            Refusal: naming the key to change.
        """
        held_out = self.validation_images(train_images)
        training = self.training_images(train_images)
        if training < 1 or (self.validation_fraction and not held_out):
            raise Refusal(
                f"validation_fraction: {self.validation_fraction} of the {train_images:,} images "
                f"of {self.dataset} leaves {held_out} for validation and {training} for training; "
                "both need one"
            )
        if self.global_batch_size > training:
            raise Refusal(
                f"global_batch_size: {self.global_batch_size} is more than the {training:,} "
                f"training images of {self.dataset}; use at most that"
            )
        # The smallest share of an epoch's smallest batch, see `batches.batch_sizes`.
        share = training // -(-training // self.global_batch_size) // self.world_size
        if share < 2:
            raise Refusal(
                f"global_batch_size: {self.global_batch_size} on {self.world_size} processes "
                f"leaves a process {share} images in some steps, too few for BatchNorm; use "
                f"{4 * self.world_size} or more"
            )

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
        experiment = Experiment.from_config(config, own=True)
        if experiment.axes:
            raise Refusal(f"--run must be one run; {', '.join(experiment.axes)} is a list")
        return next(iter(experiment.runs.values()))


def edges(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    """Height and width, from one or two numbers."""
    if size is None:
        return None
    return (size, size) if isinstance(size, int) else (size[0], size[1])


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
class Common:
    """A named product of axes.

    Attributes:
        config: the resolved configuration, every key present.
        axes: the keys that were given as lists, with their values, in the schema's order.
        runs: every run under the name of its folder, such as `nodes~2_seed~0`.
    """

    name: str
    config: dict[str, Any]
    axes: dict[str, list[Any]]
    runs: Mapping[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration without the keys that each run has a value of its own for."""
        own = {key for pair in self.config["runs"] for key in pair}
        if self.config.get("batch_per_process") is not None:
            own.add("global_batch_size")
        return {key: value for key, value in self.config.items() if key not in own}

    @property
    def own(self) -> Own | None:
        """The user's own data set; None if all are built in."""
        dataset = self.config["dataset"]
        return Own.from_config(dataset) if dataset else None

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
        varying = [
            f"{key} ({values_text(values)})" for key, values in self.axes.items() if len(values) > 1
        ]
        runs = f"{len(self.runs):,} run{'s' if len(self.runs) > 1 else ''}"
        what = "varying " + " and ".join(varying) if varying else "nothing varies"
        return f"experiment {self.name}: {runs}, {what}"

    @property
    def varies_in_size(self) -> bool:
        """Whether its runs compare several numbers of nodes, processes or CPUs."""
        sizes = {tuple(run.values[key] for key in SIZE) for run in self.runs.values()}
        return len(sizes) > 1

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
        values = {key: self.runs[name].values[key] for key in self.axes}
        return {"run": name} | {
            key: value_text(list(value) if isinstance(value, tuple) else value)
            if value is None or isinstance(value, tuple | list | dict)
            else value
            for key, value in values.items()
        }

    @property
    def name_pattern(self) -> str:
        """Regular expression for the names of the runs. Its length grows with the axes, not
        with their product.
        """
        if self.config["runs"]:
            return any_of(frozenset(self.runs))
        names = (
            f"{key}~{any_of(frozenset(map(value_text, values)))}"
            for key, values in self.axes.items()
        )
        return "_".join(names) or "run"


@dataclass(frozen=True)
class Experiment(Common):
    """An experiment with the built-in trainer."""

    runs: dict[str, Run]

    @staticmethod
    def from_config(config: Mapping[str, Any], own: bool = False) -> "Experiment":
        """Check the configuration, fill in the defaults and multiply out the axes.

        Args:
            own: for programs. A data set that is not built in need not be declared, as they read
                its manifest, and the model is not looked at.

        Raises:
            Refusal: a key is unknown, has the wrong type, or contradicts another one.
        """
        resolved = validate(config)
        values = resolved | {"dataset": resolved["dataset"]["name"]}
        fields = [field.name for field in dataclasses.fields(Run)]
        axes = {key: values[key] for key in fields if is_axis(key, values[key])}
        refuse_bad_batches(config, resolved)
        refuse_impossible_source(axes.get("dataset", [values["dataset"]]), resolved["dataset"], own)
        refuse_too_many(axes, len(resolved["runs"]))
        refuse_bad_paths(resolved)
        pairs = resolved["runs"]
        runs = {}
        for name, point in product(axes, pairs, fields):
            chosen = {key: values[key] for key in fields} | point
            chosen |= scaled(chosen, resolved)
            run = Run(**chosen | {"widths": tuple(chosen["widths"])})
            try:
                # Not by programs that only read: it runs the code of the user's own network.
                if not own:
                    refuse_unusable_model(run)
                refuse_impossible(run, axes)
            except Refusal as refusal:
                raise Refusal(f"config: {refusal}") from None
            runs[name] = run
        return Experiment(resolved["experiment"], resolved, all_axes(axes, pairs, fields), runs)

    @staticmethod
    def from_json(text: str) -> "Experiment":
        """An experiment from the JSON object on a program's command line.

        Raises:
            Refusal: it is not a JSON object, or not a valid configuration.
        """
        return Experiment.from_config(parse_option("--config", text), own=True)

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


def product(
    axes: Mapping[str, list[Any]], pairs: Sequence[Mapping[str, Any]], order: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every point of the product of the axes and the pairs, with the name of its folder.

    Args:
        pairs: runs in which keys vary together; empty for none.
        order: of the keys in a name.

    Raises:
        Refusal: the pairs have different keys or repeat one, or a name is too long.
    """
    for pair in pairs:
        if pair.keys() != pairs[0].keys():
            key = next(iter(pair.keys() ^ pairs[0].keys()))
            raise Refusal(f"config: runs: {key} is not in all of them; give it in each run")
        for key in pair:
            if key in axes:
                raise Refusal(f"config: runs: {key} is an axis too; keep one of the two")
    seen = set()
    for pair in pairs or [{}]:
        for values in itertools.product(*axes.values()):
            chosen = dict(pair) | dict(zip(axes, values, strict=True))
            point = {key: chosen[key] for key in [*order, *chosen] if key in chosen}
            name = run_name(point)
            if name in seen:
                raise Refusal(f"config: runs: {shown(dict(pair))} is there twice; give it once")
            seen.add(name)
            if len(name) > LONGEST_NAME:
                raise Refusal(
                    f"config: {len(point)} axes make a folder name of {len(name)} characters; "
                    f"vary fewer keys (at most {LONGEST_NAME})"
                )
            yield name, point


def all_axes(
    axes: Mapping[str, list[Any]], pairs: Sequence[Mapping[str, Any]], order: Sequence[str]
) -> dict[str, list[Any]]:
    """The axes with those of the pairs, each with its different values, in this order."""
    found = dict(axes)
    for pair in pairs:
        for key, value in pair.items():
            values = found.setdefault(key, [])
            if value not in values:
                values.append(value)
    return {key: found[key] for key in dict.fromkeys([*order, *found]) if key in found}


def scaled(chosen: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The global batch and the learning rate of a run with `batch_per_process`; empty without."""
    per_process = config["batch_per_process"]
    if per_process is None:
        return {}
    processes = chosen["nodes"] * chosen["nproc_per_node"]
    factor = {"none": 1.0, "linear": float(processes), "square_root": math.sqrt(processes)}
    return {
        "global_batch_size": per_process * processes,
        "learning_rate": chosen["learning_rate"] * factor[config["learning_rate_rule"]],
    }


def refuse_bad_batches(given: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse two sizes of a batch, and a rule without a size per process.

    Raises:
        Refusal: naming the key.
    """
    paired = any("global_batch_size" in run for run in config["runs"])
    if config["batch_per_process"] is None:
        if config["learning_rate_rule"] != "none":
            raise Refusal(
                "config: learning_rate_rule: scales with batch_per_process; give that, or leave "
                "the rule out"
            )
    elif "global_batch_size" in given or paired:
        raise Refusal("config: batch_per_process: global_batch_size is given too; keep one of them")


# Keys whose single value may be a list.
LISTS = ("widths", "crop_size", "test_size")


def is_axis(key: str, value: Any) -> bool:
    """Whether the value is a list of values."""
    return isinstance(value, list) and (
        key not in LISTS or any(isinstance(each, list) for each in value)
    )


def run_name(point: Mapping[str, Any]) -> str:
    """The folder of a run: what varies, as `key~value_key~value`; `run` if nothing does."""
    return "_".join(f"{key}~{value_text(value)}" for key, value in point.items()) or "run"


def value_text(value: Any) -> str:
    """A value as in the name of a run's folder."""
    if isinstance(value, dict):
        return ",".join(f"{key}={value_text(part)}" for key, part in value.items()) or "none"
    text = "-".join(map(str, value)) if isinstance(value, list) else str(value)
    # Such as my_models.py:Net.
    return UNFIT.sub("-", text if ":" in text or "/" in text else text.lower())


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


def refuse_unusable_model(run: Run) -> None:
    """Refuse a model that nobody has, or that cannot take the images of a built-in data set.

    This runs the code of the user's own network.

    Raises:
        Refusal: naming the model and the remedy.
    """
    refuse_unknown_model(run.model)
    if run.dataset in DATASETS and run.model not in OWN_MODELS:
        # Imported here, because torch takes seconds.
        from ddp.models.fitting import refuse_unfit_model

        built_in = DATASETS[run.dataset]
        form = Form(*built_in.image_shape, built_in.classes)
        refuse_unfit_model(run.model, run.widths, run.model_args, form)


def refuse_impossible(run: Run, axes: Mapping[str, Any]) -> None:
    """Refuse keys that contradict each other.

    Raises:
        Refusal: naming the key to change.
    """
    if run.global_batch_size % run.world_size:
        raise Refusal(
            f"global_batch_size: {run.global_batch_size} does not divide among "
            f"{run.world_size} processes "
            f"({run.nodes} nodes x {run.nproc_per_node}); "
            f"use {max(1, round(run.global_batch_size / run.world_size)) * run.world_size}"
        )
    if built_in := DATASETS.get(run.dataset):
        run.refuse_unfit_counts(built_in.train_images)
        run.refuse_unfit_sizes(*built_in.image_shape[:2])
    if not run.validation_fraction and "validation_seed" in axes:
        raise Refusal(
            "validation_seed: an axis that validation_fraction 0 ignores; give one value, "
            "or a fraction above 0"
        )
    if run.model not in with_widths() and "widths" in axes:
        raise Refusal(
            f"widths: an axis that model {run.model} ignores; give one value, or only "
            f"{' and '.join(with_widths())}"
        )
    if run.model_args and not (is_own(run.model) or run.model.startswith(TIMM)):
        raise Refusal(f"model_args: {run.model} takes none; they are for your own model or timm's")
    for key, value, ignored in IGNORED:
        if getattr(run, key) == value and ignored in axes:
            raise Refusal(
                f"{ignored}: an axis that {key}: {value} ignores; give one value, or another {key}"
            )
    if run.optimizer == "adamw" and "momentum" in axes:
        raise Refusal(
            "momentum: an axis that optimizer adamw ignores; give one value, or only sgd and muon"
        )
    if run.world_size == 1 and "gradient_compression" in axes:
        raise Refusal(
            "gradient_compression: an axis that a single process ignores; give one value, "
            "or more processes"
        )
    if run.optimizer == "muon" and run.model not in with_muon():
        raise Refusal(
            f"optimizer: muon knows the filters of {' and '.join(with_muon())}, not those "
            f"of {run.model}; use sgd or adamw"
        )
    if run.optimizer == "muon" and run.precision == "fp16":
        raise Refusal(
            "precision: muon cannot skip the steps that the gradient scaler of fp16 "
            "rejects; use bf16, or sgd or adamw"
        )


def refuse_too_many(axes: Mapping[str, list[Any]], pairs: int = 0) -> None:
    """Refuse a repeated value on an axis, and too many runs.

    Args:
        pairs: number of runs in which keys vary together.

    Raises:
        Refusal: naming the axis, or the number of runs.
    """
    for key, values in axes.items():
        # As text: 1 and 1.0 are the same folder, and lists are not hashable.
        if len({value_text(value) for value in values}) < len(values):
            raise Refusal(
                f"config: {key}: {shown(values)} has a value twice, or two with the same folder "
                "name; give each value once"
            )
    if (runs := math.prod(map(len, axes.values())) * max(1, pairs)) > MOST_RUNS:
        raise Refusal(
            f"config: {' x '.join(axes)} make {runs:,} runs; an experiment has at most "
            f"{MOST_RUNS:,}; give some axes fewer values"
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


def refuse_impossible_source(
    datasets: Sequence[str], settings: Mapping[str, Any], own: bool
) -> None:
    """Refuse a source that does not have the data set.

    Args:
        own: a data set that is not built in need not be declared.

    Raises:
        Refusal: naming the key to change.
    """
    if declared := Own.from_config(settings):
        if len(datasets) > 1:
            raise Refusal(
                f"config: dataset.{declared.kind}: it is one data set, not {' and '.join(datasets)}"
            )
        if declared.name in DATASETS:
            raise Refusal(
                f"config: dataset.name: {declared.name} is built in; give your own images another "
                "name"
            )
        for key, usual in (("source", "auto"), ("archive", None), ("url", None)):
            if settings[key] != usual:
                raise Refusal(
                    f"config: dataset.{key}: is for built-in data sets; leave it out beside "
                    f"dataset.{declared.kind}"
                )
        return
    if settings["url"] is not None:
        refuse_credentials(settings["url"])
    source = settings["source"]
    for dataset in datasets:
        if dataset not in DATASETS:
            if own:
                continue
            raise Refusal(
                f"config: dataset.name: {shown(dataset)} is not one of {', '.join(DATASETS)}; for "
                "your own images give dataset.folder, docs/your-own.md"
            )
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
        from_it = [
            dataset
            for dataset in datasets
            if dataset in DATASETS and key in DATASETS[dataset].sources
        ]
        if settings[key] is not None and len(from_it) > 1:
            raise Refusal(
                f"config: dataset.{key}: one {key} cannot hold {' and '.join(from_it)}; fetch them "
                "one at a time"
            )
