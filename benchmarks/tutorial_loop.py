"""The usual tutorial loop, the peer of `throughput`: a DataLoader over PIL images,
DistributedDataParallel, metrics reduced in every step.

A program, so that its process group is not also ours: python benchmarks/tutorial_loop.py
DATA-FOLDER BATCH. For each line on stdin, a JSON object with `mode` (see `Tutorial.seconds`),
`workers` (of the DataLoader) and `steps`, it prints the seconds of a step as a line.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split
from torchvision import transforms
from torchvision.models import resnet18
from tqdm import tqdm

from manynodes.data.folder import DataFolder

# Untimed steps at the start: the workers have started, and wait with as many batches as a
# DataLoader lets them be ahead, 2 each.
FIRST_STEPS = 4


class PilImages(Dataset):
    """As torchvision.datasets.CIFAR10 does it: an array in memory, of which each item is made a PIL
    image and then a tensor.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, [int(label) for label in labels]
        self.transform = transforms.ToTensor()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """A float image (3, h, w), 0 to 1, and its label."""
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


class Tutorial:
    """The loop's network, optimizer and data, in a process group of one.

    Args:
        batch: images in a step.
    """

    def __init__(self, data: Path, batch: int) -> None:
        images, labels = DataFolder.read(data).split("train")
        held_in = int(0.9 * len(images))
        self.dataset, _ = random_split(
            PilImages(images, labels),
            (held_in, len(images) - held_in),
            torch.Generator().manual_seed(42),
        )
        self.batch = batch
        self.model = nn.parallel.DistributedDataParallel(resnet18(num_classes=10))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4, weight_decay=1e-4)
        self.model.train()

    def seconds(self, mode: str, workers: int, steps: int) -> float:
        """Mean duration of a step, in seconds.

        Args:
            mode: `loop`, the whole; or parts of it: `data` (the DataLoader alone), `bare` (network
                and optimizer on a batch in memory), `metrics` (that, and the metrics).
        """
        sampler: DistributedSampler = DistributedSampler(self.dataset, shuffle=True)
        loader = DataLoader(
            self.dataset, self.batch, num_workers=workers, shuffle=False, sampler=sampler
        )
        batches = iter(
            loader if mode in ("loop", "data") else [next(iter(loader))] * (FIRST_STEPS + steps)
        )
        bar = tqdm(total=len(loader), disable=not sys.stdout.isatty())
        for _ in range(FIRST_STEPS):
            self.step(next(batches), mode, bar)
        start = time.perf_counter()
        for _ in range(steps):
            self.step(next(batches), mode, bar)
        return (time.perf_counter() - start) / steps

    def step(self, batch: Iterable[Tensor], mode: str, bar: tqdm) -> None:
        if mode == "data":
            return
        x, y = (item.to("cpu") for item in batch)
        logits = self.model(x)
        local_loss = F.cross_entropy(logits, y)
        self.optimizer.zero_grad()
        local_loss.backward()
        self.optimizer.step()
        if mode == "bare":
            return
        correct = logits.detach().argmax(-1).eq(y).sum().clone()
        dist.reduce(correct, dst=0, op=dist.ReduceOp.SUM)
        samples = torch.as_tensor(logits.shape[0])
        dist.reduce(samples, dst=0, op=dist.ReduceOp.SUM)
        loss = local_loss.detach().clone()
        dist.reduce(loss, dst=0, op=dist.ReduceOp.SUM)
        loss.div_(dist.get_world_size())
        accuracy = correct / samples
        bar.update(1)
        bar.set_postfix(loss=loss.item(), accuracy=accuracy.item())


def main() -> None:
    data, batch = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    tutorial = Tutorial(data, batch)
    for line in sys.stdin:
        print(tutorial.seconds(**json.loads(line)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
