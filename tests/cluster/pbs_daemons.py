"""OpenPBS's daemons and an sshd on every member, with a user who is not root.

pbs_mom ignores processes of root: it would neither count nor end them.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from boot import Boot, listening
from namespaces import LOGIN, ROOT, STATE, Failure, Impossible, sh
from node import power_on
from users import keys, make_reachable, user

PACKAGES = {
    "postgres": "postgresql",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "hwloc-ls": "hwloc-nox",
}
LIBRARIES = {
    "libical.so.3": "libical3",
    "libhwloc.so.15": "libhwloc15",
    "libedit.so.2": "libedit2",
    "libexpat.so.1": "libexpat1",
    "libcjson.so.1": "libcjson1",
    "libpython3.11.so.1.0": "libpython3.11",
    "libpq.so.5": "libpq5",
    "libssl.so.3": "libssl3",
    "libtcl8.6.so": "libtcl8.6",
}
RUN_FOLDERS = ("sshd", "lock", "postgresql")
OWN_FOLDERS = ("opt", "etc")
OVERVIEW = ("pbsnodes", "-aS")
ENVIRONMENT: dict[str, str] = {}
# A folder that everybody may write to is no home for PBS: it is mounted here.
HOME = Path("/opt/pbshome")
TREE = Path("/opt/pbs")
PORT = 15001
CPUS, MEMORY = 8, "16gb"
Inside = Callable[..., str]


def source() -> Path:
    """The installed OpenPBS, or the tree or tarball named in OPENPBS.

    Raises:
        Failure: there is none, or it is not where OPENPBS says.
    """
    given = os.environ.get("OPENPBS", "")
    if given and not Path(given).exists():
        raise Failure(f"OPENPBS: {given} is not there")
    if not given and not (TREE / "sbin/pbs_server").exists():
        raise Impossible(
            "no OpenPBS: install it in /opt/pbs, or set OPENPBS to its tree or to a tarball with "
            "opt/pbs"
        )
    return Path(given or TREE)


def check() -> None:
    source()


def prepare(root: Path) -> None:
    """Before the old root is gone: a copy of /etc, and PBS in its place."""
    sh("cp", "--archive", "/etc/.", root / "etc")
    for entry in Path("/opt").iterdir():
        if entry.is_dir() and entry != TREE:
            (root / "opt" / entry.name).mkdir()
            sh("mount", "--rbind", entry, root / "opt" / entry.name)
    tree = source()
    if tree.is_file():
        (STATE / "tree").mkdir()
        sh(
            "tar",
            "--directory",
            STATE / "tree",
            "--extract",
            "--preserve-permissions",
            "--file",
            tree,
        )
        tree = STATE / "tree/opt/pbs"
    for path, mounted in ((TREE, tree), (HOME, STATE / "server")):
        mounted.mkdir(exist_ok=True)
        inside = root / path.relative_to("/")
        inside.mkdir()
        sh("mount", "--bind", mounted, inside)
    make_reachable(root, [ROOT, Path(sys.base_prefix), STATE])


def configure(nodes: list[str]) -> None:
    shutil.copy(STATE / "hosts", "/etc/hosts")
    user(STATE / "home")
    (STATE / "shared").chmod(0o1777)
    keys()
    shutil.copy(TREE / "etc/pbs.sh", "/etc/profile.d/pbs.sh")
    Path("/etc/pbs.conf").write_text(pbs_conf(server=1, mom=0))
    shutil.chown("/run/postgresql", "postgres")
    for node in nodes:
        mom_home(STATE / "nodes" / node / "pbs")


def pbs_conf(server: int, mom: int) -> str:
    settings = {
        "PBS_EXEC": TREE, "PBS_HOME": HOME, "PBS_SERVER": LOGIN, "PBS_LEAF_ROUTERS": LOGIN,
        "PBS_START_SERVER": server, "PBS_START_SCHED": server, "PBS_START_COMM": server,
        "PBS_START_MOM": mom, "PBS_SCP": "/usr/bin/scp", "PBS_DATA_SERVICE_USER": "postgres",
        # Of the socket by which a qsub passes jobs to the process of an earlier one, unless TMPDIR
        # is set. In /var/tmp, which two clusters share, jobs went to the wrong cluster.
        "PBS_TMPDIR": STATE / "shared",
    }  # fmt: skip
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def folder(path: Path, mode: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)


def mom_home(home: Path) -> None:
    for name, mode in {
        "": 0o755, "aux": 0o755, "checkpoint": 0o700, "mom_logs": 0o755, "mom_priv": 0o751,
        "mom_priv/jobs": 0o751, "mom_priv/hooks": 0o750, "mom_priv/hooks/tmp": 0o750,
        "spool": 0o1777, "undelivered": 0o1777, "server_priv": 0o750,
    }.items():  # fmt: skip
        folder(home / name, mode)
    (home / "pbs_environment").write_text("TZ=UTC\nPATH=/bin:/usr/bin\n")
    (home / "mom_priv/config").write_text(
        f"$clienthost {LOGIN}\n$usecp *:/ /\n$tmpdir /scratch\n$max_poll_downtime 10\n"
    )


def server_home(boot: Boot) -> None:
    """The server's home with its database: unpacked if one lies beside the tarball, or made."""
    ready = Path(os.environ.get("OPENPBS", "/nowhere")).with_name("server-home.tar.xz")
    if ready.is_file():
        sh("tar", "--directory", STATE / "server", "--extract", "--preserve-permissions",
           "--file", ready)  # fmt: skip
        sh("chown", "--recursive", "postgres", STATE / "server/datastore")
        return
    home = STATE / "server"
    for name, mode in {
        "": 0o755, "server_logs": 0o755, "spool": 0o1777, "server_priv": 0o750,
        "server_priv/accounting": 0o755, "server_priv/jobs": 0o750, "server_priv/users": 0o750,
        "server_priv/hooks": 0o750, "server_priv/hooks/tmp": 0o750, "sched_logs": 0o755,
        "sched_priv": 0o750, "comm_logs": 0o755,
    }.items():  # fmt: skip
        folder(home / name, mode)
    (home / "pbs_environment").write_text("TZ=UTC\nPATH=/bin:/usr/bin\n")
    for hook in (TREE / "lib/python/altair/pbs_hooks").glob("*"):
        if not hook.name.startswith(("PBS_xeon_phi_provision", "PBS_alps")):
            shutil.copy2(hook, home / "server_priv/hooks")
    (home / "server_priv/db_user").write_text("postgres")
    (home / "server_priv/db_user").chmod(0o600)
    for name in ("dedicated_time", "holidays", "resource_group", "sched_config"):
        given = "pbs_dedicated" if name == "dedicated_time" else f"pbs_{name}"
        shutil.copy(TREE / "etc" / given, home / "sched_priv" / name)
    sh("env", "PBS_START_MOM=0", TREE / "libexec/pbs_habitat")
    subprocess.run([TREE / "bin/qterm", "-t", "quick"], capture_output=True, check=False)
    boot.say("database made")
    boot.wait(lambda: not listening(PORT), "the server that made it did not end")


def start(boot: Boot, nodes: list[str]) -> None:
    os.environ["PATH"] = path()
    sh("/usr/sbin/sshd")
    server_home(boot)
    for name in ("pbs_comm", "pbs_server", "pbs_sched"):
        with (STATE / "log" / f"{name}.log").open("wb") as log:
            subprocess.run([name], stdout=log, stderr=log, stdin=subprocess.DEVNULL, check=False)
        boot.say(name)
    for node in nodes:
        power_on(node)
    boot.wait(lambda: listening(PORT) and answers(), "pbs_server does not answer",
              STATE / "log/pbs_server.log")  # fmt: skip
    configuration = STATE / "server/sched_priv/sched_config"
    text = configuration.read_text()
    configuration.write_text(text.replace('\nresources: "', '\nresources: "ngpus, jobfs, ', 1))
    commands = [
        "set server acl_roots = root@*", "set server flatuid = True",
        "set server job_history_enable = True", "set server node_fail_requeue = 10",
        "set server scheduler_iteration = 10",
        "create resource ngpus type=long, flag=nh", "create resource jobfs type=size, flag=nh",
        "create resource storage type=string",
        "create queue short queue_type=execution",
        "set queue short resources_max.walltime=01:00:00",
        "set queue short enabled=True", "set queue short started=True",
    ]  # fmt: skip
    for node in nodes:
        commands += [f"create node {node}", f"set node {node} resources_available.ncpus={CPUS}, "
                     f"resources_available.mem={MEMORY}, resources_available.ngpus=4, "
                     "resources_available.jobfs=100gb"]  # fmt: skip
    subprocess.run(["qmgr"], input="\n".join(commands), text=True, capture_output=True, check=False)
    sh("pkill", "-HUP", "-x", "pbs_sched")
    boot.wait(lambda: all(state(sh, node) == "free" for node in nodes), "not all nodes came up",
              *(STATE / "log" / f"{node}.log" for node in nodes))  # fmt: skip
    boot.say(f"{len(nodes)} nodes free")


def answers() -> bool:
    return subprocess.run(["qstat", "-B"], capture_output=True, check=False).returncode == 0


def path() -> str:
    return f"{TREE}/bin:{TREE}/sbin:{os.environ['PATH']}"


def become(name: str) -> None:
    """Become the node's daemon."""
    home = STATE / "nodes" / name / "pbs"
    sh("mount", "--bind", home, HOME)
    (home / "pbs.conf").write_text(pbs_conf(server=0, mom=1))
    sh("mount", "--bind", home / "pbs.conf", "/etc/pbs.conf")
    sh("/usr/sbin/sshd")
    # Jobs must not have the cluster's own variables.
    kept = {"PATH": path(), "LANG": "C.UTF-8", "CLUSTER_MEMBER": os.environ["CLUSTER_MEMBER"]}
    os.execve(TREE / "sbin/pbs_mom", ["pbs_mom", "-N"], kept)


def state(inside: Inside, name: str) -> str:
    """As pbsnodes shows it: free, job-busy, down, offline …"""
    for line in inside("pbsnodes", name).splitlines():
        key, _, value = line.partition(" = ")
        if key.strip() == "state":
            return value
    return "unknown"


def usable(inside: Inside, name: str) -> bool:
    return set(state(inside, name).split(",")) <= {"free", "job-busy", "job-exclusive"}


def started(_inside: Inside, name: str) -> str:
    """A daemon that has come up writes a new line to its log."""
    logs = sorted((STATE / "nodes" / name / "pbs/mom_logs").glob("*"))
    return "".join(log.read_text(errors="replace").count("Mom pid =") * "x" for log in logs)


def drain(inside: Inside, name: str) -> None:
    inside("pbsnodes", "-o", name)


def undrain(inside: Inside, name: str) -> None:
    inside("pbsnodes", "-r", name)
    time.sleep(0.5)
