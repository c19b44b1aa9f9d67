"""Gain of more processes: measured on this machine, modelled, and predicted for many GPUs.

Two processes of one thread are compared with one of two, and with two trainings at once of half a
batch each, which send each other nothing: in turns, as `launch.py` and `train.py` train them. The
model of `manynodes.reporting.step_model` is fitted to steps on 1, 2 and 3 processes of one thread,
and to all-reduces of several sizes. Three processes share two CPUs, which tests the model. The
figures for GPUs use published speeds, not a GPU here.
"""

import csv
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import overlap
import torch
import torch.distributed as dist
import yaml
from matplotlib.axes import Axes
from measured import Measured
from step_fits import Compute, Network, TreeNetwork, fit_compute, fit_network, step_seconds
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from training import ROOT, train

from classifier.models.classifier import Classifier, build
from manynodes.experiment.config import read_run
from manynodes.reporting.figures import PALETTE, STYLE
from manynodes.reporting.step_model import last_that_pays

CPUS = len(os.sched_getaffinity(0))
ROUNDS = 3
# Half of the images: an epoch of the default network takes some 10 s on two CPUs. The first epoch
# is a warm-up.
VALIDATION_FRACTION = 0.5
EPOCHS = 3

PROCESSES = (1, 2, 3)
BATCHES = (126, 252, 504)  # global; they divide among 1, 2 and 3 processes
# Per point an epoch of 10,000 images, after a warm-up. The others are held out, which takes longer.
POINT_FRACTION = 0.8
POINT_EPOCHS = 2
REDUCED_BYTES = (2**10, 2**14, 2**18, 2**20, 2**22, 2**24, 2**25)
REDUCES = 15  # of a size

GPUS = (8, 64, 512)
GIGABITS = (100, 400)
# Seconds per message between two nodes in NCCL's own model for its protocol LL128 (hwLat, NET, in
# its tuning.cc).
NCCL_RING_HOP, NCCL_TREE_HOP = 4.0e-6, 8.5e-6


@dataclass(frozen=True)
class Published:
    """A network whose training on one A100 is published: github.com/KellerJordan/cifar10-airbench,
    README.

    Attributes:
        batch: global, in images, as it is usual for it.
        flops_per_second: reached on one GPU.
    """

    name: str
    model: str
    widths: tuple[int, int, int]
    batch: int
    flops_per_second: float


PUBLISHED = (
    Published("airbench94", "airbench", (64, 256, 256), 1000, 0.36e15 / 3.83),
    Published("resnet18", "resnet18", (64, 256, 256), 1000, 32.3e15 / (7 * 60)),
)


def measure(data: Path, work: Path) -> Iterator[Measured]:
    yield from two_processes(data, work)
    reduces = all_reduces(work)
    network = fit_network(reduces)
    config = default_config()
    size = 4 * parameters(build(config["model"], config["widths"], 10))
    points = [
        (
            processes,
            batch,
            batch / trained(data, work, processes, 1, batch, POINT_FRACTION, POINT_EPOCHS),
        )
        for batch in BATCHES
        for processes in PROCESSES
    ]
    compute = fit_compute(points, network, size, CPUS)
    yield fitted(reduces, points, network, compute, size)
    predictions = [
        predicted(published, gigabits) for published in PUBLISHED for gigabits in GIGABITS
    ]
    yield from predictions
    with mpl.rc_context(STYLE):
        draw(points, compute, network, size, work / "scaling.svg")
    yield overlapped(work)


def default_config() -> dict[str, Any]:
    """The default experiment's keys of a run."""
    config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    return {
        key: value for key, value in config.items() if key not in ("experiment", "nodes", "dataset")
    } | {"dataset": "cifar10"}


def trained(
    data: Path, work: Path, processes: int, threads: int, batch: int, held_out: float, epochs: int
) -> float:
    """Train the default experiment's network as a run does; images per second, the median of its
    epochs but the first.
    """
    output = work / f"processes-{processes}-threads-{threads}-batch-{batch}"
    keys = {
        "epochs": epochs,
        "global_batch_size": batch,
        "validation_fraction": held_out,
        "nproc_per_node": processes,
        "device": "cpu",
    }
    train(read_run(json.dumps(default_config() | keys)), data, output, processes * threads)
    with (output / "metrics.csv").open() as file:
        _, *rates = (float(row["images_per_second"]) for row in csv.DictReader(file))
    return median(rates)


def two_processes(data: Path, work: Path) -> Iterator[Measured]:
    batch = default_config()["global_batch_size"]

    def alone(folder: str) -> float:
        """A half of the images in as many steps."""
        own = work / folder
        own.mkdir(exist_ok=True)
        return trained(data, own, 1, 1, batch // 2, (1 + VALIDATION_FRACTION) / 2, EPOCHS)

    def apart() -> float:
        with ThreadPoolExecutor(2) as both:
            return sum(both.map(alone, ("one", "other")))

    def at_once(processes: int, threads: int) -> float:
        return trained(data, work, processes, threads, batch, VALIDATION_FRACTION, EPOCHS)

    rounds = [
        {
            "two_processes_of_a_thread": at_once(2, 1),
            "one_process_of_two_threads": at_once(1, 2),
            "two_trainings_of_a_thread": apart(),
        }
        for _ in range(ROUNDS)
    ]
    details = {
        "images_per_second": {way: [round(each[way]) for each in rounds] for way in rounds[0]},
        "global_batch_size": batch,
    }
    for peer in ("one_process_of_two_threads", "two_trainings_of_a_thread"):
        yield Measured(
            "training throughput, two processes of one thread",
            peer.replace("_", " "),
            median(each["two_processes_of_a_thread"] / each[peer] for each in rounds),
            details=details,
        )


def all_reduces(work: Path) -> list[tuple[int, int, float]]:
    """All-reduces of 2 and 3 gloo processes on loopback, as (processes, bytes, seconds)."""
    found = []
    for processes in (2, 3):
        spawn(reduce_sizes, (processes, str(work)), processes)
        found += [
            (processes, size, seconds)
            for size, seconds in json.loads((work / "reduces.json").read_text())
        ]
    return found


def reduce_sizes(rank: int, processes: int, work: str) -> None:
    """One of the processes; the first writes the bytes and median seconds of each size to
    reduces.json.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Named for those who started it: a store that was used before would answer with the processes
    # of that time.
    store = FileStore(f"{work}/reduces-{os.getppid()}-{processes}.store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    found = []
    for size in REDUCED_BYTES:
        tensor = torch.ones(size // 4)
        times = []
        for _ in range(REDUCES):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - start)
            tensor.fill_(1.0)
        found.append((size, median(times)))
    if rank == 0:
        Path(work, "reduces.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def fitted(
    reduces: list[tuple[int, int, float]],
    points: list[tuple[int, int, float]],
    network: Network,
    compute: Compute,
    size: int,
) -> Measured:
    """The error of the model on the steps that it was fitted to."""
    steps = [
        {
            "processes": processes,
            "global_batch_size": batch,
            "step_ms": round(1e3 * seconds, 2),
            "model_ms": round(
                1e3 * step_seconds(processes, batch, compute, network, size, CPUS), 2
            ),
        }
        for processes, batch, seconds in points
    ]
    off = median(abs(step["model_ms"] / step["step_ms"] - 1) for step in steps)
    details = {
        "hop_us": round(1e6 * network.hop, 1),
        "gigabytes_per_second": round(network.bandwidth / 1e9, 3),
        "image_us": round(1e6 * compute.image, 1),
        "step_overhead_ms": round(1e3 * compute.step, 2),
        "gradient_bytes": size,
        "steps": steps,
        "all_reduces": [
            {"processes": p, "bytes": b, "ms": round(1e3 * s, 3)} for p, b, s in reduces
        ],
    }
    return Measured(
        "model of a step: compute / P + latency + bytes / bandwidth",
        "median relative error, 1 to 3 processes",
        off,
        None,
        None,
        details,
    )


def parameters(classifier: Classifier) -> int:
    """Number of trained parameters, which are reduced."""
    return sum(
        parameter.numel() for parameter in classifier.parameters() if parameter.requires_grad
    )


def on_gpus(published: Published, gigabits: float) -> tuple[Compute, Network, int]:
    """Its seconds per image on one A100, the network between GPUs, and its parameters."""
    classifier = build(published.model, published.widths, 10)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(
            classifier(torch.zeros(2, 32, 32, 3, dtype=torch.uint8)),
            torch.zeros(2, dtype=torch.long),
        ).backward()
    compute = Compute(counter.get_total_flops() / 2 / published.flops_per_second)
    return (
        compute,
        TreeNetwork(NCCL_RING_HOP, gigabits * 1e9 / 8, NCCL_TREE_HOP),
        parameters(classifier),
    )


def predicted(published: Published, gigabits: int) -> Measured:
    """The number of GPUs beyond which doubling gains less than 10 % at the usual global batch, and
    speed-ups.
    """
    compute, network, count = on_gpus(published, gigabits)
    details: dict[str, Any] = {
        "global_batch_size": published.batch,
        "parameters": count,
        "images_per_second_on_one": round(1 / compute.image),
        "ring_hop_us": 1e6 * NCCL_RING_HOP,
        "tree_hop_us": 1e6 * NCCL_TREE_HOP,
    }
    pays = {}
    for sent_as, size in (("fp32", 4 * count), ("bf16", 2 * count)):

        def seconds(processes: int, batch: int = published.batch, size: int = size) -> float:
            return step_seconds(processes, batch, compute, network, size)

        pays[sent_as] = last_that_pays(seconds, most=2**14)
        details[sent_as] = {
            "pays_up_to_gpus": pays[sent_as],
            "speedup_at_fixed_global_batch": {
                gpus: round(seconds(1) / seconds(gpus), 2) for gpus in GPUS
            },
            # The global batch grows with the GPUs: each keeps as many images as the single one had.
            "efficiency_at_fixed_share": {
                gpus: round(seconds(1) / seconds(gpus, published.batch * gpus), 3) for gpus in GPUS
            },
        }
    what = f"predicted, {published.name} at {gigabits} Gb/s a GPU"
    return Measured(
        what, "GPUs beyond which doubling gains less than 10 %", pays["fp32"], None, None, details
    )


def draw(
    points: list[tuple[int, int, float]], compute: Compute, network: Network, size: int, path: Path
) -> None:
    """The figure: what was measured, with the fitted model, and what the model says of GPUs."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13.5, 4.6), layout="constrained")
    draw_measured(left, points, compute, network, size)
    draw_predicted(right)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)


def draw_measured(
    axes: Axes, points: list[tuple[int, int, float]], compute: Compute, network: Network, size: int
) -> None:
    for colour, batch in zip(PALETTE, BATCHES, strict=False):
        mine = [(processes, batch / seconds) for processes, of, seconds in points if of == batch]
        axes.plot(*zip(*mine, strict=True), "o", color=colour, label=f"batch {batch}")
        rates = [
            batch / step_seconds(processes, batch, compute, network, size, CPUS)
            for processes in PROCESSES
        ]
        axes.plot(PROCESSES, rates, color=colour)
    axes.plot([], [], color="grey", label="model, fitted")
    axes.set_title(
        f"Measured: {CPUS} CPUs, a thread a process", loc="left", fontsize=11, fontweight="bold"
    )
    axes.set_xlabel("processes")
    axes.set_xticks(PROCESSES)
    axes.set_ylabel("images per second")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="lower right")


def draw_predicted(axes: Axes) -> None:
    gpus = [2**i for i in range(10)]
    for colour, published in zip(PALETTE, PUBLISHED, strict=False):
        for style, gigabits in zip(("--", "-"), GIGABITS, strict=True):
            compute, network, count = on_gpus(published, gigabits)
            seconds = {
                n: step_seconds(n, published.batch, compute, network, 4 * count) for n in gpus
            }
            axes.plot(
                gpus,
                [seconds[1] / seconds[n] for n in gpus],
                style,
                color=colour,
                label=f"{published.name}, {gigabits} Gb/s",
            )
            most = last_that_pays(seconds.__getitem__, most=gpus[-1])
            axes.plot([most], [seconds[1] / seconds[most]], "o", color=colour)
    axes.plot(gpus, gpus, ":", color="grey", label="as many times as GPUs")
    axes.plot([], [], "o", color="grey", label="twice as many gain < 10 %")
    axes.set_title(
        f"Predicted: A100s, global batch {PUBLISHED[0].batch:,}, fp32 gradients",
        loc="left",
        fontsize=11,
        fontweight="bold",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.5, 64)
    axes.set_xticks(gpus, [str(n) for n in gpus])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("GPUs")
    axes.set_ylabel("times as fast as one GPU")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)


def overlapped(work: Path) -> Measured:
    found = overlap.profiled(work)
    details = {
        "model": "resnet18_imagenet",
        "processes": overlap.PROCESSES,
        "batch_of_each": overlap.BATCH,
    } | found
    return Measured(
        "share of the all-reduce that overlaps with the backward pass",
        "its total time",
        found["ours"]["hidden"],
        None,
        None,
        details,
    )
