"""Shared by the tests of whole experiments."""

import pytest

from checkout import Checkout


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout in which nothing is ever run."""
    return Checkout(tmp_path_factory.mktemp("workflow"))
