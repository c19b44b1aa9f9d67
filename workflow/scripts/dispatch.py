"""Become what the launch plan has for this node.

`launch` has srun start this on every node, and srun gives each the whole plan on stdin: it needs no shared file, and has no limit of
length. Before that it sees that rank 0's node can be reached from here, because launchers take long to find out and do not say where.
"""

import argparse
import json
import os
import signal
import socket
import sys
import time

from ddp.endings import Ending, send

# Seconds to wait for an answer of rank 0's node.
REACH = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reach", metavar="ADDRESS:PORT", required=True, help="where launch listens, on rank 0's node")
    args = parser.parse_args()
    plan = json.load(sys.stdin)
    node = int(os.environ["SLURM_NODEID"])
    address, _, port = args.reach.rpartition(":")
    try:
        socket.create_connection((address, int(port)), timeout=REACH).close()
    except OSError as error:
        reason = (
            f"cannot reach rank 0's node at {args.reach}: {error.strerror or error}; see to name resolution and firewalls between the nodes"
        )
        send(Ending(f"node {node} on {socket.gethostname()}", "ended with status 1", time.time(), (reason,)).record())
        sys.exit(1)
    own = plan[node]
    for name, value in own["environment"].items():
        # Slurm's own numbers for this task: $SLURM_PROCID and the like.
        os.environ[name] = os.environ[value[1:]] if value.startswith("$") else value
    # Meant for the ranks, which take note of them, they reach every process of the job (sbatch --signal) and would end a launcher. What is
    # ignored here stays so in what this process becomes and what that starts.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.execvp(own["command"][0], own["command"])


if __name__ == "__main__":
    main()
