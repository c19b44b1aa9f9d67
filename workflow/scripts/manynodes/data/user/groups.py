"""Images that belong together, such as those of one patient: all of them in one split."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from manynodes.base.errors import Refusal, shown
from manynodes.data.user.declaration import UserData


def by_folder(
    root: Path, depth: int, paths: Sequence[Path], of_table: bool = False
) -> dict[Path, str]:
    """The group of each image: the first folder below the one of its class. What is further below
    belongs to it, such as the studies of a patient.

    Args:
        depth: of the folders of classes below `root`.
        of_table: a table names the classes, so that folders in folders may be anything.

    Raises:
        Refusal: an image lies in none, or it is not known in which.
    """
    found = {}
    for path in paths:
        inside = path.relative_to(root)
        folders = inside.parts[depth:-1]
        if not folders:
            raise Refusal(
                f"dataset.group: {inside} is in no folder of a group; move it into one, or give a "
                "CSV file with the columns file and group"
            )
        if of_table and len(folders) > 1:
            raise Refusal(
                f"dataset.group: {inside} is in a folder of a folder, either of which may be the "
                "group; give the table a column group instead"
            )
        found[path] = folders[0]
    return found


def groups_of_test(
    labels: Mapping[Path, int], groups: Mapping[Path, str], user_data: UserData
) -> set[str]:
    """The groups whose images become test images, see `nearest_groups`: near to `test_fraction` of
    every class.

    Args:
        labels: of all images.
        groups: of all images.
    """
    members: dict[str, Counter[int]] = {}
    for path, group in groups.items():
        members.setdefault(group, Counter())[labels[path]] += 1
    fraction = user_data.test_fraction or 0.0
    wanted = {
        label: max(1, round(fraction * count)) for label, count in Counter(labels.values()).items()
    }
    names = sorted(members)
    chosen = nearest_groups([members[name] for name in names], wanted, user_data.split_seed)
    return {names[number] for number in chosen}


def nearest_groups(
    members: Sequence[Mapping[int, int]], wanted: Mapping[int, float], seed: int
) -> list[int]:
    """In random order, each group that brings the numbers of images nearer to the wanted ones.

    Args:
        members: for each group, its images by class.
        wanted: images by class.

    Returns:
        Places in `members`.
    """
    missing = dict(wanted)
    chosen = []
    for number in np.random.default_rng(seed).permutation(len(members)).tolist():
        counts = members[number]
        nearer = sum(abs(missing[label]) - abs(missing[label] - n) for label, n in counts.items())
        if nearer > 0:
            chosen.append(number)
            for label, n in counts.items():
                missing[label] -= n
    return chosen


def refuse_divided(
    splits: Mapping[str, Sequence[Sequence[Path]]], groups: Mapping[Path, str]
) -> None:
    """Refuse a group with images in both splits.

    Args:
        splits: the images of each class, by split.
        groups: of all images, or of none.

    Raises:
        Refusal: naming it.
    """
    train, test = (
        {groups[path] for paths in classes for path in paths if groups}
        for classes in splits.values()
    )
    if both := sorted(train & test):
        raise Refusal(
            f"dataset.group: {len(both):,} groups have images in train and in test, such as "
            f"{shown(both[0])}; move each into one split"
        )
