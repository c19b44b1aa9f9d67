"""One image file to pixels: decoded strictly, upright, and resized and cropped about its centre."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ddp.base.errors import one_line
from ddp.base.reading import open_file

# Without those that start other programs, such as EPS.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# More than any camera takes; decoded, this needs 600 MB.
MOST_PIXELS = 150_000_000
# Pillow only warns at its own limit.
Image.MAX_IMAGE_PIXELS = None
ORIENTATION = 0x0112
GREY = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L", "I;16N")


class Unreadable(Exception):
    """This file is no image that can be used; its text says why."""


def read_header(path: Path) -> tuple[tuple[int, int], bool]:
    """Height and width of an image as it is shown, and whether it is grey.

    Raises:
        Unreadable: it has no valid header, or is too large.
    """
    with opened(path) as image:
        width, height = image.size
        try:
            # 5 to 8: the camera was turned by a quarter.
            if orientation(image) in (5, 6, 7, 8):
                width, height = height, width
        except Exception as error:
            raise Unreadable(reason(error)) from None
        return (height, width), image.mode in GREY


def orientation(image: Image.Image) -> int:
    """The EXIF tag of an image of which only the header is read."""
    if image.format == "TIFF":
        return int(image.getexif().get(ORIENTATION, 1))
    # Not getexif, which decodes the whole of a PNG.
    exif = Image.Exif()
    exif.load(image.info.get("exif", b""))
    return int(exif.get(ORIENTATION, 1))


def read_image(path: Path, size: tuple[int, int] | None, channels: int) -> np.ndarray:
    """The pixels of an image file, see `prepared`.

    Raises:
        Unreadable: it is damaged, too large, or no image.
    """
    with opened(path) as image:
        return prepared(image, size, channels)


def prepared(image: Image.Image, size: tuple[int, int] | None, channels: int) -> np.ndarray:
    """The first picture of an image as pixels.

    It is turned upright as its EXIF data say; what is transparent becomes white; 16 bits become 8;
    the shorter side is resized (bilinear, antialiased) and the longer one cropped about its centre.

    Args:
        size: height and width; None: as it is.
        channels: 1 (grey) or 3 (RGB).

    Returns:
        uint8 (h, w, channels).

    Raises:
        Unreadable: it is damaged.
    """
    # Pillow opens PGM files of 16 bits as such of 32.
    deep = image.mode != "I" or image.format == "PPM"
    try:
        image = ImageOps.exif_transpose(image)
        if image.mode == "F":
            raise Unreadable("its pixels are floating-point numbers")
        if image.mode.startswith("I"):
            levels = np.asarray(image)
            if levels.min() < 0 or levels.max() > 65535:
                raise Unreadable("its pixels have more than 16 bits")
            if not deep and levels.max() > 255:
                # No rule for one image alone would treat all images of a data set alike.
                raise Unreadable("its pixels have 32 bits; save them with 16")
            image = Image.fromarray((levels >> 8 if deep else levels).astype(np.uint8))
        elif image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("L" if channels == 1 else "RGB")
        if size and image.size != (size[1], size[0]):
            image = ImageOps.fit(image, (size[1], size[0]), Image.Resampling.BILINEAR)
        return np.asarray(image).reshape(image.height, image.width, channels)
    except Unreadable:
        raise
    except Exception as error:
        # Decoders raise anything from OSError to SyntaxError and struct.error.
        raise Unreadable(reason(error)) from None


def opened(path: Path) -> Image.Image:
    """An image of which only the header is read.

    Raises:
        Unreadable: it has no valid header, or is too large.
    """
    with warnings.catch_warnings(action="ignore"):
        try:
            image = Image.open(open_file(path), formats=FORMATS)
        except Exception as error:
            raise Unreadable(reason(error)) from None
    if image.width * image.height > MOST_PIXELS:
        raise Unreadable(f"{image.width} x {image.height} pixels are too many")
    return image


def reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    text: Any = getattr(error, "strerror", None) or error
    return one_line(str(text) or type(error).__name__, 80)
