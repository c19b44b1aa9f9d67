"""Temporary folders where there is room for them."""

import sys
import tempfile

from programs import SCRIPTS, in_namespace

ASK = "from manynodes.base.temporary import parent_folder; print(parent_folder())"


def test_a_full_memory_file_system_is_not_used() -> None:
    """On a real one of 1 MB, in a mount namespace of its own."""
    inside = (
        "mount -t tmpfs -o size=1m tmpfs /dev/shm && dd if=/dev/zero of=/dev/shm/full bs=4k "
        f"2>/dev/null; cd {SCRIPTS} && {sys.executable} -c '{ASK}'"
    )
    done = in_namespace(inside)
    assert done.stdout.split() == [tempfile.gettempdir()], done.stderr
