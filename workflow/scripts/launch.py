"""Start a program on every node of a run, and tell the truth about how it ended.

Two choices: how a command gets to each node (--transport), and what starts the ranks there (--launcher). The program and its
arguments follow `--`.
"""

import argparse
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import IO, NoReturn

from ddp import atomic, signing
from ddp.agents import Command, Output, log_file, run_all
from ddp.endings import ending, records
from ddp.errors import Failed, Refusal, Stopped, error_line, told_in_one_line
from ddp.failure import Failure, first_failure
from ddp.gpus import usable_gpus
from ddp.launchers import LAUNCHERS, Geometry
from ddp.owner import refuse_owned
from ddp.plan import NodeCommand, local_plan, srun_command, srun_plan
from ddp.ports import bound_pair, welcome
from ddp.slurm import Allocation, allocation, only_the_job, queue_again
from ddp.temporary import parent_folder, temporary_folder

# Seconds from SIGTERM to SIGKILL. torchrun itself gives its ranks 30.
GRACE = 35
# Seconds before the end of a Slurm job's time at which its ranks are to stop: for the step that they are in, and to save.
BEFORE_THE_END = 60
# Seconds in which a scheduler that ends our processes ends us too.
ENDED_TOO = 5
# Seconds in which Slurm ends a job that it was asked to queue again.
ENDED_BY_SLURM = 120
HERE = Path(__file__).resolve().parent
C10D_WARNING = (
    "launch: warning: with launcher torchrun-c10d the nodes unpickle what they tell each other; it is signed, but between nodes torchrun, "
    "the default, unpickles nothing (docs/security.md)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("auto", "local", "srun"), default="auto",
                        help="local: all nodes are this machine; srun: this Slurm job's; auto: srun in a job, else local")  # fmt: skip
    parser.add_argument("--launcher", choices=LAUNCHERS, default="torchrun", help="none: the program once a node")
    parser.add_argument("--nodes", type=positive, default=1)
    parser.add_argument("--nproc-per-node", type=positive, default=1)
    parser.add_argument("--cpus", type=positive, default=1, help="transport local: CPUs of this machine, to share out")
    parser.add_argument("--cpus-per-node", type=positive, default=1, help="transport srun: CPUs of each node, to share out")
    parser.add_argument("--cpus-per-proc", type=positive, help="CPUs of each process; an even share if not given")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu")
    parser.add_argument("--log", type=Path, help="file for everything the processes write")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="folder for a log of each rank's, and one of the launcher's")
    parser.add_argument("--state", type=Path, metavar="FOLDER", help="of the run's states: touch nothing if another job owns the run")
    parser.add_argument("--collect", type=Path, metavar="FILE", help="write the nodes' reports there, as JSON")
    parser.add_argument("--end-with-parent", action="store_true", help="stop when whoever started this is gone")
    parser.add_argument("--requeue", action="store_true",
                        help="transport srun: have Slurm queue the job again if the program stops for want of time, or fails after it has "
                        "saved something new")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print every node's environment and command, and start nothing")
    parser.add_argument("program", nargs="+", help="Python program and its arguments")
    args = parser.parse_args()
    if args.transport == "auto":
        args.transport = "srun" if "SLURM_JOB_ID" in os.environ else "local"
    with told_in_one_line("launch"), logged(args.log):
        if args.launcher == "srun" and args.transport != "srun":
            raise Refusal("launcher: srun starts ranks through Slurm, so it needs transport srun; locally use torchrun")
        geometry = Geometry(args.nodes, args.nproc_per_node, cpus_per_proc(args))
        if args.transport == "srun":
            through_srun(args, geometry)
        else:
            on_this_machine(args, geometry)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def cpus_per_proc(args: argparse.Namespace) -> int:
    """CPUs of a process: as asked for, or an even share of what there is.

    Raises:
        Refusal: more are asked for than there are.
    """
    local = args.transport == "local"
    sharing, cpus = (args.nproc_per_node * args.nodes, args.cpus) if local else (args.nproc_per_node, args.cpus_per_node)
    share = max(1, cpus // sharing)
    wanted: int | None = args.cpus_per_proc
    if wanted and wanted > share:
        remedy = "more --cores" if local else "a larger cpus_per_task"
        raise Refusal(
            f"cpus_per_proc: {sharing} processes of {wanted} CPUs need {sharing * wanted}, {cpus} are given; use auto, or {remedy}"
        )
    return wanted or share


def supervised(args: argparse.Namespace) -> list[str]:
    logs = ["--logs", str(args.logs)] if args.logs else []
    return [str(HERE / "supervise.py"), *logs, *args.program]


def on_this_machine(args: argparse.Namespace, geometry: Geometry) -> None:
    gpus = usable_gpus(args.device, geometry.world_size)
    free, other = bound_pair(os.getpid(), "127.0.0.1")
    with free, other:
        port = free.getsockname()[1]
    name = f"process {os.getpid()} on {socket.gethostname()}"
    with private_folder(args) as folder:
        plan = local_plan(args.launcher, geometry, supervised(args), port, str(folder), gpus)
        if args.dry_run:
            print(*plan, sep="\n")
            return
        label = "[node {}] " if len(plan) > 1 else ""
        own = {signing.VARIABLE: signing.new_secret()}
        commands = [
            Command(node.command, node.environment | {"RUN_OWNER": name} | own, label=partial(labelled, label.format(node.node_rank)))
            for node in plan
        ]
        launch(commands, args, name)


def through_srun(args: argparse.Namespace, geometry: Geometry) -> None:
    """One job step over all nodes of the Slurm job; this process has to be on the first of them, as batch scripts are."""
    if args.dry_run and "SLURM_JOB_ID" not in os.environ:
        print("launch: this is no Slurm job; NODE-0 and so on stand for the nodes of one", file=sys.stderr)
        names = tuple(f"NODE-{rank}" for rank in range(geometry.nodes))
        step, plan = step_and_plan(args, geometry, names, names, "NODE-0:PORT", 20_000, launcher_folder(args))
        print(shlex.join(step), *plan, sep="\n")
        return
    job = allocation()
    here = os.environ.get("SLURMD_NODENAME", socket.gethostname().partition(".")[0])
    if here != job.hosts[0]:
        raise Refusal(
            f"launch runs on {here}, not on {job.hosts[0]}, the first node of job {job.job}; "
            f"start it there: srun --jobid={job.job} --nodelist={job.hosts[0]} --nodes=1 --ntasks=1 --overlap --pty bash"
        )
    only_the_job()
    if len(job.hosts) != geometry.nodes:
        raise Refusal(f"nodes: the run wants {geometry.nodes}, job {job.job} has {len(job.hosts)}: {', '.join(job.hosts)}")
    if not args.logs and args.launcher != "none":
        raise Refusal("transport srun needs --logs, a folder that every node sees, for launchers to put their files in")
    alone = geometry.nodes == 1
    # Two ports: one that every node must be able to reach now, and one that stays free for the ranks.
    free, door = bound_pair(job.job, "127.0.0.1" if alone else "")
    with free, door, private_folder(args) if alone else nullcontext(launcher_folder(args)) as folder:
        door.listen(geometry.world_size)
        address = "127.0.0.1" if alone else job.addresses[0]
        reach, port = f"{address}:{door.getsockname()[1]}", free.getsockname()[1]
        free.close()
        step, plan = step_and_plan(args, geometry, job.hosts, job.addresses, reach, port, folder)
        if args.dry_run:
            print(shlex.join(step), *plan, sep="\n")
            return
        # The same job, queued again, is the same owner: what it has begun is its own to go on with.
        name = f"Slurm job {job.job}"
        own = {"RUN_OWNER": name, signing.VARIABLE: signing.new_secret()}
        if job.end:
            own["STOP_AT"] = str(job.end - BEFORE_THE_END)
        if args.launcher == "torchrun-c10d" and not alone:
            # Not as an option, which everybody on a node can read.
            own["PET_RDZV_ID"] = secrets.token_hex(16)
            print(C10D_WARNING, file=sys.stderr, flush=True)
        stdin = json.dumps([{"environment": node.environment | own, "command": node.command} for node in plan])
        kind = "rank" if args.launcher == "srun" else "node"
        Thread(target=welcome, args=(door,), daemon=True).start()
        # Told to end when we are gone, srun ends the step; killed, it would leave the step to go on.
        command = Command(step, {}, stdin, partial(relabelled, kind), end_signal=signal.SIGTERM)
        launch([command], args, name, job)


def step_and_plan(
    args: argparse.Namespace, geometry: Geometry, hosts: Sequence[str], addresses: Sequence[str], reach: str, port: int, folder: Path
) -> tuple[tuple[str, ...], list[NodeCommand]]:
    """The srun command, and what it starts on each node."""
    plan = srun_plan(args.launcher, geometry, supervised(args), hosts, addresses, port, str(folder))
    gpus_per_node = geometry.nproc_per_node if args.device == "cuda" and args.launcher != "none" else 0
    dispatch = [sys.executable, str(HERE / "dispatch.py"), "--reach", reach]
    return srun_command(args.launcher, geometry, gpus_per_node, dispatch), plan


def private_folder(args: argparse.Namespace) -> AbstractContextManager[Path]:
    """For the launcher's own files where all nodes are this machine, and for what they tell each other. A dry run makes none."""
    return nullcontext(parent_folder() / "launch-XXXXXXXX") if args.dry_run else temporary_folder("launch-")


def launcher_folder(args: argparse.Namespace) -> Path:
    """For the launcher's own files. Every node sees it, so that nothing stays in the temporary folders of other nodes."""
    return (args.logs or Path()) / "launcher"


def labelled(label: str, line: str) -> tuple[str, str]:
    return label, line


def relabelled(kind: str, line: str) -> tuple[str, str]:
    """What `srun --label` writes, `1: text`, in our form."""
    task, colon, text = line.partition(": ")
    return (f"[{kind} {task.strip()}] ", text) if colon and task.strip().isdecimal() else ("", line)


def launch(commands: Sequence[Command], args: argparse.Namespace, name: str, job: Allocation | None = None) -> None:
    """Run the commands; with --collect, gather the report that each node writes to the file in its NODE_REPORT.

    Args:
        name: who trains, see `owner.Record`.
        job: the Slurm job that we are, if we are one.

    Raises:
        Stopped: the program was asked to stop, and can go on.
        Failed: it failed.
        Refusal: another trains the run.
    """
    if args.state:
        refuse_owned(args.state, name, partial(print, "launch:", file=sys.stderr, flush=True))
    if args.logs:
        shutil.rmtree(args.logs, ignore_errors=True)
        # It may be there still, with what a network file system keeps of files that are open.
        args.logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:
        log = files.enter_context(log_of(args))
        if args.logs:
            files.callback(shutil.rmtree, launcher_folder(args), ignore_errors=True)
        # With a log of each rank's, what is left on stderr is the launcher's own, of which there is much when a rank fails.
        output = Output(log, files.enter_context(log_file(args.logs / "launcher.log")) if args.logs else log)
        outcome = run_all(commands, output, GRACE, args.end_with_parent)
        if not outcome.good:
            endings = [ending(found["ending"]) for found in records(output.records) if "ending" in found]
            failure = first_failure(outcome, endings, output.errors, str(job.job) if job else None)
            tell_and_end(failure, args, log, job)
    if args.collect:
        nodes = sorted((found["result"] for found in records(output.records) if "result" in found), key=lambda node: node["node_rank"])
        if len(nodes) != args.nodes:
            raise Refusal(f"{len(nodes)} of {args.nodes} nodes reported" + (f"; see {args.log}" if args.log else ""))
        atomic.write_text(args.collect, json.dumps({"nodes": nodes}, indent=2) + "\n")


def tell_and_end(failure: Failure, args: argparse.Namespace, log: IO[str], job: Allocation | None) -> NoReturn:
    """Say what went wrong, have the job queued again if that is wanted and helps, and end."""
    line = failure.line
    queued_again = False
    if failure.again and args.requeue and job:
        # A job that is being cancelled must not be queued again; and this ends here if it is.
        time.sleep(ENDED_TOO)
        refused = queue_again(job)
        queued_again = refused is None
        line += f"; job {job.job} is " + ("queued again, to go on from there" if queued_again else f"not queued again: {refused}")
    if failure.preempted and not queued_again:
        line += "; the same command goes on from there"
    with suppress(OSError):
        print(*failure.details, f"launch: {line}", sep="\n", file=log, flush=True)
    program = f"{Path(args.program[0]).stem} {'was preempted' if failure.preempted else 'failed'}"
    whole = f"{program}: {line}" + (f"; see {args.log}" if args.log else "")
    for text in failure.details:
        print(text, file=sys.stderr)
    if queued_again:
        print(f"launch: {whole}", file=sys.stderr, flush=True)
        # Were we quicker than Slurm, Snakemake would take the job for failed, and clear up after it.
        time.sleep(ENDED_BY_SLURM)
    raise Stopped(whole) if failure.preempted else Failed(whole)


@contextmanager
def logged(log: Path | None) -> Iterator[None]:
    """Put a refusal into the log too, if nobody has begun it: another launch's log is not ours to touch."""
    try:
        yield
    except (Refusal, OSError) as error:
        if log and not log.exists():
            with suppress(OSError):
                log.write_text(f"launch: {error_line(error)}\n")
        raise


@contextmanager
def log_of(args: argparse.Namespace) -> Iterator[IO[str]]:
    """The log of the whole launch. With --logs it lies there, and --log is a link to it.

    Snakemake removes the log of a rule before it runs it, even if another job is running it: then only the link is gone, and it is
    there again at the end.
    """
    if not args.log:
        with open(os.devnull, "w", encoding="utf-8") as file:
            yield file
        return
    args.log.parent.mkdir(parents=True, exist_ok=True)
    kept = args.logs / args.log.name if args.logs else args.log
    with log_file(kept) as file:
        try:
            link(args.log, kept)
            yield file
        finally:
            with suppress(OSError):
                link(args.log, kept)


def link(path: Path, target: Path) -> None:
    """Make the path a relative link to the target, unless it is the target."""
    if path != target:
        path.unlink(missing_ok=True)
        path.symlink_to(os.path.relpath(target, path.parent))


if __name__ == "__main__":
    main()
