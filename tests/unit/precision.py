"""Launched by test_precision.py: the precision that two ranks agree on."""

import sys
from pathlib import Path

from manynodes.experiment.config import Experiment
from manynodes.ranks import device
from manynodes.ranks.process_group import process_group
from train import agreed_precision

with process_group("cpu") as process:
    device.CPUINFO = Path(sys.argv[1]) / str(process.rank)
    run = Experiment.from_config({"experiment": "test"}).runs["run"]
    print(agreed_precision(run.with_values(precision="auto"), process))
