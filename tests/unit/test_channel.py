"""The connection between `remote_step` and its agents: strangers, forgeries and hosts."""

import asyncio
import os
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from manynodes.base.errors import Refusal
from manynodes.base.signing import new_secret
from manynodes.schedulers.remote.channel import Channel, accept, connect
from manynodes.schedulers.ssh import check_hosts, read_hosts


def talk(
    monkeypatch: pytest.MonkeyPatch, client: Callable[[int], Awaitable[object]]
) -> list[tuple[Channel, int, list[str]] | None]:
    """Let a client connect to `accept`; returns what accept has said of it."""
    monkeypatch.setenv("LAUNCH_SECRET", new_secret())
    met: list[tuple[Channel, int, list[str]] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = await accept(reader, writer)
        met.append(found)
        if found:
            message = await found[0].receive()
            await found[0].send({"answer": message})

    async def both() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        await client(server.sockets[0].getsockname()[1])
        while not met:
            await asyncio.sleep(0.01)
        server.close()

    asyncio.run(both())
    return met


def test_two_that_know_the_secret_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    async def agent(port: int) -> None:
        channel = await connect("127.0.0.1", port, 7, ["n", "1"])
        await channel.send({"text": "ä" * 100_000})
        assert await channel.receive() == {"answer": {"text": "ä" * 100_000}}

    ((_, node, machine),) = filter(None, talk(monkeypatch, agent))
    assert (node, machine) == (7, ["n", "1"])


@pytest.mark.parametrize("sent", [
    b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x40" + b"x" * 64, b"\xff\xff\xff\xff", b"\0\0\0\0",
])  # fmt: skip
def test_a_stranger_is_sent_away(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    # One that sends too little, or nothing, waits for as long.
    monkeypatch.setattr("manynodes.schedulers.remote.channel.INTRODUCTION", 1)

    async def stranger(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        # Nothing but the random number; then the end, at the latest after the time-out.
        assert len(await reader.read()) == 32
        writer.close()

    assert talk(monkeypatch, stranger) == [None]


def test_a_replayed_connection_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an agent has sent once proves nothing in another connection."""
    recorded = bytearray()

    async def spied(port: int) -> None:
        channel = await connect("127.0.0.1", port, 1, [])
        write = channel.writer.write
        monkeypatch.setattr(
            channel.writer, "write", lambda data: (recorded.extend(data), write(data))
        )
        await channel.send({"text": "first"})
        await channel.receive()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes(recorded))
        assert len(await reader.read()) == 32
        writer.close()

    assert [bool(found) for found in talk(monkeypatch, spied)] == [True, False]


def test_an_agent_does_not_obey_who_does_not_know_the_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAUNCH_SECRET", new_secret())

    async def both() -> None:
        async def impostor(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            order = b'{"command": ["touch", "/tmp/owned"]}'
            writer.write(b"0" * 32 + (32 + len(order)).to_bytes(4, "big") + b"0" * 32 + order)

        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        channel = await connect("127.0.0.1", server.sockets[0].getsockname()[1], 0, [])
        with pytest.raises(Refusal, match="is not signed with this job's secret"):
            await channel.receive()
        server.close()

    asyncio.run(both())


def test_hosts_of_a_list_and_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# slots\nb 4 queue@b\nb 2\n\na\n")
    assert read_hosts([str(file)]) == ("b", "a")
    assert read_hosts(["n1", "fe80::1"]) == ("n1", "fe80::1")
    assert read_hosts(["a", "b", "a"]) == ("a", "b")
    assert read_hosts(["one"]) == ("one",)


@pytest.mark.parametrize("host", ["-oProxyCommand=id", "a;b", "$(id)", "a b", ""])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(Refusal, match="is not the name of a host|host"):
        read_hosts(["a", host])


@pytest.mark.parametrize(
    ("host", "remedy"),
    [
        ("alice@n2", "belong into ~/.ssh/config"),
        ("n1,n2", "--hosts n1 n2"),
        ("n2:4", "give it without"),
    ],
)
def test_a_host_with_more_than_a_name_is_refused_with_what_to_do(host: str, remedy: str) -> None:
    with pytest.raises(Refusal, match=re.escape(remedy)):
        read_hosts([host])


@pytest.mark.parametrize(
    ("start_file", "problem"),
    [
        ("true", "hosts: here and there are the same machine; name each once"),
        ("exit 0", "there: says nothing (status 0); a start file of the shell there (~/.bashrc)"),
        ("echo bad >&2; exit 1", "is missing or does not work there: bad"),
    ],
)
def test_what_a_host_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_file: str, problem: str
) -> None:
    """An ssh that stays on this machine, where the start file of the shell runs first."""
    (tmp_path / "ssh").write_text(
        f'#!/bin/sh\n{start_file}\nfor last; do :; done; exec sh -c "$last"\n'
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (line,) = check_hosts(["here", "there"], tmp_path)
    assert problem in line


def test_a_missing_file_of_hosts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="No such file or directory; give a file with one host a"):
        read_hosts([str(tmp_path / "nowhere")])


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_SECRET", new_secret())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(Refusal, match="cannot reach rank 0's node at 127.0.0.1"):
            asyncio.run(connect("127.0.0.1", free.getsockname()[1], 0, []))
