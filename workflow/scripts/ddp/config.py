"""From the configuration to the runs of an experiment: the product of its axes.

Free of torch, because Snakemake reads the configuration on every dry run.
"""

import dataclasses
import difflib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from ddp.datasets import DATASETS, SOURCES
from ddp.errors import Refusal
from ddp.model_names import OWN_MODELS, refuse_unfit_model

SCHEMA = Path(__file__).resolve().parents[2] / "schemas" / "config.schema.yaml"
WIDTHS_WANTED = "three whole numbers are needed"
TEXT_KEYS = ("experiment", "model", "optimizer", "device", "scratch")
PATTERN_WORDS = {
    "experiment": "letters, digits, - and _, the first a letter or digit",
    "dataset.url": "an address that begins with http:// or https://",
    "scratch": "an absolute path, nor one that begins with $NAME or ~",
}
LONGEST_NAME = 200  # file systems allow 255 bytes; some of them are for temporary files


@dataclass(frozen=True)
class Run:
    """One point of an experiment: everything that can change its result. Keys as in config/README.md."""

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
    validation_fraction: float
    validation_seed: int
    checkpoint_every: int
    nodes: int
    nproc_per_node: int
    cpus_per_proc: int | str
    device: str
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
        """Number of images trained on in an epoch."""
        return DATASETS[self.dataset].train_images - self.validation_images

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Run":
        """A run from the JSON object that Snakemake puts on a program's command line.

        Raises:
            Refusal: it is not a JSON object, or not one valid run.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise Refusal(f"--run is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise Refusal(f"--run must be a JSON object, not {text}")
        config = given | ({"dataset": {"name": given["dataset"]}} if "dataset" in given else {})
        experiment = Experiment.from_config(config)
        if experiment.axes:
            raise Refusal(f"--run must be one run; {', '.join(experiment.axes)} is a list")
        return next(iter(experiment.runs.values()))


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
        """Check the configuration, fill in the defaults and multiply the axes out.

        Raises:
            Refusal: a key is unknown, of the wrong type, or impossible together with another one.
        """
        resolved = validate(config)
        values = resolved | {"dataset": resolved["dataset"]["name"]}
        fields = [field.name for field in dataclasses.fields(Run)]
        axes = {key: values[key] for key in fields if is_axis(key, values[key])}
        refuse_impossible_source(axes.get("dataset", [values["dataset"]]), resolved["dataset"])
        runs = {}
        for point in itertools.product(*axes.values()):
            chosen = {key: values[key] for key in fields} | dict(zip(axes, point, strict=True))
            run = Run(**chosen | {"widths": tuple(chosen["widths"])})
            refuse_impossible(run, axes)
            runs[run_name(dict(zip(axes, point, strict=True)))] = run
        if (longest := max(map(len, runs))) > LONGEST_NAME:
            raise Refusal(f"config: {len(axes)} axes make a folder name of {longest} characters; vary fewer keys (at most {LONGEST_NAME})")
        return Experiment(resolved["experiment"], resolved, axes, runs)

    @property
    def name_pattern(self) -> str:
        """Regular expression for the names of the runs, of the size of the axes rather than of their product."""
        names = (f"{key}~(?:{'|'.join(re.escape(value_text(value)) for value in values)})" for key, values in self.axes.items())
        return "_".join(names) or "run"

    @property
    def science(self) -> str:
        """The configuration less the site's own keys, as JSON: what the results depend on."""
        science = {key: value for key, value in self.config.items() if key != "scratch"}
        return json.dumps(science | {"dataset": {"name": self.config["dataset"]["name"]}})


def is_axis(key: str, value: Any) -> bool:
    """Whether the value is a list of values. A single `widths` is itself a list."""
    return isinstance(value, list) and (key != "widths" or isinstance(value[0], list))


def run_name(point: Mapping[str, Any]) -> str:
    """The folder of a run: what varies, as `key~value_key~value`; `run` where nothing does."""
    return "_".join(f"{key}~{value_text(value)}" for key, value in point.items()) or "run"


def value_text(value: Any) -> str:
    """A value as it stands in the name of a run's folder."""
    return "-".join(map(str, value)) if isinstance(value, list) else str(value).lower()


def with_types(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with numbers, true, false and null in their types.

    What `--config 'seed=[0, 1]'` gives, Snakemake reads as lists of text; and YAML 1.1 reads 1e-3 as text. Keys whose values
    are text are left as they are.
    """

    def parsed(value: Any) -> Any:
        if isinstance(value, list):
            return [parsed(item) for item in value]
        if isinstance(value, str):
            with suppress(ValueError):
                return json.loads(value) if value in ("true", "false", "null") else int(value)
            with suppress(ValueError):
                return float(value)
        return value

    typed_config = {key: value if key in TEXT_KEYS else parsed(value) for key, value in config.items()}
    if isinstance(dataset := config.get("dataset"), dict):
        typed_config["dataset"] = {key: None if value == "null" else value for key, value in dataset.items()}
    return typed_config


def refuse_duplicate_keys(path: Path) -> None:
    """Refuse a file that gives a key twice: YAML readers silently take the last.

    Raises:
        Refusal: naming file, line and key.
    """

    def check(node: yaml.Node, seen: set[int]) -> None:
        if id(node) in seen:
            raise Refusal(f"config: {path}: line {node.start_mark.line + 1}: a value contains itself")
        inside = seen | {id(node)}
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                check(item, inside)
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                if str(key.value) in keys:
                    raise Refusal(f"config: {path}: line {key.start_mark.line + 1}: {key.value} is given twice; keep one")
                keys.add(str(key.value))
                check(value, inside)

    if root := yaml.compose(path.read_text(), yaml.SafeLoader):
        check(root, set())


@cache
def schema() -> dict[str, Any]:
    """The configuration's JSON schema (draft 2020-12)."""
    return yaml.safe_load(SCHEMA.read_text())


def validate(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with every default filled in and numbers in their key's type.

    Raises:
        Refusal: the first key, in the schema's order, that does not fit the schema.
    """
    order = list(schema()["properties"])
    validator = jsonschema.Draft202012Validator(schema())

    def position(error: jsonschema.ValidationError) -> int:
        return order.index(error.path[0]) if error.path else -1

    for error in sorted(validator.iter_errors(dict(config)), key=position):
        raise Refusal(refusal_line(error))
    resolved = with_defaults(config, schema()["properties"])
    floats = {field.name for field in dataclasses.fields(Run) if field.type is float}
    return {key: typed(key, value, key in floats) for key, value in resolved.items()}


def with_defaults(given: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of the schema, in its order, with the given value or else the default; `dataset` likewise inside."""
    resolved = {key: given.get(key, spec["default"]) for key, spec in properties.items()}
    for key, spec in properties.items():
        if "properties" in spec:
            resolved[key] = with_defaults(resolved[key], spec["properties"])
    return resolved


def typed(key: str, value: Any, as_float: bool) -> Any:
    """A number, or each number in a list, in its key's type: JSON schema takes 2.0 for an integer and 2 for a number.

    Raises:
        Refusal: it is no finite number: the schema has no word for that, and YAML reads .nan and .inf as numbers.
    """
    if isinstance(value, list):
        return [typed(key, item, as_float) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        if math.isfinite(value):
            return float(value) if as_float else int(value)
    except OverflowError:
        pass
    raise Refusal(f"config: {key}: {str(value)[:20]} is not a finite number")


def refusal_line(error: jsonschema.ValidationError) -> str:
    """One line for a schema violation: the key, what was found, what would be right."""
    key = ".".join(str(part) for part in error.absolute_path if isinstance(part, str))
    value: Any = error.instance
    limit: Any = error.validator_value
    schema: Any = error.schema
    if error.validator == "additionalProperties":
        known = list(schema["properties"])
        unknown = next(str(name) for name in value if name not in known)
        near = difflib.get_close_matches(unknown, known, n=1)
        path = f"{key}.{unknown}" if key else unknown
        hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
        return f"config: {path}: unknown key; {hint}"
    shown = json.dumps(value, default=str)
    wording = {
        "minimum": f"{shown} is too small; the least is {limit}",
        "maximum": f"{shown} is too large; the most is {limit}",
        "exclusiveMinimum": f"{shown} is too small; it must be above {limit}",
        "exclusiveMaximum": f"{shown} is too large; it must be below {limit}",
        "minLength": "the text is empty",
        "maxLength": f"{shown[:20]}… is too long; the most is {limit} characters",
        "minItems": f"{shown} is too short; {'an axis needs at least one value' if limit == 1 else WIDTHS_WANTED}",
        "maxItems": f"{shown} is too long; {WIDTHS_WANTED}",
        "uniqueItems": f"{shown} names a value twice; each run must be another one",
        "const": f"{shown} is neither a whole number nor {limit}",
        "not": f"{shown} is taken: results/{value} holds the data sets; choose another name",
    }
    if error.validator == "enum":
        return f"config: {key}: {shown} is not one of {', '.join(limit)}"
    if error.validator == "pattern":
        return f"config: {key}: {shown} is not {PATTERN_WORDS[key]}"
    if error.validator == "type":
        return f"config: {key or 'the file'}: {shown} is not {type_words(limit)}"
    return f"config: {key}: {wording[str(error.validator)]}"


def type_words(types: str | list[str]) -> str:
    words = {
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "boolean": "true or false",
        "array": "a list",
        "object": "a mapping of keys to values",
        "null": "null",
    }
    return " or ".join(words[name] for name in ([types] if isinstance(types, str) else types))


def refuse_impossible(run: Run, axes: Mapping[str, Any]) -> None:
    """Refuse combinations of keys that no single key shows to be wrong.

    Raises:
        Refusal: naming the key to change.
    """
    if run.global_batch_size % run.world_size:
        raise Refusal(
            f"config: global_batch_size: {run.global_batch_size} does not divide among {run.world_size} processes "
            f"({run.nodes} nodes x {run.nproc_per_node}); "
            f"use {max(1, round(run.global_batch_size / run.world_size)) * run.world_size}"
        )
    if run.training_images < 1 or (run.validation_fraction and not run.validation_images):
        raise Refusal(
            f"config: validation_fraction: {run.validation_fraction} of the {DATASETS[run.dataset].train_images:,} images of "
            f"{run.dataset} leaves {run.validation_images} for validation and {run.training_images} for training; both need one"
        )
    if run.global_batch_size > run.training_images:
        raise Refusal(
            f"config: global_batch_size: {run.global_batch_size} is more than the {run.training_images:,} training images "
            f"of {run.dataset}; use at most that"
        )
    # The smallest share of an epoch's smallest batch; see `batches.deal`.
    share = run.training_images // -(-run.training_images // run.global_batch_size) // run.world_size
    if share < 2:
        raise Refusal(
            f"config: global_batch_size: {run.global_batch_size} on {run.world_size} processes leaves a process {share} images in some "
            f"steps, too few for BatchNorm; use {4 * run.world_size} or more"
        )
    if not run.validation_fraction and "validation_seed" in axes:
        raise Refusal("config: validation_seed: an axis that validation_fraction 0 ignores; give one value, or a fraction above 0")
    if run.model != "airbench" and "widths" in axes:
        raise Refusal(f"config: widths: an axis that model {run.model} ignores; give one value, or only model airbench")
    if run.optimizer != "sgd" and "momentum" in axes:
        raise Refusal(f"config: momentum: an axis that optimizer {run.optimizer} ignores; give one value, or only sgd")
    if run.model not in OWN_MODELS:
        refuse_unfit_model(run.model)


def refuse_impossible_source(datasets: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Refuse sources that do not have the data sets.

    Raises:
        Refusal: naming the key to change.
    """
    source = settings["source"]
    for dataset in datasets:
        options = ("auto", *SOURCES[dataset])
        if source not in options:
            raise Refusal(f"config: dataset.source: {dataset} is not to be had from {source}; use {' or '.join(options)}")
    if source == "archive" and settings["archive"] is None:
        raise Refusal("config: dataset.archive: is null; source archive needs the path of the official archive")
    for key in ("archive", "url"):
        from_it = [dataset for dataset in datasets if key in SOURCES[dataset]]
        if settings[key] is not None and len(from_it) > 1:
            raise Refusal(f"config: dataset.{key}: one {key} cannot hold {' and '.join(from_it)}; fetch them one at a time")
