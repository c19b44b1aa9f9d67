"""The programs, run as a user would."""

import shlex
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "workflow" / "scripts"


def program(name: str, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run one of the programs as a user would; its output is text."""
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **options)


def shell(name: str, *arguments: object) -> str:
    """The same, as a line for a shell."""
    return shlex.join([sys.executable, str(SCRIPTS / f"{name}.py"), *map(str, arguments)])
