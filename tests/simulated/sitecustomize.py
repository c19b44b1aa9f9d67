"""Python runs this at its start if this folder is in PYTHONPATH: what a rank asks of gloo is then
done as NCCL does it, see nccl_over_gloo.py. A process that does not import torch still does not.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

# In place of train.py's, so that a test waits for less.
BLOCKED = 4


def of_torch(distributed: ModuleType) -> None:
    """From its first group on: now, torch is not whole yet."""
    join = distributed.init_process_group

    def init_process_group(*arguments: Any, **options: Any) -> None:
        import nccl_over_gloo

        distributed.init_process_group = join
        nccl_over_gloo.install()
        distributed.init_process_group(*arguments, **options)

    distributed.init_process_group = init_process_group


def of_a_rank(stopping: ModuleType) -> None:
    """A rank that computes on a GPU may be blocked; its supervisor, without torch, may not."""
    listen = stopping.listen

    def listening(deadline: float | None, blocked: float | None = None) -> Any:
        return listen(deadline, BLOCKED if "torch" in sys.modules else blocked)

    stopping.listen = listening


CHANGES = {"torch.distributed": of_torch, "manynodes.ranks.stopping": of_a_rank}


class Changed(importlib.abc.MetaPathFinder):
    """Finds these modules where they are, and changes each when it has been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            CHANGES[name](module)

        spec.loader.exec_module = run_and_change
        return spec


if "RANK" in os.environ:
    sys.meta_path.insert(0, Changed())
