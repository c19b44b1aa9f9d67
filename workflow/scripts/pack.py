"""Pack the environment of a user's program into one archive, which each node reads in one go.

A Python with torch is tens of thousands of files: imported from a shared file system by many nodes
at once, they take minutes.
"""

import argparse
import hashlib
import json
import tarfile
from pathlib import Path

from manynodes.base import atomic
from manynodes.base.errors import told_in_one_line
from manynodes.base.failure import recorded
from manynodes.base.reading import file_sha256
from manynodes.data.folder import MANIFEST
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
            archive.add(args.prefix, arcname=".")
        files = {ARCHIVE: {"sha256": file_sha256(path), "bytes": path.stat().st_size}}
        sha256 = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        manifest = {"dataset": args.name, "sha256": sha256, "files": files}
        atomic.write_text(args.output / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        print(f"pack: {args.prefix}, {path.stat().st_size / 1e6:,.1f} MB")


if __name__ == "__main__":
    main()
