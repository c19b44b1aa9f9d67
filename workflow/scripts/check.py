"""Check an experiment's file; print in one line what it stands for, or what is wrong with it.

A dry run checks more, but Snakemake reads the file first, and shows a traceback if it cannot.
"""

import argparse
import json
import sys
from pathlib import Path

# Python looks there by itself, unless a site has set PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from manynodes.base.errors import told_in_one_line
from manynodes.data.files import fingerprint
from manynodes.experiment.config import Experiment
from manynodes.experiment.file import read_config
from manynodes.experiment.keys import keys_of
from manynodes.experiment.missing import refuse_missing
from manynodes.experiment.paths import with_program


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON schema of its keys, for an editor"
    )
    args = parser.parse_args()
    with told_in_one_line("check"):
        config, folders = read_config(args.file), [args.file.parent]
        if args.schema:
            print(json.dumps(keys_of(with_program(config, folders)).schema, indent=2))
            return
        experiment = Experiment.from_files(config, folders)
        refuse_missing(experiment, Path("results") / experiment.name)
        fingerprint(map(Path, experiment.config["files"]))
        print(experiment.summary)


if __name__ == "__main__":
    main()
