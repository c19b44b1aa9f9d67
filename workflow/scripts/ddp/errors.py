"""What a user can put right, said in one line."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# What a program ends with that was asked to stop, and goes on where it was when it is started again; EX_TEMPFAIL of sysexits.h.
STOPPED = 75


class Stopped(Exception):
    """The program was asked to stop, and has saved what it needs to go on. Its text is one line."""


class Refusal(Exception):
    """Something the user can put right. Its text is one line: what is wrong, and what would be right."""


def os_error_line(error: OSError) -> str:
    """An OSError as one line that names the path and, where it is known, the remedy."""
    remedy = {
        errno.ENOSPC: "free some space there and run the same command again",
        errno.EDQUOT: "your quota is used up; free some space there and run the same command again",
        errno.EROFS: "choose a folder that can be written to",
        errno.EACCES: "make it readable and writable for you",
    }.get(error.errno or 0)
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}" + (f"; {remedy}" if remedy else "")


def error_line(error: Refusal | OSError) -> str:
    """What a user can put right, as one line."""
    return " ".join((os_error_line(error) if isinstance(error, OSError) else str(error)).split())


@contextmanager
def told_in_one_line(program: str) -> Iterator[None]:
    """End the program with status 1 and one line on stderr, instead of a traceback, for what a user can put right.

    With status STOPPED for what can go on later.
    Any other exception is a defect of ours and keeps its traceback.
    """
    try:
        yield
    except Stopped as stopped:
        print(f"{program}: {stopped}", file=sys.stderr)
        sys.exit(STOPPED)
    except (Refusal, OSError) as error:
        sys.exit(f"{program}: {error_line(error)}")
