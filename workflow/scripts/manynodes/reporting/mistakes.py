"""The test images that a run took for another class and was surest of, as small pictures."""

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pandas as pd
from PIL import Image

from manynodes.base.reading import is_file

MOST = 24  # pictures of a page
SIDE = 96  # pixels of a picture's longer side, at most


@dataclass(frozen=True)
class Mistake:
    """A test image whose predicted class is not its true one.

    Attributes:
        file: its path in the user's folder; of other images, its row.
        probability, true_probability: of the predicted and of the true class.
        picture: a PNG file.
        address: of its file, for a link of the page; empty if it is not known.
    """

    file: str
    true_name: str
    predicted_name: str
    probability: float
    true_probability: float
    picture: bytes
    address: str = ""


def surest(
    table: pd.DataFrame, images: np.ndarray, address: Callable[[str], str] = lambda _: ""
) -> list[Mistake]:
    """The mistakes with the highest probability, in descending order.

    Args:
        table: of `predictions.read`.
        images: the test images (n, h, w, c), uint8 or float32.
        address: of a file, see `address_of`.
    """
    wrong = table[table["true_class"] != table["predicted_class"]]
    chosen = wrong.sort_values("probability", ascending=False, kind="stable")[:MOST]
    return [
        Mistake(
            each["file"] or f"test image {each['row']}",
            each["true_name"],
            each["predicted_name"],
            each["probability"],
            each["true_probability"],
            picture(images[each["row"]]),
            address(each["file"]),
        )
        for each in chosen.to_dict("records")
    ]


def address_of(file: str, root: Path, page: Path) -> str:
    """The address of an image, relative to a page: safe in HTML, whatever its name is.

    Args:
        file: of predictions.csv: its path in the user's folder.
        root: that folder.
        page: the folder of the page.

    Returns:
        Empty if there is no such file in the folder, or a table may show its name changed.
    """
    parts = Path(file).parts
    outside = Path(file).is_absolute() or ".." in parts
    if not file or outside or "\\" in file or file.startswith("'") or not is_file(root / file):
        return ""
    return quote(os.path.relpath(root / file, page))


def picture(image: np.ndarray) -> bytes:
    """An image as a PNG file, shrunk to SIDE.

    Args:
        image: (h, w, c). Of float32, the lowest value is black and the highest white; if there are
            neither 1 nor 3 channels, the first one is shown.
    """
    pixels = image if image.shape[2] == 3 else image[..., 0]
    if pixels.dtype != np.uint8:
        low, high = float(pixels.min()), float(pixels.max())
        pixels = ((pixels - low) * (255 / max(high - low, 1e-12))).round().astype(np.uint8)
    shown = Image.fromarray(np.ascontiguousarray(pixels))
    shown.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    file = io.BytesIO()
    shown.save(file, "PNG", optimize=True)
    return file.getvalue()
