"""The GPUs of this machine, to be shared by its agents and by all trainings of this user."""

import fcntl
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from manynodes.base.environment import SCRIPTS
from manynodes.base.errors import Refusal, Stopped
from manynodes.base.processes import answer_within
from manynodes.base.temporary import MEMORY, OURS

# Seconds between two looks at GPUs that others have, and until a line is printed.
POLL, TELL = 1.0, 5.0
# The names of GPUs in CUDA_VISIBLE_DEVICES; CUDA sees none from the first other one on.
NAME = re.compile(r"\d+|(GPU|MIG)-\S+")
PATIENCE = 60  # seconds for nvidia-smi, and for torch


@contextmanager
def claimed_gpus(
    device: str,
    processes: int,
    tell: Callable[[str], None],
    gone: Callable[[], bool] = lambda: False,
    for_auto: int = 0,
    other_torch: bool = False,
) -> Iterator[list[str]]:
    """A GPU of this machine for each process, for this program alone; it waits until there are so
    many. None if the device is `cpu`, or `auto` and there are too few that torch can use.

    A claim ends with this process, however that ends: it is the lock of a file, see `claim`.

    Args:
        tell: prints a line.
        gone: whether there is nobody any more to wait for.
        for_auto, other_torch: as in `gpus_to_share`.

    Raises:
        Refusal: as `usable_gpus`.
        Stopped: `gone` said so.
    """
    gpus = gpus_to_share(device, processes, for_auto, other_torch)
    if not gpus:
        if device == "auto" and (there := gpus_here(other_torch)):
            why, wanted = "torch cannot use its GPUs", max(processes, for_auto)
            if len(there) < wanted:
                has = counted(there)
                why = f"device: auto needs {wanted} GPUs, for all runs alike; it has {has}"
            tell(f"warning: {socket.gethostname()} computes on its CPUs: {why}")
        yield []
        return
    uuids = {gpu: uuid_of(gpu) for gpu in gpus}
    begun, told = time.monotonic(), False
    while True:
        with ExitStack() as claims:
            mine = claimed(gpus, uuids, processes, claims)
            if mine:
                yield mine
                return
        if gone():
            raise Stopped("stopped while it waited for a GPU")
        if time.monotonic() - begun > TELL and not told:
            told = True
            tell(
                f"waiting for {processes} of the {len(gpus)} GPUs, which other programs of yours "
                "have"
            )
        time.sleep(POLL)


def claimed(
    gpus: Sequence[str], uuids: Mapping[str, str], processes: int, claims: ExitStack
) -> list[str]:
    """The first GPUs that nobody has claimed, one for each process; none if there are too few.

    Args:
        uuids: for each, `uuid_of`: it may have several names.
        claims: holds them.
    """
    free: dict[str, bool] = {}
    found: list[str] = []
    for gpu in gpus:
        # A GPU that is listed several times is for several processes.
        if (uuid := uuids[gpu]) not in free:
            free[uuid] = claim(uuid, claims)
        if free[uuid]:
            found.append(gpu)
        if len(found) == processes:
            return found
    return []


def uuid_of(gpu: str) -> str:
    """The UUID of a GPU that is named by its index, or by the beginning of its UUID; of one that
    the driver does not show so, such as a part of one, its name.
    """
    index = str(int(gpu)) if gpu.isdecimal() else ""
    found = [card.uuid for card in cards() if card.number == index or card.uuid.startswith(gpu)]
    return found[0] if len(found) == 1 else gpu


def claim(gpu: str, claims: ExitStack) -> bool:
    """Claim a GPU for as long as `claims` or this process lives; returns whether it was free."""
    for folder in folders_of_claims():
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(folder / gpu.replace("/", "_")[:80], flags, 0o600)
        claims.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def folders_of_claims() -> list[Path]:
    """The folders in which this user locks a file for each GPU, and nobody else can.

    It is one; or several, if another user has had its name for a while. A claim holds in all of
    them: of two trainings that make one at once, at least one finds both.
    """
    parent = MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    usual = parent / f"{OURS}gpus-{os.getuid()}"

    def found() -> list[Path]:
        return sorted(filter(is_private, parent.glob(f"{usual.name}*")))

    with suppress(FileExistsError):
        usual.mkdir(0o700)
    if not found():
        tempfile.mkdtemp(prefix=f"{usual.name}-", dir=parent)
    return found()


def is_private(path: Path) -> bool:
    """Whether it is a folder that only this user can enter."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        mine = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        return mine and stat.S_ISDIR(status.st_mode)
    return False


def gpus_to_share(
    device: str, processes: int, for_auto: int = 0, other_torch: bool = False
) -> list[str]:
    """The GPUs of this machine of which a training takes some; none if it computes on CPUs.

    Args:
        for_auto: as in `usable_gpus`.
        other_torch: it computes with another Python's torch, of which this one's knows nothing.

    Raises:
        Refusal: as `usable_gpus`.
    """
    gpus = usable_gpus(device, processes, for_auto, other_torch)
    return gpus if device == "cuda" or (gpus and (other_torch or gpus_of_torch())) else []


def usable_gpus(
    device: str, processes: int, for_auto: int = 0, other_torch: bool = False
) -> list[str]:
    """The GPUs of this machine; none if the device is `cpu`, or `auto` and there are too few.

    Args:
        for_auto: with `auto`, how many there must be at least: those of the largest run of an
            experiment, so that its runs are compared on one kind of device.
        other_torch: as in `gpus_to_share`.

    Raises:
        Refusal: the device is `cuda` and there are fewer GPUs than processes.
    """
    gpus = [] if device == "cpu" else gpus_here(other_torch)
    if device == "cuda" and len(gpus) < processes:
        raise Refusal(
            f"device: cuda needs {processes} GPUs, one per process; {socket.gethostname()} has "
            f"{counted(gpus)}"
        )
    wanted = max(processes, for_auto) if device == "auto" else processes
    return gpus if len(gpus) >= wanted else []


def gpus_here(other_torch: bool) -> list[str]:
    """The GPUs that this process may use, without those that torch has no code for, such as one
    for the screen, if it has for others. Who names them in CUDA_VISIBLE_DEVICES has chosen.

    Args:
        other_torch: as in `gpus_to_share`.

    Raises:
        Refusal: their driver does not answer.
    """
    gpus = visible_gpus()
    chosen = "CUDA_VISIBLE_DEVICES" in os.environ
    if other_torch or chosen or len({card.name for card in cards()}) < 2:
        return gpus
    return [gpu for gpu in gpus if gpu in gpus_of_torch()] or gpus


def counted(gpus: Sequence[str]) -> str:
    """How many GPUs these are, and that there are others."""
    others = " that torch has code for" * (len(gpus) < len(visible_gpus()))
    return f"{len(gpus)}{others}"


def visible_gpus() -> list[str]:
    """The GPUs of this machine that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Without it by their UUIDs: CUDA does not number them as the driver does.

    Raises:
        Refusal: their driver does not answer.
    """
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return [card.uuid for card in cards()]
    named = map(str.strip, os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    return list(takewhile(NAME.fullmatch, named))


class Card(NamedTuple):
    """A GPU as its driver shows it."""

    number: str
    uuid: str
    name: str


def cards() -> list[Card]:
    """The GPUs that the driver shows; none if there is no driver.

    Raises:
        Refusal: it does not answer.
    """
    answer = answer_of_driver()
    if isinstance(answer, Refusal):
        raise answer
    return answer


@cache
def answer_of_driver() -> list[Card] | Refusal:
    """The same; asked once, as a driver that does not answer is waited for a minute."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]
    try:
        done = answer_within(PATIENCE, query, stderr=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return Refusal(
            f"nvidia-smi does not answer on {socket.gethostname()}; its GPUs need an administrator"
        )
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    parts = (map(str.strip, line.split(",", 2)) for line in lines if line.count(",") > 1)
    # Of a GPU that is lost, the driver shows no UUID.
    return [card for card in (Card(*each) for each in parts) if card.uuid.startswith("GPU-")]


@cache
def gpus_of_torch() -> frozenset[str]:
    """The GPUs here on which torch can compute: it may be built without CUDA or for other ones, or
    the driver be too old for it. In a process of its own, because it takes two seconds and starts
    CUDA.
    """
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from manynodes.ranks.device import "
        "gpus_to_compute_on; print(*gpus_to_compute_on())"
    )
    asked = [sys.executable, "-c", code, str(SCRIPTS)]
    try:
        done = answer_within(PATIENCE, asked, stderr=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return frozenset()
    # Something else may print too when Python starts.
    return frozenset(word for word in done.stdout.split() if word.startswith("GPU-"))
