"""For all tests: one generous time limit, and a check that nothing outlives its test."""

import fcntl
import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forked
import leftovers
from leftovers import FAILED, MARK

# Python would look through all that the tests import for garbage, again and again: a fifth of the
# time until they are collected.
gc.disable()
# A user's shell seldom sets them. With the first, stdout and stderr come in another order.
for unusual in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(unusual, None)
# Seconds; what a test needs on a machine with ten times as much to do. Nothing else limits a test.
LIMIT = 900
LIMIT_OF_FAULTS = 2400
# The name of this run: its controller's, if xdist has started this process.
RUN = pytest.StashKey[str]()
FOLDER = pytest.StashKey[Path]()
# What a test's or a run's fixtures of a larger scope have put into TMPDIR.
KEPT: set[str] = set()
# When the test began, and where this process listened then.
BEFORE = pytest.StashKey[tuple[float, set[tuple[object, ...]]]]()
# And what it did at each signal; pytest-timeout sets SIGALRM's.
HANDLERS = pytest.StashKey[dict[int, Any]]()


def pytest_configure(config: pytest.Config) -> None:
    """Clean up after runs that were killed, and give this one a folder of its own."""
    # A shell that runs us in the background lets us, and whatever we start, ignore it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        config.stash[RUN] = os.environ[MARK].partition(" ")[0]
        return
    # As at Ctrl-C, fixtures end what they have started.
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM", 128 + signal.SIGTERM))
    leftovers.sweep()
    config.stash[RUN] = leftovers.owner(os.getpid())
    os.environ[MARK] = f"{config.stash[RUN]} run"
    config.stash[FOLDER] = leftovers.folder_of(config.stash[RUN])
    if config.option.basetemp is None:
        config.option.basetemp = config.stash[FOLDER]


def pytest_sessionstart(session: pytest.Session) -> None:
    """TMPDIR becomes a folder of this process."""
    folder = session.config._tmp_path_factory.getbasetemp() / "tmp"
    folder.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def folder_of_run(config: pytest.Config) -> Path:
    """The folder that all workers share."""
    base = config._tmp_path_factory.getbasetemp()
    return base.parent if hasattr(config, "workerinput") else base


@pytest.fixture(scope="session")
def open_folder(request: pytest.FixtureRequest) -> Path:
    """A folder that other users of the machine can reach."""
    folder = folder_of_run(request.config)
    folder.chmod(0o711)
    return folder


@pytest.fixture(scope="session")
def made_once(request: pytest.FixtureRequest) -> Callable[[str, Callable[[Path], object]], Path]:
    """Gives the folder of a name, which is made by the first worker that needs it."""
    shared = folder_of_run(request.config) / "shared"
    shared.mkdir(exist_ok=True)

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        folder, made = shared / name, shared / f"{name}.made"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                # What a worker has left that failed.
                shutil.rmtree(folder, ignore_errors=True)
                make(folder)
                made.touch()
        return folder

    return folder_of


def pytest_sessionfinish() -> None:
    for server in list(forked.SERVERS):
        server.stop()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what is left of an interrupted run."""
    if RUN in config.stash and not hasattr(config, "workerinput"):
        os.environ.pop(MARK, None)
        leftovers.kill(lambda mark: mark.partition(" ")[0] == config.stash[RUN])
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        limit = LIMIT_OF_FAULTS if item.get_closest_marker("faults") else LIMIT
        item.add_marker(pytest.mark.timeout(limit))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = os.environ[MARK]
    os.environ[MARK] = f"{item.config.stash[RUN]} {item.nodeid}"
    try:
        return (yield)
    finally:
        os.environ[MARK] = before


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest
) -> Iterator[None]:
    """What a fixture of a larger scope starts does not belong to the test that needed it first."""
    if fixturedef.scope == "function":
        return (yield)
    before, there = os.environ[MARK], temporary_files()
    os.environ[MARK] = f"{request.config.stash[RUN]} {of_scope(request.node)}"
    try:
        return (yield)
    finally:
        os.environ[MARK] = before
        KEPT.update(temporary_files() - there)


def of_scope(node: pytest.Item | pytest.Collector) -> str:
    return f"fixtures of {node.nodeid or 'the run'}"


def temporary_files() -> set[str]:
    """In TMPDIR, without torch's cache of compiled code."""
    names = {path.name for path in Path(tempfile.gettempdir()).iterdir()}
    return {name for name in names if not name.startswith("torchinductor_")}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[BEFORE] = (time.time(), leftovers.sockets())
    item.stash[HANDLERS] = handlers()
    return (yield)


def handlers() -> dict[int, Any]:
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM}
    found = {number: signal.getsignal(number) for number in numbers}
    return {number: handler for number, handler in found.items() if handler is not None}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End what is left of the test, and of the fixtures that end after it: at once if the test has
    failed. One that has passed must have ended it by itself.
    """
    ended = set(item.listchain()) - set(nextitem.listchain() if nextitem else ())
    marks = [
        f"{item.config.stash[RUN]} {item.nodeid if node is item else of_scope(node)}"
        for node in ended
    ]
    since, listening = item.stash[BEFORE]

    def left() -> list[str]:
        if leftovers.sockets() - listening:
            # An object in a cycle may still hold it.
            gc.collect()
        return [
            *(f"process {pid}: {line}" for pid, line in leftovers.living(marks).items()),
            *(f"forked program {pid}" for pid in forked.running()),
            *(f"socket {address}" for address in leftovers.sockets() - listening),
            *(f"{tempfile.gettempdir()}/{name}" for name in temporary_files() - KEPT),
            *leftovers.in_memory(since),
        ]

    try:
        return (yield)
    finally:
        # A program sets them for as long as it runs. A test that called its functions here left
        # Ctrl-C ignored in all tests after it.
        for number, handler in item.stash[HANDLERS].items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        failed = item.stash.get(FAILED, False)
        found = [] if failed else leftovers.after_grace(left)
        if found or failed:
            # First what would start others.
            forked.kill()
            leftovers.kill(marks.__contains__)
            for name in temporary_files() - KEPT:
                leftovers.remove(Path(tempfile.gettempdir(), name))
        if found:
            pytest.fail(f"left behind by {item.nodeid}:\n" + "\n".join(found), pytrace=False)
