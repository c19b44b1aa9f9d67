"""The CPUs that this process may use: by its affinity, and by the quota of its control groups.

A container with a quota sees all CPUs of its machine. Threads beyond the quota only make each other
wait.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Of cgroup version 2, and of version 1 where the controller `cpu` may be mounted with another one.
MOUNTED = ("", "cpu", "cpu,cpuacct")
# A site's module may set them. Every rank would bind its threads to the same CPUs (measured: two
# ranks were 41 % slower).
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# Snakemake sets them for each rule, to all CPUs of the job, and torch follows MKL's rather than
# OMP_NUM_THREADS: the ranks of a program shared the CPUs with all threads of each other. Without
# them, all of these libraries follow OMP_NUM_THREADS.
OF_LIBRARIES = tuple(f"{name}_NUM_THREADS" for name in ("MKL", "OPENBLAS", "GOTO", "NUMEXPR"))


def usable_cpus() -> int:
    allowed = len(os.sched_getaffinity(0))
    groups = Path("/proc/self/cgroup").read_text() if Path("/proc/self/cgroup").exists() else ""
    return max(1, min([allowed, *map(math.ceil, quotas(groups, Path("/sys/fs/cgroup")))]))


def quotas(groups: str, root: Path) -> Iterator[float]:
    """The limits, in CPUs, of the control groups of a process and of those above them.

    Args:
        groups: /proc/self/cgroup, see cgroups(7).
        root: where the control groups are mounted.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mounted in MOUNTED:
            # In a container the path may be that of the machine: then only the top is seen.
            for folder in (path.strip("/"), *map(str, Path(path.strip("/")).parents), ""):
                yield from quota(root / mounted / folder)


def quota(group: Path) -> Iterator[float]:
    """The limit of one group, if it has one."""
    with suppress(OSError, ValueError):
        limit, period = (group / "cpu.max").read_text().split()
        yield int(limit) / int(period)
    with suppress(OSError, ValueError):
        limit, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(limit) > 0:
            yield int(limit) / int(period)
