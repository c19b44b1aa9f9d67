"""The keys of a configuration: those of every experiment, and the parameters that its program
declares. Their types and defaults, and a one-line message for each error.
"""

import difflib
import itertools
import json
import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jsonschema
import yaml

from manynodes.base.errors import Refusal, one_line, shown
from manynodes.base.reading import SCHEMAS, read_own_yaml
from manynodes.data.datasets import DATASETS
from manynodes.experiment import command
from manynodes.experiment.declaration import BUILT_IN, Declaration, built_in, declaration_of
from manynodes.experiment.file import DEEPEST

# Limits of a configuration: values in total, characters of a text, bits of a number.
MOST_VALUES = 100_000
LONGEST_TEXT = 4096
MOST_BITS = 1000
MOST_RUNS = 10_000  # of an experiment. A dry run of 10,000 takes a minute and 0.9 GB.
# Where a run is computed. `launch` takes these keys and passes them on to the program.
SIZE = ("nodes", "nproc_per_node", "cpus_per_proc")
GEOMETRY = (*SIZE, "device")
# The keys of every experiment that can be axes.
SHARED = ("dataset", *GEOMETRY, "seed")
# Keys that the built-in program does not have: what they say is fixed.
OF_PROGRAMS = (
    *("arguments", "directory", "environment", "parameters"),
    *("files", "outputs", "metrics", "result", "snapshots", "evaluate", "preflight"),
)
# The names that others give to our keys.
USUAL = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "batch_size": "global_batch_size",
    "batchsize": "global_batch_size",
    "num_epochs": "epochs",
    "gpus": "nproc_per_node",
    "num_nodes": "nodes",
    "amp": "precision",
    "arch": "model",
    "data": "dataset",
}
CLOSE = 0.7  # of difflib: class_weights is not initial_weights
CLOSER = 0.82  # where any other name is allowed: release is not replace, nor modes nodes
# Text that stands for a value of another type.
WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
WHOLE = re.compile(r"-?[0-9]{1,30}")
NUMBER = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
ZERO_FIRST = re.compile(r"-?0[0-9]")
# A part of a hash, such as 12345e7, rather than a number.
LIKE_A_HASH = re.compile(r"[0-9]{3,}e[0-9]+")
# What YAML may need no quotes for in a list.
PLAIN = re.compile(r"[\w./$~-]+")
# Keys whose texts are words of a command, and what these cannot have: NUL, half a character.
IN_COMMANDS = (
    "program", "command", "arguments", "environment", "evaluate", "parameters", "runs",
)  # fmt: skip
# Of these, and beside them, those in which `{name}` is filled in.
FILLED = ("command", "arguments", "evaluate", "directory")
IN_NO_WORD = re.compile("[\0\ud800-\udfff]")
MOST_WRITTEN = 90  # characters of a value that a refusal writes as it should be
# Of keys of ours that are lists themselves, by their length. Others are the user's.
HEIGHT_AND_WIDTH = "height and width are needed"
NUMBERS_WANTED = {
    **{(key, 2): HEIGHT_AND_WIDTH for key in ("dataset.image_size", "crop_size", "test_size")},
    ("widths", 3): "three whole numbers are needed",
}
PATTERN_WORDS = {
    "parameters": "a name of letters, digits and _, the first a letter",
    "program": "a file such as train.py, or a module",
    "dataset": "letters, digits, - and _, the first a letter or digit",
    "dataset.name": "letters, digits, - and _, the first a letter or digit",
    "experiment": "letters, digits, - and _, the first a letter or digit",
    "dataset.url": "an address that begins with http:// or https://",
    "scratch": "an absolute path, nor one that begins with $NAME or ~",
}
# Keys of which one value is ours, and what for.
TAKEN = {"experiment": ": results/data holds the data sets", "dataset.name": "", "runs.dataset": ""}
# Words of ours in a schema, which validators ignore.
ANNOTATIONS = ("axis", "result", "format", "only_with", "per_process", "grows_by", "counts")


@dataclass(frozen=True)
class Keys:
    """The keys of the experiments of one program.

    Attributes:
        built_in: whether it is the built-in one.
        declared: what it declares.
    """

    built_in: bool
    declared: Declaration | None

    @cached_property
    def properties(self) -> dict[str, dict[str, Any]]:
        """The schema of a single value of every key, in the order of tables and folder names."""
        found: dict[str, dict[str, Any]] = {}
        for key, spec in experiment_schema()["properties"].items():
            found[key] = spec
            if key == "dataset" and self.declared:
                found |= self.declared.parameters
        return found

    @cached_property
    def axes(self) -> dict[str, dict[str, Any]]:
        """Of these, the keys that a list of values makes an axis: those of a run, unless `axis` is
        false.
        """
        return {
            key: spec["properties"]["name"] if key == "dataset" else spec
            for key, spec in self.properties.items()
            if key in (*SHARED, *self.of_run) and spec.get("axis", True)
        }

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The declared parameters."""
        return tuple(self.declared.parameters) if self.declared else ()

    @cached_property
    def of_run(self) -> tuple[str, ...]:
        """Those of which a run has a value of its own: they decide its result. Others only decide
        how these grow with the number of processes.
        """
        specs = {key: self.properties[key] for key in self.parameters}
        rules = {spec.get(word) for spec in specs.values() for word in ("per_process", "grows_by")}
        return tuple(
            key
            for key, spec in specs.items()
            if spec.get("result", True) is True and key not in rules
        )

    @cached_property
    def site(self) -> tuple[str, ...]:
        """The keys that change no result."""
        return tuple(key for key, spec in self.properties.items() if spec.get("result") is False)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """JSON schema of a whole configuration."""
        properties = dict(self.properties)
        for key in self.axes.keys() - {"dataset"}:
            properties[key] = axis_form(properties[key])
        dataset = properties["dataset"]
        name = axis_form(dataset["properties"]["name"])
        properties["dataset"] = dataset | {"properties": dataset["properties"] | {"name": name}}
        values = properties["parameters"]["additionalProperties"]
        properties["parameters"] = properties["parameters"] | {
            "additionalProperties": axis_form(values)
        }
        rows = properties["runs"]
        items = {"properties": {key: bare(spec) for key, spec in self.axes.items()},
                 "additionalProperties": False if self.declared else values}  # fmt: skip
        properties["runs"] = rows | {"items": rows["items"] | items}
        return experiment_schema() | {"properties": properties}

    def validate(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with all defaults, and with numbers in the type of their key.

        Raises:
            Refusal: for the first wrong key, in the order of the schema.
        """
        refuse_oversized(config)
        self.refuse_misplaced(config)
        order = list(self.properties)
        validator = jsonschema.Draft202012Validator(self.schema)

        def position(error: jsonschema.ValidationError) -> int:
            return order.index(str(error.path[0])) if error.path else -1

        given = dict(config)
        # A user's program has a data set only if one is given.
        without = not self.built_in and given.get("dataset") is None
        if without:
            given.pop("dataset", None)
        for error in sorted(validator.iter_errors(given), key=position):
            raise Refusal(refusal_line(error))
        resolved = with_defaults(given, self.properties)
        if without:
            resolved["dataset"] = None
        if resolved["command"] is not None:
            if config.get("program") is not None:
                raise Refusal("config: command: program is given too; keep one of them")
            resolved["program"] = None
        if self.built_in:
            resolved["program"] = BUILT_IN
        if isinstance(resolved["runs"], str):
            runs = shown(resolved["runs"])
            raise Refusal(f"config: runs: {runs} is text; give a list of runs here")
        resolved |= {"runs": [self.with_numbers(run) for run in resolved["runs"]]}
        return self.with_numbers(resolved)

    def refuse_misplaced(self, config: Mapping[str, Any]) -> None:
        """Refuse keys that only have a meaning with another program.

        Raises:
            Refusal: naming the key.
        """
        for key, value in config.items():
            # The classifier's own Python may be staged.
            staged = key == "environment" and isinstance(value, dict) and {*value} == {"stage"}
            if self.built_in and key in OF_PROGRAMS and value is not None and not staged:
                raise Refusal(
                    f"config: {key}: is for your own program; give program or command too"
                )
            if self.declared or key in self.properties or USUAL.get(key) in self.properties:
                continue
            if not difflib.get_close_matches(str(key), self.properties, n=1, cutoff=CLOSE):
                raise Refusal(
                    f"config: {key}: unknown key; your program's own keys belong in "
                    "parameters, or are declared in parameters.yaml beside it"
                )
        if self.declared and config.get("parameters"):
            raise Refusal(
                "config: parameters: the program declares its own; give them beside program"
            )

    def refuse_no_axes(self, where: str, names: Collection[Any], config: Mapping[str, Any]) -> None:
        """Refuse names beside the axes that are not meant as parameters of a program that declares
        none: other keys of ours, and what is nearly a key and is used nowhere else.

        Args:
            where: the names stand, `runs` or `search`.

        Raises:
            Refusal: naming it.
        """
        parameters = config.get("parameters")
        others = {*names} - {*self.axes, *(parameters if isinstance(parameters, dict) else {})}
        if self.declared or not others:
            return
        named = command.names_in(str([config.get(key) for key in FILLED]))
        for name in sorted(map(str, others)):
            if name in self.properties:
                raise Refusal(
                    f"config: {where}.{name}: is no axis; give it beside program, or one value in "
                    "parameters too if the program has one of this name"
                )
            near = near_key(name, [*self.axes, *self.site], CLOSER)
            if near and name not in named:
                raise Refusal(
                    f"config: {where}.{name}: did you mean {near}? If not, name {{{name}}} in "
                    "arguments, or give one value in parameters too"
                )

    def with_numbers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of keys, with numbers in the type of their key."""
        specs = self.properties | self.axes
        return {
            key: typed(value, specs[key]) if key in specs else value
            for key, value in values.items()
        }

    def with_types(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with texts that are numbers, true, false or null as these, where text
        is not wanted.

        Snakemake reads `--config 'seed=[0, 1]'` as a list of texts, and YAML 1.1 reads 1e-3 as
        text.
        """
        refuse_oversized(config)
        found = dict(config)
        for key, value in config.items():
            if key == "runs" and isinstance(value, list):
                found[key] = self.typed_rows(value)
            elif key == "parameters" and isinstance(value, dict):
                found[key] = {name: wanted(part, {}) for name, part in value.items()}
            elif key == "search" and isinstance(value, dict):
                found[key] = {
                    name: self.typed_column(name, part) if isinstance(part, list) else part
                    for name, part in value.items()
                }
            elif key in self.properties:
                found[key] = wanted(value, self.properties[key])
        return found

    def typed_rows(self, rows: list[Any], as_written: bool = True) -> list[Any]:
        """The runs in which keys vary together, with their values in the types that are wanted.

        Args:
            as_written: as for `together`.
        """
        if not all(isinstance(row, dict) for row in rows):
            return rows
        found: list[dict[Any, Any]] = [{} for _ in rows]
        for key in dict.fromkeys(name for row in rows for name in row):
            having = [number for number, row in enumerate(rows) if key in row]
            values = self.typed_column(key, [rows[number][key] for number in having], as_written)
            for number, value in zip(having, values, strict=True):
                found[number][key] = value
        return found

    def typed_column(self, key: Any, values: list[Any], as_written: bool = True) -> list[Any]:
        """Values of one key in the types that are wanted; those of an unknown one as they are."""
        spec = self.axes.get(key, self.properties.get(key, None if self.declared else {}))
        if spec is None:
            return values
        return together(values, [spec] * len(values), as_written)

    def is_axis(self, key: str, value: Any) -> bool:
        """Whether the value of a key that can be an axis is a list of values."""
        return are_several(value, self.axes.get(key, {}))


@cache
def experiment_schema() -> dict[str, Any]:
    """The schema of the keys of every experiment, with the declared data sets."""
    found: dict[str, Any] = read_own_yaml(SCHEMAS / "experiment.schema.yaml")
    dataset = found["properties"]["dataset"]["properties"]
    sources = [source for declared in DATASETS.values() for source in declared.sources]
    dataset["source"]["enum"] = list(dict.fromkeys(["auto", *sources]))
    names = ", ".join(f"`{name}` ({entry.description})" for name, entry in DATASETS.items())
    dataset["name"]["description"] = dataset["name"]["description"].replace("DECLARED", names)
    return found


def keys_of(config: Mapping[str, Any]) -> Keys:
    """The keys that a configuration with such a program may have.

    Raises:
        Refusal: the program's declaration is damaged, or takes a name of ours.
    """
    if config.get("command") is None and config.get("program") in (None, BUILT_IN):
        return built_in_keys()
    keys = Keys(False, declaration_of(config))
    for name in keys.parameters:
        where = f"config: program: its parameters.yaml: {name}"
        if name in experiment_schema()["properties"]:
            raise Refusal(f"{where} is a key of every experiment; choose another name")
        for other in keys.properties[name].get("only_with", {}):
            if other not in (*keys.of_run, *SHARED, "world_size"):
                raise Refusal(f"{where}: only_with: {other} is no key of a run")
    return keys


@cache
def built_in_keys() -> Keys:
    return Keys(True, built_in())


def bare(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a value without what only documents it."""
    return {key: part for key, part in spec.items()
            if key not in (*ANNOTATIONS, "description", "default")}  # fmt: skip


def axis_form(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a value or of a list of values."""
    several = {"type": "array"} | ({"contains": {"type": "array"}} if takes_list(spec) else {})
    kept = {key: spec[key] for key in ("description", "default") if key in spec}
    axis = {"minItems": 1, "maxItems": MOST_RUNS, "items": bare(spec)}
    return kept | {"if": several, "then": axis, "else": bare(spec)}


def parts_of(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A schema, and those of which it combines some. True or false says nothing of a value."""
    yield spec
    inner = [spec[word] for word in ("if", "then", "else") if word in spec]
    for part in (*inner, *spec.get("anyOf", []), *spec.get("oneOf", [])):
        if isinstance(part, Mapping):
            yield from parts_of(part)


def kinds(spec: Mapping[str, Any]) -> set[str]:
    """The JSON types that a value may have; none if the schema does not say."""
    found: set[str] = set()
    for part in parts_of(spec):
        given = part.get("type", [])
        found |= {given} if isinstance(given, str) else {*given}
        values = [*part.get("enum", []), *([part["const"]] if "const" in part else [])]
        # A list among other values is one of an axis.
        lists = bool(values) and all(isinstance(value, list) for value in values)
        for value in values:
            found.add(
                "null" if value is None
                else "boolean" if isinstance(value, bool)
                else "integer" if isinstance(value, int)
                else "number" if isinstance(value, float)
                else "array" if lists
                else "string"
            )  # fmt: skip
    return found


def inside(spec: Mapping[str, Any], place: int | str) -> Mapping[str, Any]:
    """The schema of what is at an index or a name in a value; an empty one if it says nothing."""
    found = []
    for part in parts_of(spec):
        if isinstance(place, int):
            first = part.get("prefixItems", [])
            found.append(first[place] if place < len(first) else part.get("items"))
            continue
        named, other = part.get("properties", {}), part.get("additionalProperties")
        # Of any name, as in model_args, text or number is any value.
        any_value = isinstance(other, Mapping) and {"string"} < kinds(other) - {"null"}
        found.append(named.get(place, None if any_value else other))
    known = [each for each in found if isinstance(each, Mapping)]
    return {"anyOf": known} if len(known) > 1 else known[0] if known else {}


def takes_list(spec: Mapping[str, Any]) -> bool:
    """Whether a single value may be a list."""
    return "array" in kinds(spec)


def are_several(value: Any, spec: Mapping[str, Any]) -> bool:
    """Whether something is a list of values of a schema, and not one value."""
    return isinstance(value, list) and (
        not takes_list(spec) or any(isinstance(each, list) for each in value)
    )


def fits(value: Any, spec: Mapping[str, Any]) -> bool:
    """Whether a schema accepts a single value."""
    return jsonschema.Draft202012Validator(bare(spec)).is_valid(value)


def refuse_oversized(config: Any) -> None:
    """Refuse a configuration that would only consume time and memory.

    With aliases, a YAML file of a hundred lines can hold more values than fit into memory.

    Raises:
        Refusal: it has too many values, or one that is too long.
    """
    left = MOST_VALUES
    pending: list[tuple[str, Any, int]] = [("", config, 0)]
    while pending:
        key, value, depth = pending.pop()
        left -= 1
        if left < 0 or depth > DEEPEST:
            raise Refusal(
                f"config: {key or 'the file'}: nested too deep, or more than {MOST_VALUES:,} "
                "values in all; give fewer"
            )
        if isinstance(value, Mapping):
            pending += [
                (key or one_line(str(name), 40), part, depth + 1)
                for name, part in itertools.islice(value.items(), MOST_VALUES + 1)
            ]
        elif isinstance(value, list):
            pending += [(key, part, depth + 1) for part in value[: MOST_VALUES + 1]]
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise Refusal(
                f"config: {key}: a whole number of {value.bit_length()} bits is too large"
            )
        elif isinstance(value, float) and not math.isfinite(value):
            # JSON schema cannot exclude these, and YAML reads .nan and .inf as numbers.
            raise Refusal(f"config: {key}: {value} is not a finite number")
        elif isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise Refusal(
                f"config: {key}: a text of {len(value):,} characters is too long; use at most "
                f"{LONGEST_TEXT:,}"
            )
        elif isinstance(value, str) and key in IN_COMMANDS and IN_NO_WORD.search(value):
            raise Refusal(
                f"config: {key}: {shown(value)} has a character that no command line can hold; "
                "leave it out"
            )


def with_defaults(given: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of the schema, in its order, with its given or default value, including those of
    `dataset`; without one that has neither.
    """
    resolved = {
        key: given.get(key, spec.get("default"))
        for key, spec in properties.items()
        if key in given or "default" in spec
    }
    dataset = resolved.get("dataset")
    if "dataset" in properties and dataset is not None:
        resolved["dataset"] = with_defaults(dataset, properties["dataset"]["properties"])
    return resolved


def typed(value: Any, spec: Mapping[str, Any]) -> Any:
    """A number, or each number in a list, in the type of its key: JSON schema accepts 2.0 as an
    integer.
    """
    if isinstance(value, list):
        items = spec.get("items", spec)
        return [typed(item, items if isinstance(items, Mapping) else {}) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    types = kinds(spec)
    if "number" in types:
        # Where text may be too, a number is written as it is given.
        return value if "string" in types else float(value)
    return int(value) if "integer" in types else value


def refusal_line(error: jsonschema.ValidationError) -> str:
    """One line for a schema violation: the key, the value, and what is allowed."""
    key = ".".join(str(part) for part in error.absolute_path if isinstance(part, str))
    bare_key = key.removeprefix("runs.")
    value: Any = error.instance
    text = shown(value)
    limit: Any = error.validator_value
    schema: Any = error.schema
    if error.validator == "additionalProperties":
        return unknown_key_line(key, value, schema)
    if error.validator == "required":
        missing = next(name for name in limit if name not in value)
        path = f"{key}.{missing}" if key else missing
        remedy = "give it" if key else "name the experiment, its results go to results/<name>/"
        return f"config: {path}: is missing; {remedy}"
    wanted_numbers = NUMBERS_WANTED.get((bare_key, limit)) if isinstance(limit, int) else None
    # Any other list, such as environment.modules, has another limit.
    of_runs = isinstance(schema, Mapping) and schema.get("maxItems") == MOST_RUNS
    values = "one value" if limit == 1 else f"{limit} values"
    fewest = "an axis needs at least one value" if of_runs else f"give at least {values}"
    most = f"an experiment has at most {limit} runs" if of_runs else f"the most is {limit}"
    wording = {
        "minimum": f"{text} is too small; the least is {limit}",
        "maximum": f"{text} is too large; the most is {limit}",
        "exclusiveMinimum": f"{text} is too small; it must be above {limit}",
        "exclusiveMaximum": f"{text} is too large; it must be below {limit}",
        "minLength": f"{text} is too short; the least is {limit} characters",
        "maxLength": f"{text} is too long; the most is {limit} characters",
        "minItems": f"{text} is too short; {wanted_numbers or fewest}",
        "maxItems": f"{text} is too long; {wanted_numbers or most}",
        "maxProperties": f"{text} has more than {limit} entries",
        "const": (
            f"{text} is neither a whole number nor {limit}"
            if bare_key == "cpus_per_proc"
            else f"{text} is not {shown(limit)}"
        ),
        "minProperties": (
            "a run without a key; give it one, or leave it out"
            if key == "runs"
            else f"{text} has too few keys; give at least {limit}, or leave it out"
        ),
    }
    if error.validator == "not" and key in TAKEN:
        return f"config: {key}: {text} is taken{TAKEN[key]}; choose another name"
    if error.validator == "minLength" and not value:
        return f"config: {key}: the text is empty"
    if error.validator == "enum":
        allowed = ", ".join("null" if each is None else str(each) for each in limit)
        return f"config: {key}: {text} is not one of {allowed}"
    if error.validator == "pattern" and bare_key in PATTERN_WORDS:
        return f"config: {key}: {text} is not {PATTERN_WORDS[bare_key]}"
    if error.validator == "type":
        remedy = instead(key, value, limit, schema)
        if not remedy and "string" in ([limit] if isinstance(limit, str) else limit):
            remedy = as_text(key, value, len(error.absolute_path) == 1)
        return f"config: {key or 'the file'}: {text} is not {type_words(limit)}{remedy}"
    # The schemas of declared parameters may have any word of JSON Schema.
    said = wording.get(str(error.validator), one_line(error.message, 120))
    return f"config: {key}: {said}"


def unknown_key_line(key: str, value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """One line for a mapping with a key that its schema does not have.

    Args:
        key: that of the mapping; empty for the configuration.
    """
    known = list(schema.get("properties", {}))
    patterns = schema.get("patternProperties", {})
    unknown = next(
        str(name)
        for name in value
        if name not in known and not any(re.search(each, str(name)) for each in patterns)
    )
    near = near_key(unknown, known)
    path = f"{key}.{unknown}" if key else unknown
    others = "the keys are in config/README.md" if known else "leave it out"
    hint = f"did you mean {near}?" if near else others
    return f"config: {path}: unknown key; {hint}"


def near_key(unknown: str, known: Sequence[str], cutoff: float = CLOSE) -> str | None:
    """The key that is meant by an unknown name, if one is near."""
    if (usual := USUAL.get(unknown)) in known:
        return usual
    return next(iter(difflib.get_close_matches(unknown, known, n=1, cutoff=cutoff)), None)


def instead(key: str, value: Any, types: str | list[str], schema: Mapping[str, Any]) -> str:
    """A single value in the form of its key, as `; write [model.pt]`; empty if it has none."""
    if isinstance(value, dict) and key in FILLED and [*value.values()] == [None]:
        # Braces of YAML's own.
        return f'; write "{{{next(iter(value))}}}"'
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return ""
    first = next(iter(schema.get("properties", {})), None)
    if "array" in types:
        try:
            words = isinstance(value, str) and key in ("arguments", "command")
            form: Any = shlex.split(str(value)) if words else [value]
        except ValueError:
            return ""
        text = f"[{', '.join(map(in_yaml, form))}]"
    # A run of a single key is none.
    elif "object" in types and first and key != "runs":
        form, text = {first: value}, f"{{{first}: {in_yaml(value)}}}"
    else:
        return ""
    return f"; write {text}" if fits(form, schema) and len(text) <= MOST_WRITTEN else ""


def as_text(key: str, value: Any, outermost: bool) -> str:
    """How to give a text in place of another value.

    Args:
        outermost: the key is in no mapping or list, in which Snakemake's --config has texts only.
    """
    if not isinstance(value, int | float):
        return "; give one"
    # Behind --config, Snakemake strips quotes, and reads a number all the same.
    return "; put it in quotes" + f"; with --config, write '{key}=!!str …'" * outermost


def in_yaml(value: Any) -> str:
    """A value as a part of a list in YAML, in quotes if that would read something else without."""
    if isinstance(value, str) and PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value)


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


def wanted(value: Any, spec: Mapping[str, Any]) -> Any:
    """A value of a schema, or several of an axis, with the texts in it as `together`."""
    if are_several(value, spec):
        return together(value, [spec] * len(value))
    return together([value], [spec])[0]


def together(
    values: list[Any], specs: Sequence[Mapping[str, Any]], as_written: bool = True
) -> list[Any]:
    """Values that are beside each other, with the texts in them as what their schemas want.

    Texts of which these say nothing, as of parameters that no program declares, become numbers if
    all of them are some.

    Args:
        as_written: as for `is_value`.
    """
    pairs = [(named(value), spec) for value, spec in zip(values, specs, strict=True)]
    are_values = all(
        is_value(value, as_written)
        for value, spec in pairs
        if isinstance(value, str) and not kinds(spec)
    )
    found = [(value, converted(value, spec, are_values), spec) for value, spec in pairs]
    # A schema may want texts without saying so by its types. To ask it takes 0.2 ms a value.
    return [
        value
        if spec and "type" not in spec and value != new
        and fits(value, spec) and not fits(new, spec)
        else new
        for value, new, spec in found
    ]  # fmt: skip


def named(value: Any) -> Any:
    """A value with texts as names: the run reaches its program as JSON."""
    if isinstance(value, list):
        return [named(item) for item in value]
    if isinstance(value, dict):
        return {str(key): named(part) for key, part in value.items()}
    return value


def converted(value: Any, spec: Mapping[str, Any], are_values: bool) -> Any:
    """A single value with the texts in it in the types that its schema names.

    Args:
        are_values: whether a text becomes a number where it names none.
    """
    if isinstance(value, list):
        return together(value, [inside(spec, index) for index in range(len(value))])
    if isinstance(value, dict):
        return {name: wanted(part, inside(spec, name)) for name, part in value.items()}
    if not isinstance(value, str):
        return value
    types = kinds(spec)
    if not types:
        return parsed(value) if are_values else value
    if value == "null" and "null" in types:
        return None
    # A text among numbers is `auto`, say.
    others = types & {"integer", "number", "boolean"}
    text = "string" in types and (not others or fits(value, spec))
    return value if text else parsed(value)


def parsed(text: str) -> Any:
    """A text that is a number, true, false or null as that."""
    if text in WORDS:
        return WORDS[text]
    if WHOLE.fullmatch(text):
        return int(text)
    return float(text) if NUMBER.fullmatch(text) else text


def is_value(text: str, as_written: bool = True) -> bool:
    """Whether a text stands for a number, true, false or null, where it may be any text.

    A leading zero makes a name, such as that of a subject: `01`; so does an `e` behind three
    digits, as in a hash.

    Args:
        as_written: a fraction in another form than Python's is a name too: `1.10`.
    """
    if text in WORDS:
        return True
    if not NUMBER.fullmatch(text) or ZERO_FIRST.match(text) or LIKE_A_HASH.fullmatch(text):
        return False
    number = float(text)
    if not math.isfinite(number):
        return False
    return not as_written or "." not in text or "e" in text.lower() or repr(number) == text
