"""An experiment with a training program of the user's: its configuration and its runs.

Free of torch, because Snakemake reads the configuration in every dry run.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import yaml

from ddp.base.errors import Refusal, shown
from ddp.base.reading import SCHEMAS, file_sha256, is_file
from ddp.base.sources import local_sources, sources_sha256
from ddp.data.folder import MANIFEST
from ddp.experiment import schema
from ddp.experiment.config import (
    SITE,
    Common,
    Experiment,
    all_axes,
    is_axis,
    product,
    refuse_bad_paths,
    refuse_impossible_source,
    refuse_too_many,
)

# The keys that every experiment has.
SHARED = (
    *("experiment", "dataset", "nodes", "nproc_per_node", "cpus_per_proc", "device", "seed"),
    *("runs", "launcher", "hosts", "scratch", "replace", "timeout"),
)
KEYS = ("dataset", "nodes", "nproc_per_node", "cpus_per_proc", "device", "seed")
# Folders, which are known only where the program runs.
FOLDERS = ("data", "files", "results", "state", "here", "python")
# Columns of summary.csv that are not the program's.
COLUMNS = (
    *("seconds", "attempts", "commit", "dirty"),
    *("sources_sha256", "data_sha256", "files_sha256", "run_sha256", "evaluation_sha256"),
)
OF_EVALUATION = ("outputs", *FOLDERS)
NAME = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
PARAMETER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,49}")
# Known to each process alone; a parameter of the user's with such a name comes first.
OF_PROCESS = ("rank", "local_rank")
PYTHON = "{python}"  # in the words of a command: the Python that runs Snakemake


@dataclass(frozen=True)
class ProgramRun:
    """One run of the user's program.

    Attributes:
        command: its words, with the arguments; `{name}` stands for a value or a folder.
        parameters: the user's own.
        dataset: to stage; None for none.
    """

    command: tuple[str, ...]
    parameters: dict[str, Any]
    dataset: str | None
    nodes: int
    nproc_per_node: int
    cpus_per_proc: int | str
    device: str
    seed: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node

    @property
    def values(self) -> dict[str, Any]:
        """What `{name}` may stand for, and what the program finds in LAUNCH_PARAMETERS."""
        keys = {key: getattr(self, key) for key in ("command", *KEYS)}
        return keys | {"world_size": self.world_size} | self.parameters

    def to_json(self) -> str:
        """Every value, as a JSON object."""
        return json.dumps(self.values)


@dataclass(frozen=True)
class ProgramExperiment(Common):
    """A named product of axes, each point a run of the user's program."""

    runs: dict[str, ProgramRun]

    @staticmethod
    def from_config(config: Mapping[str, Any], own: bool = False) -> "ProgramExperiment":
        """Check the configuration, fill in the defaults and multiply out the axes.

        Args:
            own: as for `Experiment.from_config`.

        Raises:
            Refusal: a key is unknown, has the wrong type, or contradicts another one.
        """
        resolved = validate(config)
        name = resolved["dataset"]["name"] if resolved["dataset"] else None
        values = resolved | {"dataset": name}
        refuse_contradictions(resolved)
        parameters = resolved["parameters"]
        axes = {key: values[key] for key in KEYS if is_axis(key, values[key])}
        axes |= {key: value for key, value in parameters.items() if isinstance(value, list)}
        if resolved["dataset"]:
            refuse_impossible_source(axes.get("dataset", [name]), resolved["dataset"], own)
        pairs = resolved["runs"]
        order = [*KEYS, *parameters]
        refuse_too_many(axes, len(pairs))
        refuse_bad_paths(resolved)
        words = tuple(command(resolved))
        runs = {}
        for run_name, point in product(axes, pairs, order):
            chosen: dict[str, Any] = {key: point.get(key, values[key]) for key in KEYS}
            own_parameters = parameters | {k: v for k, v in point.items() if k not in KEYS}
            run = ProgramRun(command=words, parameters=own_parameters, **chosen)
            missing = absent(resolved, run)
            refuse_unknown_names("arguments", words, run, {*FOLDERS, *OF_PROCESS} - missing)
            known = set(OF_EVALUATION) - missing - {"state"}
            refuse_unknown_names("evaluate", evaluation(resolved), run, known)
            runs[run_name] = run
        return ProgramExperiment(
            resolved["experiment"], resolved, all_axes(axes, pairs, order), runs
        )

    @property
    def program_name(self) -> str:
        """The program in messages."""
        words = command(self.config)
        # A script, if the command is one for an interpreter.
        files = [word for word in words if is_file(word.removeprefix("{here}/"))]
        name = Path((files or words)[0].removeprefix("{here}/")).stem
        return module_of(words) or name.strip("{}").lstrip("-") or "program"

    @property
    def evaluation(self) -> tuple[str, ...]:
        """The words of the program that evaluates; empty for none."""
        return evaluation(self.config)

    @property
    def science(self) -> str:
        """What the results depend on, as JSON: the keys that differ from the defaults, without
        SITE.
        """
        changed = {
            key: value
            for key, value in self.config.items()
            if key not in SITE and value != properties()[key].get("default")
        }
        if self.config["dataset"]:
            changed["dataset"] = {"name": self.config["dataset"]["name"]}
        return json.dumps(changed)

    @property
    def sources_sha256(self) -> str:
        """SHA-256 of the program's file, or the command's, and of the modules beside it that it
        imports.

        Raises:
            Refusal: a file is missing, or is no Python.
        """
        return words_sha256(command(self.config))

    @property
    def evaluation_sha256(self) -> str:
        """The same of the program that evaluates."""
        return words_sha256(self.evaluation) if self.evaluation else ""


def read_experiment(config: Mapping[str, Any], own: bool = False) -> Experiment | ProgramExperiment:
    """The experiment of a configuration, with the built-in trainer or with a user's program.

    Raises:
        Refusal: as `Experiment.from_config`.
    """
    if schema.is_program(config):
        return ProgramExperiment.from_config(config, own)
    refuse_keys_of_programs(config)
    return Experiment.from_config(config, own)


def refuse_keys_of_programs(config: Mapping[str, Any]) -> None:
    """Refuse keys that only have a meaning beside `program`.

    Raises:
        Refusal: naming the key.
    """
    known = schema.schema()["properties"]
    for key in config:
        if key in properties() and key not in known and config[key] is not None:
            raise Refusal(f"config: {key}: is for your own program; give program or command too")


@cache
def properties() -> dict[str, Any]:
    """The keys of such a configuration, in their order."""
    given = yaml.safe_load((SCHEMAS / "program.schema.yaml").read_text())["properties"]
    shared = {key: schema.schema()["properties"][key] for key in SHARED}
    shared["dataset"] = shared["dataset"] | {"type": ["object", "null"], "default": None}
    items = {"properties": {key: schema.run_keys(schema.schema())[key] for key in KEYS},
             "additionalProperties": {"$ref": "#/$defs/scalar"}}  # fmt: skip
    shared["runs"] = shared["runs"] | {"items": shared["runs"]["items"] | items}
    return {"experiment": shared["experiment"]} | given | shared


@cache
def program_schema() -> dict[str, Any]:
    found = yaml.safe_load((SCHEMAS / "program.schema.yaml").read_text())
    return found | {
        "properties": properties(),
        "$defs": schema.schema()["$defs"] | found["$defs"],
    }


def validate(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with all defaults.

    Raises:
        Refusal: for the first wrong key.
    """
    schema.refuse_oversized(config)
    for key in config:
        if key in schema.schema()["properties"] and key not in properties():
            raise Refusal(
                f"config: {key}: is a key of the built-in trainer; for your own program give it "
                "in parameters"
            )
    for error in jsonschema.Draft202012Validator(program_schema()).iter_errors(dict(config)):
        raise Refusal(schema.refusal_line(error))
    found = schema.with_defaults(config, {key: value for key, value in properties().items()
                                          if key != "dataset"})  # fmt: skip
    dataset = config.get("dataset")
    if dataset is not None:
        dataset = schema.with_defaults(dataset, properties()["dataset"]["properties"])
    found |= {"runs": [schema.with_numbers(run) for run in found["runs"]]}
    return schema.with_numbers(found) | {"dataset": dataset}


def refuse_contradictions(config: Mapping[str, Any]) -> None:
    """Refuse keys that contradict each other, and unsafe paths.

    Raises:
        Refusal: naming the key to change.
    """
    if config["program"] is not None and config["command"] is not None:
        raise Refusal("config: command: program is given too; keep one of them")
    names = [*config["parameters"], *(set().union(*config["runs"]) - set(KEYS))]
    for name in names:
        if not isinstance(name, str) or not PARAMETER.fullmatch(name):
            raise Refusal(
                f"config: runs: {shown(name)} is not {schema.PATTERN_WORDS['parameters']}"
            )
        if name in KEYS or name in (*OF_EVALUATION, *COLUMNS, "world_size", "command", "run"):
            where = "give it beside program" if name in KEYS else "choose another name"
            raise Refusal(f"config: parameters.{name}: has a meaning of its own; {where}")
    for path in config["outputs"]:
        parts = PurePosixPath(path)
        unfit = parts.is_absolute() or ".." in parts.parts or str(parts) == "."
        # Braces would be Snakemake's wildcards; stars are for a shell.
        if unfit or not path.isprintable() or set(path) & set("{}*?[]"):
            raise Refusal(
                f"config: outputs: {shown(path)} is not a path inside the results folder; give "
                "one such as model.pt, or a folder"
            )
    outputs = [PurePosixPath(path) for path in config["outputs"]]
    for number, path in enumerate(outputs):
        for other in outputs[:number]:
            if path == other or path in other.parents or other in path.parents:
                raise Refusal(
                    f"config: outputs: {shown(str(path))} and {shown(str(other))} are the same, or "
                    "one is inside the other; keep one of them"
                )
    names = [PurePosixPath(path).name for path in config["files"]]
    for name in names:
        if not name or names.count(name) > 1 or name == MANIFEST:
            raise Refusal(
                f"config: files: {shown(name)} is there twice, is {MANIFEST}, or has no name; "
                "files are staged in one folder and need names of their own"
            )


def command(config: Mapping[str, Any]) -> list[str]:
    """The words that start the program."""
    arguments = [word_text(word) for word in config["arguments"]]
    if config["command"] is not None:
        # Those that are files beside the configuration are paths by now.
        words = map(word_text, config["command"])
        return [here(word) if is_file(word) else word for word in words] + arguments
    return [*python(config["program"]), *arguments]


def python(program: str) -> list[str]:
    """The words that start a Python file or a module; `folder:package.module` names its folder."""
    if program.endswith(".py") or "/" in program.rpartition(":")[2]:
        return [PYTHON, here(program)]
    folder, _, module = program.rpartition(":")
    return [PYTHON, "-m", f"{here(folder)}:{module}" if folder else module]


def here(path: str) -> str:
    """A path that holds in any working directory; that of a checkout stays out of it."""
    return path if Path(path).is_absolute() else f"{{here}}/{path}"


def evaluation(config: Mapping[str, Any]) -> tuple[str, ...]:
    given = config["evaluate"]
    if given is None:
        return ()
    first, *rest = [given] if isinstance(given, str) else given
    return (*python(word_text(first)), *map(word_text, rest))


def word_text(value: Any) -> str:
    """A value as a word of a command line, as YAML shows it."""
    return value if isinstance(value, str) else json.dumps(value)


def absent(config: Mapping[str, Any], run: ProgramRun) -> set[str]:
    """The folders of FOLDERS that the run does not have."""
    return ({"data"} if run.dataset is None else set()) | (set() if config["files"] else {"files"})


def refuse_unknown_names(
    key: str, words: Sequence[str], run: ProgramRun, folders: Collection[str]
) -> None:
    """Refuse `{name}` that stands for nothing.

    Raises:
        Refusal: naming it.
    """
    for word in words:
        for name in [found[2] for found in NAME.finditer(word) if found[2]]:
            if name not in run.values and name not in folders:
                remedy = {
                    "data": "give dataset",
                    "files": "give files",
                    "state": "an evaluation has {outputs}",
                    "outputs": "it is for evaluate",
                }.get(name, f"give {name} in parameters")
                raise Refusal(
                    f"config: {key}: {{{name}}} stands for nothing; {remedy}, or write "
                    f"{{{{{name}}}}}"
                )


def filled(words: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """The words with every `{name}` replaced; `{{name}}` becomes `{name}`.

    Raises:
        Refusal: there is no value for a name.
    """

    def value(match: re.Match[str]) -> str:
        name = match[2]
        if name is None:
            return f"{{{match[1]}}}"
        if values.get(name) is None and name in OF_EVALUATION:
            raise Refusal(
                f"{{{name}}} is not there; give "
                f"{'dataset' if name == 'data' else name} in the configuration"
            )
        return word_text(values[name])

    return [NAME.sub(value, word) for word in words]


def words_sha256(words: Sequence[str]) -> str:
    """SHA-256 of the files that a command names: a Python program with what it imports from
    beside it, or the file of another command.
    """
    first, *rest = [word.removeprefix("{here}/") for word in words]
    if first != PYTHON or not rest or (rest[0][0] == "-" and rest[0] != "-m"):
        given = [Path(word).resolve() for word in (first, *rest) if is_file(word)]
        # A program may be there to be started only.
        digests = [file_sha256(path) for path in given if os.access(path, os.R_OK)]
        return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else ""
    if rest[0] != "-m":
        return sources_sha256(local_sources(Path(rest[0])))
    folder, _, module = rest[1].rpartition(":")
    for name in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__main__.py"):
        if Path(folder, name).is_file() and folder:
            return sources_sha256(local_sources(Path(folder, name), Path(folder)))
    return ""


def module_of(words: Sequence[str]) -> str | None:
    """The module that the words start; None for a file."""
    return words[2].rpartition(":")[2] if len(words) > 2 and words[1] == "-m" else None
