"""The state of a training, to resume it from: what it holds, how it lies on disk, and which of those that lie there is taken.

A state is `epoch=0003_step=000040.safetensors`, with its SHA-256 beside it in the form of `sha256sum`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp import atomic, tree
from ddp.config import Run
from ddp.data_folder import file_sha256
from ddp.errors import Refusal
from ddp.reading import NotAFile, read_bytes

FORMAT = 3
SUFFIX = ".safetensors"
NAME = re.compile(r"epoch=(\d{4,9})_step=(\d{6,12})\.safetensors", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}")
# The newest may be damaged by what ended the training: the one before is as good, an interval earlier.
KEPT = 2
# Where a run is computed, as far as it may be another place when it goes on. What is left of a run decides its result.
PLACE = ("nodes", "nproc_per_node", "cpus_per_proc", "device")
MOST_SUM = 1000  # bytes of the file with the SHA-256
START_OVER = "or start over: resume=fresh"


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
        return tree.encode({"format": FORMAT} | vars(self))

    @staticmethod
    def decode(content: bytes) -> "State":
        """A state from the content of its file, on the CPU. Nothing in the content is run: it may be anybody's.

        Raises:
            ValueError: it is none, or one of another version of this workflow.
        """
        try:
            found = tree.decode(content)
            known = {"format", *(field.name for field in fields(State))}
            if not isinstance(found, dict) or set(found) != known or found.pop("format") != FORMAT:
                raise ValueError("another format")
            state = State(**found)
            check(state)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError("is no state of this version of the workflow") from error
        return state


def check(state: State) -> None:
    """See that each field of a state has its type; that the tensors fit the network is seen when they are taken up.

    Raises:
        ValueError: one has not.
    """
    numbers = (state.epoch, state.step, *state.checkpoints)
    texts = (state.data_sha256, state.code_sha256, *state.checkpoints.values())
    rows: list[Any] = [state.run, *state.history, *state.attempts, *state.ranks, state.scaler, *state.optimizer["param_groups"]]
    named = [state.model, *(rank[part] for rank in state.ranks for part in ("buffers", "rng"))]
    good = (
        all(type(number) is int and 0 <= number < 10**9 for number in numbers)
        and all(SHA256.fullmatch(text) for text in texts)
        and all(isinstance(row, dict) and all(isinstance(key, str) for key in row) for row in rows)
        and all(isinstance(name, str) and isinstance(tensor, Tensor) for part in named for name, tensor in part.items())
        and all(isinstance(rank["totals"], Tensor) for rank in state.ranks)
        and isinstance(state.seconds, int | float)
        and set(state.optimizer) == {"state", "param_groups"}
        and all(type(key) is int and isinstance(value, dict) for key, value in state.optimizer["state"].items())
        and all(
            isinstance(attempt["by"], str) and isinstance(attempt["started"], str) and "commit" in attempt for attempt in state.attempts
        )
        and all(isinstance(attempt["seconds"], int | float) for attempt in state.attempts)
        and json.dumps([state.run, state.history, state.attempts]) != ""
        and len(state.history) == state.epoch
        and len(state.ranks) > 0 < len(state.attempts)
        and type(state.run["epochs"]) is int
        and state.epoch <= state.run["epochs"]
    )
    if not good:
        raise ValueError("a field of another type")


def place(epoch: int, step: int) -> str:
    """How far a training is, in words."""
    return f"step {step} of epoch {epoch + 1}" if step else f"epoch {epoch}"


def file_name(epoch: int, step: int) -> str:
    return f"epoch={epoch:04}_step={step:06}{SUFFIX}"


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
    named = ((path, NAME.fullmatch(path.name)) for path in folder.glob(f"*{SUFFIX}") if path.is_file())
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
        OSError: it cannot be read, which says nothing of what is in it.
    """
    try:
        content = read_bytes(path)
        if not content:
            raise ValueError("is empty")
        known = read_bytes(sum_of(path), MOST_SUM).decode("ascii", "replace").split()[0]
    except (FileNotFoundError, IndexError):
        raise ValueError("has no SHA-256 beside it") from None
    except NotAFile as error:
        raise ValueError(str(error.strerror)) from None
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
            # As a state has it: of lists and tuples, lists.
            for key, value in json.loads(self.run.to_json()).items()
            if key not in PLACE and state.run.get(key) != value
        ]
        if state.data_sha256 != self.data_sha256:
            found.append(f"the data's SHA-256 was {state.data_sha256[:12]}… and is {self.data_sha256[:12]}…")
        if state.code_sha256 != self.code_sha256:
            found.append(f"the code has changed since commit {str(state.attempts[-1]['commit'])[:12]}")
        if len(state.ranks) != self.run.world_size and not self.other_world_size:
            found.append(f"it was on {len(state.ranks)} processes and is on {self.run.world_size} (or go on: resume=other_world_size)")
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
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if not NAME.fullmatch(path.name):
            tell(f"passed over: {path} is not named like a state")
    for path in sorted(folder.glob("*.pt")):
        tell(f"passed over: {path} is a state of an earlier version of the workflow")
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
            raise Refusal(f"{path} is a state of another run: {different}; put that back, {START_OVER}")
        else:
            tell(f"resumed after {place(state.epoch, state.step)}, of {wanted.run.epochs} epochs, from {path}")
            found = content
            break
    if passed_over and found is None:
        tell(f"starts from the beginning: none of the {len(passed_over)} states in {folder} is gone on from")
    for path in passed_over:
        remove(path)
    return found
