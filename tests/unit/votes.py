"""Launched by test_vote.py: votes of two ranks; each prints the result."""

import json
import math
from dataclasses import asdict

import torch
from torch import Tensor, nn

from classifier.training.gradients import distributed
from classifier.training.steps import Stepper
from manynodes.experiment.config import Experiment
from manynodes.ranks.process_group import process_group
from manynodes.ranks.stopping import DEADLINE
from manynodes.ranks.vote import Vote

FINE, BAD = torch.tensor(1.0), torch.tensor(math.nan)


class BadOn(nn.Linear):
    """A layer whose gradient is not finite on one rank, in the second step."""

    def __init__(self, bad: bool) -> None:
        super().__init__(12, 10)
        self.steps = 0
        self.weight.register_hook(
            lambda gradient: gradient * math.inf if bad and self.steps == 3 else gradient
        )

    def forward(self, images: Tensor) -> Tensor:
        # The first is `distributed`'s own.
        self.steps += 1
        return super().forward(images)


with process_group("cpu") as process:
    first, second = process.rank == 0, process.rank == 1

    def vote(
        stop: str | None = None, save: bool = False, loss: Tensor = FINE, gradient: Tensor = FINE
    ) -> dict:
        return asdict(Vote(process, stop, save, loss, gradient).verdict())

    found = {
        "nothing": vote(),
        "stop on 1": vote(stop=DEADLINE if second else None),
        "stop on both": vote(stop="SIGUSR1" if first else "SIGTERM"),
        "save on 0": vote(save=first),
        "loss of 1": vote(loss=BAD if second else FINE),
        "infinite loss of both": vote(loss=torch.tensor(math.inf)),
        "gradient of 1, and 0 stops": vote(
            stop="SIGTERM" if first else None, gradient=BAD if second else FINE
        ),
    }
    run = (
        Experiment.from_config({"experiment": "test"})
        .runs["run"]
        .with_values(
            nproc_per_node=process.world_size,
            precision="fp32",
        )
    )
    torch.manual_seed(process.rank)
    images, labels = torch.randn(8, 12), torch.randint(0, 10, (8,))
    model = BadOn(second)
    network, gradients = distributed(run, model, [(images[:2], labels[:2])])
    optimizer = torch.optim.SGD([{"params": model.parameters(), "rate": 1.0}], lr=0.1)
    stepper = Stepper(run, network, gradients, optimizer, process.device)
    for number in (1, 2, 3):
        sums, gradient = stepper.step(0.1, images, labels, 16)
        found[f"step {number}"] = vote(loss=sums[0], gradient=gradient)
    print("found", json.dumps(found))
