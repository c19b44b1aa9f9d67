"""Signed messages between `remote_step` and the agents on the nodes.

Every message carries a signature with the job's secret over its content, its number, its sender
and the random numbers of both sides: it cannot be forged, replayed, or moved to another connection.
Messages are JSON; nothing is unpickled. They are not encrypted, and the secret is not sent.
"""

import asyncio
import json
import secrets
import socket
from collections.abc import Sequence
from typing import Any

from manynodes.base.errors import Refusal, reason
from manynodes.base.signing import SIZE, signed, verified
from manynodes.base.timeouts import LOST_AFTER

# Bytes of a message: a plan, or a piece of output.
MOST = 64 * 2**20
# Bytes of the first message, before its sender is known.
MOST_FROM_STRANGERS = 1000
# Seconds in which a stranger must have signed a message.
INTRODUCTION = 30
HEADER = 4


class Channel:
    """One end of a connection whose peer knows the job's secret."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: str, sender: str
    ) -> None:
        self.reader, self.writer, self.session = reader, writer, session
        self.sender, self.peer = sender, {"step": "agent", "agent": "step"}[sender]
        self.sent = self.received = 0

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message; waits while the peer is slower than we are.

        Raises:
            OSError: the peer is lost.
        """
        self.sent += 1
        content = signed(f"{self.session} {self.sender} {self.sent}", json.dumps(message).encode())
        self.writer.write(len(content).to_bytes(HEADER, "big") + content)
        await self.writer.drain()

    async def receive(self, most: int = MOST) -> dict[str, Any] | None:
        """The next message; None if the peer has closed the connection.

        Raises:
            Refusal: it is not from the peer.
            OSError: the peer is lost.
        """
        try:
            size = int.from_bytes(await self.reader.readexactly(HEADER), "big")
            if not SIZE <= size <= most:
                raise Refusal(f"a message of {size} bytes came from {self.peer}; at most {most}")
            content = await self.reader.readexactly(size)
        except asyncio.IncompleteReadError:
            return None
        self.received += 1
        plain = verified(f"{self.session} {self.peer} {self.received}", content)
        message: dict[str, Any] = json.loads(plain)
        return message


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[Channel, int, list[str]] | None:
    """The channel to an agent that has just connected, the number of its node, and its machine.

    Returns:
        None if it does not know the secret.
    """
    watch_peer(writer)
    ours = secrets.token_hex(16)
    writer.write(ours.encode())
    channel = Channel(reader, writer, ours, "step")
    try:
        hello = await asyncio.wait_for(channel.receive(MOST_FROM_STRANGERS), INTRODUCTION) or {}
        channel.session, channel.received = f"{ours} {hello['nonce']}", 0
        return channel, int(hello["node"]), [*map(str, hello["machine"])]
    except (Refusal, OSError, ValueError, KeyError, TypeError, TimeoutError):
        writer.close()
        return None


async def connect(address: str, port: int, node: int, machine: Sequence[str]) -> Channel:
    """The channel from an agent to `remote_step`.

    Args:
        machine: on which the agent runs.

    Raises:
        Refusal: it cannot be reached.
    """
    try:
        async with asyncio.timeout(INTRODUCTION):
            reader, writer = await asyncio.open_connection(address, port)
            watch_peer(writer)
            theirs = (await reader.readexactly(32)).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        why = reason(error) or f"no answer within {INTRODUCTION} s"
        raise Refusal(
            f"cannot reach rank 0's node at {address}:{port}: {why}; check name resolution and "
            "firewalls between the nodes"
        ) from None
    ours = secrets.token_hex(16)
    channel = Channel(reader, writer, theirs, "agent")
    await channel.send({"nonce": ours, "node": node, "machine": machine})
    channel.session, channel.sent = f"{theirs} {ours}", 0
    return channel


def watch_peer(writer: asyncio.StreamWriter) -> None:
    """Have the kernel break a connection whose peer does not answer, idle or not."""
    connection: socket.socket = writer.get_extra_info("socket")
    options = {
        socket.TCP_KEEPIDLE: LOST_AFTER // 3,
        socket.TCP_KEEPINTVL: LOST_AFTER // 6,
        socket.TCP_KEEPCNT: 4,
        socket.TCP_USER_TIMEOUT: LOST_AFTER * 1000,
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
