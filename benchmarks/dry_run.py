"""Duration of `snakemake -n --quiet` for 10 to 5,000 runs, and the growth per run.

In its own working directory without results, with the rules of this checkout.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from measured import Measured

SNAKEFILE = Path(__file__).resolve().parents[1] / "Snakefile"
FEW, MANY, MOST = 10, 1000, 5000
SIZES = (FEW, 100, MANY, MOST)
TIMES = 3


def measure(data: Path, work: Path) -> Iterator[Measured]:  # noqa: ARG001, the data are not read
    # All sizes in turns, so that other load on the machine affects them equally.
    taken: dict[int, list[float]] = {runs: [] for runs in SIZES}
    for _ in range(TIMES):
        for runs in SIZES:
            taken[runs].append(seconds_of(runs, work))
    seconds = {runs: statistics.median(taken[runs]) for runs in SIZES}
    for runs in SIZES:
        yield Measured(
            f"dry run of {runs:,} runs",
            "seconds",
            seconds[runs],
            most=20 if runs == MANY else None,
            details={"times": TIMES},
        )
    many, most = ((seconds[runs] - seconds[FEW]) / (runs - FEW) for runs in (MANY, MOST))
    details = {
        f"ms_per_run_at_{MANY}": 1e3 * many,
        f"ms_per_run_at_{MOST}": 1e3 * most,
        "start_seconds": seconds[FEW],
    }
    yield Measured(
        f"a run among {MOST:,} in a dry run",
        f"a run among {MANY:,}",
        most / many,
        most=1.3,
        details=details,
    )


def seconds_of(runs: int, work: Path) -> float:
    """Seconds of the dry run of an experiment with so many seeds."""
    config = work / f"{runs}.json"
    config.write_text(json.dumps({"experiment": "many", "seed": list(range(runs))}))
    where = ["--snakefile", SNAKEFILE, "--directory", work, "--configfile", config]
    start = time.perf_counter()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "snakemake",
            *map(str, where),
            "--dry-run",
            "--quiet",
            "--cores",
            "2",
        ],
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - start
