"""The import of a user's own images, whatever form they have."""

from collections.abc import Callable
from pathlib import Path

from manynodes.data.user.arrays import from_arrays
from manynodes.data.user.declaration import UserData
from manynodes.data.user.folder_of_images import from_folder
from manynodes.data.user.function import from_python
from manynodes.data.user.writing import Imported


def import_user_data(user_data: UserData, folder: Path, tell: Callable[[str], None]) -> Imported:
    """Write the arrays `{train,test}_{images,labels}.npy` of a user's data set.

    Args:
        folder: to write; nothing else writes there.
        tell: gets a line for each thing that the user should know.

    Raises:
        Refusal: the data cannot be used.
    """
    if user_data.kind == "folder":
        found = from_folder(user_data, folder, tell)
    elif user_data.kind == "arrays":
        found = from_arrays(user_data, folder, tell)
    else:
        found = from_python(user_data, folder, tell)
    equal = found.equal
    if equal.shared:
        tell(
            f"warning: {equal.shared:,} of the {found.images['test']:,} test images are in the "
            "train split too; accuracy on them says nothing about new images"
        )
    if equal.copies:
        others = equal.of_other_classes
        grouped = user_data.group or "group" in user_data.columns
        tell(
            f"warning: {equal.copies:,} of the {found.images['train']:,} train images are "
            f"copies of others{f', {others:,} of them in another class' if others else ''}"
            + ("" if grouped else "; validation and folds have some on both sides")
        )
    return found
