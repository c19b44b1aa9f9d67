"""One rank's training loop: model, data, progress, checkpoint and restore."""

import math
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from classifier.models.classifier import Classifier, build, images_sums, moments, some
from classifier.models.weights import warm_start, write
from classifier.pixels import batches
from classifier.pixels.shares import Shares, fits
from classifier.states import kept
from classifier.states.saver import Saver
from classifier.states.state import START_OVER, State, progress
from classifier.training.averaging import WeightAverage, warning
from classifier.training.choosing import freeze
from classifier.training.data import (
    class_weights,
    how,
    refuse_empty_class,
    refuse_unfit_data,
    tell_dependent,
)
from classifier.training.gradients import distributed, put_back
from classifier.training.limits import refuse_unfit_counts
from classifier.training.losses import Weights, batch_weights
from classifier.training.optimizers import learning_rate, load_optimizer_state, make_optimizer
from classifier.training.sizes import test_window
from classifier.training.splits import split_rows
from classifier.training.steps import (
    Stepper,
    average_batchnorm,
    is_statistic,
    random_state,
    seed_generators,
    set_random_state,
    share_buffers,
    validate,
)
from manynodes.base.errors import Refusal
from manynodes.data.folder import DataFolder, content_sha256
from manynodes.data.guard import Guard
from manynodes.data.staging import Staged, discard
from manynodes.experiment.config import Run
from manynodes.ranks.device import (
    Meter,
    most_memory,
    not_finite,
    numbers,
    on_cpu,
    on_cpu_at_once,
)
from manynodes.ranks.process_group import Process, all_reduce, everyone_is_here
from manynodes.ranks.stopping import Stopping
from manynodes.ranks.vote import Vote

# Bytes of neighbouring images that `order: blocks` reads in one piece.
BLOCK = 32_000_000
# Of fp16's gradients, which are scaled by 2^16 at first; the scale is halved at each step that they
# are not finite.
LEAST_SCALE = 2**-10


class Training:
    """One rank's part in the training of a run.

    Attributes:
        epoch, step, seconds, history, attempts, checkpoints: as in `State`.
        totals: sums over this rank's images of the epoch, see `steps.step`.
        sizes: of an epoch's global batches.
        shares: the images that this rank trains on.
        frozen: the layers that stay in evaluation mode.
        balanced: labels of the training images, if each class is drawn with equal chance.
        weights: in the loss, of the classes and of the training images.
        planned: by epoch, the plan that a thread makes during the epoch before.
        held_out: the validation images.
        per_rank: (ranks, 7), on the CPU, the same on all of them: mean seconds of a forward pass
            and of waiting for pixels in the last epoch, the most bytes on the GPU so far, and after
            the last epoch what `Meter.read` says of this attempt.
    """

    def __init__(
        self,
        run: Run,
        process: Process,
        data: DataFolder,
        staged: Staged,
        code_sha256: str,
        images_in: str = "auto",
        tell: Callable[[str], None] = print,
    ) -> None:
        self.run, self.process, self.data, self.code_sha256 = run, process, data, code_sha256
        refuse_unfit_data(run, data)
        if process.first:
            tell_dependent(run, data, tell)
        self.take_images(staged, images_in, tell)
        seed_generators(run.seed)
        self.classifier = self.new_classifier(tell)
        self.frozen = freeze(run, self.classifier.network)
        self.classifier.average_recent_steps(run.epochs * len(self.sizes) * run.micro_batches)
        self.classifier.move_to(process.device)
        self.shares.colour = batches.levels(self.classifier.mean, self.shares.images)
        self.network, gradients = distributed(run, self.classifier, self.first_batches())
        self.optimizer = make_optimizer(run, self.classifier)
        self.average = WeightAverage(run.ema, self.classifier)
        if line := warning(run.ema, run.epochs * len(self.sizes)):
            tell(line)
        self.stepper = Stepper(run, self.network, gradients, self.optimizer, process.device)
        # Dropout must not cover the same units on all ranks.
        if process.rank:
            seed_generators(run.seed + process.rank * 1_000_003)
        self.epoch, self.step, self.seconds = 0, 0, 0.0
        self.totals = torch.zeros(2, dtype=torch.float64, device=process.device)
        self.history: list[dict[str, Any]] = []
        self.attempts: list[dict[str, Any]] = []
        self.checkpoints: dict[int, str] = {}
        self.per_rank = torch.zeros(run.world_size, 7, dtype=torch.float64)
        self.attempt_began = time.monotonic()
        self.meter = Meter(process.device)
        # When the present epoch would have begun without interruptions; None between two epochs.
        self.epoch_began: float | None = None
        # A user's network may have buffers such as masks with infinities.
        self.never_finite = not_finite(dict(self.classifier.named_buffers()))

    def take_images(self, staged: Staged, images_in: str, tell: Callable[[str], None]) -> None:
        """Divide the training images into those that are trained on and those held out, with what
        is known of each.

        Raises:
            Refusal: the images have changed, or do not do for this run.
        """
        run, process, data = self.run, self.process, self.data
        here = data.at(Path(staged.path))
        # The other ranks of the node wait for the first one, and read what it has checked.
        self.guard = Guard(here, ["train_images.npy"] if process.local_rank == 0 else [])
        if process.local_rank == 0:
            here.refuse_changed("train")
        everyone_is_here()
        images, labels = here.split("train")
        groups, of_images = here.extra("groups"), here.extra("weights")
        held_in, held_out = split_rows(run, labels, groups)
        counts = len(held_in), len(held_out)
        refuse_unfit_counts(run, data.dataset, len(labels), counts, groups is not None)
        resident = images_in == "memory"
        if images_in == "auto":
            # All or none: the slowest sets the pace, and one checks what is mapped for its node.
            fitting = torch.tensor([float(fits(images, process.device))], device=process.device)
            resident = numbers(all_reduce(fitting)) == [run.world_size]
        self.shares = Shares(images, held_in, how(run, data), process.device, resident)
        everyone_is_here()
        # What is mapped stays readable when its name is gone.
        if process.local_rank == 0:
            discard(staged)
        self.labels, held_out_labels = (
            torch.from_numpy(labels[rows].astype(np.int64)).to(process.device)
            for rows in (held_in, held_out)
        )
        self.held_out = batches.Examples(
            self.shares.images, torch.from_numpy(held_out).to(self.shares.place), held_out_labels
        )
        refuse_empty_class(run, labels[held_in], data, tell)
        self.balanced = labels[held_in] if run.sampling == "balanced" else None
        self.weights = Weights(*(
            None if each is None else each.to(process.device)
            for each in (
                class_weights(run, labels[held_in], data),
                None if of_images is None else torch.from_numpy(of_images[held_in]),
            )
        ))  # fmt: skip
        self.sizes = batches.batch_sizes(len(self.labels), run.global_batch_size)
        self.planner = ThreadPoolExecutor(1, "plan")
        self.planned: dict[int, Future[batches.Epoch]] = {}

    def new_classifier(self, tell: Callable[[str], None]) -> Classifier:
        """The network, fitted to the training images or begun with other weights."""
        run, data = self.run, self.data
        stored, window = data.image_shape[:2], self.shares.how.window
        classifier = build(
            run.model,
            run.widths,
            data.classes,
            (*window, data.image_shape[2]),
            run.model_args,
            stored_size=stored if stored != window else None,
            test_size=self.test_size if self.test_size != stored else None,
            class_names=data.manifest["class_names"] if data.manifest["settings"] else None,
            dtype=data.manifest["dtype"],
            jpeg_scaling=data.manifest["settings"].get("jpeg_scaling", False),
        )
        mean, std = moments(on_cpu(self.sums_of_images()), self.shares.images[:1])
        count = min(len(self.labels), some(self.shares.images))
        # A user's arrays may be sorted by class.
        last = len(self.labels) - 1 if data.manifest["settings"] else count - 1
        first = self.shares.take(torch.linspace(0, last, count).round().long())
        classifier.fit(mean, std, on_cpu(first))
        if run.initial_weights:
            warm_start(classifier, Path(run.initial_weights), tell)
        return classifier

    def first_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Images (n, h, w, c) and labels (n,) of each size that is compiled, or of one small size.

        The same number on every rank: otherwise some ranks would wait for others in a collective.
        """
        run, rank, parts = self.run, self.process.rank, self.run.micro_batches
        sizes = sorted(set(self.sizes)) if run.compile != "none" else [2 * run.world_size * parts]
        of_rank = [batches.share(torch.arange(n), rank, run.world_size) for n in sizes]
        # The first part of a share is the largest, the last one the smallest.
        shares = [
            len(batches.share(rows, part, parts)) for rows in of_rank for part in {0, parts - 1}
        ]
        return [(self.shares.take(torch.arange(share)), self.labels[:share]) for share in shares]

    @property
    def test_size(self) -> tuple[int, int]:
        """Height and width of the middle of an image that validation and test see."""
        return test_window(self.run, *self.data.image_shape[:2])

    def sums_of_images(self) -> Tensor:
        """See `images_sums`: of all training images, each rank adding up a part of them."""
        images, rows = self.shares.images, self.shares.rows
        uint8 = images.dtype == torch.uint8
        channels = images.shape[3]
        total = torch.zeros(
            *((channels, 256) if uint8 else (len(rows), channels, 2)),
            dtype=torch.int64 if uint8 else torch.float64,
            device=self.process.device,
        )
        mine = batches.share(torch.arange(len(rows)), self.process.rank, self.process.world_size)
        for part in mine.split(batches.images_per_pass(images, "cpu")):
            found = images_sums(images[rows[part.to(rows.device)]]).to(total.device)
            if uint8:
                total += found
            else:
                total[part.to(total.device)] = found
        # Of float images each sum is one rank's alone, so nothing is rounded.
        return all_reduce(total)

    @property
    def finished(self) -> bool:
        return kept.finished(self.run.values, self.history)

    @property
    def steps_done(self) -> int:
        return self.epoch * len(self.sizes) + self.step

    @property
    def remedy(self) -> str:
        """For numbers that are not finite."""
        lower = f"use a lower learning_rate than {self.run.learning_rate} or a longer warmup"
        return f"{lower}; the last good state is kept"

    def restore(self, state: State) -> None:
        """Continue from a state.

        Raises:
            Refusal: its tensors do not fit this network.
        """
        try:
            self.load(state)
        except torch.OutOfMemoryError:
            raise
        except (
            RuntimeError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
        ) as error:
            raise Refusal(
                f"the state after {progress(state.epoch, state.step)} does not fit the network "
                f"({error}); {START_OVER}"
            ) from None

    def load(self, state: State) -> None:
        # A stop after the last step of an epoch leaves a state with all steps, before the end of
        # the epoch.
        if state.step > len(self.sizes) or any(tuple(row) != kept.METRICS for row in state.history):
            raise ValueError("its steps or its history do not fit")
        self.classifier.load_state_dict(state.model)
        self.average.load(state.averages)
        load_optimizer_state(self.optimizer, state.optimizer)
        self.stepper.scaler.load_state_dict(state.scaler)
        self.epoch, self.step, self.seconds = state.epoch, state.step, state.seconds
        self.history, self.attempts, self.checkpoints = (
            state.history,
            state.attempts,
            state.checkpoints,
        )
        if len(state.ranks) == self.run.world_size:
            own = state.ranks[self.process.rank]
            for buffer_name, buffer in self.classifier.named_buffers():
                put_back(buffer, own["buffers"][buffer_name])
            self.totals.copy_(own["totals"])
            set_random_state(own["rng"], self.process.device)
            return
        # Of another number of processes: what lies ahead is divided among these.
        for buffer_name, buffer in self.classifier.named_buffers():
            there = [rank["buffers"][buffer_name] for rank in state.ranks]
            if is_statistic(buffer_name):
                buffer.copy_(torch.stack([each.double() for each in there]).mean(0))
            elif buffer_name not in state.model:
                put_back(buffer, there[0])
        # In equal parts, as `live` takes them.
        self.totals.copy_(sum(rank["totals"] for rank in state.ranks) / self.run.world_size)

    def images_touched(self) -> str:
        """As `images_changed`, from the times of the file."""
        return "" if self.shares.mapped is None else self.guard.changed()

    def images_changed(self) -> str:
        """Whether this node's copy of the training images has changed since it was checked: then a
        line that says so. In memory they cannot, and one process of a node checks for all.
        """
        mapped = self.shares.mapped
        if mapped is None or self.process.local_rank:
            return ""
        if content_sha256(mapped) == self.data.manifest["content_sha256"]["train_images"]:
            return ""
        return f"{self.guard.copy.path}/train_images.npy on {socket.gethostname()}"

    def rank_state(self) -> dict[str, Any]:
        """This rank's part of a state, see `State.ranks`, on the CPU."""
        parts = {"buffers": dict(self.classifier.named_buffers()), "totals": self.totals}
        return on_cpu_at_once(parts) | {"rng": random_state(self.process.device)}

    def state(self, ranks: list[dict[str, Any]]) -> State:
        """The state of the whole training, from the parts of all ranks.

        Raises:
            Refusal: a number in it is not finite.
        """
        # A step with finite loss and gradient can still leave a weight, or a BatchNorm variance,
        # that is not finite.
        for tensors in (
            dict(self.classifier.named_parameters()),
            *(rank["buffers"] for rank in ranks),
        ):
            checked = {
                name: each for name, each in tensors.items() if name not in self.never_finite
            }
            if bad := not_finite(checked):
                where = progress(self.epoch, self.step)
                raise Refusal(f"after {where}: {bad[0]} is not finite; {self.remedy}")
        self.attempts[-1]["seconds"] = round(time.monotonic() - self.attempt_began, 3)
        tensors = on_cpu_at_once(
            {
                "model": self.classifier.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "averages": self.average.averages,
            }
        )
        return State(
            run=self.run.values,
            data_sha256=self.data.sha256,
            code_sha256=self.code_sha256,
            epoch=self.epoch,
            step=self.step,
            **tensors,
            scaler=self.stepper.scaler.state_dict(),
            ranks=ranks,
            history=list(self.history),
            seconds=self.seconds,
            attempts=[dict(attempt) for attempt in self.attempts],
            checkpoints=self.checkpoints,
        )

    def save_weights(self, path: Path) -> None:
        """Write the weights for evaluation, with `ema` the averages."""
        with self.average.used():
            tensors = on_cpu_at_once(self.classifier.state_dict())
        write(tensors, self.classifier.description, path)

    def plan(self, epoch: int) -> batches.Epoch:
        """The order and the augmentation of an epoch's images, where the images are."""
        block = None
        if self.run.order == "blocks":
            block = max(1, BLOCK // math.prod(self.shares.images.shape[1:]))
        return batches.epoch_plan(
            len(self.labels),
            self.run.seed,
            epoch,
            self.shares.how,
            self.shares.place,
            block,
            self.balanced,
        )

    def take_plan(self, epoch: int) -> batches.Epoch:
        """The plan of an epoch, and the next one's is begun: a GPU would have nothing to do while
        it is made between two epochs.
        """
        plan = (self.planned.pop(epoch, None) or self.planner.submit(self.plan, epoch)).result()
        if epoch < self.run.epochs:
            self.planned = {epoch + 1: self.planner.submit(self.plan, epoch + 1)}
        return plan

    def train_epoch(self, stop: Stopping, saver: Saver, show: tqdm) -> str | None:
        """Train to the end of the epoch.

        Returns:
            Why all ranks agreed to stop before it, see `Verdict`; None if they did not.

        Raises:
            Refusal: on all ranks, if a loss or a gradient is not finite.
        """
        run, rank = self.run, self.process.rank
        began = self.epoch_began = time.perf_counter() - self.seconds
        plan = self.take_plan(self.epoch + 1)
        labels, weights = self.labels, self.weights
        if plan.drawn is not None:
            drawn = plan.drawn.to(labels.device)
            labels = labels[drawn]
            if weights.images is not None:
                weights = weights._replace(images=weights.images[drawn])
        self.network.train()
        for layer in self.frozen:
            layer.eval()
        votes: deque[tuple[int, Vote]] = deque()
        steps = plan.order.split(self.sizes)[self.step :]
        mixes = [
            batches.mix_of(run.seed, self.epoch + 1, step, self.shares.how)
            for step in range(self.step, len(self.sizes))
        ]
        parts = [
            batches.share(batch, rank, run.world_size, before=mix is not None)
            for batch, mix in zip(steps, mixes, strict=True)
        ]
        batches_of = self.stepper.clock.inputs(self.shares.of_epoch(plan, parts, mixes))
        weights_of = batch_weights(weights, labels, steps, parts)
        for batch, (mine, pixels), of_part, mix in zip(
            steps, batches_of, weights_of, mixes, strict=True
        ):
            named, of_part, kept = mixed(labels[mine], of_part, mix)
            lr = learning_rate(run, len(self.sizes), self.steps_done)
            sums, gradient = self.stepper.step(lr, pixels, named, len(batch), of_part, kept)
            self.average.update()
            self.totals += sums
            self.step += 1
            self.meter.look()
            show.update()
            votes.append((self.step, Vote(self.process, stop.reason, saver.due, sums[0], gradient)))
            # On a GPU the votes are counted one step late.
            reason, save_now = self.count(
                votes, 1 if pixels.is_cuda and self.step < len(self.sizes) else 0
            )
            if reason or save_now:
                # Count the last votes, so that only good numbers are saved.
                self.count(votes, 0)
                self.seconds = time.perf_counter() - began
                if reason:
                    return reason
                saver.save(self.rank_state(), self.state)
        self.seconds, self.epoch_began = time.perf_counter() - began, None
        return None

    def live(self) -> dict[str, Any]:
        """How far the training is, see workflow/schemas/live.schema.yaml. From another thread."""
        step, began = self.step, self.epoch_began
        found: dict[str, Any] = {"epoch": self.epoch, "step": step, "steps": len(self.sizes)}
        if step and began:
            images = sum(self.sizes[:step])
            found["images_per_second"] = round(images / (time.perf_counter() - began), 1)
            # On a GPU this would wait for all ranks, and the owner's record would go stale.
            if not self.totals.is_cuda:
                loss = float(self.totals[0]) * self.run.world_size / images
                found |= {"loss": round(loss, 4)} if math.isfinite(loss) else {}
        return found

    def count(self, votes: deque[tuple[int, Vote]], left: int) -> tuple[str | None, bool]:
        """Count all votes but the last `left`; returns why to stop, if so, and whether to save."""
        stop, save = None, False
        while len(votes) > left:
            number, vote = votes.popleft()
            verdict = vote.verdict()
            stop, save = stop or verdict.stop, save or verdict.save
            for what, bad in (("loss", verdict.bad_loss), ("gradient", verdict.bad_gradient)):
                if bad is not None:
                    raise Refusal(
                        f"epoch {self.epoch + 1}, step {number}: the {what} of rank {bad} is not "
                        f"finite; {self.remedy}"
                    )
        return stop, save

    def end_epoch(self) -> None:
        """Combine the results of the ranks, and validate."""
        n = len(self.labels)
        start = time.perf_counter()
        loss, accuracy = numbers(all_reduce(self.totals) / n)
        average_batchnorm(self.classifier, self.run.world_size)
        share_buffers(self.classifier, self.process)
        with self.average.used():
            val_loss, val_accuracy = validate(
                self.classifier, self.held_out, self.test_size, self.process
            )
        # This is possible with finite weights: BatchNorm uses other statistics in validation.
        if val_loss is not None and not math.isfinite(val_loss):
            raise Refusal(
                f"epoch {self.epoch + 1}: the validation loss is not finite; {self.remedy}"
            )
        scaler = self.stepper.scaler
        if scaler.is_enabled() and scaler.get_scale() < LEAST_SCALE:
            raise Refusal(
                f"epoch {self.epoch + 1}: fp16 finds no scale at which the gradients are finite; "
                f"{self.remedy}"
            )
        self.epoch, self.step = self.epoch + 1, 0
        seconds = self.seconds + time.perf_counter() - start
        rate = learning_rate(self.run, len(self.sizes), self.steps_done - 1)
        row = (
            self.epoch,
            self.steps_done,
            rate,
            loss,
            accuracy,
            val_loss,
            val_accuracy,
            n / self.seconds,
            seconds,
        )
        self.history.append(dict(zip(kept.METRICS, row, strict=True)))
        self.totals.zero_()
        self.seconds = 0.0
        device = self.process.device
        counted = self.meter.read() if self.finished else (0.0,) * 4
        here = (*self.stepper.clock.per_step(), most_memory(device), *counted)
        rows = torch.zeros(self.run.world_size, len(here), dtype=torch.float64, device=device)
        rows[self.process.rank] = torch.tensor(here, dtype=torch.float64)
        self.per_rank = on_cpu(all_reduce(rows))
        self.stepper.clock.reset()


def mixed(
    labels: Tensor, weights: Weights, mix: batches.Mix | None
) -> tuple[Tensor, Weights, float]:
    """The labels of a rank's part of a batch, (b,) or of mixed images (b, 2), their weights, and
    the share of each image that stays.

    Args:
        labels: (b,); before images are mixed (b + 1,), see `batches.mixed_labels`.
        weights: of these images.
    """
    if mix is None:
        return labels, weights, 1.0
    if weights.images is not None:
        weights = weights._replace(images=batches.mixed_labels(weights.images))
    return batches.mixed_labels(labels), weights, mix.kept
