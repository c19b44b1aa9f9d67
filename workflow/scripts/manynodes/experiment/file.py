"""A configuration's file: read strictly, because parsers silently take what is given twice."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import yaml

from manynodes.base.errors import Refusal
from manynodes.base.reading import read_bytes

MOST_BYTES = 1_000_000
DEEPEST = 10  # levels
# Keys of run.json, which Snakemake takes for a configuration behind `--configfile FILE`.
OF_A_RUN = {"config", "versions"}
# A YAML merge key, which can multiply keys exponentially.
MERGE = "tag:yaml.org,2002:merge"
BOOLEAN = "tag:yaml.org,2002:bool"


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
            if not isinstance(root, yaml.MappingNode):
                raise Refusal(
                    f"config: {path} is not a mapping of keys to values; the keys are in "
                    "config/README.md"
                )
            check_node(root, lambda node: f"config: {path}: line {node.start_mark.line + 1}")
            config = loader.construct_document(root)
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
        if "escape character" in what:
            what += "; in double quotes \\ begins an escape, in single quotes it does not"
        raise Refusal(f"config: {path}:{where} {what}") from None
    except (ValueError, OverflowError, TypeError) as error:
        raise Refusal(f"config: {path}: {error}") from None
    if config.keys() >= OF_A_RUN:
        raise Refusal(
            f"config: {path} is what a run has left, no experiment's file; a target comes before "
            "--configfile, or behind --"
        )
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
        Refusal: it is a date, an octal number, a number to the base of 60 or with underscores.
    """
    kind = node.tag.rpartition(":")[2]
    if kind == "timestamp":
        raise Refusal(f"{where}: {node.value} is a date; put it in quotes")
    number = node.value.lstrip("+-").replace("_", "")
    octal = kind == "int" and re.fullmatch("0[0-7]+", number)
    if octal or (kind in ("int", "float") and re.search("[:_]", node.value)):
        refuse_meaning(node, where)


def refuse_meaning(node: yaml.ScalarNode, where: str) -> NoReturn:
    """Refuse a value with what it means in YAML."""
    means = json.dumps(yaml.SafeLoader("").construct_object(node))
    raise Refusal(
        f"{where}: {node.value} means {means} in YAML; write {means}, or put it in quotes if it is "
        "a text"
    )


def refuse_other_key(key: yaml.ScalarNode, where: str) -> None:
    """Refuse a key, such as the name of a class, that is another text when YAML has read it: the
    classes 1.1 and 1.10 would be one.

    Raises:
        Refusal: it is yes, 007, 1.10, a date or the like.
    """
    refuse_surprise(key, where)
    means = yaml.SafeLoader("").construct_object(key)
    if str(means) != key.value:
        raise Refusal(f"{where}: the key {key.value} means {means} in YAML; put it in quotes")


def check_node(root: yaml.Node, place: Callable[[yaml.Node], str]) -> None:
    """Refuse what YAML reads as something else than it looks like, and what multiplies.

    Args:
        place: where a node is, in words.

    Raises:
        Refusal: naming the place.
    """
    done: set[int] = set()  # what an alias repeats is the same node

    def check(node: yaml.Node, above: tuple[int, ...]) -> None:
        if id(node) in above or len(above) > DEEPEST:
            why = "a value contains itself" if id(node) in above else "nested too deep"
            raise Refusal(f"{place(node)}: {why}")
        if id(node) in done:
            return
        if node.tag not in yaml.SafeLoader.yaml_constructors:
            raise Refusal(f"{place(node)}: {node.tag} is not supported; use plain values")
        if isinstance(node, yaml.ScalarNode):
            refuse_surprise(node, place(node))
        inside = (*above, id(node))
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                # Of a country, say. Alone, as in `flip: no`, it is what it looks like.
                is_boolean = item.tag == BOOLEAN and item.value.lower() not in ("true", "false")
                if is_boolean:
                    refuse_meaning(item, place(item))
                check(item, inside)
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                if key.tag == MERGE:
                    raise Refusal(f"{place(key)}: << is not supported; write the keys out")
                if str(key.value) in keys:
                    raise Refusal(f"{place(key)}: {key.value} is given twice; keep one")
                if isinstance(key, yaml.ScalarNode):
                    refuse_other_key(key, place(key))
                keys.add(str(key.value))
                check(value, inside)
        done.add(id(node))

    check(root, ())
