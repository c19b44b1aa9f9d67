"""What is shown to a user who may no longer be there."""

import os
from typing import IO, AnyStr


def show(stream: IO[AnyStr] | None, text: AnyStr) -> None:
    """Write to our stdout or stderr.

    If that fails, because its disk is full or its reader has gone, all that follows goes nowhere:
    no training ends for that, and its logs have the same.
    """
    if stream is None:  # it was closed when Python started
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
