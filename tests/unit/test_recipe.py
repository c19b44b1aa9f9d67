"""What surrounds the optimizer's step: averages, clipping, decay, frozen layers and rates."""

import copy
import signal

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from classifier.models import weights
from classifier.models.classifier import Classifier, build
from classifier.states import state
from classifier.training import gradients, optimizers, steps
from classifier.training.averaging import WeightAverage, warning
from classifier.training.choosing import freeze
from manynodes.base.errors import Refusal
from manynodes.experiment.config import Experiment, Run
from trainings import Training, attempts, complete, complete_on_ranks, fitted, result

RUN = Experiment.from_config({"experiment": "test"}).runs["run"].with_values(precision="fp32")


def some_classifier(model: str = "airbench", **arguments: object) -> Classifier:
    torch.manual_seed(0)
    classifier = build(model, (8, 8, 8), 10, model_args=arguments)
    return fitted(classifier, torch.randint(0, 256, (64, 32, 32, 3), dtype=torch.uint8))


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
        weights.write(classifier.state_dict(), classifier.description, tmp_path / "averaged")
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


def step_of(run: Run, classifier: Classifier) -> dict[str, torch.Tensor]:
    """The gradients with which the optimizer takes a step of the run, by name."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (16, 32, 32, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (16,), generator=generator)
    network, taken = gradients.distributed(run, classifier, [])
    optimizer = optimizers.make_optimizer(run, classifier)
    stepper = steps.Stepper(run, network, taken, optimizer, torch.device("cpu"))
    if run.precision == "fp16":
        # So small that the first step is taken.
        stepper.scaler = torch.amp.GradScaler("cpu", init_scale=64)
    seen: dict[str, torch.Tensor] = {}

    def look(*_: object) -> None:
        for name, parameter in classifier.named_parameters():
            if parameter.grad is not None:
                seen[name] = parameter.grad.clone()

    optimizer.register_step_pre_hook(look)
    stepper.step(0.1, images, labels, 16)
    return seen


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("clip_norm", [0.01, 1000.0])
def test_the_gradient_is_clipped_as_by_torch(clip_norm, precision) -> None:
    run = RUN.with_values(precision=precision)
    plain = step_of(run, some_classifier())
    given = [nn.Parameter(torch.zeros_like(each)) for each in plain.values()]
    for parameter, gradient in zip(given, plain.values(), strict=True):
        # The optimizer divides by fp16's scale itself.
        parameter.grad = gradient / (64 if precision == "fp16" else 1)
    norm = nn.utils.clip_grad_norm_(given, clip_norm)
    assert (norm > clip_norm) == (clip_norm < 1)
    clipped = step_of(run.with_values(clip_norm=clip_norm), some_classifier())
    assert list(clipped) == list(plain)
    for name, parameter in zip(clipped, given, strict=True):
        assert torch.equal(clipped[name], parameter.grad), name


def test_only_weights_decay_as_in_torchvision_s_references() -> None:
    from torchvision.models import resnet18
    from torchvision.ops._utils import split_normalization_params

    classifier = build("resnet18_imagenet", (8, 8, 8), 10)
    run = RUN.with_values(weight_decay=0.1, weight_decay_on="weights")
    groups = optimizers.make_optimizer(run, classifier).param_groups
    found = {group["weight_decay"]: {p.shape for p in group["params"]} for group in groups}
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [
        (0.1, 21),
        (0.0, 41),
    ]
    norms, others = split_normalization_params(resnet18(num_classes=10))
    assert len(norms) == 40
    assert found[0.1] == {p.shape for p in others if p.dim() > 1}
    # airbench's BatchNorm biases have a group of their own; Muon's filters never decay.
    muon = run.with_values(optimizer="muon")
    groups = optimizers.make_optimizer(muon, some_classifier()).param_groups
    assert [(group["rate"], group["weight_decay"]) for group in groups] == [
        (1.0, 0.0), (1.0, 0.1), (64.0, 0.0), (0.145, 0.0),
    ]  # fmt: skip


def test_rates_are_those_of_torch_s_parameter_groups() -> None:
    rates = {r"^fc\.": 10, "^fc|bn1": 0.5}
    run = RUN.with_values(rates=rates, weight_decay=0.01)
    classifier = build("resnet18_imagenet", (8, 8, 8), 10)
    beside = copy.deepcopy(classifier)
    parts = {10.0: [], 0.5: [], 1.0: []}
    for name, parameter in beside.network.named_parameters():
        parts[10.0 if name.startswith("fc.") else 0.5 if "bn1" in name else 1.0].append(parameter)
    assert len(parts[10.0]), len(parts[0.5]) == (2, 18)
    reference = torch.optim.SGD(
        [{"params": each, "lr": 0.1 * factor} for factor, each in parts.items()],
        momentum=run.momentum, nesterov=True, weight_decay=0.01, fused=True,
    )  # fmt: skip
    optimizer = optimizers.make_optimizer(run, classifier)
    for network, used in ((classifier, optimizer), (beside, reference)):
        torch.manual_seed(1)
        for parameter in network.parameters():
            parameter.grad = torch.randn_like(parameter)
        for group in used.param_groups:
            group["lr"] = 0.1 * group.get("rate", group["lr"] / 0.1)
        used.step()
    for mine, other in zip(classifier.parameters(), beside.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


def test_the_usual_groups_are_the_network_s_own() -> None:
    classifier = some_classifier()
    assert optimizers.divided(RUN, classifier) == classifier.parameter_groups(RUN.weight_decay)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_frozen_layers_stay_and_their_statistics_too(optimizer) -> None:
    run = RUN.with_values(freeze=["whitening", r"blocks\.[01]\."], optimizer=optimizer)
    classifier = some_classifier()
    before = copy.deepcopy(classifier.state_dict())
    classifier.train()
    frozen = freeze(run, classifier.network)
    assert len(frozen) == 4
    step_of(run, classifier)
    for name, tensor in classifier.state_dict().items():
        stays = name.startswith(("network.whitening", "network.blocks.0", "network.blocks.1"))
        # BatchNorm's weights do not learn in airbench.
        stays |= name in ("mean", "std") or (tensor.dim() == 1 and name.endswith(".weight"))
        assert torch.equal(tensor, before[name]) == stays, name


def test_a_layer_with_a_trained_parameter_keeps_its_statistics_up_to_date() -> None:
    network = build("resnet18_imagenet", (8, 8, 8), 10).network
    assert freeze(RUN.with_values(freeze="bn1.weight"), network) == []
    assert freeze(RUN.with_values(freeze="^bn1"), network) == [network.bn1]
    assert not network.bn1.training
    assert network.layer1[0].bn1.training
    assert [name for name, p in network.named_parameters() if not p.requires_grad] == [
        name for name, _ in network.named_parameters() if "bn1.weight" in name or name == "bn1.bias"
    ]


NAMES = [
    ({"freeze": "layr1"}, "freeze: layr1 matches no parameter of the network; did you mean "
     "layer1?"),
    ({"freeze": ["conv1", "stem"]}, "freeze: stem matches no parameter of the network; it has "
     "conv1, bn1, relu, maxpool, layer1, layer2, layer3, layer4, avgpool, fc"),
    ({"rates": {"^fc": 10, "^head": 2}}, "rates: ^head matches no parameter of the network; it has "
     "conv1, bn1, relu, maxpool, layer1, layer2, layer3, layer4, avgpool, fc"),
    ({"freeze": "."}, "freeze: resnet18 has no other parameters, nothing is left to train"),
    ({"freeze": "layer["}, "freeze: layer[ is no regular expression: unterminated character set "
     "at position 5"),
    ({"rates": {"(": 2}}, "rates: ( is no regular expression: missing ), unterminated subpattern "
     "at position 0"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "line"), NAMES)
def test_names_are_checked_in_the_dry_run(keys, line) -> None:
    with pytest.raises(Refusal) as refused:
        Experiment.from_config({"experiment": "test", "model": "resnet18"} | keys)
    assert str(refused.value) == f"config: {line}"


def test_an_average_that_is_mostly_of_the_first_weights_is_told() -> None:
    """Its share is that of an average of these weights and others."""
    for decay, count in ((0.999966, 600), (0.99, 200), (0.5, 2)):
        network = nn.Linear(1, 1, bias=False)
        average = WeightAverage(decay, network)
        for number in range(count):
            nn.init.constant_(network.weight, float(number == 0))
            average.update()
        share = average.averages["weight"].item()
        assert f"{share:.0%} of the average are the weights" in warning(decay, count)
    assert warning(0.999966, 600).endswith("use a smaller decay, such as 0.983")
    for decay, count in ((0.0, 1), (0.99, 400), (0.999966, 100_000), (0.983, 600)):
        assert warning(decay, count) == ""


TOGETHER = {
    "ema": 0.9,
    "clip_norm": 0.5,
    "weight_decay_on": "weights",
    "freeze": ["whitening", r"blocks\.0"],
    "rates": {"head": 2.0, "blocks": 0.5},
    "micro_batches": 2,
    "epochs": 5,
    "checkpoint_every": 2,
}


@pytest.mark.faults
@pytest.mark.parametrize(("processes", "other"), [
    (2, {"precision": "fp32"}),
    (1, {"optimizer": "muon", "precision": "bf16"}),
    (1, {"optimizer": "adamw", "precision": "fp16", "learning_rate": 0.02}),
])  # fmt: skip
def test_all_together_resume_to_the_same_weights(digits, tmp_path, processes, other) -> None:
    how = TOGETHER | {"widths": [2, 2, 2]} | other
    complete_on_ranks(tmp_path / "alone", digits, processes, **how)
    how["processes"] = processes
    output = tmp_path / "out"
    training = Training(output, digits, **how)
    training.reach(1)
    training.process.send_signal(signal.SIGTERM)
    assert training.end() == 75, training.said
    saved = state.read(next(state.states(output / "state"))[0])[0]
    assert (1, 0) <= (saved.epoch, saved.step) < (5, 0)
    trained = [
        name for name in saved.averages if not torch.equal(saved.averages[name], saved.model[name])
    ]
    assert trained == list(saved.averages) != []
    assert not [name for name in trained if name.startswith("network.blocks.0")]
    complete(output, digits, **how)
    assert len(attempts(output)) == 2
    assert result(output) == result(tmp_path / "alone")
    kept = weights.load(output / "model.safetensors").state_dict()
    last = state.read(next(state.states(output / "state"))[0])[0]
    assert all(torch.equal(kept[name], average) for name, average in last.averages.items())
    # The frozen filters, and the statistics below them, are those of the beginning.
    same = [name for name, tensor in last.model.items() if torch.equal(tensor, saved.model[name])]
    assert "network.blocks.0.2.running_mean" in same
    assert "network.blocks.1.2.running_mean" not in same
