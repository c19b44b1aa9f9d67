"""Saving the state of a training while it goes on: all ranks hand in what is theirs, and rank 0 writes, in the background."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ddp.owner import Owner
from ddp.process_group import Process, everyone_is_here, gather
from ddp.state import State, place, write


class Saver:
    """As a context it ends when all is written, whatever ended the context.

    Attributes:
        times: states given to be written.
        seconds: that the training stood still for them.

    Args:
        folder: for the states.
        owner: of the run, on rank 0; None on the others.
        every: seconds between two states.
    """

    def __init__(self, process: Process, folder: Path, owner: Owner | None, every: float) -> None:
        self.process, self.folder, self.owner, self.every = process, folder, owner, every
        self.times, self.seconds = 0, 0.0
        self.last = time.monotonic()
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future[None] | None = None

    @property
    def due(self) -> bool:
        """Whether the seconds since the last state are over; asked on rank 0.

        Raises:
            OSError: the last state could not be written.
            Refusal: the run is no longer ours.
        """
        if not self.owner:
            return False
        self.owner.hold()
        if self.writing and self.writing.done():
            self.writing.result()
        return time.monotonic() - self.last >= self.every

    def save(self, mine: dict[str, Any], state: Callable[[list[dict[str, Any]]], State], wait: bool = False) -> None:
        """Save, on all ranks at once.

        Args:
            mine: what is this rank's, see `State.ranks`.
            state: makes the state of what all ranks have handed in; called on rank 0.
            wait: return when it is on disk, on every rank. Otherwise a state is left out while the one before is being written.
        """
        start = time.monotonic()
        ranks = gather(mine, self.process)
        if self.owner and (wait or not self.writing or self.writing.done()):
            if self.writing:
                self.writing.result()
            now = state(ranks)
            self.writing = self.thread.submit(partial(self.write, now.epoch, now.step, now.encode()))
            if wait:
                self.writing.result()
            self.times += 1
        self.last = time.monotonic()
        if wait:
            everyone_is_here()
        self.seconds += time.monotonic() - start

    def write(self, epoch: int, step: int, content: bytes) -> None:
        assert self.owner is not None
        self.owner.hold()
        write(self.folder, epoch, step, content)
        tell_supervisor(saved=place(epoch, step))

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None) -> None:
        self.thread.shutdown()
        if self.writing and kind is None:
            self.writing.result()


def tell_supervisor(**what: str) -> None:
    """Add to what `supervise` tells of this process when it has ended."""
    if "NODE_REPORT" in os.environ:
        path = Path(os.environ["NODE_REPORT"])
        before = json.loads(path.read_text() or "{}") if path.exists() else {}
        path.write_text(json.dumps(before | what))
