"""The machine of the test cluster: `machine.py NODES` runs right under its process 1.

When it ends, process 1 ends, and the kernel ends everything else: daemons, nodes, mounts, networks.
"""

import importlib
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from boot import Boot, address
from namespaces import KIND, LOGIN, STATE, Failure, sh

DAEMONS = importlib.import_module(f"{KIND}_daemons")
READY = "ready"


def main() -> None:
    count, ends = int(sys.argv[1]), [int(fd) for fd in sys.argv[2:]]
    nodes = [f"n{number}" for number in range(1, count + 1)]
    started = time.monotonic()
    try:
        # Until `up` is done, its end also ends the machine.
        boot = Boot(ends)
        socket.sethostname(LOGIN)
        own_root()
        # Of its own: PostgreSQL, which PBS needs, leaves its shared memory when it is killed.
        sh("mount", "-t", "tmpfs", "shm", "/dev/shm")
        folders(nodes)
        DAEMONS.configure(nodes)
        network(nodes)
        boot.say("file systems and network")
        DAEMONS.start(boot, nodes)
    except Failure as failure:
        sys.exit(f"cluster: {failure}")
    print(f"up in {time.monotonic() - started:.1f} s", READY, sep="\n", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    watched = select.poll()
    for fd in ends[:-1]:
        watched.register(fd, select.POLLIN)
    watched.poll()


def own_root() -> None:
    """A root folder of its own with all folders of the host except /run and /scratch, so that
    folders can be added.
    """
    new = STATE / "root"
    new.mkdir()
    sh("mount", "-t", "tmpfs", "-o", "mode=755", "root", new)
    # Otherwise the bind mount would include it again.
    sh("mount", "--make-unbindable", new)
    own = {"run", "scratch", "host", *DAEMONS.OWN_FOLDERS}
    for name in own:
        (new / name).mkdir()
    for entry in Path("/").iterdir():
        inside = new / entry.name
        if entry.is_symlink():
            inside.symlink_to(entry.readlink())
        elif entry.is_dir() and entry.name not in own:
            inside.mkdir()
            sh("mount", "--rbind", entry, inside)
    DAEMONS.prepare(new)
    sh("pivot_root", new, new / "host")
    os.chdir("/")
    sh("umount", "--lazy", "/host")
    Path("/host").rmdir()
    sh("mount", "--make-private", "/")
    for name in DAEMONS.RUN_FOLDERS:
        Path("/run", name).mkdir()


def folders(nodes: list[str]) -> None:
    """The nodes' own folders, and the names of all members."""
    (STATE / "log").mkdir()
    for node in nodes:
        for name in ("scratch", "tmp"):
            (STATE / "nodes" / node / name).mkdir(parents=True)
            (STATE / "nodes" / node / name).chmod(0o1777)
    members = "".join(f"{address(member)} {member}\n" for member in (LOGIN, *nodes))
    (STATE / "hosts").write_text(f"127.0.0.1 localhost\n{members}")


def network(nodes: list[str]) -> None:
    """A bridge with a cable to each node, whether the node is on or off."""
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "link", "add", "bridge", "type", "bridge")
    sh("ip", "address", "add", f"{address(LOGIN)}/24", "dev", "bridge")
    sh("ip", "link", "set", "bridge", "up")
    for node in nodes:
        sh("ip", "netns", "add", node)
        sh("ip", "link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", node)
        sh("ip", "link", "set", node, "master", "bridge", "up")
        sh("ip", "-n", node, "address", "add", f"{address(node)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            sh("ip", "-n", node, "link", "set", device, "up")


if __name__ == "__main__":
    main()
