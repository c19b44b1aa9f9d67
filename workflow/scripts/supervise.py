"""Run one rank, or one node's program: keep its log, and tell `launch` how it ended if it failed.

Every launcher starts this instead of the program. A killed rank cannot report anything itself,
and launchers only know that some process failed.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from manynodes.base.caches import private_caches
from manynodes.base.environment import Environment
from manynodes.base.errors import STOPPED, os_error_line
from manynodes.base.processes import adopt_orphans, end_descendants, end_with_parent, last_words
from manynodes.base.timeouts import SUPERVISE_GRACE, TIMEOUT
from manynodes.launching.agents import Allowance, Output, log_file, run_all, stop_signals
from manynodes.launching.endings import LOST_A_PEER, Ending, send
from manynodes.launching.whereabouts import Observer
from manynodes.schedulers.base import Command

# Bytes that a rank may show in the log of all ranks and in the terminal; its own log has more.
MOST_SHOWN = 10_000_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank-logs", type=Path, metavar="FOLDER", help="for one log per rank")
    # Not after `--`, which accelerate removes.
    parser.add_argument("program", nargs=argparse.REMAINDER, help="Python program and arguments")
    args = parser.parse_args()
    # torchrun gives ranks a session of their own, in which they would outlive it.
    end_with_parent(signal.SIGTERM)
    # A program may start daemons; they come to this process, which ends them.
    adopt_orphans()
    rank, node = os.environ.get("RANK"), Environment.read().node_rank
    name = f"rank={rank}" if rank is not None else f"node={node}"
    who = name.replace("=", " ")
    try:
        log = args.rank_logs / f"{name}.log" if args.rank_logs else None
        # To the very end: a launcher that sees another rank fail signals this process, which may
        # be about to tell how its own rank has failed.
        with stop_signals() as stop:
            status = supervise(args.program, log, who, node, stop)
    except OSError as error:
        said = (os_error_line(error),)
        send(Ending(who, socket.gethostname(), None, time.time(), lines=said).record())
        status = 1
    sys.exit(status)


def supervise(
    program: list[str], log: Path | None, who: str, node: int | None, stop: threading.Event
) -> int:
    """Run the program to its end, or until `stop` is set.

    Returns:
        Its status; 1 if it was killed.
    """
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
    here = socket.gethostname()
    # In memory: this works with a full /tmp, and a killed process leaves nothing behind.
    with os.fdopen(os.memfd_create("report"), "r") as result:
        with (
            log_file(log or Path(os.devnull), "w") as sink,
            private_caches(os.environ) as caches,
        ):
            # A rank's errors go to its own log if there is one, not to everybody's.
            output = Output(
                sink, sink, show_errors=not log, records=None, shown=Allowance(MOST_SHOWN)
            )
            contract = Environment(report=Path(f"/dev/fd/{result.fileno()}"))
            variables = contract.variables() | caches
            command = Command((sys.executable, *program), variables, pass_fds=(result.fileno(),))
            timeout = Environment.read().timeout or TIMEOUT
            observer = Observer(who, here, str(log or ""), timeout)
            outcome = run_all([command], output, stop, SUPERVISE_GRACE, look=observer)
            end_descendants()
        report = read_report(result)
        if outcome.status == STOPPED:
            report.setdefault("stopped", f"exit status {STOPPED}")
        # One that has given up waiting for another is on its way out. Slurm ends a step with
        # SIGCONT, so that one that was stopped may come to that too.
        said = "\n".join(output.errors)
        waited = "Traceback (most" in said and LOST_A_PEER.search(said)
        if observer.last and (observer.last.state or not waited):
            send(observer.last.record())
        # A program that ends because we are told to end only tells what it has saved.
        if outcome.failed is not None and (not outcome.stopped or report):
            words = last_words(output.errors, Path(program[0]).stem)
            killed = outcome.stopped and outcome.status == -signal.SIGKILL
            late = SUPERVISE_GRACE if killed else 0
            ended = Ending(
                who, here, outcome.status, time.time(), late, words, str(log or ""), report
            )
            send(ended.record())
        elif outcome.good and report:
            send({"result": {"node_rank": node} | report})
    return 0 if outcome.good else max(1, outcome.status)


def read_report(file: IO[str]) -> dict[str, Any]:
    """The program's report; empty if the program was killed while it wrote."""
    try:
        report = json.loads(file.read() or "{}")
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


if __name__ == "__main__":
    main()
