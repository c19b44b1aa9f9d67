"""The step and the schedule: gradients of the global batch, and learning rates."""

import copy
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.transforms import v2

from classifier.models.classifier import Classifier, build
from classifier.pixels import batches
from classifier.training import data, gradients, losses, optimizers, steps
from forked import run_ranks
from manynodes.base.errors import Refusal
from manynodes.data.folder import DataFolder
from manynodes.experiment.config import Experiment, Run
from manynodes.ranks.process_group import Process
from programs import SCRIPTS, program
from train import common
from trainings import SMALL, fitted

RUN = Experiment.from_config({"experiment": "test"}).runs["run"].with_values(precision="fp32")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return take_steps(1, tmp_path_factory.mktemp("steps") / "1.pt")


def take_steps(
    processes: int, output: Path, sent_as: str = "none", weighted: bool = False, **keys: object
) -> dict[str, torch.Tensor]:
    script = Path(__file__).with_name("one_step.py")
    words = [str(script), str(output), sent_as, json.dumps(keys), *["weighted"] * weighted]
    ranks = run_ranks(words, processes)
    assert [rank.returncode for rank in ranks] == processes * [0], ranks
    return torch.load(output)


@pytest.mark.parametrize(("processes", "micro_batches"), [(2, 1), (3, 1), (1, 3), (2, 2), (3, 2)])
def test_uneven_shares_give_the_gradient_of_the_global_batch(
    alone, tmp_path, processes, micro_batches
) -> None:
    together = take_steps(processes, tmp_path / "weights.pt", micro_batches=micro_batches)
    for name in ("weight", "bias", "totals"):
        # The order of at most 11 float32 additions is what differs.
        torch.testing.assert_close(together[name], alone[name], rtol=1e-5, atol=1e-6)
    # Rank r had 1 + r: the mean over the ranks.
    torch.testing.assert_close(together["variance"], torch.full((2,), 1 + (processes - 1) / 2))
    # Of a frozen layer, rank 0's own.
    assert torch.equal(together["frozen"], torch.ones(2))


def test_compressed_gradients_are_those_of_the_global_batch_to_bfloat16s_precision(
    alone, tmp_path
) -> None:
    together = take_steps(2, tmp_path / "weights.pt", "bf16")
    for name in ("weight", "bias"):
        largest = alone[name].abs().max().item()
        # Rounded to 8 bits on each rank and once more as a sum, in each of three steps.
        torch.testing.assert_close(together[name], alone[name], rtol=0, atol=largest * 2**-7)
        assert not torch.equal(together[name], alone[name])


@pytest.mark.parametrize(("processes", "micro_batches"), [(2, 1), (3, 2)])
def test_the_global_gradient_is_clipped(alone, tmp_path, processes, micro_batches) -> None:
    """Of several ranks as of one: each rank's own gradient is longer than their mean."""
    clip = {"clip_norm": 0.2}
    one = take_steps(1, tmp_path / "one.pt", **clip)
    several = take_steps(processes, tmp_path / "several.pt", micro_batches=micro_batches, **clip)
    for name in ("weight", "bias"):
        torch.testing.assert_close(several[name], one[name], rtol=1e-5, atol=1e-6)
    # By three steps of a rate of 0.1.
    assert one["weight"].norm() <= 3 * 0.1 * 0.2 < alone["weight"].norm()


def plain_steps(
    weights: torch.Tensor | None = None, weighted: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias after the same three steps with plain autograd."""
    generator = torch.Generator().manual_seed(0)
    images, labels = (
        torch.randn(64, 12, generator=generator),
        torch.randint(0, 10, (64,), generator=generator),
    )
    of_images = torch.rand(64, generator=generator) + 0.1
    weight, bias = torch.zeros(10, 12, requires_grad=True), torch.zeros(10, requires_grad=True)
    for batch in torch.arange(28).split([11, 10, 7]):
        loss = F.cross_entropy(
            images[batch] @ weight.T + bias,
            labels[batch],
            weight=weights,
            label_smoothing=RUN.label_smoothing,
            reduction="none" if weighted else "mean",
        )
        if weighted:
            of_class = 1 if weights is None else weights[labels[batch]]
            loss = (loss * of_images[batch]).sum() / (of_images[batch] * of_class).sum()
        gradients = torch.autograd.grad(loss, (weight, bias))
        with torch.no_grad():
            for parameter, gradient in zip((weight, bias), gradients, strict=True):
                parameter -= 0.1 * gradient
    return weight.detach(), bias.detach()


def test_one_process_steps_along_the_mean_loss_of_the_batch(alone) -> None:
    for name, plain in zip(("weight", "bias"), plain_steps(), strict=True):
        torch.testing.assert_close(alone[name], plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("processes", "micro_batches"), [(1, 1), (2, 1), (3, 2)])
def test_weights_of_classes_are_torch_s_over_the_global_batch(
    tmp_path, processes, micro_batches
) -> None:
    weights = [0.1, 1, 7, 1, 1, 2, 1, 1, 0.5, 3]
    by_name = {str(label): weight for label, weight in enumerate(weights)}
    found = take_steps(
        processes, tmp_path / "weights.pt", micro_batches=micro_batches, class_weights=by_name
    )
    for name, plain in zip(("weight", "bias"), plain_steps(torch.tensor(weights)), strict=True):
        torch.testing.assert_close(found[name], plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("processes", "micro_batches"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("classes", [None, [0.1, 1, 7, 1, 1, 2, 1, 1, 0.5, 3]])
def test_weights_of_images_multiply_those_of_classes_over_the_global_batch(
    tmp_path, processes, micro_batches, classes
) -> None:
    of_classes = None if classes is None else torch.tensor(classes)
    names = classes and {str(label): weight for label, weight in enumerate(classes)}
    keys = {"micro_batches": micro_batches, "class_weights": names}
    found = take_steps(processes, tmp_path / "weights.pt", weighted=True, **keys)
    for name, plain in zip(("weight", "bias"), plain_steps(of_classes, True), strict=True):
        torch.testing.assert_close(found[name], plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_an_image_s_weight_counts_it_so_many_times_mixed_or_not(name) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(30, 3, generator=generator), torch.arange(30) % 3
    often, classes = torch.arange(30) % 4 + 1, torch.tensor([1.0, 3.0, 2.0])
    weights = losses.Weights(classes, often.float())
    rows = torch.arange(30).repeat_interleave(often)
    due = losses.LOSSES[name](logits[rows], labels[rows], 0.0, losses.Weights(classes))
    torch.testing.assert_close(losses.LOSSES[name](logits, labels, 0.0, weights), due)
    both = [torch.stack((each, each.roll(1)), dim=1) for each in (labels, often.float())]
    mixed = losses.mixed_loss(name, logits, both[0], 0.0, losses.Weights(classes, both[1]), 0.3)
    parts = [losses.LOSSES[name](logits, both[0][:, k], 0.0, losses.Weights(classes, both[1][:, k]))
             for k in (0, 1)]  # fmt: skip
    torch.testing.assert_close(mixed, 0.3 * parts[0] + 0.7 * parts[1])


@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_weight_counts_an_image_so_many_times(name) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(30, 3, generator=generator), torch.arange(30) % 3
    loss = losses.LOSSES[name]
    weighted = loss(logits, labels, 0.0, losses.Weights(torch.tensor([1.0, 3.0, 2.0])))
    often = torch.arange(30).repeat_interleave(torch.tensor([1, 3, 2]).repeat(10))
    torch.testing.assert_close(weighted, loss(logits[often], labels[often], 0.0, losses.UNWEIGHTED))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_of_mixed_images_is_torch_s_for_soft_labels(smoothing) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(30, 10, generator=generator), torch.arange(30) % 10
    both = torch.stack((labels, labels.roll(1)), dim=1)
    found = losses.mixed_loss("cross_entropy", logits, both, smoothing, losses.UNWEIGHTED, 0.3)
    params = {"lam": 0.3, "labels": labels, "batch_size": 30}
    soft = v2.MixUp(num_classes=10).transform(labels, params)
    due = F.cross_entropy(logits, soft, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(found, due)


def test_balanced_weights_are_scikit_learn_s_and_others_go_by_name(digits) -> None:
    folder = DataFolder.read(digits)
    _, labels = folder.split("train")
    some = np.concatenate((labels, labels[labels < 4]))
    found = data.class_weights(RUN.with_values(class_weights="balanced"), some, folder)
    due = compute_class_weight("balanced", classes=np.arange(10), y=some)
    torch.testing.assert_close(found, torch.from_numpy(due).float())
    named = data.class_weights(RUN.with_values(class_weights={"7": 2.5, "0": 3}), labels, folder)
    assert named.tolist() == [3, 1, 1, 1, 1, 1, 1, 2.5, 1, 1]
    numbers = {str(label): 3 for label in range(10)}
    whole = data.class_weights(RUN.with_values(class_weights=numbers), labels, folder)
    assert whole.dtype == torch.float32
    line = "class_weights: digits has no class cat; its classes are 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    with pytest.raises(Refusal, match=f"^{line}$"):
        data.class_weights(RUN.with_values(class_weights={"cat": 2}), labels, folder)
    folder.manifest["class_names"] = ["Jos\u00e9", *map(str, range(1, 10))]
    apart = {"Jose\u0301": 2}
    named = data.class_weights(RUN.with_values(class_weights=apart), labels, folder)
    assert named.tolist() == [2, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    twice = apart | {"Jos\u00e9": 2}
    with pytest.raises(Refusal, match="is there in two forms of Unicode; keep one"):
        data.class_weights(RUN.with_values(class_weights=twice), labels, folder)


@pytest.mark.parametrize("key", ["class_weights", "sampling"])
def test_a_class_without_images_cannot_be_balanced(digits, key) -> None:
    labels = np.array([0, 1, 2, 4, 5, 6, 7, 8, 9])
    for held_out, words in (
        ({"validation_fraction": 0.2}, "validation_fraction; use a smaller validation_fraction"),
        ({"folds": 5, "fold": 1, "validation_fraction": 0.0}, "folds; use more folds"),
        (
            {"folds": 5, "fold": 1, "validation_fraction": 0.2},
            "folds and validation_fraction; use more folds or a smaller validation_fraction",
        ),
    ):
        line = f"{key}: balanced needs training images of every class, but all of 3 are held out by"
        balanced = RUN.with_values(**{key: "balanced"}, **held_out)
        with pytest.raises(Refusal, match=f"^{line} {words}$"):
            data.refuse_empty_class(balanced, labels, DataFolder.read(digits), print)
    said: list[str] = []
    data.refuse_empty_class(
        RUN.with_values(**held_out), labels, DataFolder.read(digits), said.append
    )
    (line,) = said
    assert line.startswith(
        "warning: 1 of 10 classes have no training images: all of 3 are held out"
    )


@pytest.mark.parametrize("warmup", [0.0, 0.2, 0.9])
def test_the_learning_rate_rises_and_falls_once_and_is_never_nought(warmup) -> None:
    run = RUN.with_values(warmup=warmup, epochs=4, learning_rate=2.0)
    rates = [optimizers.learning_rate(run, 25, done) for done in range(100)]
    assert 0 < min(rates) <= max(rates) <= 2.0
    peak = rates.index(max(rates))
    assert abs(peak - warmup * 100) <= 1
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    # Two straight lines from 0 to the peak and back: their area.
    assert sum(rates) == pytest.approx(0.5 * 2.0 * 100, rel=0.01)


def test_validation_divides_the_sums_once() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(32 * 32 * 3, 10))
    generator = torch.Generator().manual_seed(1)
    # One chunk is full, the last is not.
    n = batches.images_per_pass(torch.empty(1, 32, 32, 3), "cpu") + 7
    images, labels = (
        torch.randn(n, 32, 32, 3, generator=generator),
        torch.randint(0, 10, (n,), generator=generator),
    )
    # The held-out images lie anywhere in the split.
    everything = torch.cat((torch.zeros(3, 32, 32, 3), images))
    process = Process(0, 0, 1, torch.device("cpu"))
    held_out = batches.Examples(everything, torch.arange(n) + 3, labels)
    loss, accuracy = steps.validate(network, held_out, (32, 32), process)
    logits = network(images)
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    assert accuracy == (logits.argmax(1) == labels).sum().item() / n
    nothing = batches.Examples(images, torch.arange(0), labels[:0])
    assert steps.validate(network, nothing, (32, 32), process) == (None, None)


@pytest.mark.parametrize(
    ("megabytes", "bucket"), [(0.5, 1.0), (3, 1.0), (8, 2.0), (40, 10.0), (200, 25.0)]
)
def test_a_bucket_is_a_quarter_of_the_network_neither_small_nor_large(megabytes, bucket) -> None:
    network = nn.Module()
    network.weight = nn.Parameter(torch.empty(int(megabytes * 2**18), device="meta"))
    assert gradients.Gradients(RUN, network).bucket_mb == bucket


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW), ("muon", optimizers.Muon)],
)
def test_the_optimizer_is_the_one_asked_for(optimizer, kind) -> None:
    classifier = build("airbench", (8, 8, 8), 10)
    assert type(optimizers.make_optimizer(RUN.with_values(optimizer=optimizer), classifier)) is kind


@pytest.mark.parametrize("on_gpu", [True, False])
def test_filter_banks_are_orthogonalised_together_on_a_gpu(monkeypatch, on_gpu: bool) -> None:
    classifier = build("airbench", (8, 8, 8), 10)
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", on_gpu, raising=False)
    muon = optimizers.make_optimizer(RUN.with_values(optimizer="muon"), classifier)
    assert muon.at_once is on_gpu


def test_what_is_orthogonalised_keeps_its_directions_and_loses_its_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    # From a unit matrix's directions with very different sizes.
    left, right = (torch.linalg.qr(torch.randn(size, 8, generator=generator)).Q for size in (8, 30))
    matrix = left @ torch.diag(torch.logspace(-1, 1, 8)) @ right.T
    for given in (matrix, matrix.T):
        u, sizes, v = torch.linalg.svd(
            optimizers.orthogonalised(given, iterations=5), full_matrices=False
        )
        assert 0.5 < sizes.min() < sizes.max() < 1.5
        # The same as of the orthogonal matrix next to it, but for those sizes.
        near = torch.linalg.svd(given, full_matrices=False)
        assert ((u @ v) - near.U @ near.Vh).abs().max() < 1e-3


def test_matrices_are_orthogonalised_together_to_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 30), (30, 8), (8, 30), (5, 5), (6, 25))
    # At most half of a batch is filled up.
    assert optimizers.together([(8, 30), (8, 30), (8, 30), (5, 5), (6, 25)]) == [[2, 1, 0, 4, 3]]
    assert optimizers.together([(8, 30), (5, 5), (5, 5)]) == [[0, 2], [1]]
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    together = optimizers.all_orthogonalised(given)
    for matrix, found in zip(given, together, strict=True):
        torch.testing.assert_close(found, optimizers.orthogonalised(matrix), rtol=1e-4, atol=1e-5)


def test_muon_takes_the_same_steps_at_once() -> None:
    """As on a GPU."""

    def stepped(at_once: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        classifier = build("airbench", (64, 128, 128), 10)
        optimizer = optimizers.make_optimizer(RUN.with_values(optimizer="muon"), classifier)
        assert isinstance(optimizer, optimizers.Muon)
        assert not optimizer.at_once
        optimizer.at_once = at_once
        for _ in range(3):
            for parameter in classifier.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * group["rate"]
            optimizer.step()
        return list(classifier.parameters())

    for one, other in zip(stepped(at_once=True), stepped(at_once=False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_muon_keeps_the_filters_norm_and_leaves_the_rest_to_sgd() -> None:
    images, labels = (
        torch.randint(0, 256, (16, 32, 32, 3), dtype=torch.uint8),
        torch.randint(0, 10, (16,)),
    )
    torch.manual_seed(0)
    classifier = fitted(build("airbench", (8, 8, 8), 10), images)
    beside = copy.deepcopy(classifier)
    pair = [
        optimizers.make_optimizer(RUN.with_values(optimizer=name), network)
        for name, network in (("muon", classifier), ("sgd", beside))
    ]
    for network, optimizer in zip((classifier, beside), pair, strict=True):
        F.cross_entropy(network(images), labels).backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * group["rate"]
        optimizer.step()
    (group,) = (group for group in pair[0].param_groups if group["filters"])
    filters = {id(p) for p in group["params"]}
    for mine, other in zip(classifier.parameters(), beside.parameters(), strict=True):
        assert torch.equal(mine, other) != (id(mine) in filters)
    for p in group["params"]:
        # One step of 8 directions, each of at most 1.5 times the rate, off the norm of the square
        # root of 8.
        assert abs(p.norm().item() - 8**0.5) <= 1.5 * 8**0.5 * 0.01 * classifier.network.FILTER_RATE


def trained(run: Run, steps_taken: int = 20) -> list[float]:
    """Losses of a small network on 32 images that it memorises."""
    torch.manual_seed(0)
    images, labels = (
        torch.randint(0, 256, (32, 32, 32, 3), dtype=torch.uint8),
        torch.randint(0, 10, (32,)),
    )
    classifier = fitted(build("airbench", (8, 8, 8), 10), images)
    network, taken = gradients.distributed(run, classifier, [(images, labels)])
    stepper = steps.Stepper(
        run, network, taken, optimizers.make_optimizer(run, classifier), torch.device("cpu")
    )
    done = [stepper.step(0.1, images, labels, 32) for _ in range(steps_taken)]
    assert all(total.isfinite() for _, total in done)
    assert all(p.dtype == torch.float32 for p in classifier.parameters())
    return [(sums[0] / 32).item() for sums, _ in done]


@pytest.fixture(scope="module")
def exact() -> list[float]:
    return trained(RUN)


@pytest.mark.parametrize(("precision", "close"), [("bf16", 0.1), ("fp16", 0.05)])
def test_other_precisions_learn_the_same_with_a_larger_error(exact, precision, close) -> None:
    rounded = trained(RUN.with_values(precision=precision))
    assert exact != rounded
    # fp16's scaler skips its first steps, until its scale fits.
    assert rounded[-1] < exact[0] - 0.3
    assert rounded[0] == pytest.approx(exact[0], rel=close)


def compiled(folder: Path) -> str:
    """A run whose network is compiled on the CPU."""
    network = folder / "small.py"
    network.write_text(SMALL)
    keys = {"model": f"{network}:net", "compile": "default", "device": "cpu"}
    return json.dumps({"dataset": "digits", "learning_rate": 0.01} | keys)


@pytest.mark.faults
def test_without_a_compiler_it_is_said_in_a_line(digits, tmp_path) -> None:
    run = compiled(tmp_path)
    environment = os.environ | {"CXX": "/nowhere/g++"}
    done = program(
        "train", "--run", run, "--data", digits, "--output", tmp_path / "out", env=environment
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "train: compile: default needs g++ and python3-dev (Python's headers) on every node; "
    )
    assert "Traceback" not in done.stderr


@pytest.mark.faults
def test_a_cache_from_which_nothing_can_be_loaded_is_named(digits, tmp_path) -> None:
    """With a compiler, which succeeds: what it has made cannot be loaded."""
    run = compiled(tmp_path)
    # A long path would be shortened in the line, with what follows it.
    with tempfile.TemporaryDirectory(dir="/tmp") as cache:
        inside = f'mount -t tmpfs -o noexec,mode=700 tmpfs {cache} && exec "$@"'
        done = subprocess.run(
            ["unshare", "--mount", "--map-root-user", "sh", "-c", inside, "sh", sys.executable,
             SCRIPTS / "train.py", "--run", run, "--data", digits, "--output", tmp_path / "out"],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"train: compile: default loads what it compiles from {cache}, which is mounted noexec on "
    )
    assert "Traceback" not in done.stderr


def test_fp16_is_none_the_worse_for_an_overflow_in_the_first_step() -> None:
    classifier = build("airbench", (8, 8, 8), 10)
    optimizer, scaler = (
        optimizers.make_optimizer(RUN.with_values(precision="fp16"), classifier),
        torch.amp.GradScaler("cpu"),
    )
    before = [p.detach().clone() for p in classifier.parameters()]
    # What torch does not fill is nan then, and not what happens to be there.
    torch.use_deterministic_algorithms(True)
    try:
        for gradient in (math.inf, 0.5):
            scaled = scaler.scale(torch.tensor(gradient)).item()
            for p in classifier.parameters():
                p.grad = torch.full_like(p, scaled) if p.requires_grad else None
            scaler.step(optimizer)
            scaler.update()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(p.isfinite().all() for p in classifier.parameters())
    assert not all(torch.equal(p, q) for p, q in zip(classifier.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["sgd", "muon", "adamw"])
def test_what_an_optimizer_keeps_is_taken_up_in_the_order_of_the_weights(name) -> None:
    """A GPU's weights have another memory format than a CPU's, and a training may resume on
    either.
    """

    def after_a_step(
        order: torch.memory_format, state: dict | None
    ) -> tuple[Classifier, torch.optim.Optimizer]:
        torch.manual_seed(0)
        classifier = build("airbench", (8, 8, 8), 10).to(memory_format=order)
        optimizer = optimizers.make_optimizer(RUN.with_values(optimizer=name), classifier)
        if state:
            optimizers.load_optimizer_state(optimizer, copy.deepcopy(state))
        for p in classifier.parameters():
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape)) if p.requires_grad else None
        optimizer.step()
        return classifier, optimizer

    _, there = after_a_step(torch.channels_last, None)
    _, same = after_a_step(torch.channels_last, there.state_dict())
    _, other = after_a_step(torch.contiguous_format, there.state_dict())
    for parameter, kept in other.state.items():
        assert all(
            value.stride() == parameter.stride()
            for value in kept.values()
            if value.shape == parameter.shape
        )
    for mine, its in zip(other.param_groups, same.param_groups, strict=True):
        for p, q in zip(mine["params"], its["params"], strict=True):
            torch.testing.assert_close(p, q)


def train(digits: Path, output: Path, run: dict, **environment: str):
    arguments = [
        "--run",
        json.dumps({"dataset": "digits", "flip": False} | run),
        "--data",
        digits,
        "--output",
        output,
    ]
    return program("train", *arguments, env=os.environ | environment)


@pytest.mark.faults
def test_batchnorm_keeps_up_in_a_short_training(digits, tmp_path) -> None:
    """mobilenet_v3_small's own statistics average over 100 steps, of which there are 42 here:
    validation was at 9 %.
    """
    run = {
        "model": "mobilenet_v3_small",
        "epochs": 2,
        "global_batch_size": 64,
        "optimizer": "adamw",
        "learning_rate": 0.003,
        "label_smoothing": 0,
        "shift": 0,
        "checkpoint_every": 0,
    }
    done = train(digits, tmp_path / "out", run, GOMP_SPINCOUNT="10000")
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "out" / "run.json").read_text())["metrics"]
    assert metrics["val_accuracy"] > 0.7, metrics


@pytest.mark.parametrize(("steps", "momentum"), [(50, 0.4), (20, 1.0), (720, 0.4), (25, 0.8)])
def test_the_window_of_batchnorm_is_a_20th_of_the_steps_or_its_own(steps, momentum) -> None:
    classifier = build("airbench", (8, 8, 8), 10)
    # As of the head of a network of the user's.
    classifier.network.add_module("norm", nn.BatchNorm1d(4, momentum=0.4))
    classifier.average_recent_steps(steps)
    assert {
        module.momentum for module in classifier.modules() if isinstance(module, _BatchNorm)
    } == {momentum}


def test_more_threads_than_cpus_are_warned_of_on_a_single_process_too(digits, tmp_path) -> None:
    one = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {one})
    try:
        done = train(
            digits,
            tmp_path / "out",
            {"widths": [8, 8, 8], "epochs": 1, "global_batch_size": 64},
            OMP_NUM_THREADS="2",
        )
    finally:
        os.sched_setaffinity(0, before)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^preflight: warning: 2 threads on \S+ have 1 CPUs; ", done.stdout, re.MULTILINE
    )


@pytest.mark.faults
def test_without_torchvision_its_models_are_refused_in_a_line_and_ours_train(
    digits, tmp_path
) -> None:
    """Like in a small installation: a torchvision that does not fit the installed torch."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    run = {"widths": [8, 8, 8], "epochs": 1, "global_batch_size": 64}
    done = train(digits, tmp_path / "out", run, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for model, line in (
        (
            "resnet18",
            "train: model: resnet18: torchvision cannot be imported (operator torchvision::nms "
            "does not exist); "
            "install it, or do without: ",
        ),
        (
            "densenet121",
            "train: model: densenet121 is not built in, and torchvision cannot be imported ",
        ),
    ):
        refused = train(digits, tmp_path / model, run | {"model": model}, PYTHONPATH=str(tmp_path))
        assert refused.returncode == 1
        assert refused.stderr.splitlines()[-1].startswith(line)


def test_an_attempt_names_every_processor_of_its_ranks() -> None:
    assert common([4, 4]) == 4
    assert common(["Intel", "AMD", "Intel"]) == "Intel, AMD"
