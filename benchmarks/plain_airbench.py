"""A training script as researchers write one, for comparison: one process, one file.

The network and recipe of cifar10-airbench's legacy scripts (legacy/airbench94.py: whitening,
Nesterov SGD with fast BatchNorm biases, triangular schedule, lookahead, six views of each test
image), with widths 32, 64, 64, batches of 512 and 5 epochs, on the CPU.

python benchmarks/plain_airbench.py DATA-FOLDER prints, as JSON, the seconds of training and the
test accuracy.
"""

import json
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

WIDTHS, BATCH, EPOCHS = (32, 64, 64), 512, 5
MOMENTUM, BIAS_SCALE, SMOOTHING, WHITENING_EPOCHS = 0.85, 64.0, 0.2, 3
# Published for sums over batches of 1024 images, decoupled from the momentum.
KILOSTEP = 1024 * (1 + 1 / (1 - MOMENTUM))
LEARNING_RATE, WEIGHT_DECAY = 11.5 / KILOSTEP, 0.0153 * BATCH / KILOSTEP
MEAN = torch.tensor((0.4914, 0.4822, 0.4465)).view(1, 3, 1, 1)
STD = torch.tensor((0.2470, 0.2435, 0.2616)).view(1, 3, 1, 1)


def load(folder, split):
    images, labels = (
        torch.from_numpy(np.load(f"{folder}/{split}_{kind}.npy")) for kind in ("images", "labels")
    )
    normalised = (images.permute(0, 3, 1, 2).float() / 255 - MEAN) / STD
    return normalised.contiguous(memory_format=torch.channels_last), labels.long()


def conv(channels_in, channels_out):
    layer = nn.Conv2d(channels_in, channels_out, 3, padding="same", bias=False)
    nn.init.dirac_(layer.weight.data[:channels_in])
    return layer


def norm(channels):
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad = False
    return layer


def group(channels_in, channels_out):
    first = [conv(channels_in, channels_out), nn.MaxPool2d(2), norm(channels_out), nn.GELU()]
    return nn.Sequential(*first, conv(channels_out, channels_out), norm(channels_out), nn.GELU())


class Head(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) / 9


def network(images):
    whitening = nn.Conv2d(3, 24, 2)
    patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = vectors.T.reshape(-1, 3, 2, 2).flip(0) / torch.sqrt(
        values.flip(0).view(-1, 1, 1, 1) + 5e-4
    )
    whitening.weight.data = torch.cat((filters, -filters))
    whitening.weight.requires_grad = False
    whitening.bias.data.zero_()
    groups = [group(i, o) for i, o in zip((24, *WIDTHS), WIDTHS, strict=False)]
    net = nn.Sequential(
        whitening,
        nn.GELU(),
        *groups,
        nn.MaxPool2d(3),
        nn.Flatten(),
        Head(WIDTHS[-1], 10, bias=False),
    )
    return net.to(memory_format=torch.channels_last)


def batches(images, labels, epoch, flipped):
    """Mirrored in every other epoch, shifted by up to two pixels, shuffled; the last, smaller batch
    is dropped.
    """
    padded = F.pad(
        torch.where(flipped ^ bool(epoch % 2), images.flip(3), images), (2, 2, 2, 2), "reflect"
    )
    moved = torch.empty_like(images)
    shifts = torch.randint(0, 5, (len(images), 2))
    for down in range(5):
        for right in range(5):
            here = (shifts[:, 0] == down) & (shifts[:, 1] == right)
            moved[here] = padded[here, :, down : down + 32, right : right + 32]
    order = torch.randperm(len(images))
    for start in range(0, len(images) - BATCH + 1, BATCH):
        chosen = order[start : start + BATCH]
        yield moved[chosen], labels[chosen]


def schedule(step, steps):
    peak = int(0.23 * steps)
    if step < peak:
        return 0.2 + 0.8 * step / peak
    share = (step - peak) / (steps - peak)
    return 1 - share + 0.07 * share


def train(images, labels):
    net = network(images[:5000])
    steps = EPOCHS * (len(images) // BATCH)
    biases = [
        parameter
        for name, parameter in net.named_parameters()
        if parameter.requires_grad and parameter.dim() == 1 and name != "0.bias"
    ]
    rest = [
        parameter
        for parameter in net.parameters()
        if parameter.requires_grad and all(parameter is not bias for bias in biases)
    ]
    optimizer = torch.optim.SGD(
        [
            {
                "params": biases,
                "lr": LEARNING_RATE * BIAS_SCALE,
                "weight_decay": WEIGHT_DECAY / (LEARNING_RATE * BIAS_SCALE),
            },
            {"params": rest, "lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY / LEARNING_RATE},
        ],
        momentum=MOMENTUM,
        nesterov=True,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    slow = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    flipped = torch.rand(len(images), 1, 1, 1) < 0.5
    step = 0
    for epoch in range(EPOCHS):
        net[0].bias.requires_grad = epoch < WHITENING_EPOCHS
        net.train()
        for pixels, targets in batches(images, labels, epoch, flipped):
            F.cross_entropy(
                net(pixels), targets, label_smoothing=SMOOTHING, reduction="sum"
            ).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            step += 1
            if step % 5 == 0 or step == steps:
                keep = 1.0 if step == steps else 0.95**5 * (step / steps) ** 3
                look_ahead(net, slow, keep)
    return net


@torch.no_grad()
def look_ahead(net, slow, keep):
    for name, tensor in net.state_dict().items():
        if tensor.dtype.is_floating_point:
            slow[name].lerp_(tensor, 1 - keep)
            tensor.copy_(slow[name])


@torch.no_grad()
def six_views(net, images):
    """The predicted class of each image, a chunk at a time."""
    net.eval()
    for chunk in images.split(2000):
        padded = F.pad(chunk, (1, 1, 1, 1), "reflect")
        views = ((0.5, chunk), (0.25, padded[:, :, :32, :32]), (0.25, padded[:, :, 2:, 2:]))
        logits = sum(weight * (net(view) + net(view.flip(3))) / 2 for weight, view in views)
        yield logits.argmax(1)


def main():
    torch.manual_seed(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    images, labels = load(sys.argv[1], "train")
    start = time.perf_counter()
    net = train(images, labels)
    seconds = time.perf_counter() - start
    test_images, test_labels = load(sys.argv[1], "test")
    accuracy = (torch.cat(list(six_views(net, test_images))) == test_labels).float().mean().item()
    print(json.dumps({"seconds": seconds, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
