"""`python -m torch.distributed.launch`, which torch will drop; therefore in its own module."""

import importlib.util
from pathlib import Path

from manynodes.base.errors import Refusal

MODULE = "torch.distributed.launch"


def refuse_if_dropped() -> None:
    """Refuse to use it if the installed torch no longer has it.

    Raises:
        Refusal: naming torchrun instead.
    """
    # Looked up as a file: find_spec on the module would import torch, which takes seconds.
    torch = importlib.util.find_spec("torch")
    if (
        torch is None
        or torch.origin is None
        or not Path(torch.origin).with_name("distributed").joinpath("launch.py").exists()
    ):
        raise Refusal(
            f"launcher: the installed torch has no {MODULE} any more; use torchrun, its successor"
        )
