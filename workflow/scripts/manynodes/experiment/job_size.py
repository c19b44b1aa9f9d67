"""From a run to the size of its jobs, and from CPUs to the share of a process. Pure."""

from dataclasses import dataclass, replace

from manynodes.base.errors import Refusal
from manynodes.experiment.config import Run
from manynodes.schedulers.base import Size

# CPUs of a process if the run leaves them open. A GPU needs fewer; for a CPU node with more, set
# cpus_per_proc.
AUTO_CPUS = 4
# MB. On a CPU airbench and its data take 0.8 GB; the rest is for larger networks and batches.
# CUDA's libraries take some GB by themselves, and were not measured.
PROCESS_MB = {"cpu": 4000, "auto": 4000, "cuda": 8000}
EVALUATE_CPUS = 4


@dataclass(frozen=True)
class Images:
    """What decides the memory of a job.

    Attributes:
        height, width: of an image.
        bytes: of all that is staged, the whole data set first of all.
    """

    height: int
    width: int
    bytes: int


# Of the built-in data sets.
USUAL = Images(32, 32, 200_000_000)
# Bytes that a network keeps for each pixel of its share of a batch until the backward pass: a
# ResNet-18 on images of 224 x 224 keeps 500 to 1000.
BYTES_PER_PIXEL = 1000
# MB that PROCESS_MB has for a share's pixels, and a node for the page cache.
USUAL_MB = 1000
MOST_CACHE_MB = 16_000
# Bytes of a process for each parameter of its network: weights, gradients, DDP's buckets and the
# optimizer's two moments, on a CPU, and the state from which it resumes. The first process of a
# run also holds two states that it writes. Measured with AdamW, see
# docs/cluster.md, and a third more.
BYTES_PER_PARAMETER = 60
BYTES_PER_PARAMETER_SAVED = 30
# The same of an evaluation: the weights and the file that they are read from (14 measured).
BYTES_PER_PARAMETER_READ = 20


def beyond_usual(megabytes: float) -> int:
    """MB that the usual memory has no room for."""
    return max(0, int(megabytes) - USUAL_MB)


def training_size(
    run: Run, images: Images = USUAL, parameters: int = 0, ended: bool = False
) -> Size:
    """What `stage` and `train` ask for. Both ask for the same: they run in one job.

    A program with a data set and a global_batch_size gets memory for the pixels of its share.

    Args:
        parameters: of the network; 0 if they are not known.
        ended: its program has ended; one process takes the results. With a GPU, if the run has
            some: a queue may refuse jobs without one.
    """
    nodes, processes = (1, 1) if ended else (run.nodes, run.nproc_per_node)
    batch = run.parameters.get("global_batch_size") if run.dataset and not ended else 0
    share = batch / run.world_size if isinstance(batch, int | float) else 0
    process_mb = PROCESS_MB[run.device]
    if run.device != "cuda":  # a GPU's own memory holds them
        process_mb += beyond_usual(share * images.height * images.width * BYTES_PER_PIXEL / 1e6)
    process_mb += beyond_usual(parameters * BYTES_PER_PARAMETER / 1e6)
    node_mb = beyond_usual(parameters * BYTES_PER_PARAMETER_SAVED / 1e6)
    node_mb += cached_mb(images)
    cpus = AUTO_CPUS if run.cpus_per_proc == "auto" else int(run.cpus_per_proc)
    return Size(
        nodes=nodes,
        cpus=processes * cpus,
        gpus=processes if run.device == "cuda" else 0,
        memory=processes * process_mb + node_mb,
        launches=True,
        scratch=int(images.bytes / 1e6),
    )


def cached_mb(images: Images) -> int:
    """MB that the usual memory of a node has no room for, of what it has staged: the page cache
    keeps it, and where the scratch is in memory it is nowhere else.
    """
    return beyond_usual(min(images.bytes / 1e6, MOST_CACHE_MB))


def evaluation_size(run: Run, _images: Images = USUAL, parameters: int = 0) -> Size:
    """What `evaluate` asks for: one process on one node, which stages nothing."""
    gpus = 1 if run.device == "cuda" else 0
    memory = PROCESS_MB[run.device] + beyond_usual(parameters * BYTES_PER_PARAMETER_READ / 1e6)
    return Size(1, EVALUATE_CPUS, gpus, memory, launches=False)


def evaluation_size_of_program(run: Run, images: Images = USUAL, parameters: int = 0) -> Size:
    """The same of a program of the user's, for which all is staged again."""
    size = evaluation_size(run, images, parameters)
    scratch = int(images.bytes / 1e6)
    return replace(size, memory=size.memory + cached_mb(images), scratch=scratch)


def cpus_on_one_machine(run: Run, cores: int, gpus: int) -> int:
    """The CPUs of all processes of a run on this machine. With `auto`, all of its cores, or those
    that fall to the run's share of the machine's GPUs, so that others can use the rest.
    """
    if run.cpus_per_proc != "auto":
        return run.world_size * int(run.cpus_per_proc)
    if gpus < run.world_size:
        return cores
    return max(1, cores * run.world_size // gpus)


def cpus_per_process(wanted: int | None, processes: int, cpus: int, remedy: str) -> int:
    """The CPUs of each process: as wanted, or an even share, at least one.

    Args:
        wanted: None for an even share.
        processes: that share the CPUs.
        remedy: what to do if there are too few.

    Raises:
        Refusal: there are fewer CPUs than wanted.
    """
    share = max(1, cpus // processes)
    if wanted and wanted > share:
        raise Refusal(
            f"cpus_per_proc: {processes} processes of {wanted} CPUs need {processes * wanted}, "
            f"{cpus} are given; {remedy}"
        )
    return wanted or share
