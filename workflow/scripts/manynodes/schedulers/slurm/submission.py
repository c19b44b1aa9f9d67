"""Slurm's part in a Snakemake command: every submission is checked before the first job."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from manynodes.base.errors import Refusal
from manynodes.base.timeouts import BEFORE_THE_END, START_UP
from manynodes.schedulers.base import TellState, jobs_to_submit, parts
from manynodes.schedulers.slurm.commands import answer, scontrol
from manynodes.schedulers.slurm.plugin import (
    FULL,
    TESTED,
    Follower,
    add_to_submissions,
    start_one_snakemake,
    submission,
    tmp_mb,
)

PLUGIN = "snakemake-executor-plugin-slurm"

# sbatch's words for jobs that it would never accept in any state of the cluster.
NEVER_ACCEPTED = re.compile(
    r"nvalid|unrecognized|not permitted|ermission denied|policy|More processors requested"
)


# What sbatch would take from the environment for every job: an array of each, one job after the
# other, a warning that does not reach the ranks.
OF_SBATCH = ("SBATCH_ARRAY_INX", "SBATCH_SIGNAL", "SBATCH_WAIT")
# Seconds of a job in which a training hardly does anything.
LEAST = BEFORE_THE_END + START_UP
# What sbatch does not leave as it is in the path of a job's log (measured): it writes the user's
# name for %u, and with a backslash not the job's number for %j.
REPLACED = re.compile(r"\\|%(?:%|\d*[AaJjNnstux])")
# Nor, in the command of an array of jobs, the plugin.
UNQUOTED = re.compile(r"[$`\"']")
# Resources that say where a job runs.
OF_THE_PLACE = ("slurm_partition", "slurm_account", "qos", "constraint", "clusters")


def follow(workflow: Any, tell_state: TellState, tell: Callable[[str], None]) -> Follower:
    """Check the submissions of a Snakemake command and follow its jobs, see `Scheduler.watch`."""
    follower = Follower(tell_state, tell)
    try:
        prepare(workflow, follower)
    except Refusal as refusal:
        raise Refusal(f"slurm: {refusal}") from None
    return follower


def prepare(workflow: Any, follower: Follower) -> None:
    settings, executor = workflow.executor_settings, workflow.scheduler._executor
    if (found := metadata.version(PLUGIN)) != TESTED:
        follower.tell(f"{PLUGIN} is version {found}; this workflow was tested with {TESTED}")
    settings.status_command, why = status_command(settings.status_command)
    if settings.status_command == "squeue":
        # With a MinJobAge below 60 s the plugin would ask sacct all the same, which does not
        # answer here, and never see the end of a job (measured).
        plugin = sys.modules[type(executor).__module__]
        plugin.is_query_tool_available = "squeue".__eq__  # type: ignore[attr-defined]
    follower.tell(why)
    if given := [name for name in OF_SBATCH if os.environ.pop(name, None) is not None]:
        follower.tell(f"{' and '.join(given)} not passed on to sbatch")
    refuse_replaced(str(executor.slurm_logdir), settings.array_jobs)
    # Slurm knows the user's account. The plugin's own guess always fails, and warns of it.
    executor._fallback_account_arg = ""
    add_to_submissions(executor)
    start_one_snakemake(executor)
    check_submissions(workflow.dag, executor, follower.tell)
    # A requeued job appends to its log; by default Slurm truncates the log, with the reason for
    # the interruption.
    os.environ.setdefault("SBATCH_OPEN_MODE", "append")
    follower.attach(executor)


def check_submissions(dag: Any, executor: Any, tell: Callable[[str], None]) -> None:
    limits = partitions()
    checked: set[tuple[str, ...]] = set()
    for job in jobs_to_submit(dag, OF_THE_PLACE):
        options = submission(executor, job)
        if options in checked:
            continue
        checked.add(options)
        limit, rules = job.resources.get("runtime"), {part.rule.name for part in parts(job)}
        if "train" in rules and isinstance(limit, int) and 60 * limit <= LEAST:
            tell(f"warning: runtime: {limit} minutes for staging and training; it stops a minute "
                 "before, and needs time to start: ask for more")  # fmt: skip
        try_submission(options, tell)
        name = options[options.index("-p") + 1] if "-p" in options else ""
        # Another cluster may have a partition of this name.
        if name not in limits or names(options, "-M", "--cluster", "SBATCH_CLUSTERS"):
            continue
        # A QOS may exceed the partition's limit; sbatch was asked.
        of_qos = {"runtime": None} if names(options, "-q", "--qos", "SBATCH_QOS") else {}
        refuse_too_large(job.resources, name, limits[name] | of_qos)


def names(options: Sequence[str], short: str, long: str, variable: str) -> bool:
    """Whether a submission gives one of sbatch's options, as a user may spell it."""
    given = any(each.startswith((short, long)) for each in options)
    return given or bool(os.environ.get(variable))


def refuse_replaced(logs: str, arrays: bool) -> None:
    """Refuse a folder of logs that jobs, or arrays of jobs, take for another one."""
    if found := REPLACED.search(logs) or (arrays and UNQUOTED.search(logs)):
        raise Refusal(f"{logs}: jobs do not find a path with {found[0]}; work in another folder")


def status_command(wanted: str | None) -> tuple[str, str]:
    """The command with which Snakemake asks for job states, and a line that explains the choice.

    Without accounting, `sacct` waits for ever; `squeue` forgets jobs that have ended.

    Args:
        wanted: `sacct` or `squeue`, as Snakemake would have it.

    Raises:
        Refusal: Slurm's controller does not answer.
    """
    config = scontrol("show", "config")
    reason = "as the profile says"
    if wanted != "squeue":
        status, _, said = answer("sacct", "-X", "--noheader", patience=20)
        if status == 0:
            return "sacct", "accounting works; job states come from sacct"
        reason = " ".join(said.split()) or f"sacct ended with status {status}"
        if status is None:
            reason = f"sacct: {reason}"
    found = re.search(r"MinJobAge\s*=\s*(\d+)", config)
    # 0: never.
    forgets = f", which forgets a job {found[1]} s after its end" if found and int(found[1]) else ""
    return "squeue", f"{reason}; job states come from squeue{forgets}"


def partitions() -> dict[str, dict[str, int | None]]:
    """The largest job that each partition can ever run, from sinfo; empty if it does not answer.

    Returns:
        For each name `nodes`, the number of its nodes in any state; `cpus_per_task`, `mem_mb`,
        `slurm_tmp` (TmpDisk, in MB) and `gres` (GPUs) of its largest node, None if some nodes are
        not shown, such as those of a cloud that are switched off; `runtime`, its time limit in
        minutes, None if it has none.
    """
    asked = ["sinfo", "--noheader", "--noconvert", "--Node", "--format=%R|%c|%m|%d|%G|%l|%N"]
    rows = [line.split("|") for line in answer(*asked)[1].splitlines()]
    shown: dict[str, list[list[str]]] = {}
    for name, *row in (row for row in rows if len(row) == 7):
        shown.setdefault(name, []).append(row)
    lines = answer("scontrol", "show", "partition", "--oneliner")[1]
    totals = dict(re.findall(r"PartitionName=(\S+).*? TotalNodes=(\d+)", lines))
    found = {}
    for name, nodes in shown.items():
        total = max(len(nodes), int(totals.get(name, 0)))
        sizes = [(*map(int, node[:3]), gpus_in(node[3])) for node in nodes]
        largest = map(max, zip(*sizes, strict=True)) if total == len(nodes) else [None] * 4
        of_node = zip(("cpus_per_task", "mem_mb", "slurm_tmp", "gres"), largest, strict=True)
        found[name] = {"nodes": total, "runtime": minutes(nodes[0][4]), **dict(of_node)}
    return found


def gpus_in(gres: str) -> int:
    """The GPUs of all types in what Slurm writes: `gpu:a100:4(S:0-1),gpu:v100:2,shard:8`."""
    return sum(map(int, re.findall(r"\bgpu(?::[^:,()]+)*:(\d+)\b", gres)))


def minutes(limit: str) -> int | None:
    """Slurm's [days-]hours:minutes:seconds in minutes; None for `infinite` and anything else."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if not found:
        return None
    days, hours, mins, _seconds = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + mins


def refuse_too_large(
    resources: Mapping[str, Any], where: str, limits: Mapping[str, int | None]
) -> None:
    """Refuse a job that a partition can never run; Slurm might leave it pending for ever.

    Args:
        where: the partition.
        limits: as in `partitions`.

    Raises:
        Refusal: naming the resource, the request and the limit.
    """
    gpus = gpus_in(str(resources.get("gres") or ""))
    of_job = {**resources, "slurm_tmp": tmp_mb(resources), "gres": gpus}
    for name, of_what, has, remedy in (
        ("runtime", "minutes", f"{where} allows",
         "stage and train are one job, their times are added: --set-resources train:runtime=…"),
        ("nodes", "nodes", f"{where} has",
         "set nodes in the configuration, or another slurm_partition"),
        ("cpus_per_task", "CPUs a node", f"the largest node of {where} has",
         "lower nproc_per_node or cpus_per_proc in the configuration"),
        ("mem_mb", "MB a node", f"the largest node of {where} has",
         "--set-resources train:mem_mb=… stage:mem_mb=…"),
        ("gres", "GPUs a node", f"the largest node of {where} has",
         "lower nproc_per_node in the configuration, or another slurm_partition"),
        ("slurm_tmp", "MB a node", f"the largest TmpDisk of {where} is",
         "ask for less, or leave slurm_tmp out of the profile"),
    ):  # fmt: skip
        asked, limit = of_job.get(name), limits[name]
        if limit is not None and isinstance(asked, int) and asked > limit:
            raise Refusal(f"{name}: {asked} {of_what} are asked for, {has} {limit}; {remedy}")


def try_submission(options: Sequence[str], tell: Callable[[str], None]) -> None:
    """Let Slurm check a submission without submitting it; Snakemake hides why a group job was
    refused. Tell a temporary objection, such as nodes out of service.

    Args:
        options: of sbatch.

    Raises:
        Refusal: the job would never be accepted.
    """
    status, _, error = answer("sbatch", "--test-only", *options, "--wrap=true")
    # What a site tells its users with every job is no objection.
    if status in (0, None) or " to start at " in error:
        return
    reason = " ".join(
        error.replace("sbatch: error:", " ").replace("sbatch:", " ").split()
    ).removeprefix("allocation failure: ")
    # It is submitted when there is room.
    if not reason or FULL.search(reason):
        return
    given = sorted(name for name in os.environ if name.startswith("SBATCH_"))
    also = f"; of this shell sbatch takes {', '.join(given)}" if given else ""
    if NEVER_ACCEPTED.search(reason):
        # Not in the refusal, which would be cut.
        tell(f"options of the job: {' '.join(options)}")
        raise Refusal(f"sbatch would refuse a job: {reason}{also}")
    tell(f"sbatch says of a job: {reason}{also}; options of the job: {' '.join(options)}")
