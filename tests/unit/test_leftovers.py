"""The check of conftest.py that nothing outlives its test, on tests that leave something."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import leftovers
from programs import ROOT, SCRIPTS
from waiting import until

TESTS = """
import socket, subprocess, tempfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def shared():
    process = subprocess.Popen(["sleep", "infinity"])
    yield
    process.kill()
    process.wait()


def test_that_shares(shared):
    pass


def test_process():
    command = ["setsid", "sh", "-c", "echo; sleep infinity; :"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    # While a process becomes another program, its environment cannot be seen.
    process.stdout.readline()


def test_file():
    Path(tempfile.gettempdir(), "file").touch()


def test_socket():
    global server
    server = socket.create_server(("127.0.0.1", 0))


def test_that_fails():
    test_process()
    assert False


def test_that_ends_it(tmp_path):
    process = subprocess.Popen(["sleep", "infinity"])
    process.kill()
    process.wait()
"""


FOR_EVER = """
def test_for_ever(tmp_path):
    test_process()
    test_file()
    import time
    time.sleep(1e9)
"""


def start(folder: Path, tests: str, *options: str) -> subprocess.Popen[str]:
    """Run tests with our conftest.py, which waits for nothing here."""
    (folder / "test_sample.py").write_text(tests)
    (folder / "patient.py").write_text("import leftovers\nleftovers.PATIENCE = 0\n")
    paths = os.pathsep.join(map(str, (folder, ROOT / "tests", SCRIPTS)))
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(folder)}
    plugins = ("-p", "patient", "-p", "conftest", "-p", "no:randomly", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *options, "test_sample.py"]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def its_processes() -> list[str]:
    return [mark for mark in leftovers.marked().values() if " test_sample.py::" in mark]


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_test_that_leaves_something_is_named_and_what_it_left_is_ended(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    said = start(tmp_path, TESTS, *workers).communicate()[0]
    left = dict(re.findall(r"^left behind by test_sample.py::(\w+):\n(\w+|\S+/file)", said, re.M))
    assert left.keys() == {"test_process", "test_file", "test_socket"}, said
    assert (left["test_process"], left["test_socket"]) == ("process", "socket")
    assert "1 failed, 5 passed, 3 errors" in said
    assert its_processes() == []
    assert not list(tmp_path.glob(f"{leftovers.FOLDERS}*"))


@pytest.mark.faults
@pytest.mark.parametrize(("how", "workers"), [
    (signal.SIGTERM, ("-n", "1")), (signal.SIGINT, ("-n", "1")),
    (signal.SIGKILL, ()), (signal.SIGKILL, ("-n", "1")),
], ids=["SIGTERM-xdist", "SIGINT-xdist", "SIGKILL-alone", "SIGKILL-xdist"])  # fmt: skip
def test_what_an_interrupted_run_leaves_is_ended_at_the_latest_by_the_next(
    tmp_path: Path, how: signal.Signals, workers: tuple[str, ...]
) -> None:
    first = start(tmp_path, TESTS + FOR_EVER, "-k", "for_ever", *workers)
    until(its_processes, first)
    first.send_signal(how)
    said = first.communicate()[0]
    if how == signal.SIGKILL:
        assert its_processes()
        assert list(tmp_path.glob(f"{leftovers.FOLDERS}*"))
        said = start(tmp_path, TESTS, "-k", "that_ends_it").communicate()[0]
        assert "1 passed" in said
    assert its_processes() == [], said
    assert not list(tmp_path.glob(f"{leftovers.FOLDERS}*"))


def test_what_another_container_runs_is_left_alone(monkeypatch) -> None:
    """It has numbers of its own: a run in a container that shares /tmp was killed from outside."""
    mine = leftovers.owner(os.getpid())
    pid, began, *_ = mine.split("-")
    ended = mine.replace(began, f"{int(began) + 1}")
    assert not leftovers.is_over(mine)
    assert leftovers.is_over(ended)
    assert not leftovers.is_over(f"{pid}-{int(began) + 1}-1")
    monkeypatch.setattr(leftovers, "container", lambda: "1")
    assert leftovers.is_over(f"{pid}-{int(began) + 1}-1")
    assert not leftovers.is_over(ended)
