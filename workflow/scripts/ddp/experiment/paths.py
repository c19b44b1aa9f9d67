"""The user's files: paths in a configuration, relative to the file that has them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp.base.reading import is_file
from ddp.experiment.schema import is_program

# Keys of `dataset` that are paths.
OF_DATASET = ("folder", "arrays", "labels", "python")


def with_paths(config: Mapping[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """The configuration with the user's paths relative to the working directory.

    Args:
        folders: of the configuration files, the last one given first; a path that is in none of
            them is relative to the working directory.
    """

    def found(path: str) -> str:
        if Path(path).is_absolute() or path.startswith("~"):
            return os.path.expanduser(path)  # noqa: PTH111, Path.expanduser raises an error
        for folder in folders:
            # Not Path.exists, which raises an error for a long text or a closed folder.
            if os.path.exists(folder / path):  # noqa: PTH110
                return os.path.relpath(folder / path)
        return path

    def of_code(text: Any) -> Any:
        """`my_models.py:Net`; a name without a file stays as it is."""
        if isinstance(text, list):
            return [of_code(each) for each in text]
        file, colon, name = text.rpartition(":") if isinstance(text, str) else ("", "", "")
        return f"{found(file)}:{name}" if colon and file.endswith(".py") else text

    def of_program(text: Any) -> Any:
        """A Python file; or a module, with its folder if it lies beside a configuration."""
        if not isinstance(text, str) or text.endswith(".py") or "/" in text or ":" in text:
            return found(text) if isinstance(text, str) else text
        name = text.replace(".", "/")
        for folder in [*folders, Path()]:
            candidates = (folder / f"{name}.py", folder / name / "__main__.py")
            if any(map(is_file, candidates)):
                return f"{os.path.relpath(folder)}:{text}"
        return text

    changed = dict(config)
    for key in ("program", "evaluate"):
        if isinstance(config.get(key), list) and config[key]:
            changed[key] = [of_program(config[key][0]), *config[key][1:]]
        elif key in config:
            changed[key] = of_program(config[key])
    if isinstance(words := config.get("command"), list):
        changed["command"] = [
            path if isinstance(word, str) and is_file(path := found(word)) else word
            for word in words
        ]
    if isinstance(table := config.get("runs"), str):
        changed["runs"] = found(table)
    if isinstance(directory := config.get("directory"), str):
        changed["directory"] = found(directory)
    if isinstance(files := config.get("files"), list):
        changed["files"] = [found(each) if isinstance(each, str) else each for each in files]
    if isinstance(dataset := config.get("dataset"), Mapping):
        changed["dataset"] = {
            key: (of_code(value) if key == "python" else found(value))
            if key in OF_DATASET and isinstance(value, str)
            else value
            for key, value in dataset.items()
        }
    if "model" in config:
        changed["model"] = of_code(config["model"])
    if weights := config.get("initial_weights"):
        several = weights if isinstance(weights, list) else [weights]
        paths = [found(each) if isinstance(each, str) else each for each in several]
        changed["initial_weights"] = paths if isinstance(weights, list) else paths[0]
    if isinstance(runs := config.get("runs"), list) and not is_program(config):
        changed["runs"] = [
            with_paths(run, folders) if isinstance(run, Mapping) else run for run in runs
        ]
    return changed
