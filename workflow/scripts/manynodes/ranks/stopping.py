"""Requests to stop this process: by a signal or by the clock."""

import atexit
import os
import signal
import threading
import time
from types import FrameType

from manynodes.base.processes import WARNINGS
from manynodes.base.temporary import exit_at_once

SIGNALS = (signal.SIGTERM, *WARNINGS)
DEADLINE = "its time is nearly up"
REASONS = (*(number.name for number in SIGNALS), DEADLINE)


class Stopping:
    """Requests to stop.

    Attributes:
        signal: name of the first signal, or DEADLINE if it came after that: another rank was
            faster to stop. None so far.
        deadline: when to stop without a signal, in seconds since the epoch; None for never.
        agreed: all ranks have agreed to stop, and are saving.
        handled: signals so far.
    """

    def __init__(self, deadline: float | None) -> None:
        self.signal: str | None = None
        self.deadline = deadline
        self.agreed = False
        self.handled = 0

    def handle(self, number: int, _frame: FrameType | None) -> None:
        self.signal = self.reason or signal.Signals(number).name
        self.handled += 1

    def end_if_blocked(self, signals: int, patience: float) -> None:
        """After a signal, end this process as soon as its main thread stays for so many seconds in
        code that does not return to Python, which handles signals. For a thread of its own.

        Args:
            signals: pipe with the number of each signal.
        """
        while (number := os.read(signals, 1)[0]) not in SIGNALS:
            pass
        before = 0
        while not self.agreed:
            time.sleep(patience)
            if self.handled == before and not self.agreed:
                exit_at_once(128 + number)
            before = self.handled
            os.kill(os.getpid(), number)

    @property
    def reason(self) -> str | None:
        """Why to stop, one of REASONS; None if there is no reason."""
        if self.signal is None and self.deadline is not None and time.time() >= self.deadline:
            return DEADLINE
        return self.signal


def listen(deadline: float | None, blocked: float | None = None) -> Stopping:
    """Note the signals from now on, instead of their usual effect.

    This lasts to the end of the process, because launchers signal again while ranks are saving.

    Args:
        deadline: as in `Stopping`.
        blocked: seconds of `Stopping.end_if_blocked`; None for never.
    """
    stop = Stopping(deadline)
    if blocked is not None:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=stop.end_if_blocked, args=(reader, blocked), daemon=True).start()
    for number in SIGNALS:
        signal.signal(number, stop.handle)
        # While it shuts down, Python restores the default effect of handled signals, but not of
        # ignored ones. A rank that had refused was then ended by its launcher's SIGTERM, and its
        # last line was lost.
        atexit.register(signal.signal, number, signal.SIG_IGN)
    return stop
