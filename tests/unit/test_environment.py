"""What other launchers and the user's locale have set changes nothing; what Python finds where."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manynodes.base.environment import forget_contract, forget_others
from manynodes.experiment.environments import UserEnvironment, look
from manynodes.programs.variables import OUTSIDE, gloo_interface
from manynodes.ranks.network import interface_of, local_address
from manynodes.schedulers import registry
from programs import SCRIPTS

OTHERS = {
    "torchrun": "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK "
    "ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID "
    "TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE "
    "PET_STANDALONE PET_NNODES",
    "Kubeflow": "PET_NPROC_PER_NODE PET_RDZV_ENDPOINT PET_MASTER_ADDR TF_CONFIG",
    "Open MPI": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK PMIX_RANK "
    "OMPI_UNIVERSE_SIZE",
    "MPICH": "PMI_RANK PMI_SIZE PMI_FD MPI_LOCALRANKID MPI_LOCALNRANKS",
    "MVAPICH": "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_LOCAL_RANK",
}
# Of the user, the site and the scheduler.
KEPT = (
    "PATH HOME SBATCH_ACCOUNT SLURM_JOB_ID SLURM_PROCID SLURM_NTASKS PBS_JOBID PBS_NODEFILE "
    "LAUNCH_NODE_RANK "
    "OMPI_MCA_btl MPI_HOME HYDRA_FULL_ERROR TORCH_HOME OMP_NUM_THREADS NCCL_DEBUG RANKING SIZE"
)


@pytest.mark.parametrize("launcher", OTHERS)
def test_another_launcher_is_forgotten(launcher: str) -> None:
    kept = dict.fromkeys(KEPT.split(), "1")
    environment = kept | dict.fromkeys(OTHERS[launcher].split(), "1")
    forget_others(environment)
    assert environment == kept | {"PYTHONUTF8": "1"}


def test_settings_of_queries_are_forgotten() -> None:
    kept = dict.fromkeys(KEPT.split(), "1")
    settings = "SQUEUE_PARTITION SQUEUE_USERS SQUEUE_FORMAT SACCT_FORMAT SLURM_TIME_FORMAT"
    environment = kept | dict.fromkeys(settings.split(), "1")
    registry.forget_query_settings(environment)
    assert environment == kept


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without a name")
def test_a_user_without_a_name_gets_one() -> None:
    # What is imported later may lie where this user cannot read.
    script = "import getpass, os, pwd; from manynodes.base.environment import forget_others; "
    script += "os.setuid(54321); forget_others(os.environ); print(getpass.getuser())"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "uid54321\n"


def test_files_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    config = tmp_path / "ä.yaml"
    config.write_text("experiment: größe\n", encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, SCRIPTS / "check.py", config], capture_output=True,
        env=os.environ | locale, check=False,
    )  # fmt: skip
    said = (done.stdout + done.stderr).decode()
    assert "Traceback" not in said
    assert done.returncode == 1
    assert "experiment: " in said


def test_modules_that_no_hash_covers_are_found(tmp_path: Path) -> None:
    """Neither installed, nor of Python itself, nor beside the program, nor staged."""
    for folder in ("beside", "beside/lib", "beside/package", "staged"):
        (tmp_path / folder).mkdir()
    for file in (
        "beside/lib/of_lib",
        "beside/of_beside",
        "beside/package/__init__",
        "staged/of_it",
    ):
        (tmp_path / f"{file}.py").touch()
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "beside/lib"), str(tmp_path / "staged")]),
        "LAUNCH_FILES": str(tmp_path / "staged"),
    }
    imports = ("of_lib", "of_beside", "package", "of_it", "numpy", "json", "math", "sys")
    found = look(UserEnvironment(), [sys.executable], variables, imports, tmp_path / "beside")
    assert found["elsewhere"] == {"of_lib": str(tmp_path / "beside/lib/of_lib.py")}


def test_what_a_shell_has_of_the_contract_reaches_no_run() -> None:
    kept = {"LAUNCH_STOP_AT": "1", "LAUNCHER": "mine"}
    environment = kept | {"LAUNCH_DATA": "/of/another", "LAUNCH_STORE": "/x"}
    forget_contract(environment)
    assert environment == kept


def test_another_python_does_not_find_the_torch_of_the_workflow(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    torch = str(Path(importlib.util.find_spec("torch").origin).parents[1])
    before = {"PATH": "/bin", "PYTHONPATH": os.pathsep.join([torch, "/of/the/user"])}
    other = UserEnvironment.of({"python": str(tmp_path)})
    # It has none itself.
    assert other.variables(before, tmp_path)["PYTHONPATH"] == before["PYTHONPATH"]
    (tmp_path / "lib/python3.9/site-packages/torch").mkdir(parents=True)
    assert other.variables(before, tmp_path)["PYTHONPATH"] == "/of/the/user"
    assert UserEnvironment.of({}).variables(before, tmp_path)["PYTHONPATH"] == before["PYTHONPATH"]


def test_gloo_is_reached_from_other_nodes_although_the_own_name_is_a_loopback_address() -> None:
    there = interface_of(local_address(OUTSIDE))
    found = gloo_interface({"MASTER_ADDR": "localhost", "LAUNCH_NODES": "2"})
    assert found == ({"GLOO_SOCKET_IFNAME": there} if there else {})
    for environment in (
        {"MASTER_ADDR": "localhost"},
        {"MASTER_ADDR": "127.0.0.1", "LAUNCH_NODES": "2"},
    ):
        assert gloo_interface(environment) == {}
