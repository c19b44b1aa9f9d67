"""Run the tests again and again, in random order and on worse machines than this one.

    python tests/flaky.py [test] [clusters]        make test-flaky runs both

Prints a table of the runs, of the tests that failed in any of them, and of the slowest. `test` is
run ten times: five times on the machine as it is, three times with six busy loops beside it, once
on one CPU, and once with TMPDIR on a slow disk (root). `clusters` is run five times, twice with
busy loops (root).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LOOPS = 6
# Bytes and writes per second of the slow disk.
SLOW_BYTES, SLOW_WRITES = 20_000_000, 300
CGROUP = Path("/sys/fs/cgroup/blkio")


@dataclass(frozen=True)
class Machine:
    """Under what the tests run.

    Attributes:
        command: in front of the command.
        beside: what runs meanwhile; gives variables for the command.
    """

    name: str
    command: tuple[str, ...] = ()
    beside: Callable[[], AbstractContextManager[dict[str, str]]] = lambda: nullcontext({})


@contextmanager
def busy_loops() -> Iterator[dict[str, str]]:
    """Processes that take all the CPU time that they get."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOOPS)]
    try:
        yield {}
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def slow_disk() -> Iterator[dict[str, str]]:
    """A file system that writes everything at once, on a device that is limited."""
    with tempfile.TemporaryDirectory() as folder:
        # A second user takes part in some tests.
        Path(folder).chmod(0o711)
        image, mounted = Path(folder, "image"), Path(folder, "slow")
        mounted.mkdir()
        with image.open("wb") as file:
            file.truncate(16 << 30)
        run("mkfs.ext4", "-q", "-F", image)
        device = run("losetup", "--find", "--show", image).strip()
        group = CGROUP / f"slow-{os.getpid()}"
        group.mkdir()
        try:
            number = Path(device).stat().st_rdev
            number = f"{os.major(number)}:{os.minor(number)}"
            for name, most in (("write_bps", SLOW_BYTES), ("write_iops", SLOW_WRITES)):
                (group / f"blkio.throttle.{name}_device").write_text(f"{number} {most}")
            run("mount", "-o", "sync,dirsync", device, mounted)
            mounted.chmod(0o1777)
            # Whatever starts from here on is in the group.
            (group / "cgroup.procs").write_text(str(os.getpid()))
            yield {"TMPDIR": str(mounted)}
        finally:
            (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
            subprocess.run(["umount", "--lazy", mounted], check=False)
            run("losetup", "--detach", device)
            group.rmdir()


def run(*command: object) -> str:
    return subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True
    ).stdout


QUIET, BUSY = Machine("as it is"), Machine(f"{LOOPS} busy loops", beside=busy_loops)
ONE_CPU = Machine("one CPU", ("taskset", "-c", "0"))
SLOW_DISK = Machine("slow disk", beside=slow_disk)
LANES = {
    "test": [QUIET] * 5 + [BUSY] * 3 + [ONE_CPU, SLOW_DISK],
    "clusters": [QUIET] * 3 + [BUSY] * 2,
}
TARGETS = {"test": "test", "clusters": "test-clusters"}


def once(lane: str, machine: Machine, seed: int) -> tuple[float, int, list[ElementTree.Element]]:
    """Run a lane; returns seconds, exit status and the tests."""
    with tempfile.TemporaryDirectory() as folder:
        random = f"-p randomly --randomly-seed={seed}"
        options = f"PYTEST_OPTIONS={random}"
        command = [*machine.command, "make", TARGETS[lane], options, f"REPORTS={folder}"]
        with machine.beside() as variables:
            since = time.monotonic()
            status = subprocess.run(command, cwd=ROOT, env=os.environ | variables).returncode
            seconds = time.monotonic() - since
        cases = [
            case
            for report in Path(folder).glob("*.xml")
            for case in ElementTree.parse(report).iter("testcase")
        ]
        return seconds, status, cases


def name_of(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lanes", nargs="*", choices=[[], *LANES], help="both if none is named")
    parser.add_argument("--only", metavar="MACHINE", help="only runs on this kind of machine")
    args = parser.parse_args()
    rows, failed, times = [], Counter[str](), defaultdict[str, list[float]](list)
    for lane in args.lanes or LANES:
        for seed, machine in enumerate(LANES[lane], start=1):
            if args.only not in (None, machine.name):
                continue
            seconds, status, cases = once(lane, machine, seed)
            bad = [case for case in cases if {"failure", "error"} & {part.tag for part in case}]
            rows.append((lane, machine.name, seed, f"{seconds:.0f} s", len(cases), len(bad),
                         status))  # fmt: skip
            failed.update(map(name_of, bad))
            for case in cases:
                times[name_of(case)].append(float(case.get("time", 0)))
            print(f"flaky: {rows[-1]}", flush=True)
    print("\n| lane | machine | seed | time | tests | failed | status |\n" + "|---" * 7 + "|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    bad = [f"{count} times: {name}" for name, count in failed.most_common()]
    print("\nfailed:", *(bad or ["none"]), sep="\n  ")
    slowest = sorted(times, key=lambda name: -max(times[name]))[:15]
    print("\nslowest, and at most:", *(f"{max(times[name]):5.0f} s  {name}" for name in slowest),
          sep="\n  ")  # fmt: skip
    sys.exit(any(row[-1] for row in rows))


if __name__ == "__main__":
    main()
