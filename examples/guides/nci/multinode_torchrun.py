"""A DDP loop that finds all it needs in the variables of torchrun."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup() -> torch.device:
    # MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK are set.
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def main(epochs: int = 5) -> None:
    device = setup()
    torch.manual_seed(0)
    images = torch.rand(512, 42)
    train = TensorDataset(images, (images[:, :21].sum(1) > images[:, 21:].sum(1)).long())
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(42, 2).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"Epoch [{epoch + 1}/{epochs}], Loss: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
