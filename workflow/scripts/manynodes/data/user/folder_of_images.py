"""A folder of images, decoded on all cores."""

import multiprocessing
import os
import tempfile
import unicodedata
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from manynodes.base.cpus import usable_cpus
from manynodes.base.errors import Refusal, one_line, shown
from manynodes.data.datasets import EXTRA
from manynodes.data.folder import write_array
from manynodes.data.user.declaration import (
    BY_FOLDER,
    PREVIEWS,
    SPLIT_FOLDERS,
    TEST_FOLDERS,
    UserData,
    composed,
    is_class_name,
    is_image,
    is_wanted,
)
from manynodes.data.user.groups import by_folder, groups_of_test, refuse_divided
from manynodes.data.user.origins import FILE, write_origins
from manynodes.data.user.pictures import ARRAYS, Unreadable, decoded, read_header
from manynodes.data.user.similar import fingerprints, similar_images
from manynodes.data.user.tables import Members, from_table, groups_in
from manynodes.data.user.writing import (
    MOST_CLASSES,
    SPLITS,
    ArrayFile,
    Remarks,
    chosen_for_test,
    finish,
    may_lack_classes,
    named,
    progress,
)
from manynodes.data.walk import Identity, walk

# Images per task of a worker.
TASK = 32


class Listing(NamedTuple):
    """The images of a split, in the order of the file."""

    labels: list[int]
    paths: list[Path]

    def kept(self, rows: np.ndarray, root: Path) -> "Listing":
        """Those of some rows, with their paths in a folder."""
        places = rows.tolist()
        paths = [self.paths[place].relative_to(root) for place in places]
        return Listing([self.labels[place] for place in places], paths)


class Decoded(NamedTuple):
    """What is known of an image whose pixels are written.

    Attributes:
        checksum: CRC-32 of the pixels.
        fingerprints: see `similar`.
        warnings, level: see `pictures.Picture`.
    """

    checksum: int
    fingerprints: tuple[bytes, ...]
    warnings: Sequence[str] = ()
    level: int | None = None


def from_folder(user_data: UserData, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """The arrays `{train,test}_{images,labels}.npy` in a folder, and those of EXTRA.

    Args:
        tell: gets a line for what is ignored.

    Raises:
        Refusal: the images cannot be used.
    """
    class_names, listings, extra = list_images(user_data, tell)
    with (
        ProcessPoolExecutor(
            usable_cpus(), multiprocessing.get_context("fork"), keep_stderr
        ) as pool,
        ExitStack() as stack,
    ):
        try:
            headers: dict[str, list[Any]] = {split: [] for split in SPLITS}
            if not (user_data.image_size and user_data.channels):
                headers = read_headers(listings, pool)
            bad = {
                split: {number: why for number, why in enumerate(found) if isinstance(why, str)}
                for split, found in headers.items()
            }
            refuse_unreadable(user_data, listings, bad)
            size, channels = common_shape(user_data, listings, headers)
            files = {}
            remarks = Remarks()
            for split, listing in listings.items():
                file = ArrayFile(folder / f"{split}_images.npy", np.uint8, (*size, channels))
                stack.callback(file.close)
                bad[split] |= decode_all(user_data, listing, file, pool, split, remarks)
                files[split] = file
        except BrokenProcessPool:
            where = f"dataset.folder: {user_data.path}: a process that decoded an image was killed"
            why = "it ran out of memory, or an image crashed it"
            raise Refusal(f"{where}; {why}; run the same command again with more memory") from None
        refuse_unreadable(user_data, listings, bad)
        remarks.tell(tell)
        kept = {}
        for split, listing in listings.items():
            rows = np.setdiff1d(np.arange(len(listing.paths)), list(bad[split]))
            files[split].keep(rows)
            kept[split] = listing.kept(rows, Path(user_data.path))
        labels = {split: listing.labels for split, listing in kept.items()}
        write_origins(folder / FILE, class_names, kept)
        write_extra(folder, kept["train"].paths, extra)
        similar = list(similar_images(files["train"], files["test"]))
        if similar:
            test_row, train_row = similar[0]
            tell(
                f"warning: {len(similar):,} of the {len(kept['test'].paths):,} test images are "
                f"almost the same as one of train, such as {kept['test'].paths[test_row]} and "
                f"{kept['train'].paths[train_row]}; accuracy on them says little about new images"
            )
        left_out = (listings[split].paths[each] for split in SPLITS for each in sorted(bad[split]))
        skipped = [str(path.relative_to(user_data.path)) for path in left_out]
        return finish(user_data, class_names, files, labels, tell, skipped, len(similar))


def read_headers(listings: dict[str, Listing], pool: ProcessPoolExecutor) -> dict[str, list[Any]]:
    """`header_of` each image of each split."""
    return {
        split: list(
            progress(
                pool.map(header_of, listing.paths, chunksize=TASK),
                f"reading the headers of {split}",
                len(listing.paths),
            )
        )
        for split, listing in listings.items()
    }


def decode_all(
    user_data: UserData,
    listing: Listing,
    file: ArrayFile,
    pool: ProcessPoolExecutor,
    split: str,
    remarks: Remarks,
) -> dict[int, str]:
    """Decode the images of a split into its file.

    Args:
        remarks: gets what their decoder says.

    Returns:
        Why images cannot be used, by their number.
    """
    count = len(listing.paths)
    # The size at once, so that a full disk is found before the work.
    os.posix_fallocate(file.file.fileno(), 0, file.offset(count))
    file.file.flush()
    tasks = [
        (file.path, file.offset(start), listing.paths[start : start + TASK])
        for start in range(0, count, TASK)
    ]
    decode = partial(decode_into, user_data.image_size, user_data.jpeg_scaling, file.shape)
    results = chain.from_iterable(pool.map(decode, tasks))
    bad = {}
    for number, result in enumerate(progress(results, f"importing {split}", count)):
        if isinstance(result, str):
            bad[number] = result
            result = Decoded(0, ())
        name = listing.paths[number].relative_to(user_data.path)
        remarks.note(name, result.warnings, result.level)
        file.checksums.append(result.checksum)
        file.fingerprints.append(result.fingerprints)
    return bad


def list_images(
    user_data: UserData, tell: Callable[[str], None]
) -> tuple[tuple[str, ...], dict[str, Listing], dict[str, dict[Path, Any]]]:
    """The classes, the images of both splits, and the groups and the weights of images, by their
    paths in the folder; without either, it is empty.

    Raises:
        Refusal: a split or a class is missing, or empty; or images of a group are in both splits.
    """
    found = (from_table if user_data.table else from_folders)(user_data, tell)
    names = found.class_names
    given = found.groups or groups_of(user_data, found, tell)
    names_of_groups = composed({*given.values()})
    groups = {path: names_of_groups.get(group, group) for path, group in given.items()}
    if "all" not in found.paths:
        splits = found.paths
        refuse_divided(splits, groups)
    elif user_data.test_fraction is None:
        raise Refusal(
            f"dataset.table: {user_data.table} has no column split; add it, or give "
            "dataset.test_fraction, such as 0.2"
            if user_data.table
            else f"dataset.folder: {user_data.path} has no train/ and test/; if its folders are "
            "classes, give dataset.test_fraction, such as 0.2"
        )
    else:
        splits = divided(user_data, found, groups)
    if groups:
        in_test = {groups[path] for paths in splits["test"] for path in paths}
        tell(f"{len(set(groups.values())):,} groups, {len(in_test):,} of them in test")
    refuse_empty(user_data, names, splits, groups)
    extra = {
        key: {path.relative_to(user_data.path): value for path, value in values.items()}
        for key, values in (("groups", groups), ("weights", found.weights))
    }
    listings = {split: mixed(of_classes) for split, of_classes in splits.items()}
    return tuple(names), listings, extra


def refuse_empty(
    user_data: UserData,
    names: Sequence[str],
    splits: Mapping[str, Sequence[Sequence[Path]]],
    groups: Mapping[Path, str],
) -> None:
    """Refuse a class without images in a split. Only the test images of a table, such as those of
    another site, may lack a class if they have two others.

    Raises:
        Refusal: naming the class.
    """
    for split, of_classes in splits.items():
        for number in [number for number, paths in enumerate(of_classes) if not paths]:
            if may_lack_classes(user_data, split, sum(map(bool, of_classes))):
                continue
            name = shown(names[number])
            remedy = "add some, or remove the class"
            every = [path for each in splits.values() for path in each[number]]
            if groups and every and user_data.test_fraction:
                remedy = "give another dataset.test_fraction or split_seed"
                if len(those := {groups[path] for path in every}) == 1:
                    remedy = f"all are of the group {shown(those.pop())}; a class needs two"
            key, where = (
                ("table", user_data.table) if user_data.table else ("folder", user_data.path)
            )
            raise Refusal(
                f"dataset.{key}: the class {name} has no {split} images in {where}; {remedy}"
            )


def write_extra(
    folder: Path, paths: Sequence[Path], extra: Mapping[str, Mapping[Path, Any]]
) -> None:
    """Write the arrays of EXTRA that there are.

    Args:
        paths: of the images of the train split.
        extra: of `list_images`.
    """
    for key, values in extra.items():
        if not values:
            continue
        column = [values[path] for path in paths]
        if key == "groups":
            number = {name: place for place, name in enumerate(sorted({*column}))}
            column = [number[name] for name in column]
        name, dtype = EXTRA[key]
        write_array(folder / f"{name}.npy", np.array(column, dtype))


def from_folders(user_data: UserData, tell: Callable[[str], None]) -> Members:
    """The images in `train/<class>/` and `test/<class>/`, or in `<class>/`.

    Raises:
        Refusal: a split is missing, or a folder is no class.
    """
    root = Path(user_data.path)
    train = root / "train"
    test = next((root / name for name in TEST_FOLDERS if (root / name).is_dir()), None)
    if train.is_dir() or test:
        if not test:
            raise Refusal(
                f"dataset.folder: {root} has train/ but neither test/ nor val/; add one, or give a "
                "folder of classes and dataset.test_fraction"
            )
        if not train.is_dir():
            raise Refusal(f"dataset.folder: {root} has {test.name}/ but no train/; add it")
        if user_data.test_fraction is not None:
            raise Refusal(
                f"dataset.test_fraction: {root} has {test.name}/ already; leave test_fraction out"
            )
        classes, of_test = class_folders(train), class_folders(test)
        names = list(classes)
        if unknown := [folder for name, folder in of_test.items() if name not in classes]:
            raise Refusal(f"dataset.folder: {unknown[0]} is a class that {train} does not have")
        search = Search(root, (train, test), (*classes.values(), *of_test.values()))
        found = {
            split: [search.images_below(folders.get(name)) for name in names]
            for split, folders in (("train", classes), ("test", of_test))
        }
    else:
        places = {place: SPLIT_FOLDERS.get(place.name.lower()) for place in folders_in(root)}
        both = {"train", "test"} <= {*places.values()}
        for place, name in places.items():
            # A class may be called `training`, if there is no `testing`.
            if name and (both or place.name.lower() in ("train", *TEST_FOLDERS)):
                raise Refusal(f"dataset.folder: {place} is no class; rename it to {name}")
        classes = class_folders(root)
        refuse_splits_below(classes)
        names = list(classes)
        search = Search(root, (), list(classes.values()))
        found = {"all": [search.images_below(classes[name]) for name in names]}
    search.tell(tell)
    return Members(names, found, {})


def refuse_splits_below(classes: Mapping[str, Path]) -> None:
    """Refuse a class with a split of its own, which would be divided anew."""
    for folder in classes.values():
        named = (entry for entry in os.scandir(folder) if entry.name.lower() in SPLIT_FOLDERS)
        splits = {SPLIT_FOLDERS[entry.name.lower()] for entry in named if entry.is_dir()}
        if {"train", "test"} <= splits:
            raise Refusal(
                f"dataset.folder: {folder} has train/ and test/ of its own; move them above the "
                "classes, as train/<class>/ and test/<class>/"
            )


def groups_of(
    user_data: UserData, members: Members, tell: Callable[[str], None]
) -> dict[Path, str]:
    """The group of each image that `dataset.group` gives; empty without it.

    Raises:
        Refusal: an image has none.
    """
    paths = [path for classes in members.paths.values() for found in classes for path in found]
    if user_data.group != BY_FOLDER:
        return groups_in(user_data, paths, tell) if user_data.group else {}
    root = Path(user_data.path)
    if user_data.table:
        # Those of a split are no part of a group's name: a patient could be in both.
        below = all(path.relative_to(root).parts[0].lower() in SPLIT_FOLDERS for path in paths)
        return by_folder(root, int("all" not in members.paths and below), paths, of_table=True)
    return by_folder(root, 1 if "all" in members.paths else 2, paths)


def divided(
    user_data: UserData, members: Members, groups: dict[Path, str]
) -> dict[str, list[list[Path]]]:
    """The images of each class by split; of a class with a single image, none for test."""
    classes = members.paths["all"]
    if groups:
        labels = {path: label for label, paths in enumerate(classes) for path in paths}
        names = groups_of_test(labels, groups, user_data)
        in_test = {path for path, group in groups.items() if group in names}
    else:
        in_test = {
            paths[row]
            for number, paths in enumerate(classes)
            for row in chosen_for_test(len(paths), user_data, number).tolist()
        }
    return {
        split: [[path for path in paths if (path in in_test) == wanted] for paths in classes]
        for split, wanted in (("train", False), ("test", True))
    }


def mixed(classes: list[list[Path]]) -> Listing:
    """The images of all classes in a fixed random order: neighbours in the file, which `order:
    blocks` reads together, are then of many classes.
    """
    paths = [path for paths in classes for path in paths]
    labels = [label for label, paths in enumerate(classes) for _ in paths]
    order = np.random.default_rng(0).permutation(len(paths)).tolist()
    return Listing([labels[number] for number in order], [paths[number] for number in order])


def class_folders(folder: Path) -> dict[str, Path]:
    """The folders of the classes by name, sorted. Names are in Unicode's composed form: Macs write
    another one than most other systems.

    Raises:
        Refusal: there is none, or a name cannot be shown, is there twice, or may be no class's.
    """
    for path in sorted(folder.iterdir()):
        if path.name.lower() in PREVIEWS and path.is_dir():
            raise Refusal(
                f"dataset.folder: {path} may be a class or previews; rename it; names with a dot "
                "in front are left out"
            )
    places = folders_in(folder)
    if not places:
        raise Refusal(f"dataset.folder: {folder} has no folders; each class needs one")
    if len(places) > MOST_CLASSES:
        raise Refusal(f"dataset.folder: {folder} has {len(places):,} folders; are they classes?")
    found: dict[str, Path] = {}
    for place in places:
        name = unicodedata.normalize("NFC", place.name)
        if not is_class_name(name):
            raise Refusal(f"dataset.folder: {shown(name)} is not a name for a class; rename it")
        if name in found:
            raise Refusal(
                f"dataset.folder: {folder} has two folders {shown(name)}, in different forms of "
                "Unicode; merge them"
            )
        found[name] = place
    return dict(sorted(found.items()))


class Search:
    """The search for images in the folders of classes; keeps what it has left out.

    Args:
        root: of the data set.
        splits: its folders of splits; empty if its folders are classes.
        classes: the folders of all classes; no link leads from one to another.
    """

    def __init__(self, root: Path, splits: Sequence[Path], classes: Sequence[Path]) -> None:
        self.root, self.splits, self.closed = root, splits, (root, *classes)
        self.unwanted: list[str] = []
        self.links: list[Path] = []
        self.others: list[str] = []
        self.visited: set[Identity] = set()

    def images_below(self, folder: Path | None) -> list[Path]:
        """The images in a folder and below, sorted; none without a folder. Every folder counts
        once.

        Raises:
            Refusal: a folder cannot be read, or a link leads to nothing.
        """
        found: list[Path] = []
        if folder is None:
            return found
        for place, names in walk(folder, self.is_wanted, self.links, self.closed, self.visited):
            for name in names:
                if is_image(name):
                    found.append(place / name)
                else:
                    refuse_dangling(place / name)
                    self.others.append(name)
        return found

    def is_wanted(self, name: str) -> bool:
        wanted = is_wanted(name)
        if not wanted:
            self.unwanted.append(name)
        return wanted

    def tell(self, tell: Callable[[str], None]) -> None:
        """Tell what is not used."""
        places = (self.root, *self.splits)
        if self.others:
            names = named(self.others)
            tell(
                f"warning: {len(self.others):,} files are not named like images and were ignored: "
                f"{names}"
            )
        for place in places:
            found = sorted(path.name for path in place.iterdir())
            self.unwanted += [name for name in found if not is_wanted(name)]
        if self.unwanted:
            tell(
                f"warning: {len(self.unwanted):,} hidden names, and folders of previews or deleted "
                f"files, were left out: {named(self.unwanted)}"
            )
        if self.links:
            links = named([link.relative_to(self.root) for link in self.links])
            tell(
                "warning: folders were left out that lead up, are of another class, or are there "
                f"under another name: {links}"
            )
        for place in places:
            if count := sum(is_image(path.name) for path in place.iterdir()):
                tell(f"warning: {count:,} images in {place} itself are in no class and not used")
        unused = sorted({*folders_in(self.root)} - {*self.splits}) if self.splits else []
        counts = {place.name: self.count_below(place) for place in unused}
        if told := [f"{name}/ ({count:,} images)" for name, count in counts.items() if count]:
            tell(
                f"warning: not used: {named(told)} in {self.root}; to train with them, move them "
                "into train/, of which validation_fraction holds some out"
            )

    def count_below(self, folder: Path) -> int:
        """How many images are in a folder that is not used, and nowhere else."""
        walked = walk(folder, is_wanted, [], visited=self.visited)
        return sum(is_image(name) for _, names in walked for name in names)


def folders_in(folder: Path) -> list[Path]:
    """Those that can be of a data set, sorted.

    Raises:
        Refusal: a link leads to nothing.
    """
    found = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if is_wanted(entry.name):
            refuse_dangling(Path(entry.path))
            if entry.is_dir():
                found.append(Path(entry.path))
    return found


def refuse_dangling(path: Path) -> None:
    """Refuse a link to nothing: a whole folder could be missing."""
    if path.is_symlink() and not path.exists():
        raise Refusal(f"dataset.folder: {path} is a link to nothing; repair or remove it")


def header_of(path: Path) -> tuple[tuple[int, int], bool] | str:
    try:
        return read_header(path)
    except Unreadable as error:
        return str(error)


def keep_stderr() -> None:
    """Keep what this process writes to stderr: libtiff and Pillow's log name no file there."""
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)


def kept_stderr() -> list[str]:
    """Its lines since the last call."""
    text = os.pread(2, 10_000, 0).decode(errors="replace")
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)
    lines = [line.removeprefix("tempfile.tif: ") for line in text.splitlines()]
    return [one_line(line, 80) for line in dict.fromkeys(lines) if line.strip()]


def decode_into(
    size: tuple[int, int] | None,
    jpeg_scaling: bool,
    shape: tuple[int, ...],
    task: tuple[Path, int, list[Path]],
) -> list[Decoded | str]:
    """Decode some images into their rows of a file.

    Args:
        size, jpeg_scaling: as of `pictures.decoded`.
        shape: of a row.

    Returns:
        For each one, or why it is unreadable.
    """
    path, offset, images = task
    found: list[Decoded | str] = []
    with path.open("rb+") as file:
        for image in images:
            kept_stderr()
            try:
                pixels, level, warnings = decoded(image, size, shape[2], jpeg_scaling)
                if pixels.shape != shape:
                    raise Unreadable("its size is not that of its header")
                content = pixels.data.cast("B")
                os.pwrite(file.fileno(), content, offset + len(found) * len(content))
                warnings = [*warnings, *kept_stderr()]
                found.append(Decoded(zlib.crc32(content), fingerprints(pixels), warnings, level))
            except Unreadable as error:
                found.append(str(error))
    return found


def refuse_unreadable(
    user_data: UserData, listings: dict[str, Listing], bad: dict[str, dict[int, str]]
) -> None:
    if user_data.skip_unreadable:
        return
    names = [
        f"{listings[split].paths[number].relative_to(user_data.path)} ({why})"
        for split, found in bad.items()
        for number, why in sorted(found.items())
    ]
    if names:
        count = f"{len(names):,} images are" if len(names) > 1 else "1 image is"
        remedy = "; remove them, or set dataset.skip_unreadable: true"
        if all(ARRAYS in why for found in bad.values() for why in found.values()):
            remedy = ""
        raise Refusal(f"{count} unreadable: {named(names)}{remedy}")


def common_shape(
    user_data: UserData, listings: dict[str, Listing], headers: dict[str, list[Any]]
) -> tuple[tuple[int, int], int]:
    """Height and width, and channels, of all images.

    Raises:
        Refusal: they differ, and `image_size` is not given.
    """
    if user_data.image_size and user_data.channels:
        return user_data.image_size, user_data.channels
    readable = [
        (path, header)
        for split, listing in listings.items()
        for path, header in zip(listing.paths, headers[split], strict=True)
        if not isinstance(header, str)
    ]
    if not readable:
        raise Refusal(f"dataset.folder: {user_data.path} has no readable image")
    channels = user_data.channels or (1 if all(grey for _, (_, grey) in readable) else 3)
    if user_data.image_size:
        return user_data.image_size, channels
    (first, (size, _)), *others = readable
    for path, (other, _) in others:
        if other != size:
            one, two = (each.relative_to(user_data.path) for each in (first, path))
            raise Refusal(
                f"images have different sizes ({one}: {size[0]} x {size[1]}, {two}: {other[0]} x "
                f"{other[1]}); give dataset.image_size, such as 224"
            )
    return size, channels
