"""Staging a node: a verified copy against `cp` and `sha256sum`, and reuse of a copy.

In turns, so that other load affects them equally; medians. `sha256sum` reads the copy, as staging
does.
"""

import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from measured import Measured

from manynodes.data.folder import DataFolder
from manynodes.data.staging import stage

TIMES = 7


def measure(data: Path, work: Path) -> Iterator[Measured]:
    files = list(DataFolder.read(data).manifest["files"])
    fresh, reused, copied, summed, openssl = (list[float]() for _ in range(5))
    for _ in range(TIMES):
        scratch, copy = work / "scratch", work / "copy"
        scratch.mkdir()
        copy.mkdir()
        for status, seconds in (("fresh", fresh), ("reused", reused)):
            staged = stage(DataFolder.read(data), [str(scratch)])
            if staged.status != status:
                raise AssertionError(f"{staged} is not {status}")
            seconds.append(staged.seconds)
        copied.append(seconds_of(["cp", *files, str(copy)], data))
        summed.append(seconds_of(["sha256sum", *files], copy))
        openssl.append(seconds_of(["openssl", "dgst", "-sha256", *files], copy))
        shutil.rmtree(scratch)
        shutil.rmtree(copy)
    here, again, cp, sha256sum, dgst = map(
        statistics.median, (fresh, reused, copied, summed, openssl)
    )
    details = {
        "seconds": here,
        "cp_seconds": cp,
        "sha256sum_seconds": sha256sum,
        "openssl_seconds": dgst,
        "times": TIMES,
    }
    yield Measured(
        "staging a node, a fresh copy",
        "cp and sha256sum of the same files",
        here / (cp + sha256sum),
        most=1.1,
        details=details,
    )
    yield Measured(
        "staging a node, a fresh copy",
        "cp and openssl dgst of the same files",
        here / (cp + dgst),
        details=details,
    )
    yield Measured(
        "staging a node, a copy that is there",
        "seconds, to hash it",
        again,
        most=0.3,
        details={"openssl_seconds": dgst},
    )


def seconds_of(command: list[str], folder: Path) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start
