"""examples/programs/loop.py with a pause after every epoch of its first attempt, so that on any
machine it lasts at least as long as a test of its time limit needs, and is soon over when it has
continued.
"""

from checkout import Checkout

PAUSE = 7.5  # seconds
EPOCHS = 20
PROGRAM = f"""
import runpy
import time
from pathlib import Path

import launched

row = launched.row
first = not Path("metrics.csv").exists()


def paced(**numbers):
    row(**numbers)
    time.sleep({PAUSE} if first else 0)


launched.row = paced
runpy.run_path(str(Path(__file__).with_name("loop.py")), run_name="__main__")
"""
CONFIG = """
program: paced.py
arguments: [--epochs, "{{epochs}}"]
parameters: {{lr: 0.1, epochs: {epochs}}}
dataset: {{name: digits}}
outputs: [model.pt]
nodes: 2
cpus_per_proc: 1
preflight: false
"""


def paced(checkout: Checkout) -> list[str]:
    """Write the program and its configuration; returns the options of Snakemake."""
    folder = checkout.path / "examples/programs"
    (folder / "paced.py").write_text(PROGRAM)
    (folder / "paced.yaml").write_text(CONFIG.format(epochs=EPOCHS))
    return ["--configfile", "examples/programs/paced.yaml", "--config"]
