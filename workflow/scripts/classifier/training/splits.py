"""Which training images a run trains on, validates on and is tested on: a function of labels,
groups and validation_seed alone. Free of torch, because a dry run counts them.
"""

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from classifier.training.sizes import validation_images
from manynodes.base.errors import Refusal
from manynodes.data.user.groups import nearest_groups

# Beside the labels of the classes, the key of all images.
ALL = -1


def split_rows(
    run: Any, labels: np.ndarray, groups: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Sorted rows of a run's training images and of its validation images, int64.

    Args:
        labels: of all images of the train split, (n,).
        groups: of all of them, 0 to the number of groups - 1, (n,); None: there are none.

    Raises:
        Refusal: there are fewer groups than folds.
    """
    rows, seed = np.arange(len(labels)), run.validation_seed
    if run.folds:
        rows, _ = fold_split(labels, run.folds, run.fold, seed, groups)
    if groups is None:
        parts = validation_split(len(rows), validation_images(run, len(labels)), seed)
    else:
        parts = validation_groups(labels[rows], groups[rows], run.validation_fraction, seed)
    return rows[parts[0]], rows[parts[1]]


def validation_split(n: int, held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the indices 0 .. n - 1 at random.

    Returns:
        Sorted indices of the training images (n - held_out,) and of the validation images
        (held_out,), int64.
    """
    order = np.random.default_rng(seed).permutation(n)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def validation_groups(
    labels: np.ndarray, groups: np.ndarray, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Split images by whole groups: in random order, each group that brings the validation images
    nearer to this share, of all images and of each class.

    Args:
        labels, groups: (n,), whole numbers.

    Returns:
        Sorted indices of the training images and of the validation images, int64; either may be
        empty.
    """
    names, members = by_group(labels, groups)
    total = Counter(labels.tolist()) + Counter({ALL: len(labels)})
    wanted = {key: fraction * count for key, count in total.items()}
    inside = np.isin(groups, names[nearest_groups(members, wanted, seed)])
    return np.flatnonzero(~inside), np.flatnonzero(inside)


def fold_split(
    labels: np.ndarray, folds: int, fold: int, seed: int, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Divide images into folds of equal size, to within one image, and each class as evenly; or
    with groups as evenly as whole ones allow.

    Args:
        labels: (n,).
        groups: (n,), whole numbers; None: there are none.

    Returns:
        Sorted indices of the images outside the fold and of those in it, int64.

    Raises:
        Refusal: there are fewer groups than folds.
    """
    if groups is not None:
        inside = fold_of_groups(labels, groups, folds, seed)[groups] == fold
        return np.flatnonzero(~inside), np.flatnonzero(inside)
    order = np.lexsort((np.random.default_rng(seed).permutation(len(labels)), labels))
    inside = np.arange(len(labels)) % folds == fold
    return np.sort(order[~inside]), np.sort(order[inside])


def fold_of_groups(labels: np.ndarray, groups: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """The fold of each group, int64 (1 + the highest group,).

    The largest groups first, equal ones in random order, each to the fold that has the smallest
    shares of all images and of the group's classes so far.

    Args:
        labels, groups: of the images, (n,), whole numbers.

    Raises:
        Refusal: there are fewer groups than folds.
    """
    names, members = by_group(labels, groups)
    if len(names) < folds:
        raise Refusal(
            f"folds: the training images are of {len(names):,} groups, fewer than the {folds} "
            f"folds; use at most {len(names)}"
        )
    total = Counter(labels.tolist()) + Counter({ALL: len(labels)})
    sizes = np.array([counts[ALL] for counts in members])
    filled: list[defaultdict[int, float]] = [defaultdict(float) for _ in range(folds)]
    found = np.zeros(1 + int(groups.max()), np.int64)
    for number in np.lexsort((np.random.default_rng(seed).permutation(len(names)), -sizes)):
        counts = members[number]
        # Python's sums: BLAS may round a tie to another fold on another CPU.
        costs = [sum(n * shares[key] for key, n in counts.items()) for shares in filled]
        fold = costs.index(min(costs))
        for key, n in counts.items():
            filled[fold][key] += n / total[key]
        found[names[number]] = fold
    return found


def by_group(labels: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, list[Counter[int]]]:
    """The numbers of the groups, sorted, and for each its images by class, and of ALL."""
    pairs, counts = np.unique(np.stack((groups, labels)).astype(np.int64), axis=1,
                              return_counts=True)  # fmt: skip
    names = np.unique(pairs[0])
    members: list[Counter[int]] = [Counter() for _ in names]
    for place, label, count in zip(
        np.searchsorted(names, pairs[0]).tolist(), pairs[1].tolist(), counts.tolist(), strict=True
    ):
        members[place].update({label: count, ALL: count})
    return names, members
