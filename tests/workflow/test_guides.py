"""docs/guides.md: the programs of five guides, unchanged, in environments of their own."""

import os
import re
from pathlib import Path

import pytest

from checkout import ROOT, Checkout
from guides import EXAMPLES, GUIDES, assert_ran, command_of, make_environments
from manynodes.base.modules import INITS


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = Checkout(tmp_path_factory.mktemp("guides"))
    make_environments(checkout)
    return checkout


def test_the_page_shows_the_configurations_that_are_run() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/guides.md").read_text(), re.DOTALL)
    files = {path.stem: path.read_text() for path in (ROOT / EXAMPLES).glob("*.yaml")}
    assert sorted(blocks) == sorted(files.values())
    assert files.keys() == GUIDES.keys()


@pytest.mark.faults
@pytest.mark.parametrize("name", GUIDES)
def test_a_guides_program_runs_unchanged_in_its_own_environment(place: Checkout, name: str) -> None:
    if name == "nci" and not any(Path(os.path.expandvars(init)).exists() for init in INITS):
        pytest.skip("environment modules are not installed")
    # One agent of torchrun's.
    place.run(*command_of(place, name), "nodes=1", "nproc_per_node=2")
    assert_ran(place, name)
