"""The launch plan, compared with golden files letter by letter."""

import shlex
import sys
from pathlib import Path

import pytest

from manynodes.launching.launchers import Geometry
from manynodes.launching.plan import find_launcher, launcher_names, make_plan
from manynodes.schedulers.base import Allocation, Step
from manynodes.schedulers.registry import SCHEDULERS
from programs import SCRIPTS

GOLDEN = Path(__file__).with_name("plans")
PROGRAM = ["train.py", "--run", '{"seed": 0}']
FOLDER = "/tmp/launch-x"
TWO_NODES = Allocation("Slurm job 7", ("n1", "n3"), ("10.77.0.11", "10.77.0.13"), 7)


def step(
    transport: str, launcher: str, geometry: Geometry, allocation: Allocation, gpus=None
) -> Step:
    """What `launch` gives to the scheduler."""
    scheduler = SCHEDULERS[transport]
    found = find_launcher(launcher, scheduler)
    nodes = make_plan(found, geometry, PROGRAM, allocation, 20001, FOLDER, gpus)
    ranks = launcher == scheduler.task_launcher
    tasks = geometry.nproc_per_node if ranks else 1
    cpus = geometry.cpus_per_proc * geometry.nproc_per_node // tasks
    of_node = geometry.nproc_per_node if geometry.device == "cuda" and launcher != "none" else 0
    return Step(nodes, {}, tasks, ranks, cpus, of_node,
                ["dispatch.py", "--reach", "10.77.0.11:20000"], Path("shared"))  # fmt: skip


def golden(name: str, printed: list[str]) -> None:
    """Compare with tests/unit/plans/<name>.txt, in which the Python that runs is written python."""
    text = (
        "\n".join(printed)
        .replace(shlex.quote(sys.executable), "python")
        .replace(shlex.quote(f"{SCRIPTS}/torchrun.py"), "torchrun.py")
        .replace(shlex.quote(f"{SCRIPTS}/accelerate_launch.py"), "accelerate_launch.py")
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
    local = SCHEDULERS["local"]
    found = step("local", "torchrun", geometry, local.allocation(geometry.nodes), gpus)
    golden(name, local.preview(found))


@pytest.mark.parametrize("launcher", launcher_names())
def test_every_launcher_on_two_nodes_of_a_slurm_job(launcher) -> None:
    found = step("srun", launcher, Geometry(2, 2, 4, "auto", "cuda"), TWO_NODES)
    golden(
        f"srun {launcher}",
        [text.replace("'", "") for text in SCHEDULERS["srun"].preview(found)[:1]]
        + list(map(str, found.nodes)),
    )


def test_a_run_on_cpus_sees_no_gpu_of_its_nodes() -> None:
    nodes = step("srun", "torchrun", Geometry(2, 1, 1, "auto", "cpu"), TWO_NODES).nodes
    assert [node.environment["CUDA_VISIBLE_DEVICES"] for node in nodes] == ["", ""]


def test_accelerate_with_one_process_has_no_rendezvous() -> None:
    one = Allocation("Slurm job 7", ("n1",), ("127.0.0.1",), 7)
    (node,) = step("srun", "accelerate", Geometry(1, 1, 4), one).nodes
    assert "multi_gpu" not in str(node)
    # But it finds its place, as with torchrun.
    assert [node.environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == [*"001"]
    assert (node.environment["MASTER_ADDR"], node.environment["MASTER_PORT"]) == (
        "127.0.0.1", "20001",
    )  # fmt: skip
