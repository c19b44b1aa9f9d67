"""The launch plan, compared with what it should print, letter by letter."""

import sys

import pytest

from ddp.plan import Geometry, local_plan

PROGRAM = ["train.py", "--run", '{"seed": 0}']
LOCAL = "GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo NODE_RANK={rank} OMP_NUM_THREADS={cpus} PYTHONUNBUFFERED=1"
TORCHRUN = (
    "-m torch.distributed.run --nnodes={nodes} --node-rank={rank} --nproc-per-node={nproc} "
    "--master-addr=127.0.0.1 --master-port=20001 --max-restarts=0 --log-dir=/tmp/launch-x --"
)
ARGUMENTS = """train.py --run '{"seed": 0}'"""


def golden(rank: int, nodes: int, nproc: int, cpus: int, gpus: str) -> str:
    local, torchrun = LOCAL.format(rank=rank, cpus=cpus), TORCHRUN.format(nodes=nodes, rank=rank, nproc=nproc)
    return f"[node {rank}] CUDA_VISIBLE_DEVICES={gpus} {local} {sys.executable} {torchrun} {ARGUMENTS}"


@pytest.mark.parametrize(
    ("geometry", "gpus", "wanted"),
    [
        (Geometry(1, 1, 2), [], [golden(0, 1, 1, 2, "''")]),
        (Geometry(2, 1, 1), [], [golden(0, 2, 1, 1, "''"), golden(1, 2, 1, 1, "''")]),
        (Geometry(1, 4, 8), ["0", "1", "2", "3"], [golden(0, 1, 4, 8, "0,1,2,3")]),
        (Geometry(2, 2, 4), ["4", "5", "6", "7"], [golden(0, 2, 2, 4, "4,5"), golden(1, 2, 2, 4, "6,7")]),
    ],
    ids=["one process", "two nodes", "one node of four GPUs", "two nodes of two GPUs"],
)
def test_torchrun_on_this_machine(geometry, gpus, wanted) -> None:
    assert [str(command) for command in local_plan("torchrun", geometry, PROGRAM, 20001, "/tmp/launch-x", gpus)] == wanted


def test_without_a_launcher_the_program_runs_once_a_node() -> None:
    plan = local_plan("none", Geometry(2, 4, 1), ["stage.py", "--data", "a folder"], 20001, "/tmp/launch-x", [])
    assert [command.command for command in plan] == [(sys.executable, "stage.py", "--data", "a folder")] * 2
    assert [command.environment["NODE_RANK"] for command in plan] == ["0", "1"]
