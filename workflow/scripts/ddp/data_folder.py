"""A data set on disk: four .npy arrays and `manifest.json`, which is written last and says what they hash to."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from ddp.datasets import ARRAYS, DATASETS, IMAGE_SHAPE
from ddp.errors import Refusal

MANIFEST = "manifest.json"


def content_sha256(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes in C order, without any header."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
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
        shape = (n, *IMAGE_SHAPE) if name.endswith("images") else (n,)
        if array.shape != shape or array.dtype != np.uint8:
            raise Refusal(f"{source}: {name} is {array.dtype} {array.shape}, {dataset} has uint8 {shape}; it is not {dataset}")
        if name.endswith("labels") and int(array.max()) >= spec.classes:
            raise Refusal(f"{source}: {name} has the label {array.max()}; {dataset} has 0 to {spec.classes - 1}")
        found, known = content_sha256(array), spec.sha256.get(name)
        if known and found != known:
            raise Refusal(f"{source}: the SHA-256 of {name} is {found[:12]}…, that of {dataset} is {known[:12]}…; it is not {dataset}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a data folder.

    Returns:
        `dataset`, `source`, `classes`, `images` per split, `content_sha256` per array, `sha256` (one for the whole data set:
        of those hexadecimal digests in the order of ARRAYS), and `files`: for each file name its `sha256` and `bytes`.

    Raises:
        Refusal: there is none, or it is not one.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        for key in ("dataset", "source", "classes", "sha256"):
            manifest[key]
        for name in ARRAYS:
            manifest["files"][f"{name}.npy"]["sha256"], manifest["files"][f"{name}.npy"]["bytes"]
    except FileNotFoundError:
        raise Refusal(f"{path} is not there; fetch the data first: snakemake --profile profiles/local {path}") from None
    except (ValueError, KeyError, TypeError):
        raise Refusal(f"{path} is no manifest; fetch the data again: snakemake --profile profiles/local --force {path}") from None
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


def load_split(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The images, uint8 (n, 32, 32, 3), and labels, uint8 (n,), of the split `train` or `test`, mapped from disk."""
    return (
        np.load(folder / f"{split}_images.npy", mmap_mode="r", allow_pickle=False),
        np.load(folder / f"{split}_labels.npy", mmap_mode="r", allow_pickle=False),
    )
