"""What the programs here share: the staged digits, a small network, and exact evaluation."""

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset


def load(split: str) -> TensorDataset:
    """The images (n, 3, 32, 32) and labels of `train` or `test` that the workflow has staged."""
    folder = Path(os.environ["LAUNCH_DATA"])
    images = torch.from_numpy(np.load(folder / f"{split}_images.npy")).permute(0, 3, 1, 2) / 255
    labels = torch.from_numpy(np.load(folder / f"{split}_labels.npy")).long()
    return TensorDataset(images, labels)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(),
        nn.Linear(1024, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, rank: int, world_size: int) -> float:
    """Of the test images, each counted once: every rank takes its own, and the counts are added.

    A DistributedSampler would repeat images until every rank has as many as the others.
    """
    images, labels = load("test").tensors
    mine = slice(rank, None, world_size)
    device = next(model.parameters()).device
    right = (model(images[mine].to(device)).argmax(1) == labels[mine].to(device)).sum().double()
    if world_size > 1:
        dist.all_reduce(right)
    return right.item() / len(labels)
