"""What a user can put right, said in one line; and how a rank's error reaches the one who started it."""

import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The folder in which the processes that `launch` started leave their errors, named in this environment variable.
ERRORS_VARIABLE = "LAUNCH_ERRORS"


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


@contextmanager
def told_in_one_line(program: str) -> Iterator[None]:
    """End the program with status 1 and one line on stderr, instead of a traceback, for what a user can put right.

    Any other exception is a defect of ours and keeps its traceback. Either way `launch` is told, if it started us.
    """
    try:
        yield
    except (Refusal, OSError) as error:
        line = os_error_line(error) if isinstance(error, OSError) else str(error)
        leave_for_launch(line)
        sys.exit(f"{program}: {line}")
    except Exception as error:
        leave_for_launch(f"{type(error).__name__}: {error}")
        raise


def leave_for_launch(line: str) -> None:
    if folder := os.environ.get(ERRORS_VARIABLE):
        where = f"rank {os.environ['RANK']} on {socket.gethostname()}" if "RANK" in os.environ else socket.gethostname()
        # Named by time: the first error is the cause, those of its peers follow from it.
        (Path(folder) / f"{time.time_ns()}-{os.getpid()}").write_text(f"{where}: {' '.join(line.split())}")
