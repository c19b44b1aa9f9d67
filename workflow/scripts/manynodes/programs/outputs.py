"""What the user's program has left when it is complete: checked, and put where the rules look."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from manynodes.base.errors import Refusal
from manynodes.checkpointing.replaced import link_or_copy
from manynodes.programs.folders import UNFINISHED, Folders


def publish(folders: Folders, outputs: Sequence[str]) -> None:
    """Put the declared outputs into `outputs/`, all or none.

    They share their bytes with those in the results folder where the file system can.

    Raises:
        Refusal: one is missing.
    """
    for path in outputs:
        if (folders.work / path).is_dir() and not path.endswith("/"):
            raise Refusal(f"{folders.work / path} is a folder; write {path}/ in outputs")
        if (folders.work / path).is_file() and path.endswith("/"):
            raise Refusal(f"{folders.work / path} is a file; write {path.rstrip('/')} in outputs")
    missing = [path for path in outputs if not (folders.work / path).exists()]
    if missing:
        raise Refusal(
            f"{missing[0]} is not in {folders.work}, though the program ended with 0; write it "
            "there (LAUNCH_RESULTS), or correct outputs"
        )
    shutil.rmtree(folders.outputs, ignore_errors=True)
    folders.outputs.mkdir(parents=True, exist_ok=True)
    for path in outputs:
        source, target = folders.work / path, folders.outputs / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            copy_folder(source, target, (folders.work.resolve(), folders.saved.resolve()))
        else:
            # A link such as latest.pt would lead nowhere from the other folder.
            link_or_copy(source.resolve(), target)


def copy_folder(
    source: Path, target: Path, written: Sequence[Path], seen: Sequence[Path] = ()
) -> None:
    """Copy a folder, without files that `launched.save` has not written to their end. Links in it
    stay links, which may lead into a circle or nowhere; a link to a file outside, or to another
    folder that the program has written, becomes what it leads to: from the other folder it would
    lead nowhere, or to what the next training writes there.

    Args:
        written: the folders that the program writes to, `work` and `saved`, resolved.
        seen: the folders in which a link has led here.
    """
    inside = source.resolve()
    seen = (*seen, inside)
    for parent, folders, names in os.walk(source):
        folders[:] = [name for name in folders if not name.endswith(UNFINISHED)]
        there = target / Path(parent).relative_to(source)
        there.mkdir(parents=True, exist_ok=True)
        for name in (*folders, *names):
            path = Path(parent, name)
            outside = path.is_file() and not path.resolve().is_relative_to(inside)
            if path.is_symlink() and path.is_dir() and is_another(path.resolve(), written, seen):
                copy_folder(path.resolve(), there / name, written, seen)
            elif path.is_symlink() and not outside:
                lead = path.readlink()
                if path.exists() and path.resolve().is_relative_to(inside):
                    # An absolute one would lead to the folder that the next training empties.
                    lead = Path(os.path.relpath(path.resolve(), path.parent.resolve()))
                (there / name).symlink_to(lead)
            elif path.is_file():
                link_or_copy(path.resolve(), there / name)


def is_another(folder: Path, written: Sequence[Path], seen: Sequence[Path]) -> bool:
    """Whether a folder lies in one of `written` beside others, neither above nor below any."""
    near = any(each.is_relative_to(folder) or folder.is_relative_to(each) for each in seen)
    return not near and any(folder.is_relative_to(each) for each in written)
