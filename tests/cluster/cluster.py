"""A cluster on this machine, for tests, with real daemons: Slurm, or what
CLUSTER_KIND names, pbs or gridengine.

Nodes have their own network, name and folders.

Everything is in namespaces under one process; only its own folder is on the host. Needs root.
"""

import argparse
import fcntl
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import boot
import machine
import node
from namespaces import (
    KIND,
    LOGIN,
    STATE,
    UNSHARE,
    Failure,
    Impossible,
    enter,
    environment,
    init,
    processes,
    sh,
)

PACKAGES = {
    "ip": "iproute2",
    "mount": "mount",
    # In util-linux itself before Debian 13.
    "pivot_root": "util-linux-extra",
    "tc": "iproute2",
    "ping": "iputils-ping",
    "tini": "tini",
    "unshare": "util-linux",
}
KINDS = ("slurm", "pbs", "gridengine")
DAEMONS = importlib.import_module(f"{KIND}_daemons")
SEARCHED = environment(LOGIN)["PATH"]


def up(nodes: int, end_with_parent: bool) -> None:
    DAEMONS.check()
    install()
    lock = locked()
    if lock is None:
        raise Failure(f"one is up already, in {STATE}; `down` ends it")
    process = None
    try:
        clear()
        (STATE / "shared").mkdir()
        ends = [
            os.pidfd_open(pid)
            for pid in ([os.getppid()] if end_with_parent else []) + [os.getpid()]
        ]
        command = [
            *UNSHARE,
            "--net",
            "tini",
            "--",
            sys.executable,
            machine.__file__,
            str(nodes),
            *map(str, ends),
        ]
        # The machine inherits the lock, which is held as long as it lives.
        process = subprocess.Popen(
            command,
            cwd="/",
            env=environment(LOGIN),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            pass_fds=[lock, *ends],
        )
        for line in process.stdout:
            if line.strip() == machine.READY:
                return
            if line.startswith("cluster: "):
                # The output of a failed command follows its first line.
                rest = process.stdout.read()
                raise Failure(f"{line.removeprefix('cluster: ')}{rest}".strip())
            print(line, end="", flush=True)
        raise Failure("it did not come up, for the reason above")
    except BaseException:
        if process:
            process.kill()
            process.wait()
        os.close(lock)
        down()
        raise


def down() -> None:
    """Stop it and remove all of its files."""
    deadline = time.monotonic() + boot.PATIENCE
    while STATE.exists() and locked() is None:
        if pid := init(LOGIN):
            os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise Failure("its processes do not end")
        time.sleep(0.05)
    shutil.rmtree(STATE, ignore_errors=True)


def run(name: str, command: list[str], as_user: bool) -> None:
    """Run a command inside: signals are passed on, and its end is this one's."""
    os.environ["PATH"] = f"{os.environ['PATH']}:{environment(name)['PATH']}"
    os.environ.update(DAEMONS.ENVIRONMENT)
    status = enter(member(name), command, as_user)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    sys.exit(os.WEXITSTATUS(status))


def kill(name: str) -> None:
    """A power cut."""
    # The cable first, so that the others receive no message.
    cut(name)
    os.kill(member(name), signal.SIGKILL)


def cut(name: str) -> None:
    """Cut it off the network."""
    inside("ip", "link", "set", name, "down")
    # Otherwise slurmctld tries to connect for 12 s; now it sees after 3 s that the host is gone.
    inside("ip", "neigh", "flush", "to", boot.address(name), "dev", "bridge")


def throttle(name: str) -> None:
    """Let it receive no more than a few megabytes per second."""
    limits = ("rate", "40mbit", "burst", "64kb", "latency", "400ms")
    inside("tc", "qdisc", "add", "dev", name, "root", "tbf", *limits)


def join(name: str) -> None:
    """Reconnect it to the network, at full speed."""
    inside("ip", "link", "set", name, "up")
    if "tbf" in inside("tc", "qdisc", "show", "dev", name):
        inside("tc", "qdisc", "del", "dev", name, "root")


def drain(name: str) -> None:
    """Give it no new jobs."""
    DAEMONS.drain(inside, name)


def start(name: str) -> None:
    """Put it back in service after any of these."""
    join(name)
    if not init(name):
        before = DAEMONS.started(inside, name)
        time.sleep(1)  # shown to the second
        inside(sys.executable, node.__file__, "on", name)
        wait(lambda: DAEMONS.started(inside, name) != before, f"{name} did not come up", name)
    if not DAEMONS.usable(inside, name):
        DAEMONS.undrain(inside, name)
    wait(lambda: DAEMONS.usable(inside, name), f"{name} is not in service", name)


def status() -> None:
    """The scheduler's view, and the processes."""
    member(LOGIN)
    print(inside(*DAEMONS.OVERVIEW))
    for name in (LOGIN, *all_nodes()):
        running = processes(name)
        print(f"{name}:" if running else f"{name}: off")
        for pid, command in running.items():
            print(f"{pid:8} {command}")


def missing_packages() -> list[str]:
    """The packages that a cluster needs and this machine lacks."""
    libraries = sh("/sbin/ldconfig", "-p")
    return sorted(
        {
            package
            for command, package in (PACKAGES | DAEMONS.PACKAGES).items()
            if not shutil.which(command, path=SEARCHED)
        }
        | {package for name, package in DAEMONS.LIBRARIES.items() if name not in libraries}
    )


def packages() -> None:
    """Say what clusters of all kinds would install on this machine."""
    if os.geteuid() != 0:
        raise Impossible("the test clusters need root")
    found = set()
    for kind in KINDS:
        command = [sys.executable, __file__, "missing"]
        found |= set(sh("env", f"CLUSTER_KIND={kind}", *command).split())
    what = f"apt-get will install {' '.join(sorted(found))}" if found else "nothing to install"
    print(f"test clusters ({', '.join(KINDS)}): {what}", flush=True)


def install() -> None:
    missing = missing_packages()
    if os.geteuid() != 0:
        raise Impossible(
            "the test cluster needs root"
            + (f" and the packages {' '.join(missing)}" if missing else "")
        )
    if missing and not shutil.which("apt-get"):
        raise Impossible(f"missing, and no apt-get to install it: {' '.join(missing)}")
    if missing:
        print(f"installing {' '.join(missing)}", flush=True)
        for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
            done = apt_get(*arguments)
            if done.returncode != 0:
                print(done.stdout)
                raise Impossible(f"apt-get {arguments[0]} failed; needed: {' '.join(missing)}")


def apt_get(*arguments: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """When nobody else installs: apt-get waits for the locks of dpkg, but not for those of its
    lists and archives.
    """
    command = ["apt-get", "-qq", "-o", f"DPkg::Lock::Timeout={seconds:.0f}", *arguments]
    variables = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    deadline = time.monotonic() + seconds
    while True:
        done = subprocess.run(
            command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if (
            done.returncode == 0
            or "Could not get lock" not in done.stdout
            or time.monotonic() > deadline
        ):
            return done
        time.sleep(1)


def locked() -> int | None:
    """The lock on the state folder, held by everything of a living cluster; None if another
    cluster has it.
    """
    STATE.mkdir(parents=True, exist_ok=True)
    lock = os.open(STATE, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def clear() -> None:
    """Remove the leftovers of a killed cluster."""
    for entry in STATE.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def member(name: str) -> int:
    pid = init(name)
    if pid is None:
        raise Failure("no cluster is up" if name == LOGIN or not init(LOGIN) else f"{name} is off")
    return pid


def all_nodes() -> list[str]:
    return sorted(
        (entry.name for entry in (STATE / "nodes").iterdir()), key=lambda name: int(name[1:])
    )


def inside(*command: str) -> str:
    member(LOGIN)
    return sh(sys.executable, __file__, "run", "--", *command)


def wait(ready: Callable[[], bool], problem: str, name: str) -> None:
    deadline = time.monotonic() + boot.PATIENCE
    while not ready():
        if time.monotonic() > deadline:
            print(boot.tail(STATE / "log" / f"{name}.log"), file=sys.stderr)
            raise Failure(f"{problem} in {boot.PATIENCE} s: {DAEMONS.state(inside, name)}")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="cluster.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verb = verbs.add_parser("up", help="Bring it up; it stays in the background.")
    verb.add_argument(
        "--nodes", type=int, default=3, metavar="N", help="n1 to nN; 3 unless told otherwise"
    )
    verb.add_argument(
        "--end-with-parent",
        action="store_true",
        help="it ends when the process that started this one does",
    )
    verb.set_defaults(act=lambda given: up(given.nodes, given.end_with_parent))
    verbs.add_parser("packages", help=packages.__doc__).set_defaults(act=lambda _given: packages())
    verbs.add_parser("missing", help=missing_packages.__doc__).set_defaults(
        act=lambda _given: print(*missing_packages())
    )
    verbs.add_parser("down", help=down.__doc__).set_defaults(act=lambda _given: down())
    verb = verbs.add_parser("run", help="Run a command on the login node, or on another.")
    verb.add_argument("--node", default=LOGIN, metavar="NODE")
    verb.add_argument("--user", action="store_true", help="as a user who is not root")
    verb.add_argument("command", nargs=argparse.REMAINDER, metavar="[--] COMMAND …")
    verb.set_defaults(
        act=lambda given: run(
            given.node,
            given.command[1:] if given.command[0] == "--" else given.command,
            given.user,
        )
    )
    for act in (kill, cut, throttle, join, drain, start):
        verb = verbs.add_parser(act.__name__, help=act.__doc__)
        verb.add_argument("node", metavar="NODE")
        verb.set_defaults(act=lambda given, act=act: act(given.node))
    verbs.add_parser("status", help=status.__doc__).set_defaults(act=lambda _given: status())
    given = parser.parse_args()
    if given.verb == "run" and given.command in ([], ["--"]):
        parser.error("run needs a command")
    # An interrupted `up` stops what it has started.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        if given.verb not in ("up", "missing") and os.geteuid() != 0:
            raise Impossible("the test cluster needs root")
        given.act(given)
    except Failure as failure:
        print(f"cluster: {failure}", file=sys.stderr)
        sys.exit(2 if isinstance(failure, Impossible) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
