"""`python -m torch.distributed.launch`, torchrun's deprecated predecessor: by itself, because torch is to drop it."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from ddp.errors import Refusal

MODULE = "torch.distributed.launch"


def command(options: Mapping[str, object]) -> tuple[str, ...]:
    """The command for torchrun's options, `--use-env` among them so that the rank is in the environment, as with torchrun.

    Raises:
        Refusal: the installed torch no longer has it.
    """
    # Looked up as a file: find_spec on the module itself would import torch, which takes seconds.
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or not Path(torch.origin).with_name("distributed").joinpath("launch.py").exists():
        raise Refusal(f"launcher: the installed torch has no {MODULE} any more; use torchrun, which takes its place")
    return ("-m", MODULE, "--use-env", *(f"--{name}={value}" for name, value in options.items()), "--")
