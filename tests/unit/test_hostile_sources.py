"""Hostile servers and archives: all end, nothing is unpacked elsewhere, no program starts."""

import contextlib
import hashlib
import io
import socket
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manynodes.base.errors import Refusal
from manynodes.data import sources
from manynodes.data.addresses import Redirects
from manynodes.data.datasets import DATASETS
from programs import fetch_from

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/gzip\r\n\r\n"


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does with each connection what it is told."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = server.accept()[0]
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/cifar-10-python.tar.gz"


def for_ever(connection: socket.socket, chunk: bytes, pause: float = 0) -> None:
    while True:
        connection.sendall(chunk)
        time.sleep(pause)


def one_byte_at_a_time(connection: socket.socket) -> None:
    connection.sendall(HEAD)
    for_ever(connection, b"x", 0.1)


def endless_continue(connection: socket.socket) -> None:
    for_ever(connection, b"HTTP/1.1 100 Continue\r\n\r\n", 0.01)


def endless_header(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for_ever(connection, b"X: y", 0.05)


def endless_body(connection: socket.socket) -> None:
    connection.sendall(HEAD)
    for_ever(connection, bytes(1 << 16))


@pytest.mark.parametrize("answer", [one_byte_at_a_time, endless_continue, endless_header])
def test_a_server_that_never_comes_to_an_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer
) -> None:
    monkeypatch.setattr(sources, "MOST_SECONDS", 2)
    with (
        answering(answer) as url,
        pytest.raises(
            Refusal, match=r"^http://127.0.0.1:\d+/cifar-10-python.tar.gz: not done after 2 s$"
        ),
    ):
        sources.from_url(sources.official(DATASETS["cifar10"]), url, tmp_path)


def test_a_body_without_an_end_fills_no_disk(tmp_path: Path) -> None:
    official = type("Small", (sources.official(DATASETS["cifar10"]),), {"size": 1_000_000})
    with (
        answering(endless_body) as url,
        pytest.raises(Refusal, match=r"sent 1,000,001 bytes or more that are not the official"),
    ):
        sources.from_url(official, url, tmp_path)
    assert (tmp_path / "cifar-10-python.tar.gz").stat().st_size == 1_000_001


def test_a_password_in_an_address_is_printed_nowhere(tmp_path: Path) -> None:
    for url in ("http://me:s3cret@127.0.0.1:1/x", "https://s3cret@127.0.0.1:1/x"):
        done = fetch_from(url, tmp_path / "out")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            "fetch: url: dataset.url has a user name or password in it, which logs would show; "
            "fetch the file yourself and set dataset.archive\n"
        )
    done = fetch_from("http://127.0.0.1:1/x?token=s3cret", tmp_path / "out")
    assert "s3cret" not in done.stderr + done.stdout


def test_two_terabytes_that_take_no_room_are_not_read(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-python.tar.gz"
    with archive.open("wb") as file:
        file.truncate(2 << 40)
    with pytest.raises(
        Refusal,
        match=r"has 2,199,023,255,552 bytes, the official .* has 170,498,071; copy it again",
    ):
        sources.from_archive(sources.official(DATASETS["cifar10"]), archive, tmp_path)


def tar_of(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    "members",
    [
        [(tarfile.TarInfo("../outside"), b"x")],
        [(tarfile.TarInfo("/tmp/ddp-outside"), b"x")],
        [
            (link("cifar-10-batches-py", "..", tarfile.SYMTYPE), b""),
            (tarfile.TarInfo("cifar-10-batches-py/outside"), b"x"),
        ],
        [(link("cifar-10-batches-py/data_batch_1", "/etc/passwd", tarfile.LNKTYPE), b"")],
        [(link("cifar-10-batches-py/data_batch_1", "", tarfile.FIFOTYPE), b"")],
        [(tarfile.TarInfo("cifar-10-batches-py/data_batch_1"), b"another")],
    ],
    ids=["above", "absolute", "through a link", "hard link", "pipe", "another member"],
)
def test_an_archive_stays_in_its_folder_although_its_md5_is_right(tmp_path: Path, members) -> None:
    content = tar_of(members)
    work = tmp_path / "a" / "work"
    work.mkdir(parents=True)
    archive = tmp_path / "archive.tar.gz"
    archive.write_bytes(content)
    right: Any = {"size": len(content), "tgz_md5": hashlib.md5(content).hexdigest()}
    with pytest.raises(Refusal, match="a member is missing, or not the official one"):
        sources.from_archive(
            type("Forged", (sources.official(DATASETS["cifar10"]),), right), archive, work
        )
    outside = [path for path in tmp_path.rglob("*outside*") if not path.is_relative_to(work)]
    assert outside == []
    assert not Path("/tmp/ddp-outside").exists()
    assert all(
        path.is_dir() or (path.is_file() and not path.is_symlink()) for path in work.rglob("*")
    )


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1/", "http://[::1]:8/", "http://169.254.169.254/x", "http://10.0.0.1/"],
)
def test_a_public_server_does_not_send_us_to_a_private_one(address: str) -> None:
    first = urllib.request.Request("http://8.8.8.8/archive")
    with pytest.raises(urllib.error.URLError, match="it redirects to a private address"):
        Redirects().redirect_request(first, None, 302, "", {}, address)
    assert Redirects().redirect_request(first, None, 302, "", {}, "http://1.1.1.1/")
    # A mirror of the site's own may.
    own = urllib.request.Request("http://10.0.0.2/archive")
    assert Redirects().redirect_request(own, None, 302, "", {}, address)
