"""The networks: what they take and give, what their files hold, and what is refused."""

import pytest
import torch
from torch import nn

from classifier.models import weights
from classifier.models.classifier import build, some
from manynodes.base.errors import Refusal
from trainings import fitted

WIDTHS = (8, 12, 16)


def some_images(n: int = 64) -> torch.Tensor:
    return torch.randint(
        0, 256, (n, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize(
    "name",
    [
        "airbench",
        "airbench96",
        "resnet9",
        "resnet18",
        "resnet18_imagenet",
        "mobilenet_v3_small",
        "densenet121",
    ],
)
def test_uint8_images_in_logits_out(name) -> None:
    classifier = build(name, WIDTHS, 100).eval()
    assert classifier(some_images(2)).shape == (2, 100)


def test_resnet18_has_the_cifar_stem_and_resnet18_imagenet_has_not() -> None:
    small, large = (build(name, WIDTHS, 10).network for name in ("resnet18", "resnet18_imagenet"))
    assert (small.conv1.kernel_size, small.conv1.stride, type(small.maxpool)) == (
        (3, 3),
        (1, 1),
        nn.Identity,
    )
    assert (large.conv1.kernel_size, large.conv1.stride, type(large.maxpool)) == (
        (7, 7),
        (2, 2),
        nn.MaxPool2d,
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_normalisation_is_that_of_the_training_images(dtype) -> None:
    images = some_images().to(dtype)
    classifier = fitted(build("resnet18", WIDTHS, 10), images)
    pixels = images.reshape(-1, 3).double()
    torch.testing.assert_close(classifier.mean.double(), pixels.mean(0), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(
        classifier.std.double(), pixels.std(0, correction=0), rtol=1e-6, atol=1e-4
    )


@pytest.mark.parametrize(("name", "parameters", "trained", "norm"), [
    ("airbench", 9_112, 8_752, 0.85162),
    ("airbench96", 13_360, 12_964, 12.0855),
    ("resnet9", 6_573_120, 6_573_120, 0.132286),
    ("resnet18", 11_173_962, 11_173_962, 7.94092),
    ("resnet18_imagenet", 11_181_642, 11_181_642, 3.01711),
])  # fmt: skip
def test_built_in_networks_compute_what_they_did(name, parameters, trained, norm) -> None:
    """Their published accuracies are of these sizes, factors and momenta."""
    torch.manual_seed(0)
    classifier = fitted(build(name, WIDTHS, 10), some_images(16))
    with torch.no_grad():
        classifier.train()(some_images(16))
        logits = classifier.eval()(some_images(16))
    sizes = [(each.numel(), each.requires_grad) for each in classifier.parameters()]
    assert sum(size for size, _ in sizes) == parameters
    assert sum(size for size, trains in sizes if trains) == trained
    assert logits.norm().item() == pytest.approx(norm, rel=1e-3)
    # The gradients of other ones are not the same every time on a GPU.
    adaptive = [
        each
        for each in classifier.modules()
        if isinstance(each, nn.AdaptiveMaxPool2d | nn.AdaptiveAvgPool2d)
    ]
    assert all(isinstance(each, nn.AdaptiveAvgPool2d) for each in adaptive)
    assert all(each.output_size in (1, (1, 1)) for each in adaptive)


@pytest.mark.parametrize(
    ("shape", "count"), [((32, 32, 3), 2000), ((224, 224, 3), 40), ((2000, 2000, 3), 16)]
)
def test_whitening_sees_as_many_images_as_few_megabytes_hold(shape, count) -> None:
    assert some(torch.empty(1, *shape, device="meta")) == count


def test_whitening_makes_patches_white() -> None:
    # Smooth images: their patches are far from white before.
    noise = torch.randn(300, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    smooth = (
        nn.functional.interpolate(noise, size=32, mode="bilinear").mul(40).add(128).clamp(0, 255)
    )
    images = smooth.permute(0, 2, 3, 1).to(torch.uint8)
    classifier = fitted(build("airbench", WIDTHS, 10), images)
    whitened = nn.functional.conv2d(
        ((images.float() - classifier.mean) / classifier.std).permute(0, 3, 1, 2),
        classifier.network.whitening.weight[:12],
    )
    covariance = torch.cov(whitened.transpose(0, 1).reshape(12, -1))
    # 1 but for the 5e-4 that is added to each eigenvalue.
    assert (covariance - torch.diag(covariance.diagonal())).abs().max() < 1e-3
    assert covariance.diagonal().max() < 1.001


def test_the_decay_per_step_is_the_same_in_every_group() -> None:
    groups = build("airbench", WIDTHS, 10).parameter_groups(0.01)
    assert [group["rate"] * group["weight_decay"] for group in groups] == pytest.approx(
        [0.01, 0.01]
    )
    trained = {id(p) for group in groups for p in group["params"]}
    wanted = {id(p) for p in build("airbench", WIDTHS, 10).parameters() if p.requires_grad}
    assert len(trained) == len(wanted) == sum(len(group["params"]) for group in groups)


def test_a_file_holds_all_that_is_needed_and_is_the_same_every_time(tmp_path) -> None:
    classifier = fitted(build("airbench", WIDTHS, 10), some_images())
    for name in ("one", "two"):
        weights.write(classifier.state_dict(), classifier.description, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    again = weights.load(tmp_path / "one")
    assert again.description == {"model": "airbench", "widths": [8, 12, 16], "classes": 10}
    assert torch.equal(again.eval()(some_images(3)), classifier.eval()(some_images(3)))


def test_a_network_of_torchvision_takes_arguments_and_its_file_keeps_them(tmp_path) -> None:
    arguments = {"stochastic_depth_prob": 0.5, "dropout": 0.1}
    classifier = build("efficientnet_b0", WIDTHS, 10, model_args=arguments)
    weights.write(classifier.state_dict(), classifier.description, tmp_path / "file")
    network = weights.load(tmp_path / "file").network
    assert network.classifier[0].p == 0.1
    assert network.features[-2][-1].stochastic_depth.p > 0.4
    for wrong, said in (
        ({"depth": 3}, r"model_args: .*unexpected keyword argument 'depth'"),
        ({"dropout": 2}, "model_args: dropout probability has to be between 0 and 1, but got 2"),
        ({"weights": "DEFAULT"}, "model_args: weights reads other files; leave it out"),
        ({"pretrained": True}, "model_args: pretrained reads other files; leave it out"),
    ):
        with pytest.raises(Refusal, match=said):
            build("efficientnet_b0", WIDTHS, 10, model_args=wrong)


def test_damaged_and_foreign_files_are_refused_by_name(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(Refusal, match="model.safetensors is not there"):
        weights.load(path)
    classifier = build("airbench", WIDTHS, 10)
    weights.write(classifier.state_dict(), classifier.description, path)
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[:-1],
        whole[: len(whole) // 2],
        b"\x80\x04cposix\nsystem\n",
        whole.replace(b"airbench", b"resnet18"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(
            Refusal, match="model.safetensors is damaged or was not written by this workflow: .+"
        ) as refused:
            weights.load(path)
        assert "\n" not in str(refused.value)
