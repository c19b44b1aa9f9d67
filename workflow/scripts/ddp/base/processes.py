"""How processes end: their parent, their exit status, their last lines."""

import ctypes
import re
import signal
from collections.abc import Sequence

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
MOST_LINES = 40
MOST_CHARACTERS = 4000
# Lines of torch's C++ log, which may follow a Python traceback.
NOISE = re.compile(r"^\[?[WEI]\d{4}[ -]|^\[[WEI]\d{3,4} |^\s*$")
# torch puts the rank in front of a traceback's lines.
RANK_PREFIX = re.compile(r"^(\[rank\d+\]: ?)+")


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies, even by SIGKILL."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)


def how(status: int) -> str:
    """An exit status of subprocess in words."""
    if status >= 0:
        return f"ended with status {status}"
    killed = signal.Signals(-status).name
    return f"was ended by {killed}" + (
        "; the system does that when memory runs out" if killed == "SIGKILL" else ""
    )


def last_words(lines: Sequence[str], program: str) -> tuple[str, ...]:
    """The part of a process's stderr that says why it ended.

    If the program printed a one-line error, which begins with its name, that line; otherwise the
    last traceback; otherwise the last lines.
    """
    said = [RANK_PREFIX.sub("", line) for line in lines if not NOISE.search(line)]
    for line in reversed(said):
        if line.startswith(f"{program}: "):
            return (line.removeprefix(f"{program}: "),)
    starts = [number for number, line in enumerate(said) if line.startswith("Traceback ")]
    said = said[starts[-1] :] if starts else said
    while len(said) > MOST_LINES or (len(said) > 1 and sum(map(len, said)) > MOST_CHARACTERS):
        said = said[1:]
    return tuple(line[-MOST_CHARACTERS:] for line in said)
