"""A user who is not root, who can log in to every member with ssh."""

import os
import shutil
from pathlib import Path

from namespaces import STATE, UID, USER, sh


def make_reachable(root: Path, wanted: list[Path]) -> None:
    """Let the user reach folders below ones that only root can enter, such as /root: those are
    replaced by empty ones with nothing but these folders in them.
    """
    closed: dict[Path, list[Path]] = {}
    for path in wanted:
        for parent in reversed(path.resolve().parents):
            if parent != Path("/") and parent.stat().st_mode & 0o005 != 0o005:
                closed.setdefault(parent, []).append(path.resolve())
                break
    for parent, paths in closed.items():
        place = root / parent.relative_to("/")
        sh("umount", "--lazy", place) if os.path.ismount(place) else None
        sh("mount", "-t", "tmpfs", "-o", "mode=755", "open", place)
        for path in paths:
            inside = root / path.relative_to("/")
            inside.mkdir(parents=True, exist_ok=True)
            sh("mount", "--rbind", path, inside)


def user(home: Path) -> None:
    home.mkdir()
    os.chown(home, UID, UID)
    for name, line in {
        "passwd": f"{USER}:x:{UID}:{UID}::{home}:/bin/bash",
        "group": f"{USER}:x:{UID}:",
        "shadow": f"{USER}:*:19000:0:99999:7:::",
    }.items():
        with Path("/etc", name).open("a") as file:
            file.write(f"{line}\n")


def keys() -> None:
    """sshd on every member lets root and the user in."""
    folder = STATE / "ssh"
    folder.mkdir()
    for name in ("host", "id"):
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
    for owner, number in (("root", 0), (USER, UID)):
        shutil.copy(folder / "id", folder / f"id.{owner}")
        os.chown(folder / f"id.{owner}", number, number)
    Path("/etc/ssh/sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/id.pub\nPasswordAuthentication no\n"
        "StrictModes no\nUsePAM no\nPrintMotd no\nPidFile none\nMaxStartups 100:30:200\n"
    )
    Path("/etc/ssh/ssh_config").write_text(
        f"Host *\n  IdentityFile {folder}/id.%u\n  StrictHostKeyChecking no\n"
        "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
