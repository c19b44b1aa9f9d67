"""Multi-node training in tasks of srun, with the data in $SLURM_TMPDIR/data."""

import argparse
import logging
import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--batch-size", type=int, default=128, help="per process")
    args = parser.parse_args()

    rank, world_size, local_rank = setup()
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    logging.basicConfig(level=logging.INFO, format=f"[{rank}/{world_size}] %(name)s - %(message)s")
    logger = logging.getLogger(__name__)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

    dataset_path = Path(os.environ.get("SLURM_TMPDIR", ".")) / "data"
    train_dataset, valid_dataset = make_datasets(dataset_path)
    train_sampler = DistributedSampler(train_dataset, shuffle=True)
    valid_sampler = DistributedSampler(valid_dataset, shuffle=False)
    train_dataloader = DataLoader(train_dataset, args.batch_size, sampler=train_sampler)
    valid_dataloader = DataLoader(valid_dataset, args.batch_size, sampler=valid_sampler)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        for x, y in train_dataloader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        val_loss, val_accuracy = validation_loop(model, valid_dataloader, device)
        if rank == 0:
            logger.info(f"Epoch {epoch}: Val loss: {val_loss:.3f} accuracy: {val_accuracy:.2%}")
    torch.distributed.destroy_process_group()


@torch.no_grad()
def validation_loop(
    model: nn.Module, dataloader: DataLoader, device: torch.device
) -> tuple[float, float]:
    loss, correct, n_samples = sums = torch.zeros(3, device=device)
    for x, y in dataloader:
        logits = model(x.to(device))
        loss += F.cross_entropy(logits, y.to(device))
        correct += logits.argmax(-1).eq(y.to(device)).sum()
        n_samples += len(y)
    torch.distributed.all_reduce(sums)
    return loss.item(), (correct / n_samples).item()


def setup() -> tuple[int, int, int]:
    rank = int(os.environ["SLURM_PROCID"])
    local_rank = int(os.environ["SLURM_LOCALID"])
    world_size = int(os.environ["SLURM_NTASKS"])
    torch.distributed.init_process_group(
        backend="nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        timeout=timedelta(seconds=60),
        world_size=world_size,
        rank=rank,
    )
    return rank, world_size, local_rank


def make_datasets(dataset_path: Path) -> list:
    points = torch.from_numpy(np.loadtxt(dataset_path / "points.csv", np.float32, delimiter=","))
    dataset = TensorDataset(points[:, :2], points[:, 2].long())
    n_valid = len(points) // 10
    split = (len(points) - n_valid, n_valid)
    return random_split(dataset, split, torch.Generator().manual_seed(42))


if __name__ == "__main__":
    main()
