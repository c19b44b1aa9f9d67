"""A data set on disk: four .npy arrays and `manifest.json`, written last, with their hashes."""

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manynodes.base.errors import Refusal
from manynodes.base.reading import file_sha256, open_file, read_json
from manynodes.data.datasets import ARRAYS, DATASETS, EXTRA

if TYPE_CHECKING:
    # Otherwise where it is needed: Snakemake, `launch`, `stage` and `publish` read no array.
    import numpy as np

MANIFEST = "manifest.json"
# What the user's own images were imported from, see `UserData.fingerprint`; not a part of the data.
SOURCE = ".source"


def content_sha256(array: "np.ndarray") -> str:
    """SHA-256 of an array's bytes in C order, without any header."""
    import numpy as np

    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def write_array(path: Path, array: "np.ndarray") -> None:
    """Write an .npy file. Not by np.save, whose error on a full disk gives no cause: "n requested
    and m written".

    Raises:
        OSError: the disk is full.
    """
    import numpy as np

    array = np.ascontiguousarray(array)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


def arrays_of(settings: Mapping[str, Any]) -> list[str]:
    """The names of a data set's arrays, by the settings of its import."""
    return [*ARRAYS, *(name for key, (name, _) in EXTRA.items() if settings.get(key))]


def whole_sha256(content: dict[str, str], settings: dict[str, Any]) -> str:
    """One SHA-256 for a whole data set, from the digests of its arrays and the settings of its
    import.
    """
    text = "".join(content[name] for name in arrays_of(settings))
    if settings:
        text += json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def label_type(classes: int) -> str:
    """The type in which labels are stored."""
    return "uint8" if classes <= 256 else "int32"


def refuse_wrong_content(dataset: str, arrays: "dict[str, np.ndarray]", source: str) -> None:
    """Refuse arrays that are not the data set.

    Raises:
        Refusal: an array has the wrong shape, type, label or SHA-256.
    """
    spec = DATASETS[dataset]
    for name in ARRAYS:
        array = arrays[name]
        n = spec.train_images if name.startswith("train") else spec.test_images
        shape = (n, *spec.image_shape) if name.endswith("images") else (n,)
        if array.shape != shape or array.dtype != "uint8":
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
        manifest: `dataset`, `source`, `classes`, `class_names`, `image_shape` (h, w, c), `dtype`
            of the images, `images` per split, `settings` and `skipped` of an import,
            `content_sha256` per array, `sha256` (of the whole data set, see `whole_sha256`), and
            `files`: for each file name its `sha256` and `bytes`.
    """

    path: Path
    manifest: dict[str, Any]

    @staticmethod
    def read(path: Path) -> "DataFolder":
        """The folder, with its manifest checked against the declaration of the data set.

        Raises:
            Refusal: there is no valid manifest.
        """
        file = path / MANIFEST
        try:
            manifest = read_json(file, "manifest", "fetch the data again")
        except FileNotFoundError:
            raise Refusal(f"{file} is not there; fetch the data first", make_again=file) from None
        except Refusal as refusal:
            raise Refusal(str(refusal), make_again=file) from None
        spec = DATASETS.get(manifest["dataset"])
        content = manifest["content_sha256"]
        names = arrays_of(manifest["settings"])
        if {*content} != {*names} or {*manifest["files"]} != {f"{name}.npy" for name in names}:
            problem = f"{file} does not name the arrays of its settings"
            raise Refusal(f"{problem}; fetch the data again", make_again=file)
        known: dict[str, Any] = {"sha256": whole_sha256(content, manifest["settings"])}
        if spec:
            known |= {
                "classes": spec.classes,
                "class_names": list(spec.class_names),
                "image_shape": list(spec.image_shape),
                "dtype": "uint8",
                "images": {"train": spec.train_images, "test": spec.test_images},
                "settings": {},
                "content_sha256": content | spec.sha256,
            }
        elif len(manifest["class_names"]) != manifest["classes"] or not manifest["settings"]:
            known["class_names"] = None
        for key, value in known.items():
            if manifest[key] != value:
                problem = f"{file} is not that of {manifest['dataset']}: {key} differs"
                raise Refusal(f"{problem}; fetch the data again", make_again=file)
        return DataFolder(path, manifest)

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
    def class_names(self) -> list[str]:
        """By label."""
        return self.manifest["class_names"] or [str(label) for label in range(self.classes)]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(h, w, c)."""
        height, width, channels = self.manifest["image_shape"]
        return height, width, channels

    @property
    def sha256(self) -> str:
        return self.manifest["sha256"]

    @property
    def bytes(self) -> int:
        return sum(file["bytes"] for file in self.manifest["files"].values())

    def damaged_files(self) -> list[str]:
        """Names of the files that are missing or do not have the manifest's SHA-256."""
        return [name for name in self.manifest["files"] if self.damaged(name)]

    def damaged(self, name: str) -> bool:
        """Whether a file is missing or does not have the manifest's SHA-256."""
        path, known = self.path / name, self.manifest["files"][name]
        return (
            not path.is_file()
            or path.stat().st_size != known["bytes"]
            or file_sha256(path) != known["sha256"]
        )

    def split(self, name: str) -> "tuple[np.ndarray, np.ndarray]":
        """The images and labels of the split `train` or `test`.

        The images are mapped: pages come from the disk, or from the node's page cache, when they
        are read. Nothing is checked, see `refuse_changed`.

        Returns:
            Images (n, h, w, c), uint8 or float32, and labels (n,), uint8 or int32.

        Raises:
            Refusal: they do not have the manifest's size.
        """
        import numpy as np

        labels = np.array(self.array(f"{name}_labels"))
        if int(labels.max()) >= self.classes or int(labels.min()) < 0:
            wrong = int(labels.min()) if int(labels.min()) < 0 else int(labels.max())
            raise Refusal(
                f"{self.path}: {name}_labels.npy has the label {wrong}; {self.dataset} has "
                f"{self.classes} classes; fetch the data again"
            )
        return self.array(f"{name}_images"), labels

    def extra(self, key: str) -> "np.ndarray | None":
        """One of EXTRA, (n,); None if the data set does not have it.

        Raises:
            Refusal: it does not have the manifest's size, or the number of a group is out of range.
        """
        if not self.manifest["settings"].get(key):
            return None
        import numpy as np

        name = EXTRA[key][0]
        found = np.array(self.array(name))
        if key == "groups" and not 0 <= found.min() <= found.max() < len(found):
            raise Refusal(f"{self.path / name}.npy has a group out of range; fetch the data again")
        return found

    def form(self, name: str) -> "tuple[np.dtype, tuple[int, ...]]":
        """Type and shape of one of ARRAYS or EXTRA."""
        import numpy as np

        n = self.manifest["images"][name.partition("_")[0]]
        if name in dict(EXTRA.values()):
            return np.dtype(dict(EXTRA.values())[name]), (n,)
        if name.endswith("images"):
            return np.dtype(self.manifest["dtype"]), (n, *self.image_shape)
        return np.dtype(label_type(self.classes)), (n,)

    def array(self, name: str) -> "np.ndarray":
        import numpy as np

        dtype, shape = self.form(name)
        with self.opened(name) as file:
            # Read-only: Linux refuses a writable mapping that is larger than memory and swap.
            return np.memmap(file, dtype, "r", file.tell(), shape)

    def opened(self, name: str) -> io.BufferedReader:
        """The file of an array, of the manifest's size, at the array's first byte.

        Raises:
            Refusal: it is missing, or of another size.
        """
        path = self.path / f"{name}.npy"
        try:
            file = open_file(path)
        except OSError as error:
            raise Refusal(
                f"{path}: {error.strerror}; delete {self.path} and run the same command again"
            ) from None
        dtype, shape = self.form(name)
        known = self.manifest["files"][path.name]["bytes"]
        header = known - math.prod(shape) * dtype.itemsize
        if os.fstat(file.fileno()).st_size != known or header < 0:
            file.close()
            raise self.differs(path, "size")
        # The file's own header is not trusted: its last bytes are the array's.
        file.seek(header)
        return file

    def refuse_changed(self, *splits: str) -> None:
        """Check the content of splits against the manifest; it reads all of it.

        On a disk that others can write to, files may have changed since their last check.

        Raises:
            Refusal: an array does not match.
        """
        for split in splits:
            for name, known in self.manifest["content_sha256"].items():
                if name.startswith(split):
                    with self.opened(name) as file:
                        found = hashlib.file_digest(file, "sha256").hexdigest()
                    if found != known:
                        raise self.differs(self.path / f"{name}.npy", "SHA-256")

    def differs(self, path: Path, what: str) -> Refusal:
        return Refusal(
            f"{path} is not the {self.dataset} of its manifest: its {what} differs; "
            "delete its folder and fetch the data again"
        )
