"""Run one rank, or one node's program: keep its log, and tell `launch` how it ended if it failed.

Every launcher starts this instead of the program. A killed rank cannot report anything itself,
and launchers only know that some process failed. For a process of a run (--task) it also owns the
run, stages what the program reads, guards its state, and stops it in order.
"""

# ruff: noqa: E402
import signal

from manynodes.base.processes import end_with_parent

# torchrun gives ranks a session of their own, in which they would outlive it. Before the other
# imports: a launch that is killed meanwhile left them to themselves.
end_with_parent(signal.SIGTERM)

import argparse
import errno
import json
import math
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from manynodes.base.caches import private_caches
from manynodes.base.environment import Environment, variable
from manynodes.base.errors import STOPPED, Refusal, Stopped, error_line, os_error_line
from manynodes.base.processes import (
    adopt_orphans,
    end_descendants,
    last_words,
    of_container,
    signal_of,
)
from manynodes.base.showing import show
from manynodes.base.temporary import SOURCES, file_without_a_name, sweep
from manynodes.base.timeouts import SUPERVISE_GRACE, TIMEOUT
from manynodes.launching.agents import (
    Allowance,
    Output,
    Stop,
    ignore_stopping_signals,
    run_all,
    stop_when_signalled,
)
from manynodes.launching.endings import LOST_A_PEER, Ending, moment, send
from manynodes.launching.logs import Log
from manynodes.launching.whereabouts import Observer
from manynodes.ranks.stopping import SIGNALS, listen
from manynodes.schedulers.base import Command

if TYPE_CHECKING:
    from manynodes.programs.rank import Rank

# Bytes that a rank may show in the log of all ranks and in the terminal; its own log has more.
MOST_SHOWN = 10_000_000
# For NCCL's watchdog, which ends a rank that has waited too long for another one. What they change
# was seen on an H200.
WATCHDOG = {
    # Four times as long it sleeps before that, for files that are not written: a minute by default.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
    # torchrun says 1: it first aborts the sums that are under way, and the rank computes on with
    # what is in their place. With 3 the rank waits.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
}
# Otherwise it writes the state of all collectives to a file per rank, and ends the rank that the
# others wait for before this process has looked at it. Who wants the files waits for them.
DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
# What comes again when a program is started again; others, such as EAGAIN of a node with too many
# processes, may not.
WRONG = (
    errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP, errno.E2BIG,
    errno.ENAMETOOLONG,
)  # fmt: skip
# Variables of ours, which a program of the user's does not see.
PRIVATE = ("secret", "report", "store", "ahead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank-logs", type=Path, metavar="FOLDER", help="for one log per rank")
    parser.add_argument("--task", metavar="JSON", help="of a run, see manynodes/programs/task.py")
    # Not after `--`, which accelerate removes.
    parser.add_argument("program", nargs=argparse.REMAINDER, help="Python program and arguments")
    args = parser.parse_args()
    # A program may start daemons; they come to this process, which ends them.
    adopt_orphans()
    if os.environ.setdefault(DUMP, "0") == "0":
        # torchrun's own default, and no user's.
        if "TORCHELASTIC_RUN_ID" in os.environ:
            os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
        for name, value in WATCHDOG.items():
            os.environ.setdefault(name, value)
    rank, contract = os.environ.get("RANK"), Environment.read()
    name = f"rank={rank}" if rank is not None else f"node={contract.node_rank}"
    who = name.replace("=", " ")
    try:
        log = args.rank_logs / f"{name}.log" if args.rank_logs else None
        # A launcher that sees another rank fail signals this process, which may be about to tell
        # how its own rank has failed.
        stop = stop_when_signalled()
        status = supervise(args.program, args.task, log, who, contract, stop)
    except OSError as error:
        ignore_stopping_signals()
        said = (os_error_line(error),)
        send(Ending(who, socket.gethostname(), None, moment(contract), lines=said).record())
        status = 1
    sys.exit(status)


def supervise(
    program: list[str],
    task: str | None,
    log: Path | None,
    who: str,
    contract: Environment,
    stop: Stop,
) -> int:
    """Run the program to its end, or until `stop` is asked.

    Returns:
        Its status; 1 if it was killed, or has ended with 0 because it was stopped.
    """
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
    here = socket.gethostname()
    with Log(log, "w") as sink, private_caches(os.environ) as caches:
        # A rank's errors go to its own log if there is one, not to everybody's.
        shown = Allowance(MOST_SHOWN) if log else None
        output = Output(sink, sink, show_errors=not log, records=None, shown=shown)
        observer = Observer(who, here, str(log or ""), contract.timeout or TIMEOUT)
        if task is None:
            end = run_ours(program, contract, caches, output, observer, stop)
        else:
            os.environ.update(caches)
            end = run_task(task, contract, output, observer, stop)
        # It only tells how its rank has ended, and ends with that.
        ignore_stopping_signals()
    # One that has given up waiting for another is on its way out. Slurm ends a step with SIGCONT,
    # so that one that was stopped may come to that too.
    said = "\n".join(output.errors)
    waited = "Traceback (most" in said and LOST_A_PEER.search(said)
    gpu = {"gpu": name} if (name := end.report.pop("gpu", "")) else {}
    last = observer.last(aborted=signal_of(end.status) == signal.SIGABRT)
    if last and (last.state or not waited):
        send(last.record())
    if not end.status and not end.stopped:
        result = {"result": {"node_rank": contract.node_rank} | end.report} if end.report else {}
        send({"finished": f"{who} on {here}"} | result)
    else:
        killed = end.stopped and end.status == -signal.SIGKILL
        ending = Ending(
            who,
            here,
            end.status,
            moment(contract),
            late=SUPERVISE_GRACE if killed else 0,
            lines=end.words,
            log=str(log or ""),
            report=end.report | gpu,
            told=end.stopped,
        )
        send(ending.record())
    return max(end.status, 1) if end.status or end.stopped else 0


@dataclass(frozen=True)
class End:
    """How a program ended.

    Attributes:
        status: as in subprocess.
        stopped: it was asked to stop.
        words: why, as its own lines.
        report: for `launch`.
    """

    status: int
    stopped: bool
    words: tuple[str, ...]
    report: dict[str, Any]


def run_ours(
    program: list[str],
    contract: Environment,
    caches: dict[str, str],
    output: Output,
    observer: Observer,
    stop: Stop,
) -> End:
    """Run a Python program of the workflow, which knows when to stop, or one that was given to
    `launch` alone.
    """
    knows = Path(program[0]).resolve().parent == Path(__file__).resolve().parent
    end = math.inf if knows or contract.stop_at is None else contract.stop_at
    if not knows:
        # Only here: it needs all schedulers.
        from manynodes.programs.variables import for_accelerate, sees_no_gpu

        caches = caches | for_accelerate(sees_no_gpu(contract.device, os.environ), os.environ)

    def look(pid: int, last: bool) -> None:
        observer(pid, last)
        if time.time() >= end:
            stop.asked = True

    with file_without_a_name() as file:
        variables = Environment(report=Path(f"/dev/fd/{file.fileno()}")).variables() | caches
        command = Command((sys.executable, *program), variables, pass_fds=(file.fileno(),))
        outcome = run_all([command], output, stop, SUPERVISE_GRACE, None, look, end_descendants)
        # One that was killed has left its own.
        sweep(SOURCES)
        report = read_report(file)
    if outcome.status == STOPPED:
        report.setdefault("stopped", f"exit status {STOPPED}")
    if outcome.told_to_end and time.time() >= end and outcome.status != STOPPED:
        said = "it did not end with 75" if outcome.status else "it ended with status 0, not with 75"
        report["late"] = f"its time was nearly up, and {said}"
    # Other programs may begin more lines than a refusal with their name.
    name = Path(program[0]).stem
    words = last_words(output.errors, name if knows else "", outcome.status)
    words = (*words[:-1], *(word.removeprefix(f"{name}: ") for word in words[-1:]))
    return End(outcome.status, outcome.told_to_end, words, report)


def run_task(
    task: str,
    contract: Environment,
    output: Output,
    observer: Observer,
    stop: Stop,
) -> End:
    """Run a program of the user's with what a run gives it."""
    # Only here: it needs jsonschema and yaml.
    from manynodes.programs.rank import ready
    from manynodes.programs.task import Task

    def tell(text: str) -> None:
        with suppress(OSError):
            print(f"supervise: {text}", file=output.log, flush=True)
        show(sys.stdout, f"supervise: {text}\n")

    report: dict[str, Any] = {}
    given = Task.from_json(task)
    for name in PRIVATE:
        os.environ.pop(variable(name), None)
    try:
        interrupted_by_signals(report)
        if stop.asked:
            raise Stopped("stopped before the program began")
        with ready(given, contract, report, tell) as rank:
            return run_ready(rank, contract.stop_at, output, observer, stop)
    except Stopped as stopped:
        return End(STOPPED, True, (str(stopped),), {"stopped": "SIGTERM"} | report)
    except Refusal as refusal:
        return End(1, False, (error_line(refusal),), report | {"refused": True})
    except OSError as error:
        return End(1, False, (os_error_line(error),), report)


def run_ready(
    rank: "Rank", stop_at: float | None, output: Output, observer: Observer, stop: Stop
) -> End:
    """Run the program of a run, and judge how it ended.

    Raises:
        Stopped, Refusal, OSError: as `Rank.look` and `Rank.end`; or it cannot be started.
    """
    stopping = listen(stop_at)
    errors: list[Refusal | OSError] = []

    def look(pid: int, last: bool) -> None:
        observer(pid, last)
        try:
            if not (last or errors):
                rank.look()
        except (Refusal, OSError) as error:
            errors.append(error)
            # Not SIGTERM: it would save into a state that is another job's now, or spoiled.
            end_descendants()
        if stopping.reason:
            stop.asked = True

    try:
        if rows := rank.rows:
            # What one line counts, another has, perhaps on stderr: their order matters.
            output = replace(output, heard=rows.hear, together=len(rows.patterns) > 1)
        command = [rank.command]
        outcome = run_all(command, output, stop, SUPERVISE_GRACE, None, look, end_descendants)
    except OSError as error:
        if error.errno not in WRONG:
            said = f"the program could not be run: {error.strerror}"
            raise OSError(error.errno, said, error.filename) from None
        where = f"{error.filename}: {error.strerror}"
        raise Refusal(f"{where}; check program, command or directory") from None
    finally:
        end_descendants()
    if errors:
        raise errors[0]
    asked = stopping.reason or ("a signal" if outcome.told_to_end else None)
    in_container = (rank.task.environment or {}).get("container")
    status = of_container(outcome.status) if in_container else outcome.status
    rank.end(status, asked)
    words = last_words(output.errors, "", status)
    # Of one that is killed, both streams are only what it had printed before.
    if output.together and status == -signal.SIGKILL and words and words[0][:10] != "Traceback ":
        words = ()
    return End(status, outcome.told_to_end, words, rank.report)


def interrupted_by_signals(report: dict[str, Any]) -> None:
    """From now on, let a request to stop end what this process does with `Stopped`."""

    def handle(number: int, _frame: object) -> None:
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        report["stopped"] = signal.Signals(number).name
        raise Stopped(f"stopped ({report['stopped']}) before the program began")

    for number in SIGNALS:
        signal.signal(number, handle)


def read_report(file: IO[str]) -> dict[str, Any]:
    """The program's report: the whole file, or of a program that adds a line each time the last one
    that is complete; empty if the program was killed while it wrote. What it has given as null or
    false is not there.
    """
    text = file.read()
    for each in (text, *reversed(text.splitlines())):
        with suppress(ValueError, RecursionError):
            report = json.loads(each)
            given = report.items() if isinstance(report, dict) else ()
            return {key: value for key, value in given if value is not None and value is not False}
    return {}


if __name__ == "__main__":
    main()
