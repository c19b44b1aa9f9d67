"""Hugging Face's accelerate: it wraps model, optimizer and loader, and saves their state."""

from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional as F
from torch.utils.data import DataLoader

import digits
import launched

EPOCHS = 5
accelerator = Accelerator()
set_seed(0)
loader = DataLoader(digits.load("train"), 32, shuffle=True, drop_last=True)
model = digits.network()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

# Two folders in turn: a kill while one is written leaves the other.
done = launched.state / "epoch.txt"
first = 0
if done.exists():
    first = int(done.read_text())
    accelerator.load_state(str(launched.state / f"state-{first % 2}"), weights_only=True)

for epoch in range(first, EPOCHS):
    loader.set_epoch(epoch)
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    score = digits.accuracy(
        accelerator.unwrap_model(model), accelerator.process_index, accelerator.num_processes
    )
    launched.row(epoch=epoch + 1, accuracy=score)
    accelerator.save_state(str(launched.state / f"state-{(epoch + 1) % 2}"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        launched.save(done, partial(Path.write_text, data=str(epoch + 1)))
        print(f"epoch {epoch + 1}/{EPOCHS}: accuracy {score:.2%}", flush=True)
    if launched.stop_requested():
        launched.stop()

launched.result(accuracy=score)
accelerator.end_training()
