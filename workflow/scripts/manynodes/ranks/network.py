"""The address under which other nodes reach this one."""

import fcntl
import os
import socket
import struct
from collections.abc import Mapping

SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def local_address(other: str) -> str:
    """The IPv4 address under which another host sees this one; empty if unknown.

    Nothing is sent: connecting a datagram socket only selects a route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def let_gloo_be_reached(master: str, hosts: Mapping[str, str]) -> None:
    """Make gloo listen where the other hosts see this one, if it would listen on loopback.

    gloo takes the address of this host's own name, which Debian sets to 127.0.1.1 in /etc/hosts;
    ranks on other nodes were then refused (measured). For any other address, gloo's choice is kept.

    Args:
        master: where rank 0 is reached.
        hosts: the address of every host, by its name.
    """
    name = socket.gethostname()
    others = [address for host, address in hosts.items() if host != name]
    try:
        resolved = socket.gethostbyname(name)
    except OSError:
        resolved = "127.0.0.1"
    if others and resolved.startswith("127."):
        # On rank 0's host, the route to rank 0 is loopback; the route to another host decides.
        ways = map(local_address, (master, others[0]))
        seen = next((address for address in ways if address and not address.startswith("127.")), "")
        if interface := interface_of(seen):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
