"""Provenance of a result: the hash of the code, its commit, the versions it ran with, and when."""

import ast
import hashlib
import os
import platform
import re
import select
import subprocess
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from manynodes.base.environment import SCRIPTS
from manynodes.base.processes import answer_within
from manynodes.base.reading import MOST, read_bytes
from manynodes.base.temporary import content_of, file_without_a_name

GIT = ("git", "--no-optional-locks")
GIT_TIMEOUT = 60  # seconds; a repository may lie on a mount that is gone
COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
MOST_DIFF = 1_000_000  # characters of what differs from a commit
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
    "manynodes.launching",
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
    where there is no checkout, or where that cannot be read.
    """
    commit = None
    try:
        commit = git_here("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(git_here("status", "--porcelain", "."))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": commit or commit_in(SCRIPTS.parents[1]), "dirty": None}


def repository_of(folder: Path) -> dict[str, Any]:
    """The repository that a folder of the user's is in, with the names of untracked files and what
    differs from its commit; empty if it is in none. What cannot be read is null, and `unknown` has
    the reason.
    """
    # Else its parents would be others, of a path with `..` or through a link.
    folder = folder.resolve()
    found: dict[str, Any] = {"path": str(folder), "commit": None, "dirty": None, "diff": ""}
    try:
        found["path"] = git("-C", str(folder), "rev-parse", "--show-toplevel")
        found["commit"] = git("-C", str(folder), "rev-parse", "HEAD")
    except subprocess.TimeoutExpired as error:
        return found | {"unknown": why(error)}
    except (OSError, subprocess.SubprocessError) as error:
        # There may be no git on a compute node; and it does not trust every owner.
        above = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), None)
        if above is None:
            return {}
        return found | {"path": str(above), "commit": commit_in(above), "unknown": why(error)}
    try:
        found["diff"] = cut_off(diff_in(folder))
        found["dirty"] = bool(found["diff"]) or None
        status = git("-C", str(folder), "status", "--porcelain")
    except (OSError, subprocess.SubprocessError) as error:
        return found | {"unknown": why(error)}
    untracked = [line[3:] for line in status.splitlines() if line.startswith("?? ")]
    # They come first: `git apply` skips what is before a diff.
    diff = "\n".join([*(f"untracked: {name}" for name in untracked), found["diff"]]).strip()
    return found | {"dirty": bool(status), "diff": cut_off(diff)}


def cut_off(diff: str) -> str:
    return diff if len(diff) <= MOST_DIFF else f"{diff[:MOST_DIFF]}\n(cut off)"


def diff_in(folder: Path) -> str:
    """What differs from the commit; of a changed file of gigabytes, a little more than is kept.

    Raises as `git`.
    """
    words = [*GIT, "-C", str(folder), "diff", "--no-ext-diff", "--no-textconv", "HEAD"]
    said, deadline = b"", time.monotonic() + GIT_TIMEOUT
    with file_without_a_name() as errors:
        running = subprocess.Popen(
            words, env=environment_of_git(), stdout=subprocess.PIPE, stderr=errors
        )
        assert running.stdout
        try:
            ready = select.poll()
            ready.register(running.stdout)
            # No character has more bytes.
            while len(said) <= 4 * MOST_DIFF:
                if not ready.poll(1000 * max(deadline - time.monotonic(), 0)):
                    raise subprocess.TimeoutExpired(words, GIT_TIMEOUT)
                if not (part := os.read(running.stdout.fileno(), 1 << 20)):
                    if status := running.wait(GIT_TIMEOUT):
                        reason = content_of(errors)
                        raise subprocess.CalledProcessError(status, words, stderr=reason)
                    break
                said += part
        finally:
            running.kill()
            running.stdout.close()
            with suppress(subprocess.TimeoutExpired):
                running.wait(1)
    return said.decode(errors="replace").strip()


def commit_in(folder: Path) -> str | None:
    """The commit of a repository, from its own files and without git; None if they do not say it.

    Args:
        folder: that has its `.git`.
    """
    place = folder / ".git"
    with suppress(OSError, ValueError):
        if place.is_file():  # of a worktree or a submodule
            place = folder / text_of(place).removeprefix("gitdir: ")
        head = text_of(place / "HEAD")
        _, is_name, name = head.partition("ref: ")
        places = [place]
        if (place / "commondir").exists():
            places.append(place / text_of(place / "commondir"))
        found = [head]
        for each in places if is_name else ():
            with suppress(OSError):
                found.append(text_of(each / name))
            with suppress(OSError):
                lines = text_of(each / "packed-refs").splitlines()
                found += [line.partition(" ")[0] for line in lines if line.endswith(f" {name}")]
        return next((each for each in found if COMMIT.fullmatch(each)), None)
    return None


def text_of(path: Path) -> str:
    """The text of a file of git's; raises as `read_bytes`."""
    return read_bytes(path, MOST).decode().strip()


def why_no_commit() -> str | None:
    """What git says of a checkout whose commit it does not tell; None where it does, and where
    there is no checkout.
    """
    try:
        if (SCRIPTS.parents[1] / ".git").exists():
            git_here("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError) as error:
        return why(error)
    return None


def why(error: Exception) -> str:
    """Why git has not answered."""
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr).strip()[:1000] or f"git ended with status {error.returncode}"
    if isinstance(error, OSError):
        return f"git: {error.strerror}"
    return f"git does not answer within {GIT_TIMEOUT} s"


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
    words = [*GIT, *arguments]
    done = answer_within(GIT_TIMEOUT, words, env=environment_of_git(), stderr=subprocess.PIPE)
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
