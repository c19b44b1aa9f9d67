"""Grid Engine's daemons, from Debian's packages, which are unpacked and not installed."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from boot import Boot, listening
from namespaces import LOGIN, ROOT, STATE, Impossible, sh
from node import power_on
from users import keys, make_reachable, user

PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "hwloc-ls": "hwloc-nox"}
LIBRARIES = {
    "libjemalloc.so.2": "libjemalloc2",
    "libhwloc.so.15": "libhwloc15",
    "libmunge.so.2": "libmunge2",
    "libtirpc.so.3": "libtirpc3",
    "libssl.so.3": "libssl3",
}
UNPACKED = ("gridengine-master", "gridengine-exec", "gridengine-client", "gridengine-common")
RUN_FOLDERS = ("sshd",)
OWN_FOLDERS = ("etc",)
OVERVIEW = ("qhost",)
DEBS = STATE.with_name("gridengine-debs")
TREE = STATE / "sge"
PORT = 6444
ENVIRONMENT = {
    "SGE_ROOT": str(TREE), "SGE_CELL": "default", "SGE_QMASTER_PORT": str(PORT),
    "SGE_EXECD_PORT": str(PORT + 1),
}  # fmt: skip
BOOTSTRAP = f"""
admin_user none
default_domain none
ignore_fqdn false
spooling_method berkeleydb
spooling_lib libspoolb
spooling_params {TREE}/spooldb
binary_path /usr/sbin
qmaster_spool_dir {TREE}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""
# One slot of each host, like a job with one task per node.
SPREAD = """
pe_name spread
slots 99
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule 1
control_slaves FALSE
job_is_first_task TRUE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""
Inside = Callable[..., str]


def check() -> None:
    """Fetch its packages, while there is a network: the machine has one of its own."""
    if not list(DEBS.glob("*.deb")):
        DEBS.mkdir(exist_ok=True)
        done = subprocess.run(["apt-get", "-qq", "download", *UNPACKED], cwd=DEBS, check=False,
                              capture_output=True, text=True)  # fmt: skip
        if done.returncode:
            raise Impossible(f"apt-get download of Grid Engine failed: {done.stderr.strip()}")


def prepare(root: Path) -> None:
    """Before the old root is gone: a copy of /etc, and the packages over /usr."""
    sh("cp", "--archive", "/etc/.", root / "etc")
    tree = STATE / "unpacked"
    for deb in DEBS.glob("*.deb"):
        sh("dpkg", "--extract", deb, tree)
    shutil.copytree(tree / "var/lib/gridengine", TREE, symlinks=True)
    sh("mount", "-t", "overlay", "overlay", "-o", f"lowerdir={tree}/usr:/usr", root / "usr")
    make_reachable(root, [ROOT, Path(sys.base_prefix), STATE])


def configure(_nodes: list[str]) -> None:
    shutil.copy(STATE / "hosts", "/etc/hosts")
    user(STATE / "home")
    (STATE / "shared").chmod(0o1777)
    keys()
    (TREE / "default/common").mkdir(parents=True)
    (TREE / "qmaster/job_scripts").mkdir(parents=True)
    (TREE / "spooldb").mkdir()
    (TREE / "default/common/bootstrap").write_text(BOOTSTRAP.lstrip())
    (TREE / "default/common/act_qmaster").write_text(f"{LOGIN}\n")


def start(boot: Boot, nodes: list[str]) -> None:
    os.environ.update(ENVIRONMENT)
    sh("/usr/sbin/sshd")
    sh("/usr/share/gridengine/scripts/init_cluster", TREE, "default", TREE / "spooldb", "root")
    sh("sge_qmaster")
    boot.wait(lambda: listening(PORT), "sge_qmaster does not answer", TREE / "qmaster/messages")
    for node in nodes:
        sh("qconf", "-ah", node)
    sh("qconf", "-as", LOGIN)
    configured("-Ap", SPREAD)
    for node in nodes:
        power_on(node)
    queue = sh("qconf", "-sq")
    changes = {"qname": "all.q", "hostlist": " ".join(nodes), "slots": "4", "pe_list": "spread",
               "shell": "/bin/bash", "shell_start_mode": "unix_behavior",
               # By default, nodes take no job while the machine's load is above 1.75 per CPU.
               "load_thresholds": "NONE"}  # fmt: skip
    lines = [line.split() for line in queue.replace("\\\n", " ").splitlines()]
    configured(
        "-Aq", "\n".join(f"{key} {changes.get(key, ' '.join(rest))}" for key, *rest in lines)
    )
    boot.wait(lambda: all(usable(sh, node) for node in nodes), "not all nodes came up",
              *(STATE / "log" / f"{node}.log" for node in nodes))  # fmt: skip
    boot.say(f"{len(nodes)} nodes up")


def configured(option: str, text: str) -> None:
    path = STATE / "configured"
    path.write_text(f"{text.strip()}\n")
    sh("qconf", option, path)


def become(_name: str) -> None:
    """Become the node's daemon."""
    sh("/usr/sbin/sshd")
    kept = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "SGE_ND": "1"} | ENVIRONMENT
    kept["CLUSTER_MEMBER"] = os.environ["CLUSTER_MEMBER"]
    os.execve("/usr/sbin/sge_execd", ["sge_execd"], kept)


def state(inside: Inside, name: str) -> str:
    """Its load as qhost shows it; `-` for a node that does not answer."""
    (line,) = [line for line in inside("qhost").splitlines() if line.startswith(f"{name} ")]
    return line.split()[6]


def usable(inside: Inside, name: str) -> bool:
    return state(inside, name) != "-"


def started(_inside: Inside, _name: str) -> str:
    """Not known: another answer each time; `usable` says when a node is back."""
    return str(time.monotonic())


def drain(inside: Inside, name: str) -> None:
    inside("qmod", "-d", f"*@{name}")


def undrain(inside: Inside, name: str) -> None:
    inside("qmod", "-e", f"*@{name}")
