"""A user's program that no path names: an installed module, or the script that starts one."""

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from manynodes.base.errors import Refusal, reason
from manynodes.base.processes import answer_within
from manynodes.base.reading import is_file, read_bytes
from manynodes.base.sources import MOST_BYTES, local_sources
from manynodes.experiment.command import (
    NAME,
    PYTHON,
    files_of,
    files_of_module,
    place_of,
    real_folder,
)
from manynodes.experiment.containers import PATIENCE
from manynodes.experiment.environments import UserEnvironment
from manynodes.experiment.interpreter import ELSEWHERE, is_python


@dataclass(frozen=True)
class Installed:
    """A module that a command starts.

    Attributes:
        module: its name.
        place: its file, or why that is not known.
        alone: the command names no Python file, such as one that it would start.
        sources: its file, and the folder in which its imports begin; empty if it lies among
            installed packages, or is not known.
    """

    module: str
    place: str
    alone: bool
    sources: tuple[str, ...] = ()


def installed_program(
    environment: UserEnvironment, words: Sequence[str], directory: str | None
) -> Installed | None:
    """The module that a command starts, without its folder; None if it starts none, or in a
    container, whose image is hashed.

    Args:
        words: of the command.
        directory: where it starts; None for its results folder.

    Raises:
        Refusal: the Python does not answer.
    """
    if environment.container or not (found := started_module(environment, words, directory)):
        return None
    python, module = found
    alone = not any(file.endswith(".py") for file in files_of(words, directory))
    if environment.modules or environment.setup:
        return Installed(module, "known only behind modules and setup", alone)
    if python != environment.interpreter and not shutil.which(python):
        return Installed(module, f"unknown, as {python} is not here", alone)
    place, of_python = ask(environment, python, module)
    if not place:
        return Installed(module, f"nowhere that {python} looks", alone)
    file, folder = Path(place), folder_above(module, Path(place))
    if file.name == "__init__.py" and "-m" in words[1:2]:
        file = file.with_name("__main__.py")
    real = Path(os.path.realpath(file))
    packages = {"site-packages", "dist-packages"} & {*real.parts}
    if packages or real.is_relative_to(os.path.realpath(of_python)) or folder is None:
        return Installed(module, str(file), alone)
    try:
        local_sources(file, folder, other_python=True)
    except Refusal as refusal:
        return Installed(module, f"{file}, which cannot be hashed ({refusal})", alone)
    return Installed(module, str(file), alone, (str(file), str(folder)))


def started_module(
    environment: UserEnvironment, words: Sequence[str], directory: str | None
) -> tuple[str, str] | None:
    """The Python and the module that a command starts."""
    first = place_of(words[0], directory)
    if NAME.search(first.replace(PYTHON, "")):
        return None
    if (first == PYTHON or is_python(first)) and list(words[1:2]) == ["-m"] and len(words) > 2:
        above = real_folder(directory)
        there = above and any(map(Path.is_file, files_of_module(words[2], above)))
        if there or ":" in words[2] or NAME.search(words[2]):
            return None
        return environment.interpreter if first == PYTHON else first, words[2]
    script = shutil.which(first, path=environment.variables(os.environ)["PATH"])
    return behind_script(Path(script), "/" in first) if script else None


def behind_script(script: Path, by_path: bool) -> tuple[str, str] | None:
    """The Python and the module behind a script that pip has made; None for another program.

    Args:
        by_path: it is given by its path: then it may be the user's own, unless a Python is beside.
    """
    with suppress(OSError, SyntaxError, ValueError, LookupError):
        text = read_bytes(script, MOST_BYTES)
        if text[:2] != b"#!" or script.suffix:
            return None
        # For a long path, it is a shell that starts the Python.
        named = text[2:].split()[0].decode()
        python = named if is_python(named) else str(script.with_name("python"))
        if not is_file(script.with_name("python") if by_path else python):
            return None
        # What it imports beside the module, such as sys and re, is Python's.
        (module,) = {
            node.module
            for node in ast.parse(text).body
            if isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.partition(".")[0] not in sys.stdlib_module_names
        }
        return python, module
    return None


def folder_above(module: str, file: Path) -> Path | None:
    """The folder in which the import of a module begins; None if it is under another name."""
    parts = tuple(module.split("."))
    of_package = file.stem == "__init__" or (file.stem == "__main__" != parts[-1])
    path = file.parent if of_package else file.with_suffix("")
    return path.parents[len(parts) - 1] if path.parts[-len(parts) :] == parts else None


@cache
def ask(environment: UserEnvironment, python: str, module: str) -> tuple[str, str]:
    """The file that a Python would take for a module, or "namespace" without one, empty if it has
    no such module; and the folder of its own modules.

    Raises:
        Refusal: it does not answer.
    """
    asks = f"{ELSEWHERE}import json, sysconfig\n{inspect.getsource(file_of)}"
    asks += "print(json.dumps([file_of(sys.argv[1]), sysconfig.get_path('stdlib')]))"
    words = environment.started([python, "-c", asks, module])
    try:
        variables = environment.variables(os.environ)
        done = answer_within(PATIENCE, words, env=variables, stderr=subprocess.DEVNULL)
        place, of_python = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError) as error:
        problem = f"{python} does not say where the module {module} is"
        raise Refusal(f"{problem}: {reason(error)}; or name its file") from None
    return str(place), str(of_python)


def file_of(name: str) -> str:
    """The file that this Python would take for a module; runs none of the packages that it lies
    in.
    """
    # Here: the program's Python, from 3.7 on, is asked with the text of this function alone.
    import importlib.util
    from contextlib import suppress
    from importlib.machinery import PathFinder
    from pathlib import Path

    first, *inside = name.split(".")
    spec = None
    with suppress(ValueError):  # __main__, and an empty name
        spec = importlib.util.find_spec(first)
    for part in inside:
        places = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(part, places) if places else None
    if spec and not spec.origin:
        # A package without __init__.py may be started all the same.
        files = (Path(place, "__main__.py") for place in spec.submodule_search_locations or ())
        return next((str(file) for file in files if file.is_file()), "namespace")
    return str(spec.origin) if spec else ""
