"""Make the folders of a run ready for the user's program: as they were left, or empty.

A state that was made by other code, with other parameters or from other files is refused.
"""

import argparse
import os
import socket
import sys
from functools import partial
from pathlib import Path

from manynodes.base.errors import told_in_one_line
from manynodes.base.failure import recorded
from manynodes.base.provenance import git_state, now
from manynodes.checkpointing import incidents
from manynodes.data.files import read_files
from manynodes.data.folder import DataFolder
from manynodes.experiment.config import parse_option
from manynodes.programs.folders import Folders, prepare
from manynodes.schedulers import registry

# Where a run is computed, besides its geometry, does not decide its result.
SITE = ("device", "cpus_per_proc", "world_size")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run", required=True, metavar="JSON", help="the values of the run")
    add("--sources", default="", metavar="SHA256", help="of the program")
    add("--data", type=Path, help="the shared data folder, with its manifest")
    add("--files", type=Path, help="the folder that collect.py has made")
    add("--output", type=Path, required=True, metavar="FOLDER", help="of this run")
    add("--directory", help="where the program starts; default: its results folder")
    add("--resume", choices=("exact", "anyway", "fresh"), default="exact",
        help="what to do with the state of an interrupted training")  # fmt: skip
    args = parser.parse_args()
    tell = partial(print, "prepare:", file=sys.stderr, flush=True)
    with told_in_one_line("prepare"), recorded(args.output, "train"):
        run = parse_option("--run", args.run)
        request = {key: value for key, value in run.items() if key not in SITE}
        request["sources_sha256"] = args.sources
        request["directory"] = args.directory
        request["data_sha256"] = DataFolder.read(args.data).sha256 if args.data else None
        request["files_sha256"] = read_files(args.files).sha256 if args.files else None
        folders = Folders(args.output)
        owner = registry.active(os.environ).allocation(run["nodes"]).owner
        incidents.begin(folders.state, owner, tell)
        attempt = {"by": owner, "host": socket.gethostname(), "started": now(), **git_state()}
        if args.resume == "fresh" or folders.finished.exists():
            incidents.forget(folders.state)
        if prepare(folders, run, request, args.resume, attempt):
            tell(f"continues with the state in {folders.saved}")


if __name__ == "__main__":
    main()
