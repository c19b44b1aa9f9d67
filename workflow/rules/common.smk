"""In: the configuration. Out: EXPERIMENT, its runs checked and named, and the few helpers that the rules share."""

import os
import shlex
import shutil
import sys
from pathlib import Path

# As seen from the working directory, so that moving the checkout changes no rule's parameters and reruns nothing.
SCRIPTS = os.path.relpath(Path(workflow.basedir) / "workflow" / "scripts")
sys.path.insert(0, os.path.abspath(SCRIPTS))

from ddp import session
from ddp.config import Experiment
from ddp.errors import Refusal
from ddp.job_size import EVALUATE_CPUS, evaluation_size, training_size
from ddp.provenance import code_sha256
from ddp.schema import read_config, with_types

# The programs run on the Python that runs Snakemake, activated or not; a conda environment still goes before it.
os.environ.update(
    PATH=os.pathsep.join([str(Path(sys.executable).parent), os.getenv("PATH", "")])
)

try:
    for configfile in workflow.configfiles:
        read_config(Path(configfile))
    EXPERIMENT = Experiment.from_config(with_types(config))
    SESSION = session.Session(workflow, EXPERIMENT)
    SESSION.check_command_line()
except Refusal as refusal:
    sys.exit(str(refusal))


# How this site gets its data, where it stages them, what starts its ranks and how often they save. The rules take these as resources,
# which are what a site has: as parameters, a change would retrain what it cannot change.
SCRATCH = shlex.join(EXPERIMENT.config["scratch"])
LAUNCHER = EXPERIMENT.config["launcher"]
RESUME = {
    "exact": "",
    "other_world_size": " --other-world-size",
    "fresh": " --fresh",
}
SAVING = (
    f"--save-every-epochs {EXPERIMENT.config['save_every_epochs']}"
    f" --save-every-seconds {EXPERIMENT.config['save_every_seconds']}"
    f"{RESUME[EXPERIMENT.config['resume']]}"
)
ORIGIN = shlex.join(
    f"--{key}={value}"
    for key, value in EXPERIMENT.config["dataset"].items()
    if key != "name" and value is not None
)


def transport(wildcards):
    """How `launch` reaches the nodes: as Snakemake does. Not a profile's affair, where a second profile would override it unseen."""
    # A job's rule is run by a Snakemake of its own, whose executor may be any; a dry run does not know what it stands for, and
    # the command that it shows finds out where it is run.
    if workflow.remote_exec and os.getenv("SLURM_JOB_ID"):
        return "srun"
    return {"slurm": "srun", "dryrun": "auto"}.get(
        workflow.executor_plugin.name, "local"
    )


def sized_by(size):
    """A job's resources, from a function of its run."""

    def resource(name):
        return lambda wildcards: size(run_of(wildcards))[name]

    return {name: resource(name) for name in size(next(iter(EXPERIMENT.runs.values())))}


onstart:
    try:
        SESSION.start()
    except Refusal as refusal:
        sys.exit(str(refusal))


onsuccess:
    SESSION.end()


onerror:
    SESSION.end()


def run_of(wildcards):
    """The run of a folder name."""
    return EXPERIMENT.runs[wildcards.run]


def data_of(wildcards):
    """The manifest of a run's data set."""
    return f"results/data/{run_of(wildcards).dataset}/manifest.json"


def geometry_of(wildcards):
    """A run's geometry as options of `launch`."""
    run = run_of(wildcards)
    cpus = (
        "" if run.cpus_per_proc == "auto" else f" --cpus-per-proc {run.cpus_per_proc}"
    )
    return f"--nodes {run.nodes} --nproc-per-node {run.nproc_per_node}{cpus} --device {run.device}"


def cpus_of(wildcards):
    """The CPUs of a run's processes on this machine; all there are for `auto`."""
    run = run_of(wildcards)
    if run.cpus_per_proc == "auto":
        return workflow.resource_settings.cores or 1
    return run.world_size * run.cpus_per_proc


wildcard_constraints:
    experiment=EXPERIMENT.name,
    run=EXPERIMENT.name_pattern,
    dataset="cifar10|cifar100|digits",
