"""A Trainer class that torchrun starts: it saves after every epoch, and continues."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, epochs: int) -> None:
        self.epochs, self.epoch, self.chk_path = epochs, 0, Path()
        self.local_rank = int(os.environ.get("LOCAL_RANK", -1))
        if self.local_rank < 0:
            raise RuntimeError("Could not find LOCAL_RANK")
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank)
        torch.manual_seed(0)
        self.model = nn.Linear(42, 2).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def load_checkpoint(self, path: Path) -> None:
        self.chk_path = path
        if path.exists():
            saved = torch.load(path, map_location=self.device)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.epoch = saved["epoch"]
            print(f"continues after epoch {self.epoch}", flush=True)

    def save_checkpoint(self) -> None:
        if dist.get_rank() == 0:
            content = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            new = self.chk_path.with_suffix(".new")
            torch.save(content | {"epoch": self.epoch}, new)
            new.replace(self.chk_path)

    def dataset(self) -> DataLoader:
        images = torch.rand(512, 42)
        labels = (images[:, :21].sum(1) > images[:, 21:].sum(1)).long()
        train = TensorDataset(images, labels)
        return DataLoader(train, batch_size=32, sampler=DistributedSampler(train))

    def train(self) -> None:
        loader = self.dataset()
        ddp = nn.parallel.DistributedDataParallel(self.model)
        while self.epoch < self.epochs:
            loader.sampler.set_epoch(self.epoch)
            for images, labels in loader:
                output = ddp(images.to(self.device))
                loss = nn.functional.cross_entropy(output, labels.to(self.device))
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.epoch += 1
            self.save_checkpoint()
            if dist.get_rank() == 0:
                print(f"epoch {self.epoch}: loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    trainer = Trainer(parser.parse_args().epochs)
    trainer.load_checkpoint(Path("checkpoint.pt"))
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
