"""The import of a user's own images, by the program, and what it refuses."""

import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import unicodedata
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin, TiffImagePlugin

import predict
from classifier.models import weights
from classifier.models.classifier import build
from manynodes.base.errors import Refusal
from manynodes.data.folder import DataFolder
from manynodes.data.user import pictures
from manynodes.data.user.arrays import from_arrays
from manynodes.data.user.declaration import UserData
from manynodes.data.user.folder_of_images import list_images, write_extra
from manynodes.data.user.pictures import Unreadable, read_header, read_image, scans
from manynodes.data.user.writing import write_labels
from manynodes.reporting import page
from pictures import CLASSES, arrays, write_folder
from programs import SCRIPTS, import_own, imported, program, python, refused_import


def user_data(path: Path, kind: str = "folder", **keys: Any) -> UserData:
    return UserData("shapes", kind, str(path), **keys)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("shapes") / "images", train=12, test=4)


def test_folder_arrays_and_function_give_the_same_arrays(shapes: Path, tmp_path: Path) -> None:
    content = arrays(train=12, test=4)
    np.savez_compressed(tmp_path / "shapes.npz", **content)
    (tmp_path / "load.py").write_text(
        "import numpy as np\n"
        f"CLASSES = {list(CLASSES)}\n"
        "def load(split):\n"
        f"    found = np.load({str(tmp_path / 'shapes.npz')!r})\n"
        "    yield from zip(found[f'{split}_images'], found[f'{split}_labels'])\n"
    )
    folders = [
        imported(user_data(shapes), tmp_path / "folder"),
        imported(user_data(tmp_path / "shapes.npz", "arrays"), tmp_path / "arrays"),
        imported(user_data(tmp_path / "load.py", "python", function="load"), tmp_path / "python"),
    ]
    wanted = sorted(zip(content["test_labels"], map(bytes, content["test_images"]), strict=True))
    for folder in folders:
        assert folder.image_shape == (48, 64, 1)
        assert folder.manifest["images"] == {"train": 36, "test": 12}
        images, labels = folder.split("test")
        assert sorted(zip(labels, map(bytes, images), strict=True)) == wanted
    assert folders[1].manifest["content_sha256"] == folders[2].manifest["content_sha256"]
    # A folder's images are mixed, so that neighbours are of many classes.
    assert len(set(folders[0].split("train")[1][:6].tolist())) > 1
    assert folders[0].class_names == folders[2].class_names == list(CLASSES)
    assert folders[1].class_names == ["0", "1", "2"]
    # What was asked for is a part of the hash.
    assert len({folder.sha256 for folder in folders}) == 3


def test_the_same_folder_gives_the_same_bytes_again(shapes: Path, tmp_path: Path) -> None:
    one, other = (imported(user_data(shapes, image_size=(20, 30)), tmp_path / n) for n in "ab")
    assert one.manifest == other.manifest
    assert "in_train" not in one.manifest
    assert one.image_shape == (20, 30, 1)


def test_one_folder_of_classes_is_split_by_a_seed(shapes: Path, tmp_path: Path) -> None:
    root = shapes / "train"
    one, same, other = (
        imported(user_data(root, test_fraction=0.25, split_seed=seed), tmp_path / name)
        for name, seed in (("one", 0), ("same", 0), ("other", 1))
    )
    assert one.manifest["images"] == {"train": 27, "test": 9}
    assert np.bincount(one.split("test")[1]).tolist() == [3, 3, 3]
    assert one.sha256 == same.sha256 != other.sha256


def test_images_are_upright_opaque_and_cropped_about_their_centre(tmp_path: Path) -> None:
    left_red = np.zeros((40, 80, 3), np.uint8)
    left_red[:, :40, 0] = 255
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was turned: the picture is shown rotated by 90 degrees
    Image.fromarray(left_red).save(tmp_path / "turned.png", exif=turned)
    upright = read_image(tmp_path / "turned.png", None, 3)
    assert upright.shape == (80, 40, 3)
    assert upright[0, 0].tolist() == [255, 0, 0]
    assert upright[-1, 0].tolist() == [0, 0, 0]
    Image.fromarray(np.zeros((8, 8, 4), np.uint8)).save(tmp_path / "clear.png")
    assert read_image(tmp_path / "clear.png", None, 3).min() == 255
    Image.fromarray(np.full((8, 8), 0x1234, np.uint16)).save(tmp_path / "deep.png")
    assert read_image(tmp_path / "deep.png", None, 1).max() == 0x12
    Image.fromarray(np.full((8, 8), 0x1234, np.uint16)).save(
        tmp_path / "hole.png", transparency=0x1234
    )
    assert read_image(tmp_path / "hole.png", None, 1).min() == 255
    planes = [Image.new("L", (8, 8), level) for level in (10, 20)]
    for name in ("stack.tif", "stack.gif", "stack.png", "stack.webp"):
        planes[0].save(tmp_path / name, save_all=True, append_images=planes[1:], lossless=True)
        said: list[str] = []
        assert read_image(tmp_path / name, None, 1, said.append).max() == 10
        assert said == ["it has several pictures, of which the first is used"]
    Image.new("L", (8, 8)).save(tmp_path / "more.gif")
    (tmp_path / "more.gif").write_bytes((tmp_path / "more.gif").read_bytes()[:-1] + b",")
    with pytest.raises(Unreadable, match="what follows its first picture is damaged"):
        read_image(tmp_path / "more.gif", None, 1)
    for bits in (8, 16):
        # Height, width, bits, uncompressed, white is zero, where, one channel, rows, bytes.
        tags = {256: 8, 257: 8, 258: bits, 259: 1, 262: 0, 273: 122, 277: 1, 278: 8, 279: 8 * bits}
        ifd = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
        head = b"II*\0" + struct.pack("<IH", 8, len(tags))
        (tmp_path / "white.tif").write_bytes(head + ifd + bytes(4) + bytes([64]) * 8 * bits)
        assert read_image(tmp_path / "white.tif", None, 1).max() == 191
    said = []
    Image.new("RGBA", (8, 8), (9, 9, 9, 0)).save(tmp_path / "clear.png")
    assert read_image(tmp_path / "clear.png", None, 3, said.append).min() == 255
    assert said == ["it is transparent everywhere, and becomes white"]
    Image.fromarray(np.full((8, 8), 200, np.int32)).save(tmp_path / "wide.tif")
    assert read_image(tmp_path / "wide.tif", None, 1).max() == 200
    middle = read_image(tmp_path / "turned.png", (20, 20), 3)
    assert middle.shape == (20, 20, 3)
    assert middle[0, 0, 0] == 255
    assert middle[-1, 0, 0] == 0


@pytest.mark.parametrize(("level", "dark"), [(4095, True), (2**15, False)])
def test_images_of_16_bits_that_use_only_12_are_told(tmp_path, level: int, dark: bool) -> None:
    ramp = np.linspace(0, level, 64).reshape(8, 8).astype(np.uint16)
    for split, name, number in itertools.product(("train", "test"), "ab", range(2)):
        place = tmp_path / "images" / split / name
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(ramp // (number + 1)).save(place / f"{number}.png")
    (tmp_path / "load.py").write_text(
        "from pathlib import Path\n"
        "from PIL import Image\n"
        "def load(split):\n"
        f"    for path in sorted(Path({str(tmp_path)!r}, 'images', split).glob('*/*.png')):\n"
        "        yield Image.open(path), 'ab'.index(path.parent.name)\n"
    )
    line = (
        "fetch: warning: 8 grey images of 16 bits are dark: their levels go up to 4,095 of 65,535; "
        "scale them to 16 bits\n"
    )
    for kind, path in (("folder", "images"), ("python", "load.py:load")):
        path, _, function = path.partition(":")
        done = import_own(user_data(tmp_path / path, kind, function=function), tmp_path / kind)
        assert done.returncode == 0, done.stderr
        assert (line in done.stderr) == dark
        assert ("are dark" in done.stderr) == dark
    images = DataFolder.read(tmp_path / "folder").split("train")[0]
    assert images.max() == level >> 8


def test_damaged_images_are_named_or_left_out(shapes: Path, tmp_path: Path) -> None:
    copy = tmp_path / "images"
    subprocess.run(["cp", "-r", shapes, copy], check=True)
    (copy / "train/circle/000.png").write_bytes(b"not an image")
    whole = (copy / "train/cross/001.png").read_bytes()
    (copy / "train/cross/001.png").write_bytes(whole[: len(whole) // 2])
    (copy / "test/stripes/000.png").unlink()
    os.mkfifo(copy / "test/stripes/000.png")
    (copy / "train/circle/notes.txt").write_text("x")
    line = refused_import(user_data(copy), tmp_path / "data")
    # The headers are read first, so a truncated image is found later.
    assert line == (
        "2 images are unreadable: train/circle/000.png (not an image), test/stripes/000.png (is "
        "not a regular file); remove them, or set dataset.skip_unreadable: true"
    )
    folder = imported(user_data(copy, skip_unreadable=True), tmp_path / "data")
    assert folder.manifest["images"] == {"train": 34, "test": 11}
    assert sorted(folder.manifest["skipped"]) == [
        "test/stripes/000.png", "train/circle/000.png", "train/cross/001.png",
    ]  # fmt: skip
    # What was left out leaves no hole.
    images, labels = folder.split("train")
    assert np.bincount(labels).tolist() == [11, 11, 12]
    assert all(image.max() > 0 for image in images)


def test_a_bomb_is_refused_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    Image.new("1", (20_000, 20_000)).save(path)
    with pytest.raises(Unreadable, match="20000 x 20000 pixels are too many"):
        read_image(path, (8, 8), 3)


def test_a_program_in_an_image_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")
    with pytest.raises(Unreadable, match="not an image"):
        read_image(path, None, 3)


def test_equal_images_in_train_and_test_are_counted(shapes: Path, tmp_path: Path) -> None:
    copy = tmp_path / "images"
    subprocess.run(["cp", "-r", shapes, copy], check=True)
    for number in (0, 1):
        os.link(copy / f"train/cross/{number:03}.png", copy / f"test/cross/again{number}.png")
    done = import_own(user_data(copy), tmp_path / "data")
    assert done.returncode == 0
    assert "fetch: warning: 2 of the 14 test images are in the train split too" in done.stderr
    manifest = DataFolder.read(tmp_path / "data").manifest
    assert manifest["in_train"] == {"same": 2, "similar": 0}
    assert "copies" not in manifest
    os.link(copy / "train/cross/002.png", copy / "train/cross/again.png")
    os.link(copy / "train/cross/002.png", copy / "train/circle/again.png")
    done = import_own(user_data(copy), tmp_path / "data")
    manifest = DataFolder.read(tmp_path / "data").manifest
    line = f"fetch: warning: 2 of the {manifest['images']['train']} train images are copies of "
    assert f"{line}others, " in done.stderr
    assert "others, 1 of them in another class; validation and folds have" in done.stderr
    assert manifest["copies"] == 2
    assert page.in_train(manifest, "train").startswith(f"Of the {manifest['images']['train']} im")


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Two classes of ten images of train and four of test, all different."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 4)):
        for name in ("cat", "dog"):
            folder = tmp_path / "photographs" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                blurred = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8))
                blurred.resize((160, 120), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    return tmp_path / "photographs"


def test_the_same_photographs_in_another_size_or_quality_are_counted(
    photographs: Path, tmp_path: Path
) -> None:
    for number in (0, 1):
        with Image.open(photographs / f"train/cat/{number}.png") as image:
            image.resize((80, 60)).save(photographs / f"test/cat/small{number}.png")
            image.save(photographs / f"test/cat/rough{number}.jpg", quality=40)
    done = import_own(user_data(photographs, image_size=(96, 96)), tmp_path / "data")
    line = (
        r"fetch: warning: 4 of the 12 test images are almost the same as one of train, such as "
        r"test/cat/(small|rough)(\d)\.\w+ and train/cat/\2\.png; "
    )
    assert re.search(line, done.stderr), done.stderr


def test_gradients_and_small_pictures_are_not_taken_for_copies(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ramp = np.linspace(0, 255, 96)
    for split in ("train", "test"):
        for name, ground in (("across", ramp[None]), ("down", ramp[:, None])):
            (tmp_path / "ramps" / split / name).mkdir(parents=True)
            for number in range(4):
                image = np.clip(ground + rng.normal(0, 3, (96, 96)), 0, 255).astype(np.uint8)
                Image.fromarray(image).save(tmp_path / "ramps" / split / name / f"{number}.png")
    for images in (tmp_path / "ramps", write_folder(tmp_path / "shapes", 12, 4, (96, 96))):
        done = import_own(user_data(images), tmp_path / "data")
        assert done.returncode == 0, done.stderr
        assert "almost the same" not in done.stderr


def test_what_systems_put_among_images_is_left_out(photographs: Path, tmp_path: Path) -> None:
    before = imported(user_data(photographs, image_size=(96, 96)), tmp_path / "before")
    image = photographs / "train/cat/0.png"
    for folder in (
        "train/cat/@eaDir", "train/dog/@eaDir/deep", "test/cat/Thumbs", "train/#recycle",
        "test/@Recycle", "$RECYCLE.BIN", "__MACOSX", "lost+found", "train/cat/.thumbnails",
        "train/@tmp", "System Volume Information",
    ):  # fmt: skip
        (photographs / folder).mkdir(parents=True)
        shutil.copy(image, photographs / folder)
    shutil.copy(image, photographs / "train/dog/._0.png")
    done = import_own(user_data(photographs, image_size=(96, 96)), tmp_path / "data")
    after = DataFolder.read(tmp_path / "data")
    assert after.sha256 == before.sha256
    assert after.manifest["class_names"] == ["cat", "dog"]
    line = (
        "fetch: warning: 12 hidden names, and folders of previews or deleted files, were left out: "
    )
    assert line in done.stderr


@pytest.mark.parametrize(("change", "line"), [
    ("mkdir train/Thumbs", "Thumbs may be a class or previews; rename it"),
    ("mv train Train; mv test Test", "is no class; rename it to "),
    ("mv train training; mv test testing", "ing is no class; rename it to t"),
    ("rm -r test; mv train/* .; rmdir train; mkdir -p cat/train cat/test; mv cat/0.png cat/train; "
     "mv cat/1.png cat/test", "/cat has train/ and test/ of its own; move them above the"),
    ("ln -s gone train/bird", "/train/bird is a link to nothing; repair or remove it"),
    ("ln -s itself train/itself", "/train/itself is a link to nothing; repair or remove it"),
    ("ln -s gone train/cat/more", "/train/cat/more is a link to nothing; repair or remove it"),
])  # fmt: skip
def test_a_class_is_not_lost_or_made_by_its_name(
    photographs: Path, tmp_path: Path, change: str, line: str
) -> None:
    root = broken(photographs, change)
    fraction = None if (root / "train").is_dir() else 0.2
    found = refused_import(
        user_data(root, image_size=(96, 96), test_fraction=fraction), tmp_path / "data"
    )
    assert line in found


def test_links_lead_to_images_but_not_up(photographs: Path, tmp_path: Path) -> None:
    before = imported(user_data(photographs, image_size=(96, 96)), tmp_path / "before")
    (photographs / "train/cat/root").symlink_to(photographs)
    (photographs / "train/cat/above").symlink_to(tmp_path)
    (photographs / "train/dog/all").symlink_to("..")
    (photographs / "test/dog/copies").symlink_to("../../train/dog")
    done = import_own(user_data(photographs, image_size=(96, 96)), tmp_path / "data")
    assert DataFolder.read(tmp_path / "data").sha256 == before.sha256
    assert "under another name: train/cat/above, train/cat/root, train/dog/all, …" in done.stderr


def test_a_folder_with_two_names_counts_once(photographs: Path, tmp_path: Path) -> None:
    images = user_data(photographs, image_size=(96, 96))
    (tmp_path / "more").mkdir()
    shutil.copy(photographs / "train/cat/0.png", tmp_path / "more")
    (photographs / "train/cat/a").symlink_to(tmp_path / "more")
    before = imported(images, tmp_path / "before")
    (photographs / "train/cat/b").symlink_to(tmp_path / "more")
    # Sorted before both: a class has its own folder, whatever leads there.
    (photographs / "train/cat/all").symlink_to("../dog")
    done = import_own(images, tmp_path / "data")
    assert DataFolder.read(tmp_path / "data").sha256 == before.sha256
    assert before.manifest["images"] == {"train": 21, "test": 8}
    assert "are there under another name: train/cat/all, train/cat/b" in done.stderr


def test_images_that_are_in_no_class_are_told(photographs: Path, tmp_path: Path) -> None:
    (photographs / "test").rename(photographs / "val")
    subprocess.run(["cp", "-r", photographs / "val", photographs / "test"], check=True)
    shutil.copy(photographs / "train/cat/0.png", photographs / "train/beside.png")
    done = import_own(user_data(photographs, image_size=(96, 96)), tmp_path / "data")
    assert f"warning: 1 images in {photographs}/train itself are in no class" in done.stderr
    assert "warning: not used: val/ (8 images) in " in done.stderr


def test_a_class_is_one_in_either_form_of_unicode(photographs: Path, tmp_path: Path) -> None:
    for form, split in (("NFC", "train"), ("NFD", "test")):
        (photographs / split / "cat").rename(
            photographs / split / unicodedata.normalize(form, "größe")
        )
    folder = imported(user_data(photographs, image_size=(96, 96)), tmp_path / "data")
    assert folder.manifest["class_names"] == ["dog", "größe"]
    (photographs / "train" / unicodedata.normalize("NFD", "größe")).mkdir()
    line = refused_import(user_data(photographs, image_size=(96, 96)), tmp_path / "other")
    assert re.search('has two folders "gr.*e", in different forms of Unicode; merge them', line)


def test_metadata_turn_an_image_wherever_they_are(photographs: Path, tmp_path: Path) -> None:
    """In EXIF, in XMP, in ImageMagick's profile, and behind the pixels."""
    exif = Image.Exif()
    exif[0x0112] = 6
    hexadecimal = exif.tobytes().hex()
    profile = f"\nexif\n{len(hexadecimal) // 2:8}\n{hexadecimal}\n"
    xmp = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><r tiff:Orientation="6"/></x:xmpmeta>'
    texts = {"raw.png": ("Raw profile type exif", profile), "xmp.png": ("XML:com.adobe.xmp", xmp)}
    with Image.open(photographs / "train/cat/0.png") as image:
        for name, (key, text) in texts.items():
            about = PngImagePlugin.PngInfo()
            (about.add_itxt if key.startswith("XML") else about.add_text)(key, text)
            image.save(tmp_path / name, pnginfo=about)
        image.save(tmp_path / "xmp.jpg", xmp=xmp.encode())
        image.save(tmp_path / "exif.png", exif=exif)
    content = (tmp_path / "exif.png").read_bytes()
    start = content.index(b"eXIf") - 4
    chunk = content[start : start + 12 + struct.unpack(">I", content[start : start + 4])[0]]
    end = content.index(b"IEND") - 4
    late = content[:start] + content[start + len(chunk) : end] + chunk + content[end:]
    (tmp_path / "late.png").write_bytes(late)
    for name in ("exif.png", "raw.png", "xmp.png", "xmp.jpg", "late.png"):
        assert read_header(tmp_path / name)[0] == (160, 120), name
        assert read_image(tmp_path / name, None, 3).shape == (160, 120, 3), name


def test_what_a_decoder_warns_of_names_the_files(photographs: Path, tmp_path: Path) -> None:
    """Damaged EXIF data make no image unreadable."""
    cut = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0"
    for number, exif in enumerate((cut, cut, b"Exif\0\0damaged, and long")):
        with Image.open(photographs / f"train/cat/{number}.png") as image:
            image.save(photographs / f"train/cat/x{number}.jpg", exif=exif)
    done = import_own(user_data(photographs, image_size=(96, 96)), tmp_path / "data")
    assert done.returncode == 0, done.stderr
    line = r"fetch: warning: 2 images: Corrupt EXIF data.*: train/cat/x[01]\.jpg, train/cat/x[01]"
    assert re.search(line, done.stderr), done.stderr
    assert "UserWarning" not in done.stderr


def test_what_libtiff_and_pillow_s_log_say_names_the_files(
    photographs: Path, tmp_path: Path
) -> None:
    """Also if the numbers in it differ. What they say of an unreadable image is in its refusal."""
    for number, turn in enumerate((51, 52)):
        with Image.open(photographs / f"train/cat/{number}.png") as image:
            path = photographs / f"train/cat/x{number}.tif"
            image.save(path, tiffinfo={0x0112: 1}, compression="tiff_lzw")
        path.write_bytes(with_tag(path.read_bytes(), 0x0112, turn))
    images = user_data(photographs, image_size=(96, 96))
    done = import_own(images, tmp_path / "data")
    assert done.returncode == 0, done.stderr
    line = r"fetch: warning: 2 images: _TIFFVSetField: .*: train/cat/x\d\.tif, train/cat/x\d\.tif"
    assert re.search(line, done.stderr), done.stderr
    assert all(line.startswith("fetch: ") for line in done.stderr.splitlines()), done.stderr
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2].ljust(len(content), b"\xff"))
    (photographs / "train/cat/deep.tif").write_bytes(with_tag(content, 277, 999))
    done = import_own(images, tmp_path / "other")
    assert done.returncode == 1
    assert "2 images are unreadable: " in done.stderr
    assert all(line.startswith("fetch: ") for line in done.stderr.splitlines()), done.stderr


def with_tag(tiff: bytes, tag: int, value: int) -> bytes:
    """A TIFF with another number in one of its tags."""
    entry = struct.pack("<HHI", tag, 3, 1)
    start = tiff.index(entry) + len(entry)
    return tiff[:start] + struct.pack("<H", value) + tiff[start + 2 :]


@pytest.mark.parametrize(("name", "options"), [
    ("x.jpg", {"subsampling": 0}), ("x.png", {}), ("x.webp", {"lossless": True}), ("x.tif", {}),
    ("x.tif", {"compression": "tiff_lzw"}),
])  # fmt: skip
def test_every_format_is_turned_once(tmp_path: Path, name: str, options: dict) -> None:
    """Pillow turns a TIFF by itself."""
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[:20, :40], pixels[:20, 40:], pixels[20:, :40] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    shown = {
        1: pixels, 2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1],
        5: pixels.swapaxes(0, 1), 6: np.rot90(pixels, -1),
        7: pixels[::-1, ::-1].swapaxes(0, 1), 8: np.rot90(pixels),
    }  # fmt: skip
    for turn, wanted in shown.items():
        exif = Image.Exif()
        exif[0x0112] = turn
        Image.fromarray(pixels).save(tmp_path / name, exif=exif, **options)
        assert read_header(tmp_path / name)[0] == wanted.shape[:2], turn
        found = read_image(tmp_path / name, None, 3)
        np.testing.assert_allclose(
            found[5::10, 5::10], wanted[5::10, 5::10], atol=2, err_msg=str(turn)
        )
        small = read_image(tmp_path / name, (20, 20), 3)
        corners = wanted[:: wanted.shape[0] - 1, :: wanted.shape[1] - 1]
        np.testing.assert_allclose(small[::19, ::19], corners, atol=2, err_msg=str(turn))


def photograph(path: Path, width: int, height: int, turn: int = 1) -> None:
    """A JPEG with what a photograph has: large areas, edges and noise."""
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (4, 5, 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    pixels += random.integers(-8, 9, pixels.shape)
    exif = Image.Exif()
    exif[0x0112] = turn
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, exif=exif)


@pytest.mark.parametrize("turn", [1, 6])
@pytest.mark.parametrize(("times", "part"), [(3.9, 1), (4, 2), (9, 4), (17, 8), (40, 8)])
def test_a_large_jpeg_is_decoded_at_a_part_of_its_size(
    tmp_path: Path, monkeypatch, times: float, part: int, turn: int
) -> None:
    size = (40, 30)  # as it is shown
    width, height = (math.ceil(times * edge) for edge in (size[::-1] if turn == 1 else size))
    photograph(tmp_path / "x.jpg", width, height, turn)
    in_full = read_image(tmp_path / "x.jpg", size, 3)
    decoded = []
    prepare = pictures.prepared
    monkeypatch.setattr(
        pictures, "prepared", lambda image, *how: decoded.append(image.size) or prepare(image, *how)
    )
    found = read_image(tmp_path / "x.jpg", size, 3, jpeg_scaling=True)
    assert decoded == [(-(-width // part), -(-height // part))]
    assert found.shape == in_full.shape == (*size, 3)
    # Of 67.5 columns there are 68: the picture is wider by less than a pixel.
    assert np.abs(found.astype(int) - in_full).mean() < 2
    assert (part == 1) is np.array_equal(found, in_full)


def test_a_folder_of_large_jpegs_is_imported_and_predicted_alike(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "train", "test", "test")):
        place = tmp_path / "files" / split / "ab"[number % 2]
        place.mkdir(parents=True)
        photograph(place / "x.jpg", 400 + 40 * number, 300)
    folders = {
        in_full: imported(
            user_data(tmp_path / "files", image_size=(30, 30), decode_in_full=in_full),
            tmp_path / str(in_full),
        )
        for in_full in (False, True)
    }
    for in_full, folder in folders.items():
        assert ("jpeg_scaling" in folder.manifest["settings"]) is not in_full
        wanted = read_image(
            tmp_path / "files" / "test" / "a" / "x.jpg", (30, 30), 3, jpeg_scaling=not in_full
        )
        assert any(np.array_equal(image, wanted) for image in folder.split("test")[0])
        classifier = build(
            "airbench", (8, 8, 8), 2, (30, 30, 3),
            jpeg_scaling=folder.manifest["settings"].get("jpeg_scaling", False),
        )  # fmt: skip
        weights.write(classifier.state_dict(), classifier.description, tmp_path / "x.safetensors")
        again = weights.load(tmp_path / "x.safetensors")
        assert np.array_equal(
            predict.pixels(again, tmp_path / "files" / "test" / "a" / "x.jpg"), wanted
        )
    assert folders[False].sha256 != folders[True].sha256


def test_the_folder_of_a_run_is_refused_in_place_of_its_weights(tmp_path: Path) -> None:
    done = program("predict", "--model", tmp_path, "x.png")
    line = f"predict: --model {tmp_path} is a folder; give model.safetensors in it\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_images_of_a_function_are_turned_whether_loaded_or_not(
    photographs: Path, tmp_path: Path
) -> None:
    """Damaged metadata turn none, and name it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for form in ("png", "jpg", "tif", "webp"):
        with Image.open(photographs / "train/cat/0.png") as image:
            image.save(tmp_path / f"turned.{form}", exif=exif)
    with Image.open(photographs / "train/cat/0.png") as image:
        image.save(tmp_path / "damaged.jpg", exif=b"Exif\0\0damaged, and long")
        image.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "upright.png")
    (tmp_path / "load.py").write_text(
        "from pathlib import Path\n"
        "from PIL import Image\n"
        "FOLDER = Path(__file__).parent\n"
        "def load(split):\n"
        "    for form in ('png', 'jpg', 'tif', 'webp'):\n"
        "        for label in (0, 1):\n"
        "            image = Image.open(FOLDER / f'turned.{form}')\n"
        "            if label:\n"
        "                image.load()\n"
        "            yield image, label\n"
        "    yield Image.open(FOLDER / 'damaged.jpg').resize((120, 160)), 0\n"
    )
    done = import_own(user_data(tmp_path / "load.py", "python", function="load"), tmp_path / "data")
    assert done.returncode == 0, done.stderr
    images, _ = DataFolder.read(tmp_path / "data").split("train")
    upright = read_image(tmp_path / "upright.png", None, 3).astype(int)
    assert abs(images[:8] - upright).mean(axis=(1, 2, 3)).max() < 8
    assert "UserWarning" not in done.stderr
    assert re.search(
        r"warning: 2 images: its metadata are damaged.*: train image 8, test image 8", done.stderr
    )


MEASURED = """
import sys
from pathlib import Path
from PIL import Image, PngImagePlugin, TiffImagePlugin
from manynodes.data.user.pictures import MOST_BYTES, PIXEL_BYTES, WEBP_PIXEL_BYTES, read_image
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
Image.init()
path = Path(sys.argv[1])
with Image.open(path) as image:
    pixels = image.width * image.height
before = peak()
read_image(path, None, 3)
most = WEBP_PIXEL_BYTES if path.suffix == ".webp" else PIXEL_BYTES
print((peak() - before) / pixels / most)
"""


@pytest.mark.parametrize("name", [
    "turned.jpg", "scans.jpg", "clear.png", "clear.webp", "a.tif", "deep.pgm",
])  # fmt: skip
def test_an_image_needs_no_more_memory_than_its_limit_allows(tmp_path: Path, name: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (100, 100, 3), np.uint8)
    image = Image.fromarray(noise).resize((2000, 2000))
    if name.startswith("clear"):
        image.putalpha(100)
    elif name.startswith("deep"):
        image = Image.fromarray(np.asarray(image)[..., 0].astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = 6
    options: dict = {"progressive": True} if name == "scans.jpg" else {}
    image.save(tmp_path / name, exif=exif, **options)
    done = python(MEASURED, tmp_path / name)
    assert 0.3 < float(done.stdout) <= 1.05, done.stderr


def test_a_long_side_and_many_scans_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.png"
    Image.new("1", (1, 100_000)).save(path)
    with pytest.raises(Unreadable, match="1 x 100000 pixels are too many"):
        read_image(path, (8, 8), 3)
    path = tmp_path / "scans.jpg"
    Image.new("RGB", (64, 64)).save(path, progressive=True)
    content = path.read_bytes()
    last = content.rindex(b"\xff\xda")
    path.write_bytes(content[:last] + content[last:-2] * 200 + content[-2:])
    with pytest.raises(Unreadable, match="it has more than 100 scans"):
        read_image(path, (8, 8), 3)
    # What stands behind an image, such as a film, or is embedded in it, is none of its scans.
    path.write_bytes(content + b"\xff\xda" * 200)
    assert read_image(path, (8, 8), 3).shape == (8, 8, 3)
    embedded = b"\xff\xe3" + struct.pack(">H", 402) + b"\xff\xda" * 200
    path.write_bytes(content[:2] + embedded + content[2:])
    assert read_image(path, (8, 8), 3).shape == (8, 8, 3)


def test_scans_that_are_not_progressive_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "scans.jpg"
    Image.new("L", (64, 64)).save(path)
    content = path.read_bytes()
    last = content.rindex(b"\xff\xda")
    path.write_bytes(content[:last] + content[last:-2] * 200 + content[-2:])
    with pytest.raises(Unreadable, match="it has more than 100 scans"):
        read_image(path, (8, 8), 3)


def test_scans_are_counted_across_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scans.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(path, progressive=True)
    with path.open("rb") as file:
        wanted = scans(file)
        assert wanted == path.read_bytes().count(b"\xff\xda") > 5
        for piece in range(4, 100):
            monkeypatch.setattr("manynodes.data.user.pictures.PIECE", piece)
            assert scans(file) == wanted, piece


def test_what_is_not_decoded_needs_no_memory(tmp_path: Path) -> None:
    """A file of 2 GB around a small image, and a small image in a tile of a gigabyte."""
    path = tmp_path / "long.jpg"
    Image.new("RGB", (64, 64)).save(path, progressive=True)
    os.truncate(path, 2_000_000_000)
    script = (
        "import resource, sys; from pathlib import Path; "
        "from manynodes.data.user.pictures import *; "
        "resource.setrlimit(resource.RLIMIT_AS, (1_000_000_000,) * 2); "
        "print(read_image(Path(sys.argv[1]), None, 3).shape)"
    )
    done = python(script, path, OMP_NUM_THREADS="1")
    assert done.stdout == "(64, 64, 3)\n", done.stderr
    path = tmp_path / "tile.tif"
    tags = {256: 100, 257: 100, 258: 8, 259: 8, 262: 1, 277: 1, 322: 32_768, 323: 32_768}
    pixels = zlib.compress(bytes(100))
    entries = [*tags.items(), (324, 8 + 2 + 12 * 10 + 4), (325, len(pixels))]
    ifd = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    head = b"II*\0" + struct.pack("<IH", 8, len(entries))
    path.write_bytes(head + ifd + bytes(4) + pixels)
    with pytest.raises(Unreadable, match="its tiles of 32768 x 32768 pixels are too large"):
        read_image(path, None, 1)


def broken(root: Path, *change: str) -> Path:
    """A copy of the folder after a shell command in it."""
    subprocess.run(["sh", "-c", *change], cwd=root, check=True)
    return root


@pytest.mark.parametrize(("change", "keys", "line"), [
    ("rm -r test", {}, "has train/ but neither test/ nor val/"),
    ("rm -r train", {}, "has test/ but no train/; add it"),
    ("mv train a; mv test b", {}, "has no train/ and test/; if its folders are classes"),
    ("rm test/cross/*", {}, 'the class "cross" has no test images in'),
    ("mkdir train/none", {}, 'the class "none" has no train images in'),
    ("rm -r test; mv train/* .; rmdir train; mv cross/000.png .; rm cross/*; mv 000.png cross",
     {"test_fraction": 0.2}, 'the class "cross" has no test images in'),
    ("mkdir test/more", {}, "test/more is a class that"),
    ("rm -r train/* test/*", {}, "has no folders; each class needs one"),
    ("true", {"test_fraction": 0.2}, "has test/ already; leave test_fraction out"),
    ("cp ../other.png train/cross/", {},
     "png: 48 x 64, train/cross/other.png: 9 x 9); give dataset."),
])  # fmt: skip
def test_a_folder_that_cannot_be_used(
    shapes: Path, tmp_path: Path, change: str, keys: dict, line: str
) -> None:
    Image.new("L", (9, 9)).save(tmp_path / "other.png")
    subprocess.run(["cp", "-r", shapes, tmp_path / "images"], check=True)
    root = broken(tmp_path / "images", change)
    assert line in refused_import(user_data(root, **keys), tmp_path / "data")


def test_what_is_told_does_not_depend_on_the_order_of_a_folder(
    shapes: Path, tmp_path: Path
) -> None:
    """Each file system lists names in an order of its own."""

    def made(root: Path, names: list[str]) -> UserData:
        for name in np.random.default_rng(0).permutation(names).tolist():
            (root / name).mkdir(parents=True)
        return user_data(root, test_fraction=0.2)

    for name, line in (("train", "is no class; rename it to train"), ("thumbs", "may be a class")):
        spelled = map("".join, itertools.product(*zip(name, name.upper(), strict=True)))
        wrong = made(tmp_path / name, [each for each in spelled if each != name])
        with pytest.raises(Refusal, match=f"/{name.upper()} {line}"):
            list_images(wrong, print)
    copy = Path(shutil.copytree(shapes / "train", tmp_path / "images"))
    told: list[str] = []
    list_images(made(copy, [f".{number:02}" for number in range(30)]), told.append)
    assert told[0].endswith("30 hidden names, and folders of previews or deleted files, were left "
                            "out: .00, .01, .02, …")  # fmt: skip


def test_a_disk_that_fills_up_while_labels_and_weights_are_written_is_named(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    declared, paths = user_data(tmp_path), [Path(str(number)) for number in range(2000)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_labels(declared, tmp_path, "ab", {"train": [0, 1] * 1000}, print)
        with pytest.raises(OSError, match="File too large"):
            write_extra(tmp_path, paths, {"weights": dict.fromkeys(paths, 1.0)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def good_arrays() -> dict[str, np.ndarray]:
    return {
        "images": np.zeros((8, 5, 6, 2), np.float32) + np.arange(8).reshape(-1, 1, 1, 1),
        "labels": np.array([0, 1] * 4),
    }


@pytest.mark.parametrize(("change", "line"), [
    ({"labels": np.array([0, 2] * 4)}, "has 0 images; a class needs one for train and one"),
    ({"labels": np.array([0, -1] * 4)}, "the all labels have -1"),
    ({"labels": np.array([0.0, 1] * 4)}, "one whole number per image is needed"),
    ({"labels": np.array([0, 1] * 3)}, "8 images but 6 labels"),
    ({"labels": np.array([0, 10**9] * 4)}, "the label 1,000,000,000 is too large"),
    ({"labels": np.array([0, -1] * 4).astype(np.uint64)}, "18,446,744,073,709,551,615 is too"),
    ({"train_groups": np.arange(8)}, 'has "train_groups", which arrays cannot have; give a'),
    ({"sample_weights": np.ones(8)}, 'has "sample_weights", which arrays cannot have; give a'),
    ({"weight": np.ones(8)}, 'has "weight", which arrays cannot have; give a dataset.folder'),
    ({"images": np.full((8, 5, 6), np.nan)}, "have values that are not finite"),
    ({"images": np.full((8, 5, 6), 300)}, "are whole numbers outside 0 to 255"),
    ({"images": np.zeros((8, 3, 32, 32), np.uint8)}, "channels first; save"),
    ({"images": np.zeros((8, 5, 32, 32), np.uint8)}, "channels first; save"),
    ({"images": np.full((8, 5, 6), 1e300)}, "have values that are not finite in float32"),
    ({"images": np.zeros((8, 5), np.uint8)}, "images, height, width and channels are needed"),
    ({"images": np.array([None] * 8)}, "not numbers"),
    ({"labels": np.zeros(8, np.int64)}, "there is one class; two or more are needed"),
    ({"images": np.asfortranarray(np.zeros((8, 5, 6)))}, "is in Fortran order"),
])  # fmt: skip
def test_arrays_that_cannot_be_used(tmp_path: Path, change: dict, line: str) -> None:
    np.savez(tmp_path / "x.npz", **good_arrays() | change)
    wanted = user_data(tmp_path / "x.npz", "arrays", test_fraction=0.5)
    assert line in refused_import(wanted, tmp_path / "data")


def test_a_file_that_is_no_array_is_refused(tmp_path: Path) -> None:
    header = b"(" * 3000
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "images.npy").write_bytes(content)
    (tmp_path / "labels.npy").write_bytes(content)
    wanted = user_data(tmp_path, "arrays", test_fraction=0.5)
    assert "images.npy is not an array" in refused_import(wanted, tmp_path / "data")


def test_which_arrays_are_meant_is_asked(tmp_path: Path) -> None:
    arrays = good_arrays()
    splits = {f"{split}_{name}": arrays[name] for split in ("train", "test") for name in arrays}
    np.savez(tmp_path / "x.npz", **arrays, **splits)
    line = "has train_images and images; keep those that are meant"
    assert line in refused_import(user_data(tmp_path / "x.npz", "arrays"), tmp_path / "data")
    with (
        zipfile.ZipFile(tmp_path / "x.npz", "a") as archive,
        pytest.warns(UserWarning, match="Duplicate"),
    ):
        archive.writestr("images.npy", b"other")
    line = "has images.npy twice; keep one"
    assert line in refused_import(user_data(tmp_path / "x.npz", "arrays"), tmp_path / "data")


def test_train_and_test_arrays_have_one_type(tmp_path: Path) -> None:
    images, labels = np.zeros((4, 5, 6)), np.array([0, 1] * 2)
    splits = {"train_images": images, "train_labels": labels, "test_labels": labels}
    np.savez(tmp_path / "x.npz", **splits, test_images=images.astype(np.uint8))
    line = "train images are float64, test images are uint8; save both with the same type"
    assert line in refused_import(user_data(tmp_path / "x.npz", "arrays"), tmp_path / "data")


def test_pixels_of_32_bits_are_taken_as_they_are_or_refused(tmp_path: Path) -> None:
    levels = np.arange(0, 250, 10, np.int32).reshape(5, 5)
    Image.fromarray(levels).save(tmp_path / "dark.tiff")
    Image.fromarray(levels * 9).save(tmp_path / "bright.tiff")
    assert (read_image(tmp_path / "dark.tiff", None, 1)[..., 0] == levels).all()
    with pytest.raises(Unreadable, match="32 bits; save them with 16"):
        read_image(tmp_path / "bright.tiff", None, 1)
    (tmp_path / "deep.pgm").write_bytes(b"P5 2 1 65535 " + bytes([1, 0, 255, 255]))
    assert read_image(tmp_path / "deep.pgm", None, 1).ravel().tolist() == [1, 255]


def tiff(path: Path, pixels: np.ndarray, numbers: int, extra: int | None = None) -> Path:
    """Write an uncompressed TIFF, of kinds that Pillow does not write.

    Args:
        pixels: (h, w, bands).
        numbers: 1 for whole ones, 2 for signed, 3 for floating-point.
        extra: what the bands after the third are said to be.
    """
    height, width, bands = pixels.shape
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    values = {
        256: width, 257: height, 258: (8 * pixels.itemsize,) * bands, 259: 1,
        262: 2 if 3 <= bands <= 6 else 1, 273: 0, 277: bands, 278: height,
        279: pixels.nbytes, 339: (numbers,) * bands,
    }  # fmt: skip
    for tag, value in values.items():
        tags[tag] = value
    if extra is not None:
        tags[338] = (extra,) * (bands - 3)
    # Pillow adds the place behind the tags to that of the pixels.
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + tags.tobytes(8) + pixels.tobytes())
    return path


@pytest.mark.parametrize(("bands", "kind", "numbers", "extra", "line"), [
    (4, "u1", 1, None, "its last band may be no transparency; use dataset.arrays, or save it w"),
    (4, "u1", 1, 2, "its last band may be no transparency; use dataset.arrays, or save it without"),
    (13, "<u2", 1, 0, "13 bands of whole numbers; use dataset.arrays"),
    (3, "<f4", 3, None, "3 bands of floating-point numbers; use dataset.arrays"),
    (1, "<i2", 2, None, "its pixels are signed; save them as unsigned"),
])  # fmt: skip
def test_what_is_no_image_for_a_screen_is_refused(
    tmp_path: Path, bands: int, kind: str, numbers: int, extra: int | None, line: str
) -> None:
    pixels = np.arange(16 * 16 * bands).reshape(16, 16, bands) % 251
    path = tiff(
        tmp_path / "x.tif", (pixels if bands > 1 else 9 * pixels).astype(kind), numbers, extra
    )
    with pytest.raises(Unreadable, match=line):
        read_image(path, None, 3)


def test_the_fourth_band_of_a_tiff_is_transparency_or_is_told(tmp_path: Path) -> None:
    pixels = (np.arange(16 * 16 * 4).reshape(16, 16, 4) % 251).astype("u1")
    said: list[str] = []
    found = read_image(tiff(tmp_path / "0.tif", pixels, 1, 0), None, 3, said.append)
    assert (found == pixels[..., :3]).all()
    assert said == ["of its 4 bands, the first 3 are used; for all, use dataset.arrays"]
    below = tiff(tmp_path / "below.tif", pixels[..., :1].astype("<i2") - 5, 2)
    with pytest.raises(Unreadable, match="its pixels are signed, some below 0; save them as"):
        read_image(below, None, 1)
    # A mask, or what says that it is transparency.
    for levels, extra in ((2, 2), (250, 1)):
        pixels[..., 3] = np.arange(256).reshape(16, 16) % levels
        path = tiff(tmp_path / "1.tif", pixels, 1, extra)
        assert read_image(path, None, 3).shape == (16, 16, 3)


def test_arrays_with_another_range_in_test_are_told(tmp_path: Path) -> None:
    given = good_arrays()
    train = {"train_images": given["images"], "train_labels": given["labels"]}
    for factor, told in ((1, False), (0.01, True)):
        test = {"test_images": given["images"] * factor, "test_labels": given["labels"]}
        np.savez(tmp_path / "a.npz", **train, **test)
        done = import_own(user_data(tmp_path / "a.npz", "arrays"), tmp_path / "data")
        assert done.returncode == 0, done.stderr
        assert ("bring both to one range" in done.stderr) == told


def test_arrays_that_are_not_used_are_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **good_arrays(), heights=np.ones(8), val_images=np.ones(3))
    done = import_own(user_data(tmp_path / "x.npz", "arrays", test_fraction=0.5), tmp_path / "data")
    assert done.returncode == 0, done.stderr
    assert "fetch: warning: not used: the arrays heights, val_images in " in done.stderr


@pytest.mark.parametrize(("top", "told"), [("255", False), ("1", True)])
def test_a_function_with_another_range_in_test_is_told(tmp_path, top: str, told: bool) -> None:
    (tmp_path / "load.py").write_text(
        "import numpy as np\n"
        "def load(split):\n"
        f"    top = {top} if split == 'test' else 255\n"
        "    for label in (0, 1):\n"
        "        yield np.linspace(0, top, 16).reshape(4, 4) + label / 9, label\n"
    )
    done = import_own(user_data(tmp_path / "load.py", "python", function="load"), tmp_path / "data")
    assert done.returncode == 0, done.stderr
    assert ("bring both to one range" in done.stderr) == told


def test_float_arrays_of_any_number_of_channels(tmp_path: Path) -> None:
    for name, array in good_arrays().items():
        np.save(tmp_path / f"{name}.npy", array)
    wanted = user_data(
        tmp_path / "images.npy", "arrays", labels=str(tmp_path / "labels.npy"), test_fraction=0.5
    )
    folder = imported(wanted, tmp_path / "data")
    assert folder.manifest["dtype"] == "float32"
    assert folder.image_shape == (5, 6, 2)
    assert folder.manifest["images"] == {"train": 4, "test": 4}


def test_damaged_archives_are_refused_in_one_line(tmp_path: Path) -> None:
    """Refused, or read: some bytes of an archive mean nothing."""
    np.savez_compressed(tmp_path / "x.npz", **good_arrays())
    whole = (tmp_path / "x.npz").read_bytes()
    random = np.random.default_rng(0)
    for number in range(60):
        damaged = bytearray(whole)
        start = int(random.integers(len(whole) - 8))
        damaged[start : start + 8] = random.bytes(8)
        path = tmp_path / f"{number}.npz"
        path.write_bytes(damaged)
        folder = tmp_path / str(number)
        folder.mkdir()
        with suppress(Refusal):
            from_arrays(user_data(path, "arrays", test_fraction=0.5), folder, print)


def test_a_class_may_be_a_link_and_changes_in_it_are_noticed(shapes: Path, tmp_path: Path) -> None:
    copy, elsewhere = tmp_path / "images", tmp_path / "elsewhere"
    subprocess.run(["cp", "-r", shapes, copy], check=True)
    (copy / "train/cross").rename(elsewhere)
    (copy / "train/cross").symlink_to(elsewhere)
    (elsewhere / "loop").symlink_to(elsewhere)
    before = user_data(copy).fingerprint
    Image.fromarray(np.zeros((48, 64), np.uint8)).save(elsewhere / "new.png")
    assert user_data(copy).fingerprint != before
    assert imported(user_data(copy), tmp_path / "data").manifest["images"]["train"] == 37


@pytest.mark.parametrize(("body", "line"), [
    ("    yield np.zeros((4, 4), np.uint8)", "(image, label) is needed"),
    ("    yield np.zeros((4, 4), np.uint8), 'cat'", 'has the label "cat"'),
    ("    for size in (4, 5):\n        yield np.zeros((size, 4), np.uint8), 0",
     "train image 1 is uint8 (5, 4, 1), the first one is uint8 (4, 4, 1)"),
    ("    yield 1 / 0, 0", "load.py:3: ZeroDivisionError: division by zero"),
    ("    return []", "load('train') of"),
    ("    yield np.zeros((4, 4), np.uint8), 5", 'the class "0" has no train images'),
    ("    yield np.zeros((3, 9, 9), np.uint8), 0", "channels first; yield numpy.moveaxis"),
    ("    yield np.zeros((4, 4), np.uint8), 4_000_000_000", "it is too large"),
    ("    yield np.full((4, 4), np.inf), 0",
     "dataset.python: train image 0: its pixels have values that are not finite in float32"),
    ("    yield np.full((4, 4), 999), 0",
     "dataset.python: train image 0: its pixels are whole numbers outside 0 to 255; bring them"),
    ("    yield [[1, 2], [3]], 0", "train image 0 is no array"),
    ("    raise SystemExit(3)", "load.py ends Python; return instead"),
    ("    yield np.zeros((4, 4), np.uint8), 1\nCLASSES = 5", "a list of the names of the classes"),
    ("    yield from [(np.zeros((4, 4), np.uint8), 0)] * 2\nCLASSES = ['a', 'a']", "a name twice"),
    ("    yield from [(np.zeros((4, 4), np.uint8), 0)] * 2\nCLASSES = ['\u00e4', 'a\u0308']",
     "a name twice"),
])  # fmt: skip
def test_a_function_that_cannot_be_used(tmp_path: Path, body: str, line: str) -> None:
    (tmp_path / "load.py").write_text(f"import numpy as np\ndef load(split):\n{body}\n")
    wanted = user_data(tmp_path / "load.py", "python", function="load")
    assert line in refused_import(wanted, tmp_path / "data")


def test_a_killed_import_leaves_nothing_and_the_next_one_is_whole(
    shapes: Path, tmp_path: Path
) -> None:
    output = tmp_path / "data"
    command = [
        sys.executable, SCRIPTS / "fetch.py", "--dataset", "shapes",
        "--user-data", user_data(shapes, image_size=(1500, 1500)).to_json(), "--output", output,
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    while not list(output.glob(".fetch-*/train_images.npy")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (output / "manifest.json").exists()
    folder = imported(user_data(shapes), output)
    assert folder.image_shape == (48, 64, 1)
    assert sorted(path.name for path in output.iterdir() if path.name[0] != ".") == [
        "files.csv", "manifest.json", *sorted(folder.manifest["files"]),
    ]  # fmt: skip


def test_a_changed_folder_is_noticed(shapes: Path, tmp_path: Path) -> None:
    copy = tmp_path / "images"
    subprocess.run(["cp", "-rp", shapes, copy], check=True)
    before = user_data(copy).fingerprint
    # An import takes no such files.
    (copy / "Thumbs.db").write_text("previews")
    (copy / "train/README").write_text("about")
    assert user_data(copy).fingerprint == before
    # Snakemake may run in another locale than the import, which is in UTF-8.
    (copy / "train/cross/ü.png").write_bytes(b"x")
    question = (
        "import sys; from manynodes.data.user.declaration import UserData; "
        "print(UserData('shapes', 'folder', sys.argv[1]).fingerprint)"
    )
    other = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(SCRIPTS)}
    texts = [
        subprocess.run([sys.executable, "-X", f"utf8={utf8}", "-c", question, copy], text=True,
                       env=os.environ | other, capture_output=True, check=True).stdout
        for utf8 in (0, 1)
    ]  # fmt: skip
    assert texts[0] == texts[1]
    (copy / "train/cross/ü.png").unlink()
    path = copy / "train/cross/000.png"
    path.write_bytes(path.read_bytes() + b"x")
    changed = user_data(copy).fingerprint
    path.rename(path.with_name("renamed.png"))
    assert (
        len(
            {
                before,
                changed,
                user_data(copy).fingerprint,
                user_data(copy, image_size=(8, 8)).fingerprint,
            }
        )
        == 4
    )


def test_the_code_of_a_function_and_of_what_it_imports_is_a_part_of_the_hash(
    tmp_path: Path,
) -> None:
    (tmp_path / "load.py").write_text("from helper import load\n")
    (tmp_path / "helper.py").write_text("def load(split): ...\n")
    wanted = user_data(tmp_path / "load.py", "python", function="load")
    before = wanted.settings["code_sha256"]
    (tmp_path / "helper.py").write_text("def load(split): return []\n")
    assert wanted.settings["code_sha256"] != before


def test_a_manifest_of_own_images_is_checked_too(shapes: Path, tmp_path: Path) -> None:
    imported(user_data(shapes), tmp_path / "data")
    path = tmp_path / "data/manifest.json"
    manifest = json.loads(path.read_text())
    for change in ({"class_names": ["a"]}, {"settings": {}}, {"settings": {"kind": "arrays"}}):
        path.write_text(json.dumps(manifest | change))
        done = program("stage", "--data", tmp_path / "data")
        assert done.returncode == 1
        assert "manifest.json is not that of shapes: " in done.stderr


def test_what_follows_a_png_is_not_looked_at(tmp_path: Path) -> None:
    """Sparse zeros cost a user no space; twenty gigabytes of them took an hour."""
    Image.fromarray(np.zeros((8, 9, 3), np.uint8)).save(tmp_path / "a.png")
    os.truncate(tmp_path / "a.png", 20 << 30)
    assert pictures.read_header(tmp_path / "a.png") == ((8, 9), False)
