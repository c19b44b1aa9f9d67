"""Time to 94 % on a GPU, beside the published figures: python benchmarks/gpu.py DATA-FOLDER
OUTPUT-FOLDER

Trains a configuration with many seeds, evaluates each, and prints and writes gpu.json: mean time
and accuracy, throughput, and its share of the device's measured rate of matrix products. The first
training is the warm-up and does not count. If the device of the configuration is `cpu`, the CPU is
measured.
"""

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "workflow" / "scripts"))

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from training import evaluate, read_experiment, seeds_of, train  # noqa: E402

from classifier.models.classifier import build  # noqa: E402
from manynodes.base.cpus import usable_cpus  # noqa: E402
from manynodes.base.provenance import git_state, versions  # noqa: E402
from manynodes.data.folder import DataFolder  # noqa: E402
from manynodes.experiment.config import Run  # noqa: E402

# On one A100, from the README of cifar10-airbench.
PUBLISHED = {
    "airbench94_muon": {"accuracy": 0.9401, "seconds": 2.59},
    "airbench96_faster": {"accuracy": 0.96, "seconds": 27.3},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="results/data/cifar10, fetched before")
    parser.add_argument("output", type=Path, help="folder for gpu.json and the trainings")
    parser.add_argument(
        "--configfile",
        type=Path,
        default=ROOT / "config" / "airbench94.yaml",
        help="of one run; its seed is not used",
    )
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    experiment = read_experiment(args.configfile)
    run, *more = experiment.runs.values()
    if more or args.seeds < 2:
        parser.error(
            f"{args.configfile} must be one run, not {len(more) + 1}; and --seeds at least 2"
        )
    cpus = usable_cpus()
    train(run, args.data, args.output / "warm-up", cpus)
    found = []
    for seeded in seeds_of(run, args.seeds):
        folder = args.output / f"seed~{seeded.seed}"
        about = train(seeded, args.data, folder, cpus)
        accuracy = evaluate(folder, args.data, experiment.config["test_views"])["accuracy"]
        found.append(
            {"seed": seeded.seed, "seconds": about["seconds"], "accuracy": accuracy}
            | throughput(folder)
        )
    computed = run.with_values(precision=about["computed_in"])
    result = summary(computed, found, DataFolder.read(args.data).classes)
    (args.output / "gpu.json").write_text(json.dumps(result | {"runs": found}, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def throughput(folder: Path) -> dict[str, float]:
    """Images per second of a training, the median of its epochs."""
    header, *rows = (line.split(",") for line in (folder / "metrics.csv").read_text().splitlines())
    column = header.index("images_per_second")
    return {"images_per_second": median(float(row[column]) for row in rows)}


def summary(run: Run, found: list[dict[str, Any]], classes: int) -> dict[str, Any]:
    """Means over the runs, and the network's share of the device's rate."""
    device = torch.device("cuda" if run.device != "cpu" and torch.cuda.is_available() else "cpu")
    rate, flops = matrix_rate(device, DTYPES[run.precision]), flops_per_image(run, classes)
    speed = median(one["images_per_second"] for one in found)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "git": git_state(),
        "versions": versions(),
        "published": PUBLISHED,
        "config": json.loads(run.to_json()),
        "accuracy": {
            "mean": mean(one["accuracy"] for one in found),
            "standard_deviation": stdev(one["accuracy"] for one in found),
        },
        "seconds": {
            "mean": mean(one["seconds"] for one in found),
            "standard_deviation": stdev(one["seconds"] for one in found),
        },
        "images_per_second": speed,
        "flops_per_image": flops,
        "matrix_flops_per_second": rate,
        "share_of_matrix_rate": speed * flops / rate,
    }


def flops_per_image(run: Run, classes: int) -> float:
    """Floating-point operations of an image's forward and backward pass, counted by torch."""
    classifier = build(run.model, run.widths, classes)
    images = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(classifier(images), torch.zeros(2, dtype=torch.long)).backward()
    return counter.get_total_flops() / 2


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of square matrix products on the device: best of ten."""
    size = 8192 if device.type == "cuda" else 1024
    matrix = torch.randn(size, size, device=device).to(dtype)
    seconds = []
    for _ in range(10):
        finish(device)
        start = time.perf_counter()
        matrix @ matrix
        finish(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def finish(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
