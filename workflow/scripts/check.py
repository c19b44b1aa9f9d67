"""Check an experiment's file; print in one line what it stands for, or what is wrong with it.

A dry run checks more, but Snakemake reads the file first, and shows a traceback if it cannot.
"""

import argparse
from pathlib import Path

from ddp.base.errors import told_in_one_line
from ddp.experiment.paths import with_paths
from ddp.experiment.programs import read_experiment
from ddp.experiment.schema import read_config, with_types
from ddp.experiment.table import with_table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    with told_in_one_line("check"):
        folders = [path.parent]
        config = with_paths(with_types(read_config(path)), folders)
        experiment = read_experiment(with_table(config, folders))
        if experiment.own:
            experiment.own.refuse_missing()
        print(experiment.summary)


if __name__ == "__main__":
    main()
