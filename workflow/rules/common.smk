"""In: the configuration. Out: EXPERIMENT with its checked and named runs, and what the rules share."""

import json
import os
import shlex
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

# Relative to the working directory: moving the checkout changes no rule's parameters and reruns
# nothing.
SCRIPTS = os.path.relpath(Path(workflow.basedir) / "workflow" / "scripts")
# First: a file manynodes.py of the user's beside the Snakefile must not be taken for ours.
sys.path[:0] = [
    os.path.abspath(SCRIPTS),
    str(Path(workflow.basedir) / "workflow" / "rules"),
]

from manynodes.base.environment import forget_contract, forget_others
from manynodes.base.errors import Refusal, error_line
from manynodes.base.provenance import code_sha256
from manynodes.experiment import job_size
from manynodes.experiment.command import EMPTY
from manynodes.experiment.config import Experiment
from manynodes.experiment.file import read_config
from manynodes.experiment.missing import initial_of
from manynodes.launching.gpus import gpus_here, gpus_to_share
from manynodes.programs.folders import Folders
from classifier.models.names import code_of
from manynodes.reporting.results import shortened
from manynodes.schedulers import registry
from session import configuration
from session.command import Session
from session.configuration import folder_of, words_of_job
from patches import (
    call_when_planned,
    cancel_once,
    end_in_a_thread,
    leave_names_alone,
    leave_the_locks_of_others,
    look_behind_ancient_files,
    quote_for_shells,
)

end_in_a_thread()
cancel_once()
look_behind_ancient_files()
leave_the_locks_of_others()
quote_for_shells()
leave_names_alone(workflow.resource_settings)
forget_others(os.environ)
forget_contract(os.environ)
os.environ.pop("LAUNCH_STOP_AT", None)
registry.forget_query_settings(os.environ)
# The programs run on the Python that runs Snakemake, activated or not; a conda environment still
# comes first.
os.environ.update(
    PATH=os.pathsep.join([str(Path(sys.executable).parent), os.getenv("PATH", "")])
)

# The Snakemake inside a job reads its own rules and runs only. The target is RULE:experiment=X,run=Y.
RULES_OF_JOB = words_of_job(workflow, "--allowed-rules")
RUNS_OF_JOB = {
    target.partition(",run=")[2] for target in words_of_job(workflow, "--target-jobs")
}


def reads(rule):
    """Whether this command needs a rule."""
    return rule in RULES_OF_JOB or not RULES_OF_JOB


try:
    for configfile in workflow.configfiles:
        read_config(Path(configfile))
    FOLDERS = [folder_of(Path(each)) for each in reversed(workflow.configfiles)]
    EXPERIMENT = Experiment.from_files(config, FOLDERS, RUNS_OF_JOB).with_site(
        *configuration.of_site(workflow)
    )
    EXPERIMENT = configuration.as_submitted(workflow, EXPERIMENT)
    SESSION = Session(workflow, EXPERIMENT, SCRIPTS)
    SESSION.check_command_line()
    if not EXPERIMENT.built_in:
        # Of files that may be gone when a job begins.
        _ = (
            EXPERIMENT.sources_sha256,
            EXPERIMENT.code_sha256,
            EXPERIMENT.evaluation_sha256,
        )
except Refusal as refusal:
    sys.exit(str(refusal))
except OSError as error:
    sys.exit(f"config: {error_line(error)}")


def check_results():
    try:
        SESSION.check_results()
    except (Refusal, OSError) as error:
        sys.exit(error_line(error))


call_when_planned(check_results)


# A site's own settings are resources, not parameters: if they change, nothing is trained again.
SCRATCH = shlex.join(EXPERIMENT.config["scratch"])
# One training at a time: the next one would use the same hosts, or change the speed that this one is
# compared by. Here, because it looks at every run.
ALONE = bool(EXPERIMENT.hosts) or EXPERIMENT.varies_in_size
HOSTS = f" --hosts {shlex.join(EXPERIMENT.hosts)}" if EXPERIMENT.hosts else ""


def manifest_and_option(option, folder, is_given):
    """The manifest of something that every run reads, and the option of the programs for it."""
    path = f"results/{EXPERIMENT.name}/{folder}"
    return ([f"{path}/manifest.json"], f" {option} {path}") if is_given else ([], "")


FILES, FILES_OPTION = manifest_and_option(
    "--files", "files", EXPERIMENT.config["files"]
)
# The environment, if it is to be staged.
PACKED, PACKED_OPTION = manifest_and_option(
    "--packed", "environment", EXPERIMENT.environment.stage
)
# The Python that runs Snakemake is then that of all processes on the nodes, another one that of the
# program.
PACKED_OF_PROGRAM, STAGED_PYTHON = PACKED_OPTION, ""
if PACKED and EXPERIMENT.environment.is_ours:
    STAGED_PYTHON = PACKED_OPTION.replace("--packed", "--staged-python", 1)
    STAGED_PYTHON += f" --scratch {SCRATCH}"
    PACKED_OF_PROGRAM = ""
# Whether the workflow's own torch does not decide which GPUs are used.
OTHER_TORCH = EXPERIMENT.other_torch


def transport(wildcards):
    """How `launch` reaches the nodes. In a profile, a second profile would override it."""
    # A dry run does not know which scheduler will run the job; with `auto` the command finds out.
    # The Snakemake inside a job may have any executor, so there the environment decides.
    executor = workflow.executor_plugin.name
    if EXPERIMENT.hosts:
        return registry.on_hosts(EXPERIMENT.hosts).transport
    if executor == "dryrun":
        return "auto"
    if workflow.remote_exec:
        return registry.active(os.environ).transport
    return getattr(registry.of_executor(executor), "transport", registry.LOCAL)


def share_gpus():
    """Let Snakemake start nothing that would hold CPUs while it waits for a GPU."""
    with suppress(Refusal):  # without an answer of their driver, the runs fail later
        if transport(None) == registry.LOCAL and (gpus := gpus_here(OTHER_TORCH)):
            workflow.register_resource("gpus_here", len(gpus))


call_when_planned(share_gpus)


# Runs whose program has ended before: their jobs only take its results, see `launch.check_again`.
ENDED = set()


def note_ended():
    """Let these jobs ask for one process. Not in a job, which has what it has."""
    if workflow.is_main_process and EXPERIMENT.config["resume"] == "exact":
        names = [job.wildcards.run for job in SESSION.planned("train")]
        ENDED.update(
            name
            for name in names
            if Folders(Path("results", EXPERIMENT.name, name)).has_ended
        )


call_when_planned(note_ended)


def gpus_of(run, processes, for_auto):
    """How many GPUs of this machine processes of a run share with others; 0 if they compute on
    CPUs, or on a cluster.
    """
    with suppress(Refusal):  # as above, or there are too few
        if transport(None) in (registry.LOCAL, "auto"):
            return len(gpus_to_share(run.device, processes, for_auto, OTHER_TORCH))
    return 0


def gpus_of_training(run):
    """The same of all processes of a run."""
    return gpus_of(run, run.world_size, EXPERIMENT.gpus_for_auto)


def gpus_to_train(wildcards):
    """How many of them the run has while it trains."""
    run = run_of(wildcards)
    needs_none = wildcards.run in ENDED or not gpus_of_training(run)
    return 0 if needs_none else run.world_size


def gpus_to_evaluate(wildcards):
    """How many of them the run has while it is evaluated."""
    return min(gpus_of(run_of(wildcards), 1, 0), 1)


def sized_by(size, ended=frozenset(), environment=True):
    """A job's resources, from a function of its run, some of which have ended.

    Args:
        environment: a staged environment is staged for it.
    """

    def size_of(wildcards):
        run = run_of(wildcards)
        # A job has its memory and disk already.
        if not workflow.is_main_process:
            return size(run)
        return size(
            run,
            SESSION.inputs.images_of(run.dataset, environment),
            SESSION.inputs.parameters_of(run),
            **({"ended": True} if wildcards.run in ended else {}),
        )

    def resource(name):
        return lambda wildcards: registry.resources(size_of(wildcards))[name]

    example = next(iter(EXPERIMENT.runs.values()))
    return {
        name: resource(name)
        for name in registry.resources(size(example, job_size.USUAL))
    }


# Resources of each rule in the job of a training.
IN_JOB = {
    **sized_by(job_size.training_size, ENDED),
    "transport": transport,
    "hosts": HOSTS,
    "scratch": SCRATCH,
}
# Resources of a rule that trains.
TRAINING = {
    **IN_JOB,
    "runtime": 120,
    # Together, as another text of a rule's command would be another command for finished runs.
    "launcher": EXPERIMENT.config["launcher"]
    + STAGED_PYTHON
    + " --other-torch" * OTHER_TORCH,
    "gpus_for_auto": EXPERIMENT.gpus_for_auto,
    "timeout": EXPERIMENT.config["timeout"],
    # Not `gpus`, for which Snakemake's plugin asks Slurm.
    "gpus_here": gpus_to_train,
}
# The command that starts the ranks, without its own program.
LAUNCH = (
    "python {params.launch:q}"
    " --transport {resources.transport}{resources.hosts}"
    " --launcher {resources.launcher}"
    " {params.geometry}"
    " --gpus-for-auto {resources.gpus_for_auto}"
    " --cpus {threads}"
    " --cpus-per-node {resources.cpus_per_task}"
    " --end-with $PPID"
    " --restart"
    " --timeout {resources.timeout}"
)


onstart:
    try:
        SESSION.start()
    except (Refusal, OSError) as error:
        sys.exit(error_line(error))


onsuccess:
    SESSION.end()


onerror:
    SESSION.end()


def run_of(wildcards):
    """The run of a folder name."""
    if wildcards.run not in EXPERIMENT.runs:
        # A target of a run that the experiment does not have.
        names = shortened(list(EXPERIMENT.runs))
        sys.exit(f"{EXPERIMENT.name} has no run {wildcards.run}; its runs are {names}")
    return EXPERIMENT.runs[wildcards.run]


def data_of(wildcards):
    """The manifest of a run's data set."""
    return f"results/data/{run_of(wildcards).dataset}/manifest.json"


def initial_of_run(wildcards):
    """The weights from which a run starts, see `initial_of`."""
    folder = Path("results", wildcards.experiment, wildcards.run)
    return initial_of(run_of(wildcards), folder) or []


def trust_of(wildcards):
    """The option of `evaluate` for the code of a run's own network; empty for other networks."""
    code = code_of(run_of(wildcards).model)
    return f" --trust-code {code}" if code else ""


def fold_of(wildcards):
    """The option of `evaluate` for the fold that a run is tested on; empty without folds."""
    run = run_of(wildcards)
    return f" --fold {run.fold} {run.folds} {run.validation_seed}" if run.folds else ""


def sources_of(wildcards):
    """The manifests of what the program reads."""
    return ([data_of(wildcards)] if run_of(wildcards).dataset else []) + FILES


def places_of(wildcards):
    """The same as options of the programs."""
    data = run_of(wildcards).dataset
    return (f" --data results/data/{data}" if data else "") + FILES_OPTION


def geometry_options(wildcards):
    """A run's geometry as options of `launch`, which passes it on to the program."""
    run = run_of(wildcards)
    cpus = (
        "" if run.cpus_per_proc == "auto" else f" --cpus-per-proc {run.cpus_per_proc}"
    )
    return f"--nodes {run.nodes} --nproc-per-node {run.nproc_per_node}{cpus} --device {run.device}"


def code_of_program(name):
    """SHA-256 of the code of a program of the workflow; not in a job, which records no parameters
    and would spend half of its own CPU time on it."""
    return code_sha256(name) if workflow.is_main_process else ""


def cpus_of(wildcards):
    """The CPUs of a run's processes on this machine; all of its CPUs if it must run alone."""
    cores = workflow.resource_settings.cores or 1
    run = run_of(wildcards)
    if ALONE:
        return cores
    return job_size.cpus_on_one_machine(run, cores, gpus_of_training(run))


wildcard_constraints:
    experiment=EXPERIMENT.name,
    run="[^/]+",
    dataset="|".join(EXPERIMENT.datasets) or "none",
