"""The state from which a training resumes: its content, its file, and which one is used.

A state is `epoch=0003_step=000040.safetensors`, with its SHA-256 beside it in the form of
`sha256sum`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from classifier.states import kept
from manynodes.base import atomic, tree
from manynodes.base.errors import Refusal
from manynodes.base.reading import NotAFile, file_sha256, read_bytes
from manynodes.checkpointing.owner import job_of
from manynodes.experiment.config import Run, default_run
from manynodes.experiment.keys import GEOMETRY

FORMAT = 3
SUFFIX = ".safetensors"
NAME = re.compile(r"epoch=(\d{4,9})_step=(\d{6,12})\.safetensors", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}")
# An interruption may damage the newest state; then the one before it is used.
KEPT = 2
MOST_SUM = 1000  # bytes of the file with the SHA-256
START_OVER = "or start over: --config resume=fresh"


@dataclass(frozen=True)
class State:
    """Everything that a training needs to continue as if it had not been interrupted.

    Attributes:
        run: the run's configuration, every key; `precision` is the one in which it is computed.
        data_sha256, code_sha256: of the data set and of the training code.
        epoch: finished epochs.
        step: finished steps of the next epoch; 0 between two epochs. The learning rate follows from
            epoch and step.
        model: the network's state_dict on rank 0.
        optimizer, scaler: the state_dicts of the optimizer and of fp16's gradient scaler, equal
            on all ranks.
        ranks: by rank, what differs between ranks: `buffers` (BatchNorm's running statistics, which
            are averaged only between epochs), `totals` (sums of the epoch, see `steps.step`) and
            `rng` (see `steps.random_state`).
        history: one row per finished epoch.
        seconds: time of the unfinished epoch so far.
        attempts: the jobs that trained it, this one last; see docs/results.md, run.json.
        checkpoints: SHA-256 of the kept weights by epoch.
        averages: of the weights, by name; with `ema`, see `averaging.WeightAverage`.
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
    # States of earlier versions have none.
    averages: dict[str, Tensor] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.step == 0 and kept.finished(self.run, self.history)

    def encode(self) -> bytes:
        """The content of its file."""
        return tree.encode({"format": FORMAT} | vars(self))

    @staticmethod
    def decode(content: bytes) -> "State":
        """A state from the content of its file, on the CPU. No part of the content is executed.

        Raises:
            ValueError: it is not a state, or one of another version of this workflow.
        """
        try:
            found = tree.decode(content)
            if not isinstance(found, dict) or found.pop("format") != FORMAT:
                raise ValueError("another format")
            state = State(**found)
            check(state)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError("is not a state of this version of the workflow") from error
        return state


def check(state: State) -> None:
    """Check the type of each field. Whether the tensors fit the network is checked when they are
    loaded.

    Raises:
        ValueError: a field has another type.
    """
    # A foreign history may lack what the training asks of it.
    kept.finished(state.run, state.history)
    kept.kept_epochs(state.run, state.history)
    numbers = (state.epoch, state.step, *state.checkpoints)
    texts = (state.data_sha256, state.code_sha256, *state.checkpoints.values())
    rows: list[Any] = [
        state.run,
        *state.history,
        *state.attempts,
        *state.ranks,
        state.scaler,
        *state.optimizer["param_groups"],
    ]
    named = [
        state.model,
        state.averages,
        *(rank["buffers"] for rank in state.ranks),
    ]
    good = (
        all(type(number) is int and 0 <= number < 10**9 for number in numbers)
        and all(SHA256.fullmatch(text) for text in texts)
        and all(isinstance(row, dict) and all(isinstance(key, str) for key in row) for row in rows)
        and all(
            isinstance(name, str) and isinstance(tensor, Tensor)
            for part in named
            for name, tensor in part.items()
        )
        and all(
            isinstance(rank["totals"], Tensor) and isinstance(rank["rng"], dict)
            for rank in state.ranks
        )
        and isinstance(state.seconds, int | float)
        and set(state.optimizer) == {"state", "param_groups"}
        and all(
            type(key) is int and isinstance(value, dict)
            for key, value in state.optimizer["state"].items()
        )
        and all(
            isinstance(attempt["by"], str)
            and isinstance(attempt["started"], str)
            and "commit" in attempt
            for attempt in state.attempts
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


def progress(epoch: int, step: int) -> str:
    """The progress of a training in words."""
    return f"step {step} of epoch {epoch + 1}" if step else f"epoch {epoch}"


def file_name(epoch: int, step: int) -> str:
    return f"epoch={epoch:04}_step={step:06}{SUFFIX}"


def write(folder: Path, epoch: int, step: int, content: bytes) -> None:
    """Write an encoded state durably, then remove the states that are no longer needed.

    Raises:
        OSError: with the path and, for a full disk, the space needed; older states are unchanged.
    """
    path = folder / file_name(epoch, step)
    # The sum comes first, so no state ever lacks one.
    atomic.write_bytes(
        sum_of(path), f"{hashlib.sha256(content).hexdigest()}  {path.name}\n".encode()
    )
    atomic.write_bytes(path, content)
    for path, _ in list(states(folder))[KEPT:]:
        remove(path)


def states(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """The files with the name of a state, with epoch and step, newest first."""
    named = (
        (path, NAME.fullmatch(path.name)) for path in folder.glob(f"*{SUFFIX}") if path.is_file()
    )
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
        ValueError: it cannot be used; the text continues a sentence that begins with the path.
        OSError: it cannot be read; its content may be good.
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
        raise ValueError("does not match the SHA-256 beside it: it is truncated or damaged")
    state = State.decode(content)
    if path.name != file_name(state.epoch, state.step):
        raise ValueError(f"is the state after {progress(state.epoch, state.step)}: it was renamed")
    for epoch, sha256 in state.checkpoints.items():
        kept = checkpoint(path.parent, epoch)
        if not kept.is_file() or file_sha256(kept) != sha256:
            raise ValueError(f"needs {kept.name}, which is missing or damaged")
    return state, content


def remove_surpassed(folder: Path, run: Mapping[str, Any], history: kept.History) -> None:
    """Remove the weights of epochs that were the best, and that no state there refers to."""
    first = min((epoch for _, (epoch, _) in states(folder)), default=0)
    needed: set[int] = set()
    for epochs in range(first, len(history) + 1):
        needed |= kept.kept_epochs(run, history[:epochs])
    names = {checkpoint(folder, epoch).name for epoch in needed}
    for path in (folder / "checkpoints").glob(f"epoch=[0-9]*{SUFFIX}"):
        if path.name not in names:
            path.unlink()


def checkpoint(folder: Path, epoch: int) -> Path:
    """The kept weights of an epoch. They lie with the states until the run is done, because
    Snakemake removes incomplete outputs.
    """
    return folder / "checkpoints" / f"epoch={epoch:03}.safetensors"


@dataclass(frozen=True)
class Request:
    """What to train, and which states it may resume.

    Attributes:
        by: who trains, see `State.attempts`.
        resume: `fresh` starts over, `anyway` resumes a state of another number of processes too.
    """

    run: Run
    data_sha256: str
    code_sha256: str
    by: str
    resume: str

    def differs(self, state: State) -> list[str]:
        """How the run of a state differs from this one, in words, ignoring the geometry."""
        # A state of an earlier version lacks the keys that have come since.
        was = default_run().values | state.run
        found = [
            f"{key} was {was.get(key)} and is {value}"
            # As in a state, where tuples have become lists. Of `rates` the first match counts.
            for key, value in json.loads(self.run.to_json()).items()
            if key not in GEOMETRY
            and (was.get(key) != value or (key == "rates" and [*was[key]] != [*value]))
            # It goes on as it began.
            and (key, value) != ("precision", "auto")
        ]
        if state.data_sha256 != self.data_sha256:
            found.append(
                f"the data's SHA-256 was {state.data_sha256[:12]}… and is {self.data_sha256[:12]}…"
            )
        if state.code_sha256 != self.code_sha256:
            found.append(
                f"the code has changed since commit {str(state.attempts[-1]['commit'])[:12]}"
            )
        if len(state.ranks) != self.run.world_size and self.resume != "anyway":
            found.append(
                f"it was on {len(state.ranks)} processes and is on {self.run.world_size} "
                "(--config resume=anyway continues)"
            )
        return found


def newest(folder: Path, request: Request, tell: Callable[[str], None]) -> tuple[bytes, list[Path]]:
    """Find the state to resume.

    Args:
        tell: gets a line for each skipped file, and one for the resumed state.

    Returns:
        The content of the file, empty if there is nothing to resume; and the states that were
        skipped, for `remove`.

    Raises:
        Refusal: the newest state belongs to another run, or to another number of processes.
    """
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if not NAME.fullmatch(path.name):
            tell(f"skipped: {path} is not named like a state")
    skipped = []
    found = b""
    ended = False
    for path, _ in states(folder):
        try:
            state, content = read(path)
            different = ", ".join(request.differs(state))
            # With `fresh`, a job still resumes its own states; otherwise it would start over after
            # each requeue.
            of_this_job = any(job_of(each["by"]) == job_of(request.by) for each in state.attempts)
            skipped_as_asked = request.resume == "fresh" and not of_this_job
            reason = "is not resumed, as requested" if skipped_as_asked else ""
            # The results of a finished run are complete, so its states may be skipped.
            ended |= state.finished
        except ValueError as problem:
            reason = str(problem)
        if not reason and different and ended:
            reason = f"belongs to another run, which has ended: {different}"
        if reason:
            tell(f"skipped: {path} {reason}")
            skipped.append(path)
        elif different:
            raise Refusal(f"{path} is a state of another run: {different}; undo that, {START_OVER}")
        else:
            tell(
                f"resumed after {progress(state.epoch, state.step)}, of {request.run.epochs} "
                f"epochs, from {path}"
            )
            found = content
            break
    if skipped and not found:
        tell(f"no usable state in {folder}, {len(skipped)} skipped; starting from scratch")
    return found, skipped
