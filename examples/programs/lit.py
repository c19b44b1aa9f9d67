"""Lightning: the Trainer stops and continues through a callback of a few lines."""

import os

import lightning as L
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import digits
import launched

EPOCHS = 5


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = digits.network()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Workflow(L.Callback):
    """After every epoch: save, write a row, and stop if that is wanted."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: Digits) -> None:
        done = trainer.current_epoch + 1
        score = digits.accuracy(module.model, trainer.global_rank, trainer.world_size)
        trainer.save_checkpoint(launched.state / f"epoch={done}.ckpt")
        for old in launched.state.glob("epoch=*.ckpt"):
            if trainer.is_global_zero and int(old.stem[6:]) < done - 1:
                old.unlink()
        launched.row(epoch=done, accuracy=score)
        if trainer.is_global_zero:
            print(f"epoch {done}/{EPOCHS}: accuracy {score:.2%}", flush=True)
        if launched.stop_requested():
            launched.stop()


L.seed_everything(0)
loader = DataLoader(digits.load("train"), 32, shuffle=True, drop_last=True)
saved = sorted(launched.state.glob("epoch=*.ckpt"), key=lambda path: int(path.stem[6:]))
module = Digits()
trainer = L.Trainer(
    accelerator="cpu", strategy="ddp", max_epochs=EPOCHS, callbacks=[Workflow()], logger=False,
    num_nodes=int(os.environ["LAUNCH_NODES"]), devices=int(os.environ["LAUNCH_NPROC_PER_NODE"]),
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, loader, ckpt_path=saved[-1] if saved else None)
launched.result(accuracy=digits.accuracy(module.model, trainer.global_rank, trainer.world_size))
# Without it a rank sometimes aborted while Python shut down (measured with Lightning 2.6).
trainer.strategy.barrier()
torch.distributed.destroy_process_group()
