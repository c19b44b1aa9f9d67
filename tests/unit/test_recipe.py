"""What surrounds the optimizer's step: the average of the weights."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from classifier.models import weights
from classifier.models.classifier import Classifier, build
from classifier.training import optimizers
from classifier.training.averaging import WeightAverage
from manynodes.experiment.config import Experiment

RUN = Experiment.from_config({"experiment": "test"}).runs["run"].with_values(precision="fp32")


def some_classifier(model: str = "airbench", **arguments: object) -> Classifier:
    torch.manual_seed(0)
    classifier = build(model, (8, 8, 8), 10, model_args=arguments)
    classifier.fit_to(torch.randint(0, 256, (64, 32, 32, 3), dtype=torch.uint8))
    return classifier


def step(classifier: Classifier, optimizer: torch.optim.Optimizer) -> None:
    """With any gradients, and new running statistics."""
    classifier(torch.randint(0, 256, (8, 32, 32, 3), dtype=torch.uint8))
    for parameter in classifier.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    optimizer.step()


def test_the_average_is_torch_s_bit_for_bit(tmp_path) -> None:
    classifier = some_classifier()
    optimizer = optimizers.make_optimizer(RUN, classifier)
    reference = AveragedModel(classifier, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average = WeightAverage(0.9, classifier)
    for _ in range(5):
        step(classifier, optimizer)
        average.update()
        reference.update_parameters(classifier)
    trained = copy.deepcopy(classifier.state_dict())
    places = [parameter.data_ptr() for parameter in classifier.parameters()]
    with average.used():
        used = copy.deepcopy(classifier.state_dict())
        weights.save(classifier, tmp_path / "averaged")
    expected = reference.module.state_dict()
    assert list(used) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(used[name], tensor), name
    assert not torch.equal(used["network.head.weight"], trained["network.head.weight"])
    # The training goes on with its own weights, in the same memory.
    for name, tensor in classifier.state_dict().items():
        assert torch.equal(tensor, trained[name]), name
    assert [parameter.data_ptr() for parameter in classifier.parameters()] == places
    loaded = weights.load(tmp_path / "averaged").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_without_a_decay_there_is_no_average() -> None:
    average = WeightAverage(0.0, nn.Linear(2, 2))
    average.update()
    assert not average.averages
