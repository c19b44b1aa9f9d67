"""From a run to the size of its jobs, and from CPUs to the share of a process. Pure."""

from ddp.base.errors import Refusal
from ddp.experiment.config import Run
from ddp.schedulers.base import Size

# CPUs of a process if the run leaves them open. A GPU needs fewer; for a CPU node with more, set
# cpus_per_proc.
AUTO_CPUS = 4
# MB. On a CPU airbench and its data take 0.8 GB; the rest is for larger networks and batches.
# CUDA's libraries take some GB by themselves, and were not measured.
PROCESS_MB = {"cpu": 4000, "auto": 4000, "cuda": 8000}
EVALUATE_CPUS = 4


def training_size(run: Run) -> Size:
    """What `stage` and `train` ask for. Both ask for the same: they run in one job."""
    cpus = AUTO_CPUS if run.cpus_per_proc == "auto" else int(run.cpus_per_proc)
    return Size(
        nodes=run.nodes,
        cpus=run.nproc_per_node * cpus,
        gpus=run.nproc_per_node if run.device == "cuda" else 0,
        memory=run.nproc_per_node * PROCESS_MB[run.device],
        launches=True,
    )


def evaluation_size(run: Run) -> Size:
    """What `evaluate` asks for: one process on one node."""
    gpus = 1 if run.device == "cuda" else 0
    return Size(1, EVALUATE_CPUS, gpus, PROCESS_MB[run.device], launches=False)


def cpus_on_one_machine(run: Run, cores: int) -> int:
    """The CPUs of all processes of a run on this machine; all of its cores for `auto`."""
    return cores if run.cpus_per_proc == "auto" else run.world_size * int(run.cpus_per_proc)


def cpus_per_process(wanted: int | None, processes: int, cpus: int, remedy: str) -> int:
    """The CPUs of each process: as wanted, or an even share, at least one.

    Args:
        wanted: None for an even share.
        processes: that share the CPUs.
        remedy: how to get more CPUs.

    Raises:
        Refusal: there are fewer CPUs than wanted.
    """
    share = max(1, cpus // processes)
    if wanted and wanted > share:
        raise Refusal(
            f"cpus_per_proc: {processes} processes of {wanted} CPUs need {processes * wanted}, "
            f"{cpus} are given; use auto, or {remedy}"
        )
    return wanted or share
