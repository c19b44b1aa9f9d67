"""A DDP loop with DataLoader and DistributedSampler, started by torchrun.

It saves its state after every epoch, stops when it is asked to, and continues where it was.
"""

import argparse
import os
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import digits
import launched

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--batch-size", type=int, default=32, help="per process")
args = parser.parse_args()

# torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

torch.manual_seed(0)
train = digits.load("train")
sampler = DistributedSampler(train)
loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
model = digits.network().to(device)
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
first = 0
if (launched.state / "last.pt").exists():
    saved = torch.load(launched.state / "last.pt", map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"]
ddp = DistributedDataParallel(model)

for epoch in range(first, args.epochs):
    sampler.set_epoch(epoch)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in loader:
        loss = F.cross_entropy(ddp(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(labels), len(labels)], device=device)
    dist.all_reduce(total)
    score = digits.accuracy(model, rank, world_size)
    if rank == 0:
        launched.row(epoch=epoch + 1, loss=(total[0] / total[1]).item(), accuracy=score)
        state = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1,
        }  # fmt: skip
        launched.save(launched.state / "last.pt", partial(torch.save, state))
        print(f"epoch {epoch + 1}/{args.epochs}: accuracy {score:.2%}", flush=True)
    # Every process waits here until rank 0 has saved.
    if launched.stop_requested():
        launched.stop()

if rank == 0:
    launched.save("model.pt", partial(torch.save, model.state_dict()))
    launched.result(accuracy=digits.accuracy(model, 0, 1))
dist.destroy_process_group()
