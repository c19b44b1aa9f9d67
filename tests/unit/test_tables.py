"""A CSV file instead of folders of classes, and images that stay in one split."""

import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import programs
from manynodes.base.errors import Refusal
from manynodes.data.folder import DataFolder
from manynodes.data.user.declaration import UserData
from manynodes.data.user.groups import groups_of_test
from manynodes.data.user.origins import files_of
from manynodes.experiment.config import Experiment
from pictures import CLASSES, write_folder


def declared(root: Path, **keys: Any) -> UserData:
    return UserData("shapes", "folder", str(root), **keys)


def fetch(root: Path, output: Path, **keys: Any) -> subprocess.CompletedProcess[str]:
    return programs.import_own(declared(root, **keys), output)


def imported(root: Path, output: Path, **keys: Any) -> DataFolder:
    return programs.imported(declared(root, **keys), output)


def refused(root: Path, output: Path, **keys: Any) -> str:
    return programs.refused_import(declared(root, **keys), output)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("shapes") / "images", train=12, test=4)


@pytest.fixture
def flat(shapes: Path, tmp_path: Path) -> Path:
    """All images in one folder, with a table beside it."""
    root = tmp_path / "flat"
    root.mkdir()
    rows = ["file,label,split,camera"]
    for path in sorted(shapes.glob("*/*/*.png")):
        split, name = path.parts[-3:-1]
        shutil.copy(path, root / f"{split}-{name}-{path.name}")
        rows.append(f"{split}-{name}-{path.name},{name},{split},7")
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    return root


def changed(table: Path, change: dict[str, str]) -> Path:
    text = table.read_text()
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    table.write_text(text)
    return table


def contents(folder: DataFolder, split: str) -> list[tuple[int, bytes]]:
    images, labels = folder.split(split)
    return sorted(zip(labels.tolist(), map(bytes, images), strict=True))


def test_a_table_is_the_same_data_as_folders_of_classes(
    shapes: Path, flat: Path, tmp_path: Path
) -> None:
    folders = imported(shapes, tmp_path / "folders")
    table = imported(flat, tmp_path / "table", table=str(tmp_path / "labels.csv"))
    assert table.class_names == folders.class_names == list(CLASSES)
    for split in ("train", "test"):
        assert contents(table, split) == contents(folders, split)
    assert table.sha256 != folders.sha256
    files = files_of(table, "test")
    assert sorted(files) == sorted(path.name for path in flat.glob("test-*"))
    # Excel writes a mark in front, and other ends of lines.
    text = (tmp_path / "labels.csv").read_text().replace("\n", "\r\n") + ",,,\r\n"
    (tmp_path / "excel.csv").write_bytes(text.encode("utf-8-sig"))
    again = imported(flat, tmp_path / "again", table=str(tmp_path / "excel.csv"))
    assert again.sha256 == table.sha256


def test_a_table_without_splits_is_split_by_a_seed(flat: Path, tmp_path: Path) -> None:
    table = changed(tmp_path / "labels.csv", {"label,split": "label,part"})
    line = refused(flat, tmp_path / "data", table=str(table))
    assert line.endswith("labels.csv has no column split; add it, or give dataset.test_fraction, "
                         "such as 0.2")  # fmt: skip
    folder = imported(flat, tmp_path / "data", table=str(table), test_fraction=0.25)
    assert np.bincount(folder.split("test")[1]).tolist() == [4, 4, 4]
    # The order of the rows does not count.
    head, *rows = table.read_text().splitlines()
    table.write_text("\n".join([head, *reversed(rows)]))
    again = imported(flat, tmp_path / "again", table=str(table), test_fraction=0.25)
    assert again.manifest == folder.manifest


FIRST = "test-circle-000.png,circle,test,7"


@pytest.mark.parametrize(("change", "line"), [
    ({"file,label": "name,label"}, "has no column file; its columns are name, label, spl"),
    ({",": ";"}, "has no column file; its columns are file;label;split;camera"),
    ({"camera": "label"}, "has two columns label; keep one"),
    ({"camera": "Group"}, 'has a column "Group"; did you mean group? rename it, or remove it'),
    ({"camera": "groups"}, 'has a column "groups"; did you mean group?'),
    ({",split,": ",Split,"}, 'has a column "Split"; did you mean split?'),
    ({FIRST: "gone.png,circle,test,7"}, "line 2: gone.png is not a file in "),
    ({FIRST: "test-circle-000.png,,test,7"}, 'line 2: "" is not a label'),
    ({FIRST: "test-circle-000.png,circle,,7"}, "line 2: has no split"),
    ({FIRST: "test-circle-000.png,circle,val,7"}, 'has the split "val"; use train and test'),
    ({FIRST: "test-circle-000.png,circle,test"}, "line 2: has 3 cells, not 4"),
    ({FIRST: f"{FIRST}\n./test-circle-000.png,cross,train,7"}, "line 3: names ./test-circle"),
    ({FIRST: "../labels.csv,circle,test,7"}, 'line 2: "../labels.csv" is not a path in'),
    ({FIRST: "a/../../flat/x.png,circle,test,7"}, "x.png\" is not a path in dataset.folder"),
    ({FIRST: "/etc/passwd,circle,test,7"}, 'line 2: "/etc/passwd" is not a path in dataset.folder'),
    ({FIRST: ",circle,test,7"}, 'line 2: "" is not a path in dataset.folder'),
    ({FIRST: ".hidden/a.png,circle,test,7"}, "is hidden, or in a folder of previews"),
    ({FIRST: '"test-circle-000.png,circle,test,7'}, "line 2: is no CSV: unexpected end of data"),
    ({",test,7": ",train,7"}, 'the class "circle" has no test images in '),
    ({FIRST: "a\\b.png,circle,test,7"}, "b.png is not a file in "),
])  # fmt: skip
def test_a_table_that_cannot_be_used(
    flat: Path, tmp_path: Path, change: dict[str, str], line: str
) -> None:
    table = changed(tmp_path / "labels.csv", change)
    assert line in refused(flat, tmp_path / "data", table=str(table))


@pytest.mark.parametrize("seed", ["0", "1"])
def test_the_first_empty_cell_of_a_row_is_told(flat: Path, tmp_path: Path, seed: str) -> None:
    """Whatever the order of a set, which depends on the seed."""
    table = changed(tmp_path / "labels.csv", {"camera": "group", FIRST: f"{FIRST[:26]},,"})
    environment = os.environ | {"PYTHONHASHSEED": seed}
    data = declared(flat, table=str(table))
    done = programs.import_own(data, tmp_path / "data", env=environment)
    assert done.stderr.endswith("line 2: has no split\n")


def test_test_images_of_a_table_may_lack_a_class_but_not_all_but_one(
    flat: Path, tmp_path: Path
) -> None:
    """As those of another hospital, say."""
    rare = {"train-circle-000.png,circle": "train-circle-000.png,selten ä"}
    at = {"table": str(changed(tmp_path / "labels.csv", rare))}
    done = fetch(flat, tmp_path / "data", **at)
    assert done.returncode == 0, done.stderr
    line = "warning: classes without test images, of which no result tells: selten ä"
    assert line in done.stderr
    data = DataFolder.read(tmp_path / "data")
    assert "selten ä" in data.manifest["class_names"]
    assert len(set(data.split("train")[1].tolist())) == 1 + len(set(data.split("test")[1].tolist()))
    # With the images of all other classes unreadable, one is left.
    for path in flat.glob("test-c*.png"):
        path.write_bytes(b"no image")
    line = refused(flat, tmp_path / "other", **at, skip_unreadable=True)
    assert "has no test images" in line


def test_a_file_that_is_no_table_is_refused(flat: Path, tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    text = table.read_text()
    at = {"table": str(table)}
    assert "line" not in (line := refused(flat, tmp_path / "data", **at, test_fraction=0.2))
    assert line.endswith("labels.csv has a column split already; leave test_fraction out")
    table.write_bytes(text.replace("camera", "kamera ä").encode("latin-1"))
    assert "labels.csv is not UTF-8; save it as CSV in UTF-8" in refused(
        flat, tmp_path / "data", **at
    )
    table.write_text("file,label\n")
    assert "labels.csv has no rows; give one per image" in refused(flat, tmp_path / "data", **at)
    table.write_text("")
    assert "has no column file; its columns are none" in refused(flat, tmp_path / "data", **at)
    os.truncate(table, 10**12)
    assert "has 1,000,000,000,000 bytes, " in refused(flat, tmp_path / "data", **at)
    table.unlink()
    os.mkfifo(table)
    assert "labels.csv is not a CSV file: is not a reg" in refused(flat, tmp_path / "data", **at)
    table.unlink()
    assert refused(flat, tmp_path / "data", **at).startswith("config: dataset.table: ")


def test_images_that_the_table_does_not_name_are_told(flat: Path, tmp_path: Path) -> None:
    table = changed(tmp_path / "labels.csv", {f"{FIRST}\n": ""})
    done = fetch(flat, tmp_path / "data", table=str(table))
    assert "fetch: warning: 1 images are not used, as they are not in " in done.stderr


def test_other_columns_are_told(flat: Path, tmp_path: Path) -> None:
    """Also those that are a little like one of ours."""
    table = changed(tmp_path / "labels.csv", {"camera": "height"})
    done = fetch(flat, tmp_path / "data", table=str(table))
    assert done.returncode == 0, done.stderr
    assert f"fetch: not used of {table}: the columns height\n" in done.stderr


def test_labels_that_seem_to_be_one_are_told(flat: Path, tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text(table.read_text().replace("0.png,circle", "0.png,Circle"))
    done = fetch(flat, tmp_path / "data", table=str(table))
    assert f'the labels "Circle" and "circle" of {table} are two classes\n' in done.stderr


def test_a_file_is_found_in_either_form_of_unicode(flat: Path, tmp_path: Path) -> None:
    composed, apart = "gr\u00fc\u00df.png", "gru\u0308\u00df.png"
    (flat / "test-circle-000.png").rename(flat / apart)
    table = changed(tmp_path / "labels.csv", {"test-circle-000.png": composed})
    imported(flat, tmp_path / "data", table=str(table))
    before = UserData("shapes", "folder", str(flat), table=str(table)).fingerprint
    (flat / "README").write_text("about")
    assert UserData("shapes", "folder", str(flat), table=str(table)).fingerprint == before
    (flat / apart).rename(flat / "elsewhere")
    assert UserData("shapes", "folder", str(flat), table=str(table)).fingerprint != before
    # A folder of one system with a file of another.
    (flat / "gr\u00f6\u00dfe").mkdir()
    (flat / "elsewhere").rename(flat / "gr\u00f6\u00dfe" / apart)
    changed(table, {composed: f"gr\u00f6\u00dfe/{composed}"})
    folder = imported(flat, tmp_path / "mixed", table=str(table))
    assert f"gr\u00f6\u00dfe/{apart}" in files_of(folder, "test")


def test_a_changed_table_is_imported_again(flat: Path, tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    data = UserData("shapes", "folder", str(flat), table=str(table), group=str(table))
    before = data.fingerprint
    assert data.fingerprint == before
    changed(table, {"7": "8"})
    assert data.fingerprint != before
    assert UserData.from_json(data.to_json()) == data


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of 40 images of 10 patients; each patient has images of two classes, and in
    each of them two folders.
    """
    root = tmp_path_factory.mktemp("patients") / "images"
    source = write_folder(root.with_name("source"), train=40, test=1) / "train"
    for label, name in enumerate(CLASSES):
        for number, path in enumerate(sorted((source / name).iterdir())):
            folder = root / name / f"p{number // 6 + 7 * (label == 2)}"
            folder /= "right" if number % 6 > 3 else "left"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder)
    return root


def patient(path: str) -> str:
    return path.split("/")[1]


def test_a_group_is_in_one_split(patients: Path, tmp_path: Path) -> None:
    how = {"group": "folder", "test_fraction": 0.25}
    folder = imported(patients, tmp_path / "data", **how)
    train, test = ({*map(patient, files_of(folder, split))} for split in ("train", "test"))
    assert not train & test
    assert len(train | test) == 14
    # Groups of 6 images come no nearer to 10 of each class.
    assert np.bincount(folder.split("test")[1]).tolist() == [12, 12, 12]
    done = fetch(patients, tmp_path / "again", **how)
    assert "fetch: 14 groups, 4 of them in test" in done.stderr
    assert DataFolder.read(tmp_path / "again").manifest == folder.manifest
    other = imported(patients, tmp_path / "other", **how, split_seed=1)
    assert {*map(patient, files_of(other, "test"))} != test
    # Without groups, the patients of train are in test too.
    mixed = imported(patients, tmp_path / "mixed", test_fraction=0.25)
    assert {*map(patient, files_of(mixed, "test"))} & {*map(patient, files_of(mixed, "train"))}


def test_a_split_s_folder_is_no_part_of_a_group(patients: Path, tmp_path: Path) -> None:
    """A patient with images in both, in folders below train/ and test/."""
    rows, root = ["file,label,split"], tmp_path / "divided"
    for number, path in enumerate(sorted(patients.glob("*/*/*/*.png"))):
        name, of = path.parts[-4:-2]
        split = "test" if number % 4 == 0 else "train"
        place = root / split / of
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place / f"{name}-{path.name}")
        rows.append(f"{split}/{of}/{name}-{path.name},{name},{split}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    line = refused(root, tmp_path / "data", table=str(tmp_path / "labels.csv"), group="folder")
    assert "groups have images in train and in test, such as " in line
    table = tmp_path / "deep.csv"
    path = next(patients.glob("*/*/*/*.png")).relative_to(patients)
    table.write_text(f"file,label\n{path},a\n")
    line = refused(patients, tmp_path / "data", table=str(table), group="folder", test_fraction=0.2)
    assert line.endswith("may be the group; give the table a column group instead")


def test_an_import_whose_groups_would_be_other_ones_is_made_again(
    patients: Path, tmp_path: Path
) -> None:
    """An earlier version took each folder below a patient for a group of its own."""

    def before(root: Path, **keys: Any) -> tuple[str, str]:
        found = UserData("shapes", "folder", str(root), group="folder", **keys)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(UserData, "are_below_groups", lambda *_: False)
            earlier = found.fingerprint
        return earlier, found.fingerprint

    earlier, now = before(patients, test_fraction=0.2)
    assert earlier != now
    of_patients = tmp_path / "images"
    for path in sorted(patients.glob("*/*/*/*.png")):
        place = of_patients / path.relative_to(patients).parent.parent
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    earlier, now = before(of_patients, test_fraction=0.2)
    assert earlier == now
    table = tmp_path / "labels.csv"
    table.write_text("file,label,split\n")
    splits = shutil.copytree(of_patients / "circle", tmp_path / "splits/train").parent
    earlier, now = before(splits, table=str(table))
    assert earlier == now


def test_a_group_is_one_in_either_form_of_unicode(flat: Path, tmp_path: Path) -> None:
    """In folders, a file and a column. What was imported with other names is that of before."""
    forms = {"train": "Jos\u00e9", "test": "Jose\u0301"}
    _, *rows = (tmp_path / "labels.csv").read_text().splitlines()
    tables: dict[str, list[str]] = {"groups": ["file,group"], "column": ["file,label,split,group"]}
    for row in rows:
        name, label, split, _ = row.split(",")
        tables["groups"].append(f"{name},{forms[split]}")
        tables["column"].append(f"{name},{label},{split},{forms[split]}")
        place = tmp_path / "folders" / split / label / forms[split]
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(flat / name, place)
    for key, lines in tables.items():
        (tmp_path / f"{key}.csv").write_text("\n".join(lines))
    ways: list[tuple[Path, dict[str, str]]] = [
        (tmp_path / "folders", {"group": "folder"}),
        (flat, {"table": str(tmp_path / "labels.csv"), "group": str(tmp_path / "groups.csv")}),
        (flat, {"table": str(tmp_path / "column.csv")}),
    ]

    def is_as_before(root: Path, keys: dict[str, str]) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(UserData, "group_names", lambda *_: [])
            earlier = declared(root, **keys).fingerprint
        return declared(root, **keys).fingerprint == earlier

    for root, keys in ways:
        line = refused(root, tmp_path / "data", **keys)
        assert "1 groups have images in train and in test, such as " in line
        assert not is_as_before(root, keys)
    for key in tables:
        changed(tmp_path / f"{key}.csv", {forms["test"]: "Zoe\u0301"})
    for place in (tmp_path / "folders").glob("test/*/*"):
        place.rename(place.with_name("Zoe\u0301"))
    for root, keys in ways:
        done = fetch(root, tmp_path / "data", **keys)
        assert "fetch: 2 groups, 1 of them in test" in done.stderr
        assert is_as_before(root, keys)


def test_groups_are_given_by_folders_a_file_or_a_column(patients: Path, tmp_path: Path) -> None:
    paths = [path.relative_to(patients) for path in sorted(patients.glob("*/*/*/*.png"))]
    groups = "".join(f"{path},{path.parts[1]}\n" for path in paths)
    (tmp_path / "groups.csv").write_text(f"file,group\n{groups}elsewhere.png,x\n")
    rows = "".join(f"{path},{path.parts[0]},{path.parts[1]}\n" for path in paths)
    (tmp_path / "labels.csv").write_text(f"file,label,group\n{rows}")
    ways: tuple[dict[str, str], ...] = (
        {"group": "folder"},
        {"group": str(tmp_path / "groups.csv")},
        {"table": str(tmp_path / "labels.csv")},
    )
    found = [
        imported(patients, tmp_path / str(number), **way, test_fraction=0.2)
        for number, way in enumerate(ways)
    ]
    assert len({tuple(sorted(files_of(folder, "test"))) for folder in found}) == 1
    groups = [folder.extra("groups") for folder in found]
    for other in groups[1:]:
        np.testing.assert_array_equal(other, groups[0])


@pytest.mark.parametrize(("text", "line"), [
    ("file,group\ncircle/p0/left/000.png,a\n", "has no group for circle/p0/left/001.png"),
    ("file,group\ncircle/p0/left/000.png,\n", "line 2: has no group"),
    ("file,group\na.png,1\n./a.png,2\n", "line 3: names ./a.png for a second time"),
    ("file,patient\n", "has no column group; its columns are file, patient"),
])  # fmt: skip
def test_groups_that_cannot_be_used(patients: Path, tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "groups.csv").write_text(text)
    how = {"group": str(tmp_path / "groups.csv"), "test_fraction": 0.2}
    assert line in refused(patients, tmp_path / "data", **how)


def test_what_contradicts_groups_is_refused(shapes: Path, flat: Path, tmp_path: Path) -> None:
    assert refused(shapes, tmp_path / "data", group="folder") == (
        "dataset.group: train/circle/000.png is in no folder of a group; move it into one, or give "
        "a CSV file with the columns file and group"
    )
    table = changed(tmp_path / "labels.csv", {"camera": "group"})
    line = refused(flat, tmp_path / "data", table=str(table))
    assert line == (
        'dataset.group: 1 groups have images in train and in test, such as "7"; move each into one '
        "split"
    )
    line = refused(flat, tmp_path / "data", table=str(table), group="folder")
    assert "labels.csv has a column group already; leave dataset.group out" in line
    changed(table, {"label,split": "label,part"})
    line = refused(flat, tmp_path / "data", table=str(table), test_fraction=0.2)
    assert 'the class "circle" has no test images in ' in line
    assert line.endswith('; all are of the group "7"; a class needs two')


def test_groups_of_any_size_come_near_to_the_fraction() -> None:
    random = np.random.default_rng(0)
    labels, groups = {}, {}
    for number in range(3000):
        path = Path(str(number))
        groups[path] = str(random.zipf(1.5) % 400)
        labels[path] = int(random.integers(0, 5))
    data = UserData("x", "folder", "", test_fraction=0.2)
    chosen = groups_of_test(labels, groups, data)
    of_class, in_test = (Counter(labels[path] for path in paths) for paths in (
        labels, [path for path in labels if groups[path] in chosen]))  # fmt: skip
    for label, count in of_class.items():
        assert 0.15 < in_test[label] / count < 0.25


@pytest.mark.parametrize("key", ["table", "group"])
def test_both_are_for_a_folder(key: str) -> None:
    dataset = {"name": "x", "arrays": "x.npz", key: "a.csv"}
    with pytest.raises(Refusal, match=f"dataset.{key}: dataset.arrays has no use for it"):
        Experiment.from_config({"experiment": "x", "dataset": dataset})


def test_paths_are_relative_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.csv").touch()
    for group, wanted in (("folder", "folder"), ("a.csv", os.path.relpath(tmp_path / "a.csv"))):
        dataset = {"name": "x", "folder": "folder", "group": group, "table": "a.csv"}
        found = Experiment.from_files({"experiment": "x", "dataset": dataset}, [tmp_path])
        assert found.user_data is not None
        assert found.user_data.group == wanted
        assert found.user_data.table == os.path.relpath(tmp_path / "a.csv")
        assert json.loads(found.user_data.to_json())["group"] == wanted
