"""The parameters of a program, as it declares them in parameters.yaml beside its file.

Free of torch, because Snakemake reads the configuration in every dry run.
"""

import copy
import hashlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema

from manynodes.base.environment import SCRIPTS
from manynodes.base.errors import Refusal, one_line, shown
from manynodes.base.reading import parse_form, read_bytes, read_own_yaml
from manynodes.experiment.command import is_path
from manynodes.experiment.file import MOST_BYTES, read_config

BUILT_IN = "classifier"
# How a value grows with the number of processes, as a parameter such as learning_rate_rule says.
GROWTH: dict[str, Callable[[int], float]] = {
    "none": lambda _processes: 1.0,
    "linear": float,
    "square_root": math.sqrt,
}
FILE = "parameters.yaml"
CHECK = "check.py"
REFERENCE = re.compile(r'"(\$(?:ref|dynamicRef))":')


@dataclass(frozen=True)
class Declaration:
    """What a program declares.

    Attributes:
        folder: of the program.
        parameters: JSON schema of a single value by name, in their order. Besides JSON Schema's
            own words it may have `result` (false: changes no result; `evaluation`: only that of
            the evaluation), `format: path` or `code`, `only_with`, `per_process`,
            `grows_by` and `counts`, see docs/your-own-program.md.
    """

    folder: Path
    parameters: dict[str, dict[str, Any]]

    def check(
        self,
        parameters: Mapping[str, Any],
        geometry: Mapping[str, Any],
        dataset: Mapping[str, Any] | None,
    ) -> None:
        """Let the program's own `check` look at a run, if it has one.

        Args:
            geometry: nodes, nproc_per_node, cpus_per_proc, device and world_size.
            dataset: its name and what is known of it, see `config.facts_of`; None for none.

        Raises:
            Refusal: with the words of its ValueError.
        """
        path = self.folder / CHECK
        if not path.is_file():
            return
        try:
            function = loaded(path.resolve()).check
            # The runs share a list that is a default.
            given = dict(parameters), dict(geometry), dataset and dict(dataset)
            function(*copy.deepcopy(given))
        except (Refusal, ValueError) as problem:
            raise Refusal(f"config: {problem}") from None
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise Refusal(
                f"config: program: {path}: {type(error).__name__}: {one_line(str(error), 100)}"
            ) from None


@cache
def loaded(path: Path) -> ModuleType:
    """A module from its file; it may import what lies beside it."""
    name = f"check_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def declaration_of(config: Mapping[str, Any]) -> Declaration | None:
    """What the user's program of a configuration declares; None if it declares nothing.

    Raises:
        Refusal: its declaration is damaged.
    """
    if config.get("command") is not None:
        return None
    program = config.get("program")
    folders = folders_of(program) if isinstance(program, str) else []
    return next((read_declaration(each) for each in folders if declares(each / FILE)), None)


def declares(path: Path) -> bool:
    """Whether it is a declaration; a program may have a file of this name for something else."""
    try:
        text = read_bytes(path, MOST_BYTES).decode("utf-8-sig")
    except (OSError, ValueError):
        return False
    return re.search(r"^[\"']?properties[\"']?\s*:", text, re.MULTILINE) is not None


def folders_of(program: str) -> list[Path]:
    """Where the declaration of a Python file, or of `folder:package.module`, may lie."""
    if is_path(program):
        return [Path(program).parent]
    folder, _, module = program.rpartition(":")
    if not folder:
        # Finding an installed module would run its package.
        return []
    path = Path(folder, *module.split("."))
    return [path, path.parent]


def refuse_bad_references(
    name: str, spec: Mapping[str, Any], parameters: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse a parameter that another one is to decide, and cannot.

    Raises:
        ValueError: saying why.
    """
    size, rule, number = (spec.get(word) for word in ("per_process", "grows_by", "counts"))
    for other in filter(None, (size, rule, number)):
        if other not in parameters:
            raise ValueError(f"{name}: {shown(other)} is no parameter")
    if size and parameters[size].get("default", "") is not None:
        raise ValueError(f"{size}: needs the default null, as {name} is a multiple of it")
    if rule and (
        spec.get("type") != "number"
        or not {parameters[rule].get("default"), *parameters[rule].get("enum", [None])} <= {*GROWTH}
    ):
        raise ValueError(
            f"{name}: grows_by is for a number, and {rule} needs a default and an enum of "
            f"{', '.join(GROWTH)}"
        )


@cache
def built_in() -> Declaration:
    """The declaration of the built-in program. A test checks it, so that each start need not."""
    return Declaration(SCRIPTS / BUILT_IN, read_own_yaml(SCRIPTS / BUILT_IN / FILE)["properties"])


@cache
def read_declaration(folder: Path) -> Declaration:
    """The declaration in a program's folder.

    Raises:
        Refusal: it is not one.
    """
    path = folder / FILE
    given = read_config(path)
    try:
        parameters = parse_form(json.dumps(given, default=str).encode(), "parameters")["properties"]
        for name, spec in parameters.items():
            # It would be looked for in the whole configuration's schema, or on the network.
            if reference := REFERENCE.search(json.dumps(spec)):
                raise ValueError(f"{name}: {reference[1]} is not supported; write it out")
            for each in (spec, *spec.get("only_with", {}).values()):
                jsonschema.Draft202012Validator.check_schema(each)
            refuse_bad_references(name, spec, parameters)
            if "default" in spec:
                jsonschema.Draft202012Validator(spec).validate(spec["default"])
    except jsonschema.SchemaError as error:
        raise Refusal(f"config: {path}: {name}: {one_line(error.message, 100)}") from None
    except jsonschema.ValidationError as error:
        raise Refusal(f"config: {path}: {name}: default: {one_line(error.message, 90)}") from None
    except ValueError as error:
        raise Refusal(f"config: {path}: {error}; see docs/your-own-program.md") from None
    return Declaration(folder, parameters)
