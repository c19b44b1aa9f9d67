"""Speed against peers and limits: python benchmarks/bench.py DATA-FOLDER OUTPUT-FOLDER [BENCHMARK]

Prints a table, and writes it with the numbers behind it to bench.json in the output folder. Without
names, those of `BENCHMARKS` run; `all` runs those of `LONG` too. A benchmark that fails leaves the
others their rows.
"""

import argparse
import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1] / "workflow" / "scripts"
sys.path.insert(0, str(SCRIPTS))

import torch  # noqa: E402
from measured import Measured  # noqa: E402

from manynodes.base.provenance import git_state, versions  # noqa: E402

# Each is a module here with `measure(data, work)`: the folder of CIFAR-10, and one for its own
# files.
BENCHMARKS = (
    "throughput",
    "busy",
    "staging",
    "evaluation",
    "launching",
    "dry_run",
    "tables",
    "saving",
    "images",
    "launches",
)
# Minutes each: whole trainings, the tutorial's loop, and what grows with nodes and runs.
LONG = ("tutorial", "scaling", "accuracy", "goodput", "growth")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="results/data/cifar10, fetched before")
    parser.add_argument(
        "output", type=Path, help="folder for bench.json, and for what the benchmarks write"
    )
    parser.add_argument(
        "benchmarks",
        nargs="*",
        metavar="BENCHMARK",
        help=f"of {', '.join((*BENCHMARKS, *LONG))}, or all",
    )
    args = parser.parse_args()
    every = (*BENCHMARKS, *LONG)
    if unknown := set(args.benchmarks) - {*every, "all"}:
        parser.error(
            f"{', '.join(sorted(unknown))}: there is no such benchmark; there are "
            f"{', '.join(every)}"
        )
    names = every if "all" in args.benchmarks else args.benchmarks or BENCHMARKS
    about = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "git": git_state(),
        "versions": versions(),
    }
    rows: list[dict[str, Any]] = []
    failed = []
    for name in names:
        work = args.output / name
        work.mkdir(parents=True, exist_ok=True)
        try:
            for row in timed(name, args.data.resolve(), work.resolve()):
                rows.append({"benchmark": name} | asdict(row) | {"reached": row.reached})
                (args.output / "bench.json").write_text(
                    json.dumps(about | {"rows": rows}, indent=2) + "\n"
                )
        except (Exception, SystemExit):
            traceback.print_exc()
            failed.append(name)
    print("", *table(rows), sep="\n")
    if failed:
        sys.exit(f"bench: failed: {', '.join(failed)}; see above")


def timed(name: str, data: Path, work: Path) -> Iterator[Measured]:
    """The rows of a benchmark as they come; each is printed at once."""
    start = time.perf_counter()
    for row in importlib.import_module(name).measure(data, work):
        print(f"{name}: {row.what}: {row.value:.3g}", flush=True)
        yield row
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


def machine() -> dict[str, Any]:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "system": platform.platform(),
        "load": os.getloadavg()[0],
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as a Markdown table."""
    lines = ["| what | against | measured | reach | |", "|---|---|---|---|---|"]
    for row in rows:
        reach = " ".join(
            f"{sign} {row[key]:g}"
            for sign, key in (("≥", "least"), ("≤", "most"))
            if row[key] is not None
        )
        verdict = ("yes" if row["reached"] else "no") if reach else ""
        lines.append(
            f"| {row['what']} | {row['against']} | {row['value']:.3g} | {reach} | {verdict} |"
        )
    return lines


if __name__ == "__main__":
    main()
