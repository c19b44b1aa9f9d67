"""Images larger than CIFAR-10's: their import, the input pipeline, a training on them, and memory.

The files are JPEGs of 256 x 256 pixels, each a mosaic of 64 photographs of CIFAR-10, so that they
are as hard to decode as photographs. The pipeline's peer is torchvision's ImageFolder with a
DataLoader, on the same files and with its best number of workers. Memory is measured in a control
group, as root, on arrays three times as large as the memory that it allows.
"""

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import torch
from measured import Measured
from PIL import Image
from throughput import CPUS, Bare, Case, Ours
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from classifier.pixels import batches
from classifier.pixels.batches import Augmentation
from classifier.pixels.shares import Shares
from manynodes.data.folder import DataFolder
from manynodes.data.user.declaration import UserData
from manynodes.ranks.memory import keep_freed_memory
from manynodes.ranks.process_group import process_group

SCRIPTS = Path(__file__).resolve().parents[1] / "workflow" / "scripts"
EDGE, WINDOW, BATCH = 256, 224, 64
TRAIN, TEST, CLASSES = 4800, 200, 10
ROUNDS = 5
# MB that the ranks may use, and images of 3 x 224 x 224 in arrays of three times that size.
ALLOWED = 1600
LARGE = 3 * ALLOWED * 1_000_000 // (224 * 224 * 3)
# Nearly all of its time is reading.
NET = """
from torch import nn

def build(classes, channels, size):
    return nn.Sequential(
        nn.Conv2d(channels, 8, 16, 16), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(1568, classes)
    )
"""


def measure(data: Path, work: Path) -> Iterator[Measured]:
    files = work / "files"
    shutil.rmtree(work, ignore_errors=True)
    write_mosaics(DataFolder.read(data), files)
    user_data = UserData("mosaics", "folder", str(files), image_size=(EDGE, EDGE), channels=3)
    yield importing(user_data, work)
    imported = DataFolder.read(work / "imported")
    yield from pipeline(imported, files)
    yield training(imported, work)
    yield memory(work / "large")


def write_mosaics(cifar: DataFolder, root: Path) -> None:
    images, _ = cifar.split("train")
    random = np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("test", TEST)):
        for number in range(count):
            folder = root / split / str(number % CLASSES)
            folder.mkdir(parents=True, exist_ok=True)
            tiles = images[random.integers(0, len(images), 64)].reshape(8, 8, 32, 32, 3)
            mosaic = tiles.transpose(0, 2, 1, 3, 4).reshape(EDGE, EDGE, 3)
            Image.fromarray(mosaic).save(folder / f"{number:05}.jpg", quality=90)


def importing(user_data: UserData, work: Path) -> Measured:
    """An import of a folder, against decoding and resizing alone on all cores."""
    script = Path(__file__).with_name("decoding.py")

    def seconds(what: str) -> float:
        # To another size than the files', so that they are resized.
        done = subprocess.run(
            [sys.executable, script, str(WINDOW), user_data.path, what],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
        )
        return json.loads(done.stdout)["seconds"]

    rounds = [(seconds("import"), seconds("own")) for _ in range(ROUNDS)]
    subprocess.run(
        [
            *(sys.executable, SCRIPTS / "fetch.py", "--dataset", user_data.name),
            *("--output", work / "imported", "--user-data", user_data.to_json()),
        ],
        check=True,
        capture_output=True,
    )
    ratio = statistics.median(alone / whole for whole, alone in rounds)
    whole = statistics.median(whole for whole, _ in rounds)
    return Measured(
        "importing a folder of images",
        "decoding and resizing alone, all cores",
        ratio,
        details={"images": TRAIN + TEST, "seconds": whole, "rounds": ROUNDS},
    )


def pipeline(imported: DataFolder, files: Path) -> Iterator[Measured]:
    """Cropped batches without a network, against ImageFolder and against `cat`."""
    images, _ = imported.split("train")
    how = Augmentation((EDGE, EDGE), (WINDOW, WINDOW))
    of = Shares(images, np.arange(len(images)), how, torch.device("cpu"), False)

    epochs = itertools.count(1)

    def ours() -> float:
        """Images per second and core."""
        plan = batches.epoch_plan(len(of.rows), 0, next(epochs), how)
        start = time.perf_counter()
        for _part, _pixels in of.of_epoch(plan, plan.order.split(BATCH)):
            pass
        return len(of.rows) / (time.perf_counter() - start) / CPUS

    keep_freed_memory()  # as a training does
    transform = v2.Compose([v2.RandomCrop(WINDOW), v2.PILToTensor()])
    folder = ImageFolder(str(files / "train"), transform)

    def theirs(workers: int) -> float:
        loader = DataLoader(
            folder, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )
        for _ in loader if workers else ():
            pass  # starts the workers
        start = time.perf_counter()
        for _ in loader:
            pass
        return len(folder) / (time.perf_counter() - start) / CPUS

    ours()
    best = max((1, 2, 3, 4), key=theirs)
    rounds = [(ours(), theirs(best)) for _ in range(ROUNDS)]
    yield Measured(
        "input pipeline, 224 of 256 pixels",
        "ImageFolder with DataLoader, best number of workers",
        statistics.median(mine / other for mine, other in rounds),
        least=10,
        details={
            "images_per_second_and_core": statistics.median(mine for mine, _ in rounds),
            "their_images_per_second_and_core": statistics.median(other for _, other in rounds),
            "their_workers": best,
        },
    )
    path = imported.path / "train_images.npy"

    def cat() -> float:
        start = time.perf_counter()
        with open(os.devnull, "wb") as nothing:
            subprocess.run(["cat", path], stdout=nothing, check=True)
        return path.stat().st_size / (time.perf_counter() - start)

    both = [(ours() * CPUS * WINDOW * WINDOW * 3, cat()) for _ in range(2 * ROUNDS)]
    yield Measured(
        "input pipeline, 224 of 256 pixels, bytes",
        "`cat` of the same file from the page cache",
        statistics.median(mine / other for mine, other in both),
        least=0.3,
        details={
            "gb_per_second": statistics.median(mine for mine, _ in both) / 1e9,
            "cat_gb_per_second": statistics.median(other for _, other in both) / 1e9,
        },
    )


def training(imported: DataFolder, work: Path) -> Measured:
    """A training with the usual augmentation, against the bare step on one batch in memory."""
    batch, steps = 32, 4
    case = Case(
        "resnet18_imagenet",
        batch,
        steps,
        {
            "dataset": imported.dataset,
            "model": "resnet18_imagenet",
            "crop_size": WINDOW,
            "validation_fraction": 1 - batch * steps / TRAIN,
        },
    )
    with process_group("cpu") as process:
        torch.set_num_threads(CPUS)
        ours = Ours(case, process, imported.path, work)
        bare = Bare(case, ours.training)
        rounds = [(ours.images_per_second(), bare.images_per_second()) for _ in range(ROUNDS)]
    return Measured(
        "training on images of 224 pixels, resnet18",
        "the bare step on one batch in memory",
        statistics.median(mine / other for mine, other in rounds),
        least=0.95,
        details={"images_per_second": statistics.median(mine for mine, _ in rounds)},
    )


def memory(work: Path) -> Measured:
    """Anonymous memory of the ranks of a node, whose data are three times the memory allowed."""
    work.mkdir(parents=True)
    np.save(work / "labels.npy", np.arange(LARGE) % CLASSES)
    images = np.lib.format.open_memmap(
        work / "images.npy", "w+", np.uint8, (LARGE, WINDOW, WINDOW, 3)
    )
    random = np.random.default_rng(0)
    for start in range(0, LARGE, 500):
        some = images[start : start + 500]
        some[:] = random.integers(0, 256, some.shape, np.uint8)
    del images
    user_data = UserData(
        "large", "arrays", str(work / "images.npy"), labels=str(work / "labels.npy"),
        test_fraction=0.01,
    )  # fmt: skip
    subprocess.run(
        [
            *(sys.executable, SCRIPTS / "fetch.py", "--dataset", "large"),
            *("--user-data", user_data.to_json(), "--output", work / "data"),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    (work / "images.npy").unlink()
    (work / "net.py").write_text(NET)
    run = {
        "dataset": "large", "model": f"{work}/net.py:build", "epochs": 1, "global_batch_size": 32,
        "nproc_per_node": 2, "crop": "shift", "shift": 0, "flip": False, "checkpoint_every": 0,
        "validation_fraction": 0, "learning_rate": 0.001,
    }  # fmt: skip
    command = [
        sys.executable, SCRIPTS / "launch.py", "--nproc-per-node", 2, "--", SCRIPTS / "train.py",
        "--run", json.dumps(run), "--data", work / "data", "--output", work / "out",
        "--resume=fresh",
    ]  # fmt: skip
    with limited(ALLOWED) as inside:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [*inside, *map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        most = 0.0
        while process.poll() is None:
            most = max(most, anonymous(process.pid))
            time.sleep(0.2)
        seconds = time.perf_counter() - begun
        if process.returncode:
            assert process.stderr is not None
            raise RuntimeError(process.stderr.read().decode())
    size = DataFolder.read(work / "data").bytes
    shutil.rmtree(work)
    return Measured(
        "anonymous memory of two ranks, data three times the memory allowed",
        "size of the data",
        most / size,
        most=0.3,
        details={"mb": most / 1e6, "data_mb": size / 1e6, "allowed_mb": ALLOWED,
                 "read_mb_per_second": size / 1e6 / seconds},
    )  # fmt: skip


def anonymous(pid: int) -> float:
    """Bytes of the anonymous memory of a process and those below it, shared pages counted once."""
    total = 0
    for each in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            text = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += 1024 * sum(
            int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss_Anon")
        )
    return total


class limited:  # noqa: N801, a context manager
    """A control group that allows so many MB; gives the command that enters it."""

    def __init__(self, megabytes: int) -> None:
        first = Path("/sys/fs/cgroup/memory")
        self.folder = (first if first.is_dir() else Path("/sys/fs/cgroup")) / f"ddp-{os.getpid()}"
        self.limit = "memory.limit_in_bytes" if first.is_dir() else "memory.max"
        self.bytes = megabytes * 1_000_000

    def __enter__(self) -> list[str]:
        self.folder.mkdir()
        (self.folder / self.limit).write_text(str(self.bytes))
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    def __exit__(self, *_: object) -> None:
        self.folder.rmdir()
