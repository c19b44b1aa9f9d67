"""How long waiting threads should spin (GOMP_SPINCOUNT), on an idle and on a busy machine.

The measure is steps of the default network on two threads. By default, libgomp's threads spin for
milliseconds; on a busy CPU they take the time of the thread that they wait for. Each setting has
its own processes, which take turns; a ratio is the median over the rounds.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from measured import Measured

CPUS = len(os.sched_getaffinity(0))
# libgomp's default, and the value that `launch` sets.
SETTINGS: dict[str, dict[str, str]] = {"default": {}, "short": {"GOMP_SPINCOUNT": "10000"}}
ROUNDS, SECONDS, BATCH = 5, 4, 250

STEPS = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch
from torch.nn import functional as F
from classifier.models.classifier import build
from manynodes.ranks.memory import keep_freed_memory
threads, seconds, batch = map(int, sys.argv[2:])
keep_freed_memory()
torch.set_num_threads(threads)
classifier = build("airbench", (24, 64, 128), 10)
images = torch.randint(0, 256, (batch, 32, 32, 3), dtype=torch.uint8)
labels = torch.randint(0, 10, (batch,))
def step():
    F.cross_entropy(classifier(images), labels).backward()
step()
print("ready", flush=True)
sys.stdin.readline()
start, steps = time.perf_counter(), 0
while time.perf_counter() - start < seconds:
    step()
    steps += 1
print(steps / (time.perf_counter() - start))
"""


def measure(data: Path, work: Path) -> Iterator[Measured]:  # noqa: ARG001, no data are read
    for load in (0, CPUS):
        rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
        for _ in range(ROUNDS):
            for name, environment in SETTINGS.items():
                rates[name].append(steps_per_second(environment, load))
        ratio = median(
            short / default for short, default in zip(rates["short"], rates["default"], strict=True)
        )
        where = f"{load} busy processes beside it" if load else "an idle machine"
        yield Measured(
            f"steps with GOMP_SPINCOUNT=10000, {CPUS} threads, {where}",
            "libgomp's default",
            ratio,
            least=1 if load else 0.95,
            details={"steps_per_second": rates},
        )


def steps_per_second(environment: dict[str, str], load: int) -> float:
    scripts = Path(__file__).resolve().parents[1] / "workflow" / "scripts"
    command = [sys.executable, "-c", STEPS, str(scripts), str(CPUS), str(SECONDS), str(BATCH)]
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    with busy(load):
        time.sleep(0.2)
        return float(process.communicate("go\n")[0])


@contextmanager
def busy(processes: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(processes):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield
