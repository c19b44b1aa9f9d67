"""Train one run with DistributedDataParallel, on as many processes as the launcher started.

Knows RANK, LOCAL_RANK and WORLD_SIZE and nothing of schedulers. Writes into --output: model.safetensors, history.csv (a row
per epoch), checkpoints/epoch=NNN.safetensors for the epochs to keep, and run.json (how all of it came about).
"""

import argparse
import csv
import json
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from ddp import atomic, batches, models
from ddp.config import Run
from ddp.data_folder import load_split, read_manifest
from ddp.errors import Refusal, told_in_one_line
from ddp.process_group import Process, all_reduce, everyone_is_here, gather, process_group, report
from ddp.provenance import code_sha256, git_state, versions
from ddp.staging import Staged, discard, stage

HISTORY = ("epoch", "step", "lr", "train_loss", "train_accuracy", "val_loss", "val_accuracy", "images_per_second", "seconds")
VALIDATION_BATCH = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="the run as a JSON object, keys as in config/README.md")
    parser.add_argument("--data", type=Path, required=True, help="the shared data folder, with its manifest")
    parser.add_argument("--scratch", nargs="*", default=[], help="node-local folders to stage in; $NAME is looked up here")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results of this run")
    args = parser.parse_args()
    with told_in_one_line("train"):
        run = Run.from_json(args.run)
        with process_group(run.device) as process:
            train(run, process, args.data, args.scratch, args.output)


def train(run: Run, process: Process, data: Path, scratch: list[str], output: Path) -> None:
    """Train `run` as one of its processes; rank 0 writes the results."""
    started = datetime.now(UTC)
    if process.world_size != run.world_size:
        raise Refusal(f"{process.world_size} processes were started, the run is for {run.world_size}")
    manifest = read_manifest(data)
    if process.first:
        # What an earlier run with more epochs left there would be taken for ours.
        shutil.rmtree(output / "checkpoints", ignore_errors=True)
        (output / "checkpoints").mkdir(parents=True)
    staged = stage(data, scratch)
    if staged.status == "fallback" and process.local_rank == 0:
        print(staged)

    # Everything the training needs is in memory before the first step, on the device it is used on.
    images, labels = (torch.tensor(array, device=process.device) for array in load_split(Path(staged.path), "train"))
    everyone_is_here()
    if process.local_rank == 0:
        discard(staged)
    held_in, held_out = (
        torch.from_numpy(indices).to(process.device)
        for indices in batches.validation_split(len(labels), run.validation_images, run.validation_seed)
    )
    validation = images[held_out], labels[held_out].long()
    images, labels = images[held_in], labels[held_in].long()

    torch.manual_seed(run.seed)
    classifier = models.build(run.model, run.widths, manifest["classes"])
    classifier.fit_to(images.cpu())
    classifier.to(process.device)
    # The name that torch 2.11 knows as well.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
    # Statistics of BatchNorm are averaged once an epoch, below, instead of being broadcast in every step.
    network: nn.Module = DistributedDataParallel(classifier, broadcast_buffers=False) if run.world_size > 1 else classifier
    optimizer = make_optimizer(run, classifier)

    padded = batches.pad(images, run.shift)
    sizes = batches.deal(len(labels), run.global_batch_size)
    rates = learning_rates(run, len(sizes))
    show = tqdm(total=len(sizes) * run.epochs, unit="step", file=sys.stdout, disable=not (process.first and sys.stdout.isatty()))
    history: list[dict[str, Any]] = []
    for epoch in range(1, run.epochs + 1):
        start = time.perf_counter()
        plan = batches.epoch_plan(len(labels), run.seed, epoch, run.flip, run.shift, process.device)
        network.train()
        totals = torch.zeros(2, dtype=torch.float64, device=process.device)
        for batch in plan.order.split(sizes):
            mine = batches.share(batch, process.rank, run.world_size)
            lr = next(rates)
            totals += step(network, optimizer, lr, batches.crop(padded, mine, plan), labels[mine], run, len(batch))
            show.update()
        loss, accuracy = (all_reduce(totals) / len(labels)).tolist()
        trained = time.perf_counter() - start
        average_batchnorm(classifier, run.world_size)
        val_loss, val_accuracy = validate(classifier, *validation, process)
        row = (epoch, epoch * len(sizes), lr, loss, accuracy, val_loss, val_accuracy, len(labels) / trained, time.perf_counter() - start)
        history.append(dict(zip(HISTORY, row, strict=True)))
        if not math.isfinite(loss):
            raise Refusal(
                f"epoch {epoch}: the training loss is {loss}; use a lower learning_rate than {run.learning_rate} or a longer warmup"
            )
        if process.first:
            show.write(line(history[-1], run.epochs), file=sys.stdout)
            sys.stdout.flush()
            write_history(output / "history.csv", history)
            if run.checkpoint_every and epoch % run.checkpoint_every == 0:
                models.save(classifier, output / "checkpoints" / f"epoch={epoch:03}.safetensors")
    show.close()
    where = gather(placement(process, staged), process)
    if process.first:
        models.save(classifier, output / "model.safetensors")
        about = describe(run, manifest, started, where, history[-1])
        atomic.write_text(output / "run.json", json.dumps(about, indent=2) + "\n")


def make_optimizer(run: Run, classifier: models.Classifier) -> torch.optim.Optimizer:
    groups = classifier.parameter_groups(run.weight_decay)
    if run.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=run.learning_rate)
    return torch.optim.SGD(groups, lr=run.learning_rate, momentum=run.momentum, nesterov=run.momentum > 0)


def learning_rates(run: Run, steps_per_epoch: int) -> Iterator[float]:
    """The learning rate of every step: up to the peak over the warm-up's share of the steps, then down towards 0."""
    steps = run.epochs * steps_per_epoch
    peak = run.warmup * steps
    for done in range(steps):
        # In the middle of its step, so that neither the first nor the last step is taken with a rate of 0.
        now = done + 0.5
        yield run.learning_rate * (now / peak if now < peak else (steps - now) / (steps - peak))


def step(network: nn.Module, optimizer: torch.optim.Optimizer, lr: float, images: Tensor, labels: Tensor, run: Run, batch: int) -> Tensor:
    """One optimizer step; returns this rank's sums of loss and of correct predictions, float64 (2,), still on the device."""
    logits = network(images)
    loss = F.cross_entropy(logits, labels, label_smoothing=run.label_smoothing, reduction="sum")
    # DDP averages gradients over ranks; this makes the average that of the global batch even if the shares differ in size.
    (loss * (run.world_size / batch)).backward()
    for group in optimizer.param_groups:
        group["lr"] = lr * group["rate"]
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        return torch.stack((loss.double(), (logits.argmax(1) == labels).sum().double()))


@torch.no_grad()
def average_batchnorm(classifier: nn.Module, world_size: int) -> None:
    """Give all ranks the mean of their running statistics, so that what is saved has seen all the images."""
    statistics = [buffer for name, buffer in classifier.named_buffers() if name.endswith(("running_mean", "running_var"))]
    if world_size > 1 and statistics:
        flat = all_reduce(torch.cat(statistics)) / world_size
        for buffer, mean in zip(statistics, flat.split([len(s) for s in statistics]), strict=True):
            buffer.copy_(mean)


@torch.no_grad()
def validate(classifier: nn.Module, images: Tensor, labels: Tensor, process: Process) -> tuple[float | None, float | None]:
    """Loss and accuracy over all held-out images: sums over ranks, divided once. None, None where none are held out."""
    if not len(labels):
        return None, None
    classifier.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=process.device)
    for chunk in torch.arange(len(labels), device=process.device).split(VALIDATION_BATCH)[process.rank :: process.world_size]:
        logits = classifier(images[chunk])
        loss = F.cross_entropy(logits, labels[chunk], reduction="none").double().sum()
        totals += torch.stack((loss, (logits.argmax(1) == labels[chunk]).sum().double()))
    loss_sum, correct = all_reduce(totals).tolist()
    return loss_sum / len(labels), correct / len(labels)


def line(row: dict[str, Any], epochs: int) -> str:
    """One epoch as a line for a log or a terminal."""
    held_out = "" if row["val_loss"] is None else f"  val loss {row['val_loss']:.3f} accuracy {row['val_accuracy']:.2%}"
    return (
        f"epoch {row['epoch']}/{epochs}  train loss {row['train_loss']:.3f} accuracy {row['train_accuracy']:.2%}{held_out}"
        f"  {row['images_per_second']:,.0f} images/s  {row['seconds']:.1f} s"
    )


def write_history(path: Path, history: list[dict[str, Any]]) -> None:
    with atomic.replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, HISTORY)
        writer.writeheader()
        writer.writerows(history)


def placement(process: Process, staged: Staged) -> dict[str, Any]:
    """Where this rank ran, on what, and what it read."""
    return asdict(report(process)) | {"pid": os.getpid(), "data": asdict(staged)}


def describe(run: Run, manifest: dict[str, Any], started: datetime, where: list[dict[str, Any]], last: dict[str, Any]) -> dict[str, Any]:
    ended = datetime.now(UTC)
    return {
        "config": asdict(run),
        "git": git_state(),
        "code_sha256": code_sha256("train.py"),
        "data_sha256": manifest["sha256"],
        "data_source": manifest["source"],
        "versions": versions(),
        "ranks": where,
        "started": started.isoformat(timespec="seconds"),
        "ended": ended.isoformat(timespec="seconds"),
        "seconds": round((ended - started).total_seconds(), 3),
        "metrics": last,
    }


if __name__ == "__main__":
    main()
