"""What a configuration may hold: the schema, its defaults, and one line for whatever does not fit it."""

import difflib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from ddp.errors import Refusal

SCHEMA = Path(__file__).resolve().parents[2] / "schemas" / "config.schema.yaml"
WIDTHS_WANTED = "three whole numbers are needed"
TEXT_KEYS = (
    "experiment", "model", "optimizer", "device", "precision", "compile", "gradient_compression", "test_views", "launcher", "scratch",
    "resume",
)  # fmt: skip
PATTERN_WORDS = {
    "experiment": "letters, digits, - and _, the first a letter or digit",
    "dataset.url": "an address that begins with http:// or https://",
    "scratch": "an absolute path, nor one that begins with $NAME or ~",
}


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
    return {key: typed(key, value, as_float=is_number(key)) for key, value in resolved.items()}


def is_number(key: str) -> bool:
    """Whether a key's values are numbers that need not be whole."""
    reference = schema()["properties"][key].get("$ref", "")
    kind = reference.removeprefix("#/$defs/").removesuffix("_axis")
    return kind != "" and schema()["$defs"][kind].get("type") == "number"


def with_defaults(given: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of the schema, in its order, with the given value or else the default; `dataset` likewise inside."""
    resolved = {key: given.get(key, spec.get("default")) for key, spec in properties.items()}
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
    if error.validator == "required":
        return "config: experiment: is missing; name the experiment, its results go to results/<name>/"
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
