"""Goodput under failures: a training of which a random rank is killed again and again, against the
same training left alone.

Two processes, real images, a state every SAVE_EVERY_SECONDS. All of them must come to the same
weights.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from measured import Measured

from manynodes.base.processes import descendants

SCRIPTS = Path(__file__).resolve().parents[1] / "workflow" / "scripts"
RUN = {"nproc_per_node": 2, "epochs": 6, "checkpoint_every": 0, "device": "cpu"}
SAVE_EVERY_SECONDS = 3
# Seconds from one failure to the next.
INTERVALS = (60, 30, 15)
SEED = 0


def measure(data: Path, work: Path) -> Iterator[Measured]:
    alone, _, weights = trained(data, work / "alone", None)
    for interval in INTERVALS:
        seconds, kills, same = trained(data, work / f"every_{interval}", interval)
        if same != weights:
            raise AssertionError(f"killed every {interval} s: other weights")
        yield Measured(
            f"two processes, a random rank killed every {interval} s",
            "wall time of the same training left alone",
            seconds / alone,
            details={"seconds": seconds, "alone_seconds": alone, "kills": kills},
        )


def trained(data: Path, output: Path, interval: float | None) -> tuple[float, int, str]:
    """Train, and kill a rank every so many seconds.

    Returns:
        Seconds, the number of kills, and the SHA-256 of the weights.
    """
    shutil.rmtree(output, ignore_errors=True)
    run = ["--run", json.dumps(RUN), "--data", data, "--output", output]
    train = [SCRIPTS / "train.py", *run, "--save-every-seconds", SAVE_EVERY_SECONDS]
    resume = ["--restart", "--state", output / "state", "--rank-logs", output / "logs"]
    launch = [SCRIPTS / "launch.py", "--nproc-per-node", 2, "--cpus", 2, *resume, "--", *train]
    rng, kills, start = random.Random(SEED), 0, time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *map(str, launch)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while True:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(interval)
                break
            if ranks := [pid for pid in descendants(process.pid) if is_rank(pid)]:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(ranks), signal.SIGKILL)
                    kills += 1
    seconds = time.perf_counter() - start
    if status:
        raise AssertionError(f"the training ended with status {status}; see {output}/logs")
    return seconds, kills, hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()


def is_rank(pid: int) -> bool:
    """Whether it is a rank, and not what has started it with the same words."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        scripts = [word for word in words if word.endswith(b".py")]
        return bool(scripts) and scripts[0].endswith(b"/train.py")
    return False
