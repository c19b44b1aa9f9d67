"""One image file to pixels: decoded strictly, upright, and resized and cropped about its centre."""

import os
import re
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from manynodes.base import errors
from manynodes.base.errors import one_line
from manynodes.base.reading import open_file

# Without those that start other programs, such as EPS.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Of memory for one image: 156 million pixels, or 104 million of a WebP, whose decoder keeps copies.
MOST_BYTES = 2_500_000_000
# That a pixel needs at most until the image has its size: with RGBA, or turned (measured).
PIXEL_BYTES, WEBP_PIXEL_BYTES = 16, 24
# Pixels of a side, as in a JPEG. To shrink a side needs memory by its length.
MOST_SIDE = 65_535
# Of a JPEG. Each costs the time of an image, also if it is empty; encoders write about ten.
MOST_SCANS = 100
# Of a JPEG, without those that stand among the pixels.
MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
START, END, SCAN, NO_LENGTH = b"\xd8", b"\xd9", b"\xda", b"\x01"
# Bytes that are searched for one at a time.
PIECE = 65_536
TILE_WIDTH, TILE_HEIGHT = 322, 323
PHOTOMETRIC, WHITE_IS_ZERO = 262, 0
BITS, BANDS, EXTRA_BANDS, NUMBERS = 258, 277, 338, 339
FLOATS = 3  # of NUMBERS
# Of EXTRA_BANDS: what is said to be transparency by those that mean it; others write 2 for the near
# infrared too, or nothing.
TRANSPARENCY = (1, 999)
# Of a mask, and of its edges.
MOST_TRANSPARENT = 16
# What images are told that are none for a screen.
ARRAYS = "use dataset.arrays"
# Pillow only warns at its own limit.
Image.MAX_IMAGE_PIXELS = None
ORIENTATION = 0x0112
# Of several pictures; a photograph in MPO has a preview beside it.
SEVERAL = ("GIF", "PNG", "TIFF", "WEBP")
# By the tag of EXIF: what turns the image upright. 5 to 8: the camera was turned by a quarter.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_90,
}  # fmt: skip
GREY = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L", "I;16N")


class Unreadable(Exception):
    """This file is no image that can be used; its text says why."""


class Picture(NamedTuple):
    """An image that has been decoded.

    Attributes:
        pixels: uint8 (h, w, channels).
        level: the highest of a grey image of 16 bits; None of another image.
        warnings: of its decoder.
    """

    pixels: np.ndarray
    level: int | None
    warnings: Sequence[str] = ()


def read_header(path: Path) -> tuple[tuple[int, int], bool]:
    """Height and width of an image as it is shown, and whether it is grey.

    Raises:
        Unreadable: it has no valid header, or is too large.
    """
    with warnings.catch_warnings(action="ignore"), opened(path) as image:
        width, height = image.size
        if orientation(image) >= 5:
            width, height = height, width
        return (height, width), image.mode in GREY


def orientation(image: Image.Image) -> int:
    """How it is to be turned, see TURNS; 1: not at all. Damaged metadata turn nothing."""
    if image.format == "TIFF":
        # Its decoder turns it, and its size is that after turning.
        return 1
    try:
        if image.format == "PNG" and metadata_follow(image):
            image.load()
        # Of the base class: a PNG's own decodes the whole image.
        found = Image.Image.getexif(image).get(ORIENTATION, 1)
    except Exception as error:
        # Raised is anything from SyntaxError to struct.error.
        warnings.warn(f"its metadata are damaged: {reason(error)}", stacklevel=2)
        return 1
    return found if found in TURNS else 1


def metadata_follow(image: Image.Image) -> bool:
    """Whether a PNG has metadata behind its pixels, where reading the header does not come."""
    file, pixels = image.fp, False  # type: ignore[attr-defined]
    if file is None:
        # A loaded image has all of them.
        return False
    before = file.tell()
    file.seek(8)
    try:
        while len(head := file.read(8)) == 8:
            size, kind = struct.unpack(">I4s", head)
            if pixels and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                return True
            # A file may go on behind its end: a gigabyte of zeros took three minutes.
            if kind == b"IEND" or not kind.isalpha():
                break
            pixels = pixels or kind == b"IDAT"
            file.seek(size + 4, os.SEEK_CUR)
    finally:
        file.seek(before)
    return False


def read_image(
    path: Path,
    size: tuple[int, int] | None,
    channels: int,
    tell: Callable[[str], None] | None = None,
    jpeg_scaling: bool = False,
) -> np.ndarray:
    """The pixels of an image file.

    Args:
        tell: gets what the decoder warns of; without it, this warns, and names the file.

    Other arguments, and what is raised: as of `decoded`.
    """
    picture = decoded(path, size, channels, jpeg_scaling)
    tell = tell or (lambda text: warnings.warn(f"{path}: {text}", stacklevel=3))
    for text in picture.warnings:
        tell(text)
    return picture.pixels


def decoded(
    path: Path, size: tuple[int, int] | None, channels: int, jpeg_scaling: bool = False
) -> Picture:
    """An image file, see `prepared`.

    Args:
        jpeg_scaling: decode a JPEG at a half, a quarter or an eighth of its size, if that is still
            twice `size`. To 224 x 224, a photograph of 12 megapixels takes two fifths of the time,
            and its pixels differ by 0.16 of 255 in the mean (measured).

    Raises:
        Unreadable: it is damaged, too large, or no image.
    """
    with recorded_warnings() as texts, opened(path) as image:
        file = image.fp  # type: ignore[attr-defined]
        # Not with the header, because this reads the whole file.
        if image.format in ("JPEG", "MPO") and scans(file) > MOST_SCANS:
            raise Unreadable(f"it has more than {MOST_SCANS} scans")
        if image.format in SEVERAL and has_several(image):
            warnings.warn("it has several pictures, of which the first is used", stacklevel=2)
        if jpeg_scaling and size and isinstance(image, JpegImageFile):
            height, width = size if orientation(image) < 5 else size[::-1]
            image.draft(None, (2 * width, 2 * height))
        picture = prepared(image, size, channels)
    return picture._replace(warnings=texts)


def has_several(image: Image.Image) -> bool:
    """Whether a file has more than one picture, the first of which is whole.

    Raises:
        Unreadable: what comes after it is damaged.
    """
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception as error:
        # A GIF's next picture is read, which raises anything from EOFError to struct.error.
        raise Unreadable(f"what follows its first picture is damaged: {reason(error)}") from None


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """A list that has at the end what was warned of, each text once, instead of showing it."""
    texts: list[str] = []
    with warnings.catch_warnings(action="always", record=True) as caught:
        yield texts
    said = [str(w.message) for w in caught if not issubclass(w.category, ResourceWarning)]
    texts += [one_line(text, 80) for text in dict.fromkeys(said)]


def prepared(image: Image.Image, size: tuple[int, int] | None, channels: int) -> Picture:
    """The first picture of an image; its warnings are left to who catches them.

    It is turned upright as its metadata (EXIF, XMP) say; what is transparent becomes white; 16 bits
    become 8; the shorter side is resized (bilinear, antialiased) and the longer one cropped about
    its centre.

    Args:
        size: height and width; None: as it is.
        channels: 1 (grey) or 3 (RGB).

    Raises:
        Unreadable: it is damaged.
    """
    level: int | None = None
    # Pillow opens PGM files of 16 bits as such of 32.
    deep = image.mode != "I" or image.format == "PPM"
    try:
        if image.format == "TIFF":
            refuse_other_bands(image)
        if (turn := orientation(image)) in TURNS:
            image = image.transpose(TURNS[turn])
        if image.mode == "F":
            raise Unreadable(f"its pixels are floating-point numbers; {ARRAYS}")
        if image.mode.startswith("I"):
            image, level = of_eight_bits(image, deep)
        elif image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
            image = image.convert("RGBA")
            if image.getchannel("A").getextrema() == (0, 0):
                warnings.warn("it is transparent everywhere, and becomes white", stacklevel=2)
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        mode = "L" if channels == 1 else "RGB"
        # Even to its own mode, converting copies.
        image = image if image.mode == mode else image.convert(mode)
        if size and image.size != (size[1], size[0]):
            image = ImageOps.fit(image, (size[1], size[0]), Image.Resampling.BILINEAR)
        return Picture(np.asarray(image).reshape(image.height, image.width, channels), level)
    except Unreadable:
        raise
    except Exception as error:
        # Decoders raise anything from OSError to SyntaxError and struct.error.
        raise Unreadable(reason(error)) from None


def refuse_other_bands(image: Image.Image) -> None:
    """Refuse a TIFF whose last band is hardly transparency, although it is read as that: all pixels
    would be mixed with white. Warn of bands that are not used.

    Raises:
        Unreadable: it has such a band.
    """
    tags = image.tag_v2  # type: ignore[attr-defined]
    names = image.getbands()
    said = tags.get(EXTRA_BANDS, (0,))[0] in TRANSPARENCY
    if names[-1] == "A" and not said:
        counts = image.getchannel("A").histogram()
        # Of transparency with soft edges, most pixels are all or nothing.
        between = 2 * sum(counts[1:255]) > sum(counts)
        if between and sum(count > 0 for count in counts) > MOST_TRANSPARENT:
            raise Unreadable(f"its last band may be no transparency; {ARRAYS}, or save it without")
    if (bands := int(tags.get(BANDS, 1))) > len(names):
        warnings.warn(
            f"of its {bands} bands, the first {len(names)} are used; for all, {ARRAYS}",
            stacklevel=2,
        )


def of_eight_bits(image: Image.Image, deep: bool) -> tuple[Image.Image, int | None]:
    """A grey image of 16 or 32 bits with 8, and its highest level as of `Picture`.

    Args:
        deep: its levels go up to 65,535, not to 255.

    Raises:
        Unreadable: its levels do not.
    """
    levels = np.asarray(image)
    tags = getattr(image, "tag_v2", {})
    if levels.min() < 0:
        raise Unreadable("its pixels are signed, some below 0; save them as unsigned, of 16 bits")
    if levels.max() > 65535:
        raise Unreadable("its pixels have more than 16 bits")
    if not deep and levels.max() > 255 and tags.get(BITS) == (16,):
        raise Unreadable("its pixels are signed; save them as unsigned")
    if not deep and levels.max() > 255:
        # No rule for one image alone would treat all images of a data set alike.
        raise Unreadable("its pixels have 32 bits; save them with 16")
    if deep and tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:
        # With 8 bits, Pillow does it.
        levels = 65535 - levels
    level = int(levels.max()) if deep else None
    if isinstance(clear := image.info.get("transparency"), int):
        levels = np.where(levels == clear, 65535 if deep else 255, levels)
    return Image.fromarray((levels >> 8 if deep else levels).astype(np.uint8)), level


def opened(path: Path) -> Image.Image:
    """An image of which only the header is read.

    Raises:
        Unreadable: it has no valid header, or is too large.
    """
    try:
        image = Image.open(open_file(path), formats=FORMATS)
        width, height = tile(image)
    except Exception as error:
        raise Unreadable(bands_of(path) or reason(error)) from None
    pixel = WEBP_PIXEL_BYTES if image.format == "WEBP" else PIXEL_BYTES
    if image.width * image.height * pixel > MOST_BYTES or max(image.size) > MOST_SIDE:
        raise Unreadable(f"{image.width} x {image.height} pixels are too many")
    if (image.width * image.height + width * height) * pixel > MOST_BYTES:
        raise Unreadable(f"its tiles of {width} x {height} pixels are too large")
    return image


def bands_of(path: Path) -> str:
    """What a TIFF has that Pillow cannot open for its bands; empty for any other file."""
    try:
        with open_file(path) as file:
            header = file.read(8)
            header += file.read(8) if header[2:3] == b"+" else b""
            tags = TiffImagePlugin.ImageFileDirectory_v2(header)
            file.seek(tags.next)
            tags.load(file)
        bands = int(tags.get(BANDS, 1))
        numbers = "floating-point numbers" if FLOATS in tags.get(NUMBERS, ()) else "whole numbers"
    except Exception:
        # As of a decoder. It is no TIFF, or a damaged one.
        return ""
    return f"{bands} bands of {numbers}; {ARRAYS}" if bands > 1 else ""


def tile(image: Image.Image) -> tuple[int, int]:
    """Width and height of a TIFF's tiles, which may be larger than the image; 0 without."""
    tags = getattr(image, "tag_v2", {})
    return int(tags.get(TILE_WIDTH, 0)), int(tags.get(TILE_HEIGHT, 0))


def scans(file: BinaryIO) -> int:
    """The number of scans of a JPEG's first image, as far as MOST_SCANS is concerned."""
    place = at = count = 0
    piece = b""
    while count <= MOST_SCANS:
        found = MARKER.search(piece, at)
        if found is None or found.end() + 2 > len(piece):
            # The last byte may be the first one of a marker.
            place += found.start() if found else max(at, len(piece) - 1, 0)
            file.seek(place)
            piece, at = file.read(PIECE), 0
            if len(piece) < 4:
                break
            continue
        at = found.end()
        if found[1] == END:
            break
        count += found[1] == SCAN
        if found[1] not in (START, NO_LENGTH):
            at += int.from_bytes(piece[at : at + 2])
    return count


def reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    return one_line(errors.reason(error) or type(error).__name__, 80)
