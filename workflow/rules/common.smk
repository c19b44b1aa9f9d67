"""In: the configuration. Out: EXPERIMENT with its checked and named runs, and what the rules share."""

import os
import shlex
import sys
from pathlib import Path

# Relative to the working directory: moving the checkout changes no rule's parameters and reruns
# nothing.
SCRIPTS = os.path.relpath(Path(workflow.basedir) / "workflow" / "scripts")
sys.path += [
    os.path.abspath(SCRIPTS),
    str(Path(workflow.basedir) / "workflow" / "rules"),
]

from ddp.base.errors import Refusal
from ddp.base.provenance import code_sha256
from ddp.data.datasets import DATASETS
from ddp.experiment import job_size
from ddp.experiment.config import Experiment
from ddp.experiment.schema import read_config, with_types
from ddp.schedulers import registry
from session import Session

# The programs run on the Python that runs Snakemake, activated or not; a conda environment still
# comes first.
os.environ.update(
    PATH=os.pathsep.join([str(Path(sys.executable).parent), os.getenv("PATH", "")])
)

try:
    for configfile in workflow.configfiles:
        read_config(Path(configfile))
    EXPERIMENT = Experiment.from_config(with_types(config))
    SESSION = Session(workflow, EXPERIMENT, SCRIPTS)
    SESSION.check_command_line()
except Refusal as refusal:
    sys.exit(str(refusal))


# A site's own settings are resources, not parameters: if they change, nothing is trained again.
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
    """How `launch` reaches the nodes. In a profile, a second profile would override it."""
    # A dry run does not know which scheduler will run the job; with `auto` the command finds out.
    # The Snakemake inside a job may have any executor, so there the environment decides.
    executor = workflow.executor_plugin.name
    if executor == "dryrun":
        return "auto"
    if workflow.remote_exec:
        return registry.active(os.environ).transport
    return getattr(registry.of_executor(executor), "transport", registry.LOCAL)


def sized_by(size):
    """A job's resources, from a function of its run."""

    def resource(name):
        return lambda wildcards: registry.resources(size(run_of(wildcards)))[name]

    example = next(iter(EXPERIMENT.runs.values()))
    return {name: resource(name) for name in registry.resources(size(example))}


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
    """A run's geometry as options of `launch`, which passes it on to the program."""
    run = run_of(wildcards)
    cpus = (
        "" if run.cpus_per_proc == "auto" else f" --cpus-per-proc {run.cpus_per_proc}"
    )
    return f"--nodes {run.nodes} --nproc-per-node {run.nproc_per_node}{cpus} --device {run.device}"


def cpus_of(wildcards):
    """The CPUs of a run's processes on this machine."""
    cores = workflow.resource_settings.cores or 1
    return job_size.cpus_on_one_machine(run_of(wildcards), cores)


wildcard_constraints:
    experiment=EXPERIMENT.name,
    run=EXPERIMENT.name_pattern,
    dataset="|".join(DATASETS),
