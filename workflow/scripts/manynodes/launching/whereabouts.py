"""Where in its program a process is, seen from outside, and which of the ranks hangs.

If one rank hangs, the others wait for it in a collective operation until their time is up, and
only they say something. So every supervisor looks at its own rank before it ends it.
"""

import json
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from threading import Thread

from manynodes.base.processes import stat_of
from manynodes.launching.endings import LIBRARY, send

# Seconds for py-spy, which takes 0.04 (measured); it only reads the memory of the process.
PATIENCE = 5
# Seconds that the end of a rank is delayed at most: some schedulers give it only ten.
DELAY = 1
MOST_FRAMES = 12
# Processes of a rank that are looked at: the program, and what it has started.
MOST_PROCESSES = 3
# Code in which a rank waits for the others, and in which a process only waits for another one.
COLLECTIVE = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/torch/autograd/graph.py",
    # For a GPU, whose queue waits for the others.
    "/torch/cuda/streams.py",
    "/torch/amp/grad_scaler.py",
    "/manynodes/ranks/device.py",
    "/manynodes/ranks/process_group.py",
)
WAITING = "/subprocess.py"
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk"}


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank was when it was told to end.

    Attributes:
        who: `rank 3`.
        where: its host.
        state: `stopped by a signal`, `waiting for a disk`; empty if it could run.
        frames: `function (file:line)` of its main thread, the innermost first.
        frame: the innermost of them that is no library's.
        waits: it waited for the other ranks.
        log: file with all of its output; empty if there is none.
    """

    who: str = ""
    where: str = ""
    state: str = ""
    frames: Sequence[str] = ()
    frame: str = ""
    waits: bool = False
    log: str = ""

    def record(self) -> dict:
        return {"whereabouts": asdict(self)}

    @property
    def name(self) -> str:
        return f"{self.who} on {self.where}"

    @property
    def words(self) -> str:
        """Its state and its function."""
        return ", ".join(filter(None, [self.state, self.frame and f"in {self.frame}"]))


def hung(found: Sequence[Whereabouts]) -> Whereabouts | None:
    """The rank for which the others have waited; None if it is not known.

    One that cannot run comes before one that is elsewhere in its program. Of several that are
    elsewhere, it is the one that is where no other is.
    """
    stuck = [each for each in found if each.state]
    away = [each for each in found if each.frames and not each.waits]
    places = Counter(each.frames[0] for each in away)
    alone = [each for each in away if places[each.frames[0]] == 1]
    if stuck:
        return stuck[0]
    return alone[0] if len(alone) == 1 else None


class Observer:
    """Looks at a rank from its supervisor. For `agents.run_all`.

    Args:
        timeout: seconds after which a rank hangs.
    """

    def __init__(self, who: str, where: str, log: str, timeout: float) -> None:
        self.who, self.where, self.log = who, where, log
        # In the last looks, the newest last.
        self.states: deque[str] = deque(maxlen=3)
        self.told_to_end = self.sent = False
        self.sample = Whereabouts()
        # A look at the stack costs 0.04 s of a CPU, and the rank nothing.
        self.every = max(2.0, timeout / 4)
        self.next_state, self.next_stack = 0.0, time.monotonic() + self.every
        self.looking: Thread | None = None

    def __call__(self, pid: int, last: bool) -> None:
        now = time.monotonic()
        if last:
            self.told_to_end = True
            if not self.state:
                self.states.append(state_of(pid))
            if not self.state:
                self.look(pid, "", wait=DELAY)
            elif stuck := self.last(aborted=False):
                # At once: the scheduler may kill this process before its rank has ended. Without a
                # reader the rank must hear of its end all the same.
                with suppress(OSError):
                    send(stuck.record())
                    self.sent = True
        elif now >= self.next_state:
            before, self.next_state = self.state, now + 1
            self.states.append(state_of(pid))
            if (self.state and not before) or now >= self.next_stack:
                self.next_stack = now + self.every
                self.look(pid, self.state)

    @property
    def state(self) -> str:
        """Why it cannot run, or could not a moment ago; empty if it could.

        A healthy rank waits for a disk for moments only, so a state counts that two looks have
        found. And Slurm ends a step with SIGCONT and SIGTERM to all of its processes at once: the
        rank may run again, or be gone, when its supervisor hears of it. What counts is where it
        was before.
        """
        states = list(self.states)
        stays = [old for old, new in pairwise(states) if old == new and old]
        return stays[-1] if stays else ""

    def last(self, aborted: bool) -> Whereabouts | None:
        """Where it was when it was told to end, or stuck before it ended, or aborted; None if it
        ended in another way by itself, or if that was sent before.

        Args:
            aborted: NCCL's watchdog ends all ranks if one of them hangs, that one too.
        """
        if self.sent or not (self.told_to_end or self.state or aborted):
            return None
        return replace(self.sample, who=self.who, where=self.where, log=self.log, state=self.state)

    def look(self, pid: int, state: str, wait: float = 0.0) -> None:
        """Take a sample, in a thread: a look at a process whose file system hangs may hang too."""
        if self.looking and self.looking.is_alive():
            return

        def sample() -> None:
            found = seen(pid, state)
            if found.frames:
                self.sample = found

        self.looking = Thread(target=sample, daemon=True)
        self.looking.start()
        if wait:
            self.looking.join(wait)


def state_of(pid: int) -> str:
    """Why a process, or what it has started, cannot run; empty if it can. See proc(5)."""
    for each in chain(pid):
        with suppress(OSError):
            letter, *_ = stat_of(each)
            # One that has been aborted waits for the disk while its memory is written to it.
            if letter in STATES and not (letter == "D" and dumps_core(each)):
                return STATES[letter]
    return ""


def dumps_core(pid: int) -> bool:
    return b"\nCoreDumping:\t1\n" in Path(f"/proc/{pid}/status").read_bytes()


def chain(pid: int) -> list[int]:
    """A process, its oldest child, the oldest child of that one and so on."""
    found = [pid]
    # Every second for each rank: a look at all processes of the machine would take 10 ms.
    with suppress(OSError, IndexError):
        while len(found) < MOST_PROCESSES:
            children = Path(f"/proc/{found[-1]}/task/{found[-1]}/children").read_text()
            found.append(int(children.split()[0]))
    return found


def seen(pid: int, state: str) -> Whereabouts:
    """Where a rank is: in its own process, or in the program that it has started and waits for."""
    found: list[dict] = []
    for each in chain(pid):
        found = stack(each)
        if found and not found[0]["filename"].endswith(WAITING):
            break
    inside = list(takewhile(lambda frame: LIBRARY.search(frame["filename"]), found))
    outside = next(iter(found[len(inside) :]), None)
    # Not in what has called that: DDP calls the network, in which a rank may hang.
    innermost = found[: len(inside) + 1]
    waits = any(part in frame["filename"] for frame in innermost for part in COLLECTIVE)
    return Whereabouts(
        state=state,
        frames=tuple(map(in_words, found[:MOST_FRAMES])),
        frame=in_words(outside) if outside else "",
        waits=waits and not state,
    )


def stack(pid: int) -> list[dict]:
    """The Python frames of a process's main thread, the innermost first; empty if it has none, or
    if this system forbids to look.
    """
    with suppress(OSError, subprocess.SubprocessError, ValueError, KeyError, StopIteration):
        beside = Path(sys.executable).with_name("py-spy")
        spy = beside if beside.exists() else "py-spy"
        done = subprocess.run(
            [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            capture_output=True,
            timeout=PATIENCE,
            check=True,
        )
        threads = json.loads(done.stdout)
        return next(thread["frames"] for thread in threads if thread["os_thread_id"] == pid)
    return []


def in_words(frame: dict) -> str:
    """A frame as `function (file:line)`, with the last two parts of the path."""
    return f"{frame['name']} ({'/'.join(Path(frame['filename']).parts[-2:])}:{frame['line']})"
