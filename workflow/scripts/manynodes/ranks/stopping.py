"""Requests to stop this process: by a signal or by the clock."""

import atexit
import signal
import time
from types import FrameType

# Schedulers and launchers end a job with SIGTERM; a job can ask for the other two as a warning.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
DEADLINE = "its time is nearly up"
REASONS = (*(number.name for number in SIGNALS), DEADLINE)


class Stopping:
    """Requests to stop.

    Attributes:
        signal: name of the first signal, or DEADLINE if it came after that: another rank was
            faster to stop. None so far.
        deadline: when to stop without a signal, in seconds since the epoch; None for never.
    """

    def __init__(self, deadline: float | None) -> None:
        self.signal: str | None = None
        self.deadline = deadline

    def handle(self, number: int, _frame: FrameType | None) -> None:
        self.signal = self.reason or signal.Signals(number).name

    @property
    def reason(self) -> str | None:
        """Why to stop, one of REASONS; None if there is no reason."""
        if self.signal is None and self.deadline is not None and time.time() >= self.deadline:
            return DEADLINE
        return self.signal


def listen(deadline: float | None) -> Stopping:
    """Note the signals from now on, instead of their usual effect.

    This lasts to the end of the process, because launchers signal again while ranks are saving.

    Args:
        deadline: as in `Stopping`.
    """
    stop = Stopping(deadline)
    for number in SIGNALS:
        signal.signal(number, stop.handle)
        # While it shuts down, Python restores the default effect of handled signals, but not of
        # ignored ones. A rank that had refused was then ended by its launcher's SIGTERM, and its
        # last line was lost.
        atexit.register(signal.signal, number, signal.SIG_IGN)
    return stop
