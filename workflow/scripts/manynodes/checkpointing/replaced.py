"""The results of a finished training while another training is to replace them.

Snakemake removes the outputs of a job before it begins. These are set aside as hard links, and put
back if the other training does not finish.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

FOLDER = "replaced"
# What is being removed of it begins so.
REMOVED = f"{FOLDER}.old-"
# In the folder of the states, with the SHA-256 of run.json: they are of the training that wrote it.
FINISHED = "finished"
# Whatever there is of them; run.json is written last and read first.
FILES = (
    *("model.safetensors", "metrics.csv", "result.json", "evaluation.json"),
    *("evaluated.json", "predictions.csv", "environment.json", "run.json"),
)
FOLDERS = ("checkpoints", "network", "outputs")


def set_aside(run: Path) -> None:
    """Keep the results of a finished run, until `forget` or `put_back`.

    Raises:
        OSError: they cannot be linked or copied; they are where they were.
    """
    if not (run / "run.json").exists() or has_kept(run):
        return
    forget(run)
    making = run / f"{FOLDER}.new"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    for name in FILES:
        if (run / name).exists():
            link_or_copy(run / name, making / name)
    for name in FOLDERS:
        if (run / name).is_dir():
            # A program's outputs may have links that lead far away, or in a circle.
            shutil.copytree(run / name, making / name, True, copy_function=link_or_copy)
    making.rename(run / FOLDER)


def has_kept(run: Path) -> bool:
    """Whether there are results that can be put back. Without run.json there is only what could not
    be removed of earlier ones.
    """
    kept = run / FOLDER
    # No folder of ours is a link: it would lead to somebody else's files.
    return not kept.is_symlink() and (kept / "run.json").exists()


def put_back(run: Path) -> bool:
    """Put the results back, if the training that was to replace them has not finished.

    Returns:
        Whether there were any.
    """
    kept = run / FOLDER
    if not has_kept(run):
        return False
    if (run / "run.json").exists():
        # The other training has not begun; or it has finished, and was ended before `forget`.
        if (run / "run.json").read_bytes() != (kept / "run.json").read_bytes():
            forget(run)
        return False
    # Each is moved once: this may be interrupted, and done again.
    for name in FOLDERS:
        if (kept / name).is_dir():
            shutil.rmtree(run / name, ignore_errors=True)
            (kept / name).rename(run / name)
    for name in FILES:
        if (kept / name).exists():
            (kept / name).replace(run / name)
    forget(run)
    return True


def forget(run: Path) -> None:
    """The training that replaces them has finished."""
    kept = run / FOLDER
    for left in run.glob(f"{REMOVED}*"):
        shutil.rmtree(left, ignore_errors=True)
    if kept.is_symlink():
        kept.unlink()
    elif kept.exists():
        # A network file system keeps a folder as long as a file in it is open, and the name is
        # needed for the next ones.
        with suppress(OSError):
            gone = tempfile.mkdtemp("", REMOVED, run)
            kept.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """A hard link; a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
