"""Which of the user's files each image is, from the import to the predictions."""

import csv
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from manynodes.base.errors import Refusal
from manynodes.data.user.declaration import UserData
from manynodes.data.user.origins import files_of
from manynodes.data.user.pictures import read_image
from pictures import CLASSES, write_folder
from programs import imported


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_folder(tmp_path_factory.mktemp("shapes") / "images", train=12, test=4)
    # Names that a spreadsheet would compute, or that need quotation marks.
    for old, new in (("000.png", '=1 "a", ü.png'), ("001.png", "line\nbreak.png")):
        (root / "test/cross" / old).rename(root / "test/cross" / new)
    return root


def test_every_row_is_the_file_that_it_names(shapes: Path, tmp_path: Path) -> None:
    folder = imported(UserData("shapes", "folder", str(shapes)), tmp_path / "data")
    found = rows_of(folder.path / "files.csv")
    assert list(found[0]) == ["split", "row", "class", "path"]
    assert len(found) == 48
    for row in found:
        images, labels = folder.split(row["split"])
        number = int(row["row"])
        path = shapes / row["path"].replace("line\\nbreak", "line\nbreak")
        np.testing.assert_array_equal(images[number], read_image(path, None, 1))
        assert row["class"] == CLASSES[labels[number]] == path.parent.name
    paths = [row["path"] for row in found if row["split"] == "test"]
    assert files_of(folder, "test") == paths
    assert 'test/cross/=1 "a", ü.png' in paths


def test_the_names_are_no_part_of_the_data(shapes: Path, tmp_path: Path) -> None:
    """An import of an earlier version stays what it is, and one of arrays leaves no old names."""
    folder = imported(UserData("shapes", "folder", str(shapes)), tmp_path / "data")
    assert "files.csv" not in folder.manifest["files"]
    before = (folder.path / "manifest.json").read_bytes()
    with (folder.path / "files.csv").open("a") as table:
        table.write("test,0,cross,more.png\n")
    with pytest.raises(Refusal, match="is damaged .*; delete it and make it again$") as refused:
        files_of(folder, "test")
    assert refused.value.make_again == folder.path / "manifest.json"
    (folder.path / "files.csv").unlink()
    assert files_of(folder, "test") == []
    imported(UserData("shapes", "folder", str(shapes)), tmp_path / "data")
    assert (folder.path / "manifest.json").read_bytes() == before
    assert (folder.path / "files.csv").exists()
    content = {
        f"{split}_{what}": array
        for split in ("train", "test")
        for what, array in zip(("images", "labels"), folder.split(split), strict=True)
    }
    np.savez(tmp_path / "shapes.npz", **content)
    imported(UserData("shapes", "arrays", str(tmp_path / "shapes.npz")), tmp_path / "data")
    assert not (folder.path / "files.csv").exists()


def test_classes_may_be_written_alike(shapes: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(shapes, tmp_path / "images"))
    for folder in root.glob("*/c*"):
        folder.rename(folder.with_name({"circle": "=a", "cross": "'=a"}[folder.name]))
    folder = imported(UserData("shapes", "folder", str(root)), tmp_path / "data")
    assert {row["class"] for row in rows_of(folder.path / "files.csv")} == {"'=a", "stripes"}
    labels = [folder.class_names[label] for label in folder.split("test")[1]]
    assert [name.split("/")[1] for name in files_of(folder, "test")] == labels


@pytest.mark.parametrize(("change", "line"), [
    (lambda text: text.replace("split,", "part,"), "its first line is another one"),
    (lambda text: text.replace(",cross,", ",circle,"), "it is of other images"),
    (lambda text: text + "test\n", "not enough values to unpack"),
    (lambda text: text + "test,12,circle,more.png\n", "it is of other images"),
    (lambda text: text.encode("utf-16"), "codec can't decode"),
])  # fmt: skip
def test_names_of_other_images_are_refused(shapes: Path, tmp_path: Path, change, line) -> None:
    folder = imported(UserData("shapes", "folder", str(shapes)), tmp_path / "data")
    path = folder.path / "files.csv"
    changed = change(path.read_text(encoding="utf-8"))
    path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    with pytest.raises(Refusal, match=f"files.csv is damaged.*{line}.*delete "):
        files_of(folder, "test")


def test_a_file_of_a_terabyte_is_not_read(shapes: Path, tmp_path: Path) -> None:
    folder = imported(UserData("shapes", "folder", str(shapes)), tmp_path / "data")
    os.truncate(folder.path / "files.csv", 10**12)
    with pytest.raises(Refusal, match=r"files.csv is damaged \(has 1,000,000,000,000 bytes, "):
        files_of(folder, "test")
