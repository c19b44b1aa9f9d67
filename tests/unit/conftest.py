"""What the unit tests share: the digits, fetched once."""

from pathlib import Path

import pytest

from programs import program


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the digits. Tests that damage it copy it first."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    done = program("fetch", "--dataset", "digits", "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder
