"""Run a program and kill it right before its nth change of a folder.

Usage: python killed_at.py N FOLDER PROGRAM ARGUMENTS…

With N = 0 nothing is killed, and the last line on stderr is the number of changes.
"""

import atexit
import os
import runpy
import signal
import sys
from pathlib import Path


def changes(folder: str, event: str, arguments: tuple) -> bool:
    """Whether an audit event is one that changes something in the folder, given as an absolute
    path.

    Relative paths are in a folder that shutil.rmtree has opened.
    """
    if event == "open":
        path, _, flags = arguments
        return str(path).startswith(folder) and bool(flags & (os.O_WRONLY | os.O_RDWR))
    if event == "os.mkdir":
        return arguments[0].startswith(folder) and not Path(arguments[0]).exists()
    if event in ("os.remove", "os.rmdir", "os.rename"):
        path = str(arguments[0])
        return not Path(path).is_absolute() or (path.startswith(folder) and Path(path).exists())
    return False


def main() -> None:
    at, folder, program = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    seen = 0

    def count(event: str, arguments: tuple) -> None:
        nonlocal seen
        if changes(folder, event, arguments):
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    atexit.register(lambda: print(seen, file=sys.stderr))
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(program).parent)
    sys.addaudithook(count)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
