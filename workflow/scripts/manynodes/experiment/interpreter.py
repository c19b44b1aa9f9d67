"""What the Python of a user's program says of itself, and what the program needs of it."""

import ast
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from manynodes.base.environment import variable
from manynodes.base.errors import Refusal, uncoloured
from manynodes.base.processes import answer_within
from manynodes.base.temporary import content_of, file_without_a_name
from manynodes.experiment.containers import PATIENCE
from manynodes.experiment.environments import UserEnvironment

# What changes where Python looks for modules.
OTHER_PATHS = re.compile(r"sys\.(path|meta_path)|addsitedir|pyximport|importlib")
# The reason, before advice of several lines.
LMOD = re.compile(r"Lmod has detected the following error:\s*(.+?)\s*(?:\n\s*\n|\Z)", re.DOTALL)
OF_APPTAINER = re.compile(r"FATAL: |ERROR  : ")
IS_PYTHON = re.compile(r"python(\d+(\.\d+)?)?t?")  # t: without a global lock
MARK = "manynodes-environment "
# Without them each process would be the only one, and write where the others do.
TOLD = ("RANK", "WORLD_SIZE", variable("results"))
QUESTIONS = Path(__file__).with_name("questions.py")
# Before them: it would import from the folder in which it starts, which may have a json.py.
ELSEWHERE = "import sys\nsys.path = [path for path in sys.path if path]\n"


class NoAnswer(Refusal):
    """Its Python does not answer."""


def look(
    environment: UserEnvironment,
    python: Sequence[str],
    variables: Mapping[str, str],
    imports: Sequence[str],
    folder: Path,
    listed: bool = True,
    start: Path | None = None,
    apart: bool = False,
) -> dict[str, Any]:
    """What a Python says of itself: its version, all distributions, loaded modules; and which of
    the imports come from `elsewhere`, neither installed nor beside the program.

    Args:
        python: the words that start it.
        imports: modules that it must find.
        folder: beside whose files it looks for them.
        listed: with all distributions, whose files are hundreds on a shared file system.
        start: where the program starts, from which PYTHONPATH may lead; here unless given.
        apart: the program's command tells each process its rank, which needs no variable for it.

    Raises:
        NoAnswer: it does not answer.
        Refusal: it does not find a module, or does not get the variables.
    """
    asks = ELSEWHERE + QUESTIONS.read_text(encoding="utf-8")
    given = [MARK, str(folder), "all" if listed else "none", ",".join(TOLD), *imports]
    words = environment.started([*python, "-c", asks, *given])
    if environment.container:
        variables = {**variables, variable("probed"): str(folder.resolve())}
    # Not pipes, whose end comes only with that of what setup has started in the background.
    with file_without_a_name() as output, file_without_a_name() as errors:
        try:
            done = answer_within(
                PATIENCE, words, env=variables, stdout=output, stderr=errors, cwd=start
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoAnswer(f"{python[0]} does not answer: {error}") from None
        found = answer_in(content_of(output))
        error_text = uncoloured(content_of(errors)).strip()
    if done.returncode or found is None:
        raise NoAnswer(why_silent(environment, python[0], error_text, done.returncode, found))
    missing = found.pop("missing")
    several = int(variables.get("WORLD_SIZE") or 1) > 1 and not apart
    if several or "launched" in missing:
        refuse_lost(found["variables"], variables)
    del found["variables"]
    if missing:
        remedy = "correct environment" if environment.prefix else "give environment.python"
        raise Refusal(
            f"{found['interpreter']} ({found['python']}) has no module {missing[0]}, which the "
            f"program imports; install it there, or {remedy}"
        )
    return found | {"imports": list(imports), "setup_sha256": environment.setup_sha256}


def why_silent(
    environment: UserEnvironment, python: str, said: str, status: int, found: object
) -> str:
    """Why a Python has given no answer.

    Args:
        said: what was written to stderr.
        found: its answer; None if it did not give one.
    """
    # Of `setup`, it may not be what ended the shell.
    if environment.modules and (of_lmod := LMOD.search(said)):
        return f"module load {' '.join(environment.modules)}: {of_lmod[1]}"
    lines = said.splitlines() or [f"it ended with status {status}"]
    # Of apptainer, whose last line may be the end of another.
    told = [line for line in lines if OF_APPTAINER.match(line)] or lines
    before = " or ".join(name for name in ("modules", "setup") if getattr(environment, name))
    silent = before and found is None and not said
    why = f"; {before} may have ended the shell before it began" if silent else ""
    where = f" in {environment.container}" if environment.is_image_file else ""
    return f"{python}{where} does not answer{why}: {told[-1]}"


def refuse_lost(found: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Refuse an environment that takes from a program what tells it which process it is.

    Args:
        found: the variables that are left.
    """
    for name in TOLD:
        if name in given and found.get(name) != given[name]:
            raise Refusal(
                f"the program would not get the variable {name}: leave out --cleanenv, "
                "--containall, APPTAINER_CLEANENV and the like, or what unsets it in setup"
            )


def answer_in(text: str) -> dict[str, Any] | None:
    """The answers, in an output in which others may have left a line without its end."""
    _, mark, rest = text.rpartition(MARK)
    with suppress(ValueError):
        found: dict[str, Any] = json.JSONDecoder().raw_decode(rest)[0]
        return found if mark else None
    return None


def is_python(word: str) -> bool:
    """Whether a word of a command starts a Python."""
    return IS_PYTHON.fullmatch(Path(word).name) is not None


def needed(words: Sequence[str], folder: Path) -> tuple[tuple[str, ...], Path]:
    """The modules that a Python file imports whatever happens, and the folder that it is in.

    Args:
        words: after the interpreter; other than a file, nothing is known.
        folder: where the program starts.
    """
    file = folder / next((word for word in words if word[:1] != "-"), "")
    if file.suffix != ".py" or {"-m", "-c"} & set(words[:2]):
        return (), folder
    try:
        text = file.read_text(encoding="utf-8")
        body = ast.parse(text).body
    except (OSError, SyntaxError, ValueError):
        return (), folder
    if OTHER_PATHS.search(text):
        return (), folder  # only the program knows where it looks
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [
        node.module or "" for node in body if isinstance(node, ast.ImportFrom) and not node.level
    ]
    tops = dict.fromkeys(name.partition(".")[0] for name in names)
    return tuple(top for top in tops if top[:2] != "__"), file.resolve().parent
