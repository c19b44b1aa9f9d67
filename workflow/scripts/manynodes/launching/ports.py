"""Ports for the rendezvous of the ranks, and for testing the network before it."""

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from manynodes.base.errors import Refusal

# Names that are looked up at once.
LOOKUPS = 16


def bound_pair(number: int, address: str) -> tuple[socket.socket, socket.socket]:
    """Two sockets bound to free ports outside the ephemeral range.

    Outgoing connections take ports of the ephemeral range, possibly between our test and our use.

    Args:
        number: of the job or process, which selects the ports to try first. Jobs that start
            together on a node have consecutive numbers, and took each other's ports without this
            (seen).
    """
    for attempt in range(5000):
        first = 20_000 + 2 * ((number + 997 * attempt) % 5000)
        pair = socket.socket(), socket.socket()
        try:
            for candidate, port in zip(pair, (first, first + 1), strict=True):
                candidate.bind((address, port))
            return pair
        except OSError:
            for candidate in pair:
                candidate.close()
    raise Refusal(
        f"no two ports from 20000 to 29999 are free on {socket.gethostname()}; end what holds them"
    )


def refuse_ipv6_only(addresses: Sequence[str]) -> None:
    """Refuse nodes without an IPv4 address, on which the sockets above and gloo's are.

    Raises:
        Refusal: naming the node. A name that nobody knows is left to whoever connects to it.
    """
    # A name that nobody knows takes seconds.
    with ThreadPoolExecutor(LOOKUPS) as pool:
        for address, families in zip(addresses, pool.map(families_of, addresses), strict=True):
            if families == {socket.AF_INET6}:
                raise Refusal(
                    f"{address} has IPv6 addresses only, and the ranks meet on IPv4; give it an "
                    "IPv4 address too"
                )


def families_of(address: str) -> set[socket.AddressFamily]:
    """Of a host's addresses; empty if nobody knows it."""
    with suppress(socket.gaierror):
        return {family for family, *_ in socket.getaddrinfo(address, None)}
    return set()


def accept_connections(listener: socket.socket) -> None:
    """Accept every connection, and tell it the time here; the kernel refuses connections if the
    queue is full, with 128 on some systems.
    """
    with suppress(OSError):  # closed at the end
        while True:
            with listener.accept()[0] as connection, suppress(OSError):
                connection.sendall(f"{time.time()}\n".encode())
