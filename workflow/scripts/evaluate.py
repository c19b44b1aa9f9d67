"""Evaluate a trained run on the test images, from its files alone, on any device and any number of processes.

Every test image is counted exactly once. The images are cut into chunks that depend on --batch-size alone, and the chunks are
dealt to the processes, so that each image meets the same arithmetic however many processes there are.
"""

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ddp import atomic, metrics, models
from ddp.batches import pad
from ddp.data_folder import file_sha256, load_split, read_manifest
from ddp.errors import Refusal, told_in_one_line
from ddp.process_group import Process, gather, process_group
from ddp.results import VIEWS, accuracy_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the data folder, with its manifest")
    parser.add_argument("--model", type=Path, required=True, help="model.safetensors of the run")
    parser.add_argument("--checkpoints", type=Path, help="folder with epoch=NNN.safetensors")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--batch-size", type=int, default=500, help="images per forward pass")
    parser.add_argument("--views", choices=VIEWS, default="plain", help="views of an image whose logits are averaged")
    parser.add_argument("--output", type=Path, required=True, help="evaluation.json to write")
    args = parser.parse_args()
    with told_in_one_line("evaluate"):
        if args.batch_size < 1:
            raise Refusal(f"--batch-size is {args.batch_size}; it must be at least 1")
        with process_group(args.device) as process:
            evaluate(args, process)


def evaluate(args: argparse.Namespace, process: Process) -> None:
    manifest = read_manifest(args.data)
    images, labels = (torch.tensor(array, device=process.device) for array in load_split(args.data, manifest, "test"))

    def evaluated(path: Path, views: str) -> dict[str, dict[str, Any]]:
        """The metrics by views; `plain` is always there."""
        classifier = models.load(path).place(process.device)
        if classifier.description["classes"] != manifest["classes"]:
            raise Refusal(
                f"{path} tells {classifier.description['classes']} classes apart, {manifest['dataset']} has {manifest['classes']}"
            )
        found = {}
        for name, rows in predictions(classifier, images, labels, args.batch_size, views, process).items():
            parts = gather(rows, process)
            if process.first:
                predicted, confidence, loss = in_order(parts, len(labels))
                found[name] = metrics.summarise(labels.cpu().numpy(), predicted, confidence, loss, manifest["classes"])
                if not math.isfinite(found[name]["loss"]):
                    raise Refusal(f"{path}: the loss on the test images is not finite; train the run with a lower learning_rate")
        return found

    # The last epoch's checkpoint holds the very weights of the model: the same file is evaluated once. Checkpoints are for curves,
    # beside the validation of each epoch, which sees every image once, as it is.
    final = evaluated(args.model, args.views)
    model_sha256 = file_sha256(args.model)
    done = {model_sha256: final}
    checkpoints = []
    for epoch, path in kept_weights(args.checkpoints):
        sha256 = file_sha256(path)
        if sha256 not in done:
            done[sha256] = evaluated(path, "plain")
        if process.first:
            checkpoints.append({"epoch": epoch} | of_plain(done[sha256]))
    if process.first:
        about = {"model_sha256": model_sha256, "data_sha256": manifest["sha256"], "dataset": manifest["dataset"], "views": args.views}
        result = about | final[args.views] | {"plain": of_plain(final), "checkpoints": checkpoints}
        atomic.write_text(args.output, json.dumps(result, indent=2, allow_nan=False) + "\n")
        print(f"evaluate: {args.output}: {accuracy_line(result)} on {result['n']:,} images, loss {result['loss']:.3f}")


def kept_weights(folder: Path | None) -> list[tuple[int, Path]]:
    """The epochs whose weights are kept, with their files.

    Raises:
        Refusal: there is an epoch twice.
    """
    named = ((re.fullmatch(r"epoch=([0-9]{3,9})\.safetensors", path.name), path) for path in sorted(folder.iterdir())) if folder else ()
    found = [(int(name[1]), path) for name, path in named if name]
    if len({epoch for epoch, _ in found}) < len(found):
        raise Refusal(f"{folder} has the weights of an epoch twice; remove the file that is not the training's")
    return found


def of_plain(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {key: found["plain"][key] for key in ("loss", "accuracy")}


@torch.no_grad()
def predictions(
    classifier: models.Classifier, images: Tensor, labels: Tensor, batch_size: int, views: str, process: Process
) -> dict[str, list[Tensor]]:
    """This process's share of the predictions, with one view of each image and with the views asked for.

    Returns:
        By views, tensors over its images, on the CPU: index in the test set, predicted class, its probability, cross-entropy.
    """
    classifier.eval()
    chunks = torch.arange(len(labels), device=process.device).split(batch_size)[process.rank :: process.world_size]
    rows: dict[str, list[tuple[Tensor, ...]]] = {"plain": [], views: []}
    for chunk in chunks:
        for name, logits in predict_with_views(classifier, images[chunk], views).items():
            logits = logits.double()
            confidence, predicted = logits.softmax(1).max(1)
            rows[name].append((chunk, predicted, confidence, F.cross_entropy(logits, labels[chunk].long(), reduction="none")))
    return {name: [torch.cat(column).cpu() for column in zip(*found, strict=True)] for name, found in rows.items()}


def predict_with_views(classifier: models.Classifier, images: Tensor, views: str) -> dict[str, Tensor]:
    """Logits (b, classes) of images, uint8 (b, h, w, 3), from one view of each, `plain`, and their mean over the views.

    Source: K. Jordan, cifar10-airbench, 2024, where `flip_shift` is `tta_level` 2.
    """
    plain = classifier(images)
    if views == "plain":
        return {"plain": plain}
    flipped = (plain + classifier(images.flip(2))) / 2
    if views == "flip":
        return {"plain": plain, "flip": flipped}
    height, width = images.shape[1:3]
    padded = pad(images, 1)
    up, down = ((classifier(part) + classifier(part.flip(2))) / 2 for part in (padded[:, :height, :width], padded[:, 2:, 2:]))
    return {"plain": plain, "flip_shift": flipped / 2 + (up + down) / 4}


def in_order(parts: Sequence[Sequence[Tensor]], n: int) -> list[np.ndarray]:
    """The processes' predictions put together in the order of the test set, without the indices."""
    indices, *columns = (torch.cat(column).numpy() for column in zip(*(part for part in parts if part), strict=True))
    order = np.argsort(indices)
    if not np.array_equal(indices[order], np.arange(n)):
        raise AssertionError(f"{len(indices)} predictions for {n} images")
    return [column[order] for column in columns]


if __name__ == "__main__":
    main()
