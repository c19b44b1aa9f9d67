"""Ports for the ranks to meet at, and for their nodes to try the way there first."""

import socket
from contextlib import suppress

from ddp.errors import Refusal


def bound_pair(number: int, address: str) -> tuple[socket.socket, socket.socket]:
    """Two sockets bound to free ports outside the ephemeral range, from which any outgoing connection may take one from under us.

    Args:
        number: of the job or process. Each has a pair of ports of its own to try first: jobs that start together on a node, with
            numbers in a row, were seen to take each other's between the test and the use.
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
    raise Refusal(f"no two ports from 20000 to 29999 are free on {socket.gethostname()}; end what holds them")


def welcome(door: socket.socket) -> None:
    """Take in whoever connects. Left waiting, more than the kernel lets wait would be turned away, on some systems 128."""
    with suppress(OSError):  # closed at the end
        while True:
            door.accept()[0].close()
