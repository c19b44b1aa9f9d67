"""Duration of `snakemake -n --quiet` for 10 to 10,000 runs, its memory, and the growth per run. And
the CPU time of the Snakemake inside a job of 1,000 and of 10,000 runs, without what the job does,
against a dry run of an empty Snakefile.

In its own working directory without results, with the rules of this checkout.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from measured import Measured

ROOT = Path(__file__).resolve().parents[1]
SNAKEFILE = ROOT / "Snakefile"
sys.path.append(str(ROOT / "workflow" / "rules"))

from manynodes.experiment.config import Experiment  # noqa: E402
from manynodes.schedulers.registry import SCHEDULERS  # noqa: E402
from session.configuration import keep  # noqa: E402

FEW, MANY, MOST = 10, 1000, 10_000
SIZES = (FEW, 100, MANY, MOST)
TIMES = 3
NOTHING = "rule nothing:\n"
UNNEEDED = [each.unneeded_in_jobs for each in SCHEDULERS.values() if each.unneeded_in_jobs]
IN_JOB = (str(ROOT / "workflow" / "rules" / "in_job.py"), ",".join(UNNEEDED))
# What an executor adds, as far as it matters to what is read.
OF_JOB = (
    *("--target-jobs", "train:experiment=many,run=seed~0", "--allowed-rules", "train"),
    *("--mode", "remote", "--force", "--nolock", "--no-hooks", "--ignore-incomplete"),
)


@dataclass(frozen=True)
class Taken:
    """What a Snakemake and the processes that it waited for have taken."""

    seconds: float
    cpu_seconds: float
    peak_gb: float


def measure(data: Path, work: Path) -> Iterator[Measured]:  # noqa: ARG001, the data are not read
    # All sizes in turns, so that other load on the machine affects them equally.
    taken: dict[int, list[Taken]] = {runs: [] for runs in SIZES}
    for turn in range(TIMES):
        for runs in SIZES:
            # The largest takes a minute on a quiet machine.
            if runs < MOST or turn == 0:
                taken[runs].append(snakemake(work, SNAKEFILE, written(work, seeds(runs))))
    seconds = {runs: statistics.median(each.seconds for each in taken[runs]) for runs in SIZES}
    for runs in SIZES:
        yield Measured(
            f"dry run of {runs:,} runs",
            "seconds",
            seconds[runs],
            most=20 if runs == MANY else None,
            details={"each": [vars(each) for each in taken[runs]]},
        )
    yield Measured(f"dry run of {MOST:,} runs, peak memory", "GB", taken[MOST][0].peak_gb)
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
    yield from inside_jobs(work)


def inside_jobs(work: Path) -> Iterator[Measured]:
    """A job's own Snakemake, in a dry run too."""
    (work / "empty").write_text(NOTHING)
    (work / "train.py").write_text("")
    kept = {runs: kept_for_jobs(work, runs) for runs in (MANY, MOST)}
    empty, jobs = list[float](), {runs: list[float]() for runs in kept}
    for _ in range(TIMES):
        empty.append(snakemake(work, work / "empty").cpu_seconds)
        for runs, config in kept.items():
            taken = snakemake(work, SNAKEFILE, config, *OF_JOB, by=IN_JOB)
            jobs[runs].append(taken.cpu_seconds)
    least = statistics.median(empty)
    for runs, cpu_seconds in jobs.items():
        median = statistics.median(cpu_seconds)
        details = {"cpu_seconds": median, "empty_cpu_seconds": least, "times": TIMES}
        what = f"a job's own Snakemake, of {runs:,} runs: CPU time"
        yield Measured(what, "dry run of an empty Snakefile", median / least, details=details)


def seeds(runs: int) -> dict[str, Any]:
    """An experiment with so many runs."""
    return {"experiment": "many", "seed": list(range(runs))}


def written(work: Path, config: dict[str, Any]) -> Path:
    path = work / "many.json"
    path.write_text(json.dumps(config))
    return path


def kept_for_jobs(work: Path, runs: int) -> Path:
    """The configuration of a program's runs as a command leaves it for its jobs."""
    config = seeds(runs) | {"program": str(work / "train.py")}
    path, settings = written(work, config), SimpleNamespace(configfiles=[])
    with chdir(work):
        contents = {path: path.read_bytes()}
        keep(SimpleNamespace(config_settings=settings), Experiment.from_config(config), contents)
    return work / settings.configfiles[0]


def snakemake(
    work: Path, snakefile: Path, config: Path | None = None, *options: str, by: Sequence[str] = ()
) -> Taken:
    """A dry run in the working directory.

    Args:
        by: what Python starts instead, and which starts Snakemake.
    """
    command = [
        *(sys.executable, *by, "-m", "snakemake", "--snakefile", str(snakefile)),
        *("--directory", str(work), "--dry-run", "--quiet", "--cores", "2", *options),
        *(("--configfile", str(config)) if config else ()),
    ]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    # It has been waited for.
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Taken(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e6)
