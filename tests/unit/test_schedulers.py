"""The seam: the checks of every scheduler, and the local one completely."""

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddp.schedulers import registry
from ddp.schedulers.base import Allocation, Size
from ddp.schedulers.ssh import Ssh
from programs import SCRIPTS
from schedulers import check_everywhere, check_in_a_job, check_that_it_ends


@pytest.mark.parametrize("transport", registry.SCHEDULERS)
def test_every_scheduler(transport) -> None:
    check_everywhere(registry.SCHEDULERS[transport])


def test_the_local_one_runs_its_commands(tmp_path) -> None:
    check_in_a_job(registry.SCHEDULERS["local"], 2, tmp_path)
    check_that_it_ends(registry.SCHEDULERS["local"], 2, tmp_path)


class Agents(Ssh):
    """Agents on this machine, without ssh."""

    def allocation(self, nodes: int) -> Allocation:
        return Allocation("this test", ("here",) * nodes, ("127.0.0.1",) * nodes, 0)

    def reach(self, _host: str, command: Sequence[str]) -> tuple[str, ...]:
        return tuple(command)


def test_agents_on_one_machine_leave_each_other_alone(tmp_path) -> None:
    check_in_a_job(Agents(), 2, tmp_path)
    check_that_it_ends(Agents(), 2, tmp_path)


def test_names_are_unique() -> None:
    found = list(registry.SCHEDULERS.values())
    assert len({scheduler.executor for scheduler in found}) == len(found)
    launchers = [scheduler.task_launcher for scheduler in found if scheduler.task_launcher]
    assert len(set(launchers)) == len(launchers)


def test_a_process_outside_every_job_is_local() -> None:
    assert registry.active({}).transport == "local"
    assert registry.active({"SLURM_JOB_ID": "7"}).transport == "srun"


def test_resources_are_in_the_words_of_every_scheduler() -> None:
    size = Size(nodes=2, cpus=4, gpus=1, memory=1000, launches=True)
    found = registry.resources(size)
    assert all(
        scheduler.resources(size).items() <= found.items()
        for scheduler in registry.SCHEDULERS.values()
    )


def test_only_its_folder_knows_slurm() -> None:
    """In code; docstrings and comments may give examples."""
    for path in [*SCRIPTS.rglob("*.py"), *(SCRIPTS.parent / "rules").glob("*.py")]:
        if "slurm" not in path.relative_to(SCRIPTS.parent).parts:
            words = list(code_words(path))
            found = [word for word in words if "slurm" in word.lower() or "sbatch" in word.lower()]
            assert not found, path


def code_words(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]
    return strings + [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
