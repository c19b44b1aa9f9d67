"""What the ranks decide together after every step, at the price of one all-reduce of four numbers: to stop, to save, to give up.

Whoever is asked to stop, and whoever's numbers have gone bad, all ranks must leave after the same step, or those that stay wait for ever.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.process_group import Process


@dataclass(frozen=True)
class Verdict:
    """What came of a vote, the same on every rank.

    Attributes:
        stop: some rank is asked to stop.
        save: some rank wants the state saved.
        bad_loss, bad_gradient: the first rank whose loss, or whose own gradient, is not finite; None if all are.
    """

    stop: bool
    save: bool
    bad_loss: int | None
    bad_gradient: int | None


class Vote:
    """A vote under way. On a GPU its result arrives while the next step is computed: to read it then does not make the GPU wait.

    Args:
        loss, gradient: of this rank and step, scalars on its device.
    """

    def __init__(self, process: Process, stop: bool, save: bool, loss: Tensor, gradient: Tensor) -> None:
        self.nobody = process.world_size
        # The smallest rank that has something to say; for stop and save any will do. Filled in on the device: a copy would wait for it.
        asked = [torch.full((1,), process.rank if wish else self.nobody, device=process.device) for wish in (stop, save)]
        finite = torch.stack((loss.double(), gradient.double())).isfinite()
        votes = torch.cat((*asked, torch.where(finite, self.nobody, process.rank)))
        if dist.is_initialized():
            dist.all_reduce(votes, dist.ReduceOp.MIN)
        self.result = votes
        self.arrived: torch.cuda.Event | None = None
        if votes.is_cuda:
            self.result = torch.empty(votes.shape, dtype=votes.dtype, pin_memory=True)
            self.result.copy_(votes, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def verdict(self) -> Verdict:
        if self.arrived:
            self.arrived.synchronize()
        stop, save, loss, gradient = (None if rank == self.nobody else rank for rank in self.result.tolist())
        return Verdict(stop is not None, save is not None, loss, gradient)
