"""A user's Python file with the files beside it that it imports: read, hashed, imported."""

import ast
import atexit
import hashlib
import importlib
import importlib.util
import io
import json
import re
import sys
import tokenize
import traceback
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from manynodes.base.errors import Refusal, one_line
from manynodes.base.provenance import LIBRARIES
from manynodes.base.reading import read_bytes
from manynodes.base.temporary import OURS as TEMPORARY
from manynodes.base.temporary import SOURCES, temporary_folder

MOST_BYTES = 1_000_000
# timm has 284.
MOST_FILES = 1000
IMPORT = re.compile(r"^[ \t]*(?:from|import)\b.*", re.MULTILINE)
# Functions may import when they are called, so copies of sources stay until this process ends.
COPIES = ExitStack()
atexit.register(COPIES.close)


def local_sources(
    path: Path, folder: Path | None = None, other_python: bool = False
) -> dict[str, str]:
    """The texts of a Python file and of the modules beside it that it imports, by file name.

    The first one is the file itself. A module in a package beside it has a name such as
    `layers/norm.py`.

    Args:
        folder: where imports begin; the file's own unless given.
        other_python: another Python runs it, whose syntax may be newer than this one's.

    Raises:
        Refusal: the file is missing, is no Python, or imports too many files.
    """
    found: dict[str, str] = {}
    folder = folder or path.parent
    first = path.relative_to(folder)
    # Python runs the packages that a module is in before the module.
    packages = [above / "__init__.py" for above in first.parents if above.name]
    pending = [first, *(each for each in packages if (folder / each).is_file())]
    while pending:
        name = pending.pop(0).as_posix()
        if name in found:
            continue
        file = folder / name
        try:
            content = read_bytes(file, MOST_BYTES)
            found[name] = content.decode(encoding_of(content))
            tree = parsed(found[name], other_python)
        except FileNotFoundError:
            raise Refusal(f"{file} is not there") from None
        except OSError as error:
            raise Refusal(f"{file}: {error.strerror}") from None
        except SyntaxError as error:
            raise Refusal(f"{file}:{error.lineno or 1}: {error.msg}") from None
        except (ValueError, LookupError):
            raise Refusal(f"{file} is not a Python file") from None
        if len(found) > MOST_FILES:
            raise Refusal(
                f"{path} imports more than {MOST_FILES} files beside it; install them as a package"
            )
        pending += [module for module in imported(tree, name) if (folder / module).is_file()]
    return found


def encoding_of(content: bytes) -> str:
    """The encoding that a Python file says that it has, or UTF-8, perhaps with a mark of it.

    Raises:
        SyntaxError: it says another one than the mark, or one that nobody knows.
    """
    return tokenize.detect_encoding(io.BytesIO(content).readline)[0]


def parsed(text: str, other_python: bool) -> ast.Module:
    """The code of a file; of one that only another Python understands, its imports of one line.

    Raises:
        SyntaxError: it is no Python.
    """
    try:
        return ast.parse(text)
    except SyntaxError:
        if not other_python:
            raise
    found = ast.Module([], [])
    for line in IMPORT.findall(text):
        with suppress(SyntaxError):
            found.body += ast.parse(line.strip()).body
    return found


def imported(tree: ast.Module, name: str) -> list[Path]:
    """File names that the imports of a module could mean, relative to the first file's folder."""
    here = Path(name).parent
    found: list[Path] = []
    for node in ast.walk(tree):
        names: list[tuple[Path, str]] = []
        if isinstance(node, ast.Import):
            names = [(Path(), alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = [here, *here.parents]
            if node.level > len(above):
                continue  # not below the folder: Python refuses it
            base = above[node.level - 1] if node.level else Path()
            module = node.module or ""
            names = [(base, module)] + [
                (base, f"{module}.{alias.name}".strip(".")) for alias in node.names
            ]
        for base, dotted in names:
            parts = [part for part in dotted.split(".") if part]
            for depth in range(1, len(parts) + 1):
                inside = base.joinpath(*parts[:depth])
                found += [inside.with_suffix(".py"), inside / "__init__.py"]
    return found


def sources_sha256(sources: Mapping[str, str]) -> str:
    """SHA-256 of the names and texts of files."""
    return hashlib.sha256(json.dumps(dict(sources), sort_keys=True).encode()).hexdigest()


def run_sources(sources: Mapping[str, str]) -> ModuleType:
    """Import the first of these files, with the others beside it.

    Raises:
        Refusal: it cannot be imported.
    """
    folder = COPIES.enter_context(temporary_folder(SOURCES))
    for name, text in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode(encoding_of(text.encode())))
    return run_file(folder / next(iter(sources)), list(sources))


def run_file(path: Path, names: Iterable[str] | None = None) -> ModuleType:
    """Import a file by its path; it can import the modules beside it.

    Args:
        names: of the files that it imports, see `local_sources`.

    Raises:
        Refusal: it cannot be imported, with its own line.
    """
    before = dict(sys.modules)
    for name in names or local_sources(path):
        # A file of the same name may have been imported from elsewhere.
        sys.modules.pop(".".join(Path(name).with_suffix("").parts).removesuffix(".__init__"), None)
    sys.path.insert(0, str(path.parent.resolve()))
    importlib.invalidate_caches()
    try:
        # Under a name of its own, because a user's random.py must not replace Python's.
        spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    except SystemExit:
        raise Refusal(
            f"{path.name} ends Python when it is imported; put what runs it below "
            "`if __name__ == '__main__':`"
        ) from None
    except Exception as error:
        raise Refusal(user_error(error, path)) from None
    finally:
        # A module of the user's may be named like one of ours.
        sys.modules.update({name: before[name] for name in LIBRARIES if name in before})
    return module


def member(module: ModuleType, name: str, path: object) -> Any:
    """An object of a module.

    Raises:
        Refusal: the module does not have it.
    """
    try:
        return getattr(module, name)
    except AttributeError:
        raise Refusal(f"{path} has no {name}") from None


def user_error(error: Exception, path: Path) -> str:
    """One line for an error in a user's code: the line of the file where it arose."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).name == path.name
    ]
    line = f":{frames[-1].lineno}" if frames else ""
    what = one_line(f"{type(error).__name__}: {error}", 160)
    if isinstance(error, FileNotFoundError) and TEMPORARY + SOURCES in str(error.filename):
        what = f"{Path(str(error.filename)).name} is not there: of the files beside the network "
        what += "only Python files are copied; give its whole path in model_args"
    return f"{path.name}{line}: {what}"
