"""`python -m torch.distributed.launch`, torchrun's deprecated predecessor: by itself, because torch is to drop it."""

import importlib.util
from pathlib import Path

from ddp.errors import Refusal

MODULE = "torch.distributed.launch"


def refuse_if_dropped() -> None:
    """Refuse to use it where it is not.

    Raises:
        Refusal: the installed torch no longer has it.
    """
    # Looked up as a file: find_spec on the module itself would import torch, which takes seconds.
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or not Path(torch.origin).with_name("distributed").joinpath("launch.py").exists():
        raise Refusal(f"launcher: the installed torch has no {MODULE} any more; use torchrun, which takes its place")
