"""From a run to what its jobs ask of a scheduler. Pure; the names are those of Snakemake's Slurm executor.

Source: https://snakemake.github.io/snakemake-plugin-catalog/plugins/executor/slurm.html
"""

from ddp.config import Run

# CPUs of a process where the run leaves it open: a GPU is fed by fewer, and a CPU node that has more is asked for by name.
AUTO_CPUS = 4
# On a CPU airbench and its data were measured at 0.8 GB; the rest is for larger networks and batches. CUDA's libraries take some GB
# by themselves, and were not measured.
PROCESS_MB = {"cpu": 4000, "auto": 4000, "cuda": 8000}
EVALUATE_CPUS = 4


def training_size(run: Run) -> dict[str, int | str]:
    """What `stage` and `train` ask for: as both ask for the same, Snakemake makes them one job.

    Returns:
        nodes: nodes of the job, one task each.
        tasks: as many.
        mpi: `srun` on several nodes, which has Snakemake run the rule in the batch step rather than inside a step of one node; empty
            on one node, where the plugin refuses a name but the key has the same effect.
        cpus_per_task: CPUs per node, since a task is a node.
        gres: GPUs per node, one per process, if the run's device is `cuda`; empty otherwise.
        tasks_per_gpu: 0, or the plugin would ask for tasks per GPU.
        mem_mb: MB per node.
    """
    cpus = AUTO_CPUS if run.cpus_per_proc == "auto" else int(run.cpus_per_proc)
    return {
        "nodes": run.nodes,
        "tasks": run.nodes,
        "mpi": "srun" if run.nodes > 1 else "",
        "cpus_per_task": run.nproc_per_node * cpus,
        "gres": gres(run, run.nproc_per_node),
        "tasks_per_gpu": 0,
        "mem_mb": run.nproc_per_node * PROCESS_MB[run.device],
    }


def evaluation_size(run: Run) -> dict[str, int | str]:
    """What `evaluate` asks for: one process on one node."""
    return {
        "nodes": 1,
        "tasks": 1,
        "cpus_per_task": EVALUATE_CPUS,
        "gres": gres(run, 1),
        "tasks_per_gpu": 0,
        "mem_mb": PROCESS_MB[run.device],
    }


def gres(run: Run, gpus: int) -> str:
    return f"gpu:{gpus}" if run.device == "cuda" else ""
