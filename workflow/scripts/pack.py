"""Pack the environment of a user's program into one archive, which each node reads in one go.

A Python with torch is tens of thousands of files: imported from a shared file system by many nodes
at once, they take minutes.
"""

import argparse
import tarfile
from pathlib import Path

from manynodes.base import atomic
from manynodes.base.errors import told_in_one_line
from manynodes.base.failure import recorded
from manynodes.data.files import known, write_manifest
from manynodes.data.unpacking import ARCHIVE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefix", type=Path, required=True, help="folder of a venv or of conda")
    parser.add_argument("--name", required=True, help="of the copies on scratch folders")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER",
        help="for the archive and manifest.json")  # fmt: skip
    args = parser.parse_args()
    with told_in_one_line("pack"), recorded(args.output, "pack"):
        path = args.output / ARCHIVE
        with (
            atomic.replacing(path) as temporary,
            tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as archive,
        ):
            # A folder that is a link would be packed as a link alone.
            archive.add(args.prefix.resolve(), arcname=".")
        packed = write_manifest(args.output, {ARCHIVE: known(path)}, args.name)
        print(f"pack: {args.prefix}, {packed.bytes / 1e6:,.1f} MB")


if __name__ == "__main__":
    main()
