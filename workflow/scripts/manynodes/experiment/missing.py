"""Refuse what a configuration names and what is not there, before any job."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manynodes.base.errors import Refusal, shown
from manynodes.base.reading import is_file
from manynodes.data.datasets import DATASETS
from manynodes.experiment import command
from manynodes.experiment.config import Experiment, Run
from manynodes.experiment.installed_program import ask


def refuse_missing(experiment: Experiment, results: Path) -> None:
    """Refuse images, an archive, weights, programs and folders that are not there.

    Args:
        results: the folder of the experiment.

    Raises:
        Refusal: naming what is missing, with the key.
    """
    if experiment.user_data:
        experiment.user_data.refuse_missing()
        # A syntax error in the user's file is found here.
        _ = experiment.user_data.settings
    refuse_missing_archive(experiment)
    if experiment.built_in:
        experiment.environment.refuse_missing()
        refuse_missing_weights(experiment, results)
    else:
        refuse_missing_program(experiment)


def refuse_missing_archive(experiment: Experiment) -> None:
    """Refuse a missing archive before fetch would.

    Raises:
        Refusal: naming it.
    """
    settings = experiment.config["dataset"] or {}
    archive = settings.get("archive")
    if not archive or settings["source"] not in ("auto", "archive"):
        return
    built_in = [name for name in experiment.datasets if name in DATASETS]
    wanted = [name for name in built_in if "archive" in DATASETS[name].sources]
    fetched = all(Path(f"results/data/{dataset}/manifest.json").exists() for dataset in wanted)
    if not fetched and not Path(archive).expanduser().is_file():
        raise Refusal(
            f"config: dataset.archive: {archive} is not there, or not a file; give the path of "
            "the official archive"
        )


def refuse_missing_weights(experiment: Experiment, results: Path) -> None:
    """Refuse weights to start from that are not there, or that the run itself would replace."""
    for name, run in experiment.runs.items():
        if not run.initial_weights:
            continue
        path = Path(run.initial_weights)
        if not path.is_file():
            if not (experiment.config["replace"] or initial_of(run, results / name)):
                continue
            raise Refusal(f"config: initial_weights: {path} is not there, or not a file")
        if (results / name).resolve() in path.resolve().parents:
            raise Refusal(
                f"config: initial_weights: {path} would be replaced by this run; give another "
                "experiment name"
            )


def initial_of(run: Run, folder: Path) -> str:
    """The weights from which a run starts; empty if it has none, or is finished and they are gone.

    Args:
        folder: of the run.
    """
    path = run.initial_weights or ""
    return "" if (folder / "run.json").exists() and not Path(path).is_file() else path


def refuse_missing_program(experiment: Experiment) -> None:
    """Refuse a program that is not there or is no Python, a missing directory, and a command that
    starts ranks beside ours.
    """
    experiment.environment.refuse_missing()
    refuse_unknown_program(experiment)
    sizes = {(run.world_size, run.nproc_per_node, run.device == "cpu")
             for run in experiment.runs.values()}  # fmt: skip
    with named("command" if experiment.config["command"] else "program"):
        words = (*command.command(experiment.config), experiment.environment.setup)
        for processes, per_node, on_cpus in sorted(sizes, reverse=True):
            command.refuse_own_ranks(words, processes, per_node, "program: ", on_cpus)
    directory = experiment.config["directory"]
    if directory is not None and directory[:1] != "{" and not Path(directory).is_dir():
        raise Refusal(f"config: directory: {directory} is not there, or not a folder")
    for key, of_sources in (("program", "sources_sha256"), ("evaluate", "evaluation_sha256")):
        with named(key):
            getattr(experiment, of_sources)


@contextmanager
def named(key: str) -> Iterator[None]:
    """Put the key before what is refused."""
    try:
        yield
    except Refusal as refusal:
        raise Refusal(f"config: {key}: {refusal}") from None


def refuse_unknown_program(experiment: Experiment) -> None:
    """Refuse a name that is neither a file nor a module, and a command that is not there."""
    environment = experiment.environment
    # Otherwise only the job can ask it.
    asked = environment.is_ours or environment.answers
    evaluate = experiment.config["evaluate"]
    if isinstance(evaluate, list):
        evaluate = command.word_text(evaluate[0])
    for key, name in (("program", experiment.config["program"]), ("evaluate", evaluate)):
        # One beside a configuration has its folder in front.
        if name is None or not command.is_module_alone(name):
            continue
        if is_file(name) or (asked and not ask(environment, environment.interpreter, name)[0]):
            remedy = {
                "program": "give the file, and its options in arguments; for other programs there "
                "is command",
                "evaluate": "give the file, or a list of it and its options: [evaluate.py, --x, 1]",
            }[key]
            raise Refusal(
                f"config: {key}: {shown(name)} is neither a Python file nor a module; {remedy}"
            )
    first = (experiment.config["command"] or [""])[0]
    # An absolute path may exist on the compute nodes only.
    if isinstance(first, str) and first:
        path = command.place_of(first, experiment.config["directory"])
        prepared = environment.container or environment.setup
        # A name alone is looked for on PATH, not in the folder where the program starts.
        if is_file(path) and ("/" in first or is_file(first)):
            if not prepared:
                refuse_unstartable(path)
        elif "/" in first and first[0] not in "/{":
            raise Refusal(f"config: command: {shown(first)} is not there; give the path of a file")


def refuse_unstartable(path: str) -> None:
    """Refuse a file that the system would not start as a program."""
    name = f"config: command: {shown(path)}"
    if not os.access(path, os.X_OK):
        raise Refusal(
            f"{name} is not executable: chmod +x, or put its interpreter first: [bash, …]"
        )
    line = b""
    # A program may be there to be started only.
    with suppress(OSError), open(path, "rb") as file:
        line = file.readline(1000)
    if line[:2] == b"#!" and line.endswith(b"\r\n"):
        raise Refusal(
            f"{name} has Windows line endings, with which no interpreter is found; remove them "
            "(dos2unix)"
        )
