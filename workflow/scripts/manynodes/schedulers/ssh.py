"""Any machines that ssh reaches and that share a folder, also inside other schedulers' jobs."""

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import IPv6Address
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from manynodes.base.atomic import TEMPORARY
from manynodes.base.environment import SCRIPTS
from manynodes.base.errors import Refusal, one_line
from manynodes.base.processes import process_name
from manynodes.base.reading import is_file, read_bytes
from manynodes.schedulers.base import Allocation, TellState, Watch
from manynodes.schedulers.remote.scheduler import AgentScheduler, is_here

MOST_BYTES = 1_000_000  # of a file of hosts

# Nobody can answer a question; a host that is off must not hold us up for minutes; and a connection
# that a user's settings would keep for others could hold our pipes open, or fail for a forwarding.
OPTIONS = (
    "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ControlMaster=no",
    "-o", "ClearAllForwardings=yes", "-T", "-x",
)  # fmt: skip
# Seconds to describe a host: Python may come from a cold network file system.
PATIENCE = 120
FAILED = 255  # status of ssh itself
SIMULTANEOUS = 16  # hosts that are asked at once


class Ssh(AgentScheduler):
    transport = "ssh"
    description = "the machines of --hosts, through ssh"
    executor = "none"
    takes_hosts = True

    def __init__(self, hosts: Sequence[str] = (), given: Sequence[str] = ()) -> None:
        self.hosts = tuple(hosts)
        # A single name may have been meant as that of a file.
        self.no_file = " (there is no such file)" * (len(given) == 1 and hosts == tuple(given))

    def on(self, hosts: Sequence[str]) -> "Ssh":
        return Ssh(read_hosts(hosts), hosts)

    def allocation(self, nodes: int) -> Allocation:
        hosts = self.hosts[:nodes]
        if not hosts:
            raise Refusal(
                "transport ssh needs hosts: --hosts a b c, or a file with one host a line; through "
                "Snakemake --config 'hosts=[a, b, c]'"
            )
        if len(hosts) < nodes:
            raise Refusal(
                f"nodes: the run wants {nodes}, hosts has {len(hosts)}: {', '.join(hosts)}"
                f"{self.no_file}"
            )
        if not is_here(hosts[0]):
            raise Refusal(
                f"this is {socket.gethostname()}, not {hosts[0]}{self.no_file}, the first of the "
                "hosts, where rank 0 runs; start there, or put this machine first"
            )
        owner = process_name()
        addresses = ("127.0.0.1",) if nodes == 1 else hosts
        return Allocation(owner, hosts, addresses, os.getpid())

    def reach(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        return ("ssh", *OPTIONS, host, f"exec {shlex.join(command)}")

    def watch(self, workflow: Any, tell_state: TellState, tell: Callable[[str], None]) -> Watch:
        problems = check_hosts(self.allocation(len(self.hosts)).hosts, Path.cwd())
        for problem in problems[1:]:
            print(f"ssh: {one_line(problem)}", file=sys.stderr)
        if problems:
            raise Refusal(f"ssh: {problems[0]}")
        return Watch()


def read_hosts(given: Sequence[str]) -> tuple[str, ...]:
    """The hosts, each once. A single name of a file stands for the file's first words, one a line.

    Host files of other schedulers name a host once for each of its slots.

    Raises:
        Refusal: a name is not one of a host.
    """
    if len(given) == 1 and (os.sep in given[0] or is_file(given[0])):
        path = Path(os.path.expanduser(given[0]))  # noqa: PTH111, Path.expanduser raises an error
        try:
            lines = read_bytes(path, MOST_BYTES).decode("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not a text file"
            raise Refusal(f"hosts: {given[0]}: {why}; give a file with one host a line") from None
        given = [line.split()[0] for line in lines if line.split() and line.strip()[0] != "#"]
        if not given:
            raise Refusal("hosts: the file names no host; give one a line")
    for host in given:
        if not is_name(host):
            remedy = (
                "user names and ports belong into ~/.ssh/config" if "@" in host
                else "give --hosts n1 n2, to Snakemake 'hosts=[n1, n2]'" if "," in host
                else "give it without a number of slots or a port" if ":" in host
                else "give its name or address"
            )  # fmt: skip
            raise Refusal(f"hosts: {host} is not the name of a host; {remedy}")
    return tuple(dict.fromkeys(given))


def is_name(host: str) -> bool:
    """Whether it can only be the name or address of a host."""
    # ssh would take it for an option, or a shell for something else.
    if not host or host.startswith("-") or not all(c.isalnum() or c in ".:_-" for c in host):
        return False
    if ":" in host:
        with suppress(ValueError):
            return bool(IPv6Address(host))
        return False
    return True


def check_hosts(hosts: Sequence[str], folder: Path) -> list[str]:
    """One line for each host that cannot be part of a step.

    Args:
        folder: that all of them must share.
    """
    scheduler = Ssh(hosts)
    with NamedTemporaryFile(dir=folder, prefix=".hosts-", suffix=TEMPORARY) as file:
        agent = [sys.executable, str(SCRIPTS / "node_agent.py"), "--describe", file.name]
        commands = [scheduler.start(number, host, agent) for number, host in enumerate(hosts)]
        with ThreadPoolExecutor(SIMULTANEOUS) as pool:
            found = list(pool.map(describe, hosts, commands))
    ours = found[0]
    lines = [objection(host, one, ours, folder) for host, one in zip(hosts, found, strict=True)]
    return [line for line in lines if line] + named_twice(hosts, found)


def named_twice(hosts: Sequence[str], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each host that is one of the others under another name."""
    first: dict[tuple[str, ...], str] = {}
    lines = []
    for host, one in zip(hosts, found, strict=True):
        machine = one.get("machine")
        if machine and (same := first.setdefault(tuple(machine), host)) != host:
            lines.append(f"hosts: {same} and {host} are the same machine; name each once")
    return lines


def describe(host: str, command: Sequence[str]) -> dict[str, Any]:
    """What node_agent.py says of a host; or as `problem`, why it says nothing."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        return {"problem": "there is no ssh on PATH here; install an ssh client"}
    except subprocess.TimeoutExpired:
        return {"problem": f"no answer within {PATIENCE} s"}
    said = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode == FAILED:
        return {"problem": f"cannot be reached: {said[-1] if said else 'ssh failed'}"}
    with suppress(ValueError, IndexError):
        # A login shell may have printed something before.
        found = json.loads(done.stdout.splitlines()[-1])
        if isinstance(found, dict):
            return found
    # Not killed by a signal.
    if not said and done.returncode >= 0:
        return {
            "problem": f"says nothing (status {done.returncode}); a start file of the shell there "
            f"(~/.bashrc) may end it; try: ssh {host} echo ok"
        }
    last = said[-1] if said else f"status {done.returncode}"
    return {"problem": f"{sys.executable} or {SCRIPTS} is missing or does not work there: {last}"}


def objection(
    host: str, found: Mapping[str, Any], ours: Mapping[str, Any], folder: Path
) -> str | None:
    """Why a host cannot be part of a step, in one line; None if it can.

    Args:
        found, ours: of `describe`, for the host and for this machine.
    """
    if "problem" in found:
        return f"{host}: {found['problem']}"
    if not found.get("seen"):
        return f"{host}: {folder} is another folder there; all hosts must share it"
    for name, version in ours.get("versions", {}).items():
        there = found["versions"].get(name)
        if there != version:
            return (
                f"{host}: {name} is {there or 'missing'} there and {version} here; "
                "install the same versions"
            )
    return None


SCHEDULER = Ssh()
