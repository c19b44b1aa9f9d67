"""Decode and resize images on all cores, and nothing else: python decoding.py EDGE FOLDER.

Prints the seconds that it took.
"""

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from manynodes.data.user.pictures import read_image


def main() -> None:
    size = int(sys.argv[1])
    paths = sorted(Path(sys.argv[2]).rglob("*.jpg"))
    start = time.perf_counter()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(partial(decoded, size), paths, chunksize=32):
            pass
    print(time.perf_counter() - start)


def decoded(size: int, path: Path) -> None:
    read_image(path, (size, size), 3)


if __name__ == "__main__":
    main()
