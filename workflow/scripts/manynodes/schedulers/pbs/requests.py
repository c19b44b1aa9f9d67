"""From a job's Snakemake resources to options of qsub. Pure."""

import shlex
from collections.abc import Mapping
from typing import Any

from manynodes.base.errors import Refusal
from manynodes.schedulers.base import SPARE_MB

FORMS = ("select", "totals")


def options(resources: Mapping[str, Any], form: str) -> list[str]:
    """The qsub options for a job's size and its site's settings.

    Args:
        resources: nodes, cpus_per_task, mem_mb, ngpus, disk_mb (of each node), runtime (minutes),
            and of the site pbs_queue, pbs_project, jobfs, storage, pbs_place, pbs_extra.
        form: `select` asks for chunks of one node each, `totals` for sums over all nodes.

    Raises:
        Refusal: the form is unknown, or a value has a form that qsub would take for something else.
    """
    if form not in FORMS:
        raise Refusal(f"pbs-request: {form}; use select or totals")
    for name in ("pbs_queue", "pbs_project", "jobfs", "storage", "pbs_place"):
        if set(str(resources.get(name) or "")) & set(" \t\n,'\""):
            raise Refusal(f"{name}: {resources[name]} has a blank, comma or quotation mark")
    nodes, cpus = whole("nodes", resources) or 1, whole("cpus_per_task", resources) or 1
    memory, gpus = whole("mem_mb", resources), whole("ngpus", resources)
    jobfs, place = (str(resources.get(name) or "") for name in ("jobfs", "pbs_place"))
    if jobfs == "auto":
        sum_of = nodes if form == "totals" else 1
        jobfs = f"{sum_of * (whole('disk_mb', resources) + SPARE_MB)}mb"
    if form == "totals":
        size = totals(nodes, cpus, memory, gpus, jobfs)
    else:
        size = select(nodes, cpus, memory, gpus, jobfs, place)
    found = [option for request in size for option in ("-l", request)]
    if minutes := whole("runtime", resources):
        found += ["-l", f"walltime={minutes // 60:02}:{minutes % 60:02}:00"]
    if resources.get("storage"):
        found += ["-l", f"storage={resources['storage']}"]
    if resources.get("pbs_queue"):
        found += ["-q", str(resources["pbs_queue"])]
    if resources.get("pbs_project"):
        found += ["-P", str(resources["pbs_project"])]
    extra = str(resources.get("pbs_extra") or "")
    try:
        words = shlex.split(extra)
    except ValueError as error:
        raise Refusal(f"pbs_extra: {extra}: {error}") from None
    if any(word.startswith("-N") for word in words):
        # With another name, a job whose qsub was not answered would be submitted twice.
        raise Refusal("pbs_extra: -N: a job is found by a name of its own; leave it out")
    return found + words


def whole(name: str, resources: Mapping[str, Any]) -> int:
    try:
        return int(resources.get(name) or 0)
    except (ValueError, TypeError):
        raise Refusal(f"{name}: {resources[name]} is not a whole number") from None


def select(nodes: int, cpus: int, memory: int, gpus: int, jobfs: str, place: str) -> list[str]:
    """OpenPBS's and PBS Professional's form: so many chunks, each on a node of its own."""
    chunk = f"select={nodes}:ncpus={cpus}:mpiprocs=1:ompthreads={cpus}"
    chunk += f":mem={memory}mb" if memory else ""
    chunk += f":ngpus={gpus}" if gpus else ""
    chunk += f":jobfs={jobfs}" if jobfs else ""
    place = place or ("scatter" if nodes > 1 else "")
    return [chunk, f"place={place}"] if place else [chunk]


def totals(nodes: int, cpus: int, memory: int, gpus: int, jobfs: str) -> list[str]:
    """Gadi's form: sums over all nodes; PBS finds the nodes."""
    found = [f"ncpus={nodes * cpus}"]
    found += [f"mem={nodes * memory}mb"] if memory else []
    found += [f"ngpus={nodes * gpus}"] if gpus else []
    return found + ([f"jobfs={jobfs}"] if jobfs else [])
