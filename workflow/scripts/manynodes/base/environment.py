"""The contract between `launch` and the program that it starts: environment variables.

All of them begin with LAUNCH_. `launch` writes them, `supervise` adds LAUNCH_REPORT, and any
program may read them; docs/architecture.md lists them. A program that is started by hand has
none of them, and each has a meaning when it is missing.
"""

import json
import os
import pwd
import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from manynodes.base.errors import Refusal

PREFIX = "LAUNCH_"
# The folder of the programs, and that of the module `launched`, which a program may import.
SCRIPTS = Path(__file__).resolve().parents[2]
MODULES = SCRIPTS.parent / "modules"
# What other launchers tell the processes that they start: torchrun (PET_ are its options),
# Kubeflow, MPI and PMI. An interactive allocation or a pod has them, and a program that is started
# there would take itself for a rank of another job.
OTHER_LAUNCHERS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_|CROSS_)?(RANK|WORLD_SIZE)|(LOCAL|GROUP|CROSS)_SIZE|ROLE_NAME"
    r"|MASTER_(ADDR|PORT)"
    r"|TF_CONFIG|(PET|TORCHELASTIC|TORCHRUN|OMPI_COMM_WORLD|PMI|PMIX|MV2_COMM_WORLD)_\w+"
    r"|OMPI_UNIVERSE_SIZE|MPI_LOCALRANKID|MPI_LOCALNRANKS"
)
# How Python finds what it imports, and what it does besides: our programs would not be found.
OF_PYTHON = ("PYTHONSAFEPATH", "PYTHONSTARTUP", "PYTHONINSPECT")
CONVERTERS = {
    "node_rank": int,
    "nodes": int,
    "nproc_per_node": int,
    "stop_at": float,
    "ahead": float,
    "timeout": int,
    **dict.fromkeys(("report", "data", "files", "results", "outputs", "state", "parameters"), Path),
}


@dataclass(frozen=True)
class Environment:
    """The variables, without their prefix and in lower case. None: the variable is not set.

    Attributes:
        node_rank: number of this node, 0 .. nodes - 1.
        nodes, nproc_per_node: the geometry of the run.
        cpus_per_proc: CPUs of each process as the user gave them, `auto` if not given.
        device: `auto`, `cpu` or `cuda`.
        owner: who trains, such as `Slurm job 12`; a requeued job keeps its name.
        secret: the key that signs what the ranks exchange, see `signing`.
        store: file through which the ranks of a single machine find each other; between
            machines they use MASTER_ADDR and MASTER_PORT.
        stop_at: when to save and stop, in seconds since the epoch.
        ahead: seconds by which this node's clock is ahead of that of rank 0's node.
        timeout: how long ranks wait for each other, in seconds.
        job_scratch: name of a variable with a scratch folder that the scheduler removes after
            the job, such as SLURM_TMPDIR.
        report: file for `add_to_report`.
        data: folder with the staged data set.
        files: folder with the staged files.
        results: folder for the results of a user's program, in which it starts.
        outputs: folder with the declared outputs, for a program that evaluates them.
        state: folder for what the program needs to continue after an interruption.
        parameters: JSON file with the values of the run.
    """

    node_rank: int | None = None
    nodes: int | None = None
    nproc_per_node: int | None = None
    cpus_per_proc: str | None = None
    device: str | None = None
    owner: str | None = None
    secret: str | None = None
    store: str | None = None
    stop_at: float | None = None
    ahead: float | None = None
    timeout: int | None = None
    job_scratch: str | None = None
    report: Path | None = None
    data: Path | None = None
    files: Path | None = None
    results: Path | None = None
    outputs: Path | None = None
    state: Path | None = None
    parameters: Path | None = None

    def variables(self) -> dict[str, str]:
        """The variables that are set, as they stand in a process's environment."""
        values = {variable(field.name): getattr(self, field.name) for field in fields(self)}
        return {name: str(value) for name, value in values.items() if value is not None}

    @staticmethod
    def read() -> "Environment":
        """The contract as this process sees it.

        Raises:
            Refusal: a number is not a number.
        """
        found: dict[str, Any] = {}
        for field in fields(Environment):
            if text := os.environ.get(variable(field.name)):
                try:
                    found[field.name] = CONVERTERS.get(field.name, str)(text)
                except ValueError:
                    raise Refusal(f"{variable(field.name)}: {text} is not a number") from None
        return Environment(**found)


def forget_others(environment: MutableMapping[str, str]) -> None:
    """Remove what other launchers have left in an environment, and let Python use UTF-8. A user
    without a name, as in a container, gets one: Snakemake and torch ask for it.
    """
    for name in [*environment]:
        if OTHER_LAUNCHERS.fullmatch(name) or name in OF_PYTHON:
            del environment[name]
    environment["PYTHONUTF8"] = "1"
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        environment.setdefault("USER", f"uid{os.getuid()}")


def forget_contract(environment: MutableMapping[str, str]) -> None:
    """Remove what this shell has of the contract, as of a program that was tried by hand: a run
    gets its own. A deadline is a wish for `launch`; by the node's number an agent finds what it has
    started.
    """
    for field in fields(Environment):
        if field.name not in ("stop_at", "node_rank"):
            environment.pop(variable(field.name), None)


@contextmanager
def refusals_reported() -> Iterator[None]:
    """Add a refusal to the report: the program would be refused again."""
    try:
        yield
    except Refusal:
        add_to_report(refused=True)
        raise


def variable(name: str) -> str:
    """The name of the environment variable for an attribute of `Environment`."""
    return PREFIX + name.upper()


def add_to_report(**values: Any) -> None:
    """Add to what `supervise` tells `launch` about this process when it has ended.

    `saved` (how far the training was at its last save), `stopped` (why it stopped) and `refused`
    (it would be refused again) decide whether `launch` reports a preemption, and whether it starts
    the program again or requeues the job. `gpu` is the GPU of this process, for its failure.
    """
    path = Environment.read().report
    if path is not None:
        before = json.loads(path.read_text() or "{}") if path.exists() else {}
        path.write_text(json.dumps(before | values))
