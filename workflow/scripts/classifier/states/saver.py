"""Saves the state during training: all ranks hand in their part, rank 0 writes in background."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from classifier.states.state import State, progress, remove, states, write
from manynodes.base.environment import add_to_report
from manynodes.base.errors import Refusal
from manynodes.checkpointing.owner import Owner
from manynodes.ranks.process_group import Process, everyone_is_here, gather


class Saver(AbstractContextManager["Saver"]):
    """A context; at its end, everything is written, whatever ended it.

    Attributes:
        times: number of states saved.
        seconds: time that the training waited for it.

    Args:
        folder: for the states.
        owner: of the run, on rank 0; None on the others.
        every: seconds between two states.
        spoiled: a line if what this rank has read is not what it should be, else an empty text.
    """

    def __init__(
        self,
        process: Process,
        folder: Path,
        owner: Owner | None,
        every: float,
        spoiled: Callable[[], str] = str,
    ) -> None:
        self.process, self.folder, self.owner, self.every = process, folder, owner, every
        self.spoiled = spoiled
        self.times, self.seconds = 0, 0.0
        self.last = time.monotonic()
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future[None] | None = None
        self.noting: Future[None] | None = None

    @property
    def due(self) -> bool:
        """Whether it is time for the next state; asked on rank 0.

        Raises:
            OSError: the last state, or the history, could not be written.
            Refusal: the run is no longer ours.
        """
        if not self.owner:
            return False
        self.owner.check()
        for task in (self.writing, self.noting):
            if task and task.done():
                task.result()
        return time.monotonic() - self.last >= self.every

    def save(
        self,
        mine: dict[str, Any],
        state: Callable[[list[dict[str, Any]]], State],
        wait: bool = False,
    ) -> None:
        """Save, on all ranks at once.

        Args:
            mine: this rank's part, see `State.ranks`.
            state: makes the state from the parts of all ranks; called on rank 0.
            wait: return on every rank when the state is on disk. Otherwise a state is skipped while
                the last one is being written.

        Raises:
            Refusal: on rank 0, what a rank has read is spoiled. The states before this one stay.
        """
        start = time.monotonic()
        ranks = gather({"spoiled": self.spoiled(), "part": mine}, self.process)
        for rank in ranks:
            if rank["spoiled"]:
                raise Refusal(
                    f"{rank['spoiled']} changed while it was read; run the same command again, on "
                    "a disk that nobody else writes to: it continues from the last state before"
                )
        if self.owner and (wait or not self.writing or self.writing.done()):
            if self.writing:
                self.writing.result()
            now = state([rank["part"] for rank in ranks])
            # Of a GPU it is a copy; on a CPU its tensors are those of the training.
            content = now if self.process.device.type == "cuda" else now.encode()
            self.writing = self.thread.submit(self.write, now.epoch, now.step, content)
            if wait:
                self.writing.result()
            self.times += 1
        self.last = time.monotonic()
        if wait:
            everyone_is_here()
        self.seconds += time.monotonic() - start

    def note(self, write: Callable[[], None]) -> None:
        """Write something else in the background, such as the history: a GPU would have nothing to
        do until it is on disk.
        """
        if self.noting:
            self.noting.result()
        self.noting = self.thread.submit(write)

    def remove_states(self) -> None:
        """Remove all states, also one that is being written."""
        if self.writing:
            self.writing.result()
        for path, _ in states(self.folder):
            remove(path)

    def write(self, epoch: int, step: int, content: State | bytes) -> None:
        assert self.owner is not None
        self.owner.check()
        encoded = content.encode() if isinstance(content, State) else content
        write(self.folder, epoch, step, encoded)
        add_to_report(saved=progress(epoch, step))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.thread.shutdown()
        for task in (self.writing, self.noting):
            if task and kind is None:
                task.result()
