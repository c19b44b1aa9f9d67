"""A DDP program that finds its rank in SLURM_PROCID, its GPU with GPUS_PER_NODE."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(42, 3)

    def forward(self, x):
        return F.log_softmax(self.fc(x), dim=1)


def data(seed):
    x = torch.rand(320, 42, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.view(-1, 3, 14).sum(2).argmax(1))


def train(model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        if batch_idx % 10 == 0:
            done, total = batch_idx * len(data), len(train_loader.dataset)
            percent = 100.0 * batch_idx / len(train_loader)
            print(f"Train Epoch: {epoch} [{done}/{total} ({percent:.0f}%)]\tLoss: {loss:.6f}")


def test(model, device, test_loader):
    model.eval()
    test_loss, correct, total = 0, 0, len(test_loader.dataset)
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device))
            test_loss += F.nll_loss(output, target.to(device), reduction="sum").item()
            correct += output.argmax(1).eq(target.to(device)).sum().item()
    accuracy = f"{correct}/{total} ({100.0 * correct / total:.0f}%)"
    print(f"\nTest set: Average loss: {test_loss / total:.4f}, Accuracy: {accuracy}\n", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    args = parser.parse_args()
    torch.manual_seed(1)

    world_size = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["SLURM_PROCID"])
    gpus_per_node = int(os.environ["GPUS_PER_NODE"])
    local_rank = rank - gpus_per_node * (rank // gpus_per_node)
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world_size)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")

    train_loader = DataLoader(data(0), batch_size=64, shuffle=True)
    test_loader = DataLoader(data(1), batch_size=1000)
    model = DistributedDataParallel(Net().to(device))
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
