"""The user's program as a child process: its environment, requests to stop, how it ended."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from manynodes.base.environment import PREFIX, Environment
from manynodes.base.errors import Refusal
from manynodes.base.processes import end_descendants, end_with_parent, let_look
from manynodes.base.timeouts import PROGRAM_GRACE
from manynodes.ranks.network import interface_of, local_address
from manynodes.ranks.stopping import Stopping

# Of `launch` and its processes alone.
PRIVATE = ("secret", "report", "store")
# The folder of the module `launched`, which a program may import.
MODULES = Path(__file__).resolve().parents[3] / "modules"


def without_folder(words: Sequence[str]) -> tuple[list[str], str]:
    """The command line, and the folder that a module is in: `-m folder:module` is ours alone."""
    if len(words) > 2 and words[:2] == [sys.executable, "-m"]:
        folder, _, module = words[2].rpartition(":")
        return [*words[:2], module, *words[3:]], folder
    return list(words), ""


def environment_of(contract: Environment, before: Mapping[str, str], folder: str) -> dict[str, str]:
    """The environment of the program.

    Args:
        folder: for Python to find modules in; empty for none.
        contract: added to it; its `device` decides whether a GPU may be used.
        before: this process's own environment.
    """
    hidden = {f"{PREFIX}{name.upper()}" for name in PRIVATE}
    found = {key: value for key, value in before.items() if key not in hidden}
    paths = [str(MODULES), *filter(None, [before.get("PYTHONPATH")])]
    if folder:
        paths.insert(0, folder)
    found |= {"PYTHONPATH": os.pathsep.join(paths)} | contract.variables()
    if not gpu_here(contract.device, before):
        # Without it accelerate does not connect processes on CPUs: each would train alone.
        found["ACCELERATE_USE_CPU"] = "true"
    return gloo_interface(before) | found


def gpu_here(device: str | None, environment: Mapping[str, str]) -> bool:
    """Whether the program may find a GPU on this node."""
    if device == "cpu" or environment.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def gloo_interface(environment: Mapping[str, str]) -> dict[str, str]:
    """The interface on which gloo is reached by other nodes.

    gloo takes the address of this host's own name, which Debian sets to 127.0.1.1.
    """
    master = environment.get("MASTER_ADDR", "")
    address = local_address(master) if master else ""
    if not address or address.startswith("127."):
        return {}
    interface = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


@contextmanager
def started(
    words: Sequence[str], environment: Mapping[str, str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """The running program; at the end no process of it is left.

    Raises:
        Refusal: it cannot be started.
    """
    try:
        process = subprocess.Popen(
            words,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            # Our parent, the supervisor, names a rank that hangs.
            preexec_fn=partial(before_the_program, os.getppid()),
        )
    except OSError as error:
        what = folder if not folder.is_dir() else words[0]
        raise Refusal(f"{what}: {error.strerror}; check program, command or directory") from None
    try:
        yield process
    finally:
        end_descendants()
        process.wait()


def before_the_program(supervisor: int) -> None:
    end_with_parent(signal.SIGKILL)
    let_look(supervisor)
    # This process may have changed them, and a program inherits what is ignored.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def wait(process: subprocess.Popen[bytes], stop: Stopping, check: Callable[[], None]) -> int:
    """Wait for the end of the program, and pass a request to stop on as SIGTERM.

    Args:
        check: called every second; may raise.

    Returns:
        Its status, as in subprocess.
    """
    asked: float | None = None
    checked = time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.1)
        now = time.monotonic()
        if now - checked >= 1:
            check()
            checked = now
        if asked is None and stop.reason:
            process.terminate()
            asked = now
        elif asked is not None and now - asked > PROGRAM_GRACE:
            process.kill()
            return process.wait()


def end_like(status: int) -> None:
    """End this process as the program has ended, by the same signal."""
    if status < 0:
        # The program has left its core dump, if one is wanted.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):
            signal.signal(-status, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), -status)
        time.sleep(5)
    sys.exit(status if status >= 0 else 128 - status)
