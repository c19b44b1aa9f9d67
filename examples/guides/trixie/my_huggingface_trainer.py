"""A loop for `accelerate launch`: model, optimizer and loader are wrapped."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
torch.manual_seed(0)
images = torch.rand(1024, 42)
train = TensorDataset(images, (images[:, :21].sum(1) > images[:, 21:].sum(1)).long())
model = nn.Linear(42, 2)
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.Adam(model.parameters(), 0.01),
    DataLoader(train, 64, shuffle=True),
)
for epoch in range(5):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
accelerator.end_training()
