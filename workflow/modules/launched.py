"""For training programs: where to read and write, when to stop, progress and results.

`import launched` works in every program that the workflow starts. The file needs only Python, and
also works in a program that is started by hand. Each function is a few lines around a variable of
the environment, so a program in another language can do the same.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any

STOPPED = 75  # exit status: stopped in order, start me again
UNFINISHED = ".unfinished"  # of a file that is being written
_signal: str | None = None


def _folder(name: str) -> Path | None:
    value = os.environ.get(f"LAUNCH_{name}")
    return Path(value) if value else None


data: Path | None = _folder("DATA")
"""Folder of the staged data set; None without one."""
files: Path | None = _folder("FILES")
"""Folder with the staged files; None without them."""
results: Path = _folder("RESULTS") or Path.cwd()
"""Where to write outputs; the program starts here."""
outputs: Path | None = _folder("OUTPUTS")
"""Folder with the outputs of a finished training, in a program that evaluates them."""
state: Path = _folder("STATE") or Path.cwd() / "state"
"""Folder for what is needed to continue after an interruption."""
rank: int = int(os.environ.get("RANK", 0))
local_rank: int = int(os.environ.get("LOCAL_RANK", 0))
world_size: int = int(os.environ.get("WORLD_SIZE", 1))
timeout: int = int(os.environ.get("LAUNCH_TIMEOUT", 600))
"""Seconds after which a process counts as hung; for `torch.distributed.init_process_group`."""


def parameters() -> dict[str, Any]:
    """The values of the run, by name; empty in a program that is started by hand."""
    path = _folder("PARAMETERS")
    return json.loads(path.read_text()) if path else {}


def _note(number: int, _frame: Any) -> None:
    global _signal
    _signal = signal.Signals(number).name


# A child that multiprocessing forks and terminates must end: it gets none of our handler, and no
# signal before that is so.
_masks: list[Any] = []
_listening = False


def _hold() -> None:
    _masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]))


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


def _forget() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go()


def _listen() -> None:
    global _listening
    with suppress(ValueError):  # only the main thread can
        signal.signal(signal.SIGTERM, _note)
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_forget)
        _listening = True


# From the import on: a job may be stopped while the program still loads its data. Not in a child
# that multiprocessing spawns, which imports the main module again.
if type(current_process()).__name__ == "_MainProcess" and not hasattr(
    current_process(), "_inheriting"
):
    _listen()


def stop_requested() -> bool:
    """Whether to save and stop: the job is preempted, cancelled, or its time is nearly up.

    With torch.distributed initialised, every process must call it at the same place; it is true on
    all of them as soon as one is asked to stop. It waits for the others, and for a GPU until that
    has done all that it was given: there, ask every 50 steps.
    """
    if not _listening and not current_process().daemon:
        # A rank that the program has spawned itself.
        _listen()
    end = float(os.environ.get("LAUNCH_STOP_AT", "inf"))
    here = _signal is not None or time.time() >= end
    torch = sys.modules.get("torch")
    if torch is None or not (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    ):
        return here
    device = "cpu"
    if torch.distributed.get_backend() == "nccl":
        # Not the current device, which is the first one unless the program has set it.
        device = f"cuda:{local_rank % torch.cuda.device_count()}"
    asked = torch.tensor([int(here)], device=device)
    torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
    return bool(asked.item())


def stop() -> None:
    """End this process so that the job is started again and continues.

    Save before, and close what writes with a delay, such as a SummaryWriter: nothing is flushed.
    """
    print("stopped in order; the next start continues", file=sys.stderr, flush=True)
    # Other threads and a process group may not end by themselves; everything is saved.
    sys.stdout.flush()
    os._exit(STOPPED)


def save(path: Path | str, write: Callable[[Path], object]) -> None:
    """Write a file completely or not at all, and flush it to disk.

    Args:
        write: writes a file at the path that it is given: `lambda path: torch.save(x, path)`.

    Raises:
        ValueError: it has written none there.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own, so that what else it writes there goes with it.
    with tempfile.TemporaryDirectory(UNFINISHED, f".{path.name}.", path.parent) as folder:
        whole = Path(folder, path.name)
        write(whole)
        if not whole.is_file():
            found = ", ".join(sorted(each.name for each in Path(folder).iterdir())) or "nothing"
            raise ValueError(
                f"{path.name} was to be written, and {found} was; numpy adds .npy to a path: give "
                "it a name that ends so"
            )
        with whole.open("rb") as file:
            os.fsync(file.fileno())
        whole.chmod(0o666 & ~_umask())
        whole.replace(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def row(**numbers: float) -> None:
    """Add a row to metrics.csv; only rank 0 writes. The first number counts epochs or steps.

    Rows with the same or a later count, which an interrupted attempt has left, are replaced.

    Raises:
        ValueError: the first number does not count.
    """
    if rank != 0:
        return
    path = results / "metrics.csv"
    # float: of a tensor, its value; what is no number is an error here and not at the end.
    new: dict[str, Any] = {key: _number(value) for key, value in numbers.items()}
    count = next(iter(new))
    rows: list[dict[str, Any]] = []
    with suppress(FileNotFoundError), path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and next(iter(rows[0])) != count:
        raise ValueError(f"metrics.csv counts {next(iter(rows[0]))}, this row counts {count}")
    replaced = [each for each in rows if float(each[count]) >= new[count]]
    for name in {"epoch", "step"} & new.keys() - {count}:
        # A row may have no such number.
        if any(float(each.get(name) or "inf") < new[name] for each in replaced):
            raise ValueError(f"{count} goes back while {name} goes on; give {name} first")
    rows = [*(each for each in rows if each not in replaced), new]

    def write(temporary: Path) -> None:
        with temporary.open("w", newline="") as file:
            columns = list(dict.fromkeys(key for each in rows for key in each))
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    save(path, write)


def result(
    confusion_matrix: Any = None, class_names: list[str] | None = None, **values: float | str
) -> None:
    """Write result.json; only rank 0 writes.

    Args:
        confusion_matrix: numbers of images, true class by row: lists, or an array.
        class_names: of its rows.
    """
    if rank == 0:
        found: dict[str, Any] = {
            key: value if isinstance(value, str) else _number(value)
            for key, value in values.items()
        }
        if confusion_matrix is not None:
            found["confusion_matrix"] = [[int(n) for n in row] for row in confusion_matrix]
            found["class_names"] = class_names or [str(n) for n in range(len(confusion_matrix))]
        text = json.dumps(found) + "\n"
        save(results / "result.json", lambda path: path.write_text(text))


def _number(value: Any) -> float:
    """A number as Python's; whole ones stay whole."""
    number = float(value)
    return int(number) if number.is_integer() and abs(number) < 1e15 else number
