"""One task per process, numbered by Slurm: SLURM_PROCID instead of torchrun.

Outside Slurm the launcher's RANK takes its place.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import digits
import launched

EPOCHS = 5
rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
world_size = int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])
# MASTER_ADDR and MASTER_PORT come from the workflow; a port of one's own may be in use.
dist.init_process_group("gloo", rank=rank, world_size=world_size)

torch.manual_seed(0)
images, labels = digits.load("train").tensors
model = digits.network()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
first, saved = 0, launched.state / "last.pt"
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"]
ddp = DistributedDataParallel(model)

for epoch in range(first, EPOCHS):
    # The same permutation on every rank; each takes its own part of it.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    for batch in order[: len(order) // (64 * world_size) * 64 * world_size].split(64 * world_size):
        mine = batch[rank::world_size]
        loss = F.cross_entropy(ddp(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    score = digits.accuracy(model, rank, world_size)
    launched.row(epoch=epoch + 1, accuracy=score)
    if rank == 0:
        content = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1,
        }  # fmt: skip
        launched.save(saved, partial(torch.save, content))
        print(f"epoch {epoch + 1}/{EPOCHS}: accuracy {score:.2%}", flush=True)
    if launched.stop_requested():
        launched.stop()

launched.result(accuracy=score)
dist.destroy_process_group()
