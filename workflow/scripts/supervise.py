"""Run one rank, or one node's program: keep its log, and tell `launch` how it ended if it did not end well.

Whatever launcher started this, it stands between the launcher and the program. A rank that is killed cannot say so itself, and
launchers know no more than that some process failed.
"""

import argparse
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import IO, Any

from ddp.agents import Command, Output, log_file, run_all
from ddp.endings import Ending, how, last_words, send
from ddp.errors import os_error_line
from ddp.lifetime import end_with_parent

# Seconds from SIGTERM to SIGKILL, so that all is over before torchrun, which gives 30, kills us.
GRACE = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, help="folder for a log of each rank's")
    # Not after `--`, which accelerate takes away.
    parser.add_argument("program", nargs=argparse.REMAINDER, help="Python program and its arguments")
    args = parser.parse_args()
    # torchrun gives ranks a session of their own, in which they would outlive it.
    end_with_parent(signal.SIGTERM)
    number = os.environ.get("RANK")
    name = f"rank={number}" if number is not None else f"node={os.environ['NODE_RANK']}"
    who = f"{name.replace('=', ' ')} on {socket.gethostname()}"
    try:
        status = supervise(args.program, args.logs / f"{name}.log" if args.logs else None, who)
    except OSError as error:
        send(Ending(who, "was not started", time.time(), (os_error_line(error),)).record())
        status = 1
    sys.exit(status)


def supervise(program: list[str], log: Path | None, who: str) -> int:
    """Run the program to its end; returns its status, 1 if it was killed."""
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
    # In memory: a node's full /tmp takes nothing from it, and a killed process leaves nothing there.
    with os.fdopen(os.memfd_create("report"), "r") as result:
        with log_file(log or Path(os.devnull), "w") as sink:
            # Where it has a log of its own, what it says of its troubles stays out of everybody's.
            output = Output(sink, sink, show_errors=not log)
            environment = {"NODE_REPORT": f"/dev/fd/{result.fileno()}"}
            outcome = run_all([Command((sys.executable, *program), environment, pass_fds=(result.fileno(),))], output, GRACE)
        report = read_report(result)
        # One that ends because we are to end has nothing to say, but what it has saved.
        if outcome.failed is not None and (not outcome.stopped or report):
            words = last_words(output.errors, Path(program[0]).stem)
            send(Ending(who, how(outcome.status), time.time(), words, str(log or ""), report).record())
        elif outcome.good and report:
            send({"result": {"node_rank": int(os.environ["NODE_RANK"])} | report})
    return 0 if outcome.good else max(1, outcome.status)


def read_report(file: IO[str]) -> dict[str, Any]:
    """What the program has written; nothing if it was killed while it wrote."""
    try:
        report = json.loads(file.read() or "{}")
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


if __name__ == "__main__":
    main()
