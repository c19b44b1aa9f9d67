"""A training as it goes on: one rank's network and data, how far it is, and the state that it can be left in and taken up from."""

import math
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ddp import batches, models
from ddp.config import Run
from ddp.data_folder import load_split
from ddp.errors import Refusal
from ddp.gradients import distributed
from ddp.history import HISTORY
from ddp.optimizers import learning_rate, make_optimizer, take_up
from ddp.process_group import Process, all_reduce, everyone_is_here
from ddp.saver import Saver
from ddp.staging import Staged, discard
from ddp.state import START_OVER, State, place
from ddp.steps import Stepper, average_batchnorm, random_state, set_random_state, validate
from ddp.stopping import Stopping
from ddp.vote import Vote


class Training:
    """One rank's part in the training of a run: the network, and how far it is.

    Attributes:
        epoch, step, seconds, history, attempts, checkpoints: as in `State`.
        totals: sums over this rank's images of the epoch so far, see `steps.step`.
        sizes: of an epoch's global batches.
    """

    def __init__(self, run: Run, process: Process, manifest: dict[str, Any], staged: Staged, code_sha256: str) -> None:
        self.run, self.process, self.manifest, self.code_sha256 = run, process, manifest, code_sha256
        # Everything the training needs is in memory before the first step, on the device it is used on.
        images, labels = (torch.tensor(array, device=process.device) for array in load_split(Path(staged.path), manifest, "train"))
        everyone_is_here()
        if process.local_rank == 0:
            discard(staged)
        held_in, held_out = (
            torch.from_numpy(indices).to(process.device)
            for indices in batches.validation_split(len(labels), run.validation_images, run.validation_seed)
        )
        self.validation = images[held_out], labels[held_out].long()
        images, self.labels = images[held_in], labels[held_in].long()
        self.padded = batches.pad(images, run.shift)
        self.sizes = batches.deal(len(self.labels), run.global_batch_size)

        torch.manual_seed(run.seed)
        self.classifier = models.build(run.model, run.widths, manifest["classes"])
        self.classifier.fit_to(images.cpu())
        self.classifier.average_recent_steps(run.epochs * len(self.sizes))
        self.classifier.place(process.device)
        self.mean_colour = self.classifier.mean.round().to(torch.uint8)
        # As many on every rank, or some would wait for others that have begun.
        sizes = sorted(set(self.sizes)) if run.compile != "none" else [2 * run.world_size]
        shares = [len(batches.share(torch.arange(size), process.rank, run.world_size)) for size in sizes]
        first = [(images[:share], self.labels[:share]) for share in shares]
        self.network, gradients = distributed(run, self.classifier, first)
        self.optimizer = make_optimizer(run, self.classifier)
        self.stepper = Stepper(run, self.network, gradients, self.optimizer, process.device)

        self.epoch, self.step, self.seconds = 0, 0, 0.0
        self.totals = torch.zeros(2, dtype=torch.float64, device=process.device)
        self.history: list[dict[str, Any]] = []
        self.attempts: list[dict[str, Any]] = []
        self.checkpoints: dict[int, str] = {}
        self.began = time.monotonic()

    @property
    def steps_done(self) -> int:
        return self.epoch * len(self.sizes) + self.step

    @property
    def remedy(self) -> str:
        """For numbers that are not finite."""
        return f"use a lower learning_rate than {self.run.learning_rate} or a longer warmup; the last good state is kept"

    def restore(self, state: State) -> None:
        """Go on from a state.

        Raises:
            Refusal: its tensors are not those of this network.
        """
        try:
            self.take_up(state)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refusal(f"the state after {place(state.epoch, state.step)} does not fit the network ({error}); {START_OVER}") from None

    def take_up(self, state: State) -> None:
        # All steps of an epoch may be done and its end not: that is where a stop after its last step leaves it.
        if state.step > len(self.sizes) or any(tuple(row) != HISTORY for row in state.history):
            raise ValueError("its steps or its history are others")
        self.classifier.load_state_dict(state.model)
        take_up(self.optimizer, state.optimizer)
        self.stepper.scaler.load_state_dict(state.scaler)
        self.epoch, self.step, self.seconds = state.epoch, state.step, state.seconds
        self.history, self.attempts, self.checkpoints = state.history, state.attempts, state.checkpoints
        # On another number of processes there is no own part to be had, and between two epochs none is needed but the random numbers.
        if len(state.ranks) == self.run.world_size:
            own_part = state.ranks[self.process.rank]
            for buffer_name, buffer in self.classifier.named_buffers():
                buffer.copy_(own_part["buffers"][buffer_name])
            self.totals.copy_(own_part["totals"])
            set_random_state(own_part["rng"], self.process.device)

    def own_part(self) -> dict[str, Any]:
        """What differs between ranks, see `State.ranks`, on the CPU."""
        buffers = {name: buffer.cpu() for name, buffer in self.classifier.named_buffers()}
        return {"buffers": buffers, "totals": self.totals.cpu(), "rng": random_state(self.process.device)}

    def state(self, ranks: list[dict[str, Any]]) -> State:
        """The state of all, of what each rank has handed in.

        Raises:
            Refusal: there is a number in it that is not finite.
        """
        # Steps whose loss and gradient are finite can leave a weight that is not, or a variance in BatchNorm.
        for tensors in (dict(self.classifier.named_parameters()), *(rank["buffers"] for rank in ranks)):
            for name, tensor in tensors.items():
                if not tensor.isfinite().all():
                    raise Refusal(f"after {place(self.epoch, self.step)}: {name} is not finite; {self.remedy}")
        self.attempts[-1]["seconds"] = round(time.monotonic() - self.began, 3)
        return State(
            run=asdict(self.run),
            data_sha256=self.manifest["sha256"],
            code_sha256=self.code_sha256,
            epoch=self.epoch,
            step=self.step,
            model=self.classifier.state_dict(),
            optimizer=self.optimizer.state_dict(),
            scaler=self.stepper.scaler.state_dict(),
            ranks=ranks,
            history=self.history,
            seconds=self.seconds,
            attempts=self.attempts,
            checkpoints=self.checkpoints,
        )

    def train_epoch(self, stop: Stopping, saver: Saver, show: tqdm) -> bool:
        """Train to the end of the epoch; returns whether all have agreed to stop before.

        Raises:
            Refusal: on all ranks, if the loss or the gradient of any is not finite.
        """
        run, rank = self.run, self.process.rank
        begun = time.perf_counter() - self.seconds
        plan = batches.epoch_plan(len(self.labels), run.seed, self.epoch + 1, run.flip, run.shift, run.cutout, self.process.device)
        self.network.train()
        votes: deque[tuple[int, Vote]] = deque()
        for batch in plan.order.split(self.sizes)[self.step :]:
            mine = batches.share(batch, rank, run.world_size)
            pixels = batches.crop(self.padded, mine, plan)
            if run.cutout:
                pixels = batches.cut_out(pixels, mine, plan, run.cutout, self.mean_colour)
            lr = learning_rate(run, len(self.sizes), self.steps_done)
            sums, gradient = self.stepper.step(lr, pixels, self.labels[mine], len(batch))
            self.totals += sums
            self.step += 1
            show.update()
            votes.append((self.step, Vote(self.process, stop.reason is not None, saver.due, sums[0], gradient)))
            # A GPU is always one step ahead of the votes that are counted.
            stop_now, save_now = self.count(votes, 1 if pixels.is_cuda and self.step < len(self.sizes) else 0)
            if stop_now or save_now:
                # What is saved is known to be good.
                self.count(votes, 0)
                self.seconds = time.perf_counter() - begun
                if stop_now:
                    return True
                saver.save(self.own_part(), self.state)
        self.seconds = time.perf_counter() - begun
        return False

    def count(self, votes: deque[tuple[int, Vote]], left: int) -> tuple[bool, bool]:
        """Count all votes but so many of the last; returns whether to stop and whether to save."""
        stop, save = False, False
        while len(votes) > left:
            number, vote = votes.popleft()
            verdict = vote.verdict()
            stop, save = stop or verdict.stop, save or verdict.save
            for what, bad in (("loss", verdict.bad_loss), ("gradient", verdict.bad_gradient)):
                if bad is not None:
                    raise Refusal(f"epoch {self.epoch + 1}, step {number}: the {what} of rank {bad} is not finite; {self.remedy}")
        return stop, save

    def end_epoch(self) -> None:
        """Put together what the ranks have, and validate."""
        n = len(self.labels)
        start = time.perf_counter()
        loss, accuracy = (all_reduce(self.totals) / n).tolist()
        average_batchnorm(self.classifier, self.run.world_size)
        val_loss, val_accuracy = validate(self.classifier, *self.validation, self.process)
        # Finite weights can come to it: BatchNorm has other statistics in validation.
        if val_loss is not None and not math.isfinite(val_loss):
            raise Refusal(f"epoch {self.epoch + 1}: the validation loss is not finite; {self.remedy}")
        self.epoch, self.step = self.epoch + 1, 0
        seconds = self.seconds + time.perf_counter() - start
        rate = learning_rate(self.run, len(self.sizes), self.steps_done - 1)
        row = (self.epoch, self.steps_done, rate, loss, accuracy, val_loss, val_accuracy, n / self.seconds, seconds)
        self.history.append(dict(zip(HISTORY, row, strict=True)))
        self.totals.zero_()
        self.seconds = 0.0
