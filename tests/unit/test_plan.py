"""The launch plan, compared with what it should print, letter by letter."""

import shlex
import sys
from pathlib import Path

import pytest

from ddp.launchers import LAUNCHERS, Geometry
from ddp.plan import local_plan, srun_command, srun_plan
from programs import SCRIPTS

GOLDEN = Path(__file__).with_name("plans")
PROGRAM = ["train.py", "--run", '{"seed": 0}']
HOSTS, ADDRESSES = ["n1", "n3"], ["10.77.0.11", "10.77.0.13"]


def golden(name: str, printed: list[str]) -> None:
    """Compare with tests/unit/plans/<name>.txt, in which the Python that runs is written python."""
    text = (
        "\n".join(printed)
        .replace(shlex.quote(sys.executable), "python")
        .replace(shlex.quote(f"{SCRIPTS}/torchrun_signed.py"), "torchrun_signed.py")
    )
    assert text + "\n" == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "geometry", "gpus"),
    [
        ("local 1x1", Geometry(1, 1, 2), []),
        ("local 2x1", Geometry(2, 1, 1), []),
        ("local 1x4 GPUs", Geometry(1, 4, 8), ["0", "1", "2", "3"]),
        ("local 2x2 GPUs", Geometry(2, 2, 4), ["4", "5", "6", "7"]),
    ],
)
def test_torchrun_on_this_machine(name, geometry, gpus) -> None:
    golden(name, [str(command) for command in local_plan("torchrun", geometry, PROGRAM, 20001, "/tmp/launch-x", gpus)])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_on_two_nodes_of_a_slurm_job(launcher) -> None:
    geometry = Geometry(2, 2, 4)
    plan = srun_plan(launcher, geometry, PROGRAM, HOSTS, ADDRESSES, 20001, "/tmp/launch-x")
    gpus = 0 if launcher == "none" else 2
    golden(f"srun {launcher}", [" ".join(srun_command(launcher, geometry, gpus, ["dispatch.py"])), *map(str, plan)])


def test_accelerate_with_one_process_has_no_rendezvous() -> None:
    (node,) = srun_plan("accelerate", Geometry(1, 1, 4), PROGRAM, HOSTS[:1], ADDRESSES[:1], 20001, "/tmp/launch-x")
    assert "multi_gpu" not in str(node)
