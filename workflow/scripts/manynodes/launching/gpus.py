"""The GPUs of this machine, to be shared by its agents and by all launches of this user."""

import fcntl
import os
import re
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from manynodes.base.errors import Refusal

# Seconds between two looks at GPUs that others have, and until a line is printed.
POLL, TELL = 1.0, 5.0
# A folder of this machine's that every launch finds, whatever TMPDIR says.
CLAIMS = Path(f"/dev/shm/manynodes-gpus-{os.getuid()}")


@contextmanager
def claimed_gpus(device: str, processes: int, tell: Callable[[str], None]) -> Iterator[list[str]]:
    """A GPU of this machine for each process, for this launch alone; it waits until there are so
    many. None if the device is `cpu`, or `auto` and the machine has too few.

    A claim is a lock on a file: it ends with this process, however that ends.

    Args:
        tell: prints a line.

    Raises:
        Refusal: as `usable_gpus`; or another user has made the folder of the claims.
    """
    gpus = usable_gpus(device, processes)
    if not gpus:
        if device != "cpu" and (there := visible_gpus()):
            tell(f"warning: the CPUs are used: {len(there)} GPUs for {processes} processes")
        yield []
        return
    CLAIMS.mkdir(mode=0o700, exist_ok=True)
    status = CLAIMS.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise Refusal(f"{CLAIMS} is another user's; have it removed, or use device: cpu")
    begun, told = time.monotonic(), False
    while True:
        with ExitStack() as claims:
            mine = claimed(gpus, processes, claims)
            if mine:
                yield mine
                return
        if time.monotonic() - begun > TELL and not told:
            told = True
            tell(
                f"waiting for {processes} of the {len(gpus)} GPUs, which other launches of yours "
                "have"
            )
        time.sleep(POLL)


def claimed(gpus: Sequence[str], processes: int, claims: ExitStack) -> list[str]:
    """The first GPUs that nobody has claimed, one for each process; none if there are too few.

    Args:
        claims: holds the locks.
    """
    free: dict[str, bool] = {}
    found: list[str] = []
    for gpu in gpus:
        # A GPU that is listed several times is for several processes.
        if gpu not in free:
            free[gpu] = locked(CLAIMS / re.sub(r"\W", "_", gpu), claims)
        if free[gpu]:
            found.append(gpu)
        if len(found) == processes:
            return found
    return []


def locked(path: Path, claims: ExitStack) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    claims.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def usable_gpus(device: str, processes: int) -> list[str]:
    """The GPUs of this machine; none if the device is `cpu`, or `auto` and there are too few.

    Raises:
        Refusal: the device is `cuda` and there are fewer GPUs than processes.
    """
    gpus = [] if device == "cpu" else visible_gpus()
    if device == "cuda" and len(gpus) < processes:
        raise Refusal(
            f"device: cuda needs {processes} GPUs, one per process; {socket.gethostname()} has "
            f"{len(gpus)}"
        )
    return gpus if len(gpus) >= processes else []


def visible_gpus() -> list[str]:
    """The GPUs of this machine that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        Refusal: their driver does not answer.
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise Refusal(
            f"nvidia-smi does not answer on {socket.gethostname()}; its GPUs need an administrator"
        ) from None
    return done.stdout.split() if done.returncode == 0 else []
