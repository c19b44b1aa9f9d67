"""The user's files: paths in a configuration, relative to the file that has them."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manynodes.base.reading import is_file
from manynodes.data.user.declaration import BY_FOLDER
from manynodes.experiment.command import files_of_module, is_module_alone
from manynodes.experiment.declaration import BUILT_IN
from manynodes.experiment.keys import Keys


def with_program(config: Mapping[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """The configuration with the path of its program, which decides what its other keys mean.

    Args:
        folders: as for `with_paths`.
    """

    def of_program(text: Any) -> Any:
        """A Python file; or a module, with its folder if it lies beside a configuration."""
        if not isinstance(text, str) or text == BUILT_IN:
            return text
        if not is_module_alone(text):
            return located(text, folders)
        for folder in [*folders, Path()]:
            if any(map(is_file, files_of_module(text, folder))):
                return f"{os.path.relpath(folder)}:{text}"
        return text

    # As a command line gives it.
    changed = {
        key: None if value == "null" and key in ("program", "command", "evaluate") else value
        for key, value in config.items()
    }
    for key in ("program", "evaluate"):
        if isinstance(config.get(key), list) and config[key]:
            changed[key] = [of_program(config[key][0]), *config[key][1:]]
        elif key in config:
            changed[key] = of_program(changed[key])
    return changed


def with_paths(config: Mapping[str, Any], folders: Sequence[Path], keys: Keys) -> dict[str, Any]:
    """The configuration with the user's paths relative to the working directory.

    Args:
        folders: of the configuration files, the last one given first; a path that is in none of
            them is relative to the working directory, unless it is of `environment`.
        keys: say which of its values are paths.
    """

    def of_code(text: str) -> str:
        """`my_models.py:Net`; a name without a file stays as it is."""
        file, colon, name = text.rpartition(":")
        return f"{located(file, folders)}:{name}" if colon and file.endswith(".py") else text

    def of_word(text: str) -> str:
        path = located(text, folders)
        return path if is_file(path) else text

    def of_prefix(text: str) -> str:
        return located(text, folders, only_there=True)

    forms: dict[str, Callable[[str], str]] = {
        "path": lambda text: located(text, folders),
        "prefix": of_prefix,
        "image": lambda text: of_prefix(text) if text.endswith(".sif") else of_word(text),
        "code": of_code,
        "command": of_word,
        "group": lambda text: text if text == BY_FOLDER else located(text, folders),
    }

    def changed(key: str, value: Any, properties: Mapping[str, Any]) -> Any:
        spec = properties.get(key, {})
        if not isinstance(spec, Mapping):  # true or false
            return value
        form = forms.get(spec.get("format", ""), lambda text: text)
        if isinstance(value, list):
            return [form(each) if isinstance(each, str) else each for each in value]
        if isinstance(value, Mapping) and "properties" in spec:
            return {name: changed(name, part, spec["properties"]) for name, part in value.items()}
        return form(value) if isinstance(value, str) else value

    found = {key: changed(key, value, keys.properties) for key, value in config.items()}
    if isinstance(file := config.get("hosts"), str):  # those of a list are names
        found["hosts"] = of_word(file)
    if isinstance(rows := config.get("runs"), list):
        found["runs"] = [
            with_paths(row, folders, keys) if isinstance(row, Mapping) else row for row in rows
        ]
    return found


def located(path: str, folders: Sequence[Path], only_there: bool = False) -> str:
    """A path relative to the working directory, if it is in one of the folders.

    Args:
        only_there: a path that is in none of them is not taken for the Python that runs this, a
            checkout's own .venv.
    """
    if Path(path).is_absolute() or path.startswith("~"):
        return os.path.expanduser(path)  # noqa: PTH111, Path.expanduser raises an error
    for folder in folders:
        # Not Path.exists, which raises an error for a long text or a closed folder.
        if os.path.exists(folder / path):  # noqa: PTH110
            # Behind a link, its .. is not that of the link.
            return os.path.relpath(folder.resolve() / path if ".." in path else folder / path)
    # The folder of an environment, or its Python, which is a link itself.
    ours = only_there and os.path.realpath(sys.prefix) in (
        os.path.realpath(path), os.path.realpath(Path(path).parent.parent)
    )  # fmt: skip
    if folders and only_there and (ours or not os.path.exists(path)):  # noqa: PTH110
        return os.path.relpath(folders[0] / path)
    return path
