"""Shared by the tests of whole experiments."""

import pytest

from checkout import Checkout


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("workflow"))
