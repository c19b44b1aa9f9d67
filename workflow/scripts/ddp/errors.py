"""What a user can put right, said in one line."""

import errno
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# What a program ends with that was asked to stop, and goes on where it was when it is started again; EX_TEMPFAIL of sysexits.h.
STOPPED = 75
# Characters of a line, with the program's name in front: as long as a terminal or a log shows in one piece, and long enough for two paths.
LONGEST = 200
LONGEST_NAME = 11  # characters of a program's name and the colon after it
SHORTENED = 40  # characters that are left of a word
LONGEST_REPORT = 1000  # characters of how something that was started has ended


# What stands before the host in an address.
PASSWORD = re.compile(r"(://)[^/\s]*@")


def one_line(text: str, most: int = LONGEST) -> str:
    """Text that may hold anything, for a terminal: one line of at most so many characters, none of which has an effect but to be shown.

    Of what is too long, the longest words are cut first, which are paths; then the middle: the beginning names the problem, and the end
    the remedy.
    """
    line = PASSWORD.sub(r"\1…@", " ".join(text.split()))
    # Control characters, which a terminal obeys; surrogates, which cannot be written; marks that turn the direction of what follows.
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    for word in sorted(line.split(), key=len, reverse=True):
        if len(line) <= most or len(word) <= SHORTENED:
            break
        line = line.replace(word, shortened(word, max(SHORTENED, len(word) - len(line) + most)))
    return line if len(line) <= most else shortened(line, most)


def shortened(text: str, most: int) -> str:
    """The text without its middle."""
    end = most // 2
    return f"{text[: most - end - 1]}…{text[-end:]}"


def shown(value: object, most: int = 40) -> str:
    """A value from outside, as JSON, in a few characters."""
    try:
        return one_line(json.dumps(value, default=str), most)
    except (ValueError, TypeError, RecursionError):
        # Python writes no whole numbers of more than 4300 digits.
        return "a value too large to show"


class Stopped(Exception):
    """The program was asked to stop, and has saved what it needs to go on. Its text becomes one line."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text, LONGEST_REPORT))


class Refusal(Exception):
    """Something the user can put right. Its text becomes one line: what is wrong, and what would be right."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text, LONGEST - LONGEST_NAME))


class Failed(Exception):
    """What the program started has failed. Its text becomes one line, with the words of what failed in it."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text, LONGEST_REPORT))


def os_error_line(error: OSError) -> str:
    """An OSError as one line that names the path and, where it is known, the remedy."""
    remedy = {
        errno.ENOSPC: "free some space there and try again",
        errno.EDQUOT: "your quota is used up; free some space there and try again",
        errno.EROFS: "choose a folder that can be written to",
        errno.EACCES: "make it readable and writable for you",
    }.get(error.errno or 0)
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}" + (f"; {remedy}" if remedy else "")


def reason(error: Exception) -> str:
    """What an error says, without the path that an OSError puts around it."""
    return str(getattr(error, "strerror", None) or error)


def error_line(error: Refusal | OSError) -> str:
    """What a user can put right, as one line."""
    return str(error) if isinstance(error, Refusal) else one_line(os_error_line(error), LONGEST - LONGEST_NAME)


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
    except Failed as failed:
        sys.exit(f"{program}: {failed}")
    except (Refusal, OSError) as error:
        sys.exit(f"{program}: {error_line(error)}")
