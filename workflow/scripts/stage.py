"""Stage a data set and the user's files on this node's scratch and report where they are.

`launch` runs it once on every node of the job, on all nodes at once, and collects the reports.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from manynodes.base.environment import Environment, add_to_report
from manynodes.base.errors import Refusal, told_in_one_line
from manynodes.data.files import read_files
from manynodes.data.folder import DataFolder
from manynodes.data.staging import stage
from manynodes.data.unpacking import unpacked_here


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="the shared data folder")
    parser.add_argument("--files", type=Path, help="the folder that collect.py has made")
    parser.add_argument("--packed", type=Path, help="the folder that pack.py has made")
    parser.add_argument(
        "--scratch", nargs="*", default=[],
        help="node-local folders to try in order; $NAME is expanded on the node",
    )  # fmt: skip
    args = parser.parse_args()
    with told_in_one_line("stage"):
        sources = [DataFolder.read(args.data)] if args.data else []
        sources += [read_files(args.files)] if args.files else []
        own = Environment.read().job_scratch
        staged = [stage(source, args.scratch, own) for source in sources]
        if args.packed:
            packed, _ = unpacked_here(read_files(args.packed), args.scratch, own, print)
            # staging.json is of the data and the files; without them, of the environment.
            staged = staged or [packed]
        if not staged:
            raise Refusal("nothing to stage; give --data, --files or --packed")
        first, *others = staged
        print(first, *others, sep="\n")
        add_to_report(**asdict(first))
        for files in others:
            add_to_report(files=asdict(files))


if __name__ == "__main__":
    main()
