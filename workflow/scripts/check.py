"""Check an experiment's file; print in one line what it stands for, or what is wrong with it.

A dry run checks more, but Snakemake reads the file first, and shows a traceback if it cannot.
"""

import argparse
import json
from pathlib import Path

from ddp.base.errors import told_in_one_line
from ddp.experiment.config import Experiment
from ddp.experiment.file import read_config
from ddp.experiment.keys import keys_of
from ddp.experiment.paths import with_program


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
        if experiment.own:
            experiment.own.refuse_missing()
        print(experiment.summary)


if __name__ == "__main__":
    main()
