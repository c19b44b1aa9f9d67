"""Evaluate a trained run on the test images, from its files alone, on any number of processes.

Every test image is counted exactly once. The images are cut into chunks of --batch-size, and the
chunks are shared among the processes, so that each image meets the same arithmetic on any number
of processes.
"""

# ruff: noqa: E402
import argparse
import gc
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# As in train.py.
gc.disable()

import numpy as np
import torch

from classifier.evaluation import metrics
from classifier.evaluation.views import in_order, predict
from classifier.models import weights
from classifier.pixels.batches import Examples, images_per_pass
from classifier.pixels.shares import fits, mapped_tensor
from classifier.training.splits import fold_split
from manynodes.base import atomic
from manynodes.base.errors import Refusal, told_in_one_line
from manynodes.base.failure import recorded
from manynodes.base.reading import file_sha256
from manynodes.data.folder import DataFolder
from manynodes.data.guard import Guard, stamp
from manynodes.data.user.origins import files_of
from manynodes.launching.gpus import claimed_gpus
from manynodes.ranks.device import told_when_full
from manynodes.ranks.process_group import Process, failing_at_once, gather, process_group
from manynodes.reporting import predictions
from manynodes.reporting.results import VIEWS, accuracy_line, read_about
from manynodes.reporting.sums import refuse_changed

gc.freeze()
gc.enable()

# The metrics of one weights file, by views; `plain` is always there.
Found = dict[str, dict[str, Any]]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="the data folder, with its manifest")
    add("--model", type=Path, required=True, help="model.safetensors of the run")
    add("--checkpoints", type=Path, help="folder with epoch=NNN.safetensors")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--batch-size", type=int,
        help="images per forward pass; 500 of 32 x 32, fewer larger ones")  # fmt: skip
    add("--trust-code", nargs="?", const="any", metavar="SHA256",
        help="run the Python code of a user's network, any or with this SHA-256")  # fmt: skip
    add("--views", choices=VIEWS, default="plain",
        help="views of each image whose logits are averaged")  # fmt: skip
    add("--fold", type=int, nargs=3, metavar=("FOLD", "FOLDS", "SEED"),
        help="instead of the test images, this fold of the training images")  # fmt: skip
    add("--output", type=Path, required=True,
        help="evaluation.json to write, with predictions.csv beside it")  # fmt: skip
    return parser


def main() -> None:
    args = options().parse_args()
    with (
        failing_at_once(),
        told_in_one_line("evaluate"),
        recorded(args.output.parent, "evaluate"),
        told_when_full("use a smaller --batch-size, or device: cpu"),
        one_gpu(args.device),
    ):
        if args.batch_size is not None and args.batch_size < 1:
            raise Refusal(f"--batch-size is {args.batch_size}; it must be at least 1")
        refuse_bad_fold(args.fold)
        with process_group(args.device) as process:
            evaluate(args, process)


def refuse_bad_fold(given: list[int] | None) -> None:
    """Refuse a --fold that is none, of which the configuration would be refused."""
    if given is None:
        return
    fold, folds, seed = given
    if not 0 <= fold < folds or folds < 2 or seed < 0:
        raise Refusal(
            f"--fold is {fold} {folds} {seed}; FOLD is 0 to FOLDS - 1, of at least 2 FOLDS, and "
            "SEED at least 0"
        )


@contextmanager
def one_gpu(device: str) -> Iterator[None]:
    """Where this program was started alone, compute on a GPU that no training here has."""
    if "RANK" in os.environ:
        yield
        return
    with claimed_gpus(device, 1, lambda line: print(f"evaluate: {line}", flush=True)) as gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        yield


def evaluate(args: argparse.Namespace, process: Process) -> None:
    """Evaluate the final weights with the requested views, and the checkpoints with one view.

    Checkpoints are for curves, beside the validation after each epoch, which has one view too.
    """
    data = DataFolder.read(args.data)
    refuse_other_weights(args.model, args.checkpoints, data, args.fold)
    split = "train" if args.fold else "test"
    # What the ranks read is what each of them has checked.
    guard = Guard(data, [f"{split}_images.npy"])
    data.refuse_changed(split)
    arrays = data.split(split)
    rows = np.arange(len(arrays[1]))
    if args.fold:
        fold, folds, seed = args.fold
        _, rows = fold_split(arrays[1], folds, fold, seed, data.extra("groups"))
    images = mapped_tensor(arrays[0])
    images = images.to(process.device) if fits(arrays[0], process.device) else images
    tested = Examples(
        images,
        torch.from_numpy(rows).to(images.device),
        torch.tensor(arrays[1][rows], device=process.device),
    )
    batch_size = args.batch_size or images_per_pass(arrays[0], process.device.type)

    def evaluated(path: Path, views: str) -> tuple[Found, metrics.Predicted | None]:
        return evaluate_weights(path, views, batch_size, args.trust_code, data, tested, process)

    kept = kept_weights(args.checkpoints)
    before = {path: stamp(path) for path in (args.model, *(path for _, path in kept))}
    final, predicted = evaluated(args.model, args.views)
    model_sha256 = file_sha256(args.model)
    # The last epoch's checkpoint has the weights of the model: the same file is evaluated once.
    done = {model_sha256: final}
    checkpoints = []
    for epoch, path in kept:
        sha256 = file_sha256(path)
        if sha256 not in done:
            done[sha256], _ = evaluated(path, "plain")
        if process.first:
            checkpoints.append({"epoch": epoch, "sha256": sha256} | of_plain(done[sha256]))
    others = [str(path) for path, known in before.items() if stamp(path) != known]
    for changed in gather((others or [guard.changed()])[0], process):
        if changed:
            raise Refusal(f"{changed} changed while it was read; run the same command again")
    if predicted is not None:
        written = write_predictions(args.output, data, split, rows, arrays[1][rows], predicted)
        about = {
            "model_sha256": model_sha256,
            "data_sha256": data.sha256,
            "dataset": data.dataset,
            "class_names": data.class_names,
            "views": args.views,
            "images_sha256": data.manifest["content_sha256"][f"{split}_images"],
            "predictions_sha256": written,
        }
        result = about | final[args.views] | {"plain": of_plain(final), "checkpoints": checkpoints}
        atomic.write_text(args.output, json.dumps(result, indent=2, allow_nan=False) + "\n")
        line = f"{accuracy_line(result)} on {result['n']:,} images, loss {result['loss']:.3f}"
        print(f"evaluate: {args.output}: {line}")


def write_predictions(
    evaluation: Path,
    data: DataFolder,
    split: str,
    rows: np.ndarray,
    labels: np.ndarray,
    predicted: metrics.Predicted,
) -> str:
    """Write predictions.csv beside evaluation.json; returns its SHA-256.

    Args:
        rows, labels: the images of the split that were evaluated, with their labels.
    """
    columns = [labels, predicted.classes, predicted.confidence, predicted.of_true]
    return predictions.write(
        evaluation.with_name(predictions.FILE),
        files_of(data, split),
        data.class_names,
        zip(rows, *columns, *predicted.probabilities.T, strict=True),
        predicted.probabilities.shape[1],
    )


def evaluate_weights(
    path: Path,
    views: str,
    batch_size: int,
    trusted: str | None,
    data: DataFolder,
    tested: Examples,
    process: Process,
) -> tuple[Found, metrics.Predicted | None]:
    """The metrics of one weights file and its predictions from these views, on rank 0; none
    elsewhere.

    Raises:
        Refusal: the weights are for another number of classes, or a loss is not finite.
    """
    classifier = weights.load(path, trusted).move_to(process.device)
    classes, channels = classifier.description["classes"], len(classifier.mean)
    if classes != data.classes:
        raise Refusal(f"{path} is for {classes} classes, {data.dataset} has {data.classes}")
    if channels != data.image_shape[2]:
        raise Refusal(
            f"{path} is for images with {channels} channels, {data.dataset} has "
            f"{data.image_shape[2]}"
        )
    found: Found = {}
    predicted = None
    by_views = predict(classifier, tested, batch_size, views, process)
    for name, mine in by_views.items():
        parts = gather(mine, process)
        if process.first:
            predicted = in_order(parts, len(tested.labels))
            labels = tested.labels.cpu().numpy()
            found[name] = metrics.summarise(labels, predicted, data.classes)
            if not math.isfinite(found[name]["loss"]):
                raise Refusal(
                    f"{path}: the loss on the test images is not finite; "
                    "train the run with a lower learning_rate"
                )
    # The requested views are the last ones.
    return found, predicted


def refuse_other_weights(
    model: Path, checkpoints: Path | None, data: DataFolder, fold: list[int] | None
) -> None:
    """Refuse weights in the folder of a run that its training has not written, other data, and
    images that the run was trained on.

    Raises:
        Refusal: run.json lies beside them and names others.
    """
    try:
        about = read_about(model.with_name("run.json"))
    except FileNotFoundError:
        return
    kept = {f"checkpoints/{path.name}" for _, path in kept_weights(checkpoints)}
    named = {name for name in about["files"] if "/" in name} if checkpoints else set()
    refuse_changed(model.parent, about["files"], [model.name, *sorted(kept | named)])
    run = about["config"]
    held_out = [run["fold"], run["folds"], run["validation_seed"]] if run.get("folds") else None
    if fold != held_out:
        option = f"--fold {' '.join(map(str, held_out))}" if held_out else "no --fold"
        raise Refusal(f"{model.parent} was trained on the images of that fold; use {option}")
    if about["data_sha256"] != data.sha256:
        raise Refusal(
            f"{model.parent} was trained on other data than {data.path} (data_sha256); train again "
            "with --config replace=true"
        )


def kept_weights(folder: Path | None) -> list[tuple[int, Path]]:
    """The epochs whose weights are kept, with their files."""
    paths = sorted(folder.iterdir()) if folder else []
    named = [(re.fullmatch(r"epoch=([0-9]{3,9})\.safetensors", path.name), path) for path in paths]
    return [(int(name[1]), path) for name, path in named if name]


def of_plain(found: Found) -> dict[str, float]:
    return {key: found["plain"][key] for key in ("loss", "accuracy")}


if __name__ == "__main__":
    main()
