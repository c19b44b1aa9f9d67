"""Train one run with DistributedDataParallel, on as many processes as the launcher started.

It knows RANK, LOCAL_RANK, WORLD_SIZE and the contract in manynodes/base/environment.py, but no
scheduler. It writes to --output:

    model.safetensors                  the weights
    metrics.csv                        one row per epoch
    checkpoints/epoch=NNN.safetensors  the weights of the epochs to keep
    network/                           the Python files of a network of the user's
    run.json                           provenance
    state/                             its states, from which it resumes
"""

# ruff: noqa: E402
import argparse
import gc
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

# Imports are never freed, so do not garbage-collect them: that took a third of the start-up CPU
# time.
gc.disable()

import numpy as np
import torch
import torch._dynamo  # DDP and the optimizers import it anyway
from tqdm import tqdm

# Python looks there by itself, unless a site has set PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from classifier.models.names import AIRBENCH, with_network
from classifier.states.kept import best_epoch, kept_epochs, scheduled
from classifier.states.saver import Saver
from classifier.states.state import (
    Request,
    State,
    checkpoint,
    newest,
    progress,
    remove,
    remove_surpassed,
)
from classifier.training.loop import Training
from classifier.training.timing import SlowHosts
from manynodes.base import atomic
from manynodes.base.environment import Environment, add_to_report, refusals_reported
from manynodes.base.errors import LONGEST_REPORT, Refusal, Stopped, one_line, told_in_one_line
from manynodes.base.processes import process_name
from manynodes.base.provenance import code_sha256, git_state, now, versions
from manynodes.base.reading import file_sha256
from manynodes.base.sources import sources_sha256
from manynodes.base.timeouts import TIMEOUT
from manynodes.base.tree import decode, encode
from manynodes.checkpointing import incidents, replaced
from manynodes.checkpointing.owner import acquire
from manynodes.data.folder import DataFolder
from manynodes.data.staging import Staged, stage
from manynodes.experiment.config import Run, read_run
from manynodes.ranks.device import computes_in_bf16, limits, told_when_full
from manynodes.ranks.probe import outliers, probe
from manynodes.ranks.process_group import (
    Process,
    broadcast,
    describe,
    failing_at_once,
    gather,
    process_group,
)
from manynodes.ranks.processor import OF_GPUS, gpu_software, processor
from manynodes.ranks.stopping import listen
from manynodes.reporting.metrics import write_metrics
from manynodes.reporting.sums import of_files

gc.freeze()
gc.enable()

# Bytes per second at which the data are read at least, twice over.
SLOW = 50_000_000
# After a signal, a rank that waits for its GPU so long is ended: the GPU waits for ranks that are
# gone, and Python does not hear of the signal. Most checkpoints of rank 0 are written by then, and
# SUPERVISE_GRACE is not over.
BLOCKED = 15
# Of the training images, to see whether they have colours.
LOOKED_AT = 1000
# torch's warning of `set_deterministic_debug_mode`.
INEXACT = re.compile(r"(\S+) does not have a deterministic implementation")
WHEN_FULL = "use a smaller global_batch_size, more processes, or images_in: disk"
# Bytes of data that are checked again before the last state is saved: ten seconds of the minute
# that a job has left when it is asked to stop.
CHECKED_WHEN_STOPPED = 10_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run", required=True, metavar="JSON",
        help="the run, keys as in config/README.md; launch.py adds the geometry")  # fmt: skip
    add("--data", type=Path, required=True, help="the shared data folder, with its manifest")
    add("--scratch", nargs="*", default=[],
        help="node-local folders to stage in; $NAME is expanded on the node")  # fmt: skip
    add("--output", type=Path, required=True, help="folder for the results of this run")
    add("--save-every-epochs", type=int, default=1, metavar="N",
        help="save the state after every N epochs")  # fmt: skip
    add("--save-every-seconds", type=int, default=300, metavar="N",
        help="and within an epoch, N seconds after the last save")  # fmt: skip
    add("--images-in", choices=("auto", "disk", "memory"), default="auto",
        help="where the training images are, as images_in in config/README.md")  # fmt: skip
    add("--probe", action="store_true", help="measure network, disks and processors first")
    add("--resume", choices=("exact", "anyway", "fresh"), default="exact",
        help="a state of the same world size; of any; or none of another job")  # fmt: skip
    args = parser.parse_args()
    with failing_at_once(), told_in_one_line("train"), told_when_full(WHEN_FULL):
        if min(args.save_every_epochs, args.save_every_seconds) < 1:
            raise Refusal("--save-every-epochs and --save-every-seconds must be at least 1")
        contract = Environment.read()
        run = read_run(args.run, contract)
        data = DataFolder.read(args.data)
        # The first rank of a node reads all data before the others go on.
        patience = (contract.timeout or TIMEOUT) + data.bytes / SLOW
        with refusals_reported(), process_group(run.device, patience) as process:
            train(run, data, process, contract, args)


def train(
    run: Run, data: DataFolder, process: Process, contract: Environment, args: argparse.Namespace
) -> None:
    """Train `run` as one of its processes, resuming from its newest state.

    Raises:
        Stopped: it was asked to stop, and has saved its state.
        Refusal: the run cannot be trained like this, or a number is not finite.
    """
    if (started := process.world_size) != run.world_size:
        raise Refusal(f"{started} processes were started, the run is for {run.world_size}")
    folder = args.output / "state"
    name = contract.owner or process_name()
    with ExitStack() as stack:
        stop = listen(contract.stop_at, BLOCKED if process.device.type == "cuda" else None)
        owner = stack.enter_context(acquire(folder, name, tell)) if process.first else None
        staged = staged_here(data, process, contract, args.scratch)
        # Rank 0 alone decides what is resumed.
        code = with_network(code_sha256("train.py"), run.model) if process.first else ""
        ranks = gather(placement(process, staged), process)
        images, hosts = "train_images.npy", [rank["host"] for rank in ranks]
        shared, here = data.path / images, Path(staged.path) / images
        probed = probe(process, hosts, shared, here) if args.probe else None
        request = Request(run, data.sha256, code, name, args.resume)
        initial = sha256_of_start(run) if owner else ""
        training = begin(request, folder, process, data, staged, args.images_in)
        if owner:
            owner.begin_at(training.epoch, training.step)
            training.attempts.append(attempt(training, name, ranks, initial))
            clear(args.output, training)
            slow_nodes = outliers(probed["nodes"]) if probed else []
            for line in slow_nodes:
                tell_slow(folder, f"probe: {line}")
            slow_hosts = SlowHosts(hosts, slow_nodes)
            owner.live = lambda: training.live() | slow_hosts.live()
        saver = stack.enter_context(
            Saver(process, folder, owner, args.save_every_seconds, training.images_touched)
        )
        bar = stack.enter_context(progress_bar(training))
        while not training.finished:
            if reason := training.train_epoch(stop, saver, bar):
                stop.agreed = True
                if data.bytes <= CHECKED_WHEN_STOPPED:
                    refuse_changed_images(training, saver)
                save_and_stop(training, saver, reason, stop.reason)
            training.end_epoch()
            if owner:
                owner.check()
                after_epoch(training, args.output, saver, bar, slow_hosts)
            last = training.finished
            if last and training.epoch < run.epochs and process.first:
                tell(f"patience: no better {run.best} for {run.patience} epochs")
            if last or training.epoch % args.save_every_epochs == 0:
                saver.save(training.rank_state(), training.state, wait=last)
        # No signal ends what remains.
        stop.agreed = True
        refuse_changed_images(training, saver)
        if owner:
            owner.check()
            publish(training, request, folder, args.output, ranks, saver, probed)


def after_epoch(
    training: Training, output: Path, saver: Saver, bar: tqdm, slow_hosts: SlowHosts
) -> None:
    """On rank 0: print the epoch, keep its row and its weights, and warn of slow hosts."""
    bar.write(epoch_line(output, training), file=sys.stdout)
    sys.stdout.flush()
    rows = list(training.history)
    saver.note(partial(write_metrics, output / "metrics.csv", rows))
    keep_checkpoint(training, saver.folder)
    seconds = training.history[-1]["seconds"]
    for line in slow_hosts.add(training.per_rank[:, 0].tolist(), seconds):
        tell_slow(saver.folder, line)


def save_and_stop(training: Training, saver: Saver, agreed: str, asked: str | None) -> NoReturn:
    """Save the state and end, as all ranks have agreed.

    Args:
        agreed: why.
        asked: why this rank was asked to; None if another one was.

    Raises:
        Stopped: always.
    """
    saver.save(training.rank_state(), training.state, wait=True)
    add_to_report(stopped=asked or "another rank was asked to")
    where = f"{progress(training.epoch, training.step)}, of {training.run.epochs} epochs"
    raise Stopped(f"stopped ({agreed}) after {where}; saved in {saver.folder}")


def refuse_changed_images(training: Training, saver: Saver) -> None:
    """Read the images again, whose changes not every disk notes, see `Guard`.

    Raises:
        Refusal: on rank 0, after removing the states, which come from unknown images.
    """
    found = [line for line in gather(training.images_changed(), training.process) if line]
    if found:
        saver.remove_states()
        raise Refusal(
            f"{found[0]} changed while it was read; the states are removed: run the same command "
            "again, on a disk that nobody else writes to"
        )


def staged_here(
    data: DataFolder, process: Process, contract: Environment, scratch: list[str]
) -> Staged:
    """Where this node's data are. The first rank of each node stages them; the others would read
    all of them only to check them again.
    """
    own = stage(data, scratch, contract.job_scratch) if process.local_rank == 0 else None
    if own and own.status == "fallback":
        print(own)
    found = gather(asdict(own) if own else None, process)
    everywhere = decode(broadcast(encode(found), process))
    return Staged(**everywhere[process.rank - process.local_rank])


def tell(text: str) -> None:
    print(f"train: {one_line(text, LONGEST_REPORT)}", flush=True)


def tell_slow(folder: Path, line: str) -> None:
    """Warn of a slow node, and keep it for the report of the run."""
    tell(f"warning: {line}")
    incidents.add(folder, incidents.SLOW, line)


def tell_inexact(folder: Path) -> None:
    """From now on, name each operation that torch warns of because two calls of it may round
    differently, once, and keep it for the report of the run.
    """
    lines: list[str] = []
    show = warnings.showwarning

    def show_or_tell(message: Warning | str, *where: Any, **options: Any) -> None:
        found = INEXACT.search(str(message))
        if not found:
            show(message, *where, **options)
            return
        line = f"{found[1]} cannot be repeated exactly on this device: the last bits of the result"
        line += " may differ from run to run, and after an interruption"
        if line not in lines:
            lines.append(line)
            tell(f"warning: {line}")
            incidents.add(folder, incidents.INEXACT, line)

    warnings.showwarning = show_or_tell


def progress_bar(training: Training) -> tqdm:
    return tqdm(
        total=training.run.epochs * len(training.sizes),
        initial=training.steps_done,
        unit="step",
        file=sys.stdout,
        disable=not (training.process.first and sys.stdout.isatty()),
    )


def begin(
    request: Request,
    folder: Path,
    process: Process,
    data: DataFolder,
    staged: Staged,
    images_in: str,
) -> Training:
    """The training on all ranks, from its newest usable state.

    Rank 0 reads it and broadcasts it: a file that one node wrote may be seen late on another.
    """
    content, skipped = newest(folder, request, tell) if process.first else (b"", [])
    if process.first:
        if request.resume == "fresh" and not content:
            # Nothing of an earlier training is left.
            incidents.forget(folder)
        tell_inexact(folder)
    content = broadcast(content, process)
    state = State.decode(content) if content else None
    if state:
        precision, why = state.run["precision"], "as this training began"
    else:
        images = data.at(Path(staged.path)).array("train_images")
        precision, why = agreed_precision(request.run, process, images)
    if process.first:
        tell(f"precision: {precision}, {why}")
    training = Training(
        request.run.with_values(precision=precision),
        process,
        data,
        staged,
        request.code_sha256,
        images_in,
        tell if process.first else lambda _text: None,
    )
    if state:
        training.restore(state)
        if len(state.ranks) != process.world_size and process.first:
            tell(
                f"warning: the state is of {len(state.ranks)} processes: BatchNorm's statistics "
                "are their mean, and the result is not, to the bit, that of either number"
            )
    for path in skipped:
        remove(path)
    return training


def agreed_precision(run: Run, process: Process, images: np.ndarray) -> tuple[str, str]:
    """The precision of a run that begins, and on rank 0 why: `auto` becomes one that is fast on
    every rank, and in which the network trains on such images.

    Args:
        images: of the train split, (n, h, w, c).
    """
    if run.precision != "auto":
        return run.precision, "as configured"
    here = socket.gethostname()
    where = f"the {'CPU' if process.device.type == 'cpu' else 'GPU'} of {here}"
    without = gather("" if computes_in_bf16(process.device) else where, process)
    slow = ", ".join(dict.fromkeys(filter(None, without)))
    chosen = why = ""
    if process.first:
        if slow:
            chosen, why = "fp32", f"{slow} has no bf16"
        elif run.model in AIRBENCH and are_grey(images[:LOOKED_AT]):
            # Whitened, the difference of equal channels is bf16's rounding error and nothing else.
            chosen, why = "fp32", f"the images are grey in all channels: {run.model} needs it"
        else:
            chosen, why = "bf16", "every process has bf16"
    return broadcast(chosen.encode(), process).decode(), f"chosen by auto: {why}"


def are_grey(images: np.ndarray) -> bool:
    """Whether there are several channels that are all equal, as of grey pictures stored as RGB."""
    return images.shape[3] > 1 and bool((images == images[..., :1]).all())


def sha256_of_start(run: Run) -> str:
    """SHA-256 of `initial_weights`; empty without them. Who resumes does not read them any more."""
    with suppress(FileNotFoundError):
        return file_sha256(Path(run.initial_weights)) if run.initial_weights else ""
    return ""


def attempt(
    training: Training, name: str, ranks: list[dict[str, Any]], initial: str
) -> dict[str, Any]:
    """This attempt at the run, see docs/results.md; warns if the hardware or torch has changed.

    Args:
        initial: SHA-256 of `initial_weights` before they were read.
    """
    this = {
        "by": name,
        "hosts": list(dict.fromkeys(rank["host"] for rank in ranks)),
        "device": common([rank["device_name"] or rank["device"] for rank in ranks]),
        **{key: common([rank[key] for rank in ranks]) for key in ("threads", *processor())},
        **{key: common([rank.get(key) for rank in ranks]) for key in OF_GPUS if key in ranks[0]},
        "torch": str(torch.__version__),
        **git_state(),
        "started": now(),
        "from": {"epoch": training.epoch, "step": training.step},
        "seconds": 0.0,
    }
    if path := training.run.initial_weights:
        # They are read only at the start from scratch.
        this["initial_sha256"] = (
            training.attempts[0].get("initial_sha256") if training.attempts else initial
        )
        if not training.attempts and sha256_of_start(training.run) != initial:
            raise Refusal(f"{path} changed while it was read; run the same command again")
        if initial and initial != (this["initial_sha256"] or initial):
            raise Refusal(
                f"initial_weights: {path} has changed since this run began; put it back, or add "
                "--config resume=fresh"
            )
    for last in training.attempts[-1:]:
        keys = [
            key
            for key in ("device", "threads", *processor(), *OF_GPUS, "torch")
            if key in last and last[key] != this.get(key)
        ]
        if keys:
            was = ", ".join(f"{key} was {last[key]} and is {this.get(key)}" for key in keys)
            tell(
                f"warning: {was}: the last bits of the result may differ from those of an "
                f"uninterrupted training, although it goes on in {training.run.precision}"
            )
    return this


def common(values: list[Any]) -> Any:
    """The value of all ranks; if they differ, a text with each value once."""
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else ", ".join(map(str, different))


def clear(output: Path, training: Training) -> None:
    """Set earlier results aside, and write the rows so far."""
    replaced.set_aside(output)
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
    # A network file system may keep the folder as long as files in it are open.
    (output / "checkpoints").mkdir(exist_ok=True)
    for name in ("run.json", "model.safetensors", "metrics.csv"):
        (output / name).unlink(missing_ok=True)
    shutil.rmtree(output / "network", ignore_errors=True)
    if training.history:
        write_metrics(output / "metrics.csv", training.history)


def keep_checkpoint(training: Training, folder: Path) -> None:
    values = training.run.values
    epochs = kept_epochs(values, training.history)
    # A state that is being written has the present ones.
    found = {epoch: training.checkpoints[epoch] for epoch in epochs - {training.epoch}}
    if training.epoch in epochs:
        path = checkpoint(folder, training.epoch)
        training.save_weights(path)
        found[training.epoch] = file_sha256(path)
    training.checkpoints = dict(sorted(found.items()))
    if training.run.best:
        remove_surpassed(folder, values, training.history)


def publish(
    training: Training,
    request: Request,
    folder: Path,
    output: Path,
    ranks: list[dict[str, Any]],
    saver: Saver,
    probed: dict[str, Any] | None,
) -> None:
    """Write the results of a finished training. Its state stays, so this can be repeated."""
    # It is of other weights.
    (output / "evaluation.json").unlink(missing_ok=True)
    # Another Snakemake may have removed this folder as incomplete.
    (output / "checkpoints").mkdir(exist_ok=True)
    write_metrics(output / "metrics.csv", training.history)
    names = publish_weights(training, folder, output)
    # The code that trained was read at the start of the attempt.
    git = {key: training.attempts[-1][key] for key in ("commit", "dirty")}
    incidents.note_checkout(folder, git["commit"], git_state()["commit"])
    of_user = training.classifier.description.get("sources")
    about = {
        "config": request.run.values,
        "computed_in": training.run.precision,
        "git": git,
        "files": of_files(output, ["model.safetensors", "metrics.csv", *names]),
        "code_sha256": training.code_sha256,
        "network_sha256": sources_sha256(of_user) if of_user else None,
        **{key: value for key, value in training.attempts[0].items() if key == "initial_sha256"},
        "augmentation": asdict(training.shares.how),
        "parameters": sum(each.numel() for each in training.classifier.parameters()),
        "trained_parameters": sum(
            each.numel() for each in training.classifier.parameters() if each.requires_grad
        ),
        "images_per_step": round(len(training.labels) / len(training.sizes), 3),
        "data_sha256": training.data.sha256,
        "data_source": training.data.manifest["source"],
        # In memory they cannot change.
        "data_checked": None if training.shares.mapped is None else now(),
        "versions": versions(),
        "ranks": [
            rank | measured(numbers)
            for rank, numbers in zip(ranks, training.per_rank.tolist(), strict=True)
        ],
        "probe": probed,
        "attempts": training.attempts,
        "incidents": [asdict(each) for each in incidents.read(folder)],
        "started": training.attempts[0]["started"],
        "ended": now(),
        "seconds": round(sum(attempt["seconds"] for attempt in training.attempts), 3),
        "saving": {"times": saver.times, "seconds": round(saver.seconds, 3)},
        "metrics": training.history[final_epoch(training) - 1],
    }
    text = json.dumps(about, indent=2) + "\n"
    atomic.write_text(folder / replaced.FINISHED, hashlib.sha256(text.encode()).hexdigest())
    atomic.write_text(output / "run.json", text)
    replaced.forget(output)


def publish_weights(training: Training, folder: Path, output: Path) -> list[str]:
    """Write the final weights, those of the epochs to keep, and the user's network.

    Returns:
        The names of the files of the epochs to keep.
    """
    run = training.run
    published = [checkpoint(folder, epoch)
                 for epoch in sorted(scheduled(run.checkpoint_every, training.epoch))]  # fmt: skip
    for path in published:
        atomic.write_bytes(output / "checkpoints" / path.name, path.read_bytes())
    # The user's network is in the weights file too, which is complete without this folder.
    for name, text in training.classifier.description.get("sources", {}).items():
        source = output / "network" / name
        source.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(source, text)
    if run.best:
        path = checkpoint(folder, final_epoch(training))
        atomic.write_bytes(output / "model.safetensors", path.read_bytes())
    else:
        training.save_weights(output / "model.safetensors")
    return [f"checkpoints/{path.name}" for path in published]


def final_epoch(training: Training) -> int:
    """The epoch whose weights are the result."""
    best = training.run.best
    return best_epoch(training.history, best) if best else training.epoch


def measured(numbers: Sequence[float]) -> dict[str, float | None]:
    """A row of `Training.per_rank`; None for what is not known. If this attempt had only to write
    the results, all is 0.
    """
    forward, waiting, memory, joules, power, heat, use = numbers
    known = forward or memory
    found = {
        "forward_seconds": round(forward, 6) or -1,
        "input_seconds": round(waiting, 6) if forward else -1,
        "gpu_memory_bytes": int(memory) or -1,
        "gpu_joules": round(joules, 1),
        "gpu_held_by_power_seconds": round(power, 2),
        "gpu_held_by_heat_seconds": round(heat, 2),
        "gpu_use": round(use, 3),
    }
    return {name: number if known and number >= 0 else None for name, number in found.items()}


def epoch_line(output: Path, training: Training) -> str:
    """The last epoch as a line for a log or a terminal.

    Args:
        output: of the run.
    """
    row = training.history[-1]
    parts = [
        f"{output.parent.name}/{output.name}: epoch {row['epoch']}/{training.run.epochs}",
        f"train loss {row['train_loss']:.3f} accuracy {row['train_accuracy']:.2%}",
    ]
    if row["val_loss"] is not None:
        parts.append(f"val loss {row['val_loss']:.3f} accuracy {row['val_accuracy']:.2%}")
    parts += [f"{row['images_per_second']:,.0f} images/s", f"{row['seconds']:.1f} s"]
    return "  ".join(parts)


def placement(process: Process, staged: Staged) -> dict[str, Any]:
    """Where this rank runs, on which device, and which data it reads."""
    known = asdict(describe(process)) | limits(process.device) | gpu_software(process.device)
    return known | {"pid": os.getpid(), "data": asdict(staged)}


if __name__ == "__main__":
    main()
