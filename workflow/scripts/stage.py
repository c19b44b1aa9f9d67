"""Stage a data folder on this node's scratch and report where it is.

`launch` runs it once on every node of the job, all at once; each writes its report, as JSON, to the file named in NODE_REPORT.
"""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from ddp.errors import told_in_one_line
from ddp.staging import stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the shared data folder")
    parser.add_argument("--scratch", nargs="*", default=[], help="folders to try in order; $NAME is looked up here")
    args = parser.parse_args()
    with told_in_one_line("stage"):
        staged = stage(args.data, args.scratch)
        print(staged)
        if "NODE_REPORT" in os.environ:
            Path(os.environ["NODE_REPORT"]).write_text(json.dumps(asdict(staged)))


if __name__ == "__main__":
    main()
