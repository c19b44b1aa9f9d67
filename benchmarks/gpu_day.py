"""What one GPU can prove in half an hour; see gpu_day.sh, which starts this."""

import argparse
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "workflow" / "scripts"
sys.path.insert(0, str(SCRIPTS))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from torch.nn import functional  # noqa: E402

from classifier.models.classifier import build  # noqa: E402
from classifier.pixels.batches import (  # noqa: E402
    Augmentation,
    Examples,
    epoch_plan,
    images_per_pass,
)
from classifier.pixels.shares import Shares  # noqa: E402
from classifier.training import steps  # noqa: E402
from classifier.training.optimizers import all_orthogonalised, orthogonalised  # noqa: E402
from manynodes.base.cpus import usable_cpus  # noqa: E402
from manynodes.ranks.device import compute_exactly  # noqa: E402
from manynodes.ranks.process_group import Process  # noqa: E402

# Seconds after which a call begins nothing more: it ends within ten minutes.
BUDGET = 480
LEFT = 60  # seconds in which what is left of a training may end
STOPPED = 75
SMALL = {
    "dataset": "digits",
    "widths": [32, 64, 64],
    "epochs": 6,
    "global_batch_size": 72,
    "learning_rate": 0.5,
    "flip": False,
    "precision": "fp32",
}
NETWORKS = """
from torch import nn


def dropout(classes, channels, size):
    pixels = channels * size[0] * size[1]
    layers = [nn.Flatten(), nn.Linear(pixels, 128), nn.Dropout(0.3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, classes))


def wide(classes, channels, size, width=8000):
    pixels = channels * size[0] * size[1]
    layers = [nn.Flatten(), nn.Linear(pixels, width), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Linear(width, classes))


class Full(nn.Module):
    def __init__(self, classes, channels, size):
        super().__init__()
        self.head = nn.Linear(channels * size[0] * size[1], classes)

    def forward(self, x):
        x.new_empty(2**45)
        return self.head(x.flatten(1))


def pooled(classes, channels, size):
    layers = [nn.Conv2d(channels, 8, 3), nn.AdaptiveAvgPool2d(3), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(72, classes))
"""

Check = tuple[str, Callable[[], dict[str, Any]]]


class Day:
    """One call: its data, its folder and its device.

    Attributes:
        tiny: a rehearsal on a CPU, with little work.
        small: a run that takes seconds.
    """

    def __init__(self, data: Path, output: Path, device: str) -> None:
        self.data, self.output, self.device = data.resolve(), output.resolve(), device
        self.tiny = device == "cpu"
        # On a GPU, an epoch takes a tenth of a second.
        self.small = SMALL | {"epochs": 6 if self.tiny else 40}
        # What rank 1 does in a step, and what is said of it.
        self.faults = {
            "raise": "ValueError: a fault that was asked for",
            "kill": "was ended by SIGKILL",
            "stop": r"hung \(stopped by a signal",
            "loop": r"hung \(in fail\.<locals>\.failing",
            "assert": "IndexError" if self.tiny else "CUDA error: device-side assert",
        }
        (self.output / "networks.py").write_text(NETWORKS)

    def network(self, name: str) -> str:
        return f"{self.output}/networks.py:{name}"

    def recipe(self, name: str, **changes: Any) -> dict[str, Any]:
        """The run of a file in config/."""
        given = yaml.safe_load((ROOT / "config" / f"{name}.yaml").read_text())
        for key in ("experiment", "test_views", "nodes", "nproc_per_node", "device"):
            given.pop(key, None)
        given["dataset"] = given["dataset"]["name"]
        if self.tiny:
            given |= {"dataset": "digits", "widths": [8, 8, 8], "global_batch_size": 360}
            given |= {"precision": "fp32"}
        return given | changes

    def start(
        self,
        run: dict[str, Any],
        folder: str,
        *,
        ranks: int = 1,
        launch: Sequence[object] = (),
        options: Sequence[object] = (),
        **environment: str,
    ) -> subprocess.Popen[str]:
        """Launch a training; its output is in FOLDER.txt."""
        program = [SCRIPTS / "train.py"]
        if ranks > 1 and self.device == "cuda":
            # Node by node, so that each may have the GPU.
            gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
            environment |= {"SHARED_GPU": "1", "CUDA_VISIBLE_DEVICES": ",".join([gpu] * ranks)}
        if environment:
            program.insert(0, ROOT / "benchmarks" / "in_training.py")
        command = [
            sys.executable, SCRIPTS / "launch.py", "--transport", "local", "--nodes", ranks,
            "--cpus", usable_cpus(), "--device", self.device, "--timeout", 30, *launch, "--",
            *program, "--run", json.dumps(run), "--data", self.data / run["dataset"],
            "--output", self.output / folder, *options,
        ]  # fmt: skip
        return subprocess.Popen(
            list(map(str, command)),
            env=os.environ | environment,
            stdout=(self.output / f"{folder}.txt").open("a"),
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self, folder: str) -> Iterator[tuple[int, list[bytes], list[bytes]]]:
        """The processes of this training: number, command and environment."""
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (path / "cmdline").read_bytes().split(b"\0")
                if str(self.output / folder).encode() in command:
                    yield int(path.name), command, (path / "environ").read_bytes().split(b"\0")

    def lives(self, folder: str) -> bool:
        """Whether a process of this training is left."""
        return any(self.processes(folder))

    def said(self, folder: str) -> str:
        return (self.output / f"{folder}.txt").read_text()

    def train(self, run: dict[str, Any], folder: str, **how: Any) -> dict[str, Any]:
        """Train to the end; returns run.json."""
        if self.start(run, folder, **how).wait():
            raise AssertionError(self.said(folder)[-600:])
        return json.loads((self.output / folder / "run.json").read_text())

    def stopped_and_resumed(self, run: dict[str, Any], folder: str, **how: Any) -> None:
        training = self.start(run, folder, **how)
        while training.poll() is None and "epoch 2/" not in self.said(folder):
            time.sleep(0.02)
        training.send_signal(signal.SIGTERM)
        if (status := training.wait()) != STOPPED:
            raise AssertionError(f"status {status} after SIGTERM: {self.said(folder)[-400:]}")
        self.train(run, folder, **how)
        assert "resumed after" in self.said(folder)

    def result(self, folder: str) -> str:
        """SHA-256 of the weights, and of the history without its times."""
        path = self.output / folder
        rows = (path / "metrics.csv").read_text().splitlines()
        plain = "\n".join(row.rsplit(",", 2)[0] for row in rows)
        weights = (path / "model.safetensors").read_bytes()
        return hashlib.sha256(weights + plain.encode()).hexdigest()[:16]

    def same(self, *folders: str) -> dict[str, Any]:
        results = {folder: self.result(folder) for folder in folders}
        if len(set(results.values())) > 1:
            raise AssertionError(f"other bits: {results}")
        return {"sha256": results[folders[0]]}

    def resumes(self, name: str, run: dict[str, Any], **how: Any) -> Check:
        def check() -> dict[str, Any]:
            self.train(run, name, **how)
            self.stopped_and_resumed(run, f"{name}-resumed", **how)
            return self.same(name, f"{name}-resumed")

        return f"{name}: resumed to the same bits", check

    # The calls.

    def first(self) -> Iterator[Check]:
        """It starts; bits after a resume; disk and memory."""
        for precision in ("fp32", "bf16", "fp16"):
            yield self.resumes(precision, self.small | {"precision": precision})
        given = self.small | {"model": self.network("dropout"), "learning_rate": 0.05}
        yield self.resumes("dropout", given)

        def places() -> dict[str, Any]:
            for place in ("disk", "memory"):
                self.train(self.small, place, options=["--images-in", place])
            return self.same("disk", "memory", "fp32")

        yield "images on disk and in memory: the same bits", places

        def evaluated() -> dict[str, Any]:
            output = self.output / "fp32"
            command = [
                sys.executable, SCRIPTS / "evaluate.py", "--data", self.data / "digits",
                "--model", output / "model.safetensors", "--device", self.device,
                "--views", "plain", "--output", output / "evaluation.json",
            ]  # fmt: skip
            subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
            accuracy = json.loads((output / "evaluation.json").read_text())["accuracy"]
            assert accuracy > 0.9, accuracy
            return {"accuracy": accuracy}

        yield "evaluation", evaluated

        def inexact() -> dict[str, Any]:
            run = self.small | {"model": self.network("pooled"), "learning_rate": 0.05, "epochs": 2}
            about = self.train(run, "pooled")
            named = [each["text"][:40] for each in about["incidents"] if each["kind"] == "inexact"]
            assert bool(named) == (self.device == "cuda"), named
            return {"named": named}

        yield "AdaptiveAvgPool to 3 x 3 is named as not exact on a GPU", inexact

    def second(self) -> Iterator[Check]:
        """Two and three ranks on one GPU, and what they do when something is wrong."""
        for ranks in (2, 3):
            yield self.resumes(f"ranks-{ranks}", self.small, ranks=ranks)
        compressed = self.small | {"gradient_compression": "bf16"}
        yield self.resumes("compressed", compressed, ranks=2)
        for launcher in ("torchrun", "accelerate", "torch.distributed.launch"):
            yield f"{launcher}, with the probe: the same bits", partial(self.launched, launcher)

        def orders() -> dict[str, Any]:
            # Of the all-reduces alone: NCCL has no tree for what else is asked of it.
            for how in ("ring", "tree"):
                self.train(self.small, f"ranks-3-{how}", ranks=3, NCCL_ALGO=f"allreduce:{how}")
            return {how: self.result(f"ranks-3{how}") for how in ("", "-ring", "-tree")}

        yield "three ranks, whose sums NCCL makes in two orders: their bits", orders
        for fault in self.faults:

            def failed(fault: str = fault) -> dict[str, Any]:
                begun = time.monotonic()
                training = self.start(self.small | {"epochs": 50}, fault, ranks=2, FAULT=fault)
                try:
                    status = training.wait(timeout=200)
                finally:
                    training.terminate()
                seconds = time.monotonic() - begun
                while self.lives(fault) and time.monotonic() - begun - seconds < LEFT:
                    time.sleep(0.1)
                left = time.monotonic() - begun - seconds
                assert status == 1, status
                assert not self.lives(fault)
                line = rf"^launch: in_training failed: rank 1 on [^\s:]+:? {self.faults[fault]}.*"
                last = re.search(line, self.said(fault), re.MULTILINE)
                assert last, self.said(fault)[-400:]
                found = {"seconds_from_start": round(seconds, 1), "left_for": round(left, 1)}
                return found | {"line": last[0][:200]}

            yield f"rank 1: {fault}: it is named", failed
        yield "SIGTERM to one of two ranks: resumed to the same bits", self.one_rank_stopped
        yield "torchrun-c10d: the same bits", partial(self.launched, "torchrun-c10d")

    def third(self) -> Iterator[Check]:
        """Where the time of a step goes."""
        name = "digits" if self.tiny else "cifar10"
        epochs = {"epochs": 4, "dataset": name}
        for how in ("none", "default", "cuda_graphs"):

            def profiled(how: str = how) -> dict[str, Any]:
                path = self.output / f"profile-{how}.json"
                run = self.recipe("airbench94", compile=how, **epochs)
                self.train(run, f"profiled-{how}", PROFILE=str(path))
                about = json.loads(path.read_text())
                assert how != "cuda_graphs" or about["graphs_per_step"] >= 1, (
                    "no graph was recorded"
                )
                return about

            if how == "none" or not self.tiny:
                yield f"airbench94, compile: {how}: an epoch under the profiler", profiled
        for place in ("disk", "memory"):

            def waits(place: str = place) -> dict[str, Any]:
                path = self.output / f"waits-{place}.json"
                run = self.small | {"epochs": 3}
                options = ["--images-in", place]
                self.train(run, f"waits-{place}", options=options, PROFILE=str(path))
                about = json.loads(path.read_text())
                in_each = [at for at, times in about["waits"].items() if times >= about["steps"]]
                assert not in_each, in_each
                return about

            yield f"hidden waits of a step, images on {place}", waits

        def muon() -> dict[str, Any]:
            banks = [(64, 216), (64, 576), (256, 576), *[(256, 2304)] * 3]
            matrices = [torch.randn(shape, device=self.device) for shape in banks]
            apart = seconds_of(lambda: [orthogonalised(each) for each in matrices], self.device)
            together = seconds_of(lambda: all_orthogonalised(matrices), self.device)
            return {"apart_ms": 1e3 * apart, "together_ms": 1e3 * together}

        yield "Muon's filter banks one by one and together", muon
        yield "a rank that sleeps or spins while it waits for its GPU", self.sleeps_or_spins
        yield "photographs from disk: pixels, steps, and both", self.photographs

    def launched(self, launcher: str) -> dict[str, Any]:
        self.train(
            self.small, launcher, ranks=2, launch=["--launcher", launcher], options=["--probe"]
        )
        return self.same("ranks-2", launcher)

    def one_rank_stopped(self) -> dict[str, Any]:
        folder = "one-stopped"
        training = self.start(self.small, folder, ranks=2)
        while training.poll() is None and "epoch 2/" not in self.said(folder):
            time.sleep(0.02)
        for number, command, environment in self.processes(folder):
            if b"RANK=1" in environment and not any(b"supervise.py" in word for word in command):
                os.kill(number, signal.SIGTERM)
        status = training.wait()
        assert status == STOPPED, f"status {status}: {self.said(folder)[-400:]}"
        self.train(self.small, folder, ranks=2)
        assert "resumed after" in self.said(folder)
        return self.same("ranks-2", folder)

    def sleeps_or_spins(self) -> dict[str, Any]:
        """Milliseconds of an epoch, and the CPUs that the rank used meanwhile."""
        found = {}
        for how, variables in {"sleeps": {}, "spins": {"SPINS": "1"}}.items():
            path = self.output / f"times-{how}.json"
            run = self.recipe("airbench94", epochs=8, compile="none")
            self.train(run, f"waits-{how}", TIMES=str(path), **variables)
            # The first epochs make what later ones use.
            seconds, cpu = map(sum, zip(*json.loads(path.read_text())[2:], strict=True))
            found[how] = {"epoch_ms": 1e3 * seconds / 6, "cpus": cpu / seconds}
        return found

    def photographs(self) -> dict[str, Any]:
        """Milliseconds of a batch. If both together take longer than the longer of the two, the
        threads that copy images keep the step from Python's lock. And what waits for the GPU, and
        the speed of a validation.
        """
        compute_exactly()
        number, batch = (16, 4) if self.tiny else (2048, 64)
        path = self.output / "photographs.npy"
        images = np.lib.format.open_memmap(
            path, mode="w+", dtype=np.uint8, shape=(number, 256, 256, 3)
        )
        images[:] = np.random.default_rng(0).integers(0, 256, images.shape[1:], dtype=np.uint8)
        device = torch.device(self.device)
        how = Augmentation(size=(256, 256), window=(224, 224), flip=True)
        shares = Shares(images, np.arange(number), how, device, resident=False)
        plan = epoch_plan(number, 0, 1, how)
        network = build("resnet18_imagenet", (), 10, (224, 224, 3)).move_to(device)
        labels = torch.zeros(batch, dtype=torch.long, device=device)

        def step(pixels: torch.Tensor) -> None:
            functional.cross_entropy(network(pixels), labels).backward()

        def over_all(work: Callable[[torch.Tensor], object]) -> None:
            for _, pixels in shares.of_epoch(plan, plan.order.split(batch)):
                work(pixels)

        pixels = shares.take(torch.arange(batch))
        times = number // batch
        found = {
            "pixels": seconds_of(lambda: over_all(len), self.device, 1) / times,
            "step": seconds_of(lambda: step(pixels), self.device, times),
            "both": seconds_of(lambda: over_all(step), self.device, 1) / times,
        }
        return {
            **{f"{name}_ms": 1e3 * seconds for name, seconds in found.items()},
            "waits": waits_in(lambda: over_all(step)),
            "validated_per_second": self.validation(network, images),
        }

    def validation(self, network: torch.nn.Module, images: np.ndarray) -> dict[str, float]:
        """Images/s by how many are evaluated at once: as on a CPU, and as on a GPU."""
        device = torch.device(self.device)
        count = len(images) - len(images) % 16
        labels = torch.zeros(count, dtype=torch.long, device=device)
        held_out = Examples(torch.from_numpy(images), torch.arange(count), labels)
        process = Process(0, 0, 1, device)
        found = {}
        for kind in ("cpu", "cuda"):
            size = images_per_pass(images, kind)
            steps.images_per_pass = lambda *_, size=size: size  # type: ignore[attr-defined]
            seconds = seconds_of(
                lambda: steps.validate(network, held_out, (224, 224), process), self.device, 1
            )
            found[kind] = count / seconds
        steps.images_per_pass = images_per_pass  # type: ignore[attr-defined]
        return found

    def fourth(self) -> Iterator[Check]:
        """Time to 94 %, and what saving costs."""

        def time_to_accuracy() -> dict[str, Any]:
            config = ROOT / "config" / "airbench94.yaml"
            if self.tiny:
                config = self.output / "small.yaml"
                small = {key: value for key, value in self.small.items() if key != "dataset"}
                small |= {"experiment": "small", "dataset": {"name": "digits"}, "device": "cpu"}
                config.write_text(json.dumps(small | {"test_views": "plain"}))
            data = self.data / ("digits" if self.tiny else "cifar10")
            command = [
                sys.executable, ROOT / "benchmarks" / "gpu.py", data, self.output / "gpu",
                "--seeds", 2 if self.tiny else 3, "--configfile", config,
            ]  # fmt: skip
            subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
            found = json.loads((self.output / "gpu" / "gpu.json").read_text())
            assert found["accuracy"]["mean"] > (0.9 if self.tiny else 0.935), found["accuracy"]
            keys = ("accuracy", "seconds", "images_per_second", "share_of_matrix_rate")
            return {key: found[key] for key in keys}

        yield "benchmarks/gpu.py", time_to_accuracy
        for every in (1, 8):

            def saving(every: int = every) -> dict[str, Any]:
                options = ["--save-every-epochs", every]
                about = self.train(self.recipe("airbench94"), f"save-{every}", options=options)
                last = about["ranks"][0]
                found = {key: value for key, value in last.items() if key.startswith("gpu_")}
                return {"seconds": about["seconds"], "saving": about["saving"]} | found

            yield f"airbench94, a state every {every} epochs", saving

        def resnet() -> dict[str, Any]:
            run = self.recipe("resnet18", model="resnet18", seed=0, epochs=3)
            about = self.train(run, "resnet18")
            return {"images_per_second": about["metrics"]["images_per_second"]}

        if not self.tiny:
            yield "resnet18", resnet

    def fifth(self) -> Iterator[Check]:
        """Compiled code, full memory, and large networks."""

        def large() -> dict[str, Any]:
            width = 1000 if self.tiny else 8000
            run = self.small | {"model": self.network("wide"), "model_args": {"width": width}}
            run |= {"optimizer": "adamw", "learning_rate": 0.001, "epochs": 3}
            self.stopped_and_resumed(run, "large")
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
            about = json.loads((self.output / "large" / "run.json").read_text())
            return {"parameters": about["parameters"], "most_host_bytes": peak}

        yield "a large network resumed: host memory", large

        for how in ("default", "cuda_graphs"):
            if not self.tiny:
                yield self.resumes(f"compiled-{how}", self.recipe("airbench94", compile=how))

        def full() -> dict[str, Any]:
            run = self.small | {"model": self.network("Full")}
            status = self.start(run, "full").wait()
            last = self.said("full").strip().splitlines()[-1]
            assert status == 1, status
            assert "the memory of a GPU on " in last, last
            return {"line": last[:200]}

        if not self.tiny:
            yield "out of memory is one line", full


def waits_in(work: Callable[[], object]) -> list[str]:
    """The lines that waited for a GPU."""
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        work()
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
    return sorted({f"{each.filename}:{each.lineno}" for each in waits})


def seconds_of(function: Callable[[], object], device: str, calls: int = 20) -> float:
    """Seconds of a call: the mean of several, after as many."""
    for _ in range(2):
        begun = time.perf_counter()
        for _ in range(calls):
            function()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - begun) / calls
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("call", type=int, choices=range(1, 6))
    parser.add_argument("data", type=Path, help="folder of data sets")
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    records = args.output / "day.jsonl"
    if records.exists() and f'"call": {args.call},' in records.read_text():
        parser.error(f"{records} has call {args.call}; name another folder")
    day = Day(args.data, args.output, args.device)
    calls = (day.first, day.second, day.third, day.fourth, day.fifth)
    begun, failures = time.monotonic(), 0
    with records.open("a") as file:
        for name, check in calls[args.call - 1]():
            at = time.monotonic()
            if at - begun > BUDGET:
                record: dict[str, Any] = {"verdict": "left out"}
            else:
                try:
                    record = {"verdict": "ok"} | check()
                except Exception as error:  # the other checks are worth their time
                    text = re.sub(r"\s+", " ", str(error))[:800]
                    record = {"verdict": "FAILED", "error": f"{type(error).__name__}: {text}"}
                    failures += 1
            record = {"call": args.call, "check": name, "device": args.device} | record
            record["seconds"] = round(time.monotonic() - at, 1)
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(f"{record['verdict']:8} {name}: {record}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
