"""Which precision `auto` is: what the processors can, on all ranks, and what a state began with."""

import json
import signal
from pathlib import Path

import pytest
import torch

from forked import run_ranks
from manynodes.ranks import device
from trainings import Training, complete, result

FLAGS = "processor\t: 0\nmodel name\t: any\nflags\t\t: fpu sse4_2 avx512f {}\nbugs\t: avx512_bf16\n"
CPU = torch.device("cpu")
NET = """
from torch import nn

def net(classes, channels, size):
    return nn.Sequential(
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
    said = [rank.stdout.splitlines() for rank in ranks]
    assert [lines[-1] for lines in said] == [chosen, chosen]
    first, second = ([line for line in lines if line.startswith("train: ")] for lines in said)
    (line,) = first
    assert line.startswith(f"train: precision: {chosen}, chosen by auto: {why}")
    assert not second


@pytest.fixture
def cheap(tmp_path) -> dict[str, object]:
    """A network that takes grey images in bf16, as airbench does not, and little time for it on a
    CPU that has none.
    """
    network = tmp_path / "net.py"
    network.write_text(NET)
    return {"model": f"{network}:net", "learning_rate": 0.01}


def test_auto_is_what_the_processor_has(digits, tmp_path, cheap) -> None:
    how = cheap | {"epochs": 1, "checkpoint_every": 1}
    training = complete(tmp_path / "auto", digits, precision="auto", **how)
    expected = "bf16" if device.computes_in_bf16(CPU) else "fp32"
    assert f"\ntrain: precision: {expected}, chosen by auto: " in str(training.said)
    assert json.loads((tmp_path / "auto" / "run.json").read_text())["computed_in"] == expected
    complete(tmp_path / "named", digits, precision=expected, **how)
    assert result(tmp_path / "auto") == result(tmp_path / "named")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_training_goes_on_as_it_began_whatever_auto_is_here(
    digits, tmp_path, cheap, precision
) -> None:
    # Of 0.03 s each: there must be some left when the signal comes.
    how = cheap | {"epochs": 60, "checkpoint_every": 30}
    complete(tmp_path / "alone", digits, precision=precision, **how)
    output = tmp_path / "out"
    training = Training(output, digits, precision=precision, **how)
    training.reach(2)
    training.process.send_signal(signal.SIGTERM)
    assert training.end() == 75, training.said
    resumed = complete(output, digits, precision="auto", **how)
    assert "resumed after" in str(resumed.said)
    assert "chosen by auto" not in str(resumed.said)
    about = json.loads((output / "run.json").read_text())
    assert (about["config"]["precision"], about["computed_in"]) == ("auto", precision)
    assert result(output) == result(tmp_path / "alone")
