"""A data set on disk: four .npy arrays and `manifest.json`, which is written last and says what they hash to."""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from ddp.datasets import ARRAYS, DATASETS, IMAGE_SHAPE
from ddp.errors import Refusal
from ddp.reading import open_file, read_bytes, read_json

MANIFEST = "manifest.json"


def content_sha256(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes in C order, without any header."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def whole_sha256(content: dict[str, str]) -> str:
    """One SHA-256 for a whole data set, of its arrays' digests."""
    return hashlib.sha256("".join(content[name] for name in ARRAYS).encode()).hexdigest()


def array_shape(name: str, n: int) -> tuple[int, ...]:
    """The shape of one of ARRAYS for n images."""
    return (n, *IMAGE_SHAPE) if name.endswith("images") else (n,)


def file_sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_wrong_content(dataset: str, arrays: dict[str, np.ndarray], source: str) -> None:
    """Refuse arrays that are not the data set, whatever they came from.

    Raises:
        Refusal: an array has the wrong shape, type, label or SHA-256.
    """
    spec = DATASETS[dataset]
    for name in ARRAYS:
        array = arrays[name]
        n = spec.train_images if name.startswith("train") else spec.test_images
        shape = array_shape(name, n)
        if array.shape != shape or array.dtype != np.uint8:
            raise Refusal(f"{source}: {name} is {array.dtype} {array.shape}, {dataset} has uint8 {shape}; it is not {dataset}")
        if name.endswith("labels") and int(array.max()) >= spec.classes:
            raise Refusal(f"{source}: {name} has the label {array.max()}; {dataset} has 0 to {spec.classes - 1}")
        found, known = content_sha256(array), spec.sha256.get(name)
        if known and found != known:
            raise Refusal(f"{source}: the SHA-256 of {name} is {found[:12]}…, that of {dataset} is {known[:12]}…; it is not {dataset}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a data folder, in agreement with itself and with what is known of the data set.

    Returns:
        `dataset`, `source`, `classes`, `images` per split, `content_sha256` per array, `sha256` (one for the whole data set:
        of those hexadecimal digests in the order of ARRAYS), and `files`: for each file name its `sha256` and `bytes`.

    Raises:
        Refusal: there is none, or it is not one.
    """
    path = folder / MANIFEST
    remedy = f"fetch the data again: snakemake --profile profiles/local --force {path}"
    try:
        manifest = read_json(path, "manifest", remedy)
    except FileNotFoundError:
        raise Refusal(f"{path} is not there; fetch the data first: snakemake --profile profiles/local {path}") from None
    spec = DATASETS[manifest["dataset"]]
    content = manifest["content_sha256"]
    known = {
        "classes": spec.classes,
        "images": {"train": spec.train_images, "test": spec.test_images},
        "content_sha256": content | spec.sha256,
        "sha256": whole_sha256(content),
    }
    for key, value in known.items():
        if manifest[key] != value:
            raise Refusal(f"{path} is not that of {manifest['dataset']}: {key} is another; {remedy}")
    return manifest


def damaged_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of the files in the folder that are missing or do not hash to what the manifest says."""
    return [
        name
        for name, known in manifest["files"].items()
        if not (folder / name).is_file()
        or (folder / name).stat().st_size != known["bytes"]
        or file_sha256(folder / name) != known["sha256"]
    ]


def load_split(folder: Path, manifest: dict[str, Any], split: str) -> tuple[np.ndarray, np.ndarray]:
    """The images, uint8 (n, 32, 32, 3), and labels, uint8 (n,), of the split `train` or `test`, read into memory and checked there.

    Whatever has been checked before, on a disk that others write to it may be another by now.

    Args:
        manifest: from `read_manifest`, of this folder or of the one that it was copied from.

    Raises:
        Refusal: they are not what the manifest says.
    """
    images, labels = (load_array(folder, manifest, f"{split}_{kind}") for kind in ("images", "labels"))
    return images, labels


def load_array(folder: Path, manifest: dict[str, Any], name: str) -> np.ndarray:
    path = folder / f"{name}.npy"
    n = manifest["images"][name.partition("_")[0]]
    shape = array_shape(name, n)
    size = math.prod(shape)
    try:
        # Without the header, whatever it says: the last bytes of the file are the array's.
        content = memoryview(read_bytes(path, manifest["files"][path.name]["bytes"]))[-size:]
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}; delete {folder} and run the same command again") from None
    if hashlib.sha256(content).hexdigest() != manifest["content_sha256"][name]:
        raise Refusal(f"{path} does not hold {manifest['dataset']}: its SHA-256 is another; delete its folder and fetch the data again")
    array = np.frombuffer(content, np.uint8).reshape(shape)
    if name.endswith("labels") and int(array.max()) >= manifest["classes"]:
        raise Refusal(f"{path} has the label {array.max()}; {manifest['dataset']} has {manifest['classes']} classes; fetch the data again")
    return array
