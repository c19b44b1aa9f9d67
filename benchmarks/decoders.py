"""The import of photographs against other decoders: python decoders.py FOLDER [PYTHON].

500 generated photographs of 12 and as many of 0.2 megapixels are decoded to 224 x 224 pixels on all
cores by the whole import, by its decoder alone, by plain Pillow, by torchvision.io, and by SPDL if
PYTHON is one with `spdl` and FFmpeg's libraries. All take turns; medians. Prints a table in
Markdown.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from images import SCRIPTS, anonymous
from PIL import Image

PHOTOGRAPHS, EDGE = 500, 224
LARGE, SMALL = (4000, 3000), (512, 384)
# A round of the large ones takes two minutes on two quiet cores.
ROUNDS = {SMALL: 9, LARGE: 3}
FIELD = (4096, 5120)


def main() -> None:
    folder = Path(sys.argv[1])
    pythons = dict.fromkeys(("import", "own", "pillow", "torchvision"), sys.executable)
    if len(sys.argv) > 2:
        pythons["spdl"] = sys.argv[2]
    write(folder)
    print(
        "| megapixels | decoder | images/s | CPU seconds | MB |", "|---|---|---|---|---|", sep="\n"
    )
    for size, rounds in ROUNDS.items():
        where = folder / str(size[0])
        found = [
            {name: decode(python, where, name) for name, python in pythons.items()}
            for _ in range(rounds)
        ]
        for name in pythons:
            seconds, cpu, memory = map(median, zip(*(each[name] for each in found), strict=True))
            print(
                f"| {size[0] * size[1] / 1e6:.1f} | {name} | {PHOTOGRAPHS / seconds:.1f} "
                f"| {cpu:.2f} | {memory / 1e6:.0f} |",
                flush=True,
            )


def write(folder: Path) -> None:
    """Write the photographs, each in both sizes: parts of one large field."""
    if (folder / "written").exists():
        return
    picture = field()
    with ProcessPoolExecutor() as pool:
        for _ in pool.map(partial(write_one, folder, picture), range(PHOTOGRAPHS), chunksize=25):
            pass
    (folder / "written").touch()


def field() -> np.ndarray:
    """Noise whose amplitude falls with the frequency, as in photographs; bytes (h, w, 3)."""
    random = np.random.default_rng(0)
    rows, columns = np.fft.fftfreq(FIELD[0])[:, None], np.fft.rfftfreq(FIELD[1])[None]
    falls = 1 / np.maximum(np.hypot(rows, columns), 1 / FIELD[1])
    channels = []
    for _ in range(3):
        noise = np.fft.irfft2(np.fft.rfft2(random.standard_normal(FIELD)) * falls, FIELD)
        channels.append(np.clip(128 + 50 * noise / noise.std(), 0, 255).astype(np.uint8))
    return np.stack(channels, axis=2)


def write_one(folder: Path, picture: np.ndarray, number: int) -> None:
    random = np.random.default_rng(number)
    top, left = (random.integers(FIELD[axis] - LARGE[1 - axis]) for axis in (0, 1))
    photograph = Image.fromarray(picture[top : top + LARGE[1], left : left + LARGE[0]])
    for size in (LARGE, SMALL):
        split = "test" if number % 25 == 0 else "train"
        path = folder / str(size[0]) / split / str(number % 2) / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph.resize(size).save(path, quality=90)


def decode(python: str, folder: Path, name: str) -> tuple[float, float, float]:
    """Seconds, CPU seconds, and the most bytes of anonymous memory of its processes together."""
    script = Path(__file__).with_name("decoding.py")
    most = 0.0
    with subprocess.Popen(
        [python, script, str(EDGE), folder, name],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
    ) as process:  # fmt: skip
        while process.poll() is None:
            # It may end meanwhile.
            with suppress(psutil.NoSuchProcess):
                most = max(most, anonymous(process.pid))
            time.sleep(0.1)
        said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{name} ended with status {process.returncode}")
    found = json.loads(said)
    return found["seconds"], found["cpu_seconds"], most


if __name__ == "__main__":
    main()
