"""Which precision `auto` is: what the processors can, on all ranks, and what a state began with."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from classifier.states import state
from forked import run_ranks
from manynodes.ranks import device
from trainings import complete, complete_on_ranks, result

FLAGS = "processor\t: 0\nmodel name\t: any\nflags\t\t: fpu sse4_2 avx512f {}\nbugs\t: avx512_bf16\n"
CPU = torch.device("cpu")
NET = """
import torch
from torch import nn

class Net(nn.Sequential):
    def forward(self, images):
        assert self.training or not torch.is_autocast_enabled("cpu"), "validated in bf16"
        return super().forward(images)

def net(classes, channels, size):
    return Net(
        nn.Conv2d(channels, 8, 4, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * (size[0] // 4) * (size[1] // 4), classes),
    )
"""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (FLAGS.format("avx512_bf16 avx512_vnni"), True),
        (FLAGS.format("amx_bf16"), True),
        (FLAGS.format("avx512_bf16_of_another_kind avx512_vnni"), False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", False),
    ],
)
def test_a_processor_says_whether_it_has_bf16(tmp_path, monkeypatch, flags, expected) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(flags)
    monkeypatch.setattr(device, "CPUINFO", cpuinfo)
    assert device.computes_in_bf16(CPU) is expected


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_a_gpu_has_bf16_from_8_0_on(monkeypatch, capability) -> None:
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", {gpu: capability}.__getitem__)
    assert device.computes_in_bf16(gpu) is (capability[0] >= 8)


@pytest.mark.parametrize(
    ("of_second", "images", "chosen", "why"),
    [
        ("avx512_bf16", "coloured", "bf16", "every process has bf16"),
        ("avx2", "coloured", "fp32", "the CPU of "),
        ("avx512_bf16", "grey", "fp32", "the images are grey in all channels: airbench needs it"),
    ],
)
def test_all_ranks_use_what_the_least_of_them_has(tmp_path, of_second, images, chosen, why) -> None:
    for rank, flags in enumerate(("avx512_bf16", of_second)):
        (tmp_path / str(rank)).write_text(FLAGS.format(flags))
    script = Path(__file__).with_name("precision.py")
    ranks = run_ranks([str(script), str(tmp_path), images], 2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    first, second = (rank.stdout.splitlines()[-1] for rank in ranks)
    assert first.startswith(f"{chosen}, chosen by auto: {why}")
    assert second.startswith(f"{chosen}, ")


@pytest.fixture
def cheap(tmp_path) -> dict[str, object]:
    """A network that takes grey images in bf16, as airbench does not, and little time for it on a
    CPU that has none.
    """
    network = tmp_path / "net.py"
    network.write_text(NET)
    return {"model": f"{network}:net", "learning_rate": 0.01}


def lines_of(said: str) -> list[str]:
    """What a training itself says."""
    return [line for line in said.splitlines() if line.startswith("train: ")]


def test_auto_is_what_the_processor_has(digits, tmp_path, cheap) -> None:
    how = cheap | {"epochs": 1, "checkpoint_every": 1}
    training = complete(tmp_path / "auto", digits, precision="auto", **how)
    expected = "bf16" if device.computes_in_bf16(CPU) else "fp32"
    assert lines_of(training.said)[0].startswith(f"train: precision: {expected}, chosen by auto: ")
    assert json.loads((tmp_path / "auto" / "run.json").read_text())["computed_in"] == expected
    named = complete(tmp_path / "named", digits, precision=expected, **how)
    assert lines_of(named.said)[0] == f"train: precision: {expected}, as configured"
    assert result(tmp_path / "auto") == result(tmp_path / "named")


def assert_as_it_began(output: Path, said: str, precision: str) -> None:
    first, second, *_ = lines_of(said)
    assert first.startswith("train: resumed after")
    assert second == f"train: precision: {precision}, as this training began"
    about = json.loads((output / "run.json").read_text())
    assert (about["config"]["precision"], about["computed_in"]) == ("auto", precision)


@pytest.mark.parametrize(("precision", "processes"), [("fp32", 1), ("bf16", 2)])
def test_trainings_repeat_and_resume_to_the_bit_and_save_fp32(
    digits, tmp_path, cheap, precision, processes
) -> None:
    how = cheap | {"epochs": 4, "checkpoint_every": 2}
    where = (tmp_path / "out", digits, processes)
    complete_on_ranks(*where, precision=precision, **how)
    expected = result(tmp_path / "out")
    newest, _ = (path for path, _ in state.states(tmp_path / "out/state"))
    saved, _ = state.read(newest)
    kept = tree_leaves([saved.model, saved.optimizer, [rank["buffers"] for rank in saved.ranks]])
    tensors = [each for each in kept if isinstance(each, torch.Tensor)]
    assert {each.dtype for each in tensors if each.is_floating_point()} == {torch.float32}
    # As after a crash in the last epoch.
    state.remove(newest)
    said = complete_on_ranks(*where, precision="auto", **how)
    assert_as_it_began(tmp_path / "out", said, precision)
    assert result(tmp_path / "out") == expected
    complete_on_ranks(*where, "--resume=fresh", precision=precision, **how)
    assert result(tmp_path / "out") == expected
