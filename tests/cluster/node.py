"""A node: `node.py on NAME` starts it in the machine; `node.py become NAME` becomes its daemon."""

import importlib
import socket
import subprocess
import sys
from pathlib import Path

from namespaces import KIND, ROOT, STATE, UNSHARE, environment, sh


def power_on(name: str) -> None:
    # Not `ip netns exec`: it mounts /sys again, without the control groups that slurmd needs.
    network = ["nsenter", f"--net=/run/netns/{name}"]
    command = [*network, *UNSHARE, "tini", "--", sys.executable, __file__, "become", name]
    with (STATE / "log" / f"{name}.log").open("ab") as output:
        subprocess.Popen(command, cwd="/", env=environment(name), stdin=subprocess.DEVNULL,
                         stdout=output, stderr=output, start_new_session=True)  # fmt: skip


def become(name: str) -> None:
    socket.sethostname(name)
    for folder in ("scratch", "tmp"):
        hide(f"/{folder}", by=STATE / "nodes" / name / folder)
    # Nodes have equal process numbers, and file names are often made from them.
    sh("mount", "-t", "tmpfs", "shm", "/dev/shm")
    importlib.import_module(f"{KIND}_daemons").become(name)


def hide(folder: str, by: Path) -> None:
    """Mount another folder over this one; checkout and cluster files stay visible."""
    for kept in (ROOT, STATE):
        if kept.is_relative_to(folder):
            inside = by / kept.relative_to(folder)
            inside.mkdir(parents=True, exist_ok=True)
            sh("mount", "--bind", kept, inside)
    sh("mount", "--rbind", by, folder)


if __name__ == "__main__":
    {"on": power_on, "become": become}[sys.argv[1]](sys.argv[2])
