"""A DDP loop that torch.distributed.launch starts, with the local rank as an option."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
parser.add_argument("--batch_size", type=int, default=128)
parser.add_argument("--learning_rate", type=float, default=5e-5)
args = parser.parse_args()

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", args.local_rank) if cuda else torch.device("cpu")
torch.manual_seed(0)
images = torch.rand(1024, 42)
train = TensorDataset(images, (images[:, :21].sum(1) > images[:, 21:].sum(1)).long())
sampler = DistributedSampler(train)
loader = DataLoader(train, args.batch_size, sampler=sampler)
model = nn.parallel.DistributedDataParallel(nn.Linear(42, 2).to(device))
optimizer = torch.optim.Adam(model.parameters(), args.learning_rate)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
