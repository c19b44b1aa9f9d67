"""One training of a run at a time, if the owner is alive, dead or unreachable.

The slow cases start at once and wait in parallel.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from manynodes.base import processes
from manynodes.base.errors import Refusal
from manynodes.checkpointing import owner
from manynodes.checkpointing.owner import Record, acquire
from programs import SCRIPTS
from trainings import Training, attempts, result
from waiting import until

ELSEWHERE = Record(
    "0123456789abcdef",
    "Slurm job 7",
    "another-node",
    "00000000-0000-0000-0000-000000000000 pid:[1] 7 7",
)
# A process that owns a folder under a name, starts from a position if one is given, prints that,
# and does not end by itself.
OWNER = """
import sys, time
from pathlib import Path
from manynodes.base.errors import Refusal
from manynodes.checkpointing.owner import acquire
try:
    with acquire(Path(sys.argv[1]), sys.argv[2], lambda line: print(line, flush=True)) as owner:
        if sys.argv[3:]:
            owner.begin_at(*map(int, sys.argv[3:]))
        print("begun" if sys.argv[3:] else "owns", flush=True)
        time.sleep(1e9)
except Refusal as refusal:
    print(f"refused: {refusal}", flush=True)
"""


class OwnerProcess:
    def __init__(self, folder: Path, name: str, place: tuple[int, ...] = (0, 0)) -> None:
        command = [sys.executable, "-c", OWNER, str(folder), name, *map(str, place)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
        )

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def leave(folder: Path, record: Record) -> Path:
    """The record of an earlier owner."""
    folder.mkdir(parents=True)
    path = folder / "owner.json"
    path.write_text(json.dumps(asdict(record)))
    return path


def begin_four_times(folder: Path) -> list[str]:
    """A job that starts four times from a position and is killed each time, once before that."""
    said = []
    for place in ((2, 5), (3, 0), (3, 0), (), (3, 0), (3, 0)):
        process = OwnerProcess(folder / "state", "Slurm job 7", place)
        said.append(process.says())
        process.kill()
    return said


def take_over_from_nowhere(folder: Path) -> tuple[float, list[str]]:
    """Seconds and messages of a take-over from a machine that does not answer."""
    leave(folder / "state", ELSEWHERE)
    lines: list[str] = []
    since = time.monotonic()
    with acquire(folder / "state", "process 1 on here", lines.append):
        return time.monotonic() - since, lines


def two_at_once(folder: Path) -> list[str]:
    """Messages of two processes that find the same dead owner."""
    dead = OwnerProcess(folder / "state", "process 1 on here")
    assert dead.says() == "begun"
    dead.kill()
    both = [OwnerProcess(folder / "state", f"process {number} on here") for number in (2, 3)]
    # The later one first watches the other one, and prints that.
    said = [
        next(line for line in iter(process.says, "") if "trained this run last" not in line)
        for process in both
    ]
    for process in both:
        process.kill()
    return said


@pytest.fixture(scope="module")
def meanwhile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Callable, Future]]:
    folder = tmp_path_factory.mktemp("owners")
    slow = (begin_four_times, take_over_from_nowhere, two_at_once)
    with ThreadPoolExecutor(len(slow)) as pool:
        yield {function: pool.submit(function, folder / function.__name__) for function in slow}


@pytest.mark.faults
@pytest.mark.usefixtures("meanwhile")
def test_a_second_training_is_refused_and_the_first_goes_on_undisturbed(
    digits, reference, tmp_path
) -> None:
    output = tmp_path / "out"
    first = Training(output, digits)
    first.reach(1)
    # Paused, so that it is still alive when the other one comes.
    os.kill(first.process.pid, signal.SIGSTOP)
    second = Training(output, digits)
    until(lambda: "trained this run last" in second.said)
    os.kill(first.process.pid, signal.SIGCONT)
    assert second.process.wait() == 1
    here = os.uname().nodename
    name = f"process {first.process.pid} on {here}"
    assert (
        f"train: {name} trained this run last; waiting 30 s to see whether it is still alive\n"
        in second.said
    )
    *_, last = second.said.splitlines()
    refused = (
        f"{output} is being trained by {name}; wait until it has ended, or end it, and run "
        f"the same command again"
    )
    assert last == f"train: {refused}"
    assert first.end() == 0, first.said
    assert first.epochs == list(range(1, 17))
    assert result(output) == reference(1)
    assert [attempt["by"] for attempt in attempts(output)] == [name]


def test_a_dead_owner_of_this_machine_is_followed_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(owner, "SETTLE", 3600)
    dead = OwnerProcess(tmp_path, "process 1 on here")
    assert dead.says() == "begun"
    dead.kill()
    lines: list[str] = []
    with acquire(tmp_path, "process 2 on here", lines.append):
        # It would say that it waits.
        assert lines == []
    record, _ = owner.look(tmp_path / "owner.json") or pytest.fail("no record")
    assert (record.name, record.released) == ("process 2 on here", True)
    assert [path.name for path in tmp_path.iterdir()] == ["owner.json"]


def test_a_second_command_of_one_job_does_not_end_the_first(tmp_path, monkeypatch) -> None:
    """Such as in two terminals of one allocation."""
    monkeypatch.setattr(owner, "BEAT", 0.1)
    folder = tmp_path / "run/state"
    with acquire(folder, "Slurm job 7", print) as first:
        path = folder / "owner.json"
        with pytest.raises(Refusal, match="run is being trained by Slurm job 7 on .*; wait until"):
            owner.refuse_owned(folder, "Slurm job 7", print)
        with (
            pytest.raises(Refusal, match="run is being trained by Slurm job 7 on"),
            acquire(folder, "Slurm job 7", print),
        ):
            pass
        first.check()
    # Requeued to another machine, its scheduler guarantees that it is over.
    path.write_text(json.dumps(asdict(ELSEWHERE)))
    lines: list[str] = []
    owner.refuse_owned(folder, ELSEWHERE.name, lines.append)
    owner.await_end(path, ELSEWHERE.name, owner.Seen(ELSEWHERE, 0), lines.append)
    assert lines == []


def test_an_owner_elsewhere_that_keeps_touching_its_record_is_alive(tmp_path) -> None:
    path = leave(tmp_path / "state", ELSEWHERE)
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(owner.BEAT):
            os.utime(path)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with (
            pytest.raises(
                Refusal,
                # A long path is shortened in its middle.
                match=f"{tmp_path.name} is being trained by Slurm job 7 on another-node; wait",
            ),
            acquire(tmp_path / "state", "process 1 on here", print),
        ):
            pass
    finally:
        ended.set()
        thread.join()
    assert json.loads(path.read_text())["token"] == ELSEWHERE.token


@pytest.mark.parametrize("how", ["taken over", "removed"])
def test_an_owner_whose_record_is_gone_writes_nothing_more(tmp_path, how) -> None:
    path = tmp_path / "owner.json"
    with acquire(tmp_path, "process 1 on here", print) as held:
        held.check()
        if how == "removed":
            path.unlink()
        else:
            path.write_text(json.dumps(asdict(ELSEWHERE)))
        until(lambda: held.taken)
        with pytest.raises(
            Refusal,
            match="was taken over by Slurm job 7 on another-node"
            if how == "taken over"
            else "somebody",
        ):
            held.check()
    # It does not mark the record as released either: the record belongs to another owner.
    assert (
        not path.exists()
        if how == "removed"
        else json.loads(path.read_text())["token"] == ELSEWHERE.token
    )


def test_a_record_that_nobody_can_read_is_nobody_s(tmp_path) -> None:
    (tmp_path / "owner.json").write_text('{"token": ')
    with acquire(tmp_path, "process 1 on here", print) as held:
        held.check()


def test_only_the_process_itself_is_known_to_be_there() -> None:
    """Neither a later process with its number, nor one on another machine."""
    mine = Record("0", "me", "here", owner.this_process())
    *machine, pid, start = mine.process.split()
    assert not owner.is_gone(mine)
    assert owner.is_gone(replace(mine, process=" ".join([*machine, pid, str(int(start) + 1)])))
    assert not owner.is_gone(replace(mine, process=f"another-boot {machine[1]} 4194999 1"))
    assert owner.is_gone(replace(mine, process=" ".join([*machine, "4194999", "1"])))
    with subprocess.Popen(["sleep", "1e9"]) as ended:
        start = processes.stat_of(ended.pid)[processes.STARTED]
        process = " ".join([*machine, str(ended.pid), start])
        assert not owner.is_gone(replace(mine, process=process))
        ended.kill()
        # Nobody has asked for its status yet.
        until(lambda: owner.is_gone(replace(mine, process=process)))


def test_one_of_two_that_find_the_same_dead_owner_gets_the_run(meanwhile) -> None:
    one, other = sorted(meanwhile[two_at_once].result())
    assert one == "begun"
    assert other.startswith("refused: ")
    assert "is being trained by process " in other


def test_an_owner_that_lost_the_run_while_it_loaded_its_data_leaves_the_record_alone(
    tmp_path, monkeypatch
) -> None:
    """Like after a pause longer than the lease, between acquiring the run and the first step."""
    monkeypatch.setattr(owner, "BEAT", 0.1)
    with acquire(tmp_path / "run" / "state", "process 1 on here", print) as held:
        path = tmp_path / "run" / "state" / "owner.json"
        other = owner.text(replace(ELSEWHERE, name="Slurm job 8"))
        path.write_text(other)
        until(lambda: held.taken)
        with pytest.raises(Refusal, match="run was taken over by Slurm job 8 on another-node"):
            held.begin_at(0, 0)
    assert path.read_text() == other


def test_a_job_that_gets_no_further_begins_three_times(meanwhile) -> None:
    *began, refused = meanwhile[begin_four_times].result()
    assert began == ["begun", "begun", "begun", "owns", "begun"]
    assert refused.startswith(
        "refused: Slurm job 7 has started 3 times after epoch 3, step 0 and got no further; "
        "read the logs"
    )


@pytest.mark.faults
def test_whoever_has_read_the_logs_may_begin_again(tmp_path) -> None:
    """In one allocation the owner's name is the same."""
    for begin in range(5):
        with acquire(tmp_path / "state", "Slurm job 7", print) as held:
            if begin != 3:
                held.begin_at(0, 0)
            else:
                with pytest.raises(Refusal, match="has started 3 times"):
                    held.begin_at(0, 0)


def test_a_record_that_cannot_be_read_for_a_moment_ends_nothing(tmp_path) -> None:
    with acquire(tmp_path / "state", "Slurm job 7", print) as held:
        path = tmp_path / "state/owner.json"
        record = path.read_text()
        # Too many links.
        path.unlink()
        path.symlink_to(path)
        held.confirmed -= owner.LEASE - 2 * owner.SETTLE
        held.check()
        held.confirmed -= 2 * owner.SETTLE
        with pytest.raises(OSError, match="links"):
            held.check()
        path.unlink()
        path.write_text(record)


def test_an_owner_elsewhere_that_is_silent_is_followed_after_the_lease(meanwhile) -> None:
    seconds, lines = meanwhile[take_over_from_nowhere].result()
    assert seconds >= owner.LEASE
    assert lines == [
        (
            "Slurm job 7 on another-node trained this run last; waiting 30 s to see "
            "whether it is still alive"
        )
    ]


def test_in_a_container_a_process_is_told_apart_by_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each of them the numbers begin at 1: the next training was taken for the same job."""
    monkeypatch.setattr(processes, "FIRST_NAMESPACE", Path("/proc/self/ns/pid").readlink())
    plain = f"process {os.getpid()} on {socket.gethostname()}"
    assert processes.process_name() == plain
    monkeypatch.setattr(processes, "FIRST_NAMESPACE", Path("pid:[1]"))
    start = processes.stat_of(os.getpid())[processes.STARTED]
    assert processes.process_name() == plain.replace(" on ", f" (start {start}) on ")
