"""A network that sleeps in each forward pass: its trainings leave the CPUs to the other tests, last
as long on any machine, and a host on which it sleeps for longer is slow on any machine.
"""

from pathlib import Path

# Its weights are few: what takes time is the sleep alone. Each rank has statistics of its own.
SOURCE = """
import socket
import time

from torch import nn


class Net(nn.Module):
    def __init__(self, classes, channels, size, seconds=0.03, slow="nobody"):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
            nn.Linear(8 * (size[0] - 2) * (size[1] - 2), classes),
        )
        # Longer than another host computes on the busiest of machines.
        self.seconds = 0.6 if socket.gethostname() == slow else seconds

    def forward(self, images):
        time.sleep(self.seconds)
        return self.layers(images)
"""
FILE = "sleeping.py"
MODEL = f"{FILE}:Net"
# Epochs of 5 steps and 0.7 s, on 1, 2 and 3 processes. With 19 steps, each cost a rank twice the
# CPU time.
FEW_STEPS = {"model": MODEL, "model_args": {"seconds": 0.12}, "global_batch_size": 264}


def write(folder: Path) -> None:
    """Put it beside a checkout's Snakefile."""
    (folder / FILE).write_text(SOURCE)
