"""The resources of a run's jobs, and the sbatch command that the Slurm plugin makes of them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake_executor_plugin_slurm.submit_string import get_submit_command
from snakemake_executor_plugin_slurm.utils import set_gres_string

from classifier.check import parameters
from manynodes.experiment.config import Experiment, facts_of
from manynodes.experiment.job_size import (
    BYTES_PER_PARAMETER,
    BYTES_PER_PARAMETER_SAVED,
    Images,
    cpus_on_one_machine,
    evaluation_size,
    evaluation_size_of_program,
    training_size,
)
from manynodes.schedulers.registry import resources
from programs import program
from session.inputs import Inputs


class Resources(dict):
    """As the plugin reads them: by key and by attribute."""

    __getattr__ = dict.__getitem__


SITE = {"runtime": 60, "constraint": "ib", "slurm_extra": "--exclusive"}
PARAMS = {
    "run_uuid": "id",
    "slurm_logfile": "log",
    "comment_str": "c",
    "account": "-A project",
    "partition": "-p gpu",
    "workdir": "/w",
}
BEFORE = (
    "sbatch --parsable --job-name id --output log --export=ALL --comment c -A project -p "
    "gpu -t 60 -C ib"
)


def submitted(size, **run) -> str:
    """The sbatch command line for a run, without its constant beginning."""
    (one,) = Experiment.from_config({"experiment": "test"} | run).runs.values()
    job = SimpleNamespace(resources=Resources(resources(size(one)) | SITE), threads=1)
    command = get_submit_command(job, PARAMS) + set_gres_string(job)
    assert command.startswith(f"{BEFORE} ")
    return command.removeprefix(f"{BEFORE} ").replace(" --exclusive -D /w", "")


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        ({}, "--mem 4000 --nodes=1 --ntasks=1 --cpus-per-task=4"),
        (
            {"nodes": 1, "nproc_per_node": 4, "cpus_per_proc": 2},
            "--mem 16000 --nodes=1 --ntasks=1 --cpus-per-task=8",
        ),
        ({"nodes": 2}, "--mem 4000 --nodes=2 --ntasks=2 --cpus-per-task=4"),
        (
            {"nodes": 8, "nproc_per_node": 2, "cpus_per_proc": 16, "global_batch_size": 512},
            "--mem 8000 --nodes=8 --ntasks=8 --cpus-per-task=32",
        ),
        ({"device": "cuda"}, "--mem 8000 --nodes=1 --cpus-per-task=4 --gres=gpu:1"),
        (
            {"device": "cuda", "nproc_per_node": 4},
            "--mem 32000 --nodes=1 --cpus-per-task=16 --gres=gpu:4",
        ),
        (
            {"device": "cuda", "nodes": 2, "nproc_per_node": 4, "global_batch_size": 512},
            "--mem 32000 --nodes=2 --ntasks=2 --cpus-per-task=16 --gres=gpu:4",
        ),
    ],
)
def test_training(run, wanted) -> None:
    assert submitted(training_size, **run) == wanted


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (
            {"nodes": 8, "global_batch_size": 512},
            "--mem 4000 --nodes=1 --ntasks=1 --cpus-per-task=4",
        ),
        (
            {"device": "cuda", "nodes": 2, "nproc_per_node": 4, "global_batch_size": 512},
            "--mem 8000 --nodes=1 --cpus-per-task=4 --gres=gpu:1",
        ),
    ],
)
def test_evaluation_is_one_process_whatever_the_run(run, wanted) -> None:
    assert submitted(evaluation_size, **run) == wanted


def test_on_several_nodes_the_rule_is_the_batch_step() -> None:
    """Without the key, the plugin puts the rule inside a step of one node; with a name, it needs
    tasks.
    """
    sizes = [
        resources(training_size(run))
        for run in Experiment.from_config({"experiment": "test", "nodes": [1, 2]}).runs.values()
    ]
    assert [size["mpi"] for size in sizes] == ["", "srun"]
    (run,) = Experiment.from_config({"experiment": "test"}).runs.values()
    assert "mpi" not in resources(evaluation_size(run))


def test_memory_follows_the_number_of_parameters() -> None:
    """Of those that the usual memory has no room for; the first process writes states."""
    (run,) = Experiment.from_config(
        {"experiment": "test", "global_batch_size": 64, "nproc_per_node": 2, "device": "cuda"}
    ).runs.values()
    usual = training_size(run)
    assert training_size(run, parameters=11_000_000) == usual
    more = training_size(run, parameters=100_000_000).memory - usual.memory
    each, first = (
        100 * number - 1000 for number in (BYTES_PER_PARAMETER, BYTES_PER_PARAMETER_SAVED)
    )
    assert more == 2 * each + first


def test_the_parameters_of_a_network_are_counted_before_any_job() -> None:
    given = {"experiment": "test", "dataset": {"name": "cifar10"}}
    (own, vgg) = Experiment.from_config(given | {"model": ["resnet18", "vgg16"]}).runs.values()
    about = facts_of("cifar10")
    # A ResNet-18 needs no more than what every job gets.
    assert parameters(own, about) == 0
    wide = SimpleNamespace(**own.values | {"model": "resnet9", "widths": [600, 8, 8]})
    assert parameters(wide, about) > 1_000_000
    # torchvision's documentation: 138,357,544 for 1,000 classes.
    assert parameters(vgg, about) == 138_357_544 - 990 * (4096 + 1)
    # Not yet imported.
    assert parameters(vgg, {"name": "mine", "classes": 10}) == 0


def test_memory_and_local_disk_follow_the_size_of_the_images() -> None:
    (run,) = Experiment.from_config(
        {"experiment": "test", "global_batch_size": 64, "nproc_per_node": 2}
    ).runs.values()
    usual = training_size(run)
    photographs = training_size(run, Images(224, 224, 40_000_000_000))
    # 32 images of 224 x 224 in each process, and as much page cache as is asked for.
    assert photographs.memory == usual.memory + 2 * (32 * 224 * 224 // 1000 - 1000) + 15_000
    assert resources(photographs)["disk_mb"] == 40_000
    assert resources(usual)["disk_mb"] == 200


def test_a_job_that_only_takes_results_has_no_room_for_a_batch() -> None:
    keys = {"experiment": "test", "global_batch_size": 4096, "nodes": 8, "nproc_per_node": 4}
    (run,) = Experiment.from_config(keys).runs.values()
    (small,) = Experiment.from_config({"experiment": "test"}).runs.values()
    photographs = Images(224, 224, 200_000_000)
    assert training_size(run, photographs, ended=True) == training_size(small)


def test_local_disk_and_memory_have_room_for_a_staged_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its archive and what that holds; for an image, its file alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v/bin").mkdir(parents=True)
    (tmp_path / "v/bin/python").symlink_to("/nowhere")
    (tmp_path / "v/zeros").write_bytes(bytes(4_000_000))
    (tmp_path / "image.sif").write_bytes(b"SIF_MAGIC")
    (tmp_path / "p.py").touch()
    given = {"experiment": "e", "program": "p.py"}

    def megabytes(**environment: str) -> float:
        values = given | {"environment": environment | {"stage": True}}
        inputs = Inputs(Experiment.from_config(values), Path("results/e"))
        assert inputs.images_of(None, False).bytes == 0
        return inputs.images_of(None, True).bytes / 1e6

    assert 6 < megabytes(python="v") < 6.001
    assert megabytes(container="image.sif") == 9 / 1e6
    where = ["--prefix", "v", "--name", "e", "--output", "results/e/environment"]
    assert program("pack", *where, cwd=tmp_path).returncode == 0
    # Zeros take no room.
    assert 4 < megabytes(python="v") < 4.1
    (run,) = Experiment.from_config({"experiment": "test"}).runs.values()
    for size in (training_size, evaluation_size_of_program):
        usual, staged = (size(run, Images(1, 1, room)) for room in (0, 12_000_000_000))
        assert staged.scratch == 12_000
        assert staged.memory == usual.memory + 11_000


@pytest.mark.parametrize(
    ("run", "gpus", "cpus"),
    [
        ({}, 0, 32),
        ({}, 8, 4),
        ({"nproc_per_node": 3}, 8, 12),
        ({"nodes": 2, "nproc_per_node": 4}, 8, 32),
        ({"nproc_per_node": 8}, 4, 32),  # on the CPUs
        ({}, 64, 1),
        ({"nproc_per_node": 2, "cpus_per_proc": 3}, 8, 6),
    ],
)
def test_on_one_machine_a_run_has_the_cpus_of_its_gpus(run, gpus: int, cpus: int) -> None:
    usual = {"experiment": "test", "global_batch_size": 48}
    (one,) = Experiment.from_config(usual | run).runs.values()
    assert cpus_on_one_machine(one, 32, gpus) == cpus
