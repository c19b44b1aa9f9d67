"""Launched by test_train.py with a gradient compression and other keys of the run, as JSON.

A few steps of `steps.Stepper` on a linear model, whose weights rank 0 saves.
"""

import json
import sys

import torch
from torch import nn

from classifier.pixels.batches import share
from classifier.training.gradients import distributed
from classifier.training.losses import Weights, batch_weights
from classifier.training.steps import Stepper, average_batchnorm
from manynodes.experiment.config import Experiment
from manynodes.ranks.process_group import all_reduce, process_group

with process_group("cpu") as process:
    run = (
        Experiment.from_config({"experiment": "test"})
        .runs["run"]
        .with_values(
            nproc_per_node=process.world_size,
            weight_decay=0.0,
            precision="fp32",
            gradient_compression=sys.argv[2],
            **json.loads(sys.argv[3]),
        )
    )
    generator = torch.Generator().manual_seed(0)
    images, labels = (
        torch.randn(64, 12, generator=generator),
        torch.randint(0, 10, (64,), generator=generator),
    )
    model = nn.Linear(12, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    network, gradients = distributed(run, model, [(images[:2], labels[:2])])
    optimizer = torch.optim.SGD([{"params": model.parameters(), "rate": 1.0}], lr=0.1)
    stepper = Stepper(run, network, gradients, optimizer, process.device)
    sums = []
    of_classes = run.class_weights and torch.tensor(list(run.class_weights.values()))
    of_images = torch.rand(64, generator=generator) + 0.1 if sys.argv[4:] else None
    given = Weights(of_classes, of_images)
    # 11, 10 and 7 images: shares of different sizes on 2 and on 3 processes.
    batches = torch.arange(28).split([11, 10, 7])
    parts = [share(batch, process.rank, process.world_size) for batch in batches]
    weights_of = batch_weights(given, labels, batches, parts)
    for batch, mine, weights in zip(batches, parts, weights_of, strict=True):
        done = stepper.step(0.1, images[mine], labels[mine], len(batch), weights)
        sums.append(done[0])
    totals = all_reduce(torch.stack(sums))
    norms = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval())
    # As a layer of the user's own may keep them.
    norms[0].running_mean.resize_(1, 3, 1)
    norms[0].num_batches_tracked = None
    norms[0].register_buffer("of_one_running_var", torch.ones(()))
    for norm in norms[1:]:
        norm.running_var += process.rank
    average_batchnorm(norms, process.world_size)
    if process.first:
        torch.save(
            {
                "weight": model.weight.detach(),
                "bias": model.bias.detach(),
                "totals": totals,
                "variance": norms[1].running_var,
                "frozen": norms[2].running_var,
            },
            sys.argv[1],
        )
