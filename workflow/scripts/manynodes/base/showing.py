"""What is shown to a user who may no longer be there."""

import os
import sys
from typing import IO, AnyStr


def show(stream: IO[AnyStr] | None, text: AnyStr) -> None:
    """Write to our stdout or stderr.

    If that fails, because its disk is full or its reader has gone, all that follows goes nowhere:
    no training ends for that, and its logs have the same.
    """
    if stream is None:  # it was closed when Python started
        return
    try:
        # Of bytes, a stream without a buffer (PYTHONUNBUFFERED) may take a part, if a signal comes.
        while text:
            text = text[stream.write(text) or len(text) :]
        stream.flush()
    except OSError:
        send_nowhere(stream)


def send_nowhere(stream: IO[AnyStr]) -> None:
    """Let all that is written to our stdout or stderr from now on go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def open_closed_streams() -> None:
    """Let stdin, stdout and stderr be /dev/null if they were closed when Python started: the next
    files that are opened would take their place. Call it before any file is opened.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # It has the lowest number that is free.
            nowhere = open(os.devnull, "w" if number else "r", encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)
