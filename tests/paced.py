"""A program without torch, with a pause after every epoch of its first attempt, so that on any
machine it lasts at least as long as a test of its time limit needs, and is soon over when it has
continued.
"""

from checkout import Checkout

PAUSE = 7.5  # seconds
EPOCHS = 20
PROGRAM = f"""
import time

import launched

saved = launched.state / f"rank-{{launched.rank}}"
first = int(saved.read_text()) if saved.exists() else 0

for epoch in range(first, {EPOCHS}):
    launched.row(epoch=epoch + 1, loss=1 / (epoch + 1))
    launched.save(saved, lambda path: path.write_text(str(epoch + 1)))
    time.sleep(0 if first else {PAUSE})
    if launched.stop_requested():
        launched.stop()
"""
CONFIG = """
program: paced.py
nodes: 2
cpus_per_proc: 1
preflight: false
"""


def paced(checkout: Checkout) -> list[str]:
    """Write the program and its configuration; returns the options of Snakemake."""
    (checkout.path / "paced.py").write_text(PROGRAM)
    (checkout.path / "paced.yaml").write_text(CONFIG)
    return ["--configfile", "paced.yaml", "--config"]
