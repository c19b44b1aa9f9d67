"""The perplexity of the trained network on the text that was held out, each byte once."""

import math

import torch
from torch.nn import functional as F

import launched
import network

p = launched.parameters()
model = network.made(p).eval()
model.load_state_dict(torch.load(launched.outputs / "model.pt"))
data, context = network.text("test"), p["context"]
windows = data[: (len(data) - 1) // context * context + 1].unfold(0, context + 1, context)
loss = 0.0
with torch.no_grad():
    for batch in windows.split(64):
        logits = model(batch[:, :-1])
        loss += F.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
        ).item()
loss /= windows.shape[0] * context
launched.result(
    characters=windows.shape[0] * context,
    test_loss=loss,
    perplexity=math.exp(loss),
    bits=loss / math.log(2),
)
