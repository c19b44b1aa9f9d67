"""A Trainer class: it finds its rank, loads a checkpoint, trains, and saves checkpoints."""

import argparse
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import digits
import launched


class Trainer:
    def __init__(self, checkpoint: Path, epochs: int, batch_size: int) -> None:
        self.checkpoint, self.epochs, self.epoch = checkpoint, epochs, 0
        dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.manual_seed(0)
        data = digits.load("train")
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size, sampler=self.sampler, drop_last=True)
        self.model = digits.network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.003)
        if checkpoint.exists():
            self.load_checkpoint()
        self.ddp = DistributedDataParallel(self.model)

    def load_checkpoint(self) -> None:
        saved = torch.load(self.checkpoint)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.epoch = saved["epoch"]

    def save_checkpoint(self) -> None:
        if self.rank != 0:  # all ranks have the same model; several writers would damage the file
            return
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
        }
        launched.save(self.checkpoint, partial(torch.save, content))

    def train_step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        loss = F.cross_entropy(self.ddp(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def train(self) -> None:
        while self.epoch < self.epochs:
            self.sampler.set_epoch(self.epoch)
            for images, labels in self.loader:
                self.train_step(images, labels)
            self.epoch += 1
            score = digits.accuracy(self.model, self.rank, self.world_size)
            launched.row(epoch=self.epoch, accuracy=score)
            self.save_checkpoint()
            if self.rank == 0:
                print(f"epoch {self.epoch}/{self.epochs}: accuracy {score:.2%}", flush=True)
            if launched.stop_requested():
                launched.stop()
        launched.result(accuracy=digits.accuracy(self.model, self.rank, self.world_size))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    Trainer(launched.state / "checkpoint.pt", args.epochs, args.batch_size).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
