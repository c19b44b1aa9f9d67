"""Evaluate the weights that loop.py has written."""

import torch

import digits
import launched

model = digits.network()
model.load_state_dict(torch.load(launched.outputs / "model.pt"))
images, labels = digits.load("test").tensors
with torch.no_grad():
    logits = model(images)
pairs = labels * 10 + logits.argmax(1)
launched.result(
    confusion_matrix=torch.bincount(pairs, minlength=100).reshape(10, 10).tolist(),
    test_accuracy=(logits.argmax(1) == labels).double().mean().item(),
    test_loss=torch.nn.functional.cross_entropy(logits, labels).item(),
)
