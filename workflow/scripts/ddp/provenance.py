"""What produced a result: the code, its commit, and the versions it ran with."""

import ast
import hashlib
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
# Modules that check, carry or report, and cannot change a result: a clearer message in them must not cost a night of training.
NO_RESULT = (
    "addresses", "atomic", "config", "deadline", "errors", "lifetime", "locks", "memory", "model_names", "network",
    "optional", "owner", "preflight", "processor", "provenance", "reading", "results", "saver", "schema", "signing",
    "staging", "state", "stopping", "tables", "temporary", "tree", "vote",
)  # fmt: skip


def code_sha256(program: str) -> str:
    """SHA-256 of a program and of what it imports of ours, but NO_RESULT, without comments, docstrings and formatting.

    Snakemake takes it as a parameter of the rule: editing a comment reruns nothing, editing what is computed does.

    Args:
        program: file name in the folder of the programs, such as `train.py`.
    """
    sources: dict[Path, str] = {}
    pending = [SCRIPTS / program]
    while pending:
        path = pending.pop()
        if path not in sources:
            tree = ast.parse(path.read_text())
            pending += imported_files(tree)
            sources[path] = ast.unparse(without_docstrings(tree))
    parts = [f"{path.relative_to(SCRIPTS)}\n{sources[path]}\n" for path in sorted(sources)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def imported_files(tree: ast.AST) -> list[Path]:
    """Files of the library that the code imports, inside functions too."""
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    library = {name.removeprefix("ddp.") for name in modules if name.startswith("ddp.")} - set(NO_RESULT)
    files = [SCRIPTS / "ddp" / f"{name}.py" for name in library]
    return [path for path in files if path.is_file()]


def without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return tree


def git_state() -> dict[str, Any]:
    """The commit of the checkout the programs lie in, and whether they differ from it; both null where there is no checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(SCRIPTS), *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "."))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torchvision", "numpy", "safetensors"):
        # A small installation has no torchvision.
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
