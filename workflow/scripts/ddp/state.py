"""The state of a training, to resume it from: what it holds, how it lies on disk, and which of those that lie there is taken.

A state is `epoch=0003_step=000040.pt`, with its SHA-256 beside it in the form of `sha256sum`.
"""

import hashlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from ddp import atomic
from ddp.config import Run
from ddp.data_folder import file_sha256
from ddp.errors import Refusal

FORMAT = 2
NAME = re.compile(r"epoch=(\d+)_step=(\d+)\.pt")
# The newest may be damaged by what ended the training: the one before is as good, an interval earlier.
KEPT = 2
# Where a run is computed, as far as it may be another place when it goes on. What is left of a run decides its result.
PLACE = ("nodes", "nproc_per_node", "cpus_per_proc", "device")
START_OVER = "to start over: --fresh, through Snakemake --config resume=fresh"


@dataclass(frozen=True)
class State:
    """All that a training needs to go on as if it had never stopped.

    Attributes:
        run: the run's configuration, every key.
        data_sha256, code_sha256: of the data set and of what computes.
        epoch: epochs finished.
        step: steps done in the epoch after; 0 between two epochs. The learning rate follows from the two.
        model: the network's state_dict on rank 0.
        optimizer, scaler: the state_dicts of the optimizer and of fp16's gradient scaler, the same on all ranks.
        ranks: by rank, what differs between them: `buffers` (BatchNorm's running statistics, averaged only between epochs), `totals`
            (sums of the epoch so far, see `steps.step`) and `rng` (states of the random generators, by device type).
        history: a row per finished epoch.
        seconds: that the unfinished epoch has taken so far.
        attempts: what has been at work on it, the present one last; see docs/results.md, run.json.
        checkpoints: SHA-256 of the kept weights by epoch.
    """

    run: dict[str, Any]
    data_sha256: str
    code_sha256: str
    epoch: int
    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    ranks: list[dict[str, Any]]
    history: list[dict[str, Any]]
    seconds: float
    attempts: list[dict[str, Any]]
    checkpoints: dict[int, str]

    @property
    def finished(self) -> bool:
        return self.epoch == self.run["epochs"]

    def encode(self) -> bytes:
        """The content of its file."""
        content = io.BytesIO()
        torch.save({"format": FORMAT} | vars(self), content)
        return content.getvalue()

    @staticmethod
    def decode(content: bytes) -> "State":
        """A state from the content of its file, on the CPU. Nothing in the content is run: it may be anybody's.

        Raises:
            ValueError: it is none, or one of another version of this workflow.
        """
        try:
            fields = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            if fields.pop("format") != FORMAT:
                raise ValueError("another format")
            return State(**fields)
        except (UnpicklingError, RuntimeError, EOFError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError("is no state of this version of the workflow") from error


def place(epoch: int, step: int) -> str:
    """How far a training is, in words."""
    return f"step {step} of epoch {epoch + 1}" if step else f"epoch {epoch}"


def file_name(epoch: int, step: int) -> str:
    return f"epoch={epoch:04}_step={step:06}.pt"


def write(folder: Path, epoch: int, step: int, content: bytes) -> None:
    """Write an encoded state durably, then remove those that are no longer needed.

    Raises:
        OSError: naming the path, and on a full disk how much was needed; what was there is still there.
    """
    path = folder / file_name(epoch, step)
    # The sum comes first: whatever happens between the two, there is no state without one.
    atomic.write_bytes(sum_of(path), f"{hashlib.sha256(content).hexdigest()}  {path.name}\n".encode())
    atomic.write_bytes(path, content)
    there = list(states(folder))
    # Another number of processes can go on from the end of an epoch only.
    ends = [path for path, (_, step) in there if step == 0]
    for path, _ in there[KEPT:]:
        if path not in ends[:1]:
            remove(path)


def states(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """The files that are named like states, with their epoch and step, newest first."""
    named = ((path, NAME.fullmatch(path.name)) for path in folder.glob("*.pt") if path.is_file())
    found = [(path, (int(name[1]), int(name[2]))) for path, name in named if name]
    yield from sorted(found, key=lambda entry: entry[1], reverse=True)


def sum_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    sum_of(path).unlink(missing_ok=True)


def read(path: Path) -> tuple[State, bytes]:
    """A state and the content of its file.

    Raises:
        ValueError: it cannot be used; the text goes on after the path.
    """
    try:
        content = path.read_bytes()
        if not content:
            raise ValueError("is empty")
        known = sum_of(path).read_text().split()[0]
    except (FileNotFoundError, IndexError):
        raise ValueError("has no SHA-256 beside it") from None
    except UnicodeDecodeError:
        known = ""
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != known:
        raise ValueError("does not have the SHA-256 that stands beside it: it is cut short or damaged")
    state = State.decode(content)
    if path.name != file_name(state.epoch, state.step):
        raise ValueError(f"is the state after {place(state.epoch, state.step)}: it was renamed")
    for epoch, sha256 in state.checkpoints.items():
        kept = checkpoint(path.parent, epoch)
        if not kept.is_file() or file_sha256(kept) != sha256:
            raise ValueError(f"needs {kept.name}, which is missing or damaged")
    return state, content


def checkpoint(folder: Path, epoch: int) -> Path:
    """The kept weights of an epoch. They lie with the states until the run is done, as Snakemake removes unfinished outputs."""
    return folder / "checkpoints" / f"epoch={epoch:03}.safetensors"


@dataclass(frozen=True)
class Wanted:
    """What is to be trained, and what it may go on from.

    Attributes:
        by: who trains, as it stands in `State.attempts`.
        fresh: start over.
        other_world_size: go on from the last whole epoch of another number of processes.
    """

    run: Run
    data_sha256: str
    code_sha256: str
    by: str
    fresh: bool
    other_world_size: bool

    def leaves(self, state: State) -> str | None:
        """Why a state is left aside that could be gone on from; None if it is not."""
        # What this very job has saved it goes on from, or it would start over each time that it is queued again.
        if self.fresh and all(attempt["by"] != self.by for attempt in state.attempts):
            return "is left aside, as was asked"
        if state.step and len(state.ranks) != self.run.world_size and self.other_world_size:
            return f"is in the midst of an epoch on {len(state.ranks)} processes"
        return None

    def differs(self, state: State) -> list[str]:
        """How the run of a state differs from this, in words, less the place where it is computed."""
        found = [
            f"{key} was {state.run.get(key)} and is {value}"
            for key, value in asdict(self.run).items()
            if key not in PLACE and state.run.get(key) != value
        ]
        if state.data_sha256 != self.data_sha256:
            found.append(f"the data's SHA-256 was {state.data_sha256[:12]}… and is {self.data_sha256[:12]}…")
        if state.code_sha256 != self.code_sha256:
            found.append(f"the code has changed since commit {state.attempts[-1]['commit']}")
        if len(state.ranks) != self.run.world_size and not self.other_world_size:
            found.append(
                f"it was on {len(state.ranks)} processes and is on {self.run.world_size} (to go on from its last whole epoch: "
                "--other-world-size, through Snakemake --config resume=other_world_size)"
            )
        return found


def newest(folder: Path, wanted: Wanted, tell: Callable[[str], None]) -> bytes | None:
    """Find the state to go on from, and remove all that is newer, which the training will come to anew.

    Args:
        tell: gets a line on each file that is passed over, and one on what is begun with.

    Returns:
        The content of the file; None if there is nothing to go on from.

    Raises:
        Refusal: the newest is of another run, or of another number of processes.
    """
    for path in folder.glob("*.pt"):
        if not NAME.fullmatch(path.name):
            tell(f"passed over: {path} is not named like a state")
    passed_over = []
    found: bytes | None = None
    ended = False
    for path, _ in states(folder):
        try:
            state, content = read(path)
            reason, different = wanted.leaves(state), ", ".join(wanted.differs(state))
            # The results of a run that has ended are out; the states before its last are its own too.
            ended |= state.finished
        except ValueError as problem:
            reason = str(problem)
        if not reason and different and ended:
            reason = f"is of another run, which has ended: {different}"
        if reason:
            tell(f"passed over: {path} {reason}")
            passed_over.append(path)
        elif different:
            raise Refusal(f"{path} is a state of another run: {different}; put that back to go on with it; {START_OVER}")
        else:
            tell(f"resumed after {place(state.epoch, state.step)}, of {wanted.run.epochs} epochs, from {path}")
            found = content
            break
    if passed_over and found is None:
        tell(f"starts from the beginning: none of the {len(passed_over)} states in {folder} is gone on from")
    for path in passed_over:
        remove(path)
    return found
