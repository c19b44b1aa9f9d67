"""Options, hosts and folders that do not fit this workflow. Each raises a `Refusal` if so."""

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from manynodes.base.cpus import usable_cpus
from manynodes.base.errors import Refusal
from manynodes.experiment.config import Experiment
from manynodes.experiment.job_size import cpus_per_process
from manynodes.reporting.results import shortened
from manynodes.schedulers import registry

# Resources that follow from the key `nodes`.
OF_NODES = ("nodes", "tasks")
# Processes per CPU of this machine. With more, each gets a few percent of a CPU.
MOST_PER_CPU = 8
# Executors that start no job.
NO_JOBS = ("dryrun", "touch")


def refuse_options(workflow: Any, experiment: Experiment) -> None:
    """Refuse what is known when the command is read."""
    refuse_other_geometry(workflow, experiment)
    refuse_software_deployment(workflow)
    refuse_storage(workflow)
    refuse_wrong_hosts(workflow, experiment)
    refuse_crowd(workflow, experiment)


def refuse_files_for_folders(results: Path) -> None:
    for folder in written_to(results):
        if os.path.lexists(folder) and not folder.is_dir():
            raise Refusal(f"{folder} is not a folder; move it away")


def refuse_read_only_folders(results: Path, fetches: bool) -> None:
    *folders, data = written_to(results)
    # Data that are there may be shared, and read-only.
    for folder in (*folders, data) if fetches else folders:
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            raise Refusal(
                f"{folder} cannot be written to; change its mode, or run in another folder"
            )


def refuse_read_only_place(locks: Path, dry: bool) -> None:
    """Refuse a working folder in which Snakemake cannot make its own files, such as another user's.

    Args:
        locks: Snakemake's folder of locks, in its own folder.
        dry: nothing will run; Snakemake makes the folders that are missing all the same.
    """
    if dry and locks.exists():
        return
    own = locks.parent
    for folder in (own, locks) if own.exists() else (own.parent,):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            raise Refusal(
                f"{folder if own.exists() else 'the working folder'} cannot be written to; run in "
                "a folder of your own: --directory FOLDER"
            )


def written_to(results: Path) -> list[Path]:
    """The folders in which it makes files and folders."""
    return [results.parent, results, results.parent / "data"]


def refuse_other_geometry(workflow: Any, experiment: Experiment) -> None:
    for rule in ("stage", "train"):
        for resource in OF_NODES:
            value = set_resource(workflow, rule, resource)
            for run in experiment.runs.values():
                if value not in (None, str(run.nodes)):
                    raise Refusal(
                        f"--set-resources {rule}:{resource}={value}: the run has nodes: "
                        f"{run.nodes}; change nodes in the configuration instead"
                    )


def set_resource(workflow: Any, rule: str, name: str) -> str | None:
    """The value that the command gives to a resource of a rule; None if it gives none."""
    given = workflow.resource_settings.overwrite_resources.get(rule, {}).get(name)
    # Snakemake has an object for each resource of a rule for which the command gives any.
    value = getattr(given, "raw", given)
    return None if value is None else str(value)


def refuse_wrong_hosts(workflow: Any, experiment: Experiment) -> None:
    """Refuse hosts that no rule would use, and a profile that needs hosts but has none."""
    by_ssh = "ssh" in (set_resource(workflow, "train", "transport") or "")
    if by_ssh and not experiment.hosts:
        registry.on_hosts([]).allocation(1)
    # A cluster's profile gives jobs, this machine's cores.
    if experiment.hosts and workflow.resource_settings.nodes and not by_ssh:
        raise Refusal(
            "config: hosts: a scheduler's jobs have nodes of their own; leave hosts out, or "
            "use profiles/ssh"
        )
    if experiment.hosts:
        # Reads and checks their names.
        registry.on_hosts(experiment.hosts)


def refuse_few_hosts(experiment: Experiment, names: Iterable[str]) -> None:
    """Refuse runs that want more hosts than there are."""
    if not experiment.hosts:
        return
    hosts = registry.on_hosts(experiment.hosts).hosts
    wanted = max((experiment.runs[name].nodes for name in names), default=0)
    if len(hosts) < wanted:
        raise Refusal(
            f"config: nodes: a run wants {wanted}, hosts has {len(hosts)}: "
            f"{shortened(hosts)}; name more hosts, or lower nodes"
        )


def refuse_software_deployment(workflow: Any) -> None:
    methods = {method.name for method in workflow.deployment_settings.deployment_method}
    if "APPTAINER" in methods:
        raise Refusal(
            "--sdm apptainer: no container is defined here; run Snakemake inside yours instead "
            "(docs/environments.md)"
        )
    if "CONDA" in methods and not shutil.which("conda"):
        raise Refusal(
            "--sdm conda: there is no conda on PATH; leave the option out, the environment of "
            "`make` is used"
        )


def refuse_storage(workflow: Any) -> None:
    """Refuse results elsewhere than in files: runs resume from what lies beside them."""
    if provider := workflow.storage_settings.default_storage_provider:
        raise Refusal(
            f"--default-storage-provider {provider}: runs resume from files beside their "
            "results; leave the option out, and copy the results when they are finished"
        )


def refuse_unknown_executor(experiment: Experiment, executor: str) -> None:
    """Refuse an executor whose jobs have nodes that `launch` cannot reach: all of them would
    be started on one machine.
    """
    several = any(run.nodes > 1 for run in experiment.runs.values())
    known = registry.of_executor(executor) or executor in NO_JOBS or experiment.hosts
    if several and not known:
        executors = {s.executor for s in registry.SCHEDULERS.values() if not s.takes_hosts}
        raise Refusal(
            f"--executor {executor}: the nodes of its jobs are not known here; use one of "
            f"{', '.join(sorted(executors))}, or in a job profiles/ssh with a host file (hosts)"
        )


def refuse_crowd(workflow: Any, experiment: Experiment) -> None:
    """Refuse more processes than this machine can run; a cluster's scheduler knows its own
    nodes.
    """
    # Before the first job, and in a dry run, only this distinguishes the profiles.
    if workflow.resource_settings.nodes:
        return
    cpus = usable_cpus()
    for run in experiment.runs.values():
        if run.world_size > MOST_PER_CPU * cpus and not experiment.hosts:
            raise Refusal(
                f"config: nproc_per_node: {run.world_size} processes ({run.nodes} x "
                f"{run.nproc_per_node}) on this machine's {cpus} "
                f"CPUs; use at most {MOST_PER_CPU * cpus}, or a cluster's profile"
            )


def refuse_few_cpus(workflow: Any, experiment: Experiment, names: Iterable[str]) -> None:
    """Refuse runs on this machine whose processes want more CPUs than --cores gives them."""
    settings = workflow.resource_settings
    # As in `refuse_crowd`. Without --cores nothing starts.
    if settings.nodes or experiment.hosts or workflow.touch or not settings.cores:
        return
    for run in (experiment.runs[name] for name in names):
        if run.cpus_per_proc != "auto":
            wanted = int(run.cpus_per_proc)
            remedy = "use auto, or more --cores"
            cpus_per_process(wanted, run.world_size, settings.cores, remedy)


def refuse_unquoted(interpreter: str) -> None:
    """Refuse a Python that a job's shell would not find: Snakemake writes its path unquoted."""
    if not re.fullmatch(r"[\w@+=:,./~-]+", interpreter):
        raise Refusal(
            f"{interpreter}: Snakemake's jobs cannot start a Python in a path with blanks, quotes "
            "or %; make the environment in a folder without them"
        )
