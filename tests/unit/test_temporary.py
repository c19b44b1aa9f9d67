"""Temporary folders where there is room for them."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from manynodes.base import temporary
from programs import SCRIPTS, in_namespace

ASK = "from manynodes.base.temporary import parent_folder; print(parent_folder())"


def test_a_python_that_knows_no_memfd_does() -> None:
    """As conda's, which is built for older systems."""
    code = (
        "import os, subprocess, sys; del os.memfd_create\n"
        "from manynodes.base.temporary import file_without_a_name\n"
        "from manynodes.launching.agents import watched\n"
        "with file_without_a_name() as file:\n"
        "    path = f'/dev/fd/{file.fileno()}'\n"
        "    script = f'echo 1 > {path}'\n"
        "    subprocess.run(['sh', '-c', script], pass_fds=[file.fileno()], check=True)\n"
        "    print(file.read().strip())\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "gone = watched(child.pid)\n"
        "print(gone())\n"
        "child.kill(); child.wait()\n"
        "print(gone(), watched(child.pid)())\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1", "False", "True", "True"], done.stderr


def test_a_full_memory_file_system_is_not_used() -> None:
    """On a real one of 1 MB, in a mount namespace of its own."""
    inside = (
        "mount -t tmpfs -o size=1m tmpfs /dev/shm && dd if=/dev/zero of=/dev/shm/full bs=4k "
        f"2>/dev/null; cd {SCRIPTS} && {sys.executable} -c '{ASK}'"
    )
    done = in_namespace(inside)
    assert done.stdout.split() == [tempfile.gettempdir()], done.stderr


def test_only_folders_of_ours_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's `launch-data` in the same place was removed with all in it."""
    monkeypatch.setattr(temporary, "parent_folder", lambda: tmp_path)
    ours = tmp_path / f"{temporary.OURS}launch-abcd_123"
    theirs = [tmp_path / name for name in (
        "launch-data", "launch-dataset1", "sources-2024", f"{ours.name}9", f"{ours.name[:-1]}.",
    )]  # fmt: skip
    shared = tmp_path / f"{temporary.OURS}launch-abcdefgh"
    for folder in (ours, *theirs, shared):
        folder.mkdir(mode=0o755 if folder == shared else 0o700)
    with temporary.temporary_folder("launch-"):
        assert not ours.exists()
    temporary.sweep(temporary.SOURCES)
    assert all(folder.exists() for folder in (*theirs, shared))
