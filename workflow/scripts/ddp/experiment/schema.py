"""The schema of the configuration: its defaults, strict readers, and a one-line message for each
error.
"""

import difflib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from ddp.base.errors import Refusal, one_line, shown
from ddp.base.reading import SCHEMAS, read_bytes
from ddp.data.datasets import DATASETS, Dataset
from ddp.models.names import OWN_MODELS, Model

# Limits of a configuration: values in total, depth, characters of a text, bytes of the file.
MOST_VALUES = 100_000
DEEPEST = 10
LONGEST_TEXT = 4096
MOST_BITS = 1000
MOST_BYTES = 1_000_000
# A YAML merge key, which can multiply keys exponentially.
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
MERGE = "tag:yaml.org,2002:merge"
# Text that stands for a value of another type.
WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
WHOLE = re.compile(r"-?[0-9]{1,30}")
NUMBER = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
ZERO_FIRST = re.compile(r"-?0[0-9]")
# Of keys that are lists themselves, by their length.
NUMBERS_WANTED = {
    2: "height and width are needed",
    3: "three whole numbers are needed",
}
TEXT_KEYS = (
    "experiment",
    "program",
    "command",
    "arguments",
    "directory",
    "files",
    "outputs",
    "evaluate",
    "model",
    "schedule",
    "loss",
    "crop",
    "order",
    "images_in",
    "optimizer",
    "device",
    "precision",
    "compile",
    "gradient_compression",
    "test_views",
    "launcher",
    "hosts",
    "scratch",
    "resume",
)
# Texts of those keys that are null nevertheless.
NO_PROGRAM = [(key, "null") for key in ("program", "command", "directory", "evaluate")]
TEXT_KEYS_OF_DATASET = (
    *("name", "source", "archive", "url"),
    *("folder", "arrays", "labels", "python"),
)
PATTERN_WORDS = {
    "parameters": "a name of letters, digits and _, the first a letter",
    "program": "a file such as train.py, or a module",
    "dataset": "letters, digits, - and _, the first a letter or digit",
    "dataset.name": "letters, digits, - and _, the first a letter or digit",
    "experiment": "letters, digits, - and _, the first a letter or digit",
    "dataset.url": "an address that begins with http:// or https://",
    "scratch": "an absolute path, nor one that begins with $NAME or ~",
}


@cache
def schema() -> dict[str, Any]:
    """The configuration's JSON schema (draft 2020-12), with the declared data sets and models."""
    found = yaml.safe_load((SCHEMAS / "config.schema.yaml").read_text())
    properties = found["properties"]
    dataset = properties["dataset"]["properties"]
    sources = [source for declared in DATASETS.values() for source in declared.sources]
    dataset["source"]["enum"] = list(dict.fromkeys(["auto", *sources]))
    describe(dataset["name"], DATASETS)
    describe(properties["model"], OWN_MODELS)
    properties["runs"]["items"] |= {"properties": run_keys(found), "additionalProperties": False}
    return found


def run_keys(found: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a single value of every key that can be an axis."""
    references = {
        key: spec["$ref"].removesuffix("_axis")
        for key, spec in found["properties"].items()
        if spec.get("$ref", "").endswith("_axis")
    }
    references["dataset"] = "#/$defs/dataset"
    return {key: {"$ref": reference} for key, reference in references.items()}


def describe(spec: dict[str, Any], declared: Mapping[str, Dataset | Model]) -> None:
    """Put the declared names and their descriptions into the description of a key."""
    names = ", ".join(f"`{name}` ({entry.description})" for name, entry in declared.items())
    spec["description"] = spec["description"].replace("DECLARED", names)


def validate(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with all defaults, and with numbers in the type of their key.

    Raises:
        Refusal: for the first wrong key, in the order of the schema.
    """
    refuse_oversized(config)
    order = list(schema()["properties"])
    validator = jsonschema.Draft202012Validator(schema())

    def position(error: jsonschema.ValidationError) -> int:
        return order.index(error.path[0]) if error.path else -1

    for error in sorted(validator.iter_errors(dict(config)), key=position):
        raise Refusal(refusal_line(error))
    resolved = with_defaults(config, schema()["properties"])
    if isinstance(resolved["runs"], str):
        raise Refusal(f"config: runs: {shown(resolved['runs'])} is text; give a list of runs here")
    resolved |= {"runs": [with_numbers(run) for run in resolved["runs"]]}
    return with_numbers(resolved)


def with_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of keys, with numbers in the type of their key."""
    return {
        key: typed(key, value, as_float=is_number(key)) if key in schema()["properties"] else value
        for key, value in values.items()
    }


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


def is_number(key: str) -> bool:
    """Whether the values of a key are numbers that need not be whole."""
    reference = schema()["properties"][key].get("$ref", "")
    kind = reference.removeprefix("#/$defs/").removesuffix("_axis")
    return kind != "" and schema()["$defs"][kind].get("type") == "number"


def with_defaults(given: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of the schema, in its order, with its given or default value, including those of
    `dataset`.
    """
    resolved = {key: given.get(key, spec.get("default")) for key, spec in properties.items()}
    for key, spec in properties.items():
        if "properties" in spec:
            resolved[key] = with_defaults(resolved[key], spec["properties"])
    return resolved


def typed(key: str, value: Any, as_float: bool) -> Any:
    """A number, or each number in a list, in the type of its key: JSON schema accepts 2.0 as an
    integer.
    """
    if isinstance(value, list):
        return [typed(key, item, as_float) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return float(value) if as_float else int(value)


def refusal_line(error: jsonschema.ValidationError) -> str:
    """One line for a schema violation: the key, the value, and what is allowed."""
    key = ".".join(str(part) for part in error.absolute_path if isinstance(part, str))
    value: Any = error.instance
    text = shown(value)
    limit: Any = error.validator_value
    schema: Any = error.schema
    if error.validator == "additionalProperties":
        known = list(schema["properties"])
        unknown = next(str(name) for name in value if name not in known)
        usual = [key for key in (USUAL.get(unknown),) if key in known]
        near = usual or difflib.get_close_matches(unknown, known, n=1, cutoff=CLOSE)
        path = f"{key}.{unknown}" if key else unknown
        hint = f"did you mean {near[0]}?" if near else "the keys are in config/README.md"
        return f"config: {path}: unknown key; {hint}"
    if error.validator == "required":
        return (
            "config: experiment: is missing; name the experiment, its results go to results/<name>/"
        )
    wanted = NUMBERS_WANTED.get(limit) if isinstance(limit, int) else None
    wording = {
        "minimum": f"{text} is too small; the least is {limit}",
        "maximum": f"{text} is too large; the most is {limit}",
        "exclusiveMinimum": f"{text} is too small; it must be above {limit}",
        "exclusiveMaximum": f"{text} is too large; it must be below {limit}",
        "minLength": "the text is empty",
        "maxLength": f"{text} is too long; the most is {limit} characters",
        "minItems": f"{text} is too short; {wanted or 'an axis needs at least one value'}",
        "maxItems": f"{text} is too long; {wanted or f'an experiment has at most {limit} runs'}",
        "maxProperties": f"{text} has more than {limit} entries",
        "const": f"{text} is neither a whole number nor {limit}",
        "minProperties": "a run without a key; give it one, or leave it out",
        "not": f"{text} is taken: results/{value} holds the data sets; choose another name",
    }
    if error.validator == "enum":
        allowed = ", ".join("null" if each is None else str(each) for each in limit)
        return f"config: {key}: {text} is not one of {allowed}"
    if error.validator == "pattern":
        return f"config: {key}: {text} is not {PATTERN_WORDS[key.removeprefix('runs.')]}"
    if error.validator == "type":
        return f"config: {key or 'the file'}: {text} is not {type_words(limit)}"
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


def with_types(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with numbers, true, false and null in their types; text keys are
    unchanged.

    Snakemake reads `--config 'seed=[0, 1]'` as a list of texts, and YAML 1.1 reads 1e-3 as text.
    """
    refuse_oversized(config)
    typed_config = {
        key: value if key in TEXT_KEYS and (key, value) not in NO_PROGRAM else parsed(value)
        for key, value in config.items()
    }
    if isinstance(dataset := config.get("dataset"), dict):
        typed_config["dataset"] = {
            key: (None if value == "null" else value)
            if key in TEXT_KEYS_OF_DATASET
            else parsed(value)
            for key, value in dataset.items()
        }
    if is_program(config):
        if isinstance(parameters := config.get("parameters"), dict):
            typed_config["parameters"] = {
                key: meant(value) if isinstance(value, list) else meant([value])[0]
                for key, value in parameters.items()
            }
        if isinstance(rows := config.get("runs"), list):
            typed_config["runs"] = typed_rows(rows)
    return typed_config


def is_program(config: Mapping[str, Any]) -> bool:
    """Whether the configuration names a program of the user's."""
    return config.get("program") is not None or config.get("command") is not None


def parsed(value: Any) -> Any:
    """A value with every text in it that is a number, true, false or null as that."""
    if isinstance(value, list):
        return [parsed(item) for item in value]
    if isinstance(value, dict):
        return {key: parsed(item) for key, item in value.items()}
    if isinstance(value, str):
        if value in WORDS:
            return WORDS[value]
        if WHOLE.fullmatch(value):
            return int(value)
        if NUMBER.fullmatch(value):
            return float(value)
    return value


def meant(values: list[Any], as_written: bool = True) -> list[Any]:
    """The values of a parameter of the user's program.

    Texts become numbers if all texts among the values are some. A leading zero makes a name, such
    as that of a subject: `01`.

    Args:
        as_written: a fraction in another form than Python's is a name too: `1.10`.
    """

    def is_value(text: str) -> bool:
        if text in WORDS:
            return True
        if not NUMBER.fullmatch(text) or ZERO_FIRST.match(text):
            return False
        number = float(text)
        if not math.isfinite(number):
            return False
        return not as_written or "." not in text or "e" in text.lower() or repr(number) == text

    if not all(is_value(value) for value in values if isinstance(value, str)):
        return values
    return [parsed(value) for value in values]


def typed_rows(rows: list[Any], as_written: bool = True) -> list[Any]:
    """The runs of a user's program, with the values of each parameter typed as `meant`."""
    if not all(isinstance(row, dict) for row in rows):
        return rows
    found: list[dict[Any, Any]] = [{} for _ in rows]
    for key in dict.fromkeys(name for row in rows for name in row):
        having = [number for number, row in enumerate(rows) if key in row]
        values = [rows[number][key] for number in having]
        known = key in schema()["properties"]
        typed_values = parsed(values) if known else meant(values, as_written)
        for number, value in zip(having, typed_values, strict=True):
            found[number][key] = value
    return found


def read_config(path: Path) -> dict[str, Any]:
    """The configuration in a YAML or JSON file. A repeated key is refused; parsers silently take
    the last.

    Raises:
        Refusal: naming file, line and key.
    """
    try:
        text = read_bytes(path, MOST_BYTES).decode()
        config: Any = json_object(text, path)
        if config is None:
            # Composed once: of a megabyte that takes seconds.
            loader = yaml.SafeLoader(text)
            root = loader.get_single_node()
            check_node(path, root)
            config = loader.construct_document(root) if root else None
    except FileNotFoundError:
        raise Refusal(
            f"config: {path} is not there; give the path of an experiment's file, such as "
            "config/digits.yaml"
        ) from None
    except OSError as error:
        folder = "is a folder; give the path of a file in it"
        raise Refusal(f"config: {path}: {folder if path.is_dir() else error.strerror}") from None
    except UnicodeDecodeError:
        raise Refusal(f"config: {path} is not a text file in UTF-8") from None
    except RecursionError:
        raise Refusal(
            f"config: {path} is nested too deep; an experiment's file has keys and lists of values"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}:" if mark else ""
        what = (
            "indented with a tab; use spaces"
            if "'\\t'" in str(error)
            else getattr(error, "problem", None) or "not YAML"
        )
        raise Refusal(f"config: {path}:{where} {what}") from None
    except (ValueError, OverflowError, TypeError) as error:
        raise Refusal(f"config: {path}: {error}") from None
    return config


def json_object(text: str, path: Path) -> dict[str, Any] | None:
    """The JSON object in a text; None if it is not one. YAML rejects JSON that is indented with
    tabs.

    Raises:
        Refusal: it repeats a key.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                raise Refusal(f"config: {path}: {key} is given twice; keep one")
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=once)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def refuse_surprise(node: yaml.ScalarNode, where: str) -> None:
    """Refuse a value that YAML 1.1 reads as something else than it looks like.

    Raises:
        Refusal: it is a date, an octal number or a number to the base of 60.
    """
    kind = node.tag.rpartition(":")[2]
    if kind == "timestamp":
        raise Refusal(f"{where}: {node.value} is a date; put it in quotes")
    number = node.value.lstrip("+-").replace("_", "")
    octal = kind == "int" and re.fullmatch("0[0-7]+", number)
    if octal or (kind in ("int", "float") and ":" in number):
        means = yaml.SafeLoader("").construct_object(node)
        raise Refusal(
            f"{where}: {node.value} means {means} in YAML; write {means}, or put it in quotes if "
            "it is a text"
        )


def check_node(path: Path, root: yaml.Node | None) -> None:
    done: set[int] = set()  # what an alias repeats is the same node

    def check(node: yaml.Node, above: tuple[int, ...]) -> None:
        if id(node) in above or len(above) > DEEPEST:
            why = "a value contains itself" if id(node) in above else "nested too deep"
            raise Refusal(f"config: {path}: line {node.start_mark.line + 1}: {why}")
        if id(node) in done:
            return
        if node.tag not in yaml.SafeLoader.yaml_constructors:
            raise Refusal(
                f"config: {path}: line {node.start_mark.line + 1}: {node.tag} is not supported; "
                "use plain values"
            )
        if isinstance(node, yaml.ScalarNode):
            refuse_surprise(node, f"config: {path}: line {node.start_mark.line + 1}")
        inside = (*above, id(node))
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                check(item, inside)
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                if key.tag == MERGE:
                    raise Refusal(
                        f"config: {path}: line {key.start_mark.line + 1}: << is not supported; "
                        "write the keys out"
                    )
                if str(key.value) in keys:
                    raise Refusal(
                        f"config: {path}: line {key.start_mark.line + 1}: {key.value} is given "
                        "twice; keep one"
                    )
                keys.add(str(key.value))
                check(value, inside)
        done.add(id(node))

    if not isinstance(root, yaml.MappingNode):
        raise Refusal(
            f"config: {path} is not a mapping of keys to values; the keys are in config/README.md"
        )
    check(root, ())
