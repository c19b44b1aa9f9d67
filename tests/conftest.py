"""Order and grouping of the tests, for several workers: pytest -n 3 --dist loadgroup."""

import pytest

# The longest ones first. The tests of one group run one after the other on one worker: all tests on
# Slurm share a cluster, and the tests of some modules share a fixture that takes long to make.
ORDER = ("slurm", "workflow", "unit")
GROUPED = ("test_resume", "test_owner", "test_killed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "slurm":
            item.add_marker(pytest.mark.xdist_group("slurm"))
        elif item.path.parent.name == "workflow" or item.path.stem in GROUPED:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: (ORDER.index(item.path.parent.name), item.path.stem not in GROUPED))
