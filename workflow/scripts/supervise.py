"""Run one rank, or one node's program: keep its log, and tell `launch` how it ended if it did not end well.

Whatever launcher started this, it stands between the launcher and the program. A rank that is killed cannot
say so itself, and launchers know no more than that some process failed.
"""

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from ddp.agents import Command, Output, run_all
from ddp.endings import Ending, how, last_words, record_lines
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
    with tempfile.TemporaryDirectory(prefix="supervise-") as folder:
        result = Path(folder) / "result.json"
        log = args.logs / f"{name}.log" if args.logs else None
        with open(log or os.devnull, "w") as sink:
            # Where it has a log of its own, what it says of its troubles stays out of everybody's.
            output = Output(sink, sink, show_errors=not args.logs)
            environment = {"NODE_REPORT": str(result)}
            outcome = run_all([Command((sys.executable, *args.program), environment)], output, GRACE)
        if outcome.failed is not None and not outcome.stopped:
            words = last_words(output.errors, Path(args.program[0]).stem)
            who = f"{name.replace('=', ' ')} on {socket.gethostname()}"
            ended = Ending(who, how(outcome.status), time.time(), words, str(log or ""))
            print(ended.to_lines(), file=sys.stderr, flush=True)
        elif outcome.good and result.exists():
            node = {"node_rank": int(os.environ["NODE_RANK"])} | json.loads(result.read_text())
            print(record_lines({"result": node}), file=sys.stderr, flush=True)
    sys.exit(0 if outcome.good else max(1, outcome.status))


if __name__ == "__main__":
    main()
