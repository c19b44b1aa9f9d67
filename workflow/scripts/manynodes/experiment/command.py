"""The words of a command line that starts a user's program, and the files behind them."""

import difflib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from manynodes.base.errors import Refusal, one_line
from manynodes.base.reading import file_sha256, is_file
from manynodes.base.sources import local_sources, sources_sha256

# Folders, which are known only where the program runs.
FOLDERS = ("data", "files", "results", "state", "here", "python")
OF_EVALUATION = ("outputs", *FOLDERS)
NAME = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
# How a program reads its parameters by itself. A network has `.parameters()` too.
READS = re.compile(
    r"LAUNCH_PARAMETERS|\blaunched\s*\.\s*parameters\b"
    r"|\bfrom\s+launched\s+import\s+(\([^)]*|[^\n]*)(\bparameters\b|\*)"
    r"|\blaunched\s+as\s+(?P<name>\w+)\b[\s\S]*\b(?P=name)\s*\.\s*parameters\b"
    # What it may read elsewhere.
    r"|\bsys\.path\b|\b(runpy|importlib)\b|^\s*(source|\.)\s",
    re.MULTILINE,
)
# Known to each process alone; a parameter of the user's with such a name comes first.
OF_PROCESS = ("rank", "local_rank")
INTERPRETER = re.compile(r"(python[\d.]*t?|(ba)?sh[\d.]*)$")
# What may stand before the program of a command.
IN_FRONT = re.compile(r"env|exec|nohup|time|uv|run|-.*|\w+=.*", re.DOTALL)
# Starts ranks by itself, whatever ranks there are; mpirun and srun may be told of them.
TORCHRUN = re.compile(r"torchrun|torch\.distributed\.(run|launch)")
# Passes the ranks that there are on to its program, with the exceptions of `accelerate_of`.
ACCELERATE = re.compile(r"accelerate([ -]|\.commands\.(accelerate_cli )?)launch(?= |$)")
WITH_RANKS = re.compile(
    r"--(multi[_-]gpu|use[_-](deepspeed|fsdp|megatron[_-]lm))|--num[_-]processes[= ]([2-9]|\d\d)"
)
# Its options without a value.
FLAG = re.compile(
    r"-[hmq]|--(help|quiet|module|no[_-]python|debug|cpu|multi[_-]gpu|same[_-]network"
    r"|downcast[_-]bf16|(use|enable|dynamo[_-]use|fp8[_-]use|(no[_-])?tpu)([_-]\S+)?)"
)
# What may let it pass them on after all.
WITHOUT_RANKS = re.compile(r"--(cpu|config[_-]file)(?=[= ]|$)")
# In the words of one that is told of several nodes.
OF_NODES = re.compile(
    r"(nnodes|num[_-]machines)(?![= ]1(?![\d:]))|(node|machine)[_-]rank|rdzv|PET_|\{rank\}",
    re.IGNORECASE,
)
SCRIPTS = (".py", ".sh", ".R", ".jl", ".pl", ".lua", ".m")
HERE = "{here}/"  # before a path
PYTHON = "{python}"  # in the words of a command: the Python that runs Snakemake
# An empty word on the command line of a rule, where Snakemake writes nothing for one. It cannot be
# a parameter's: no name begins with _.
EMPTY = "{_}"


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
    if is_path(program):
        return [PYTHON, here(program)]
    folder, _, module = program.rpartition(":")
    return [PYTHON, "-m", f"{here(folder)}:{module}" if folder else module]


def is_path(program: str) -> bool:
    """Whether a program is given as a file, and not as `module` or `folder:package.module`."""
    return program.endswith(".py") or "/" in program.rpartition(":")[2]


def is_module_alone(program: str) -> bool:
    """Whether a program is given as a module, without the folder that it lies in."""
    return not (program.endswith(".py") or "/" in program or ":" in program)


def files_of_module(module: str, folder: Path) -> tuple[Path, Path]:
    """The files in a folder that Python may run for a module."""
    path = module.replace(".", "/")
    return folder / f"{path}.py", folder / path / "__main__.py"


def here(path: str) -> str:
    """A path that holds in any working directory; that of a checkout stays out of it."""
    return path if Path(path).is_absolute() else f"{HERE}{path}"


def evaluation(config: Mapping[str, Any]) -> tuple[str, ...]:
    given = config["evaluate"]
    if given is None:
        return ()
    first, *rest = [given] if isinstance(given, str) else given
    return (*python(word_text(first)), *map(word_text, rest))


def word_text(value: Any) -> str:
    """A value as a word of a command line, as YAML shows it."""
    return value if isinstance(value, str) else json.dumps(value)


def without_place(word: str) -> str:
    """A word without the folder of the Python file that it names."""
    path = Path(word.removeprefix(HERE))
    return path.name if path.suffix == ".py" and is_file(str(path)) else word


def name_of(words: Sequence[str]) -> str:
    """The program in messages."""
    # A script, if the command is one for an interpreter.
    given = [word.removeprefix(HERE) for word in words]
    files = [word for word in given if is_file(word) and not INTERPRETER.match(Path(word).name)]
    name = Path((files or given)[0]).stem
    module = words[2].rpartition(":")[2] if len(words) > 2 and words[1] == "-m" else ""
    return module or name.strip("{}").lstrip("-") or "program"


def started(words: Sequence[str]) -> list[str]:
    """A command from its program on, without its folder: behind `env` and Python, of which it is
    the file, or the module behind -m.
    """
    rest = [*itertools.dropwhile(IN_FRONT.fullmatch, words)]
    if rest and (rest[0] == PYTHON or INTERPRETER.match(Path(rest[0]).name)):
        rest = [*itertools.dropwhile(lambda word: word[:1] == "-", rest[1:])]
    return [Path(rest[0]).name, *rest[1:]] if rest else [""]


def torchrun_of(words: Sequence[str]) -> str:
    """The program of a command if it is torchrun, in one of its forms; otherwise empty."""
    first, *_ = started(words)
    return first if TORCHRUN.fullmatch(first) else ""


def accelerate_of(words: Sequence[str], per_node: int, on_cpus: bool) -> str:
    """`accelerate launch` of a command, if its program would not find the ranks that there are: it
    starts some itself if it is told to, or finds several GPUs and no number; and on CPUs, without
    --cpu, it overwrites ACCELERATE_USE_CPU. Empty otherwise.
    """
    line = " ".join(started(words))
    found = ACCELERATE.match(line)
    own = " ".join(own_options(line[found.end() :].split())) if found else ""
    if not found or WITHOUT_RANKS.search(own):
        return ""
    several = WITH_RANKS.search(own) or (per_node > 1 and not re.search("num[_-]processes", own))
    return found[0] if several or on_cpus else ""


def own_options(words: Sequence[str]) -> Sequence[str]:
    """The options of accelerate, with their values: what follows is the program, and its own."""
    wants_value = False
    for number, word in enumerate(words):
        is_option = word[:1] == "-"
        if not (is_option or wants_value) or word == "--":
            return words[:number]
        wants_value = is_option and "=" not in word and not FLAG.fullmatch(word)
    return words


def refuse_own_ranks(
    words: Sequence[str], processes: int, per_node: int, python: str, on_cpus: bool
) -> None:
    """Refuse what would start ranks of its own in each of several processes, unless it is told of
    the nodes: they would all train alone, each with a rank 0 that writes the results.

    Args:
        processes, per_node: that start the command, of all nodes and of each.
        python: how the remedy names the Python file, such as `program: `.
        on_cpus: whether they compute on CPUs, as far as is known.

    Raises:
        Refusal: naming it.
    """
    launcher = torchrun_of(words) or accelerate_of(words, per_node, on_cpus)
    if processes == 1 or not launcher or OF_NODES.search(" ".join(words)):
        return
    # Not the text behind -c.
    files = [word for word in words if word.endswith(".py") and " " not in word]
    file = Path(files[0]).name if files else ""
    remedy = f"{python}{one_line(file, 40)}" if file else "the command without it"
    raise Refusal(
        f"{launcher} would start ranks of its own in each of {processes} processes; the workflow "
        f"starts them: give {remedy}, and the processes per node"
    )


def names_in(words: str) -> list[str]:
    """The names in braces, in order, without those in two."""
    return [found[2] for found in NAME.finditer(words) if found[2]]


def refuse_unknown_names(
    key: str, words: Sequence[str], names: Collection[str], as_parameter: Callable[[str], str]
) -> None:
    """Refuse `{name}` that stands for nothing.

    Args:
        names: what it may stand for.
        as_parameter: what makes another name one of these.

    Raises:
        Refusal: naming it.
    """
    for word in words:
        for name in names_in(word):
            if name not in names:
                near = difflib.get_close_matches(name, [*names, *OF_EVALUATION], n=1, cutoff=0.75)
                remedy = {
                    "data": "give dataset",
                    "files": "give files",
                    "state": "an evaluation has {outputs}",
                    "outputs": "it is for evaluate",
                }.get(
                    name,
                    f"did you mean {{{near[0]}}}?" if near else as_parameter(name),
                )
                raise Refusal(
                    f"config: {key}: {{{name}}} stands for nothing; {remedy}, or write "
                    f"{{{{{name}}}}}"
                )


def unseen(
    programs: Sequence[Sequence[str]],
    names: Collection[str],
    directory: str | None = None,
    setup: str = "",
) -> list[str]:
    """Of some parameters, those that nothing hands to any of the programs, and that none of these
    can read by itself; none if that is not known.

    Args:
        programs: the words of each.
        directory: where they start, as of `files_of`.
        setup: lines of bash before them.
    """
    named = names_in(" ".join([*itertools.chain(*programs), directory or ""]))
    missing = [name for name in names if name not in named]
    reads = missing and (
        READS.search(setup) or any(may_read(program, directory) for program in programs)
    )
    return [] if reads else missing


def may_read(words: Sequence[str], directory: str | None) -> bool:
    """Whether a program may read its parameters by itself: unless it is Python in files, and no
    word or script among these, nor what a file imports from beside it, shows how.
    """
    texts = [*words]
    files = [Path(path).resolve() for path in code_of(words, directory)]
    try:
        for file in files:
            if file.suffix == ".py":
                texts += local_sources(file, other_python=True).values()
            elif file.suffix in SCRIPTS or has_interpreter(str(file)):
                texts.append(file.read_text(errors="replace"))
    except (Refusal, OSError):
        return True
    known = any(file.suffix == ".py" for file in files)
    return not known or any(READS.search(text) for text in texts)


def filled(words: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """The words with every `{name}` replaced; `{{name}}` becomes `{name}`. A word that is nothing
    but the name of a value that is null is left out.

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
        if name not in values:
            raise Refusal(f"{{{name}}} in the command stands for nothing; write {{{{{name}}}}}")
        return word_text(values[name])

    # A folder that is not there is refused above.
    nothing = {f"{{{name}}}" for name, of in values.items() if of is None} - {
        f"{{{name}}}" for name in OF_EVALUATION
    }
    return [NAME.sub(value, word) for word in words if word not in nothing]


def real_folder(directory: str | None) -> Path | None:
    """The folder where a program starts; None if only a run knows it, as its results folder."""
    text = (directory or "{results}").removeprefix(HERE)
    return None if NAME.search(text) else Path(text)


def place_of(word: str, directory: str | None) -> str:
    """A word, as a path from here if the program finds a file of that name where it starts."""
    path, folder = word.removeprefix(HERE), real_folder(directory)
    there = folder and not is_file(path) and is_file(str(folder / path))
    return str(folder / path) if folder and there else path


def files_of(words: Sequence[str], directory: str | None) -> list[str]:
    """The files among the words of a command; of those in the folder where it starts, which may be
    files that it writes, Python, what can be executed, and what an interpreter is given.
    """
    found: list[str] = []
    for before, word in itertools.pairwise(["", *words]):
        path = place_of(word, directory)
        from_here = path == word.removeprefix(HERE)
        if is_file(path) and (from_here or is_script(path) or INTERPRETER.match(Path(before).name)):
            found.append(path)
    return found


def code_of(words: Sequence[str], directory: str | None) -> list[str]:
    """Those of `files_of` that no program writes to: what is started, and scripts. On some file
    systems any file can be executed.
    """
    started = place_of(words[0], directory)
    return [
        path
        for path in files_of(words, directory)
        if path == started or Path(path).suffix in SCRIPTS or has_interpreter(path)
    ]


def is_script(path: str) -> bool:
    return path.endswith(".py") or os.access(path, os.X_OK) or has_interpreter(path)


def has_interpreter(path: str) -> bool:
    """Whether a file begins with `#!`."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(2) == b"#!"
    return False


def words_sha256(
    words: Sequence[str],
    other_python: bool,
    directory: str | None = None,
    only_code: bool = False,
    installed: Sequence[str] | None = None,
) -> str:
    """SHA-256 of the files that a command names: a Python program with what it imports from
    beside it, or the files of another command.

    Args:
        other_python: as of `local_sources`.
        directory: where the program starts; None for its results folder.
        only_code: without other files, which the program may write itself.
        installed: the file of an installed module that it starts and the folder in which its
            imports begin, empty for none. None as in earlier versions, which hashed nothing of a
            command with `-m` and such a module.

    Raises:
        Refusal: the Python is given nothing to start, or as `local_sources`.
    """
    first, *rest = [place_of(word, directory) for word in words]
    files: Sequence[str] = ()
    started = rest[1:2] if rest[:1] == ["-m"] else rest[:1]
    if first == PYTHON and rest and not "".join(started):
        raise Refusal(f"{PYTHON} is given neither a file nor a module; name one behind it")
    if first == PYTHON and rest and rest[0] == "-m":
        folder, _, module = rest[1].rpartition(":")
        above = Path(folder) if folder else real_folder(directory)
        for file in files_of_module(module, above) if above else ():
            if file.is_file():
                return sources_sha256(local_sources(file, above, other_python))
        if installed is None:
            return ""
        # What is installed may be there to start a file.
        files = [file for file in files_of(words, directory) if file.endswith(".py")]
    elif first == PYTHON and rest and rest[0][0] != "-":
        # Python looks for modules beside the file that a link leads to.
        file = Path(rest[0])
        file = file.resolve() if file.is_symlink() else file
        return sources_sha256(local_sources(file, other_python=other_python))
    else:
        files = (code_of if only_code else files_of)(words, directory)
    given = [Path(word).resolve() for word in files]
    # A program may be there to be started only.
    digests = [
        sources_sha256(local_sources(path, other_python=other_python))
        if path.suffix == ".py"
        else file_sha256(path)
        for path in given
        if os.access(path, os.R_OK)
    ]
    if installed:
        file, above = map(Path, installed)
        digests.append(sources_sha256(local_sources(file, above, other_python=True)))
    return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else ""


def evaluation_sha256(words: Sequence[str], parameters: Mapping[str, Any], code: str) -> str:
    """SHA-256 of a program that evaluates.

    Args:
        words: that start it. Of a file the content counts, and not where it is.
        parameters: those that only the evaluation depends on.
        code: SHA-256 of its files.
    """
    what = [without_place(word) for word in words], parameters, code
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def apart(before: Any, now: Any) -> tuple[Any, Any]:
    """Two values without what two lists have in common at their beginning and their end: of a long
    command, the words that differ.
    """
    if not (isinstance(before, list) and isinstance(now, list)):
        return before, now
    both = min(len(before), len(now))
    head = next((n for n in range(both) if before[n] != now[n]), both)
    both -= head
    tail = next((n for n in range(both) if before[-1 - n] != now[-1 - n]), both)
    was, is_now = (words[head : len(words) - tail] for words in (before, now))
    return " ".join(map(str, was)) or "nothing", " ".join(map(str, is_now)) or "nothing"
