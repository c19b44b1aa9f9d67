"""Provenance of a result: the hash of the code, its commit, the versions it ran with, and when."""

import ast
import hashlib
import os
import platform
import subprocess
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from manynodes.base.processes import answer_within

GIT = ("git", "--no-optional-locks")
GIT_TIMEOUT = 60  # seconds; a repository may lie on a mount that is gone
MOST_DIFF = 1_000_000  # characters of what differs from a commit
SCRIPTS = Path(__file__).resolve().parents[2]
# Its packages, and those of the built-in program.
LIBRARIES = ("manynodes", "classifier")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Packages and modules that check, carry or report, and cannot change a result: a clearer error
# message in one of them must not cost a night of training.
NO_RESULT = (
    "classifier.models.fitting",
    "classifier.models.names",
    "classifier.states.saver",
    "classifier.states.state",
    "classifier.training.limits",
    "manynodes.base",
    "manynodes.checkpointing",
    "manynodes.data.addresses",
    "manynodes.data.user",
    "manynodes.data.staging",
    "manynodes.data.walk",
    "manynodes.experiment",
    "manynodes.ranks.memory",
    "manynodes.ranks.network",
    "manynodes.ranks.preflight",
    "manynodes.ranks.probe",
    "manynodes.ranks.processor",
    "manynodes.ranks.stopping",
    "manynodes.ranks.vote",
    "manynodes.reporting.counting",
    "manynodes.reporting.metrics",
    "manynodes.reporting.results",
    "manynodes.reporting.sums",
    "manynodes.reporting.tables",
)


def code_sha256(program: str) -> str:
    """SHA-256 of a program and of the library code that it imports, except NO_RESULT.

    Comments, docstrings and formatting do not count, and neither does the file in which a piece
    of code lies: an import counts as the hash of the imported code, not as its path. Snakemake
    takes the hash as a parameter of the rule, so editing a computation reruns it, and editing a
    comment or moving a module does not.

    Args:
        program: file name in the folder of the programs, such as `train.py`.
    """
    return file_hash(SCRIPTS / program)


@cache
def file_hash(path: Path) -> str:
    code = OwnCode()
    body = ast.unparse(code.visit(ast.parse(path.read_text())))
    # Sorted: their order in the file follows the paths of the modules.
    return hashlib.sha256("\n".join([body, *sorted(code.imports)]).encode()).hexdigest()


class OwnCode(ast.NodeTransformer):
    """Takes the docstrings and the imports from the library out of a tree.

    Attributes:
        imports: for each imported module and name, the hash of the module's file and the name.
    """

    def __init__(self) -> None:
        self.imports: list[str] = []

    def visit(self, node: ast.AST) -> Any:
        # Expressions are most of a tree, and have neither.
        if isinstance(node, ast.expr):
            return node
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
        return super().visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        if (node.module or "").partition(".")[0] not in LIBRARIES:
            return node
        for alias in node.names:
            # A name is either a module of the package or an object in the module.
            for module in (f"{node.module}.{alias.name}", str(node.module)):
                path = library_file(module)
                if path.is_file() and not is_no_result(module):
                    self.imports.append(f"{file_hash(path)} {alias.asname or alias.name}")
        return None


def is_no_result(module: str) -> bool:
    return any(module == entry or module.startswith(f"{entry}.") for entry in NO_RESULT)


def library_file(module: str) -> Path:
    return SCRIPTS.joinpath(*module.split(".")).with_suffix(".py")


def git_state() -> dict[str, Any]:
    """The commit of the checkout the programs lie in, and whether they differ from it; both null
    where there is no checkout.
    """
    try:
        return {
            "commit": git_here("rev-parse", "HEAD"),
            "dirty": bool(git_here("status", "--porcelain", ".")),
        }
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def repository_of(folder: Path) -> dict[str, Any]:
    """The repository that a folder of the user's is in, with the names of untracked files and what
    differs from its commit; empty where git knows none, or does not trust its owner.
    """
    differs = ("diff", "--no-ext-diff", "--no-textconv", "HEAD")
    try:
        # Of a changed file of gigabytes, no more than is kept.
        with subprocess.Popen(
            [*GIT, "-C", str(folder), *differs], env=environment_of_git(),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
        ) as running:  # fmt: skip
            assert running.stdout
            diff = running.stdout.read(MOST_DIFF + 1)
            running.kill()
        status = git("-C", str(folder), "status", "--porcelain")
        untracked = [line[3:] for line in status.splitlines() if line.startswith("?? ")]
        # They come first: `git apply` skips what is before a diff.
        diff = "\n".join([*(f"untracked: {name}" for name in untracked), diff]).strip()
        return {
            "path": git("-C", str(folder), "rev-parse", "--show-toplevel"),
            "commit": git("-C", str(folder), "rev-parse", "HEAD"),
            "dirty": bool(status),
            "diff": diff if len(diff) <= MOST_DIFF else f"{diff[:MOST_DIFF]}\n(cut off)",
        }
    except (OSError, subprocess.SubprocessError):
        return {}


def why_no_commit() -> str | None:
    """What git says of a checkout whose commit it does not tell; None where it does, and where
    there is no checkout.
    """
    try:
        if (SCRIPTS.parents[1] / ".git").exists():
            git_here("rev-parse", "HEAD")
    except OSError as error:
        return f"git: {error.strerror}"
    except subprocess.CalledProcessError as error:
        return error.stderr.strip()
    except subprocess.TimeoutExpired:
        return f"git does not answer within {GIT_TIMEOUT} s"
    return None


def git_here(*arguments: str) -> str:
    """What git says of the checkout; raises as `git`."""
    # Somebody else's checkout too: its programs run anyway. But no repository around it: its
    # settings name programs that git runs, and anybody can make one in /tmp.
    return git("-c", f"safe.directory={SCRIPTS.parents[1]}", "-C", str(SCRIPTS), *arguments)


def git(*arguments: str) -> str:
    """What git says.

    Raises:
        OSError: git cannot be started.
        SubprocessError: it fails, or does not end.
    """
    done = answer_within(
        GIT_TIMEOUT, [*GIT, *arguments], env=environment_of_git(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    done.check_returncode()
    return done.stdout.strip()


def environment_of_git() -> dict[str, str]:
    """Without GIT_DIR, which a hook of another repository sets."""
    return {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torchvision", "numpy", "safetensors"):
        # A small installation has no torchvision.
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return in_utc(time.time())


def in_utc(seconds: float) -> str:
    """A time in seconds since the epoch, as `now` gives it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
