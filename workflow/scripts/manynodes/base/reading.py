"""Strict readers for files that others may have written: results, and copies on a scratch."""

import errno
import hashlib
import io
import json
import math
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from manynodes.base.errors import Refusal, reason, shown

SCHEMAS = Path(__file__).resolve().parents[3] / "schemas"
# Bytes of a JSON file or a table. Our largest one, run.json with a thousand ranks, has one million.
MOST = 100_000_000
# Of these there is one for each run: all but the first few are checked by code that is made for the
# form. With jsonschema run.json takes 7 ms and evaluation.json of 100 epochs 24, with that code 2
# and 1; making it takes 24.
OF_RUNS, FEW = ("run", "program_run", "environment", "evaluation"), 5
READ: defaultdict[str, Iterator[int]] = defaultdict(count)


def is_file(path: str | Path) -> bool:
    """Whether there is a file that can be seen. Path.is_file raises an error for a text that is too
    long for a path, and for a file in a closed folder.
    """
    try:
        return Path(path).is_file()
    except OSError:
        return False


class NotAFile(OSError):
    """The path is not a regular file, or the file is too large."""


def open_file(path: Path, most: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading; a pipe or a device could block for ever.

    Raises:
        FileNotFoundError: it does not exist.
        NotAFile: it is not a regular file, or larger than `most` bytes.
        OSError: it cannot be read.
    """
    # By default, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    problem = "" if stat.S_ISREG(found.st_mode) else "is not a regular file"
    if not problem and most is not None and found.st_size > most:
        problem = f"has {found.st_size:,} bytes, {most:,} at most were expected"
    if problem:
        os.close(descriptor)
        raise NotAFile(0, problem, str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The content of a regular file; raises as `open_file`."""
    try:
        with open_file(path, most) as file:
            return file.read(-1 if most is None else most + 1)
    except MemoryError:
        raise OSError(errno.ENOMEM, "does not fit into memory", str(path)) from None


def file_sha256(path: Path, most: int | None = None) -> str:
    """The SHA-256 of a regular file; raises as `open_file`."""
    with open_file(path, most) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_separator(table: str, header: Sequence[str], also: str = "") -> None:
    """Refuse a table whose first line has something else than commas between its columns.

    Args:
        table: names it.
        also: what the remedy ends with.

    Raises:
        Refusal: there is such a line.
    """
    for separator in ";|\t" if len(header) == 1 else "":
        if separator in header[0]:
            raise Refusal(
                f"{table} has {shown(separator)} between its columns, and no comma; write "
                f"commas{also}"
            )


@cache
def validator(form: str) -> jsonschema.Draft202012Validator:
    schemas: Registry = Registry(retrieve=schema)  # type: ignore[call-arg]
    return jsonschema.Draft202012Validator(schema(f"{form}.schema.yaml").contents, registry=schemas)


@cache
def fast_check(form: str) -> Callable[[Any], bool]:
    """Whether a value matches a schema of OF_RUNS, by a check that cannot say well why it does not.
    It knows draft 7, of which these use what has not changed since.
    """
    # Only here: few programs read many files.
    import fastjsonschema

    def contents(name: str) -> dict[str, Any]:
        return schema(name).contents | {"$schema": "http://json-schema.org/draft-07/schema#"}

    check = fastjsonschema.compile(
        contents(f"{form}.schema.yaml"),
        handlers={"": contents},
        use_default=False,
        detailed_exceptions=False,
    )

    def fits(value: Any) -> bool:
        try:
            check(value)
        except fastjsonschema.JsonSchemaValueException:
            return False
        return True

    return fits


@cache
def schema(name: str) -> Resource:
    """One of our schemas; another one may refer to it by its file name."""
    return DRAFT202012.create_resource(read_own_yaml(SCHEMAS / name))


def read_own_yaml(path: Path) -> Any:
    """What a YAML file of this project holds. libyaml, where PyYAML has it, is ten times faster."""
    return yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def parse_json(content: bytes | str) -> Any:
    """Parse JSON with finite numbers only.

    Raises:
        ValueError: it is not such JSON.
    """

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"{text[:20]} is not a finite number")
        return number

    try:
        return json.loads(content, parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise ValueError("nested too deep") from None


def parse_form(content: bytes, form: str) -> dict[str, Any]:
    """Parse JSON and check it against one of our schemas.

    Args:
        form: name of the schema in workflow/schemas.

    Raises:
        ValueError: it does not match the schema.
    """
    value = parse_json(content)
    if form in OF_RUNS and next(READ[form]) >= FEW and fast_check(form)(value):
        return value
    error = next(validator(form).iter_errors(value), None)
    if error is not None:
        raise ValueError(
            " in ".join(
                filter(None, [str(error.validator), ".".join(map(str, error.absolute_path))])
            )
        )
    return value


def read_json(path: Path, form: str, remedy: str) -> dict[str, Any]:
    """Read a JSON file, see `parse_form`.

    Args:
        remedy: what to do if it is damaged.

    Raises:
        FileNotFoundError: it does not exist.
        OSError: it cannot be read.
        Refusal: it does not match the schema.
    """
    try:
        return parse_form(read_bytes(path, MOST), form)
    except (NotAFile, ValueError) as error:
        raise Refusal(
            f"{path} is damaged, or not of this version ({reason(error)}); {remedy}"
        ) from None
