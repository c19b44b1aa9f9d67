"""Decode and resize images on all cores: python decoding.py EDGE FOLDER [DECODER].

DECODER is the import's own by default, or one of `DECODERS`, or `import`, the whole import of
FOLDER into FOLDER.imported. Prints a JSON object: `seconds` and `cpu_seconds`, without the start of
Python and its imports.
"""

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path


def main() -> None:
    edge, folder = int(sys.argv[1]), Path(sys.argv[2])
    name = sys.argv[3] if len(sys.argv) > 3 else "own"
    work = importing(edge, folder) if name == "import" else decoding(DECODERS[name], edge, folder)
    start, before = time.perf_counter(), cpu_seconds()
    work()
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - before
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu}))


def cpu_seconds() -> float:
    """Of this process and of those below it that have ended."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def decoding(decode: Callable[[int, Path], None], edge: int, folder: Path) -> Callable[[], None]:
    paths = sorted(folder.rglob("*.jpg"))
    # Imports what it needs, which processes that are forked need not do again.
    decode(edge, paths[0])
    # SPDL is made for threads.
    pool = ThreadPoolExecutor if decode is spdl else ProcessPoolExecutor

    def work() -> None:
        with pool(len(os.sched_getaffinity(0))) as workers:
            for _ in workers.map(partial(decode, edge), paths, chunksize=32):
                pass

    return work


def importing(edge: int, folder: Path) -> Callable[[], None]:
    import fetch
    from manynodes.data.user.declaration import UserData

    # `fetch` imports it when it needs it.
    import_module("manynodes.data.user.folder_of_images")
    output = folder.with_suffix(".imported")
    shutil.rmtree(output, ignore_errors=True)
    (output / "work").mkdir(parents=True)
    data = UserData("pictures", "folder", str(folder), image_size=(edge, edge), channels=3)

    def work() -> None:
        with redirect_stdout(sys.stderr):
            fetch.publish(fetch.imported(data, output / "work"), output / "work", output)

    return work


def own(edge: int, path: Path) -> None:
    from manynodes.data.user.pictures import read_image

    read_image(path, (edge, edge), 3, jpeg_scaling=True)


def pillow(edge: int, path: Path) -> None:
    from PIL import Image

    with Image.open(path) as image:
        width, height = (round(edge * each / min(image.size)) for each in image.size)
        small = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - edge) // 2, (height - edge) // 2
    small.crop((left, top, left + edge, top + edge)).tobytes()


def torchvision(edge: int, path: Path) -> None:
    import torch
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2 import functional

    torch.set_num_threads(1)
    image = decode_image(str(path), ImageReadMode.RGB)
    functional.center_crop(functional.resize(image, [edge], antialias=True), [edge, edge])


def spdl(edge: int, path: Path) -> None:
    io = import_module("spdl.io")

    # Of landscapes; -2: the even width that keeps their form.
    how = f"scale=w=-2:h={edge}:flags=bilinear,crop={edge}:{edge},format=pix_fmts=rgb24"
    frames = io.decode_packets(io.demux_image(str(path)), filter_desc=how)
    io.to_numpy(io.convert_frames(frames))


DECODERS = {each.__name__: each for each in (own, pillow, torchvision, spdl)}


if __name__ == "__main__":
    main()
