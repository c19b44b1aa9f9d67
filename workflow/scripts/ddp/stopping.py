"""Whether this process is asked to stop: by a signal, or by the clock."""

import os
import signal
import time
from types import FrameType

# SIGTERM is how schedulers and launchers end a job; the other two are what a job can have itself warned with (sbatch --signal).
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
DEADLINE = "its time is nearly up"


class Stopping:
    """What asks this process to stop.

    Attributes:
        signal: the first signal that did, by name; None so far.
        deadline: when to stop without one, in seconds since the epoch; None for never.
    """

    def __init__(self, deadline: float | None) -> None:
        self.signal: str | None = None
        self.deadline = deadline

    def handle(self, number: int, _frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number).name

    @property
    def reason(self) -> str | None:
        """Why to stop, in words; None while there is no reason."""
        if self.signal is None and self.deadline is not None and time.time() >= self.deadline:
            return DEADLINE
        return self.signal


def listen() -> Stopping:
    """Take note of the signals from now on, in place of their usual effect, and of the deadline that `launch` puts into STOP_AT.

    To the end of the process: launchers send another signal to ranks that are still saving.
    """
    stop = Stopping(float(os.environ["STOP_AT"]) if "STOP_AT" in os.environ else None)
    for number in SIGNALS:
        signal.signal(number, stop.handle)
    return stop
