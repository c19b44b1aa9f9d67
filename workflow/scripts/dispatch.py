"""Run this node's command of the launch plan, which comes as JSON on stdin.

The plan has the number of each node; a scheduler starts this on every node and sends each node the
plan or its own part of it. That needs no shared file and has no limit of length. First this checks
that the node can reach rank 0's node, because launchers take minutes to find out and do not say
where.
"""

import argparse
import json
import math
import os
import signal
import socket
import sys
import time

from manynodes.base.environment import variable
from manynodes.launching.endings import Ending, send

# Seconds to wait for an answer of rank 0's node.
REACH = 30
# Characters of its answer, the time there.
MOST_TOLD = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node", required=True, help="number of this node, or $NAME of a variable")
    parser.add_argument("--reach", metavar="ADDRESS:PORT", help="of launch, on rank 0's node")
    args = parser.parse_args()
    plan = json.load(sys.stdin)
    node = int(value_here(args.node))
    ahead = seconds_ahead(args.reach, node) if args.reach else 0.0
    mine = plan[str(node)]
    os.environ.update({name: value_here(value) for name, value in mine["environment"].items()})
    if stop_at := os.environ.get(variable("stop_at")):
        os.environ[variable("stop_at")] = str(float(stop_at) + ahead)
    os.environ[variable("ahead")] = str(ahead)
    # These signals are for the ranks, which listen to them. They reach every process of the job
    # (sbatch --signal) and would end a launcher. Ignored here, they stay ignored in the command.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.execvp(mine["command"][0], mine["command"])


def value_here(value: str) -> str:
    """A value of the plan; `$NAME` stands for the scheduler's own variable on this node."""
    return os.environ[value[1:]] if value.startswith("$") else value


def seconds_ahead(reach: str, node: int) -> float:
    """How far this node's clock is ahead of that of rank 0's node; ends if it cannot be reached.

    0 if the time on the way could be all of the difference.
    """
    address, _, port = reach.rpartition(":")
    asked = time.time()
    try:
        with socket.create_connection((address, int(port)), timeout=REACH) as connection:
            told = connection.makefile("rb").readline(MOST_TOLD)
    except OSError as error:
        reason = (
            f"cannot reach rank 0's node at {reach}: {error.strerror or error}; "
            "check name resolution and firewalls between the nodes"
        )
        here = socket.gethostname()
        send(Ending(f"node {node}", here, 1, time.time(), lines=(reason,)).record())
        sys.exit(1)
    try:
        there = float(told)
    except ValueError:  # launch has just ended
        return 0.0
    _, ahead, _ = sorted((asked - there, 0.0, time.time() - there))
    return ahead if math.isfinite(ahead) else 0.0


if __name__ == "__main__":
    main()
