"""The import of a user's own images, whatever form they have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from manynodes.data.user.arrays import from_arrays
from manynodes.data.user.declaration import UserData
from manynodes.data.user.folder_of_images import from_folder
from manynodes.data.user.function import from_python


def import_user_data(
    user_data: UserData, folder: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Write the arrays `{train,test}_{images,labels}.npy` of a user's data set; returns what their
    manifest says about them.

    Args:
        folder: to write; nothing else writes there.
        tell: gets a line for each thing that the user should know.

    Raises:
        Refusal: the data cannot be used.
    """
    of_kind = {"folder": from_folder, "arrays": from_arrays, "python": from_python}
    return of_kind[user_data.kind](user_data, folder, tell)
