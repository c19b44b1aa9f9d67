"""Start a program on every node of a run, and report truthfully how it ended.

--transport chooses how a command reaches each node, --launcher what starts the ranks there. The
program and its arguments follow `--`.
"""

# ruff: noqa: E402
import os
import signal
from contextlib import suppress


def stopped_early(number: int, _frame: object) -> None:
    """End while the imports, which take most of a second, are under way."""
    line = f"launch: {WHILE_NOTHING_RAN.format(signal.Signals(number).name)}\n"
    with suppress(OSError):
        os.write(2, line.encode())
    os._exit(75)


WHILE_NOTHING_RAN = "stopped ({}) while no rank was running; run the same command again"
if __name__ == "__main__":
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, stopped_early)

import argparse
import json
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any, NoReturn

# Python looks there by itself, unless a site has set PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from manynodes.base import atomic, signing
from manynodes.base import failure as failures
from manynodes.base.cpus import BINDING, OF_LIBRARIES
from manynodes.base.environment import SCRIPTS, Environment, forget_contract, forget_others
from manynodes.base.errors import Failed, Refusal, Stopped, told_in_one_line
from manynodes.base.failure import Again, Failure, Kind
from manynodes.base.processes import adopt_orphans, end_descendants
from manynodes.base.provenance import now
from manynodes.base.reading import read_json
from manynodes.base.showing import open_closed_streams, show
from manynodes.base.temporary import OURS, parent_folder, temporary_folder
from manynodes.base.timeouts import (
    BEFORE_THE_END,
    CANCELLED_WITHIN,
    ENDED_BY_SCHEDULER,
    LAUNCH_GRACE,
    START_UP,
    TIMEOUT,
)
from manynodes.checkpointing import incidents
from manynodes.checkpointing.replaced import link_or_copy
from manynodes.experiment import command
from manynodes.experiment.config import parse_option, refuse_bad_places
from manynodes.experiment.environments import UserEnvironment
from manynodes.experiment.job_size import cpus_per_process
from manynodes.experiment.keys import Keys
from manynodes.launching.agents import (
    Output,
    Stop,
    ignore_stopping_signals,
    run_all,
    stop_when_signalled,
    stopping_signals,
    watched,
)
from manynodes.launching.endings import Ending, sent
from manynodes.launching.first_failure import (
    First,
    Source,
    first_failure,
    of_unknown_ends,
    said_of,
)
from manynodes.launching.gpus import claimed_gpus, usable_gpus
from manynodes.launching.launchers import Geometry, Launcher
from manynodes.launching.logs import (
    Log,
    folder_of_job,
    is_new,
    log_of,
    opened,
    put_aside,
    refuse_no_log,
    remove_logs,
)
from manynodes.launching.plan import find_launcher, launcher_names, make_plan
from manynodes.launching.ports import accept_connections, bound_pair, refuse_ipv6_only
from manynodes.launching.restarts import Reached, Starts
from manynodes.launching.time_limit import warn_of_a_lower_limit
from manynodes.launching.unfinished import place_of_unfinished, told_of_unfinished
from manynodes.launching.whereabouts import Whereabouts
from manynodes.programs import attempt
from manynodes.programs.folders import ENVIRONMENT, Folders, is_run, refuse_links
from manynodes.programs.rank import place_saved, saved_now, sizes_saved
from manynodes.programs.task import Task
from manynodes.programs.variables import sees_no_gpu
from manynodes.reporting.metrics import metrics_file
from manynodes.schedulers import registry
from manynodes.schedulers.base import Allocation, Scheduler, Step, Trouble

C10D_WARNING = (
    "warning: with launcher torchrun-c10d the nodes unpickle each other's messages; "
    "they are signed, but torchrun, the default, unpickles nothing (docs/security.md)"
)
EDITED = (
    "the program's files, or its image, changed while it ran: what it read late may be of the new "
    "ones; --config replace=true trains again (launch alone: --resume fresh)"
)


def main() -> None:
    open_closed_streams()
    # If it is ignored, as some parents leave it, how a process ended is lost: all ended well.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    args = arguments()
    forget_others(os.environ)
    forget_contract(os.environ)
    registry.forget_query_settings(os.environ)
    # What gets away from a killed supervisor comes to this process.
    adopt_orphans()
    with told_in_one_line("launch"):
        try:
            with logged(args):
                for number in stopping_signals():
                    signal.signal(number, stopped)
                launch(args, scheduler_of(args))
        finally:
            ignore_stopping_signals()
            end_descendants()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    transports = [f"{name}: {s.description}" for name, s in registry.SCHEDULERS.items()]
    transports.append("auto: the nodes of the job that this process is part of, otherwise local")
    add("--transport", choices=("auto", *registry.SCHEDULERS), default="auto",
        help="; ".join(transports))  # fmt: skip
    add("--hosts", nargs="+", metavar="HOST",
        help="for transport ssh: hosts in the order of their ranks, this machine first, or a file "
        "with one host a line, such as $PBS_NODEFILE")  # fmt: skip
    add("--launcher", choices=launcher_names(), default="torchrun",
        help="none: the program once per node")  # fmt: skip
    add("--nodes", type=positive, help="default: 1, or as many as --hosts names")
    add("--nproc-per-node", type=positive, default=1, help="processes on each node")
    add("--cpus", type=positive,
        help="CPUs of this machine, for all its nodes (transport local alone)")  # fmt: skip
    add("--cpus-per-node", type=positive,
        help="CPUs of each node; default: 1, or its part of --cpus")  # fmt: skip
    add("--cpus-per-proc", type=positive, help="CPUs of each process; default: an even share")
    add("--device", choices=("auto", "cpu", "cuda"),
        help="cpu hides the GPUs; default: auto, with --collect cpu")  # fmt: skip
    add("--gpus-for-auto", type=positive, default=1, metavar="N",
        help="GPUs that this machine must have for --device auto to use them, if a run beside this "
        "one has more processes (transport local)")  # fmt: skip
    add("--log", type=path_of, metavar="FILE",
        help="for the output of all processes; beside it failure.json, if they fail")  # fmt: skip
    add("--rank-logs", type=path_of, metavar="FOLDER",
        help="folder for one log per rank and one of the launcher; if the nodes are several "
        "machines, launch-JOB/ unless given")  # fmt: skip
    add("--state", type=path_of, metavar="FOLDER",
        help="folder of the run's states; refuse if another job owns the run")  # fmt: skip
    add("--collect", type=path_of, metavar="FILE", help="JSON file for the reports of all nodes")
    add("--end-with", type=positive, metavar="PID", help="stop when this process ends")
    add("--restart", action="store_true",
        help="if the program fails after it has saved something new, start it again in the same "
        "job; requeue the job if its time is up or a node is lost")  # fmt: skip
    add("--timeout", type=positive, metavar="SECONDS",
        help="how long ranks wait for each other before one of them counts as hung")  # fmt: skip
    add("--dry-run", action="store_true",
        help="print the environment and command of every node, and start nothing")  # fmt: skip
    add("--scratch", nargs="*", default=[], metavar="FOLDER",
        help="node-local folders to stage in; $NAME is expanded on the node")  # fmt: skip
    add("--staged-python", type=path_of, metavar="FOLDER",
        help="that pack.py has made of the Python that runs this: each node starts with its own "
        "copy, in --scratch")  # fmt: skip
    add("--other-torch", action="store_true",
        help="the training has another Python's torch: without --output, as for the preflight, "
        "this one's computes on CPUs")  # fmt: skip
    add("program", nargs="+", help="Python program and its arguments; with --output any command")
    add_options_of_run(parser)
    return completed(parsed(parser, sys.argv[1:]))


def completed(args: argparse.Namespace) -> argparse.Namespace:
    """The command line with what follows from other options."""
    if args.other_torch and not args.output:
        args.device = "cpu"
    args.device = args.device or ("cpu" if args.collect else "auto")
    args.token, args.begun, args.explained = secrets.token_hex(8), False, False
    args.trains = bool(args.output) and not args.evaluate
    if args.trains:
        args.state = args.state or args.output / "state"
        args.rank_logs = args.rank_logs or args.output / "logs"
    return args


def parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The command line. Without `--`, of the program's own options some would be taken for ours."""
    args, others = parser.parse_known_args(words)
    if others and "--" not in words:
        parser.error(f"put -- before the program, if {others[0]} is an option of it")
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if "--" not in words and any(word[:1] == "-" for word in words[words.index(args.program[0]) :]):
        parser.error("put -- before the program")
    if args.program[0].startswith("-"):
        package = "to start a package, use --output FOLDER -- {python} -m PACKAGE"
        parser.error(f"{args.program[0]} is no program; {package}")
    if not args.output and is_command(args.program[0]):
        here = "name the file of a Python program"
        if not command.torchrun_of(args.program):
            here += ", or use --output FOLDER for any command"
        parser.error(f"{args.program[0]} is a command: {here}")
    return args


def is_command(word: str) -> bool:
    """Whether it starts something else than the Python program in a file of this name."""
    if word == command.PYTHON:
        return True
    if not (path := shutil.which(word)):
        return False
    if not Path(word).is_file():
        return True
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def add_options_of_run(parser: argparse.ArgumentParser) -> None:
    of_run = parser.add_argument_group(
        "a run", "with an owner, a state, staged inputs and its results in a folder"
    ).add_argument
    of_run("--output", type=path_of, metavar="FOLDER",
        help="of the run, with its state and logs; makes this a run")  # fmt: skip
    of_run("--run", default="{}", metavar="JSON", help="the values that decide its result")
    of_run("--settings", default="{}", metavar="JSON", help="the other values of its parameters")
    of_run("--sources", default="", metavar="SHA256", help="of its program")
    of_run("--code", default="", metavar="SHA256",
        help="of the program's code; refuse if it is another now")  # fmt: skip
    of_run("--data", type=path_of, metavar="FOLDER", help="shared data set, with its manifest")
    of_run("--files", type=path_of, metavar="FOLDER", help="that collect.py has made")
    of_run("--directory", metavar="FOLDER",
        help="where the program starts; default: its results folder")  # fmt: skip
    of_run("--environment", default="{}", metavar="JSON",
        help="of the program, as in config/README.md")  # fmt: skip
    of_run("--packed", type=path_of, metavar="FOLDER", help="its environment, to be staged")
    of_run("--reads", default="{}", metavar="JSON",
        help="metrics and snapshots, as in config/README.md")  # fmt: skip
    of_run("--resume", choices=("exact", "anyway", "fresh"), default="exact",
        help="what to do with the state of an interrupted attempt")  # fmt: skip
    of_run("--evaluate", action="store_true", help="evaluate the finished run, with this program")


def stopped(number: int, _frame: object) -> NoReturn:
    """End before, between or after starts of the ranks; while they run, `run_all` stops them."""
    # A second signal would end the handling of the first.
    ignore_stopping_signals()
    raise Stopped(WHILE_NOTHING_RAN.format(signal.Signals(number).name))


def scheduler_of(args: argparse.Namespace) -> Scheduler:
    """The scheduler of --transport and --hosts.

    Raises:
        Refusal: the two do not fit together.
    """
    if args.transport == "auto":
        return registry.on_hosts(args.hosts) if args.hosts else registry.active(os.environ)
    scheduler = registry.SCHEDULERS[args.transport]
    return scheduler.on(args.hosts) if args.hosts else scheduler


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def path_of(text: str) -> Path:
    """A path; without a name, as of a variable that is not set, it would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; give one")
    return Path(text)


def launch(args: argparse.Namespace, scheduler: Scheduler) -> None:
    """Start the program on the nodes of the scheduler, and wait for its end.

    Raises:
        Stopped: the program was asked to stop, and can be resumed.
        Failed: it failed.
        Refusal: it cannot be started, or another job trains the run.
    """
    args.nodes = args.nodes or len(scheduler.hosts) or 1
    reads = parse_option("--reads", args.reads)
    # The rules have checked theirs, which name what is installed.
    if reads and "installed" not in reads:
        by_hand = {"experiment": "by_hand", "command": ["launch"]}
        refuse_bad_places(Keys(False, None).validate(by_hand | reads))
    if args.launcher == "none" and args.nproc_per_node > 1:
        raise Refusal(
            "--launcher none starts the program once per node; leave --nproc-per-node out, or "
            "take --launcher torchrun"
        )
    if has_ended(args) and args.resume == "exact" and not args.dry_run:
        job = job_of_ended(args, scheduler)
        if args.trains:
            check_again(args, job)
            return
        args.nodes = len(job.hosts)
    refuse_own_ranks(args, on_cpus=args.device == "cpu")
    launcher = find_launcher(args.launcher, scheduler)
    geometry = geometry_of(args, scheduler)
    with gpus_for(args, scheduler, geometry) as gpus:
        example = args.dry_run and not (scheduler.shared_cpus or scheduler.active(os.environ))
        if example:
            print("launch: outside a job; NODE-0 and so on stand for its nodes", file=sys.stderr)
        job = scheduler.example(args.nodes) if example else scheduler.allocation(args.nodes)
        if not (job.one_machine or example):
            refuse_ipv6_only(job.addresses)
        refuse_past_deadline(job)
        program = Program(args, scheduler, launcher, geometry, gpus, job)
        if args.dry_run:
            with program.step() as step:
                print(*scheduler.preview(step), sep="\n")
            return
        on_cpus = sees_no_gpu(args.device, os.environ) if gpus is None else not gpus
        refuse_own_ranks(args, on_cpus)
        make_ready(args, job)
        with log_of(args.log, args.rank_logs) as log:
            args.begun = True
            if args.trains and not begin_attempt(args, job):
                return
            if args.evaluate:
                args.code = evaluation_sha256(args)
            # To the end: a second signal must not hide what the program has said after the first,
            # and a scheduler that requeues the job ends this process too, which must say first why.
            program.run_to_the_end(log, stop_when_signalled())


def refuse_own_ranks(args: argparse.Namespace, on_cpus: bool) -> None:
    """Refuse a command that would start ranks of its own in each process.

    Raises:
        Refusal: as of `command.refuse_own_ranks`.
    """
    if args.output:
        per_node = args.nproc_per_node
        processes = args.nodes * per_node
        command.refuse_own_ranks(args.program, processes, per_node, "{python} ", on_cpus)


def job_of_ended(args: argparse.Namespace, scheduler: Scheduler) -> Allocation:
    """The nodes of the job of a run whose program has ended. One is enough to take its results; a
    job that was requeued has all of them.

    Raises:
        Refusal: this is no such job.
    """
    try:
        return scheduler.allocation(args.nodes)
    except Refusal:
        with suppress(Refusal):
            return scheduler.allocation(1)
        raise


def check_again(args: argparse.Namespace, job: Allocation) -> None:
    """Let the results of a program that has ended be read again, without its nodes and GPUs.

    Raises:
        Refusal: as `begin_attempt`, or `launch`.
    """
    make_ready(args, job)
    with log_of(args.log, args.rank_logs):
        args.begun = True
        if begin_attempt(args, job):
            raise Refusal(f"{Folders(args.output).ended} is gone; run the same command again")


def gpus_for(
    args: argparse.Namespace, scheduler: Scheduler, geometry: Geometry
) -> AbstractContextManager[Sequence[str] | None]:
    """The GPUs of this machine for all processes if its nodes share it, see `make_plan`."""
    if not scheduler.shared_cpus:
        return nullcontext()
    processes, for_auto = geometry.world_size, args.gpus_for_auto
    other = not UserEnvironment.of(parse_option("--environment", args.environment)).is_ours
    other = other or (bool(args.output) and args.program[0] != command.PYTHON)
    if args.dry_run:
        return nullcontext(usable_gpus(args.device, processes, for_auto, other))
    return claimed_gpus(args.device, processes, tell, watched(args.end_with), for_auto, other)


def begin_attempt(args: argparse.Namespace, job: Allocation) -> bool:
    """Begin an attempt at the run; returns whether its program is to be started.

    Raises:
        Refusal: as `attempt.begin`; or the program's code is not the one of --code.
    """
    task, ended, requeued = task_of(args), has_ended(args), job.restarts > 0
    code = attempt.files_sha256(task, only_code=True)
    if code != (args.code or code) and not ended:
        raise Refusal(
            "the program's files have changed since this command began; run the same command "
            "again, or, if runs have ended with the old files, put those back"
        )
    # For `has_changed`.
    args.code = code
    if not attempt.begin(task, args.sources, args.resume, job.owner, tell, requeued):
        if args.log:
            failures.end(args.log.parent)
        return False
    if ended:
        remove_logs(args.rank_logs, args.log, True, begun=True)
    return True


def has_changed(args: argparse.Namespace) -> bool:
    """Whether the files of a run's program, or its image's, are others than those that this launch
    began with; not if they cannot be read now.
    """
    with suppress(Refusal, OSError):
        task = task_of(args)
        if attempt.files_sha256(task, only_code=True) != str(args.code):
            return True
        environment = UserEnvironment.of(task.environment)
        if environment.container and environment.is_image_file:
            known = read_json(Folders(args.output).state / ENVIRONMENT, "environment", "")
            return known.get("image", environment.image) != environment.image
    return False


def evaluation_sha256(args: argparse.Namespace) -> str:
    """SHA-256 of the program that evaluates as it is now; empty if it is an installed module, whose
    files are not known here.

    Raises:
        Refusal: a file is missing, or is no Python.
    """
    task, settings = task_of(args), parse_option("--settings", args.settings)
    code = attempt.files_sha256(task, only_code=False)
    return command.evaluation_sha256(task.command, settings, code) if code else ""


@dataclass(frozen=True)
class Program:
    """The program on the nodes of a job, where it may be started several times.

    Attributes:
        args: the command line.
        gpus: see `make_plan`.
    """

    args: argparse.Namespace
    scheduler: Scheduler
    launcher: Launcher
    geometry: Geometry
    gpus: Sequence[str] | None
    job: Allocation

    def run_to_the_end(self, log: Log, stop: Stop) -> None:
        """Run the program, with --restart again and again, until it has ended well or no other
        start in this job is useful.

        Raises:
            Stopped, Failed, Refusal: as `launch`.
        """
        args = self.args
        # Without an owner, which counts starts of a requeued job from the same state.
        restarts = self.job.restarts if args.restart and not args.state else 0
        starts = Starts(reached(args), restarts)
        for number in count(1):
            began = time.monotonic()
            first = self.run(log, stop, restarted=number > 1)
            if args.trains:
                keep_logs(args.rank_logs, Folders(args.output).printed)
            if first is None:
                ignore_stopping_signals()
                if args.trains and has_changed(args):
                    warn(log, EDITED)
                    incidents.add(args.state, incidents.EDITED, EDITED)
                end(args)
                return
            first = starts.judged(first, time.monotonic() - began, reached(args))
            in_place = args.restart and first.in_place and not stop.asked
            if in_place and args.trains and has_changed(args):
                # What it would save would be of two programs.
                failure = first.failure.then("its files or its image have changed since it began")
                first, in_place = replace(first, failure=failure, again=False), False
            if not (in_place and self.has_time() and not stop.asked):
                self.explain_and_end(first, log, stop)
            # Processes that outlived their supervisor.
            end_descendants()
            tell_restart(first, number, args, log)

    def has_time(self) -> bool:
        """Whether the job's time, or the deadline of the shell, allows another start."""
        end = self.job.end
        # The scheduler may not answer now.
        with suppress(Refusal):
            end = self.scheduler.end(self.job)
        stop_at = end - BEFORE_THE_END if end else Environment.read().stop_at
        return stop_at is None or time.time() < stop_at - START_UP

    def run(self, log: Log, stop: Stop, restarted: bool) -> First | None:
        """Run the program once; with --collect, write the nodes' reports to a file.

        Args:
            restarted: the program has run in this job before.

        Returns:
            Its first failure; None if it has ended well.

        Raises:
            Refusal: it cannot be started, or not all nodes have reported.
        """
        args, scheduler, job = self.args, self.scheduler, self.job
        with ExitStack() as files:
            step = files.enter_context(self.step())
            if "PET_RDZV_ID" in step.private:
                tell(C10D_WARNING)
            errors = log
            if args.rank_logs:
                files.callback(shutil.rmtree, launcher_folder(args), ignore_errors=True)
                # Ranks have their own logs. What is left on stderr is the launcher's, and it is
                # much when a rank fails.
                errors = files.enter_context(Log(args.rank_logs / "launcher.log"))
            # Otherwise nobody would see what a program tells there.
            shows = not (args.log or args.rank_logs)
            lines: list[str] = []
            output = Output(log, errors, show_errors=shows, records=lines)
            before = state_of(args)
            processes, patience = self.geometry.world_size, args.timeout or TIMEOUT
            over = Event()
            files.callback(over.set)
            Thread(target=warn_of_a_lower_limit, args=(scheduler, job, over), daemon=True).start()
            look = told_of_unfinished(lines, processes, patience, partial(warn, log))
            commands = scheduler.commands(step)
            outcome = run_all(commands, output, stop, LAUNCH_GRACE, args.end_with, look)
        finished = sent(lines, "finished")
        seen = [Whereabouts(**each) for each in sent(lines, "whereabouts")]
        if outcome.stopped and (place := place_of_unfinished(finished, seen)):
            warn(log, place)
        told = [Trouble(**each) for each in sent(lines, "trouble")]
        said = told[0] if told else scheduler.explain(output.errors)
        lost = of_unknown_ends(outcome, finished, processes, said)
        if not (outcome.stopped or outcome.failed is not None or lost):
            if args.collect:
                collect(args, sent(lines, "result"))
            return None
        source = Source(scheduler.starter.format(outcome.failed or 0), lost or said, job.inspect)
        endings = [Ending(**each) for each in sent(lines, "ending")]
        # A supervisor that was killed has not told what its rank had saved.
        changed = state_of(args) != before
        first = first_failure(
            outcome, endings, seen, output.errors, source, restarted, finished, changed
        )
        # With --output a supervisor has named the place.
        words = frozenset() if args.trains else said_of(endings)
        return replace(first, stopped=outcome.stopped, said=words)

    @contextmanager
    def step(self) -> Iterator[Step]:
        """The program on the nodes of the job, with new ports and folders that are ready for it.

        Raises:
            Refusal: it cannot be started.
        """
        args, geometry, job = self.args, self.geometry, self.job
        # A free port for the ranks, and a port on which this process answers the nodes.
        free, listener = bound_pair(job.number, "127.0.0.1" if job.one_machine else "")
        with free, listener, folder_for_launcher(args, job) as folder:
            listener.listen(geometry.world_size)
            port, open_port = free.getsockname()[1], listener.getsockname()[1]
            free.close()
            logs = ["--rank-logs", str(args.rank_logs)] if args.rank_logs else []
            of_run = ["--task", task_of(args, all_values=True).to_json()] if args.output else []
            words = [str(SCRIPTS / "supervise.py"), *logs, *(of_run or args.program)]
            python = [sys.executable]
            if args.staged_python:
                staged = [str(args.staged_python), *args.scratch]
                python += [str(SCRIPTS / "staged_python.py"), *staged, "--"]
            place = str(folder)
            nodes = make_plan(self.launcher, geometry, words, job, port, place, self.gpus, python)
            ranks = args.launcher == self.scheduler.task_launcher
            reach = [] if job.one_machine else ["--reach", f"{job.addresses[0]}:{open_port}"]
            uses_gpus = args.device == "cuda" and args.launcher != "none"
            step = Step(
                nodes=nodes,
                private=private_variables(args, self.scheduler, job),
                tasks=geometry.nproc_per_node if ranks else 1,
                ranks=ranks,
                cpus=geometry.cpus_per_proc * (1 if ranks else geometry.nproc_per_node),
                gpus=geometry.nproc_per_node if uses_gpus else 0,
                dispatch=[sys.executable, str(SCRIPTS / "dispatch.py"), *reach],
                folder=launcher_folder(args),
            )
            Thread(target=accept_connections, args=(listener,), daemon=True).start()
            yield step

    def explain_and_end(self, first: First, log: Log, stop: Stop) -> NoReturn:
        """Print what failed, requeue the job if that is wanted and useful, and end."""
        args, failure = self.args, first.failure
        requeue = first.again and args.restart and self.job.job
        if requeue:
            # A job that is being cancelled must not be requeued.
            stop.wait(CANCELLED_WITHIN)
        if stop.asked and not first.stopped:
            failure = replace(failure.then("then the job was told to end"), kind=Kind.PREEMPTED)
        elif requeue:
            refused = self.scheduler.requeue(self.job, first.saved)
            after = "requeued" if refused is None else f"not requeued: {refused}"
            again = Again.REQUEUED if refused is None else Again.NO
            failure = failure.then(f"job {self.job.job} is {after}", again)
        note(args, failure)
        preempted = failure.kind == Kind.PREEMPTED
        if preempted and failure.again == Again.NO:
            failure = failure.then(f"run the same command again{what_it_does(args)}")
        record(args, failure)
        write(log, *first.details, f"launch: {failure.line}")
        verb = "was interrupted" if preempted else "failed"
        see = f"; see {args.log}" if args.log else ""
        whole = f"{name_of(args)} {verb}: {failure.line}{see}"
        for text in first.details:
            show(sys.stderr, f"{text}\n")
        if failure.again == Again.REQUEUED:
            tell(whole)
            if self.scheduler.ends_requeued:
                # If this process ended before the scheduler ended the job, Snakemake would take
                # the job for failed and delete its output.
                stop.wait(ENDED_BY_SCHEDULER)
        args.explained = True
        ignore_stopping_signals()
        raise Stopped(whole) if preempted else Failed(whole)


def make_ready(args: argparse.Namespace, job: Allocation) -> None:
    """Remove what an earlier launch has left, and what would spoil this one.

    Raises:
        Refusal: another job trains the run, a folder of it is a link, or the folder of the logs has
            something else in it.
    """
    if bound := [name for name in BINDING if os.environ.pop(name, "")]:
        tell(f"{' and '.join(bound)} not passed on: every rank would use the same CPUs")
    for name in OF_LIBRARIES:
        os.environ.pop(name, None)
    if args.output:
        refuse_links(args.output, args.evaluate)
    # The rules know their folder.
    alone = args.trains and not args.sources
    run = is_run(Folders(args.output), args.resume) if alone else bool(args.state)
    # Otherwise the launchers' files have no folder that every node sees.
    in_folder_of_job = not (job.one_machine or args.rank_logs or args.launcher == "none")
    if args.log and (args.rank_logs or in_folder_of_job):
        refuse_no_log(args.log)
    if args.state:
        incidents.begin(args.state, job.owner, tell)
    if in_folder_of_job:
        args.rank_logs = folder_of_job(job, sys.argv[1:])
        tell(f"the logs of the ranks are in {args.rank_logs}/")
    if args.rank_logs:
        if args.state and args.rank_logs == args.state.parent / "logs":
            # No folder of ours is a link: it would lead to somebody else's files.
            with suppress(OSError):
                args.rank_logs.readlink()
                args.rank_logs.unlink()
        if not has_ended(args):
            remove_logs(args.rank_logs, args.log, run)
        # A network file system may keep the folder as long as files in it are open.
        args.rank_logs.mkdir(parents=True, exist_ok=True)
    if args.log:
        failures.begin(args.log.parent)


def has_ended(args: argparse.Namespace) -> bool:
    """Whether a run's program has ended before, so that its results may only be checked again; of
    the run that this trains, or stages for.
    """
    if args.trains:
        return attempt.has_ended(task_of(args), args.sources)
    return bool(args.collect) and Folders(args.collect.parent).has_ended


def end(args: argparse.Namespace) -> None:
    """Note that the program has ended well; for `publish`, which one has evaluated."""
    if args.trains:
        atomic.write_text(Folders(args.output).ended, now())
    if args.evaluate and args.code:
        is_now = ""
        # A file that is gone has changed.
        with suppress(Refusal, OSError):
            is_now = evaluation_sha256(args)
        atomic.write_text(Folders(args.output).evaluated_by, f"{args.code}\n{is_now}\n")
    if args.log:
        failures.end(args.log.parent)


def keep_logs(logs: Path, kept: Path) -> None:
    """Keep what the first process has printed, which the next launch would remove: its lines may be
    looked for again, with other expressions.
    """
    with suppress(OSError):
        for name in ("rank=0.log.old", "rank=0.log", "node=0.log.old", "node=0.log"):
            if (logs / name).is_file():
                kept.mkdir(parents=True, exist_ok=True)
                number = len(list(kept.iterdir())) + 1
                link_or_copy(logs / name, kept / f"{number:06}.log")


def reached(args: argparse.Namespace) -> Reached:
    """How far the run is, as far as its files tell."""
    if not args.state:
        return Reached()
    files = sizes_saved(Folders(args.output), task_of(args)) if args.trains else frozenset()
    counts: frozenset[bytes] = frozenset()
    with suppress(OSError), metrics_file(args.state.parent).open("rb") as file:
        counts = frozenset(line.partition(b",")[0] for line in file)
    return Reached(newest_state(args.state), counts, files)


def newest_state(states: Path) -> str:
    """The name of the furthest state of the built-in trainer, which has epoch and step."""
    return max((path.name for path in states.glob("epoch=*.safetensors")), default="")


def state_of(args: argparse.Namespace) -> object:
    """Changes when the program saves what it continues from, as far as its files tell."""
    if not args.trains:
        return newest_state(args.state) if args.state else ""
    return saved_now(Folders(args.output), task_of(args))


def what_it_does(args: argparse.Namespace) -> str:
    """What the same command does after a stop, if it does not only go on; to follow its name."""
    if args.evaluate:
        return " (if its time was up: with a longer runtime of evaluate)"
    if args.trains and not place_saved(Folders(args.output), task_of(args)):
        return "; nothing is saved, or named in snapshots"
    return ""


def record(args: argparse.Namespace, failure: Failure) -> None:
    """Write failure.json beside the log, whose name is that of the stage."""
    if args.log:
        failures.write(args.log.parent, args.log.stem, failure)


def write(log: Log, *lines: str) -> None:
    # A full disk must not hide what follows, nor a log that is closed already.
    with suppress(OSError, ValueError):
        print(*lines, sep="\n", file=log, flush=True)


def geometry_of(args: argparse.Namespace, scheduler: Scheduler) -> Geometry:
    """The geometry with the CPUs of each process.

    Raises:
        Refusal: there are too few CPUs.
    """
    if scheduler.shared_cpus:
        sharing = args.nproc_per_node * args.nodes
        # The rules have looked before.
        remedy = "leave --cpus-per-proc out, or give more --cpus"
        cpus = args.cpus or (args.cpus_per_node or 0) * args.nodes or 1
    else:
        sharing = args.nproc_per_node
        remedy = "use auto, or a larger cpus_per_task (launch alone: --cpus-per-node)"
        cpus = args.cpus_per_node or 1
    share = cpus_per_process(args.cpus_per_proc, sharing, cpus, remedy)
    wanted = str(args.cpus_per_proc or "auto")
    return Geometry(args.nodes, args.nproc_per_node, share, wanted, args.device)


def task_of(args: argparse.Namespace, all_values: bool = False) -> Task:
    """What each process of the run is given.

    Args:
        all_values: also those that do not decide its result.
    """
    geometry = {"nodes": args.nodes, "nproc_per_node": args.nproc_per_node}
    values = geometry | parse_option("--run", args.run)
    if all_values:
        values |= parse_option("--settings", args.settings)
    return Task(
        command=tuple("" if word == command.EMPTY else word for word in args.program),
        output=args.output,
        values=values,
        data=args.data,
        files=args.files,
        packed=args.packed,
        scratch=tuple(args.scratch),
        directory=args.directory,
        environment=parse_option("--environment", args.environment),
        reads=parse_option("--reads", args.reads),
        evaluates=args.evaluate,
        token=args.token,
    )


def refuse_past_deadline(job: Allocation) -> None:
    """Refuse to start if the deadline that the shell has given is over.

    Raises:
        Refusal: it is over, or no number.
    """
    # What an outer job has left in the environment does not matter where this one has an end.
    given = None if job.end else Environment.read().stop_at
    if given is not None and not given > time.time():
        raise Refusal(
            f"LAUNCH_STOP_AT: {given:.0f} is not in the future; unset it, or give the seconds "
            "since 1970 at which to stop"
        )


def private_variables(
    args: argparse.Namespace, scheduler: Scheduler, job: Allocation
) -> dict[str, str]:
    """The variables that must not stand on a command line, which every user of a node can read."""
    contract = Environment(
        owner=job.owner,
        secret=signing.new_secret(),
        stop_at=job.end - BEFORE_THE_END if job.end else None,
        timeout=args.timeout,
        job_scratch=scheduler.job_scratch,
    )
    if args.launcher == "torchrun-c10d" and not job.one_machine:
        return contract.variables() | {"PET_RDZV_ID": secrets.token_hex(16)}
    return contract.variables()


def folder_for_launcher(args: argparse.Namespace, job: Allocation) -> AbstractContextManager[Path]:
    """Where the launcher puts its own files.

    On one machine a private folder, in which the nodes exchange their addresses too; otherwise a
    folder that every node sees, so that nothing stays in the temporary folders of other nodes.
    """
    if not job.one_machine:
        return nullcontext(launcher_folder(args))
    if args.dry_run:
        return nullcontext(parent_folder() / f"{OURS}launch-XXXXXXXX")
    return temporary_folder("launch-")


def launcher_folder(args: argparse.Namespace) -> Path:
    """For files that all nodes see, beside the logs."""
    if args.rank_logs:
        # Whole: a program may start in another folder.
        return args.rank_logs.absolute() / ".launcher"
    return args.log.parent if args.log else Path()


def collect(args: argparse.Namespace, nodes: list[dict[str, Any]]) -> None:
    """Write the nodes' reports to the file of --collect.

    Raises:
        Refusal: not all of them have reported.
    """
    if len(nodes) != args.nodes:
        see = f"; see {args.log}" if args.log else ""
        raise Refusal(f"{len(nodes)} of {args.nodes} nodes reported{see}")
    nodes.sort(key=lambda node: node["node_rank"])
    atomic.write_text(args.collect, json.dumps({"nodes": nodes}, indent=2) + "\n")


def tell_restart(first: First, starts: int, args: argparse.Namespace, log: Log) -> None:
    """Print what failed, and keep the logs of its ranks in a folder of their own."""
    number = f"(start {starts + 1} of this job)"
    nothing = f"nothing new was saved in this start; starting again {number}"
    after = f"starting again, with what was saved {number}" if first.saved else nothing
    failure = first.failure.then(after, Again.HERE)
    if args.rank_logs:
        kept = put_aside(args.rank_logs, starts)
        if failure.log:
            failure = replace(failure, log=str(kept / Path(failure.log).name))
    write(log, *first.details, f"launch: {failure.line}")
    record(args, failure)
    note(args, failure)
    tell(f"{name_of(args)} failed: {failure.line}")


def note(args: argparse.Namespace, failure: Failure) -> None:
    """Keep it for the report of the run, without its log, which the next launch removes."""
    if args.state:
        line = replace(failure, log="").line
        incidents.add(args.state, incidents.INTERRUPTION, line)


def warn(log: Log, line: str) -> None:
    write(log, f"launch: warning: {line}")
    tell(f"warning: {line}")


def tell(line: str) -> None:
    show(sys.stderr, f"launch: {line}\n")


def name_of(args: argparse.Namespace) -> str:
    """The program's name in messages."""
    return command.name_of(args.program) if args.output else Path(args.program[0]).stem


@contextmanager
def logged(args: argparse.Namespace) -> Iterator[None]:
    """Write what ends this launch to the log and its record, unless `explain_and_end` has, or
    another launch may be using them: then the log exists before this one has begun it, or with
    --rank-logs is a link to a file there.
    """
    log, in_rank_logs = args.log, bool(args.rank_logs)
    try:
        yield
    except (Stopped, Refusal, OSError) as error:
        other = log and (log.is_symlink() or not is_new(log) if in_rank_logs else log.exists())
        if log and not args.explained and (args.begun or not other):
            # Not where a link in somebody's results leads to.
            kept = args.rank_logs / log.name if args.begun and args.rank_logs else log
            failure = failures.of_error(error)
            with suppress(OSError), opened(kept, "a") as file:
                file.write(f"launch: {failure.reason}\n")
            record(args, failure)
        raise


if __name__ == "__main__":
    main()
