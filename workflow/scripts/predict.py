"""Predict the classes of images with the weights of a finished run.

Writes a CSV table: image, predicted class, its probability, then the probability of each class. An
image is prepared as in the import of its data set: upright, resized and cropped about its centre.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Python looks there by itself, unless a site has set PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from classifier.evaluation.views import predict_with_views
from classifier.models import weights
from classifier.models.classifier import USUAL, Classifier
from classifier.pixels.batches import centred
from manynodes.base.errors import Refusal, error_line, spreadsheet_text, told_in_one_line
from manynodes.data.datasets import DATASETS
from manynodes.data.user.declaration import SUFFIXES, is_image, is_wanted
from manynodes.data.user.pictures import Unreadable, read_image
from manynodes.data.walk import walk
from manynodes.ranks.device import compute_exactly, told_when_full
from manynodes.reporting.results import VIEWS, read_about
from manynodes.reporting.sums import refuse_changed

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model.safetensors of a run")
    add("--views", choices=VIEWS, default="plain", help="views of each image, as in evaluate")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--trust-code", action="store_true", help="run the Python code of a user's network")
    add("images", type=Path, nargs="+", help="image files, or folders of them")
    args = parser.parse_args()
    with told_in_one_line("predict"), told_when_full("leave out --device cuda"):
        if args.device == "cuda" and not torch.cuda.is_available():
            raise Refusal("--device cuda: torch sees no GPU here; leave it out")
        if args.model.is_dir():
            raise Refusal(f"--model {args.model} is a folder; give model.safetensors in it")
        compute_exactly()
        classifier = weights.load(args.model, "any" if args.trust_code else None)
        classifier.move_to(torch.device(args.device)).eval()
        if not write_table(classifier, args):
            sys.exit(1)


def write_table(classifier: Classifier, args: argparse.Namespace) -> bool:
    """Write the table to stdout.

    Returns:
        Whether every image could be read; the others are named on stderr.
    """
    names = class_names(classifier, about_of(args.model))
    table = csv.writer(sys.stdout, lineterminator="\n")
    header = [["image", "predicted", "probability", *map(spreadsheet_text, names)]]
    good = True
    pending: list[tuple[Path, np.ndarray]] = []
    paths = [path for given in args.images for path in files(given)]
    for number, path in enumerate(paths, 1):
        try:
            pending.append((path, pixels(classifier, path)))
        except Unreadable as error:
            print(f"predict: {error_line(Refusal(f'{path}: {error}'))}", file=sys.stderr)
            good = False
        if pending and (len(pending) == BATCH or number == len(paths)):
            table.writerows([*header, *rows(classifier, pending, names, args.views)])
            header, pending = [], []
    return good


def files(path: Path) -> list[Path]:
    """The file, or those in the folder that an import would take.

    Raises:
        Refusal: there is none.
    """
    if not path.is_dir():
        return [path]
    walked = walk(path, is_wanted, [])
    found = [folder / name for folder, names in walked for name in names if is_image(name)]
    if not found:
        raise Refusal(f"{path} has no images; their names end with {', '.join(SUFFIXES)}")
    return found


def pixels(classifier: Classifier, path: Path) -> np.ndarray:
    """An image as the data set stores it, uint8 (h, w, c)."""
    height, width, channels = classifier.description.get("image_shape", USUAL)
    size = classifier.description.get("stored_size", (height, width))
    if classifier.description.get("dtype", "uint8") != "uint8":
        raise Refusal("the network was trained on floating-point arrays, not on image files")
    if channels not in (1, 3):
        raise Refusal(f"the network takes {channels} channels, an image file has 1 or 3")
    return read_image(
        path, (size[0], size[1]), channels,
        lambda text: print(f"predict: warning: {path}: {text}", file=sys.stderr),
        classifier.description.get("jpeg_scaling", False),
    )  # fmt: skip


def rows(
    classifier: Classifier, images: Sequence[tuple[Path, np.ndarray]], names: list[str], views: str
) -> Iterator[list[str]]:
    batch = torch.from_numpy(np.stack([image for _, image in images])).to(classifier.mean.device)
    with torch.no_grad():
        size = classifier.description.get("test_size", batch.shape[1:3])
        logits = predict_with_views(classifier, centred(batch, size), views)[views]
    for (path, _), probabilities in zip(images, logits.double().softmax(1).tolist(), strict=True):
        best = int(np.argmax(probabilities))
        yield [
            spreadsheet_text(str(path)),
            spreadsheet_text(names[best]),
            *(f"{value:.6f}" for value in (probabilities[best], *probabilities)),
        ]


def about_of(model: Path) -> dict[str, Any]:
    """What run.json, if it lies beside the weights, says of their run.

    Raises:
        Refusal: it is damaged, or its training has written other weights.
    """
    try:
        about = read_about(model.with_name("run.json"))
    except FileNotFoundError:
        return {}
    refuse_changed(model.parent, about["files"], [model.name])
    return about


def class_names(classifier: Classifier, about: Mapping[str, Any]) -> list[str]:
    """The names of the classes: from the weights, or of the built-in data set of their run."""
    classes = classifier.description["classes"]
    names = classifier.description.get("class_names")
    if not names:
        dataset = about["config"].get("dataset") if about else None
        names = DATASETS[dataset].class_names if dataset in DATASETS else ()
    return list(names) if len(names) == classes else [str(label) for label in range(classes)]


if __name__ == "__main__":
    main()
