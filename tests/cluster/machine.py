"""The machine of the test cluster: `machine.py NODES` runs right under its process 1.

When it ends, process 1 ends, and the kernel ends everything else: daemons, nodes, mounts, networks.
"""

import os
import select
import signal
import socket
import stat
import string
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from namespaces import LOGIN, STATE, Failure, sh
from node import power_on

HERE = Path(__file__).resolve().parent
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
        configure(nodes)
        network(nodes)
        boot.say("file systems and network")
        boot.accounting()
        boot.controller(nodes)
    except Failure as failure:
        sys.exit(f"cluster: {failure}")
    print(f"up in {time.monotonic() - started:.1f} s", READY, sep="\n", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    watched = select.poll()
    for fd in ends[:-1]:
        watched.register(fd, select.POLLIN)
    watched.poll()


class Boot:
    """Starts the daemons one after the other, and prints it."""

    def __init__(self, ends: list[int]) -> None:
        self.ends = ends
        self.since = time.monotonic()

    def say(self, step: str) -> None:
        now = time.monotonic()
        print(f"{now - self.since:5.1f} s  {step}", flush=True)
        self.since = now

    def accounting(self) -> None:
        keys = [f"--key-file={STATE}/munge.key", f"--seed-file={STATE}/munge.seed"]
        self.daemon(
            "munged",
            "--foreground",
            "--force",
            *keys,
            ready=Path("/run/munge/munge.socket.2").exists,
        )
        data = ["--no-defaults", f"--datadir={STATE}/mariadb", "--user=root"]
        sh(
            "mariadb-install-db",
            *data,
            "--skip-test-db",
            "--auth-root-authentication-method=socket",
            "--auth-root-socket-user=root",
        )
        self.say("database made")
        here = [
            "--skip-networking",
            "--socket=/run/mysqld/mysqld.sock",
            "--pid-file=/run/mysqld/pid",
        ]
        # Data that a power cut would lose are not needed; slurmdbd asks for the second option.
        speed = ["--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"]
        self.daemon("mariadbd", *data, *here, *speed, ready=Path("/run/mysqld/mysqld.sock").exists)
        self.daemon("slurmdbd", "-D", ready=lambda: listening(6819))
        changes = [
            "add cluster test",
            "add account test",
            "add user root account=test",
            "modify user root set defaultaccount=test",
        ]
        for change in changes:
            sh("sacctmgr", "--immediate", *change.split())
        self.say("accounts")

    def controller(self, nodes: list[str]) -> None:
        for node in nodes:
            power_on(node)
        self.daemon("slurmctld", "-D", ready=lambda: listening(6817))
        self.wait(
            lambda: states() == ["idle"] * len(nodes),
            "not all nodes came up",
            *(STATE / "log" / f"{node}.log" for node in nodes),
        )
        self.say(f"{len(nodes)} nodes idle")

    def daemon(self, name: str, *arguments: str, ready: Callable[[], bool]) -> None:
        log = STATE / "log" / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [name, *arguments], cwd="/", stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.wait(lambda: ready() or process.poll() is not None, f"{name} did not come up", log)
        if process.poll() is not None:
            print(tail(log))
            raise Failure(f"{name} did not come up: it ended with status {process.returncode}")
        self.say(name)

    def wait(
        self, ready: Callable[[], bool], problem: str, *logs: Path, seconds: float = 30
    ) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            if select.select(self.ends, [], [], 0.05)[0]:
                sys.exit("cluster: whoever started it has ended")
            if time.monotonic() > deadline:
                print(*map(tail, logs), sep="\n")
                raise Failure(f"{problem} in {seconds:.0f} s")


def own_root() -> None:
    """A root folder of its own with all folders of the host except /run and /scratch, so that
    folders can be added.
    """
    new = STATE / "root"
    new.mkdir()
    sh("mount", "-t", "tmpfs", "-o", "mode=755", "root", new)
    # Otherwise the bind mount would include it again.
    sh("mount", "--make-unbindable", new)
    own = {"run", "scratch", "host"}
    for name in own:
        (new / name).mkdir()
    for entry in Path("/").iterdir():
        inside = new / entry.name
        if entry.is_symlink():
            inside.symlink_to(entry.readlink())
        elif entry.is_dir() and entry.name not in own:
            inside.mkdir()
            sh("mount", "--rbind", entry, inside)
    sh("pivot_root", new, new / "host")
    os.chdir("/")
    sh("umount", "--lazy", "/host")
    Path("/host").rmdir()
    sh("mount", "--make-private", "/")
    for name in ("munge", "mysqld"):
        Path("/run", name).mkdir()


def configure(nodes: list[str]) -> None:
    """The configuration in its default place: Snakemake removes SLURM_CONF from the environment of
    jobs.
    """
    for folder in (
        "etc",
        "log",
        "slurmctld",
        *(f"nodes/{node}/{name}" for node in nodes for name in ("scratch", "tmp", "spool")),
    ):
        (STATE / folder).mkdir(parents=True)
    for node in nodes:
        for name in ("scratch", "tmp"):
            (STATE / "nodes" / node / name).chmod(0o1777)
    for template in HERE.glob("*.conf"):
        filled = string.Template(template.read_text()).substitute(state=STATE, nodes=len(nodes))
        with open(
            os.open(STATE / "etc" / template.name, os.O_WRONLY | os.O_CREAT, 0o600), "w"
        ) as file:  # slurmdbd asks for 0600
            file.write(filled)
    hosts = [
        "127.0.0.1 localhost",
        f"{address(LOGIN)} {LOGIN}",
        *(f"{address(node)} {node}" for node in nodes),
    ]
    (STATE / "hosts").write_text("\n".join(hosts) + "\n")
    sh("mount", "--bind", STATE / "hosts", "/etc/hosts")
    sh("mount", "--bind", STATE / "etc", "/etc/slurm")
    with open(os.open(STATE / "munge.key", os.O_WRONLY | os.O_CREAT, 0o400), "wb") as file:
        file.write(os.urandom(128))
    for number in range(4):
        os.mknod(f"/run/gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))


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


def address(member: str) -> str:
    return "10.77.0.1" if member == LOGIN else f"10.77.0.{10 + int(member[1:])}"


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address(LOGIN), port)) == 0


def states() -> list[str]:
    return sh("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split()


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
    return "\n".join([f"{log}:", *lines])


if __name__ == "__main__":
    main()
