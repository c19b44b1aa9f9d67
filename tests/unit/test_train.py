"""The step and the schedule: the global batch's gradient whatever the shares, and rates that add up."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddp import models, steps
from ddp.config import Experiment
from ddp.process_group import Process
from programs import SCRIPTS, program

RUN = Experiment.from_config({}).runs["run"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return take_steps(1, tmp_path_factory.mktemp("steps") / "1.pt")


def take_steps(processes: int, output: Path) -> dict[str, torch.Tensor]:
    script = Path(__file__).with_name("one_step.py")
    done = program("launch", "--nproc-per-node", processes, "--", script, output, env=os.environ | {"PYTHONPATH": str(SCRIPTS)})
    assert done.returncode == 0, done.stderr
    return torch.load(output)


@pytest.mark.parametrize("processes", [2, 3])
def test_uneven_shares_give_the_gradient_of_the_global_batch(alone, tmp_path, processes) -> None:
    together = take_steps(processes, tmp_path / "weights.pt")
    for name in ("weight", "bias", "totals"):
        # The order of at most 11 float32 additions is what differs.
        torch.testing.assert_close(together[name], alone[name], rtol=1e-5, atol=1e-6)
    # Rank r had 1 + r: the mean over the ranks.
    torch.testing.assert_close(together["variance"], torch.full((2,), 1 + (processes - 1) / 2))


def test_one_process_steps_along_the_mean_loss_of_the_batch(alone) -> None:
    """The same three steps, written down with nothing but autograd."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(64, 12, generator=generator), torch.randint(0, 10, (64,), generator=generator)
    weight, bias = torch.zeros(10, 12, requires_grad=True), torch.zeros(10, requires_grad=True)
    for batch in torch.arange(28).split([11, 10, 7]):
        loss = F.cross_entropy(images[batch] @ weight.T + bias, labels[batch], label_smoothing=RUN.label_smoothing)
        gradients = torch.autograd.grad(loss, (weight, bias))
        with torch.no_grad():
            for parameter, gradient in zip((weight, bias), gradients, strict=True):
                parameter -= 0.1 * gradient
    torch.testing.assert_close(alone["weight"], weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(alone["bias"], bias.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("warmup", [0.0, 0.2, 0.9])
def test_the_learning_rate_rises_and_falls_once_and_is_never_nought(warmup) -> None:
    run = replace(RUN, warmup=warmup, epochs=4, learning_rate=2.0)
    rates = [steps.learning_rate(run, 25, done) for done in range(100)]
    assert 0 < min(rates) <= max(rates) <= 2.0
    peak = rates.index(max(rates))
    assert abs(peak - warmup * 100) <= 1
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    # Two straight lines from 0 to the peak and back: their area.
    assert sum(rates) == pytest.approx(0.5 * 2.0 * 100, rel=0.01)


def test_validation_divides_the_sums_once() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    generator = torch.Generator().manual_seed(1)
    # One chunk is full, the last is not.
    n = steps.VALIDATION_BATCH + 7
    images, labels = torch.randn(n, 12, generator=generator), torch.randint(0, 10, (n,), generator=generator)
    loss, accuracy = steps.validate(network, images, labels, Process(0, 0, 1, torch.device("cpu")))
    logits = network(images)
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    assert accuracy == (logits.argmax(1) == labels).sum().item() / n
    assert steps.validate(network, images[:0], labels[:0], Process(0, 0, 1, torch.device("cpu"))) == (None, None)


@pytest.mark.parametrize(("optimizer", "kind"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_the_optimizer_is_the_one_asked_for(optimizer, kind) -> None:
    classifier = models.build("airbench", (8, 8, 8), 10)
    assert isinstance(steps.make_optimizer(replace(RUN, optimizer=optimizer), classifier), kind)
