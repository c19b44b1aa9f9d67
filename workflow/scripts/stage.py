"""Stage a data folder on this node's scratch and report where it is.

`launch` runs it once on every node of the job, on all nodes at once, and collects the reports.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from ddp.base.environment import Environment, add_to_report
from ddp.base.errors import told_in_one_line
from ddp.data.folder import DataFolder
from ddp.data.staging import stage

MAKE = "snakemake --profile profiles/local --force"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the shared data folder")
    parser.add_argument(
        "--scratch", nargs="*", default=[],
        help="node-local folders to try in order; $NAME is expanded on the node",
    )  # fmt: skip
    args = parser.parse_args()
    with told_in_one_line("stage", MAKE):
        staged = stage(DataFolder.read(args.data), args.scratch, Environment.read().job_scratch)
        print(staged)
        add_to_report(**asdict(staged))


if __name__ == "__main__":
    main()
