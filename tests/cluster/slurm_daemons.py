"""Slurm's daemons, with accounting if its daemon runs here."""

import os
import stat
import string
from collections.abc import Callable
from pathlib import Path

from boot import Boot, listening
from namespaces import STATE, Failure, sh
from node import power_on

HERE = Path(__file__).resolve().parent
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "mariadbd": "mariadb-server",
    # For programs behind `module load`.
    "modulecmd": "environment-modules",
    # And for those in containers.
    "podman": "podman",
    "crun": "crun",
    "catatonit": "catatonit",
}
LIBRARIES: dict[str, str] = {}
RUN_FOLDERS = ("munge", "mysqld")
OWN_FOLDERS = ()
USABLE = {"idle", "mixed", "allocated", "completing", "planned"}
OVERVIEW = ("sinfo",)
MOST_SOCKET = 107  # bytes of a socket's path, see unix(7)
ENVIRONMENT: dict[str, str] = {}
Inside = Callable[..., str]


def check() -> None:
    """Refuse a folder where slurmstepd cannot make its sockets: srun says `Unspecified error`."""
    longest = len(f"{STATE}/nodes/n10/spool/n10_100.4294967295")
    if longest > MOST_SOCKET:
        raise Failure(f"the path of {STATE} is {longest - MOST_SOCKET} bytes too long for sockets")


def prepare(_root: Path) -> None:
    """The members need nothing of the host's but what they see."""


def configure(nodes: list[str]) -> None:
    """The configuration in its default place: Snakemake removes SLURM_CONF from the environment of
    jobs.
    """
    for folder in ("etc", "slurmctld", *(f"nodes/{node}/spool" for node in nodes)):
        (STATE / folder).mkdir()
    for template in HERE.glob("*.conf"):
        filled = string.Template(template.read_text()).substitute(state=STATE, nodes=len(nodes))
        with open(
            os.open(STATE / "etc" / template.name, os.O_WRONLY | os.O_CREAT, 0o600), "w"
        ) as file:  # slurmdbd asks for 0600
            file.write(filled)
    sh("mount", "--bind", STATE / "hosts", "/etc/hosts")
    sh("mount", "--bind", STATE / "etc", "/etc/slurm")
    with open(os.open(STATE / "munge.key", os.O_WRONLY | os.O_CREAT, 0o400), "wb") as file:
        file.write(os.urandom(128))
    for number in range(4):
        os.mknod(f"/run/gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))


def start(boot: Boot, nodes: list[str]) -> None:
    credentials(boot)
    try:
        accounting(boot)
    except Failure as failure:
        # As in Debian 13 and 14 (slurmdbd with libmariadb 11.8.9: error 5027).
        without_accounting()
        boot.say(f"{failure}: this cluster has no accounting, which `make test-slurm` needs")
    controller(boot, nodes)


def credentials(boot: Boot) -> None:
    keys = [f"--key-file={STATE}/munge.key", f"--seed-file={STATE}/munge.seed"]
    boot.daemon(
        "munged",
        "--foreground",
        "--force",
        *keys,
        ready=Path("/run/munge/munge.socket.2").exists,
    )


def accounting(boot: Boot) -> None:
    # Its temporary files are named by its process number, which is the same in each cluster: in
    # /tmp, of two databases that were made at once one failed.
    temporary = STATE / "temporary"
    temporary.mkdir()
    data = [
        "--no-defaults",
        f"--datadir={STATE}/mariadb",
        f"--tmpdir={temporary}",
        "--user=root",
    ]
    sh(
        "mariadb-install-db",
        *data,
        "--skip-test-db",
        "--auth-root-authentication-method=socket",
        "--auth-root-socket-user=root",
    )
    boot.say("database made")
    here = [
        "--skip-networking",
        "--socket=/run/mysqld/mysqld.sock",
        "--pid-file=/run/mysqld/pid",
    ]
    # Data that a power cut would lose are not needed; slurmdbd asks for the second option.
    speed = ["--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"]
    boot.daemon("mariadbd", *data, *here, *speed, ready=Path("/run/mysqld/mysqld.sock").exists)
    boot.daemon("slurmdbd", "-D", ready=lambda: listening(6819))
    changes = [
        "add cluster test",
        "add account test",
        "add user root account=test",
        "modify user root set defaultaccount=test",
    ]
    for change in changes:
        sh("sacctmgr", "--immediate", *change.split())
    boot.say("accounts")


def without_accounting() -> None:
    path = STATE / "etc/slurm.conf"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("AccountingStorage")))


def controller(boot: Boot, nodes: list[str]) -> None:
    for node in nodes:
        power_on(node)
    boot.daemon("slurmctld", "-D", ready=lambda: listening(6817))
    boot.wait(
        lambda: states() == ["idle"] * len(nodes),
        "not all nodes came up",
        *(STATE / "log" / f"{node}.log" for node in nodes),
    )
    boot.say(f"{len(nodes)} nodes idle")


def states() -> list[str]:
    return sh("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split()


def become(_name: str) -> None:
    """Become the node's daemon."""
    os.execvp("slurmd", ["slurmd", "-D"])


def drain(inside: Inside, name: str) -> None:
    inside("scontrol", "update", f"nodename={name}", "state=drain", "reason=drained by cluster.py")


def state(inside: Inside, name: str) -> str:
    return shown(inside, name)["State"]


def usable(inside: Inside, name: str) -> bool:
    return set(state(inside, name).lower().split("+")) <= USABLE


def started(inside: Inside, name: str) -> str:
    """When the node's daemon was started, as far as the controller knows."""
    return shown(inside, name)["SlurmdStartTime"]


def undrain(inside: Inside, name: str) -> None:
    # It asks the node at once; by itself it would ask a down node only after up to 140 s.
    inside("scontrol", "update", f"nodename={name}", "state=undrain")


def shown(inside: Inside, name: str) -> dict[str, str]:
    fields = inside("scontrol", "--oneliner", "show", "node", name).split()
    return dict(field.split("=", 1) for field in fields if "=" in field)
