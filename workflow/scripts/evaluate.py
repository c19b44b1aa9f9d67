"""Evaluate a trained run on the test images, from its files alone, on any device and any number of processes.

Every test image is counted exactly once. The images are cut into chunks that depend on --batch-size alone, and the chunks are
dealt to the processes, so that each image meets the same arithmetic however many processes there are.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ddp import atomic, metrics, models
from ddp.batches import pad
from ddp.data_folder import damaged_files, file_sha256, load_split, read_manifest
from ddp.errors import Refusal, told_in_one_line
from ddp.process_group import Process, gather, process_group
from ddp.staging import damaged_source

VIEWS = ("plain", "flip", "flip_shift")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the data folder, with its manifest")
    parser.add_argument("--model", type=Path, required=True, help="model.safetensors of the run")
    parser.add_argument("--checkpoints", type=Path, help="folder with epoch=NNN.safetensors")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--batch-size", type=int, default=500, help="images per forward pass")
    parser.add_argument("--views", choices=VIEWS, default="plain", help="what each image is judged by, see config/README.md, test_views")
    parser.add_argument("--output", type=Path, required=True, help="evaluation.json to write")
    args = parser.parse_args()
    with told_in_one_line("evaluate"):
        if args.batch_size < 1:
            raise Refusal(f"--batch-size is {args.batch_size}; it must be at least 1")
        with process_group(args.device) as process:
            evaluate(args, process)


def evaluate(args: argparse.Namespace, process: Process) -> None:
    manifest = read_manifest(args.data)
    # What is read, and no more: for a small network, hashing the training images too would take 3 % of the time.
    files = {name: file for name, file in manifest["files"].items() if name.startswith("test_")}
    if damaged := damaged_files(args.data, manifest | {"files": files}):
        raise Refusal(damaged_source(args.data, damaged))
    images, labels = (torch.tensor(array, device=process.device) for array in load_split(args.data, "test"))

    def evaluated(path: Path) -> dict[str, Any]:
        classifier = models.load(path).place(process.device)
        if classifier.description["classes"] != manifest["classes"]:
            raise Refusal(
                f"{path} tells {classifier.description['classes']} classes apart, {manifest['dataset']} has {manifest['classes']}"
            )
        parts = gather(predictions(classifier, images, labels, args.batch_size, args.views, process), process)
        if not process.first:
            return {}
        predicted, confidence, loss = in_order(parts, len(labels))
        return metrics.summarise(labels.cpu().numpy(), predicted, confidence, loss, manifest["classes"])

    # The last epoch's checkpoint holds the very weights of the model: the same file is evaluated once.
    done = {file_sha256(args.model): evaluated(args.model)}
    checkpoints = []
    for path in sorted(args.checkpoints.glob("epoch=[0-9][0-9][0-9]*.safetensors")) if args.checkpoints else []:
        sha256 = file_sha256(path)
        if sha256 not in done:
            done[sha256] = evaluated(path)
        checkpoints.append({"epoch": int(path.stem.removeprefix("epoch="))} | {k: done[sha256].get(k) for k in ("loss", "accuracy")})
    if process.first:
        model_sha256 = file_sha256(args.model)
        about = {"model_sha256": model_sha256, "data_sha256": manifest["sha256"], "dataset": manifest["dataset"], "views": args.views}
        result = about | done[model_sha256] | {"checkpoints": checkpoints}
        atomic.write_text(args.output, json.dumps(result, indent=2) + "\n")
        print(f"evaluate: {args.output}: accuracy {result['accuracy']:.2%}, loss {result['loss']:.3f} on {result['n']:,} images")


@torch.no_grad()
def predictions(
    classifier: models.Classifier, images: Tensor, labels: Tensor, batch_size: int, views: str, process: Process
) -> list[np.ndarray]:
    """This process's share of the predictions.

    Returns:
        Arrays over its images: index in the test set, predicted class, its probability, cross-entropy.
    """
    classifier.eval()
    chunks = torch.arange(len(labels), device=process.device).split(batch_size)[process.rank :: process.world_size]
    rows = []
    for chunk in chunks:
        logits = judged(classifier, images[chunk], views).double()
        confidence, predicted = logits.softmax(1).max(1)
        rows.append((chunk, predicted, confidence, F.cross_entropy(logits, labels[chunk].long(), reduction="none")))
    return [torch.cat(column).cpu().numpy() for column in zip(*rows, strict=True)]


def judged(classifier: models.Classifier, images: Tensor, views: str) -> Tensor:
    """Logits (b, classes) of images, uint8 (b, h, w, 3), from one view of each or the mean over more.

    Source: K. Jordan, cifar10-airbench, 2024, where `flip_shift` is `tta_level` 2.
    """
    if views == "plain":
        return classifier(images)
    if views == "flip":
        return (classifier(images) + classifier(images.flip(2))) / 2
    height, width = images.shape[1:3]
    padded = pad(images, 1)
    up, down = padded[:, :height, :width], padded[:, 2:, 2:]
    return judged(classifier, images, "flip") / 2 + (judged(classifier, up, "flip") + judged(classifier, down, "flip")) / 4


def in_order(parts: Sequence[Sequence[np.ndarray]], n: int) -> list[np.ndarray]:
    """The processes' predictions put together in the order of the test set, without the indices."""
    indices, *columns = (np.concatenate(column) for column in zip(*(part for part in parts if part), strict=True))
    order = np.argsort(indices)
    if not np.array_equal(indices[order], np.arange(n)):
        raise AssertionError(f"{len(indices)} predictions for {n} images")
    return [column[order] for column in columns]


if __name__ == "__main__":
    main()
