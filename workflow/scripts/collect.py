"""Hash the files and folders that a user's program reads, so that they can be staged."""

import argparse
from pathlib import Path

from manynodes.base import atomic
from manynodes.base.errors import told_in_one_line
from manynodes.base.failure import recorded
from manynodes.data.files import collect, refuse_link
from manynodes.data.folder import SOURCE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=Path, nargs="+", required=True, metavar="PATH")
    parser.add_argument("--content", default="", help="of the files, see `fingerprint`; noted")
    parser.add_argument("--name", required=True, help="of the copies on scratch folders")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="for links and manifest.json"
    )
    args = parser.parse_args()
    with told_in_one_line("collect"):
        # Before a record of a failure is written there.
        refuse_link(args.output)
    with told_in_one_line("collect"), recorded(args.output, "collect"):
        found = collect(args.files, args.output, args.name)
        atomic.write_text(args.output / SOURCE, args.content)
        print(f"collect: {len(found.manifest['files']):,} files, {found.bytes / 1e6:,.1f} MB")


if __name__ == "__main__":
    main()
