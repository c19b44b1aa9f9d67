"""Train one run with DistributedDataParallel, on as many processes as the launcher started.

Knows RANK, LOCAL_RANK and WORLD_SIZE and nothing of schedulers. Writes into --output: model.safetensors, history.csv (a row
per epoch), checkpoints/epoch=NNN.safetensors for the epochs to keep, and run.json (how all of it came about). Its state goes to
--output/state; started again, it goes on from there, and comes to the same weights bit for bit.
"""

# ruff: noqa: E402
import argparse
import gc
import json
import os
import shutil
import socket
import sys
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# While torch and all it brings are imported there is no garbage to collect, and looking for it took a quarter of the time (measured).
gc.disable()

import torch
from tqdm import tqdm

from ddp import atomic, models
from ddp.config import Run
from ddp.data_folder import file_sha256, read_manifest
from ddp.errors import LONGEST_REPORT, Refusal, Stopped, one_line, told_in_one_line
from ddp.history import write_history
from ddp.owner import own
from ddp.process_group import Process, broadcast, gather, process_group, report
from ddp.processor import processor
from ddp.provenance import code_sha256, git_state, versions
from ddp.saver import Saver, tell_supervisor
from ddp.staging import Staged, stage
from ddp.state import State, Wanted, checkpoint, newest, place
from ddp.stopping import listen
from ddp.training import Training

gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="the run as a JSON object, keys as in config/README.md")
    parser.add_argument("--data", type=Path, required=True, help="the shared data folder, with its manifest")
    parser.add_argument("--scratch", nargs="*", default=[], help="node-local folders to stage in; $NAME is looked up here")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results of this run")
    parser.add_argument("--save-every-epochs", type=int, default=1, metavar="N", help="save the state after every N epochs")
    parser.add_argument("--save-every-seconds", type=int, default=300, metavar="N", help="and when the last one is N seconds old")
    resume = parser.add_mutually_exclusive_group()
    resume.add_argument("--fresh", action="store_true", help="start over, whatever has been saved")
    resume.add_argument("--other-world-size", action="store_true",
                        help="go on from the last whole epoch of a training on another number of processes")  # fmt: skip
    args = parser.parse_args()
    with told_in_one_line("train"):
        if min(args.save_every_epochs, args.save_every_seconds) < 1:
            raise Refusal("--save-every-epochs and --save-every-seconds must be at least 1")
        run = Run.from_json(args.run)
        with process_group(run.device) as process:
            train(run, process, args)


def train(run: Run, process: Process, args: argparse.Namespace) -> None:
    """Train `run` as one of its processes, from where it was left; rank 0 writes the results."""
    if process.world_size != run.world_size:
        raise Refusal(f"{process.world_size} processes were started, the run is for {run.world_size}")
    manifest = read_manifest(args.data)
    folder = args.output / "state"
    name = os.environ.get("RUN_OWNER", f"process {os.getpid()} on {socket.gethostname()}")
    with ExitStack() as stack:
        stop = listen()
        owner = stack.enter_context(own(folder, name, tell)) if process.first else None
        staged = stage(args.data, args.scratch)
        if staged.status == "fallback" and process.local_rank == 0:
            print(staged)
        code = code_sha256("train.py")
        training = Training(run, process, manifest, staged, code)
        where = gather(placement(process, staged), process)
        wanted = Wanted(run, manifest["sha256"], code, name, args.fresh, args.other_world_size)
        resume(training, folder, wanted)
        if owner:
            owner.begin_at(training.epoch, training.step)
            training.attempts.append(attempt(training, name, where))
            clear(args.output, training)
        saver = stack.enter_context(Saver(process, folder, owner, args.save_every_seconds))
        show = stack.enter_context(
            tqdm(total=run.epochs * len(training.sizes), initial=training.steps_done, unit="step", file=sys.stdout,
                 disable=not (process.first and sys.stdout.isatty()))
        )  # fmt: skip
        while training.epoch < run.epochs:
            if training.train_epoch(stop, saver, show):
                saver.save(training.own_part(), training.state, wait=True)
                reason = stop.reason or "another rank was asked to"
                tell_supervisor(stopped=reason)
                raise Stopped(f"stopped ({reason}) after {place(training.epoch, training.step)}, of {run.epochs} epochs; saved in {folder}")
            training.end_epoch()
            if process.first:
                show.write(f"{args.output.parent.name}/{args.output.name}: {line(training.history[-1], run.epochs)}", file=sys.stdout)
                sys.stdout.flush()
                write_history(args.output / "history.csv", training.history)
                keep_checkpoint(training, folder)
            last = training.epoch == run.epochs
            if last or training.epoch % args.save_every_epochs == 0:
                saver.save(training.own_part(), training.state, wait=last)
        if owner:
            owner.hold()
            publish(training, folder, args.output, where, saver)


def tell(text: str) -> None:
    print(f"train: {one_line(text, LONGEST_REPORT)}", flush=True)


def resume(training: Training, folder: Path, wanted: Wanted) -> None:
    """Go on from the newest state that can be used, the same on all ranks.

    Only rank 0 looks for it: a file that one node wrote may be seen late on another. The others get it over the network.
    """
    content = broadcast(newest(folder, wanted, tell) if training.process.first else None, training.process)
    if content is not None:
        training.restore(State.decode(content))


def attempt(training: Training, name: str, where: list[dict[str, Any]]) -> dict[str, Any]:
    """What is at work on the run from now on; see docs/results.md."""
    now_at_work = {
        "by": name,
        "hosts": list(dict.fromkeys(rank["host"] for rank in where)),
        "device": where[0]["device_name"] or where[0]["device"],
        "threads": where[0]["threads"],
        **processor(),
        "torch": str(torch.__version__),
        "commit": git_state()["commit"],
        "started": now(),
        "from": {"epoch": training.epoch, "step": training.step},
        "seconds": 0.0,
    }
    for before in training.attempts[-1:]:
        keys = [key for key in ("device", "threads", *processor(), "torch") if key in before and before[key] != now_at_work[key]]
        if keys:
            was = ", ".join(f"{key} was {before[key]} and is {now_at_work[key]}" for key in keys)
            tell(f"warning: {was}: the last bits of the result may differ from those of a training without interruption")
    return now_at_work


def clear(output: Path, training: Training) -> None:
    """Have in the output what the training has come to so far: Snakemake removes it before a job runs, other ways of starting do not."""
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
    (output / "checkpoints").mkdir()
    for name in ("model.safetensors", "run.json", "history.csv"):
        (output / name).unlink(missing_ok=True)
    if training.history:
        write_history(output / "history.csv", training.history)


def keep_checkpoint(training: Training, folder: Path) -> None:
    every = training.run.checkpoint_every
    if every and training.epoch % every == 0:
        path = checkpoint(folder, training.epoch)
        models.save(training.classifier, path)
        training.checkpoints[training.epoch] = file_sha256(path)


def publish(training: Training, folder: Path, output: Path, where: list[dict[str, Any]], saver: Saver) -> None:
    """Write the results of the finished training. Its state stays, so that this can be done again."""
    # Another Snakemake may have removed what is unfinished in its eyes.
    (output / "checkpoints").mkdir(exist_ok=True)
    write_history(output / "history.csv", training.history)
    for epoch in training.checkpoints:
        kept = checkpoint(folder, epoch)
        atomic.write_bytes(output / "checkpoints" / kept.name, kept.read_bytes())
    models.save(training.classifier, output / "model.safetensors")
    about = {
        "config": asdict(training.run),
        "git": git_state(),
        "code_sha256": training.code_sha256,
        "data_sha256": training.manifest["sha256"],
        "data_source": training.manifest["source"],
        "versions": versions(),
        "ranks": where,
        "attempts": training.attempts,
        "started": training.attempts[0]["started"],
        "ended": now(),
        "seconds": round(sum(attempt["seconds"] for attempt in training.attempts), 3),
        "saving": {"times": saver.times, "seconds": round(saver.seconds, 3)},
        "metrics": training.history[-1],
    }
    atomic.write_text(output / "run.json", json.dumps(about, indent=2) + "\n")


def line(row: dict[str, Any], epochs: int) -> str:
    """One epoch as a line for a log or a terminal."""
    held_out = "" if row["val_loss"] is None else f"  val loss {row['val_loss']:.3f} accuracy {row['val_accuracy']:.2%}"
    return (
        f"epoch {row['epoch']}/{epochs}  train loss {row['train_loss']:.3f} accuracy {row['train_accuracy']:.2%}{held_out}"
        f"  {row['images_per_second']:,.0f} images/s  {row['seconds']:.1f} s"
    )


def placement(process: Process, staged: Staged) -> dict[str, Any]:
    """Where this rank runs, on what, and what it reads."""
    return asdict(report(process)) | {"pid": os.getpid(), "data": asdict(staged)}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    main()
