"""Check an experiment's file, and say what it stands for or what is wrong with it, in one line.

A dry run does the same and more; but Snakemake reads the file first, and of one that it cannot read it shows a traceback.
"""

import argparse
from pathlib import Path

from ddp.config import Experiment
from ddp.errors import told_in_one_line
from ddp.schema import read_config, with_types


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    with told_in_one_line("check"):
        print(Experiment.from_config(with_types(read_config(path))).summary)


if __name__ == "__main__":
    main()
