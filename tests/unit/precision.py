"""Launched by test_precision.py: the precision that two ranks agree on for some images."""

import sys
from pathlib import Path

import numpy as np

from manynodes.experiment.config import Experiment
from manynodes.ranks import device
from manynodes.ranks.process_group import process_group
from train import agreed_precision

with process_group("cpu") as process:
    device.CPUINFO = Path(sys.argv[1]) / str(process.rank)
    run = Experiment.from_config({"experiment": "test"}).runs["run"]
    images = np.zeros((2, 4, 4, 3), np.uint8)
    images[1, 2, 2, 1] = sys.argv[2] == "coloured"
    print(*agreed_precision(run.with_values(precision="auto"), process, images), sep=", ")
