"""Train the network of network.py to continue a text, with DDP.

Every step draws its windows from the seed and its number alone, so that an interrupted training
ends like an uninterrupted one, and all geometries see the same windows.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import launched
import network

p = launched.parameters()
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", launched.local_rank)
    torch.cuda.set_device(device)

torch.manual_seed(p["seed"])
model = network.made(p).to(device)
optimizer = torch.optim.AdamW(model.parameters(), p["learning_rate"])
data = network.text("train")
state, first, total = launched.state / "last.pt", 0, 0.0
if state.exists():
    saved = torch.load(state, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first, total = saved["step"], saved["total"]
ddp = DistributedDataParallel(model)

for step in range(first + 1, p["steps"] + 1):
    draw = torch.Generator().manual_seed(p["seed"] * 1_000_003 + step)
    starts = torch.randint(len(data) - p["context"], (p["batch_size"],), generator=draw)
    mine = starts[launched.rank :: launched.world_size]
    windows = torch.stack([data[start : start + p["context"] + 1] for start in mine]).to(device)
    logits = ddp(windows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach() / launched.world_size
    dist.all_reduce(mean)
    total += mean.item()
    if step % p["save_every"] == 0 or step == p["steps"]:
        if launched.rank == 0:
            launched.row(step=step, train_loss=total / step)
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                       "step": step, "total": total}  # fmt: skip
            launched.save(state, partial(torch.save, content))
        if launched.stop_requested():
            launched.stop()

if launched.rank == 0:
    launched.save("model.pt", partial(torch.save, model.state_dict()))
dist.destroy_process_group()
