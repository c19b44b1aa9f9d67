"""The import of a user's own images, whatever form they have."""

from collections.abc import Callable
from pathlib import Path

from manynodes.data.own.arrays import from_arrays
from manynodes.data.own.declaration import Own
from manynodes.data.own.folder_of_images import from_folder
from manynodes.data.own.function import from_python
from manynodes.data.own.writing import Imported


def import_own(own: Own, folder: Path, tell: Callable[[str], None]) -> Imported:
    """Write the arrays `{train,test}_{images,labels}.npy` of a user's data set.

    Args:
        folder: to write; nothing else writes there.
        tell: gets a line for each thing that the user should know.

    Raises:
        Refusal: the data cannot be used.
    """
    if own.kind == "folder":
        found = from_folder(own, folder, tell)
    elif own.kind == "arrays":
        found = from_arrays(own, folder)
    else:
        found = from_python(own, folder, tell)
    if found.shared:
        tell(
            f"warning: {found.shared:,} of the {found.images['test']:,} test images are in the "
            "train split too; accuracy on them says nothing about new images"
        )
    return found
