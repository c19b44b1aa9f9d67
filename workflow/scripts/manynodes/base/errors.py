"""Errors that a user can fix, in one line."""

import errno
import json
import re
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unicodedata import category

from manynodes.base.showing import send_nowhere, show

# Exit status of a program that stopped in order and can be resumed; EX_TEMPFAIL of sysexits.h.
STOPPED = 75
# Characters of a line, with the program's name: what a terminal or a log shows in one piece, and
# enough for two paths.
LONGEST = 200
LONGEST_NAME = 11  # characters of a program's name and the colon after it
OF_A_LINE = LONGEST - LONGEST_NAME  # characters behind them
SHORTENED = 40  # characters that are left of a word
LONGEST_REPORT = 1000  # characters of how something that was started has ended
# Makes a file of the workflow again. Another configuration than the user's would not know it.
MAKE = "your snakemake command, with --force"


# User name and password of an address.
PASSWORD = re.compile(r"(://)[^/\s]*@")
# Control sequences of a terminal, such as colours, and links; ECMA-48, 5.4.
CONTROLS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
# tqdm's progress bar, also one without a known end, in front of a line that was printed meanwhile.
BAR = re.compile(
    r"^(?:[^|]*\d%\|[^|]*\| \S+ \[|(?:[^|]*: )?\d[\d.]*[A-Za-z]\w* \[\d+:[\d:]+, )"
    r"[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*\](?=\s*\S)"
)


def one_line(text: str, most: int = LONGEST) -> str:
    """Any text as one safe line for a terminal, of at most `most` characters.

    If it is too long, the longest words are shortened first, because they are paths, and then the
    middle of the line: its beginning names the problem, its end the remedy.
    """
    line = printable(PASSWORD.sub(r"\1…@", " ".join(uncoloured(text).split())))
    for word in sorted(line.split(), key=len, reverse=True):
        if len(line) <= most or len(word) <= SHORTENED:
            break
        line = line.replace(word, shortened(word, max(SHORTENED, len(word) - len(line) + most)))
    return shortened(line, most)


def uncoloured(text: str) -> str:
    """What another program has written, without the colours that it may have been told to use. A
    move of the cursor becomes a blank: numbers that it holds apart are two.
    """
    plain = CONTROLS.sub(
        lambda found: "" if found[0][1] == "]" or found[0][-1] in "mKJhl" else " ", text
    )
    return plain.lstrip(" ") if text.startswith("\x1b") else plain


def parts_of(text: str) -> tuple[str, ...]:
    """A line that another program has written, apart from a progress bar in front of it that has
    not ended its own.
    """
    bar = BAR.match(text)
    return (text[: bar.end()], text[bar.end() :]) if bar else (text,)


def printable(text: str) -> str:
    """The text with escapes for control characters, which change the terminal, for surrogates,
    which cannot be written, and for marks that change the direction of text.
    """
    return escaped(text, lambda c: not c.isprintable())


def drawable(text: str) -> str:
    """The text with escapes for what no XML may have, of which pages and figures are: control
    characters, surrogates, and what is no character. It has the letters of all scripts, of which
    `printable` escapes the joiners and the blanks.
    """
    return escaped(text, lambda c: category(c) in ("Cc", "Cs", "Cn"))


def escaped(text: str, is_bad: Callable[[str], bool]) -> str:
    """The text with escapes for the characters that are bad."""
    return "".join(c.encode("unicode_escape").decode() if is_bad(c) else c for c in text)


def spreadsheet_text(text: str) -> str:
    """Printable text for a cell of a table, which a spreadsheet might otherwise compute as a
    formula.

    Source: OWASP, CSV Injection. A tab and a carriage return are escaped.
    """
    text = printable(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def shortened(text: str, most: int) -> str:
    """The text, without its middle if it is long."""
    end = most // 2
    return text if len(text) <= most else f"{text[: most - end - 1]}…{text[-end:]}"


def shown(value: object) -> str:
    """A value from outside, as short JSON."""
    try:
        # Unusual blanks are shown as escapes too: `one_line` would make blanks of them.
        return one_line(printable(json.dumps(value, default=str, ensure_ascii=False)), 40)
    except (ValueError, TypeError, RecursionError):
        # Python cannot format whole numbers of more than 4300 digits.
        return "a value too large to show"


class Stopped(Exception):
    """The program was asked to stop, and has saved its state. Its text becomes one line."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text, LONGEST_REPORT))


class Refusal(Exception):
    """Something the user can put right. Its text becomes one line: the problem and the remedy.

    Attributes:
        make_again: file of the workflow that must be made again; its line ends with the command.
    """

    def __init__(self, text: str, make_again: Path | None = None) -> None:
        super().__init__(one_line(text, OF_A_LINE))
        self.make_again = make_again


class Failed(Exception):
    """A started program has failed. Its text becomes one line, with the words of that program."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text, LONGEST_REPORT))


def os_error_line(error: OSError) -> str:
    """An OSError as one line with the path and, if known, the remedy."""
    remedy = {
        errno.ENOSPC: "free some space there and try again",
        errno.EDQUOT: "your quota is used up; free some space there and try again",
        errno.EROFS: "choose a folder that can be written to",
        errno.EACCES: "make it readable and writable for you",
        errno.ELOOP: "it is a link, or leads in a circle; remove it",
    }.get(error.errno or 0)
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}" + (f"; {remedy}" if remedy else "")


def reason(error: Exception) -> str:
    """The text of an error, without the path that an OSError adds."""
    return str(getattr(error, "strerror", None) or error)


def error_line(error: Refusal | OSError) -> str:
    """An error that a user can fix, as one line."""
    if isinstance(error, OSError):
        return one_line(os_error_line(error), OF_A_LINE)
    command = f": {MAKE} {error.make_again}" if error.make_again else ""
    return one_line(f"{error}{command}", OF_A_LINE)


@contextmanager
def told_in_one_line(program: str) -> Iterator[None]:
    """End the program with one line on stderr instead of a traceback, if a user can fix the error.

    The status is STOPPED if the program can be resumed, otherwise 1. Any other exception is a
    defect of this software and keeps its traceback. Nothing is said if the reader of what it prints
    has gone, as `head` does.
    """
    gone = False
    try:
        try:
            yield
        finally:
            if gone := unread():
                send_nowhere(sys.stdout)
            # What was printed comes before an error, in a pipe or a file too, where stdout is
            # buffered. Closed, full, or there is none: Python tries again at its end.
            with suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
    except Stopped as stopped:
        show(sys.stderr, f"{program}: {stopped}\n")
        sys.exit(STOPPED)
    except Failed as failed:
        sys.exit(f"{program}: {failed}")
    except (Refusal, OSError) as error:
        silent = isinstance(error, BrokenPipeError) and gone
        sys.exit(1 if silent else f"{program}: {error_line(error)}")


def unread() -> bool:
    """Whether the reader of what is printed has gone, as `head` does."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        looking = select.poll()
        looking.register(sys.stdout, 0)
        return bool(looking.poll(0))
    return False
