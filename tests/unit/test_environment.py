"""What other launchers and the user's locale have set changes nothing; what Python finds where."""

import ast
import base64
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from manynodes.base.environment import MODULES, Environment, forget_contract, forget_others
from manynodes.base.errors import Refusal
from manynodes.checkpointing import incidents
from manynodes.experiment.command import name_of
from manynodes.experiment.config import Experiment
from manynodes.experiment.containers import UNWARNED, container_lines
from manynodes.experiment.environment_here import EnvironmentHere
from manynodes.experiment.environments import UserEnvironment
from manynodes.experiment.installed import changed_packages
from manynodes.experiment.interpreter import QUESTIONS, look
from manynodes.programs.folders import Folders
from manynodes.programs.rank import keep_record, looked, note_other_packages, started
from manynodes.programs.task import Task
from manynodes.programs.variables import OUTSIDE, gloo_interface, safely
from manynodes.ranks.network import interface_of, local_address
from manynodes.schedulers import registry
from manynodes.schedulers.slurm.scheduler import forget_step_options
from programs import ROOT, SCRIPTS, program
from session.finished import FinishedRuns
from session.inputs import Inputs

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


def test_a_step_keeps_what_its_job_is_and_none_of_its_options(monkeypatch) -> None:
    kept = (
        "SLURM_JOB_ID SLURM_JOB_NAME SLURM_ARRAY_TASK_ID SLURM_ARRAY_JOB_ID SLURM_SUBMIT_DIR "
        "SLURM_RESTART_COUNT PATH"
    )
    options = "SLURM_NTASKS SLURM_JOB_NUM_NODES SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SBATCH_GRES"
    environment = dict.fromkeys([*kept.split(), *options.split()], "1")
    monkeypatch.setattr(os, "environ", environment)
    forget_step_options()
    assert environment == dict.fromkeys(kept.split(), "1")


@pytest.mark.parametrize(
    "name", ["launch", "train", "check", "difference", "events", "predict", "watch", "node_agent"]
)
def test_what_is_started_by_hand_or_by_ssh_finds_its_modules(name: str) -> None:
    """The rules and `launch` start the others without it."""
    done = program(name, "--help", env=os.environ | {"PYTHONSAFEPATH": "1"})
    assert done.returncode == 0, done.stderr


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
    assert other.variables(before)["PYTHONPATH"] == before["PYTHONPATH"]
    (tmp_path / "lib/python3.9/site-packages/torch").mkdir(parents=True)
    assert other.variables(before)["PYTHONPATH"] == "/of/the/user"
    assert UserEnvironment.of({}).variables(before)["PYTHONPATH"] == before["PYTHONPATH"]


def test_a_python_of_modules_takes_its_own_torch(tmp_path: Path, monkeypatch) -> None:
    """As one that has none takes the workflow's, from a path that the site's modules have set."""
    for name in ("ours", "its"):
        (tmp_path / name / "torch").mkdir(parents=True)
        (tmp_path / name / "torch/__init__.py").touch()
    # Any spelling of it.
    given = f"/program:{MODULES}:{tmp_path}/its/../ours:/user"
    monkeypatch.setenv("PYTHONPATH", given)
    monkeypatch.syspath_prepend(tmp_path / "ours")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    packages = own_python(tmp_path / "v")
    load = f"export PATH={tmp_path}/v/bin:$PATH"
    started = UserEnvironment.of({"setup": load}).started
    shown = "import os, torch; print(os.environ['PYTHONPATH'], torch.__file__)"
    for own in (False, True):
        if own:
            (packages / "its.pth").write_text(str(tmp_path / "its"))
        said = subprocess.run(
            started(["python3", "-c", shown]), env=os.environ | {"PYTHONPATH": given},
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        left = f"/program:{MODULES}:/user" if own else given
        assert said == f"{left} {tmp_path}/{'its' if own else 'ours'}/torch/__init__.py\n"


def test_a_container_shares_folders_of_any_name(tmp_path: Path) -> None:
    """For bash, & is what it replaces; and names that begin with a dot are hidden."""
    folder, files = tmp_path / "R&D", tmp_path / "links"
    for each in (folder, files):
        each.mkdir()
    for name in (".hidden", "..other", "plain"):
        (tmp_path / name).touch()
        (files / name).symlink_to(tmp_path / name)
    lines = container_lines("image.sif", [])
    words = "program_here=$1; program_start=$1; program_words=()\n"
    given = {"PATH": os.environ["PATH"], "TMPDIR": "/nowhere", "LAUNCH_FILES": str(files)}
    done = subprocess.run(
        ["bash", "-c", f'{words}{lines}\nprintf "%s\\n" "${{program_at[@]}}"', "bash", folder],
        env=given, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for bound in (folder, *(tmp_path / name for name in (".hidden", "..other", "plain"))):
        assert f"--bind\n{bound}\n" in done.stdout


@pytest.mark.parametrize(("locked", "installed", "taken"), [
    ("2.11.0", "2.11.0", True), ("2.11.0", "2.10.0", False), ("2024.7.4", "2024.07.04", True),
    # A site's own build; but a build that is locked is another than the plain one.
    ("2.11.0", "2.11.0+computecanada", True), ("2.11.0", "2.10.0+computecanada", False),
    ("2.11.0+cpu", "2.11.0+cpu", True), ("2.11.0+cpu", "2.11.0", False),
])  # fmt: skip
def test_a_uv_project_has_the_versions_of_its_lock(
    tmp_path: Path, locked: str, installed: str, taken: bool
) -> None:
    (tmp_path / "uv.lock").write_text(
        f'[[package]]\nname = "torch"\nversion = "{locked}"\nsource = {{ registry = "site" }}\n'
    )
    site = tmp_path / ".venv/lib/python3.11/site-packages"
    (site / f"torch-{installed}.dist-info").mkdir(parents=True)
    environment = EnvironmentHere(uv=str(tmp_path))
    if taken:
        environment.refuse_unlocked()
    else:
        with pytest.raises(Refusal, match="run `uv sync --locked` in "):
            environment.refuse_unlocked()


def test_what_a_uv_project_that_was_not_synced_needs(tmp_path: Path) -> None:
    for name, remedy in {
        "": "correct environment",
        "pyproject.toml": f"run `uv sync` in {tmp_path}",
        "uv.lock": f"run `uv sync --locked` in {tmp_path}",
    }.items():
        if name:
            (tmp_path / name).touch()
        with pytest.raises(Refusal, match=rf"\.venv is not there; {remedy}$"):
            EnvironmentHere(uv=str(tmp_path)).refuse_missing()


# A backend of its own: nothing is downloaded to build with it.
BACKEND = """
import os, shutil, zipfile
NAME = "of_git-1.dist-info"
FILES = {"METADATA": "Metadata-Version: 2.1\\nName: of-git\\nVersion: 1\\n", "RECORD": "",
         "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"}
def build_wheel(folder, settings=None, metadata=None):
    with zipfile.ZipFile(os.path.join(folder, "of_git-1-py3-none-any.whl"), "w") as file:
        for name, text in FILES.items():
            file.writestr(f"{NAME}/{name}", text)
    return "of_git-1-py3-none-any.whl"
"""


def write_wheel(folder: Path, text: str) -> None:
    """A package of one module, always of the same version."""
    about = {"METADATA": "Metadata-Version: 2.1\nName: of-path\nVersion: 1\n",
             "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}  # fmt: skip
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    about["RECORD"] = f"of_path.py,sha256={digest},{len(text)}\nof_path-1.dist-info/RECORD,,\n"
    with zipfile.ZipFile(folder / "of_path-1-py3-none-any.whl", "w") as file:
        file.writestr("of_path.py", text)
        for name, content in about.items():
            file.writestr(f"of_path-1.dist-info/{name}", content)


def test_a_uv_project_has_the_commits_and_files_of_its_lock(tmp_path: Path) -> None:
    """Their versions may be the same. What uv itself has locked and installed is compared."""
    package, project, member = (tmp_path / name for name in ("package", "project", "project/a"))
    (package / "backend").mkdir(parents=True)
    member.mkdir(parents=True)
    (package / "backend/mine.py").write_text(BACKEND)
    (package / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "mine"\nbackend-path = ["backend"]\n'
        '[project]\nname = "of-git"\nversion = "1"\n'
    )
    git = ["git", "-C", package, "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    write_wheel(project, "x = 1\n")
    about = '[project]\nname = "{}"\nversion = "0"\nrequires-python = ">=3.9"\n'
    (project / "pyproject.toml").write_text(
        f'{about.format("program")}dependencies = ["of-git", "of-path"]\n'
        '[tool.uv]\nno-index = true\n[tool.uv.workspace]\nmembers = ["a*"]\n[tool.uv.sources]\n'
        f'of-git = {{git = "file://{package}"}}\n'
        'of-path = {path = "of_path-1-py3-none-any.whl"}\n'
    )
    (member / "pyproject.toml").write_text(about.format("a"))
    environment = EnvironmentHere(uv=str(project))

    def uv(*words: str) -> None:
        command = [Path(sys.executable).with_name("uv"), "--quiet", *words]
        # Where it leaves its locks, and what it has built.
        places = {"TMPDIR": str(tmp_path), "UV_CACHE_DIR": str(tmp_path / "cache")}
        given = os.environ | places | {"UV_PYTHON": sys.executable}
        subprocess.run(command, cwd=project, env=given, check=True)

    uv("sync")
    environment.refuse_unlocked()
    # Lock and environment are the workspace's.
    with pytest.raises(Refusal, match=r"/a/\.venv is not there; it is of the workspace .*/project"):
        EnvironmentHere(uv=str(member)).refuse_missing()
    commit = [*git, "commit", "-q", "--allow-empty", "-m", "two"]
    for name, change in (
        ("of-git", lambda: subprocess.run(commit, check=True)),
        ("of-path", lambda: write_wheel(project, "x = 2\n")),
    ):
        change()
        uv("lock", "--upgrade-package", name)
        with pytest.raises(Refusal, match=f"has {name} 1 of another commit, address or file than"):
            environment.refuse_unlocked()
        uv("sync", "--locked")
        environment.refuse_unlocked()


@pytest.mark.parametrize(("locked", "direct", "taken"), [
    ('url = "https://x.org/a.whl"', {"url": "https://me:key@x.org/a.whl#sha256=1"}, True),
    ('url = "https://x.org/b.whl"', {"url": "https://x.org/a.whl"}, False),
    ('git = "https://x.org/a?rev=main#abc"', {"url": "", "vcs_info": {"commit_id": "abc"}}, True),
    # From a fork to an index, and back.
    ('registry = "x"', {"url": "https://x.org/a", "vcs_info": {"commit_id": "abc"}}, False),
    ('git = "https://x.org/a#abc"', None, False), ('registry = "x"', None, True),
    # By hand, from a folder of a site's wheels.
    ('registry = "x"', {"url": "file:///site/mine-1-py3-none-any.whl"}, True),
])  # fmt: skip
def test_a_uv_project_has_the_addresses_of_its_lock(
    tmp_path: Path, locked: str, direct: dict | None, taken: bool
) -> None:
    (tmp_path / "uv.lock").write_text(
        f'[[package]]\nname = "mine"\nversion = "1"\nsource = {{ {locked} }}\n'
    )
    about = tmp_path / ".venv/lib/python3.11/site-packages/mine-1.dist-info"
    about.mkdir(parents=True)
    if direct:
        (about / "direct_url.json").write_text(json.dumps(direct))
    with nullcontext() if taken else pytest.raises(Refusal, match="of another commit, address or"):
        EnvironmentHere(uv=str(tmp_path)).refuse_unlocked()


def test_gloo_is_reached_from_other_nodes_although_the_own_name_is_a_loopback_address() -> None:
    there = interface_of(local_address(OUTSIDE))
    found = gloo_interface({"MASTER_ADDR": "localhost", "LAUNCH_NODES": "2"})
    assert found == ({"GLOO_SOCKET_IFNAME": there} if there else {})
    for environment in (
        {"MASTER_ADDR": "localhost"},
        {"MASTER_ADDR": "127.0.0.1", "LAUNCH_NODES": "2"},
    ):
        assert gloo_interface(environment) == {}


def own_python(folder: Path) -> Path:
    """A folder that looks like a venv; its packages folder."""
    packages = folder / f"lib/python3.{sys.version_info[1]}/site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(os.path.realpath(sys.executable))
    (folder / "bin/python3").symlink_to("python")
    (folder / "pyvenv.cfg").write_text(f"home = {Path(os.path.realpath(sys.executable)).parent}\n")
    return packages


def test_modules_and_setup_replace_nothing_that_a_process_needs(tmp_path: Path) -> None:
    own_python(tmp_path / "v")
    site = (
        "export PATH=/site/bin:$PATH VIRTUAL_ENV=/site PYTHONPATH=/site CUDA_VISIBLE_DEVICES={}\n"
        "export OMP_NUM_THREADS=99 MKL_NUM_THREADS=99 OMP_PROC_BIND=true OF_SITE=1\n"
    )
    ours = f"/program:{MODULES}"
    before = {
        "PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ours}:/user", "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }  # fmt: skip
    # One that leaves GPUs out is obeyed; others may be of another job.
    for gpus, left in (("5", "0,1"), ("1", "1"), ("0,1,2", "0,1")):
        given = {"python": str(tmp_path / "v"), "setup": site.format(gpus)}
        words = UserEnvironment.of(given).started(["env", "-0"])
        said = subprocess.run(words, env=before, capture_output=True, text=True, check=True).stdout
        found = dict(line.split("=", 1) for line in said.split("\0") if line)
        assert found["PATH"] == f"{tmp_path}/v/bin:/site/bin:/usr/bin:/bin"
        assert found["VIRTUAL_ENV"] == f"{tmp_path}/v"
        assert found["PYTHONPATH"] == f"{ours}:/site"
        assert (found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"]) == ("2", left)
        assert found["OF_SITE"] == "1"
        assert not {"MKL_NUM_THREADS", "OMP_PROC_BIND"} & set(found)


def test_activation_scripts_of_conda_see_their_own_environment(tmp_path: Path) -> None:
    """And not the one that a site's module for conda activates."""
    own_python(tmp_path / "v")
    scripts = tmp_path / "v/etc/conda/activate.d"
    scripts.mkdir(parents=True)
    (scripts / "gdal.sh").write_text(
        'export GDAL=$CONDA_PREFIX/share WITH="$(command -v python) of $CONDA_DEFAULT_ENV"\n'
    )
    own_python(tmp_path / "base")
    base = f"CONDA_PREFIX={tmp_path}/base CONDA_DEFAULT_ENV=base PATH={tmp_path}/base/bin"
    before = dict(word.split("=") for word in base.split())
    # Of a module, or of the shell in which Snakemake was started.
    for setup, given in ((f"export {base}:$PATH", {"PATH": "/bin"}),
                         ("", before | {"PATH": f"{before['PATH']}:/bin"})):  # fmt: skip
        conda = UserEnvironment.of({"conda": str(tmp_path / "v"), "setup": setup})
        script = 'echo "$GDAL $WITH"; command -v python; echo $CONDA_DEFAULT_ENV'
        said = subprocess.run(
            conda.started(["bash", "-c", script]),
            env=conda.variables(given), capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        python = f"{tmp_path}/v/bin/python"
        assert said == [f"{tmp_path}/v/share {python} of v", python, "v"]


def test_variables_that_lead_to_ours_reach_no_program() -> None:
    ours = {
        "VIRTUAL_ENV": sys.prefix, "UV_PROJECT": str(ROOT), "UV_PYTHON": sys.executable,
        "PIP_TARGET": f"{sys.prefix}/lib", "PIP_PREFIX": sys.prefix,
    }  # fmt: skip
    kept = {"UV_CACHE_DIR": f"{ROOT}/cache", "PIP_NO_INDEX": "1", "UV_PYTHON_DOWNLOADS": "never"}
    for given in ({}, {"setup": "true"}):
        found = UserEnvironment.of(given).variables(ours | kept)
        assert not ours.keys() & found
        assert found.items() >= kept.items()


def test_no_variable_of_conda_names_the_environment_of_the_workflow(
    tmp_path: Path, monkeypatch
) -> None:
    """Its name is enough for conda; and conda's own environment, if no other is active."""
    base = tmp_path / "conda"
    for name in ("bin", "conda-meta", "condabin"):
        (base / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(base))
    monkeypatch.setattr(sys, "executable", str(base / "bin/python"))
    named = {"CONDA_DEFAULT_ENV": "base", "CONDA_SHLVL": "2", "CONDA_PREFIX_1": "/other"}
    before = named | {"PATH": f"{base}/condabin:/bin", "CONDA_EXE": f"{base}/bin/conda"}
    own_python(tmp_path / "v")
    for given in ({"python": str(tmp_path / "v")}, {"setup": "true"}, {}):
        for active in ({"CONDA_PREFIX": str(base)}, {}):
            found = UserEnvironment.of(given).variables(before | active)
            assert {name for name in found if name.startswith("CONDA")} == {"CONDA_EXE"}
            assert ("condabin" in found["PATH"]) == (not given)
        found = UserEnvironment.of(given).variables(before | {"CONDA_PREFIX": "/other"})
        assert found.items() >= named.items()
    of_its_own = UserEnvironment.of({"conda": str(tmp_path / "v")}).variables(before)
    assert of_its_own["CONDA_PREFIX"] == f"{tmp_path}/v"
    assert of_its_own["CONDA_DEFAULT_ENV"] == "v"
    assert of_its_own["PATH"] == f"{tmp_path}/v/bin:{base}/condabin:/bin"


def test_no_spelling_of_the_folder_of_ours_stays_on_path(tmp_path: Path) -> None:
    """And an interpreter of the system brings its folder, with other compilers, nowhere first."""
    ours, link = Path(sys.executable).parent, tmp_path / "link"
    link.symlink_to(sys.prefix)
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/python3").symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "alias").symlink_to("usr/bin")
    rest = f"/loaded/bin:{tmp_path}/usr/bin:/bin"
    path = f"{ours}:{ours}/:{link}/bin:{ours}/../bin:{rest}"
    for place in ("usr/bin", "alias"):
        alone = UserEnvironment.of({"python": f"{tmp_path}/{place}/python3"})
        assert alone.variables({"PATH": path})["PATH"] == rest
        found = alone.variables({"PATH": "/loaded/bin"})["PATH"]
        assert found == f"{tmp_path}/{place}:/loaded/bin"


def test_uv_pip_of_a_program_leaves_the_venv_of_a_folder_above_alone(tmp_path: Path) -> None:
    installed = [own_python(tmp_path / name) / "some-1.dist-info" for name in (".venv", "other")]
    for about in installed:
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some\nVersion: 1\n")
        (about / "RECORD").write_text(f"{about.name}/METADATA,,\n{about.name}/RECORD,,\n")
    (tmp_path / "work").mkdir()
    words = [Path(sys.executable).with_name("uv"), "--offline", "pip", "uninstall", "some"]
    activate = f"export VIRTUAL_ENV={shlex.quote(str(tmp_path / 'other'))}"
    before = {name: os.environ[name] for name in ("PATH", "HOME")}
    for given, left in (
        ({"python": sys._base_executable}, [True, True]),
        ({"setup": "true"}, [True, True]),
        ({"setup": activate}, [True, False]),
    ):
        environment = UserEnvironment.of(given)
        subprocess.run(
            environment.started(words), env=environment.variables(before), cwd=tmp_path / "work",
            check=False,
        )  # fmt: skip
        assert [about.exists() for about in installed] == left, given
    # An image may name a venv of its own.
    for name, left in (("VIRTUAL_ENV", False), ("OTHER", True)):
        variables = before | {"UV_SYSTEM_PYTHON": "1", name: "/venv"}
        command = [*shlex.split(UNWARNED), "env"]
        said = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        assert ("UV_SYSTEM_PYTHON=1" in said.stdout) == left


def test_a_python_is_understood_whatever_comes_before_it(tmp_path: Path) -> None:
    packages = own_python(tmp_path / "v")
    for name in ("good", "strange"):
        (packages / f"{name}-1.dist-info").mkdir()
        text = f"Name: {name}\nVersion: 1\nAuthor: J\xfcrgen\n"
        encoding = "utf-8" if name == "good" else "latin-1"
        (packages / f"{name}-1.dist-info/METADATA").write_bytes(text.encode(encoding))
        (packages / f"{name}-1.dist-info/RECORD").write_bytes(text.encode(encoding))
    pid = tmp_path / "pid"
    setup = f"printf 'module x is loaded'; sleep 300 & echo $! > {pid}"
    other = UserEnvironment.of({"python": str(tmp_path / "v"), "setup": setup})
    found = look(other, [other.interpreter], os.environ, (), tmp_path)
    # Nobody has waited for it.
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert found["distributions"].items() >= {"good": "1", "strange": "1"}.items()
    ends = UserEnvironment.of({"setup": "f() { false; }\nf"})
    with pytest.raises(Refusal, match="does not answer; setup may have ended the shell before it"):
        look(ends, ["python3"], os.environ, (), tmp_path)


def test_a_python_that_only_a_script_starts_is_looked_at(tmp_path: Path) -> None:
    given = (["bash", "run.sh"], dict(os.environ), tmp_path, False)
    assert looked(UserEnvironment.of({"setup": "true"}), *given)["python"].startswith("3.")
    assert looked(UserEnvironment.of({"setup": "PATH=/nowhere"}), *given)["python"] is None


@pytest.mark.parametrize("name", ["python", "python3", "python3.14", "python3.13t"])
def test_a_python_is_known_by_its_name(tmp_path: Path, name: str) -> None:
    """That of 3.13t is without a global lock."""
    (tmp_path / name).symlink_to(sys.executable)
    (tmp_path / "train.py").write_text("import no_such_module\n")
    environment = UserEnvironment.of({"python": str(tmp_path / name)})
    words = [environment.interpreter, str(tmp_path / "train.py")]
    with pytest.raises(Refusal, match="has no module no_such_module, which the program imports"):
        looked(environment, words, dict(os.environ), tmp_path, False)
    # It is no program among the files of a command, whose name would be the run's.
    assert name_of([str(tmp_path / name), str(tmp_path / "train.py")]) == "train"


def test_a_module_imports_nothing_from_the_folder_that_it_writes_to(tmp_path: Path) -> None:
    work, beside = tmp_path / "work", tmp_path / "beside"
    for folder in (work, beside):
        folder.mkdir()
    (work / "csv.py").write_text("raise SystemExit('not the csv of Python')")
    (beside / "mine.py").write_text("import csv, helper; print(csv.__file__)")
    (beside / "helper.py").touch()
    module = ("{python}", "-m", f"{beside}:mine")
    file = ("{python}", str(beside / "mine.py"))
    for words, directory in ((module, None), (file, None), (module, str(beside))):
        task = Task(words, tmp_path, {}, directory=directory)
        places = Environment(results=work)
        command, variables, start = started(task, UserEnvironment(), places, {"rank": 0})
        command = safely(command, sys.executable, directory)
        done = subprocess.run(
            command, env=variables, cwd=start, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert ("-P" in command) == (words == module and directory is None)
        # What it starts would not find the modules beside itself.
        assert "PYTHONSAFEPATH" not in variables
    assert safely(["/a/python", "-m", "mine"], "/a/python", None) == ["/a/python", "-m", "mine"]


def test_other_packages_of_a_run_that_continues_are_told_and_kept(tmp_path: Path) -> None:
    folders, said = Folders(tmp_path), list[str]()
    folders.state.mkdir()
    record = {"host": "n1", "python": "3.12.1", "distributions": {"numpy": "2.3.5", "torch": "2.9"}}
    note_other_packages(record, folders, said.append)
    (folders.state / "environment.json").write_text(json.dumps(record))
    note_other_packages(record, folders, said.append)
    assert (said, incidents.read(folders.state)) == ([], [])
    numpy = {"distributions": {"numpy": "2.4.0", "torch": "2.9"}}
    note_other_packages(record | numpy, folders, said.append)
    line = "continued with other packages: numpy 2.3.5 -> 2.4.0"
    assert said == [f"warning: {line}"]
    assert [(each.kind, each.text) for each in incidents.read(folders.state)] == [("inexact", line)]
    modules = {"modules": ["cuda/12.4", "site"]}
    line = "module cuda none -> 12.4, module site none -> loaded"
    assert changed_packages(record | {"modules": []}, record | modules) == line
    # What `setup` exports is in no package; a record of an earlier version does not say it.
    one, other = (
        record | {"setup_sha256": UserEnvironment.of({"setup": text}).setup_sha256}
        for text in ("", "export PRECISION=bf16")
    )
    assert changed_packages(record, other) == ""
    assert changed_packages(one, one) == ""
    # Nor is it known of a Python that does not answer.
    for before, now in ((one, other), (one, other | {"python": None, "distributions": {}})):
        changed = changed_packages(before, now)
        assert re.fullmatch(r"environment\.setup none -> [0-9a-f]{12}", changed)


def install(packages: Path, name: str, version: str) -> None:
    """A package, in the place of another version."""
    for path in packages.glob(f"{name}-*.dist-info"):
        shutil.rmtree(path)
    about = packages / f"{name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


MODULE = '() { shift; export LOADEDMODULES=$(IFS=:; echo "$*"); }'  # as a login shell exports it
# The key `environment` and the command of a program before and after a change, and what is told.
CHANGED = {
    "modules": ({"modules": ["a", "torch/2.3"]}, {"modules": ["a", "torch/2.6", "b"]}, "{python}",
                "module b none -> loaded, module torch 2.3 -> 2.6"),
    "no modules": ({"python": "v", "modules": ["torch/2.3"]}, {"python": "v"}, "{python}",
                   "mine 1 -> 2, module torch 2.3 -> none"),
    "behind modules": ({"python": "v", "modules": ["torch/2.3"]}, None, "{python}", "mine 1 -> 2"),
    "behind setup": ({"python": "v", "setup": "true"}, None, "{python}", "mine 1 -> 2"),
    "asked": ({"python": "v"}, None, "{python}", "mine 1 -> 2"),
    "ours": (None, None, "{python}", "mine 1 -> 2"),
    "another": (None, None, "v/bin/python", "mine 1 -> 2"),
    "another by its name": ({"python": "u"}, None, "python3", "mine 1 -> 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_environment_is_told_for_every_run_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """In a line for those that had the same, although all would be trained in the same now."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BASH_FUNC_module%%", MODULE)
    packages = own_python(tmp_path / "v")
    own_python(tmp_path / "u")
    if case == "ours":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "v/bin/python"))
    if case == "another by its name":
        (tmp_path / "u/bin/python3").unlink()
        monkeypatch.setenv("PATH", f"{tmp_path}/v/bin", prepend=os.pathsep)
    before, after, python, told = CHANGED[case]

    def finished(environment: dict | None) -> FinishedRuns:
        config = {"experiment": "e", "command": [python, "p.py"], "environment": environment,
                  "seed": [0, 1, 2, 3]}  # fmt: skip
        experiment = Experiment.from_config(config)
        return FinishedRuns(experiment, Path("results"), Inputs(experiment, Path("results")))

    runs = finished(before)
    *names, other, _ = runs.experiment.runs
    for name in (*names, other):
        install(packages, "mine", "2" if name == other else "1")
        environment = UserEnvironment.of(before)
        command = [environment.interpreter if python == "{python}" else python, "p.py"]
        variables = environment.variables(os.environ)
        record = looked(environment, command, variables, tmp_path, True)
        kept = Folders(Path("results") / name)
        kept.state.mkdir(parents=True)
        task = Task(tuple(command), kept.run, {}, environment=before)
        keep_record(record, task, False, print)
        (kept.state / "environment.json").rename(kept.run / "environment.json")
    runs.tell_other_packages()
    same = "".join(part for part in told.split(", ") if part.startswith("mine"))
    line = f"e: since {', '.join(names)} were trained, "
    assert capsys.readouterr().err == (f"{line}{same}\n" if same else "")
    finished(after or before).tell_other_packages()
    first, *rest = capsys.readouterr().err.splitlines()
    if not same:
        line = line.replace(" were", f", {other} were")
    assert first == line + told
    # Of the last one only its modules are others.
    modules = told.removeprefix(f"{same}, ") if same and after else ""
    assert rest == ([f"e/{other}: since it was trained, {modules}"] if modules else [])


def test_a_python_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = Experiment.from_config({"experiment": "e", "command": ["/no/python", "p.py"]})
    (tmp_path / "run").mkdir()
    record = {"python": "3.12.1", "distributions": {"numpy": "2.3.5"}}
    (tmp_path / "run/environment.json").write_text(json.dumps(record))
    FinishedRuns(experiment, tmp_path, Inputs(experiment, tmp_path)).tell_other_packages()
    said = "e: /no/python is not here; whether its packages have changed since runs were trained"
    assert capsys.readouterr().err == f"{said} is not known\n"


@pytest.mark.parametrize("given", [{}, {"setup": "umask 2"}], ids=["asked", "not asked"])
def test_an_environment_is_packed_again_after_a_change_that_no_record_shows(
    tmp_path: Path, given: dict
) -> None:
    packages = own_python(tmp_path / "v")
    seen = set()
    for name in ("lib/nothing", "conda-meta/cuda-12.json", packages / "mine.pth", packages / "x-1"):
        path = tmp_path / "v" / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if path.name == "x-1" else path.touch()
        seen.add(EnvironmentHere.of({"python": str(tmp_path / "v")} | given).contents_sha256)
    assert len(seen) == 4


def test_packages_of_python_3_7_are_known_without_setuptools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `uv venv -p 3.7` leaves a venv."""
    monkeypatch.setenv("PYENV_VERSION", "3.7")  # where it is pyenv's
    made = ["python3.7", "-m", "venv", "--without-pip", tmp_path / "v"]
    if not shutil.which("python3.7") or subprocess.run(made, check=False).returncode:
        pytest.skip("needs Python 3.7")
    (packages,) = (tmp_path / "v").glob("lib/python3.7/site-packages")
    install(packages, "mine", "1")
    environment = EnvironmentHere(python=str(tmp_path / "v"))
    found = environment.here
    says = [tmp_path / "v/bin/python", "-c", "import platform; print(platform.python_version())"]
    version = subprocess.check_output(says, text=True).strip()
    assert version.startswith("3.7.")
    assert (found["python"], found["distributions"]) == (version, {"mine": "1"})
    (packages / "mine-1.dist-info/RECORD").write_bytes(b"J\xfcrgen.py,sha256=1,1\n")
    assert EnvironmentHere(python=str(tmp_path / "v")).here["contents"] != found["contents"]


def test_what_runs_in_the_users_python_is_of_python_3_7() -> None:
    for path in (QUESTIONS, MODULES / "launched.py"):
        ast.parse(path.read_text(), feature_version=(3, 7))


def test_an_environment_that_takes_the_rank_is_refused() -> None:
    """As containers do with --cleanenv: each process would be rank 0 of 1."""
    given = os.environ | {"RANK": "1", "WORLD_SIZE": "2"}
    python = [sys.executable]
    assert look(UserEnvironment(setup="unset OTHER"), python, given, (), Path())["python"]
    for setup in ("unset RANK", "export WORLD_SIZE=1"):
        environment = UserEnvironment(setup=setup)
        with pytest.raises(Refusal, match="would not get the variable (RANK|WORLD_SIZE): leave"):
            look(environment, python, given, (), Path())
        # Of one process, or with its rank among its arguments, it needs none.
        assert look(environment, python, given | {"WORLD_SIZE": "1"}, (), Path())
        assert look(environment, python, given, (), Path(), apart=True)


def test_why_lmod_could_not_load_a_module_is_told() -> None:
    """Its last lines are advice."""
    said = (
        "Lmod has detected the following error:  The following module(s) are unknown:\n"
        '"nope/3"\n\nPlease check the spelling or version number.\n   $ module load\n'
    )
    function = f"() {{ echo {shlex.quote(said)} >&2; return 1; }}"
    environment = UserEnvironment(modules=("gcc/12", "nope/3"))
    given = os.environ | {"BASH_FUNC_module%%": function}
    with pytest.raises(Refusal) as refused:
        look(environment, [sys.executable], given, (), Path())
    assert "module load gcc/12 nope/3: The following module(s) are unknown:" in str(refused.value)
    assert '"nope/3"' in str(refused.value)
    assert "spelling" not in str(refused.value)


def test_a_module_that_version_3_2_could_not_load_is_refused() -> None:
    """Its status is 0; an alias has another name when it is loaded."""
    function = """() { shift; for name; do case $name in
      gcc|no) echo "ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile" >&2 ;;
      *) export LOADEDMODULES=${LOADEDMODULES:+$LOADEDMODULES:}of/$name ;;
    esac; done; }"""
    given = os.environ | {"BASH_FUNC_module%%": function, "LOADEDMODULES": "gcc-libs/1"}
    modules = ("alias", "gcc-libs")
    assert look(UserEnvironment(modules=modules), ["python3"], given, (), Path())["python"]
    for missing in ("no", "gcc"):
        environment = UserEnvironment(modules=(*modules, missing))
        with pytest.raises(Refusal, match="ERROR:105: Unable to locate a modulefile"):
            look(environment, ["python3"], given, (), Path())
    words = UserEnvironment(modules=("no",)).started(["true"])
    done = subprocess.run(words, env=given, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "ERROR:105: Unable to locate a modulefile"


@pytest.mark.parametrize("known", ["LMOD_CMD", "MODULES_CMD"])
def test_a_word_for_a_module_is_no_module_of_later_versions(known: str) -> None:
    """Variants are of the name before them."""
    function = "() { [ $# = 3 ] || echo ERROR: $2 >&2; export LOADEDMODULES=$2; [ $# = 3 ]; }"
    given = os.environ | {"BASH_FUNC_module%%": function, known: "/usr/libexec/module"}
    for variant in ("+mpi", "toolchain=intel"):
        environment = UserEnvironment(modules=("var/1.0", variant))
        assert look(environment, ["python3"], given, (), Path())["python"]


@pytest.mark.parametrize(("kind", "part", "writable"), [(0x4004, 2, False), (0x4004, 4, True),
                                                        (0x4001, 4, False)])  # fmt: skip
def test_an_image_with_an_overlay_is_another_after_it_was_written_to(
    tmp_path: Path, kind: int, part: int, writable: bool
) -> None:
    image = tmp_path / "image.sif"
    header = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\x0001\x0002\0" + bytes(16)
    header += struct.pack("<8q", 0, 0, 47, 48, 128, 585, 0, 0)
    image.write_bytes(header + struct.pack("<i?196x2i376x", kind, True, 2, part))
    environment = UserEnvironment(container=str(image))
    before = environment.image
    os.utime(image, (1, 1))
    assert (UserEnvironment(container=str(image)).image != before) == writable
