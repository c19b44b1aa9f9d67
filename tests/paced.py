"""A program without torch, with a pause after every epoch of its first attempt, so that on any
machine it lasts at least as long as a test of its time limit needs, and is soon over when it has
continued.
"""

import json
import re

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
# The same of one that knows nothing of us: SIGTERM kills it, and it has saved only before.
UNCHANGED = f"""
import os
import time

first = int(open("snapshot").read()) if os.path.exists("snapshot") else 0

for epoch in range(first, {EPOCHS}):
    print("epoch", epoch + 1, "loss", 1 / (epoch + 1), flush=True)
    if os.environ["RANK"] == "0":
        with open("snapshot.new", "w") as file:
            print(epoch + 1, file=file)
        os.replace("snapshot.new", "snapshot")
    time.sleep(0 if first else {PAUSE})
"""
CONFIG = """
program: {name}.py
nodes: 2
cpus_per_proc: 1
preflight: false
"""
SNAPSHOTS = r"""
snapshots: [snapshot]
metrics: {log: 'epoch (?P<epoch>\d+) loss (?P<loss>\S+)'}
"""


def written(checkout: Checkout, name: str, program: str, more: str = "") -> list[str]:
    """Write the program and its configuration; returns the options of Snakemake."""
    (checkout.path / f"{name}.py").write_text(program)
    (checkout.path / f"{name}.yaml").write_text(CONFIG.format(name=name) + more)
    return ["--until", "train", "--configfile", f"{name}.yaml", "--config", f"experiment={name}"]


def paced(checkout: Checkout) -> list[str]:
    """One that saves and stops when it is asked to."""
    return written(checkout, "paced", PROGRAM)


def unchanged(checkout: Checkout) -> list[str]:
    """One that SIGTERM kills; see `assert_continued`."""
    return written(checkout, "unchanged", UNCHANGED, SNAPSHOTS)


def assert_continued(checkout: Checkout) -> None:
    """That it was killed by SIGTERM, and went on from its snapshot."""
    run = checkout.path / "results/unchanged/run"
    about = json.loads((run / "run.json").read_text())
    assert len(about["attempts"]) >= 2
    killed = re.compile(r"stopped \(.*\) with SIGTERM; saved in \S.*/work/snapshot; ")
    assert any(killed.match(incident["text"]) for incident in about["incidents"]), about
    assert "epoch 1 " not in (run / "logs/rank=0.log").read_text()
    epochs = [line.split(",")[0] for line in (run / "metrics.csv").read_text().splitlines()]
    assert epochs == ["epoch", *map(str, range(1, EPOCHS + 1))]
