"""A network that sleeps in each forward pass: its endless trainings leave the CPUs to the other
tests, and a host on which it sleeps for longer is slow on any machine.
"""

from pathlib import Path

# Its weights are few: what takes time is the sleep alone.
SOURCE = """
import socket
import time

from torch import nn


class Net(nn.Module):
    def __init__(self, classes, channels, size, slow="nobody"):
        super().__init__()
        self.head = nn.Linear(channels * size[0] * size[1], classes)
        # Longer than another host computes on the busiest of machines.
        self.seconds = 0.6 if socket.gethostname() == slow else 0.05

    def forward(self, images):
        time.sleep(self.seconds)
        return self.head(images.flatten(1))
"""
FILE = "sleeping.py"
MODEL = f"{FILE}:Net"


def write(folder: Path) -> None:
    """Put it beside a checkout's Snakefile."""
    (folder / FILE).write_text(SOURCE)
