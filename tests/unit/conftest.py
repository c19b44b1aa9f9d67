"""What the unit tests share: the digits, fetched once."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"


def program(name: str, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run one of the programs as a user would; its output is text."""
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **options)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the digits. Tests that damage it copy it first."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    done = program("fetch", "--dataset", "digits", "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder
