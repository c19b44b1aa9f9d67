"""The members of the test cluster from outside: their namespaces and processes."""

import ctypes
import hashlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("CLUSTER_FOLDER", "/var/tmp")).resolve()
# Of the folders of this checkout's clusters: two checkouts can test on one machine, and each worker
# of pytest-xdist has its own cluster. What is inside a cluster has the complete prefix.
PREFIX = os.environ.get("TEST_PREFIX") or (
    f"manynodes-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}"
)
if "CLUSTER_MEMBER" not in os.environ:
    PREFIX += os.environ.get("PYTEST_XDIST_WORKER", "")
# The scheduler: slurm or pbs.
KIND = os.environ.get("CLUSTER_KIND", "slurm")
LOGIN = "login"

PR_SET_PDEATHSIG = 1
SI_KERNEL = 0x80
PASSED_ON = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
UNSHARE = [
    "unshare",
    "--mount",
    "--uts",
    "--ipc",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--propagation",
    "private",
]
# Of nsenter, for what ends by itself: it forks for the pid namespace, and a signal then ends it,
# but not the command.
ENTERED = ["--ipc", "--uts", "--net", "--pid", "--mount", "--"]
# Where a member finds its commands.
SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OF_PBS = "/opt/pbs/bin:/opt/pbs/sbin"
# The cluster's owner of jobs that must not be root's: name, number.
USER, UID = "alice", 2000
libc = ctypes.CDLL(None, use_errno=True)


class Failure(Exception):
    """One line for the user."""


class Impossible(Failure):
    """It cannot run on this machine."""


def state_of(kind: str) -> Path:
    """The folder of a cluster."""
    return FOLDER / f"{PREFIX}-{kind}"


STATE = state_of(KIND)


def environment(member: str) -> dict[str, str]:
    """A member's initial environment: only the name by which it is found, and PATH."""
    path = f"{SEARCHED}:{OF_PBS}" if KIND == "pbs" else SEARCHED
    return {
        "PATH": path,
        "LANG": "C.UTF-8",
        "CLUSTER_FOLDER": str(FOLDER),
        "TEST_PREFIX": PREFIX,
        "CLUSTER_KIND": KIND,
        **({"OPENPBS": os.environ["OPENPBS"]} if "OPENPBS" in os.environ else {}),
        "CLUSTER_MEMBER": f"{STATE}/{member}",
    }


# Of members, as they were found.
_FOUND: dict[bytes, int] = {}


def init(member: str, state: Path = STATE) -> int | None:
    """Process 1 of a member, by its number here. What was found before is looked at again, so that
    no record can be stale.
    """
    mark = f"CLUSTER_MEMBER={state}/{member}".encode()
    before = [_FOUND[mark]] if mark in _FOUND else []
    for pid in (*before, *_pids()):
        if _is_init(pid, mark):
            _FOUND[mark] = pid
            return pid
    return None


def _is_init(pid: int, mark: bytes) -> bool:
    try:
        return _first_of_its_namespace(pid) and mark in Path(
            f"/proc/{pid}/environ"
        ).read_bytes().split(b"\0")
    except OSError:  # it has just ended
        return False


def processes(member: str, state: Path = STATE) -> dict[int, str]:
    """Command lines by process number here; empty if the member is off."""
    first = init(member, state)
    if first is None:
        return {}
    namespace, found = _namespace(first), {}
    for pid in _pids():
        try:
            if namespace is not None and _namespace(pid) == namespace:
                found[pid] = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
        except OSError:
            continue
    return found


def enter(pid: int, command: list[str], as_user: bool = False) -> int:
    """Run a command beside process `pid`, in this folder and environment; returns like `waitpid`.

    Args:
        as_user: as USER, not as root.

    Not nsenter, see ENTERED.
    """
    folder = Path.cwd()
    spaces = [
        os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
        for name in ("ipc", "uts", "net", "pid", "mnt")
    ]
    for space in spaces:
        if libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter the cluster")
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in (
                signal.SIGINT,
                signal.SIGTERM,
                signal.SIGPIPE,
                signal.SIGXFSZ,
            ):  # those that Python or cluster.py has changed
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON | {signal.SIGCHLD})
            os.chdir(folder)
            if as_user:
                become_user()
            os.execvp(command[0], command)
        except OSError as problem:
            os.write(2, f"cluster: {problem.strerror}: {problem.filename or command[0]}\n".encode())
        finally:
            os._exit(127)
    while True:
        got = signal.sigwaitinfo(PASSED_ON | {signal.SIGCHLD})
        if got.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
        elif got.si_code != SI_KERNEL:  # what the terminal sends, it has sent to the command too
            os.kill(child, got.si_signo)


def become_user() -> None:
    os.setgroups([])
    os.setgid(UID)
    os.setuid(UID)
    os.environ.update(HOME=str(STATE / "home"), USER=USER, LOGNAME=USER, SHELL="/bin/bash")
    # root's own: uid 2000 may not write there.
    os.environ.pop("XDG_RUNTIME_DIR", None)


def sh(*command: object) -> str:
    """Run a command that must succeed; returns its output."""
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise Failure(
            f"{' '.join(map(str, command))}: {done.stdout.strip() or f'status {done.returncode}'}"
        )
    return done.stdout


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _namespace(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink()
    except OSError:  # it has just ended
        return None


def _first_of_its_namespace(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    return status.partition("\nNSpid:")[2].partition("\n")[0].split()[-1] == "1"
