"""Joint decisions after every step: stop, save or fail, with one all-reduce of four numbers.

All ranks must stop after the same step; otherwise the rest hang in the next collective.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from manynodes.ranks.device import numbers
from manynodes.ranks.process_group import Process
from manynodes.ranks.stopping import REASONS


@dataclass(frozen=True)
class Verdict:
    """The result of a vote, equal on every rank.

    Attributes:
        stop: why a rank was asked to stop, one of REASONS; None if none was.
        save: a rank wants to save.
        bad_loss, bad_gradient: the first rank with a loss, or an own gradient, that is not finite;
            None if there is none.
    """

    stop: str | None
    save: bool
    bad_loss: int | None
    bad_gradient: int | None


class Vote:
    """A vote in progress. On a GPU, its result arrives during the next step, so nobody waits for
    it.

    Args:
        stop: why this rank was asked to stop; None if it was not.
        save: whether it wants to save.
        loss, gradient: of this rank and step, scalars on its device.
    """

    def __init__(
        self, process: Process, stop: str | None, save: bool, loss: Tensor, gradient: Tensor
    ) -> None:
        self.nobody = process.world_size
        # The first reason to stop, and the smallest rank that votes yes; for save any would do.
        # Filled on the device, because a copy would wait for it.
        wishes = (
            REASONS.index(stop) if stop else len(REASONS),
            process.rank if save else self.nobody,
        )
        asked = [torch.full((1,), wish, device=process.device) for wish in wishes]
        # In fewer operations than `isfinite` and `where`: each is a kernel.
        values = torch.stack((loss.double(), gradient.double()))
        finite = values - values == 0
        votes = torch.cat((*asked, process.rank + finite * (self.nobody - process.rank)))
        if dist.is_initialized():
            dist.all_reduce(votes, dist.ReduceOp.MIN)
        self.result = votes
        self.arrived: torch.cuda.Event | None = None
        if votes.is_cuda:
            self.result = torch.empty(votes.shape, dtype=votes.dtype, pin_memory=True)
            self.result.copy_(votes, non_blocking=True)
            # Without spinning: the result is of the step before, and a rank may have one CPU.
            self.arrived = torch.cuda.Event(blocking=True)
            self.arrived.record()

    def verdict(self) -> Verdict:
        if self.arrived:
            self.arrived.synchronize()
        stop, *ranks = numbers(self.result)
        save, loss, gradient = (None if rank == self.nobody else rank for rank in ranks)
        reason = REASONS[stop] if stop < len(REASONS) else None
        return Verdict(reason, save is not None, loss, gradient)
