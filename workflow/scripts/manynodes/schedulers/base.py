"""The seam between `launch` and whatever provides the nodes.

A scheduler is a module or a package in this folder with an object `SCHEDULER` of a class derived
from `Scheduler`; `registry` finds it. docs/architecture.md has the steps to add one, and
tests/schedulers.py the checks that every scheduler must pass.
"""

import shlex
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from manynodes.base.errors import Refusal
from manynodes.base.showing import show

SPARE_MB = 1000  # of local disk that a job asks for besides the data
PAUSE = 5  # seconds between two questions while a scheduler does not answer

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Size:
    """What a job asks for.

    Attributes:
        nodes: number of nodes.
        cpus: CPUs of each node.
        gpus: GPUs of each node.
        memory: MB of each node.
        launches: whether the job's rules call `launch`, which reaches all of its nodes.
        scratch: MB of node-local disk on each node.
    """

    nodes: int
    cpus: int
    gpus: int
    memory: int
    launches: bool
    scratch: int = 0


@dataclass(frozen=True)
class Allocation:
    """The nodes that a launch may use.

    Attributes:
        owner: who trains there; a requeued job has the name it had before.
        hosts: names of the nodes in the order of their ranks.
        addresses: where the other nodes reach each of them: a name or an IP address.
        number: of the job or process; launches that run at once prefer different ports.
        end: when its time is up, in seconds since the epoch; None if never.
        job: the job's id; empty outside a job.
        inspect: command that shows why the job ended; empty if there is none.
        restarts: how often its scheduler has started this job again.
    """

    owner: str
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    number: int
    end: float | None = None
    job: str = ""
    inspect: str = ""
    restarts: int = 0

    @property
    def one_machine(self) -> bool:
        """Whether all nodes are the same machine, so that ranks need no network."""
        return len(set(self.hosts)) == 1


@dataclass(frozen=True)
class NodeCommand:
    """A program to start on one node.

    Attributes:
        node_rank: 0 .. nodes - 1.
        host: name of the node, as the scheduler has it.
        environment: additional variables; a value that begins with `$` is looked up on the node.
        command: argument list.
    """

    node_rank: int
    host: str
    environment: dict[str, str]
    command: tuple[str, ...]

    def __str__(self) -> str:
        variables = [
            f"{name}={value if value.startswith('$') else shlex.quote(value)}"
            for name, value in sorted(self.environment.items())
        ]
        return (
            f"[node {self.node_rank}, {self.host}] {' '.join(variables)} {shlex.join(self.command)}"
        )


@dataclass(frozen=True)
class Step:
    """Programs to start on all nodes of an allocation at once.

    Attributes:
        nodes: one command for each node.
        private: variables that no other user may read: they must not stand on a command line.
        tasks: tasks of each node.
        ranks: whether each task is a rank; otherwise each task is a node.
        cpus: CPUs of each task.
        gpus: GPUs of each node.
        dispatch: command that runs a node's command on the node, see dispatch.py; the node's number
            is to follow.
        folder: for files of the step that all nodes must see; it need not exist.
    """

    nodes: Sequence[NodeCommand]
    private: Mapping[str, str]
    tasks: int
    ranks: bool
    cpus: int
    gpus: int
    dispatch: Sequence[str]
    folder: Path


@dataclass(frozen=True)
class Command:
    """A process to start on this machine.

    Attributes:
        arguments: argument list.
        environment: variables added to ours; or all of them, if it is `alone`.
        stdin: text that it reads.
        label: splits a line of its output into a label for the log and the text.
        end_signal: signal that it gets when this process dies.
        pass_fds: file descriptors that it inherits.
        directory: where it starts; None for ours.
        ignored: signals that do not end it unless it wants that.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    label: Callable[[str], tuple[str, str]] = lambda line: ("", line)
    # Not SIGTERM: torchrun blocks when nobody reads its output. Its ranks get SIGTERM from it.
    end_signal: signal.Signals = signal.SIGKILL
    pass_fds: tuple[int, ...] = ()
    directory: Path | None = None
    alone: bool = False
    ignored: tuple[signal.Signals, ...] = ()


class Cause(StrEnum):
    """What ended a step, apart from its program."""

    NODE_LOST = "node lost"
    LAUNCHER_KILLED = "launcher killed"
    RANK_KILLED = "rank killed"
    OTHER = "other"


@dataclass(frozen=True)
class Trouble:
    """What a scheduler, or our agents, say of a step that failed.

    Attributes:
        text: in one line, with the node.
        where: the node; empty if it is none, or in the text alone.
    """

    text: str
    where: str = ""
    cause: Cause = Cause.OTHER

    def record(self) -> dict:
        return {"trouble": asdict(self)}


# Called when a job's state has changed: with the Snakemake job, the scheduler's id, the state in
# its words, and whether it waits to be run.
TellState: TypeAlias = Callable[[Any, str, str, bool], None]


class Watch:
    """What a scheduler has told of the jobs of a Snakemake command.

    Attributes:
        failures: for each failed Snakemake job, why it failed, in the scheduler's words.
        logs: for each failed Snakemake job, the file with the scheduler's own log.
    """

    def __init__(self) -> None:
        self.failures: dict[Any, str] = {}
        self.logs: dict[Any, str] = {}


class Scheduler(ABC):
    """Provides nodes and starts programs on them.

    Attributes:
        transport: its name for `launch --transport`.
        description: of its nodes, for the help of that option.
        executor: the Snakemake executor whose jobs it runs.
        starter: a name for one of the processes of `commands`, for an error message; `{}` is its
            number.
        job_variable: name of a variable that every process of its jobs has; empty if there is none.
        task_launcher: name of the launcher that has the scheduler start one task per rank;
            empty if it cannot.
        task_variables: for that launcher, RANK, LOCAL_RANK and WORLD_SIZE as the scheduler names
            them on the node.
        job_scratch: name of a variable with a scratch folder that it removes after the job.
        shared_cpus: whether the nodes of an allocation share the CPUs of one machine.
        takes_hosts: whether the user names its hosts, see `on`.
        ends_requeued: whether it ends a job itself that it has been asked to requeue.
        query_settings: regular expression of the variables by which a user sets what its commands
            show; they would hide our jobs, or their columns.
        unneeded_in_jobs: a module that the Snakemake inside a job does not need, see in_job.py.
        canceller: command with which a user cancels jobs.
        hosts: that the user has named, see `on`.
    """

    transport: str
    description: str
    executor: str
    starter: str
    job_variable: str = ""
    task_launcher: str = ""
    task_variables: Mapping[str, str] = {}
    job_scratch: str | None = None
    shared_cpus: bool = False
    takes_hosts: bool = False
    ends_requeued: bool = True
    query_settings: str = ""
    unneeded_in_jobs: str = ""
    canceller: str = ""
    hosts: tuple[str, ...] = ()

    def active(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with this environment is part of one of the scheduler's jobs."""
        return self.job_variable in environment

    def doubted(self, environment: Mapping[str, str]) -> bool:
        """Whether `active` may be due to another scheduler, whose variables are there too."""
        return False

    @abstractmethod
    def allocation(self, nodes: int) -> Allocation:
        """The nodes of the job that this process is part of; this process is on the first one.

        Raises:
            Refusal: there is no job, it has another number of nodes, or the scheduler does not
                answer.
        """

    def example(self, nodes: int) -> Allocation:
        """An allocation for a dry run outside a job; `NODE-0` and so on stand for its nodes, unless
        the user has named enough hosts.
        """
        names = self.hosts[:nodes]
        if len(names) < nodes:
            names = tuple(f"NODE-{rank}" for rank in range(nodes))
        return Allocation("nobody", names, names, 0)

    @abstractmethod
    def commands(self, step: Step) -> list[Command]:
        """The processes that start the step; they end when every node has ended.

        If one is ended by SIGTERM, everything that it started must end too.
        """

    def preview(self, step: Step) -> list[str]:
        """The step as `launch --dry-run` prints it."""
        return [str(node) for node in step.nodes]

    def on(self, hosts: Sequence[str]) -> "Scheduler":
        """The same scheduler for these hosts, in the order of the node ranks.

        Raises:
            Refusal: it takes its nodes from the job.
        """
        raise Refusal(f"transport {self.transport} takes its nodes from the job; leave --hosts out")

    def explain(self, errors: Sequence[str]) -> Trouble | None:
        """Why a step failed, if the scheduler said so; used if no rank could say it.

        Args:
            errors: last lines of stderr of the processes of `commands`.
        """
        return None

    def end(self, allocation: Allocation) -> float | None:
        """When the job's time is up, as `Allocation.end`, asked now.

        Raises:
            Refusal: there is no answer.
        """
        return allocation.end

    def warn(self, allocation: Allocation) -> None:
        """Have all ranks of the job stop as before the end of its time.

        Raises:
            Refusal: it cannot.
        """
        raise Refusal("this scheduler cannot warn a job")

    def requeue(self, allocation: Allocation, saved: bool) -> str | None:
        """Have this job run again after its end.

        Args:
            saved: whether it has saved something new. Who submits it again counts how often it has
                not.

        Returns:
            Why this is not possible; None if it is done.
        """
        return "this scheduler cannot requeue a job"

    def resources(self, size: Size) -> dict[str, int | str]:
        """Snakemake resources that make the scheduler's executor ask for this size."""
        return {}

    def idle_nodes(self, environment: Mapping[str, str]) -> str | None:
        """A warning if Snakemake runs inside a job of several nodes and would use only one."""
        return None

    def unended(self, jobs: Sequence[str]) -> dict[str, bool] | None:
        """Those of its jobs that wait or run, and that this user has submitted in this folder:
        results may come from a cluster that gave the same numbers. Each with whether it runs; None
        if it does not say.
        """
        return None

    def watch(self, workflow: Any, tell_state: TellState, tell: Callable[[str], None]) -> Watch:
        """Check the jobs of a Snakemake command before the first one is submitted, and follow them
        from then on.

        Args:
            workflow: Snakemake's.
            tell_state: is told every change of a job's state, by several threads.
            tell: prints one line.

        Raises:
            Refusal: the scheduler does not answer, or would never run a job.
        """
        return Watch()


@contextmanager
def asked_of(variable: str) -> Iterator[None]:
    """What the scheduler is asked of the job that a variable names. A shell may have kept it when
    the job ended.

    Raises:
        Refusal: there is no answer; with what to do then.
    """
    try:
        yield
    except Refusal as refusal:
        remedy = f"in no job: unset {variable}, or launch --transport local"
        raise Refusal(f"{refusal}; {remedy}") from None


def end_here(start: float, end: float, running: float) -> float:
    """When a job ends, by this machine's clock, which may not be the scheduler's.

    Of what the scheduler says and what the job's own duration says, the earlier: the latter
    does not know what came before the job's first process.

    Args:
        start, end: of the job, in seconds since the epoch by the scheduler's clock.
        running: seconds since the start of the job's first process.
    """
    return min(end, time.time() + (end - start) - running)


class Unanswered(Exception):
    """A scheduler did not answer; its jobs are not affected."""


def until_answered(ask: Callable[[], Answer], patience: float, who: str, remedy: str) -> Answer:
    """What a scheduler answers; a line is printed if that takes long.

    Args:
        ask: raises Unanswered while there is no answer.
        patience: seconds to ask again.
        who: is asked, such as `pbs: the server`.

    Raises:
        Refusal: it did not answer in time.
    """
    deadline, told = time.monotonic() + patience, False
    while True:
        try:
            return ask()
        except Unanswered as error:
            if time.monotonic() >= deadline:
                raise Refusal(f"{error}; {remedy}") from None
        if not told:
            show(sys.stderr, f"{who} does not answer; trying again for {patience:.0f} s\n")
            told = True
        time.sleep(PAUSE)


def is_this_folder(folder: str) -> bool:
    """Whether a job was submitted in the folder in which we are, whatever it is called there."""
    try:
        return bool(folder) and Path(folder).samefile(".")
    except FileNotFoundError:
        return False
    except OSError:
        # It may be.
        return True


def jobs_to_submit(dag: Any, of_the_place: Collection[str]) -> Iterator[Any]:
    """The jobs that a Snakemake command will submit; those of a group are one job.

    Args:
        of_the_place: names of resources whose values cannot be added.

    Raises:
        Refusal: jobs of a group ask for different places.
    """
    for job in dict.fromkeys(dag.get_job_group(job) or job for job in dag.needrun_jobs()):
        if job.is_local:
            continue
        for name in of_the_place:
            values = {
                str(value): part.rule.name
                for part in parts(job)
                if (value := part.resources.get(name))
            }
            if len(values) > 1:
                one, other = list(values.items())[:2]
                raise Refusal(
                    f"{name}: {one[1]} asks for {one[0]}, {other[1]} for {other[0]}, and they are "
                    "one job; give both the same"
                )
        if job.is_group():
            job.finalize()
        yield job


def parts(job: Any) -> list[Any]:
    """The jobs of a group, or the job itself."""
    return list(job) if job.is_group() else [job]


def as_options(options: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(
        f"--{option}" if value is None else f"--{option}={value}"
        for option, value in options.items()
    )


def labelled(kind: str, line: str) -> tuple[str, str]:
    """The label and the text of a line such as `1: text`, where 1 is the number of a task."""
    task, colon, text = line.partition(": ")
    if colon and task.strip().isdecimal():
        return f"[{kind} {task.strip()}] ", text
    return "", line
