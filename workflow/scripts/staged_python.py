"""Go on with a node's own copy of the Python that runs this: the folder of its venv, as packed.

torch is thousands of files, which each process would read from a shared file system.
"""

import argparse
import os
import socket
import sys
from pathlib import Path

from manynodes.base.environment import Environment
from manynodes.base.errors import Refusal, error_line
from manynodes.data.files import read_files
from manynodes.data.unpacking import unpacked_here
from manynodes.launching.endings import Ending, moment, send

# It would come again at another start.
REFUSED = {"refused": "yes"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packed", type=Path, help="the folder that pack.py has made")
    parser.add_argument(
        "scratch", nargs="*", help="node-local folders to try in order; $NAME is expanded here"
    )
    # What follows `--` is not parsed.
    at = sys.argv.index("--")
    args, words = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    contract = Environment.read()
    try:
        source = read_files(args.packed)
        _, folder = unpacked_here(source, args.scratch, contract.job_scratch, print)
        python = folder / "bin" / "python" if folder else Path(sys.executable)
        if folder and (folder / "pyvenv.cfg").is_file():
            os.environ["VIRTUAL_ENV"] = str(folder)
        os.environ["PATH"] = os.pathsep.join([str(python.parent), os.getenv("PATH", "")])
        os.execv(python, [str(python), *words])
    except (Refusal, OSError) as problem:
        who, here = f"node {contract.node_rank}", socket.gethostname()
        report = REFUSED if isinstance(problem, Refusal) else {}
        told = Ending(who, here, 1, moment(contract), lines=(error_line(problem),), report=report)
        send(told.record())
        sys.exit(1)


if __name__ == "__main__":
    main()
