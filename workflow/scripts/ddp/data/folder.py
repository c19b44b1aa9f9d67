"""A data set on disk: four .npy arrays and `manifest.json`, written last, with their hashes."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddp.base.errors import Refusal, shown
from ddp.base.reading import open_file, read_bytes, read_json
from ddp.data.datasets import ARRAYS, DATASETS, IMAGE_SHAPE

MANIFEST = "manifest.json"


def content_sha256(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes in C order, without any header."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def whole_sha256(content: dict[str, str]) -> str:
    """One SHA-256 for a whole data set, from the digests of its arrays."""
    return hashlib.sha256("".join(content[name] for name in ARRAYS).encode()).hexdigest()


def array_shape(name: str, n: int) -> tuple[int, ...]:
    """The shape of one of ARRAYS for n images."""
    return (n, *IMAGE_SHAPE) if name.endswith("images") else (n,)


def file_sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_wrong_content(dataset: str, arrays: dict[str, np.ndarray], source: str) -> None:
    """Refuse arrays that are not the data set.

    Raises:
        Refusal: an array has the wrong shape, type, label or SHA-256.
    """
    spec = DATASETS[dataset]
    for name in ARRAYS:
        array = arrays[name]
        n = spec.train_images if name.startswith("train") else spec.test_images
        shape = array_shape(name, n)
        if array.shape != shape or array.dtype != np.uint8:
            raise Refusal(
                f"{source}: {name} is {array.dtype} {array.shape}, {dataset} has uint8 {shape}; it "
                f"is not {dataset}"
            )
        if name.endswith("labels") and int(array.max()) >= spec.classes:
            raise Refusal(
                f"{source}: {name} has the label {array.max()}; {dataset} has 0 to "
                f"{spec.classes - 1}"
            )
        found, known = content_sha256(array), spec.sha256.get(name)
        if known and found != known:
            raise Refusal(
                f"{source}: the SHA-256 of {name} is {found[:12]}…, that of {dataset} is "
                f"{known[:12]}…; it is not {dataset}"
            )


@dataclass(frozen=True)
class DataFolder:
    """A folder with a data set, and the manifest of what it must hold.

    Attributes:
        manifest: `dataset`, `source`, `classes`, `images` per split, `content_sha256` per array,
            `sha256` (of the whole data set, see `whole_sha256`), and `files`: for each file name
            its `sha256` and `bytes`.
    """

    path: Path
    manifest: dict[str, Any]

    @staticmethod
    def read(path: Path) -> "DataFolder":
        """The folder, with its manifest checked against the declaration of the data set.

        Raises:
            Refusal: there is no valid manifest.
        """
        return DataFolder(path, read_manifest(path / MANIFEST))

    def at(self, path: Path) -> "DataFolder":
        """A copy of this folder at another path; the manifest of the copy is not trusted."""
        return DataFolder(path, self.manifest)

    @property
    def dataset(self) -> str:
        return self.manifest["dataset"]

    @property
    def classes(self) -> int:
        return self.manifest["classes"]

    @property
    def sha256(self) -> str:
        return self.manifest["sha256"]

    @property
    def bytes(self) -> int:
        return sum(file["bytes"] for file in self.manifest["files"].values())

    def damaged_files(self) -> list[str]:
        """Names of the files that are missing or do not have the manifest's SHA-256."""
        return [
            name
            for name, known in self.manifest["files"].items()
            if not (self.path / name).is_file()
            or (self.path / name).stat().st_size != known["bytes"]
            or file_sha256(self.path / name) != known["sha256"]
        ]

    def load(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Read the images and labels of the split `train` or `test` into memory and check them
        there.

        On a disk that others can write to, files may have changed since their last check.

        Returns:
            Images, uint8 (n, 32, 32, 3), and labels, uint8 (n,).

        Raises:
            Refusal: they do not match the manifest.
        """
        return self.load_array(f"{split}_images"), self.load_array(f"{split}_labels")

    def load_array(self, name: str) -> np.ndarray:
        path = self.path / f"{name}.npy"
        shape = array_shape(name, self.manifest["images"][name.partition("_")[0]])
        size = math.prod(shape)
        try:
            # Without the header, which is not trusted: the last bytes of the file are the array's.
            content = memoryview(read_bytes(path, self.manifest["files"][path.name]["bytes"]))[
                -size:
            ]
        except OSError as error:
            raise Refusal(
                f"{path}: {error.strerror}; delete {self.path} and run the same command again"
            ) from None
        if hashlib.sha256(content).hexdigest() != self.manifest["content_sha256"][name]:
            raise Refusal(
                f"{path} is not the {self.dataset} of its manifest: its SHA-256 differs; "
                "delete its folder and fetch the data again"
            )
        array = np.frombuffer(content, np.uint8).reshape(shape)
        if name.endswith("labels") and int(array.max()) >= self.classes:
            raise Refusal(
                f"{path} has the label {array.max()}; {self.dataset} has {self.classes} classes; "
                "fetch the data again"
            )
        return array


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = read_json(path, "manifest", "fetch the data again")
    except FileNotFoundError:
        raise Refusal(f"{path} is not there; fetch the data first", make_again=path) from None
    except Refusal as refusal:
        raise Refusal(str(refusal), make_again=path) from None
    spec = DATASETS.get(manifest["dataset"])
    if spec is None:
        problem = f"{path} is not that of a data set: {shown(manifest['dataset'])}"
        raise Refusal(f"{problem}; fetch the data again", make_again=path)
    content = manifest["content_sha256"]
    known = {
        "classes": spec.classes,
        "images": {"train": spec.train_images, "test": spec.test_images},
        "content_sha256": content | spec.sha256,
        "sha256": whole_sha256(content),
    }
    for key, value in known.items():
        if manifest[key] != value:
            problem = f"{path} is not that of {manifest['dataset']}: {key} differs"
            raise Refusal(f"{problem}; fetch the data again", make_again=path)
    return manifest
